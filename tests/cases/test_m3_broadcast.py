"""M3: one array to all workers of this host: one copy, an attachment for each."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


SIZE = 80_000_000 // (1 if os.environ.get("ONEHOP_TEST_FULL") else 8)


def total(array: np.ndarray[Any, Any]) -> float:
    return float(array.sum())


def test_eight_workers_one_copy(clusters: Any) -> None:
    cluster = clusters(8)
    array = np.ones(SIZE // 8)
    with cluster.ledger.watch() as watch:
        assert cluster.everywhere(total, array) == [SIZE / 8] * 8
    assert SIZE <= watch.total("moved", medium="memory") <= SIZE + 8192
    attached = [r for r in watch.records() if r.outcome == "attached" and r.size_bytes >= SIZE]
    assert {r.target for r in attached} == {worker.rank for worker in cluster.workers}
    assert sum(r.size_bytes for r in attached) == 8 * SIZE

    with cluster.ledger.watch() as again:
        cluster.everywhere(total, array)
    assert again.total("moved", medium="memory") == 0


def test_a_result_passed_on_is_not_copied(cluster: Any) -> None:
    """What arrived from one worker and was not written goes to the other under its own id."""
    with cluster.ledger.watch() as watch:
        array = cluster[2].call(np.ones, 1_000_000)
        assert cluster[3].call(total, array) == 1_000_000.0
        assert cluster[2].call(total, array[:600_000]) == 600_000.0
    assert watch.total("moved", medium="memory") <= 8_000_000 + 8192
    array[0] = 2.0
    assert cluster[3].call(total, array) == 1_000_001.0


def test_an_argument_given_back_is_not_copied(cluster: Any) -> None:
    array = np.ones(1_000_000)
    with cluster.ledger.watch() as watch:
        back = cluster[2].call(lambda a: a, array)
        view = cluster[2].call(lambda a: a[100_000:], array)
        small = cluster[2].call(lambda a: a[:10], array)
    np.testing.assert_array_equal(back, array)
    assert view.shape == (900_000,)
    assert small.base is None or memoryview(small.base).nbytes < 10_000, (
        "a slice pins a large segment"
    )
    assert watch.total("moved", medium="memory") <= 8_000_000 + 8192
    back[0] = 5.0
    assert array[0] == 1.0


def test_one_array_a_thousand_times_in_a_list(cluster: Any) -> None:
    array = np.ones(1_000_000)

    def look(items: list[Any]) -> tuple[int, int]:
        items[0][3] = 7.0
        return len({id(item) for item in items}), int(items[-1][3])

    with cluster.ledger.watch() as watch:
        assert cluster[2].call(look, [array] * 1000) == (1, 7)
    assert watch.total("moved", medium="memory") <= 8_000_000 + 16_384
    assert array[3] == 1.0
