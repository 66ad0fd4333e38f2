"""A future as an argument, at any depth; large results stay with the worker that made them."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onehop
from tests.support import PATIENCE, arena_bytes_everywhere, eventually


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def make(value: float) -> Any:
    return np.full(200_000, value)


def total(array: Any) -> float:
    return float(array.sum())


def fail() -> None:
    raise LookupError("the first failed")


def look(value: Any) -> Any:
    return value


def deep_total(value: Any) -> float:
    if isinstance(value, dict):
        return sum(deep_total(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(deep_total(v) for v in value)
    return float(np.sum(value))


def wait_for(path: str) -> float:
    while not Path(path).exists():
        time.sleep(0.005)
    return 1.0


def test_resolved_where_it_is_needed(cluster: Any) -> None:
    future = cluster[2].submit(make, 2.0)
    assert cluster[3].call(total, future) == 400_000.0
    assert cluster[2].call(total, future) == 400_000.0
    assert cluster.submit(total, future).result() == 400_000.0
    assert total(future.result()) == 400_000.0


def test_at_any_depth(cluster: Any) -> None:
    a, b, c = (cluster[2 + k % 2].submit(make, float(k)) for k in range(3))
    value = {"x": [a, (b, {"y": c})], "z": 5, "k": [a, a]}
    assert cluster[3].call(deep_total, value) == 200_000.0 * 3 + 5
    assert cluster[3].call(deep_total, value=value) == 200_000.0 * 3 + 5


def test_one_future_twice_is_one_object(cluster: Any) -> None:
    future = cluster[2].submit(make, 1.0)
    assert cluster[3].call(lambda x, y: x is y[0], future, [future])


def test_captured_by_a_closure(cluster: Any) -> None:
    future = cluster[2].submit(make, 3.0)
    # a captured future is a future there too, or already its value: both read the same way
    assert cluster[3].call(lambda: total(_value(future))) == 600_000.0


def _value(found: Any) -> Any:
    return found.result() if isinstance(found, concurrent.futures.Future) else found


def test_a_failed_one_fails_the_call_with_its_error(cluster: Any) -> None:
    future = cluster[2].submit(fail)
    with pytest.raises(LookupError, match="the first failed"):
        cluster[3].call(look, future)
    with pytest.raises(LookupError, match="the first failed"):
        cluster[3].call(look, {"deep": [future]})
    assert cluster[3].call(abs, -1) == 1


def test_a_cancelled_one(clusters: Any, tmp_path: Path) -> None:
    cluster = clusters(1)
    gate = tmp_path / "go"
    running = cluster.submit(wait_for, str(gate))
    eventually(running.running, 10)
    queued = cluster.submit(make, 1.0)
    assert queued.cancel()
    dependent = cluster.submit(look, queued)
    gate.touch()
    with pytest.raises((concurrent.futures.CancelledError, onehop.OnehopError)):
        dependent.result(timeout=20)


def test_one_that_is_not_ready_holds_nobody_up(cluster: Any, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    late = cluster[2].submit(wait_for, str(gate))
    dependent = cluster[3].submit(deep_total, [late, 1])
    # worker 3 does other things meanwhile
    assert cluster[3].submit(abs, -1).result(timeout=20) == 1
    assert not dependent.done()
    gate.touch()
    assert dependent.result(timeout=20) == 2.0


def test_a_chain_of_futures(cluster: Any) -> None:
    future = cluster[2].submit(make, 0.0)
    for k in range(12):
        future = cluster[2 + k % 2].submit(np.add, future, 1.0)
    assert float(future.result()[0]) == 12.0


def test_a_large_result_stays_with_its_worker(cluster: Any) -> None:
    with cluster.ledger.watch() as watch:
        future = cluster[2].submit(make, 2.0)
        assert cluster[3].call(total, future) == 400_000.0
    size = 8 * 200_000
    for record in watch.records():
        # this program passed the name on, and neither copied nor mapped anything
        if record.source == 1:
            assert record.size_bytes < 100_000 or record.outcome != "moved", record
        if record.target == 1:
            assert record.size_bytes < 100_000 or record.outcome != "attached", record
    assert watch.total("moved", medium="memory") <= size + 10_000


def test_submit_goes_where_the_data_is(clusters: Any) -> None:
    cluster = clusters(3)
    future = cluster[3].submit(make, 1.0)
    future.wait(20)
    assert [cluster.submit(lambda _: onehop.rank(), future).result() for _ in range(5)] == [3] * 5


def test_freed_with_its_last_holder(cluster: Any) -> None:
    futures = [cluster[2].submit(make, float(k)) for k in range(5)]
    totals = [cluster[3].submit(total, future) for future in futures]
    assert [t.result() for t in totals] == [200_000.0 * k for k in range(5)]
    assert arena_bytes_everywhere(cluster) >= 5 * 1_600_000
    del futures
    eventually(lambda: arena_bytes_everywhere(cluster) < 1_000_000, 1.0 * PATIENCE)


def test_as_items_of_a_map(cluster: Any) -> None:
    futures = [cluster[2].submit(make, float(k)) for k in range(4)]
    assert list(cluster.map(total, futures)) == [200_000.0 * k for k in range(4)]


def test_a_future_made_in_a_task_and_returned(cluster: Any) -> None:
    def inside() -> Any:
        return onehop.current()[3].submit(make, 4.0)

    found = cluster[2].call(inside)
    assert total(_value(found)) == 800_000.0


def test_futures_of_the_standard_library(cluster: Any) -> None:
    """Those of a thread pool are no futures of ours: a clear error, or their value; never a hang."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(abs, -5)
        other.result()
        try:
            assert cluster[2].call(look, other) == 5
        except (TypeError, onehop.OnehopError):
            pass
