"""M9: every kind of array and container arrives equal in value, form and exact type."""

from __future__ import annotations

import array as array_module
import collections
import datetime
import decimal
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

LARGE = 60_000
"""Elements: large enough to leave the pickle stream."""


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def _masked() -> Any:
    return np.ma.masked_array(
        np.arange(LARGE, dtype=float), mask=np.arange(LARGE) % 3 == 0, fill_value=-5
    )


def _recarray() -> Any:
    made = np.empty(LARGE, dtype=[("a", "i8"), ("b", "f8"), ("c", "U2")])
    made["a"], made["b"], made["c"] = np.arange(LARGE), np.linspace(0, 1, LARGE), "ab"
    return made.view(np.recarray)


def _structured() -> Any:
    kind = np.dtype([("x", "<i4"), ("y", "<f8", (2, 2)), ("z", "S5")], align=True)
    made = np.zeros(LARGE // 4, dtype=kind)
    made["x"] = np.arange(made.size)
    made["y"][:, 1, 0] = 7
    return made


def _objects() -> Any:
    made = np.empty(3, dtype=object)
    made[:] = [np.arange(LARGE), {"k": np.ones(LARGE)}, None]
    return made


def _unsorted_csc() -> Any:
    indices = np.tile(np.array([5, 1, 9, 3], dtype=np.int32), LARGE // 4)
    indptr = np.arange(0, LARGE + 1, 4, dtype=np.int32)
    return scipy.sparse.csc_matrix(
        (np.arange(LARGE, dtype=float), indices, indptr), shape=(10, LARGE // 4)
    )


def _frame() -> Any:
    rows = 20_000
    return pd.DataFrame(
        {
            "i": np.arange(rows),
            "f": np.linspace(0, 1, rows),
            "f2": np.linspace(1, 2, rows),
            "b": np.arange(rows) % 2 == 0,
            "t": pd.date_range("2020-01-01", periods=rows, freq="min"),
            "d": pd.to_timedelta(np.arange(rows), unit="s"),
            "c": pd.Categorical(["x", "y"] * (rows // 2)),
            "s": pd.array(["αβ", None] * (rows // 2), dtype="string"),
            "o": [(k,) for k in range(rows)],
            "n": pd.array([1, None] * (rows // 2), dtype="Int64"),
            "z": pd.date_range("2020-01-01", periods=rows, freq="min", tz="Europe/Berlin"),
        },
        index=pd.Index(np.arange(rows) * 2, name="idx"),
    )


_GRID = np.arange(LARGE * 4, dtype=np.float64).reshape(400, -1)

NUMPY: dict[str, Callable[[], Any]] = {
    "datetime64": lambda: np.datetime64("2024-01-01") + np.arange(LARGE),
    "timedelta64": lambda: np.arange(LARGE).astype("timedelta64[us]"),
    "masked": _masked,
    "masked without a mask": lambda: np.ma.masked_array(np.arange(LARGE)),
    "recarray": _recarray,
    "structured": _structured,
    "matrix": lambda: np.matrix(np.arange(LARGE * 1.0).reshape(3, -1)),
    "strided": lambda: _GRID[::3, ::2],
    "transposed": lambda: _GRID.T,
    "negative stride": lambda: _GRID[::-1],
    "negative stride both": lambda: _GRID[::-1, ::-2],
    "fortran": lambda: np.asfortranarray(_GRID),
    "three dimensions permuted": lambda: _GRID.reshape(40, 10, -1).transpose(2, 0, 1),
    "big endian": lambda: np.arange(LARGE, dtype=">f8"),
    "float16": lambda: np.arange(LARGE, dtype=np.float16),
    "complex": lambda: np.arange(LARGE) * 1j,
    "bool": lambda: np.arange(LARGE * 10) % 7 == 0,
    "fixed text": lambda: np.array(["αβγ", "δ"] * LARGE),
    "fixed bytes": lambda: np.array([b"abc", b"d"] * LARGE),
    "void": lambda: np.zeros(LARGE, dtype="V16"),
    "zero dimensions": lambda: np.array(3.5),
    "empty": lambda: np.empty((0, 5), dtype=np.int16),
    "scalar": lambda: np.float32(1.25),
    "datetime scalar": lambda: np.datetime64("2024-05-06T07:08", "m"),
    "one element of a large one": lambda: _GRID[5:6, 7:8],
    "a column": lambda: _GRID[:, 3],
    "a contiguous view": lambda: _GRID[10:300],
    "read-only": lambda: _frozen(np.arange(LARGE)),
}


def _frozen(value: Any) -> Any:
    value.flags.writeable = False
    return value


def identity(value: Any) -> Any:
    return value


def describe(value: Any) -> dict[str, Any]:
    """What `equal` means, as seen where the value is."""
    found: dict[str, Any] = {"type": f"{type(value).__module__}.{type(value).__qualname__}"}
    if isinstance(value, np.ndarray):
        found |= {
            "dtype": value.dtype.descr if value.dtype.names else value.dtype.str,
            "shape": value.shape,
            "C": value.flags.c_contiguous,
            "F": value.flags.f_contiguous,
            "writeable": value.flags.writeable,
            "aligned": value.flags.aligned,
        }
    return found


def equal(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ma.MaskedArray):
        np.testing.assert_array_equal(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
        np.testing.assert_array_equal(a.data, b.data)
        assert a.fill_value == b.fill_value
        assert a.dtype == b.dtype
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        # of a view that skips elements only the elements travel
        if (a.flags.c_contiguous or a.flags.f_contiguous) and 1 not in a.shape:
            assert a.flags.c_contiguous == b.flags.c_contiguous
            assert a.flags.f_contiguous == b.flags.f_contiguous
        if a.dtype.hasobject:
            for x, y in zip(a.flat, b.flat, strict=True):
                equal(x, y)
        else:
            np.testing.assert_array_equal(a, b)
    elif scipy.sparse.issparse(a):
        assert a.shape == b.shape
        for name in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert a.has_sorted_indices == b.has_sorted_indices
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            equal(x, y)
    else:
        assert a == b


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", NUMPY)
def test_numpy(cluster: Any, name: str) -> None:
    original = NUMPY[name]()
    back = cluster[2].call(identity, original)
    equal(original, back)
    there = cluster[2].call(describe, original)
    here = describe(original)
    # a read-only array may be written where it arrived: it is that receiver's own
    here.pop("writeable", None)
    there.pop("writeable", None)
    if 1 in getattr(original, "shape", ()) or "stride" in name or name == "a column":
        # strides that skip elements are not kept: only the elements travel
        for key in ("C", "F"):
            here.pop(key)
            there.pop(key)
    assert there == here
    if isinstance(back, np.ndarray) and back.size and not isinstance(back, np.ma.MaskedArray):
        assert back.flags.aligned


def test_a_strided_view_moves_only_its_elements(cluster: Any) -> None:
    view = _GRID[::4, ::4]
    with cluster.ledger.watch() as watch:
        equal(np.ascontiguousarray(view), np.ascontiguousarray(cluster[2].call(identity, view)))
    assert watch.total("moved", medium="memory") <= 2.2 * view.nbytes


def test_broadcast_and_windows_stay_small(cluster: Any) -> None:
    broad = np.broadcast_to(np.arange(1000.0), (5000, 1000))
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(100_000.0), 500)
    with cluster.ledger.watch() as watch:
        assert cluster[2].call(lambda a: (a.shape, float(a[4999, 7])), broad) == ((5000, 1000), 7.0)
        assert cluster[2].call(lambda a: (a.shape, float(a[99_000, 499])), windows) == (
            (99_501, 500),
            99_499.0,
        )
        back = cluster[2].call(identity, broad)
    np.testing.assert_array_equal(back, broad)
    assert watch.total("moved") < 2_000_000


@pytest.mark.parametrize(
    "make",
    [_objects, _unsorted_csc, _frame, lambda: scipy.sparse.coo_array(np.eye(50))],
    ids=["object array", "unsorted csc", "frame", "coo_array"],
)
def test_containers_of_large_arrays(cluster: Any, make: Callable[[], Any]) -> None:
    original = make()
    back = cluster[2].call(identity, original)
    if scipy.sparse.issparse(original) and original.format == "coo":
        np.testing.assert_array_equal(original.toarray(), back.toarray())
    else:
        equal(original, back)


def test_large_buffers_of_containers_leave_the_stream(cluster: Any) -> None:
    for original, size in ((_objects(), 2 * 8 * LARGE), (_unsorted_csc(), 12 * LARGE)):
        with cluster.ledger.watch() as watch:
            cluster[2].call(type, original)
        assert watch.total("moved", medium="memory") >= size
        assert watch.total("moved", medium="unix") < 50_000


@pytest.mark.parametrize("size", [0, 1, 5_000, 70_000, 2_000_000])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes(cluster: Any, kind: Any, size: int) -> None:
    original = kind(bytes(range(256)) * (size // 256 + 1))[:size]
    back = cluster[2].call(identity, original)
    assert type(back) is kind
    assert back == original


def test_large_bytes_travel_as_blobs_and_a_bytearray_says_copied(cluster: Any) -> None:
    big = bytes(2_000_000)
    with cluster.ledger.watch() as watch:
        cluster[2].call(len, big)
        cluster[2].call(len, big)
    assert watch.total("moved", medium="unix") < 50_000
    assert watch.total("moved", medium="memory") < 2_100_000
    with cluster.ledger.watch() as watch:
        cluster[2].call(len, bytearray(2_000_000))
    assert any(record.note.startswith("copied") for record in watch.records())


def test_a_bytearray_is_the_receiver_s_own(cluster: Any) -> None:
    original = bytearray(b"x" * 100_000)

    def change(value: bytearray) -> bytearray:
        value[0] = 0
        value.extend(b"more")
        return value

    changed = cluster[2].call(change, original)
    assert original[0] == ord("x")
    assert changed[0] == 0
    assert len(changed) == 100_004


PLAIN: list[Any] = [
    None,
    True,
    10**40,
    1.5,
    float("inf"),
    2 + 3j,
    "text" * 50_000,
    {"a": [1, (2, {3, 4})], "b": frozenset([5])},
    collections.OrderedDict(b=1, a=2),
    collections.Counter("hello"),
    collections.deque([1, 2], maxlen=5),
    datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    range(5),
    slice(1, 2, 3),
    Ellipsis,
    int,
    len,
    array_module.array("d", [1.0] * 20_000),
    [np.arange(10), "x"] * 3,
    list(range(100_000)),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(cluster: Any, value: Any) -> None:
    equal(value, cluster[2].call(identity, value))


def test_identity_within_one_call(cluster: Any) -> None:
    one = np.ones(LARGE)
    shared: list[Any] = [1]

    def look(a: Any, b: Any, c: Any) -> tuple[bool, bool, bool]:
        return a[0] is b, a[1] is c["s"], c["me"] is c

    loop: dict[str, Any] = {"s": shared}
    loop["me"] = loop
    assert cluster[2].call(look, [one, shared], one, loop) == (True, True, True)


def test_a_memoryview_is_a_clear_error(cluster: Any) -> None:
    with pytest.raises(Exception, match="memoryview"):
        cluster[2].call(len, memoryview(b"x" * 10_000))


@pytest.mark.timeout(300)
def test_beyond_two_gigabytes(clusters: Any) -> None:
    """A size that does not fit into 31 bits, in elements of one byte."""
    cluster = clusters(1)
    length = 2**31 + 4099
    value = np.zeros(length, dtype=np.uint8)
    value[-1] = 7
    assert cluster[2].call(lambda a: (a.size, int(a[-1]), int(a[2**31])), value) == (length, 7, 0)


def test_many_sizes(cluster: Any) -> None:
    """Around every limit: packing, pages, segments."""
    sizes = [0, 1, 63, 64, 65, 4095, 4096, 4097, 8191, 65_535, 65_536, 65_537, 2**20 - 1, 2**20 + 1]
    values = [np.arange(size, dtype=np.uint8) for size in sizes]
    for back, value in zip(cluster[2].call(identity, values), values, strict=True):
        np.testing.assert_array_equal(back, value)
    for value in values:
        np.testing.assert_array_equal(cluster[2].call(identity, value), value)
