"""Times the codec against bare pickle: `python benchmarks/codec.py`.

Prints medians and ratios; knows nothing of clusters.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from onehop._codec import decode, encode

# Importable under this name only where the script is not the main module, so it is not a class of its own.
Model = namedtuple("Model", "hoppings overlaps positions energies kpoints")
Model.__module__ = "types"


def make_model(size_bytes: int = 190_000_000) -> Any:
    """Make a model of 155 sparse matrices, like those of a tight-binding code."""
    import types

    types.Model = Model  # type: ignore[attr-defined]
    rows = 2000
    entries = size_bytes // 155 // 12
    rng = np.random.default_rng(1)

    def matrix() -> Any:
        columns = np.sort(rng.integers(0, rows, entries, dtype=np.int32))
        pointers = np.linspace(0, entries, rows + 1).astype(np.int32)
        return sp.csr_matrix((np.ones(entries), columns, pointers), shape=(rows, rows))

    return Model(
        {(i, i % 5, 0): matrix() for i in range(75)},
        {(i, 0, 0): matrix() for i in range(20)},
        [{(i, 0, 0): matrix() for i in range(20)} for _ in range(3)],
        np.arange(1000.0),
        np.ones((500, 3)),
    )


def plain(obj: object) -> object:
    """Encode and decode with nothing but pickle."""
    buffers: list[Any] = []
    stream = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=buffers)


def ours(obj: object) -> object:
    """Encode and decode with the codec."""
    encoded = encode(obj)
    return decode(encoded.stream, encoded.buffers)


def median_ns(function: Callable[[object], object], obj: object, repeats: int) -> float:
    """Measure one function."""
    times = []
    for _ in range(repeats):
        start_ns = time.perf_counter_ns()
        function(obj)
        times.append(time.perf_counter_ns() - start_ns)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    model = make_model()
    cases: list[tuple[str, object, int]] = [
        ("model, 467 buffers", model, 41),
        ("call (3 small values)", ("f", (1, 2.5), {}), 2001),
        ("array 8 MB", np.ones(1_000_000), 1001),
        ("transposed", np.ones((1000, 1000)).transpose(1, 0)[::-1], 1001),
        ("dict of 1e5 entries", {i: str(i) for i in range(100_000)}, 11),
        ("1e4 small arrays", [np.ones(3) for _ in range(10_000)], 11),
        ("bytes 8 MB", b"x" * 8_000_000, 21),
    ]
    print(f"{'case':24} {'pickle us':>11} {'onehop us':>11} {'ratio':>6} {'encode us':>11}")
    for name, obj, repeats in cases:
        bare_ns = median_ns(plain, obj, repeats)
        ours_ns = median_ns(ours, obj, repeats)
        encode_ns = median_ns(encode, obj, repeats)
        print(
            f"{name:24} {bare_ns / 1e3:11.1f} {ours_ns / 1e3:11.1f} {ours_ns / bare_ns:6.2f}"
            f" {encode_ns / 1e3:11.1f}"
        )


if __name__ == "__main__":
    main()
