"""The arena: what is given out never overlaps, memory goes back, and limits are told before anything is written."""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from onehop._memory import arena as arena_module
from onehop._memory import limits
from onehop._memory.arena import PAGE_SIZE, Arena, ArenaSegment
from onehop._memory.extents import FreeRanges
from onehop.errors import MemoryLimitError

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["memfd", "posix"])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    made = Arena(7, use_memfd=request.param)
    yield made
    made.close()


def _blocks(arena: Arena) -> int:
    return os.fstat(arena.fd_readonly).st_blocks * 512


def test_free_ranges_join_and_fit_best() -> None:
    free = FreeRanges()
    free.add(0, 10)
    free.add(20, 5)
    assert free.take(5) == 20
    free.add(10, 10)
    assert free.largest() == (0, 20)
    free.add(20, 5)
    assert free.largest() == (0, 25)
    assert free.take(26) is None
    assert free.take(1, largest_split=24) is None
    assert free.pop_tail(7) == (18, 7)
    free.remove(0, 4)
    assert (free.largest(), free.total_bytes, len(free)) == ((4, 14), 14, 1)


def test_free_ranges_against_a_plain_set() -> None:
    rng = random.Random(1)
    free, truth = FreeRanges(), set(range(400))
    free.add(0, 400)
    taken: list[tuple[int, int]] = []
    for _ in range(4000):
        if taken and rng.random() < 0.5:
            start, size = taken.pop(rng.randrange(len(taken)))
            free.add(start, size)
            truth |= set(range(start, start + size))
        else:
            size = rng.randint(1, 30)
            found = free.take(size)
            if found is None:
                runs = "".join("x" if i in truth else " " for i in range(400)).split()
                assert all(len(run) < size for run in runs)
                continue
            assert set(range(found, found + size)) <= truth
            truth -= set(range(found, found + size))
            taken.append((found, size))
        assert free.total_bytes == len(truth)


def test_segments_keep_what_was_written(arena: Arena) -> None:
    rng = random.Random(2)
    live: dict[ArenaSegment, bytes] = {}
    for _ in range(300):
        if live and rng.random() < 0.45:
            segment = rng.choice([*live])
            assert os.pread(arena.fd_readonly, len(live[segment]), segment.offset) == live[segment]
            del live[segment]
            arena.free(segment)
        else:
            data = rng.randbytes(rng.choice([1, 100, 5000, 300_000, 3 * MIB]))
            segment = arena.allocate(len(data))
            assert segment.offset % PAGE_SIZE == 0 == segment.size_bytes % PAGE_SIZE
            assert segment.size_bytes - len(data) < PAGE_SIZE
            arena.write(segment, 0, data)
            live[segment] = data
        assert arena.in_use_bytes == sum(s.size_bytes for s in live)
    for segment, data in live.items():
        assert os.pread(arena.fd_readonly, len(data), segment.offset) == data
        arena.free(segment)
    assert arena.in_use_bytes == 0


def test_freed_memory_is_used_again_then_given_back(arena: Arena) -> None:
    first = arena.allocate(20 * MIB)
    arena.write(first, 0, bytes(20 * MIB))
    arena.free(first)
    assert arena.warm_bytes == 20 * MIB
    second = arena.allocate(20 * MIB)
    assert second == first and arena.warm_bytes == 0
    arena.free(second)
    assert arena.trim() is False, "wanted a moment ago"
    later_ns = 10**18
    while arena.trim(8 * MIB, later_ns):
        pass
    assert arena.warm_bytes == 0 and _blocks(arena) == 0


def test_what_exists_never_exceeds_what_was_needed_at_once(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    monkeypatch.setattr(arena_module, "_WARM_SLACK_BYTES", MIB)
    rng = random.Random(3)
    live = []
    for _ in range(60):
        segment = arena.allocate(rng.randint(1, 12) * MIB + rng.randint(0, 5000))
        arena.write(segment, 0, bytes(segment.size_bytes))
        live.append(segment)
        while sum(s.size_bytes for s in live) > 16 * MIB:
            arena.free(live.pop(rng.randrange(len(live))))
        assert _blocks(arena) <= max(arena.peak_bytes, MIB) + MIB


def test_a_small_segment_does_not_spoil_a_large_warm_range(arena: Arena) -> None:
    large = arena.allocate(32 * MIB)
    arena.free(large)
    small = arena.allocate(4096)
    assert arena.allocate(32 * MIB) == large
    assert small.offset >= 32 * MIB


def test_holes_in_a_live_segment(arena: Arena) -> None:
    segment = arena.allocate(10 * PAGE_SIZE)
    arena.write(segment, 0, b"x" * segment.size_bytes)
    holes = [
        arena.punch(segment, 100, 3 * PAGE_SIZE),
        arena.punch(segment, 9 * PAGE_SIZE, PAGE_SIZE),
    ]
    assert holes == [(PAGE_SIZE, 2 * PAGE_SIZE), (9 * PAGE_SIZE, PAGE_SIZE)]
    assert arena.punch(segment, 5 * PAGE_SIZE + 1, PAGE_SIZE)[1] == 0
    assert arena.in_use_bytes == 7 * PAGE_SIZE == _blocks(arena)
    data = os.pread(arena.fd_readonly, segment.size_bytes, segment.offset)
    assert data.count(b"x") == 7 * PAGE_SIZE
    arena.free(segment, holes)
    assert arena.in_use_bytes == 0 and arena.warm_bytes == 7 * PAGE_SIZE
    assert arena.allocate(6 * PAGE_SIZE).offset == 3 * PAGE_SIZE


def test_own_limit_is_named_and_counts_only_what_is_in_use() -> None:
    arena = Arena(3, limit_bytes=10 * MIB)
    first = arena.allocate(6 * MIB)
    with pytest.raises(
        MemoryLimitError, match=r"rank 3 on .*memory_limit = 10485760 bytes"
    ) as info:
        arena.allocate(5 * MIB)
    assert isinstance(pickle.loads(pickle.dumps(info.value)), MemoryLimitError)
    arena.free(first)
    arena.allocate(10 * MIB)
    arena.close()


def _file(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_room_below_cgroup_v2(tmp_path: Path) -> None:
    _file(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    _file(tmp_path, "proc/self/cgroup", "0::/outer/inner\n")
    assert limits.room(str(tmp_path)) == (
        8000 * 1024,
        "the memory that is available on the machine",
    )
    _file(tmp_path, "sys/fs/cgroup/outer/memory.max", "5000\n")
    _file(tmp_path, "sys/fs/cgroup/outer/memory.current", "4000\n")
    _file(tmp_path, "sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 500\n")
    _file(tmp_path, "sys/fs/cgroup/outer/inner/memory.max", "max\n")
    _file(tmp_path, "sys/fs/cgroup/outer/inner/memory.current", "1\n")
    found = limits.room(str(tmp_path))
    assert (
        found is not None and found.available_bytes == 1500 and "memory.max = 5000" in found.limit
    )


def test_room_below_cgroup_v1_seen_from_inside_a_container(tmp_path: Path) -> None:
    _file(tmp_path, "proc/self/cgroup", "4:cpu,memory:/not/visible/here\n0::/\n")
    _file(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n")
    _file(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "9000\n")
    found = limits.room(str(tmp_path))
    assert found is not None and found.available_bytes == 0
    _file(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert limits.room(str(tmp_path)) is None


def test_limit_of_the_cgroup_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    _file(tmp_path, "proc/self/cgroup", "0::/\n")
    _file(tmp_path, "sys/fs/cgroup/memory.max", str(100 * MIB))
    _file(tmp_path, "sys/fs/cgroup/memory.current", str(40 * MIB))
    arena = Arena(2, root=str(tmp_path))
    with pytest.raises(MemoryLimitError, match=r"memory\.max = 104857600"):
        arena.allocate(50 * MIB)
    assert arena.in_use_bytes == 0 == _blocks(arena)
    segment = arena.allocate(30 * MIB)
    arena.write(segment, 0, bytes(30 * MIB))
    _file(tmp_path, "sys/fs/cgroup/memory.current", str(90 * MIB))
    arena.free(segment)
    with pytest.raises(MemoryLimitError):
        arena.allocate(50 * MIB)
    assert _blocks(arena) == 0, "what was only kept warm is given back first"
    arena.close()


def test_a_limit_on_file_sizes_is_an_error_not_a_signal() -> None:
    arena = Arena(2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, before[1]))
    try:
        small = arena.allocate(MIB)
        arena.write(small, 0, bytes(MIB))
        with pytest.raises((MemoryLimitError, OSError)):
            arena.allocate(8 * MIB)
        arena.free(arena.allocate(2 * MIB))
        arena.free(small)
        assert arena.in_use_bytes == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        arena.close()


def test_a_view_shows_what_is_written_later(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    monkeypatch.setattr(arena_module, "_VIEW_BYTES", 8 * MIB)
    first = arena.allocate(MIB)
    arena.write(first, 100, b"early")
    address = arena.view_address(first, 100)
    assert ctypes.string_at(address, 5) == b"early"
    second = arena.allocate(20 * MIB)
    arena.write(second, 20 * MIB - 4, b"late")
    assert ctypes.string_at(arena.view_address(second, 20 * MIB - 4), 4) == b"late"
    arena.write(first, 100, b"EARLY")
    assert ctypes.string_at(address, 5) == b"EARLY", "views stay where they were"


def test_neighbours_cannot_write_through_the_descriptor(arena: Arena) -> None:
    segment = arena.allocate(4096)
    arena.write(segment, 0, b"x" * 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(arena.fd_readonly, b"y", 0)


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for use_memfd in (True, False):
        arena = Arena(2, use_memfd=use_memfd)
        arena.view_address(arena.allocate(4096))
        arena.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
