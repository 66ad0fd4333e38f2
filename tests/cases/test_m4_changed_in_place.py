"""M4: the worker sees the value at the time of the call, however it came about."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import random
import threading
import zlib
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import run_script

Array = Any  # numpy's own annotations say less here than they cost


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def copy_of(value: Any) -> Any:
    return value + 0


def checksum(array: Array) -> tuple[float, int]:
    """Depends on every bit and on nothing else (a sum would depend on the number of BLAS threads)."""
    return float(array.flat[-1]), zlib.crc32(np.ascontiguousarray(array).data)


def same(cluster: Any, array: Array) -> None:
    assert cluster[2].call(checksum, array) == checksum(array)


@dataclasses.dataclass
class Inner:
    values: Array


@dataclasses.dataclass
class Outer:
    inner: dict[str, list[Inner]]


@pytest.fixture(params=[1_000_000, 20_000, 9_000, 700, 3])
def array(request: pytest.FixtureRequest) -> Array:
    """Sizes on all sides of the limits between packing, comparing and tracking."""
    return np.random.default_rng(0).random(request.param)


def test_one_element(cluster: Any, array: Array) -> None:
    same(cluster, array)
    for k in (array.size - 1, 0, array.size // 2, 17 % array.size):
        array[k] += 1.0
        same(cluster, array)
        same(cluster, array)


def test_a_field_of_a_nested_object(cluster: Any, array: Array) -> None:
    outer = Outer({"x": [Inner(array), Inner(array.copy())]})

    def look(value: Outer) -> list[tuple[float, int]]:
        return [checksum(inner.values) for inner in value.inner["x"]]

    for k in range(5):
        assert cluster[2].call(look, outer) == look(outer)
        outer.inner["x"][k % 2].values[k % array.size] -= 3.0


def test_a_name_bound_to_a_then_b_then_a(cluster: Any, array: Array) -> None:
    a, b = array, array * 2
    for name in (a, b, a, b, a):
        same(cluster, name)
    a[0] = -1.0
    for name in (b, a, b):
        same(cluster, name)


def test_a_write_through_a_view(cluster: Any, array: Array) -> None:
    view = array[array.size // 2 :]
    same(cluster, array)
    view[0] = 99.0
    same(cluster, array)
    view[:] = 1.0
    same(cluster, array)


def test_a_view_then_its_parent(cluster: Any, array: Array) -> None:
    view = array[: array.size // 2 + 1]
    for k in range(6):
        same(cluster, array)
        array[k % view.size] += 1.0
        same(cluster, view)
        same(cluster, array)
        array[-1] += 1.0
        same(cluster, view)
        same(cluster, array)


def test_overlapping_windows(cluster: Any) -> None:
    array = np.random.default_rng(0).random(200_000)
    windows = [array[k * 20_000 : k * 20_000 + 60_000] for k in range(7)]
    chosen = random.Random(3)
    for _ in range(60):
        same(cluster, chosen.choice(windows))
        if chosen.random() < 0.5:
            array[chosen.randrange(array.size)] += 1.0
    for window in windows:
        same(cluster, window)


def test_two_arrays_in_one_page(cluster: Any) -> None:
    whole = np.zeros(16_384)
    for cut in (8_192, 8_200, 1_000, 5_003):
        first, second = whole[:cut], whole[cut:]
        same(cluster, first)
        same(cluster, second)
        second[0] += 1.0
        same(cluster, first)
        same(cluster, second)
        first[-1] += 1.0
        same(cluster, second)
        same(cluster, first)


def test_two_clusters_with_one_array(clusters: Any, array: Array) -> None:
    one, other = clusters(1), clusters(1)
    for k in range(5):
        same(one, array)
        array[k % array.size] += 1.0
        same(other, array)
        same(one, array)
        array[-1] -= 1.0
        same(one, array)
        same(other, array)


def test_a_write_by_readinto(cluster: Any, array: Array, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(np.random.default_rng(9).random(array.size).tobytes())
    same(cluster, array)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(memoryview(array.data).cast("B")) == array.nbytes
    same(cluster, array)


def test_a_write_by_a_c_library(cluster: Any, array: Array) -> None:
    same(cluster, array)
    ctypes.memset(array.ctypes.data + 8 * (array.size // 3), 0, 8)
    same(cluster, array)
    # a library that is handed the bare pointer
    libc = ctypes.CDLL(None)
    source = np.full(1, 42.0)
    libc.memcpy(
        ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(8)
    )
    same(cluster, array)


def test_sorted_shuffled_resized(cluster: Any) -> None:
    generator = np.random.default_rng(4)
    array = generator.random(100_000)
    for _ in range(3):
        same(cluster, array)
        generator.shuffle(array)
        same(cluster, array)
        array.sort()
        same(cluster, array)
        array = np.resize(array, array.size + 1000)
        same(cluster, array)


def test_a_name_of_a_lambda_rebound(cluster: Any) -> None:
    local = np.zeros(30_000)

    def call() -> float:
        return float(local.sum())

    for k in range(4):
        assert cluster[2].call(call) == 5.0 * k
        local[k] = 5.0
        assert cluster[2].call(call) == 5.0 * (k + 1)
        local = local.copy()


def test_a_global_of_a_lambda_rebound(tmp_path: Path) -> None:
    text = """
    import numpy as np
    import onehop
    cluster = onehop.Cluster(1)
    values = np.zeros(30_000)
    call = lambda: float(values.sum())
    seen = []
    for k in range(4):
        values = np.full(30_000, float(k))
        seen.append(cluster[2].call(call) == 30_000 * k)
        values[7] += 1
        seen.append(cluster[2].call(call) == 30_000 * k + 1)
    print(f"seen={all(seen)}")
    """
    assert run_script(text, tmp_path).value("seen") == "True"


def test_an_encode_that_fails_and_is_repeated(cluster: Any) -> None:
    array = np.random.default_rng(5).random(100_000)
    lock = threading.Lock()
    for k in range(5):
        array[k] += 1.0
        with pytest.raises(Exception, match="lock"):
            cluster[2].call(checksum, [array, lock])
        same(cluster, array)
        with pytest.raises(Exception, match="lock"):
            cluster[2].call(checksum, [lock, array])
        array[-k - 1] += 1.0
        with pytest.raises(Exception, match="lock"):
            cluster[2].call(checksum, [array, lock])
        same(cluster, array)


def test_freed_and_made_again_at_the_same_place(cluster: Any) -> None:
    for k in range(60):
        array = np.zeros(150_000) if k % 3 else np.full(150_000, float(k))
        if k % 2:
            array[k] = k
        same(cluster, array)
        del array


def test_zeros_again_after_the_pages_were_given_back(cluster: Any) -> None:
    buffer = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(buffer, dtype=np.float64)
    array[:] = 1.0
    same(cluster, array)
    buffer.madvise(
        mmap.MADV_DONTNEED
    )  # a pool gives memory back: it reads as zeros, unwritten by anyone
    assert array[0] == 0.0
    same(cluster, array)
    array[:] = 2.0
    same(cluster, array)
    buffer.madvise(mmap.MADV_DONTNEED, 0, 1 << 21)
    same(cluster, array)
    del array
    buffer.close()


def test_shared_memory_of_multiprocessing(cluster: Any) -> None:
    block = shared_memory.SharedMemory(create=True, size=800_000)
    try:
        array = np.ndarray(100_000, dtype=np.float64, buffer=block.buf)
        array[:] = 1.0
        same(cluster, array)
        # another mapping of the same pages, as another process would have
        other = shared_memory.SharedMemory(name=block.name)
        foreign = np.ndarray(100_000, dtype=np.float64, buffer=other.buf)
        foreign[5] = 17.0
        same(cluster, array)
        del foreign
        other.close()
        del array
    finally:
        block.close()
        block.unlink()


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_memmap_whose_file_changes(cluster: Any, tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "file.dat"
    np.ones(100_000).tofile(path)
    array = np.memmap(path, dtype=np.float64, mode=mode)
    same(cluster, array)
    with path.open("r+b") as file:
        file.seek(8 * 500)
        file.write(np.full(10, 3.0).tobytes())
    same(cluster, array)
    array[7] = -1.0
    same(cluster, array)


def test_writes_by_another_thread_are_seen_by_the_next_call(cluster: Any) -> None:
    array = np.zeros(500_000)
    stop = threading.Event()

    def write() -> None:
        k = 0
        while not stop.is_set():
            array[(k * 7919) % array.size] += 1.0
            k += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            total = cluster[2].call(np.sum, array)
            assert total >= 0.0
    finally:
        stop.set()
        writer.join()
    same(cluster, array)


def test_two_threads_send_the_same_array(cluster: Any) -> None:
    array = np.random.default_rng(8).random(200_000)
    expected = checksum(array)
    errors: list[object] = []

    def send(rank: int) -> None:
        for _ in range(20):
            got = cluster[rank].call(checksum, array)
            if got != expected:
                errors.append(got)

    threads = [threading.Thread(target=send, args=(2 + k % 2,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(cluster: Any, seed: int) -> None:
    """Writes, views, sorts, reallocations and sends in any order; every answer must be the present value."""
    chosen = random.Random(seed)
    generator = np.random.default_rng(seed)
    arrays = [
        generator.random(chosen.choice([50, 3_000, 9_000, 40_000, 300_000])) for _ in range(8)
    ]
    for _ in range(250):
        k = chosen.randrange(len(arrays))
        array = arrays[k]
        step = chosen.random()
        if step < 0.5:
            view = array[chosen.randrange(array.size) :] if chosen.random() < 0.3 else array
            assert cluster[2 + chosen.randrange(2)].call(checksum, view) == checksum(view)
        elif step < 0.75:
            array[chosen.randrange(array.size)] = chosen.random()
        elif step < 0.8:
            array.sort()
        elif step < 0.85:
            array *= 1.25
        elif step < 0.9:
            arrays[k] = generator.random(array.size)
        elif step < 0.95:
            arrays[k] = cluster[2].call(copy_of, array)  # one that arrived
        else:
            first = chosen.randrange(array.size)
            arrays[k] = np.zeros(array.size)
            arrays[k][first:] = array[first:]
