"""M1, M2, M5: one complex object in a closure, as an argument of every call, and with one field replaced."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from tests.support import FULL_SIZE, arena_bytes_everywhere, pids_of, proportional_bytes


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


MATRICES = 2_000 if FULL_SIZE else 600
ELEMENTS = 6_000 if FULL_SIZE else 3_000
"""Of one matrix: 12 bytes for each, besides the row pointers."""


@dataclasses.dataclass
class Model:
    size: int
    hoppings: dict[tuple[int, int, int], scipy.sparse.csr_matrix]


@dataclasses.dataclass
class Fields:
    a: np.ndarray[Any, Any]
    b: np.ndarray[Any, Any]
    c: np.ndarray[Any, Any]
    d: np.ndarray[Any, Any]
    e: np.ndarray[Any, Any]
    f: np.ndarray[Any, Any]


def make_model() -> Model:
    generator = np.random.default_rng(1)
    size = 400
    hoppings = {}
    for k in range(MATRICES):
        columns = generator.integers(0, size, ELEMENTS)
        rows = generator.integers(0, size, ELEMENTS)
        values = generator.random(ELEMENTS)
        hoppings[(k % 20, k // 20 % 20, k // 400)] = scipy.sparse.csr_matrix(
            (values, (rows, columns)), shape=(size, size)
        )
    return Model(size, hoppings)


def buffer_bytes(model: Model) -> int:
    return sum(m.data.nbytes + m.indices.nbytes + m.indptr.nbytes for m in model.hoppings.values())


def one_sum(model: Model, k: int) -> float:
    total = 0.0
    for lattice_vector, matrix in list(model.hoppings.items())[k::100]:
        total += float(matrix.data[k]) + lattice_vector[0]
    return total


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def test_captured_by_a_map(clusters: Any, model: Model) -> None:
    cluster = clusters(4)
    # numpy and scipy in every worker, so that only the object is measured
    cluster.everywhere(one_sum, Model(2, {(0, 0, 0): scipy.sparse.csr_matrix(np.eye(2))}), 0)
    size = buffer_bytes(model)
    before = proportional_bytes(pids_of(cluster))

    def task(k: int) -> float:
        return one_sum(model, k)

    with cluster.ledger.watch() as first:
        results = list(cluster.map(task, range(100)))
    assert results == [one_sum(model, k) for k in range(100)]
    # the buffers once, the header (names, keys, shapes) once, and nothing per worker or task
    assert size <= first.total("moved", medium="memory") <= 1.1 * size

    after = proportional_bytes(pids_of(cluster))
    anonymous = after["Pss_Anon"] - before["Pss_Anon"]
    shared = max(arena_bytes_everywhere(cluster), after["Pss_Shmem"] - before["Pss_Shmem"])
    # what a worker builds for itself (dictionaries, matrices without their numbers) is not the object's bytes
    assert shared <= 1.15 * size
    assert shared + anonymous <= 1.15 * size + 4 * 30_000_000

    with cluster.ledger.watch() as again:
        assert list(cluster.map(task, range(100))) == results
    assert again.total("moved", medium="memory") == 0
    calls = [record for record in again.records() if record.message == "call"]
    assert calls
    for record in calls:
        if record.medium != "memory":
            assert record.size_bytes < 1024 * max(record.count, 1)


def test_as_the_argument_of_every_call(cluster: Any, model: Model) -> None:
    size = buffer_bytes(model)
    with cluster.ledger.watch() as first:
        cluster[2].call(one_sum, model, 0)
    assert size <= first.total("moved", medium="memory") <= 1.1 * size
    with cluster.ledger.watch() as rest:
        for k in range(1, 20):
            assert cluster[2 + k % 2].call(one_sum, model, k) == one_sum(model, k)
    # no buffer; only the header (names, keys, shapes), which k is a part of
    header = len(pickle.dumps(model, protocol=5, buffer_callback=lambda _: None))
    assert rest.total("moved", medium="memory") <= 19 * 1.1 * header
    assert rest.total("moved", medium="unix") <= 19 * 4096
    assert rest.total("avoided") + rest.total("attached") >= 18 * size


def test_one_field_replaced_before_each_call(cluster: Any) -> None:
    length = 100_000
    fields = Fields(*(np.full(length, float(k)) for k in range(6)))
    names = [field.name for field in dataclasses.fields(Fields)]

    def totals(value: Fields) -> list[float]:
        return [float(getattr(value, name).sum()) for name in names]

    cluster[2].call(totals, fields)
    for k in range(20):
        name = names[k % 6]
        setattr(fields, name, np.full(length, 100.0 + k))
        with cluster.ledger.watch() as watch:
            assert cluster[2].call(totals, fields) == totals(fields)
        moved = watch.total("moved", medium="memory")
        assert 8 * length <= moved <= 8 * length + 20_000


def test_one_field_written_in_place_before_each_call(cluster: Any) -> None:
    length = 100_000
    fields = Fields(*(np.full(length, float(k)) for k in range(6)))
    names = [field.name for field in dataclasses.fields(Fields)]

    def totals(value: Fields) -> list[float]:
        return [float(getattr(value, name).sum()) for name in names]

    cluster[2].call(totals, fields)
    for k in range(20):
        getattr(fields, names[k % 6])[k] += 1.5
        with cluster.ledger.watch() as watch:
            assert cluster[2].call(totals, fields) == totals(fields)
        # all six may lie in one segment, which is copied when somebody holds it
        assert watch.total("moved", medium="memory") <= 8 * length + 20_000
