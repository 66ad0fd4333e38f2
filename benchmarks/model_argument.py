"""The 190 MB model (75 + 20 + 3·20 sparse matrices) as argument of every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse

import onehop
from benchmarks import raw
from benchmarks.measure import SCALE, Report, median_s, seconds

Vector = tuple[int, int, int]


@dataclass
class Model:
    """As tight-binding codes have it: dictionaries from lattice vectors to sparse matrices."""

    norbits: int
    lat: Any
    rlat: Any
    hoppings: dict[Vector, Any]
    overlaps: dict[Vector, Any]
    positions: dict[Vector, list[Any]]


def matrix(generator: np.random.Generator, size: int, elements: int) -> Any:
    rows = generator.integers(0, size, elements)
    columns = generator.integers(0, size, elements)
    return scipy.sparse.csr_matrix((generator.random(elements), (rows, columns)), (size, size))


def make_model() -> Model:
    """155 matrices of about 1.2 MB: 190 MB in 467 buffers."""
    generator = np.random.default_rng(2)
    size, elements = 4_000, int(101_000 * SCALE)
    hoppings = {(k, 0, 0): matrix(generator, size, elements) for k in range(75)}
    overlaps = {(k, 0, 0): matrix(generator, size, elements) for k in range(20)}
    positions = {
        (k, 0, 0): [matrix(generator, size, elements) for _ in range(3)] for k in range(20)
    }
    return Model(size, np.eye(3), np.eye(3), hoppings, overlaps, positions)


def use(model: Model, k: int) -> float:
    return float(model.hoppings[(k, 0, 0)].data[k])


def main() -> None:
    report = Report("the 190 MB model as argument of every call")
    from benchmarks.model_argument import Model as Importable
    from benchmarks.model_argument import use as importable_use

    made = make_model()
    # of the importable class, not of this script's own
    model = Importable(**made.__dict__)
    walk = report.time("pickle.dumps with out-of-band buffers, and loads", raw.pickle_walk_s(model))
    with onehop.Cluster(2) as cluster:
        worker = cluster[2]
        worker.call(
            importable_use,
            Importable(1, 0, 0, {(0, 0, 0): scipy.sparse.csr_matrix(np.eye(2))}, {}, {}),
            0,
        )
        report.time("first call", seconds(lambda: worker.call(importable_use, model, 0)))
        later = report.time(
            "later calls", median_s(lambda: worker.call(importable_use, model, 1), 25)
        )
        report.figure("per call", later / walk, "× pickle", 2.0, "dumps + loads beside it")

        def change_and_call() -> None:
            model.hoppings[(5, 0, 0)].data[7] += 1.0
            worker.call(importable_use, model, 1)

        report.time("one matrix changed before each call", median_s(change_and_call, 15))
        handle = cluster.share(model)
        report.time(
            "as cluster.share(model)", median_s(lambda: worker.call(importable_use, handle, 1), 100)
        )
    report.end()


if __name__ == "__main__":
    main()
