"""M10: a receiver may write; nobody else, no later task and no second call ever sees it."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import scipy.sparse

Array = np.ndarray[Any, Any]
LENGTH = 200_000

_kept: dict[str, Any] = {}


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def add_one(array: Array) -> float:
    array += 1
    return float(array.sum())


def shuffle(array: Array) -> float:
    np.random.default_rng(0).shuffle(array)
    array.sort()
    return float(array.sum())


def sort_indices(matrix: Any) -> list[int]:
    matrix.sort_indices()
    return [int(k) for k in matrix.indices[:3]]


def by_pointer(array: Array) -> float:
    ctypes.memset(array.ctypes.data, 0, array.nbytes)
    return float(array.sum())


def readinto(array: Array) -> float:
    with open("/dev/zero", "rb", buffering=0) as file:
        file.readinto(memoryview(array.data).cast("B"))
    return float(array.sum())


def keep_and_write(array: Array, name: str, value: float) -> float:
    array[:] = value
    _kept[name] = array
    return float(array.sum())


def keep_clean(array: Array, name: str) -> float:
    _kept[name] = array
    return float(array.sum())


def kept_sum(name: str) -> float:
    return float(_kept[name].sum())


def forget() -> None:
    _kept.clear()
    gc.collect()


def write_later(array: Array) -> float:
    """A thread of the task's own goes on writing after the task has ended."""

    def work() -> None:
        for k in range(200):
            array[k] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=work)
    _kept["thread"] = thread
    thread.start()
    return float(array[:0].sum())


def join_thread() -> None:
    _kept["thread"].join()


def keep_slice(array: Array) -> None:
    _kept["slice"] = array[10:20]


def kept_slice() -> list[float]:
    return [float(x) for x in _kept["slice"]]


def total(array: Array) -> float:
    return float(array.sum())


@pytest.mark.parametrize("function", [add_one, shuffle, by_pointer, readinto])
def test_every_call_sees_the_sender_s_value(cluster: Any, function: Any) -> None:
    array = np.arange(LENGTH, dtype=np.float64)[::-1].copy()
    pristine = array.copy()
    expected = function(array.copy())
    for rank in (2, 2, 3, 2, 3):
        assert cluster[rank].call(function, array) == expected
        assert cluster[rank].call(total, array) == total(pristine)
    np.testing.assert_array_equal(array, pristine)


def test_sort_indices_of_a_sparse_matrix(cluster: Any) -> None:
    indices = np.tile(np.array([5, 1, 9, 3], dtype=np.int32), 10_000)
    matrix = scipy.sparse.csr_matrix(
        (np.ones(40_000), indices, np.arange(0, 40_001, 4, dtype=np.int32)), shape=(10_000, 10)
    )
    for rank in (2, 3, 2):
        assert cluster[rank].call(sort_indices, matrix) == [1, 3, 5]
    assert list(matrix.indices[:3]) == [5, 1, 9]


def test_a_captured_array(cluster: Any) -> None:
    array = np.zeros(LENGTH)

    def grow(_: int) -> float:
        nonlocal array
        array += 1
        return float(array[0])

    assert list(cluster.map(grow, range(20))) == [1.0] * 20
    assert array[0] == 0.0


def test_kept_in_a_global_and_written(cluster: Any) -> None:
    array = np.ones(LENGTH)
    assert cluster[2].call(keep_and_write, array, "a", 5.0) == 5.0 * LENGTH
    for _ in range(5):
        assert cluster[2].call(total, array) == LENGTH
        assert cluster[2].call(add_one, array) == 2.0 * LENGTH
    assert cluster[2].call(keep_clean, array, "b") == LENGTH
    array[:] = 3.0
    assert cluster[2].call(total, array) == 3.0 * LENGTH
    assert cluster[2].call(kept_sum, "a") == 5.0 * LENGTH
    assert cluster[2].call(kept_sum, "b") == LENGTH
    cluster.everywhere(forget)


def test_what_is_kept_survives_the_sender_s_reuse_of_its_memory(cluster: Any) -> None:
    for k in range(20):
        array = np.full(LENGTH, float(k))
        assert cluster[2].call(keep_clean, array, f"kept {k}") == k * LENGTH
        del array
        # other values pass through the sender's arena meanwhile
        for _ in range(3):
            cluster[3].call(total, np.random.default_rng(k).random(LENGTH))
    for k in range(20):
        assert cluster[2].call(kept_sum, f"kept {k}") == k * LENGTH
    cluster.everywhere(forget)


def test_results_that_are_kept_survive_the_worker_s_reuse(cluster: Any) -> None:
    kept = [cluster[2].call(np.full, LENGTH, float(k)) for k in range(20)]
    kept[3] += 1
    for k in range(20):
        cluster[2].call(np.full, LENGTH, -1.0)
        assert kept[k][0] == kept[k][-1] == k + (k == 3)


def test_a_thread_that_writes_on(cluster: Any) -> None:
    array = np.zeros(LENGTH)
    cluster[2].call(write_later, array)
    for _ in range(50):
        assert cluster[2].call(total, array) == 0.0
    cluster[2].call(join_thread)
    assert cluster[2].call(total, array) == 0.0
    cluster.everywhere(forget)


def test_two_tasks_alive_at_once(clusters: Any) -> None:
    import onehop

    cluster = clusters(2)
    array = np.zeros(LENGTH)

    def first(value: Array) -> tuple[float, float]:
        value += 1
        # gives its slot up: the second task runs in the same process, over the same blob
        other = onehop.current()[3].call(lambda: onehop.current()[2].call(add_one, array))
        return float(value[0]), float(other)

    for _ in range(5):
        assert cluster[2].call(first, array) == (1.0, float(LENGTH))
    assert array[0] == 0.0


def test_a_view_that_is_kept_after_its_array(cluster: Any) -> None:
    array = np.arange(LENGTH, dtype=float)
    cluster[2].call(keep_slice, array)
    for k in range(10):
        cluster[2].call(add_one, array + k)
    assert cluster[2].call(kept_slice) == list(range(10, 20))
    cluster.everywhere(forget)


def test_a_result_may_be_written_here(cluster: Any) -> None:
    one = cluster[2].call(np.zeros, LENGTH)
    one += 1
    assert cluster[2].call(total, one) == LENGTH
    two = cluster[3].call(lambda a: a, one)
    two += 1
    assert one[0] == 1.0
    assert two[0] == 2.0
