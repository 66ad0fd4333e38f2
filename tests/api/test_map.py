"""cluster.map, map_unordered and reduce: order, laziness, batches, retries, errors, progress."""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import eventually


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def square(k: int) -> int:
    return k * k


def slow_square(k: int) -> int:
    time.sleep(0.01)
    return k * k


def uneven(k: int) -> int:
    time.sleep(0.05 if k == 0 else 0.001)
    return k


def fail_at(k: int, bad: int) -> int:
    if k == bad:
        raise ValueError(f"bad {k}")
    return k


def fail_first_times(k: int, folder: str, times: int) -> int:
    """Fails `times` times for each k, and counts in a file."""
    counter = Path(folder, str(k))
    seen = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (seen + 1))
    if seen < times:
        raise OSError(f"try {seen}")
    return k


def test_as_the_builtin(cluster: Any) -> None:
    assert list(cluster.map(square, range(100))) == [k * k for k in range(100)]
    assert list(cluster.map(pow, [2, 3, 4], [5, 2, 3])) == [32, 9, 64]
    assert list(cluster.map(pow, [2, 3, 4], itertools.repeat(2))) == [4, 9, 16]
    assert list(cluster.map(square, [])) == []
    assert list(cluster.map(square, iter([]))) == []
    assert list(cluster.map(square, iter(range(50)), chunksize=7)) == [k * k for k in range(50)]
    assert list(cluster.map(square, {1: 2, 3: 4})) == [1, 9]


def test_many_tiny_tasks(cluster: Any) -> None:
    assert sum(cluster.map(square, range(20_000))) == sum(k * k for k in range(20_000))


def test_it_is_an_iterator(cluster: Any) -> None:
    results = cluster.map(square, range(10))
    assert iter(results) is results
    assert next(results) == 0
    assert next(results) == 1
    assert list(results) == [k * k for k in range(2, 10)]
    with pytest.raises(StopIteration):
        next(results)


def test_input_with_a_length_starts_at_once(cluster: Any, tmp_path: Path) -> None:
    def touch(k: int) -> None:
        (tmp_path / str(k)).touch()

    results = cluster.map(touch, range(3))  # nobody asks for results
    eventually(lambda: len(os.listdir(tmp_path)) == 3, 10)
    del results


def test_a_generator_is_pulled_as_room_appears(cluster: Any) -> None:
    pulled: list[int] = []

    def endless() -> Iterator[int]:
        for k in itertools.count():
            pulled.append(k)
            yield k

    results = cluster.map(slow_square, endless())
    for k in range(20):
        assert next(results) == k * k
    assert len(pulled) < 5_000, "an endless generator was run away with"
    results.close()
    time.sleep(0.1)
    count = len(pulled)
    time.sleep(0.2)
    assert len(pulled) == count


def test_a_generator_that_fails(cluster: Any) -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("no more")

    results = cluster.map(square, broken())
    assert next(results) == 1
    assert next(results) == 4
    with pytest.raises(LookupError, match="no more"):
        next(results)


def test_a_generator_runs_in_one_thread_at_a_time(cluster: Any) -> None:
    inside = threading.Lock()

    def careful() -> Iterator[int]:
        for k in range(300):
            assert inside.acquire(blocking=False)
            inside.release()
            yield k

    assert list(cluster.map(square, careful())) == [k * k for k in range(300)]


def test_items_are_taken_when_they_are_pulled(cluster: Any) -> None:
    buffer = np.zeros(20_000)

    def frames() -> Iterator[Any]:
        for k in range(12):
            buffer[:] = k
            yield buffer

    assert list(cluster.map(lambda a: float(a[-1]), frames())) == [float(k) for k in range(12)]


def test_the_first_error_in_order(cluster: Any) -> None:
    results = cluster.map(fail_at, range(20), itertools.repeat(5))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="bad 5"):
        next(results)
    # as with other executors, the rest is given up
    assert list(results) == []
    assert cluster[2].call(abs, -1) == 1


def test_errors_within_a_batch_hit_their_item_only(cluster: Any) -> None:
    got = list(
        cluster.map(
            fail_at, range(30), itertools.repeat(7), batch_size=10, on_error=lambda e: str(e)
        )
    )
    assert got[:7] == list(range(7))
    assert "bad 7" in got[7]
    assert got[8:] == list(range(8, 30))


def test_on_error_that_raises(cluster: Any) -> None:
    def translate(error: BaseException) -> None:
        raise KeyError("translated") from error

    with pytest.raises(KeyError, match="translated"):
        list(cluster.map(fail_at, range(5), itertools.repeat(2), on_error=translate))


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_retries(cluster: Any, tmp_path: Path, batch_size: int | None) -> None:
    folder = str(tmp_path)
    options = {} if batch_size is None else {"batch_size": batch_size}
    got = cluster.map(fail_first_times, range(10), [folder] * 10, [2] * 10, retries=2, **options)
    assert list(got) == list(range(10))
    assert all(Path(folder, str(k)).read_text() == "xxx" for k in range(10))


def test_retries_run_out(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="try 1"):
        list(cluster.map(fail_first_times, [0], [str(tmp_path)], [5], retries=1))
    assert (tmp_path / "0").read_text() == "xx"


def test_options_of_submit(cluster: Any, tmp_path: Path) -> None:
    assert cluster.options(retries=2).submit(fail_first_times, 1, str(tmp_path), 2).result() == 1
    got = cluster.options(on_error=lambda e: "none").submit(fail_at, 1, 1).result()
    assert got == "none"
    # the cluster itself is as before
    with pytest.raises(ValueError, match="bad 1"):
        cluster.submit(fail_at, 1, 1).result()


def test_options_are_checked(cluster: Any) -> None:
    with pytest.raises(TypeError):
        cluster.options(retrys=2)
    with pytest.raises((TypeError, ValueError)):
        cluster.options(retries=-1)


def test_timeout_of_a_map(cluster: Any) -> None:
    cluster.everywhere(abs, 1)  # the start of the workers is not what is timed
    results = cluster.map(time.sleep, [0, 30], timeout=2)
    assert next(results) is None
    with pytest.raises(TimeoutError):
        next(results)
    # the worker is free again
    assert cluster.options(timeout=20).submit(abs, -2).result() == 2


def test_timeout_of_a_call_interrupts_the_task(clusters: Any) -> None:
    cluster = clusters(1)
    with pytest.raises(TimeoutError):
        cluster.options(timeout=0.2).submit(time.sleep, 600).result(timeout=20)
    assert cluster.submit(abs, -2).result(timeout=20) == 2


@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_batches(cluster: Any, batch_size: int) -> None:
    got = cluster.map(square, range(50), batch_size=batch_size)
    assert list(got) == [k * k for k in range(50)]
    got = cluster.options(batch_size=batch_size).map(square, range(50))
    assert list(got) == [k * k for k in range(50)]


def test_unordered(cluster: Any) -> None:
    cluster.everywhere(abs, 1)  # both are there: one alone would have to begin with the slow item
    got = list(cluster.map_unordered(uneven, range(40), batch_size=1))
    assert sorted(got) == list(range(40))
    assert got[0] != 0, "the slow first item held the others up"


def test_unordered_with_errors(cluster: Any) -> None:
    got = cluster.map_unordered(fail_at, range(10), itertools.repeat(3), on_error=lambda e: -1)
    assert sorted(got) == [-1, 0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_progress_as_a_bar(cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(cluster.map(square, range(10), progress=True)) == [k * k for k in range(10)]
    captured = capsys.readouterr()
    assert captured.out == "", "progress belongs to stderr"


def test_abandoned_maps_leave_nothing(cluster: Any) -> None:
    for _ in range(5):
        results = cluster.map(slow_square, range(100))
        next(results)
        del results
    assert cluster.submit(abs, -2).result(timeout=20) == 2


def test_work_is_spread(cluster: Any) -> None:
    def who(_: int) -> int:
        time.sleep(0.01)
        return os.getpid()

    pids = set(cluster.map(who, range(20)))
    assert pids == {worker.pid for worker in cluster.workers}


def test_reduce(cluster: Any) -> None:
    assert cluster.reduce(operator.add, square, range(100)) == sum(k * k for k in range(100))
    assert cluster.reduce(max, square, iter(range(10))) == 81
    assert cluster.reduce(operator.add, square, [3]) == 9


def test_reduce_keeps_the_order_of_items(cluster: Any) -> None:
    """`op` need be associative, not commutative."""
    assert cluster.reduce(operator.add, str, range(200)) == "".join(map(str, range(200)))


def test_reduce_of_arrays_moves_little(cluster: Any) -> None:
    total = cluster.reduce(operator.add, lambda k: np.full(50_000, float(k)), range(40))
    np.testing.assert_array_equal(total, np.full(50_000, float(sum(range(40)))))


def test_reduce_of_nothing_and_of_errors(cluster: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        cluster.reduce(operator.add, square, [])
    with pytest.raises(ValueError, match="bad 3"):
        cluster.reduce(operator.add, lambda k: fail_at(k, 3), range(10))


def test_a_map_inside_a_map_of_another_cluster(clusters: Any) -> None:
    one, other = clusters(1), clusters(1)
    got = [sum(other.map(square, range(k))) for k in one.map(abs, range(5))]
    assert got == [0, 0, 1, 5, 14]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_without_and_with_one_worker(clusters: Any, workers: int) -> None:
    cluster = clusters(workers)
    assert list(cluster.map(square, range(10))) == [k * k for k in range(10)]
    assert sorted(cluster.map_unordered(square, range(10))) == [k * k for k in range(10)]
    assert cluster.reduce(operator.add, square, range(10)) == 285
    assert list(cluster.map(fail_at, range(4), itertools.repeat(2), on_error=lambda e: -1)) == [
        0,
        1,
        -1,
        3,
    ]
