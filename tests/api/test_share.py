"""cluster.share: built once per worker, the same object for all tasks, freed with its last holder."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

import onehop
from onehop.errors import SharedObjectModified
from tests.support import PATIENCE, arena_bytes_everywhere, eventually


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


class Dear:
    """Something that is dear to build."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
        self.table = {k: str(k) for k in range(100)}
        self.touched = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.built_in = os.getpid()


def identity_of(dear: Dear) -> tuple[int, int]:
    return os.getpid(), id(dear)


def write(dear: Dear) -> None:
    dear.numbers[0] = -1.0


def note(dear: Dear) -> int:
    dear.touched += 1
    return dear.touched


def test_built_once_per_worker(cluster: Any) -> None:
    handle = cluster.share(Dear(np.ones(100_000)))
    seen = [cluster[2 + k % 2].call(identity_of, handle) for k in range(10)]
    assert len(set(seen)) == 2
    assert len({pid for pid, _ in seen}) == 2
    assert cluster[2].call(note, handle) == 1
    assert cluster[2].call(note, handle) == 2, "all tasks of a worker get the same object"


def test_in_closures_at_depth_and_in_maps(cluster: Any) -> None:
    handle = cluster.share(Dear(np.arange(50_000.0)))
    expected = float(np.arange(50_000.0).sum())
    assert (
        cluster[2].call(lambda items: float(items[0]["h"].numbers.sum()), [{"h": handle}])
        == expected
    )
    assert list(cluster.map(lambda k, h: float(h.numbers[k]), range(6), [handle] * 6)) == [
        float(k) for k in range(6)
    ]
    assert cluster[2].call(lambda: float(handle.numbers[3])) == 3.0


def test_value_here(cluster: Any) -> None:
    dear = Dear(np.ones(10))
    handle = cluster.share(dear)
    assert handle.value is dear or handle.value.table == dear.table


def test_it_moves_once(cluster: Any) -> None:
    with cluster.ledger.watch() as watch:
        handle = cluster.share(np.ones(500_000))
        for k in range(6):
            assert cluster[2 + k % 2].call(np.sum, handle) == 500_000.0
    assert watch.total("moved", medium="memory") <= 4_000_000 + 10_000


def test_what_was_shared_is_what_it_was_then(cluster: Any) -> None:
    array = np.ones(100_000)
    handle = cluster.share(array)
    array[:] = 5.0
    assert cluster[2].call(np.sum, handle) == 100_000.0
    assert cluster[2].call(np.sum, array) == 500_000.0


def test_a_task_that_wrote_ends_in_a_clear_error(cluster: Any) -> None:
    handle = cluster.share(Dear(np.ones(100_000)))
    with pytest.raises(SharedObjectModified, match="write"):
        cluster[2].call(write, handle)
    # others never see it
    assert cluster[2].call(lambda d: float(d.numbers[0]), handle) == 1.0
    assert cluster[3].call(lambda d: float(d.numbers[0]), handle) == 1.0


def test_freed_with_its_last_holder(cluster: Any) -> None:
    handle = cluster.share(np.ones(500_000))
    cluster.everywhere(len, handle)
    assert arena_bytes_everywhere(cluster) >= 4_000_000
    del handle
    gc.collect()
    eventually(lambda: arena_bytes_everywhere(cluster) < 1_000_000, 2.0 * PATIENCE)


def test_a_worker_passes_it_on(cluster: Any) -> None:
    def inner(dear: Dear) -> float:
        return float(dear.numbers.sum())

    def outer(held: Any) -> float:
        return float(onehop.current()[3].call(inner, held))

    handle = cluster.share(Dear(np.ones(100_000)))
    assert cluster[2].call(outer, handle) == 100_000.0


def test_a_worker_added_later_gets_it(clusters: Any) -> None:
    cluster = clusters(1)
    handle = cluster.share(np.ones(100_000))
    (added,) = cluster.add_workers(1)
    assert added.call(np.sum, handle) == 100_000.0
