"""Values of every kind that case M9 names, and what it means for two of them to be equal.

One list for all tests of the codec: a kind added here is tried by every operation.
"""

from __future__ import annotations

import array
import collections
import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse

COUNT = 30_000
GRID = np.arange(120_000, dtype=np.float64).reshape(300, 400)


class Labelled(np.ndarray[Any, Any]):
    """A subclass of numpy's array that leaves pickling alone."""


class Keeping(np.ndarray[Any, Any]):
    """A subclass that pickles an attribute of its own, as numpy's documentation shows it."""

    unit: str = ""

    def __array_finalize__(self, obj: Any) -> None:
        self.unit = getattr(obj, "unit", "")

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        function, arguments, state = reduced
        return function, arguments, (*state, self.unit)

    def __setstate__(self, state: Any) -> None:
        self.unit = state[-1]
        super().__setstate__(state[:-1])


def frozen(value: Any) -> Any:
    value.flags.writeable = False
    return value


def _keeping() -> Any:
    made = np.arange(COUNT * 1.0).view(Keeping)
    made.unit = "eV"
    return made


def _masked(hard: bool) -> Any:
    made: Any = np.ma.masked_array(np.arange(COUNT), mask=np.arange(COUNT) % 3 == 0, fill_value=-5)
    if hard:
        made.harden_mask()
    return made


def _recarray() -> Any:
    columns: list[Any] = [np.arange(COUNT), np.linspace(0, 1, COUNT), np.full(COUNT, "ab")]
    made: Any = np.rec
    return made.fromarrays(columns, names="a,b,c")


def _structured() -> Any:
    kind = np.dtype(
        [("x", "<i4"), ("y", "<f8", (2, 2)), ("z", "S5"), ("t", "M8[ns]"), ("n", [("m", "u1")])],
        align=True,
    )
    made: Any = np.zeros(COUNT // 4, dtype=kind)
    made["x"] = np.arange(made.size)
    made["y"][:, 1, 0] = 7
    return made


def _objects() -> Any:
    made = np.empty((2, 2), dtype=object)
    made[0, 0] = np.arange(COUNT)
    made[0, 1] = {"k": np.ones(COUNT)}
    made[1, 1] = made[0, 0]
    return made


def _structured_with_objects() -> Any:
    made = np.zeros(3, dtype=[("a", "O"), ("b", "f8")])
    made["a"][1] = np.arange(COUNT)
    return made


def unsorted_csc() -> Any:
    indices = np.tile(np.array([5, 1, 9, 3], dtype=np.int32), COUNT // 4)
    indptr = np.arange(0, COUNT + 1, 4, dtype=np.int32)
    return scipy.sparse.csc_matrix(
        (np.arange(COUNT, dtype=float), indices, indptr), shape=(10, COUNT // 4)
    )


def frame() -> Any:
    rows = 10_000
    return pd.DataFrame(
        {
            "i": np.arange(rows),
            "f": np.linspace(0, 1, rows),
            "g": np.linspace(1, 2, rows),
            "b": np.arange(rows) % 2 == 0,
            "t": pd.date_range("2020-01-01", periods=rows, freq="min"),
            "d": pd.to_timedelta(np.arange(rows), unit="s"),
            "c": pd.Categorical(["x", "y"] * (rows // 2)),
            "s": pd.array(["αβ", None] * (rows // 2), dtype="string"),
            "text": ["q"] * rows,
            "o": [(k,) for k in range(rows)],
            "n": pd.array([1, None] * (rows // 2), dtype="Int64"),
            "z": pd.date_range("2020-01-01", periods=rows, freq="min", tz="Europe/Berlin"),
        },
        index=pd.Index(np.arange(rows) * 2, name="idx"),
    )


def _windows(source: Any, width: int) -> Any:
    return np.lib.stride_tricks.sliding_window_view(source, width)


ARRAYS: dict[str, Callable[[], Any]] = {
    "floats": lambda: GRID.copy(),
    "datetime64": lambda: np.datetime64("2024-01-01") + np.arange(COUNT),
    "timedelta64 backwards": lambda: np.arange(COUNT).astype("timedelta64[us]")[::-1],
    "masked": lambda: _masked(False),
    "masked hard": lambda: _masked(True),
    "masked without a mask": lambda: np.ma.masked_array(np.arange(COUNT)),
    "masked transposed": lambda: np.ma.masked_array(GRID.T, mask=GRID.T % 7 == 0),
    "recarray": _recarray,
    "structured": _structured,
    "structured field": lambda: _structured()["y"],
    "structured fields": lambda: _structured()[["x", "z"]],
    "matrix": lambda: np.matrix(np.arange(COUNT * 1.0).reshape(3, -1)),
    "matrix transposed": lambda: np.matrix(np.arange(COUNT * 1.0).reshape(3, -1)).T,
    "subclass": lambda: GRID.copy().view(Labelled),
    "subclass transposed": lambda: GRID.T.view(Labelled),
    "subclass with its own reduction": _keeping,
    "strided": lambda: GRID[::3, ::2],
    "strided backwards": lambda: GRID[::-3, ::-2],
    "transposed": lambda: GRID.T,
    "negative stride": lambda: GRID[::-1],
    "negative strides": lambda: GRID[::-1, ::-1],
    "fortran": lambda: np.asfortranarray(GRID),
    "fortran strided": lambda: np.asfortranarray(GRID)[::2],
    "permuted": lambda: GRID.reshape(30, 10, 400).transpose(2, 0, 1),
    "permuted backwards": lambda: GRID.reshape(30, 10, 400).transpose(2, 0, 1)[:, ::-1],
    "permuted with gaps": lambda: GRID.reshape(30, 10, 400).transpose(2, 0, 1)[::2],
    "broadcast": lambda: np.broadcast_to(np.arange(300.0), (1000, 300)),
    "broadcast scalar": lambda: np.broadcast_to(np.float32(2), (1000, 300)),
    "broadcast inside": lambda: np.broadcast_to(np.arange(300.0)[::2, None], (3, 150, 50)),
    "broadcast dates": lambda: np.broadcast_to(np.arange(9).astype("M8[s]"), (1000, 9)),
    "windows": lambda: _windows(np.arange(20_000.0), 30),
    "windows backwards": lambda: _windows(np.arange(20_000.0), 30)[::-1],
    "windows of every second": lambda: _windows(np.arange(20_000)[::2], 30),
    "windows of dates": lambda: _windows(np.arange(20_000).astype("M8[s]"), 30),
    "big endian": lambda: np.arange(COUNT, dtype=">f8"),
    "float16": lambda: np.arange(COUNT, dtype=np.float16),
    "long double": lambda: np.arange(COUNT, dtype=np.longdouble),
    "complex": lambda: np.arange(COUNT) * 1j,
    "bool": lambda: np.arange(COUNT) % 7 == 0,
    "fixed text": lambda: np.array(["αβγ", "δ"] * COUNT),
    "fixed bytes": lambda: np.array([b"abc", b"d"] * COUNT)[::2],
    "void": lambda: np.zeros(COUNT, dtype="V16"),
    "any text": lambda: np.array(["a" * 100, "δ", ""] * 2000, dtype=np.dtypes.StringDType()),
    "zero dimensions": lambda: np.array(3.5),
    "zero dimensions of date": lambda: np.array("2024-01-01", dtype="M8[D]"),
    "empty": lambda: np.empty((0, 5), dtype=np.int16),
    "empty fortran": lambda: np.empty((3, 0, 5), order="F"),
    "empty items": lambda: np.empty(5, dtype="V0"),
    "empty strided": lambda: GRID[:0, ::2],
    "one element of many": lambda: GRID[5:6, 7:8],
    "a column": lambda: GRID[:, 3],
    "contiguous view": lambda: GRID[10:250],
    "read-only": lambda: frozen(np.arange(COUNT)),
    "read-only dates": lambda: frozen(np.arange(COUNT).astype("M8[s]")),
    "read-only strided": lambda: frozen(GRID[::2, ::2]),
    "objects": _objects,
    "objects transposed": lambda: _objects().T,
    "structured with objects": _structured_with_objects,
}

OTHERS: dict[str, Callable[[], Any]] = {
    "float32": lambda: np.float32(1.25),
    "datetime scalar": lambda: np.datetime64("2024-05-06T07:08", "m"),
    "void scalar": lambda: _structured()[3],
    "csc unsorted": unsorted_csc,
    "csr": lambda: unsorted_csc().tocsr(),
    "frame": frame,
    "series": lambda: frame()["t"],
    "multi index": lambda: frame().set_index(["c", "i"]).index,
    "array.array": lambda: array.array("d", range(COUNT)),
    "array.array empty": lambda: array.array("i"),
    "bytes small": lambda: b"abc" * 100,
    "bytes": lambda: bytes(range(256)) * 1000,
    "bytes in a tuple": lambda: (b"x" * 65_536, b"y" * 65_535),
    "bytearray small": lambda: bytearray(b"abc"),
    "bytearray": lambda: bytearray(range(256)) * 1000,
    "text": lambda: "text" * 50_000,
    "text with accents": lambda: "é" * 70_000,
    "text with surrogates": lambda: "\ud800" * 70_000,
    "text, bytes, text": lambda: ["a" * 70_000, b"b" * 70_000, "ü" * 70_000, bytearray(70_000)],
    "plain": lambda: [None, True, 10**40, 1.5, 2 + 3j, {"a": [1, (2, {3, 4})]}, range(5), ...],
    "collections": lambda: [collections.Counter("hello"), collections.deque([1, 2], maxlen=5)],
    "date": lambda: datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "many small": lambda: [{"k": str(k), "v": (k, -k)} for k in range(20_000)],
    "types": lambda: [int, len, np.float64, np.add, datetime.date.today, type(None)],
}

VALUES = ARRAYS | OTHERS


def assert_equal(a: Any, b: Any) -> None:
    """Compare value, memory form and exact type."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.dtype.type is b.dtype.type
        assert a.shape == b.shape
        assert a.flags.writeable == b.flags.writeable
        assert a.flags.c_contiguous == b.flags.c_contiguous or b.flags.forc
        assert a.flags.f_contiguous == b.flags.f_contiguous or b.flags.forc
        # Axes keep their order and direction in memory, whatever gaps are closed.
        for x, y in zip(a.strides, b.strides, strict=True):
            assert (x > 0) - (x < 0) == (y > 0) - (y < 0) or a.dtype.hasobject or not a.size
        if isinstance(a, np.ma.MaskedArray):
            assert (a.mask is np.ma.nomask) == (b.mask is np.ma.nomask)
            np.testing.assert_array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
            np.testing.assert_array_equal(a.data, b.data)
            assert a.fill_value == b.fill_value
            assert a.hardmask == b.hardmask
        elif a.dtype.hasobject and a.dtype.names is None and a.dtype.kind == "O":
            for x, y in zip(a.flat, b.flat, strict=True):
                assert_equal(x, y)
        elif a.dtype.hasobject and a.dtype.names is not None:
            for name in a.dtype.names:
                assert_equal(a[name].copy(), b[name].copy())
        else:
            np.testing.assert_array_equal(a, b)
        if isinstance(a, Keeping):
            assert a.unit == b.unit
    elif scipy.sparse.issparse(a):
        assert a.shape == b.shape
        assert a.has_sorted_indices == b.has_sorted_indices
        for name in ("data", "indices", "indptr"):
            assert_equal(getattr(a, name), getattr(b, name))
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b)
    elif isinstance(a, pd.Series):
        pd.testing.assert_series_equal(a, b)
    elif isinstance(a, pd.Index):
        pd.testing.assert_index_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b
