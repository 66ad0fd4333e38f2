"""F4: nested maps on few workers, cycles of calls, and a stated bound instead of a hang."""

from __future__ import annotations

import threading
from concurrent.futures import as_completed, wait
from typing import Any

import pytest

import onehop
from onehop.errors import NestingLimitError


def inner(x: int, y: int) -> int:
    return 10 * x + y


def outer(x: int) -> int:
    return sum(onehop.current().map(inner, [x, x], [0, 1]))


def outer_with_wait(x: int) -> int:
    futures = [onehop.current().submit(inner, x, y) for y in (0, 1)]
    wait(futures)
    return sum(future.result() for future in futures)


def outer_with_as_completed(x: int) -> int:
    futures = [onehop.current().submit(inner, x, y) for y in (0, 1)]
    return sum(future.result() for future in as_completed(futures))


async def _awaited(x: int) -> int:
    import asyncio

    futures = [onehop.current().submit(inner, x, y) for y in (0, 1)]
    return sum(await asyncio.gather(*(_one(future) for future in futures)))


async def _one(future: Any) -> int:
    return int(await future)


def outer_with_await(x: int) -> int:
    import asyncio

    return asyncio.run(_awaited(x))


def outer_with_submit_result(x: int) -> int:
    return int(onehop.current().submit(inner, x, 0).result()) + int(
        onehop.current().submit(inner, x, 1).result()
    )


def round_trip(depth: int, ranks: list[int]) -> list[int]:
    """Rank by rank around the ring, `depth` times; each waits for the next."""
    here = onehop.rank()
    if depth == 0:
        return [here]
    following = ranks[(ranks.index(here) + 1) % len(ranks)] if here in ranks else ranks[0]
    return [here, *onehop.current()[following].call(round_trip, depth - 1, ranks)]


def self_call(depth: int) -> int:
    if depth == 0:
        return 0
    return 1 + int(onehop.current()[onehop.rank()].call(self_call, depth - 1))


def threads_now() -> int:
    return threading.active_count()


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "function",
    [
        outer,
        outer_with_wait,
        outer_with_as_completed,
        outer_with_await,
        outer_with_submit_result,
    ],
)
def test_a_nested_map_completes(clusters: Any, workers: int, function: Any) -> None:
    cluster = clusters(workers)
    assert list(cluster.map(function, range(10))) == [20 * x + 1 for x in range(10)]


def test_a_nested_map_in_this_process(clusters: Any) -> None:
    assert list(clusters(0).map(outer, range(10))) == [20 * x + 1 for x in range(10)]


def test_a_cycle_of_calls(clusters: Any) -> None:
    cluster = clusters(4)
    ranks = [2, 3, 4, 5]
    path = cluster[2].call(round_trip, 20, ranks)
    assert path == [ranks[i % 4] for i in range(21)]


def test_several_cycles_at_once(clusters: Any) -> None:
    cluster = clusters(4)
    ranks = [2, 3, 4, 5]
    futures = [cluster[ranks[i % 4]].submit(round_trip, 12, ranks) for i in range(8)]
    for i, future in enumerate(futures):
        assert future.result(timeout=40) == [ranks[(i + k) % 4] for k in range(13)]


def test_the_director_takes_part(cluster: Any) -> None:
    assert cluster[2].call(round_trip, 6, [2, 1, 3]) == [2, 1, 3, 2, 1, 3, 2]


def test_a_worker_calls_itself(cluster: Any) -> None:
    assert cluster[2].call(self_call, 5) == 5


@pytest.mark.timeout(60)
def test_too_deep_is_an_error_that_names_the_chain(cluster: Any) -> None:
    with pytest.raises(NestingLimitError, match="self_call"):
        cluster[2].call(self_call, 100_000)
    # and the workers are as before
    assert cluster[2].call(self_call, 3) == 3


def test_threads_of_waiting_tasks_go_again(clusters: Any) -> None:
    cluster = clusters(2)
    before = cluster.everywhere(threads_now)
    assert cluster[2].call(round_trip, 30, [2, 3])[-1] == 2
    after = cluster.everywhere(threads_now)
    assert max(after) - max(before) <= 20
