"""Buffers become blobs once, are found again by proof or comparison, and are patched only when nobody holds the old bytes."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onehop._contracts.buffers import SegmentRef
from onehop._memory import changes, kernel, loose
from onehop._memory.arena import Arena
from onehop._memory.blobs import BlobStore, Placement
from onehop._memory.mapping import Attachments
from onehop._memory.tracker import Tracker, get_tracker
from onehop.errors import ForkedError, MemoryLimitError, ProtocolError

MIB = 1 << 20
Array = np.ndarray[Any, Any]

needs_tracker = pytest.mark.skipif(not get_tracker().available, reason="no userfaultfd here")

_CAPABILITIES = kernel.probe()
needs_page_tables = pytest.mark.skipif(
    not (_CAPABILITIES.pagemap_scan or _CAPABILITIES.pagemap_bits), reason="no page tables here"
)


class _Node:
    def __init__(self, rank: int = 2, tracked: bool = True, **options: Any) -> None:
        self.arena = Arena(rank, **options)
        self.attachments = Attachments(self.arena)
        self.store = BlobStore(self.arena, get_tracker() if tracked else None, self.attachments)

    def knows(self, *others: _Node) -> None:
        for other in others:
            self.attachments.add_arena(other.arena.rank, os.dup(other.arena.fd_readonly))

    def place(self, *arrays: Array, **options: Any) -> Placement:
        return self.store.place([_flat(a) for a in arrays], **options)

    def send(self, *arrays: Array) -> Placement:
        """Place and let go at once, as if the message had been answered."""
        placement = self.place(*arrays)
        self.store.release(placement)
        return placement

    def read(self, placement: Placement) -> list[bytes]:
        return [
            os.pread(self.arena.fd_readonly, length, ref.arena_offset + offset)
            for ref, offset, length in placement.locations
        ]

    def close(self) -> None:
        gc.collect()
        self.attachments.close()
        self.store.close()
        self.arena.close()


def _flat(values: Array) -> memoryview:
    return values.data.cast("B")


def _noise(size_bytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random(size_bytes // 8)


@pytest.fixture(params=["tracked", "compared"])
def node(request: pytest.FixtureRequest) -> Iterator[_Node]:
    made = _Node(tracked=request.param == "tracked")
    yield made
    made.close()


@pytest.fixture
def tracked() -> Iterator[_Node]:
    made = _Node()
    yield made
    made.close()


def _other(node: _Node, rank: int = 3) -> _Node:
    made = _Node(rank, tracked=False)
    made.knows(node)
    return made


# Case M4: the value at the time of the call, never an older one


def test_one_element_changed_in_place(node: _Node) -> None:
    values = _noise(8_000_000)
    first = node.send(values)
    assert first.moved_bytes == values.nbytes and node.read(first) == [values.tobytes()]
    again = node.send(values)
    assert again.segments == first.segments and again.moved_bytes == 0
    assert again.kept_bytes == values.nbytes
    values[17] = -1.0
    patched = node.send(values)
    assert patched.segments[0].serial != first.segments[0].serial
    assert patched.segments[0].arena_offset == first.segments[0].arena_offset
    assert 0 < patched.moved_bytes <= changes._COMPARE_BYTES
    assert node.read(patched) == [values.tobytes()]
    assert node.store.counts()["segments"] == 1


def test_a_name_bound_to_another_array_and_back(node: _Node) -> None:
    a, b = _noise(MIB, 1), _noise(MIB, 2)
    for values in (a, b, a, b, a):
        placement = node.send(values)
        assert node.read(placement) == [values.tobytes()]
    assert placement.moved_bytes == 0


def test_a_view_then_its_parent_and_a_write_through_the_view(node: _Node) -> None:
    parent = _noise(4 * MIB)
    view = parent[1000:200_000]
    for step in range(3):
        for values in (view, parent, view):
            assert node.read(node.send(values)) == [values.tobytes()]
        view[5 + step] = step
        for values in (parent, view):
            assert node.read(node.send(values)) == [values.tobytes()]


def test_two_arrays_in_one_page(node: _Node) -> None:
    parent = _noise(40_000)
    first, second = parent[:2300], parent[2300:]
    node.send(first, second)
    for values in (first, second, second):
        values[0] += 1
        assert node.read(node.send(first)) == [first.tobytes()]
        assert node.read(node.send(second)) == [second.tobytes()]


def test_two_clusters_send_the_same_array() -> None:
    nodes = [_Node(2), _Node(2), _Node(2, tracked=False)]
    values = _noise(2 * MIB)
    for step in range(6):
        values[step * 1000] = step
        for node in nodes if step % 2 else reversed(nodes):
            assert node.read(node.send(values)) == [values.tobytes()]
            assert node.read(node.send(values)) == [values.tobytes()]
    for node in nodes:
        node.close()


def test_written_by_readinto_and_by_c(node: _Node, tmp_path: Path) -> None:
    values = np.zeros(MIB, np.uint8)
    node.send(values)
    path = tmp_path / "data"
    path.write_bytes(b"file" * 1000)
    with path.open("rb") as file:
        file.readinto(values[100_000:104_000].data)
    assert node.read(node.send(values)) == [values.tobytes()]
    ctypes.memset(values.ctypes.data + 500_000, 7, 3)
    assert node.read(node.send(values)) == [values.tobytes()]


def test_freed_and_made_again_at_the_same_address(node: _Node) -> None:
    for _ in range(20):
        values = np.zeros(3 * MIB, np.uint8)
        node.send(values)
        values[:] = 1
        node.send(values)
        del values
        values = np.zeros(3 * MIB, np.uint8)
        assert node.read(node.send(values)) == [bytes(3 * MIB)]


def test_memory_given_back_beneath_an_array(node: _Node) -> None:
    memory = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    values = np.frombuffer(memory, np.uint8)
    values[:] = 9
    node.send(values)
    memory.madvise(mmap.MADV_DONTNEED, MIB, MIB)
    placement = node.send(values)
    assert node.read(placement) == [values.tobytes()] and values[MIB] == 0


def test_shared_and_file_memory_is_sent_as_it_is_at_the_call(node: _Node, tmp_path: Path) -> None:
    memory = shared_memory.SharedMemory(create=True, size=MIB)
    path = tmp_path / "mapped"
    path.write_bytes(bytes(MIB))
    mapped: Array = np.memmap(path, np.uint8, "c")
    assert memory.buf is not None
    shared: Array = np.frombuffer(memory.buf, np.uint8)
    code = f"""
        from multiprocessing import shared_memory, resource_tracker
        memory = shared_memory.SharedMemory({memory.name!r})
        resource_tracker.unregister(memory._name, "shared_memory")
        memory.buf[70_000] += 1
        with open({str(path)!r}, "r+b") as file:
            file.seek(80_000)
            file.write(bytes([memory.buf[70_000]]))
    """
    for step in range(3):
        placement = node.send(shared, mapped)
        assert node.read(placement) == [shared.tobytes(), mapped.tobytes()]
        assert (shared[70_000], mapped[80_000]) == (step, step)
        if step < 2:
            subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)
    del shared, mapped
    gc.collect()
    memory.close()
    memory.unlink()


def test_a_failed_place_is_repeated(node: _Node, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = _noise(9 * MIB, 1), _noise(9 * MIB, 2)
    held = node.place(old)
    before = node.store.counts()
    old[5] = -1.0
    write = Arena.write
    calls = 0

    def failing(self: Arena, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(Arena, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        node.place(new, old)
    monkeypatch.undo()
    assert node.store.counts() == before | {"warm_bytes": node.arena.warm_bytes}
    placement = node.place(new, old)
    assert node.read(placement) == [new.tobytes(), old.tobytes()]
    assert placement.moved_bytes == new.nbytes + old.nbytes
    assert node.read(held) != [old.tobytes()], "what is held has its old content"
    for one in (placement, held):
        node.store.release(one)


def test_a_patch_that_fails_half_way_is_repeated(
    node: _Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = _noise(4 * MIB)
    node.send(values)
    values[::100_000] += 1
    write = Arena.write
    calls = 0

    def failing(self: Arena, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError("no")
        write(self, *arguments)

    monkeypatch.setattr(Arena, "write", failing)
    with pytest.raises(OSError, match="no"):
        node.place(values)
    monkeypatch.undo()
    assert node.read(node.send(values)) == [values.tobytes()]


def test_what_another_thread_writes_meanwhile_is_seen_by_the_next(node: _Node) -> None:
    values = np.zeros(4 * MIB, np.uint8)
    stop = threading.Event()

    def write() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            values[int(rng.integers(len(values)))] += 1

    for _ in range(5):
        stop.clear()
        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(10):
            node.send(values)
        stop.set()
        writer.join()
        assert node.read(node.send(values)) == [values.tobytes()]


# Case M5 and what moves


def test_only_the_replaced_field_moves(node: _Node) -> None:
    fields: list[Array] = [np.full(9 * MIB, i, np.uint8) for i in range(6)]
    node.send(*fields)
    for step in range(20):
        fields[step % 6] = np.full(9 * MIB, 100 + step, np.uint8)
        placement = node.send(*fields)
        assert placement.moved_bytes == 9 * MIB
        if step % 7 == 0:
            assert node.read(placement) == [f.tobytes() for f in fields]
        assert node.arena.in_use_bytes <= 7 * 9 * MIB
    assert node.arena.peak_bytes <= 7 * 9 * MIB


def test_a_changed_buffer_takes_its_small_neighbours_along(node: _Node) -> None:
    arrays = [_noise(100_000, i) for i in range(10)]
    first = node.send(*arrays)
    assert len(first.segments) == 1
    arrays[3][7] = 5.0
    second = node.send(*arrays)
    assert len(second.segments) == 1 and second.segments != first.segments
    assert second.segments[0].arena_offset == first.segments[0].arena_offset
    assert second.moved_bytes <= arrays[3].nbytes
    assert node.read(second) == [a.tobytes() for a in arrays]
    assert all(offset % 64 == 0 for _, offset, _ in second.locations)


def test_parts_that_were_replaced_give_their_memory_back(node: _Node) -> None:
    arrays = [_noise(200_000, i) for i in range(50)]
    held = node.place(*arrays)
    contents = [a.tobytes() for a in arrays]
    for step in range(3):
        for i in range(49):
            arrays[i] = _noise(200_000, 1000 + 50 * step + i)
        placement = node.send(*arrays)
        node.store.settle()
        assert node.read(placement) == [a.tobytes() for a in arrays]
    assert node.read(held) == contents, "what a message names stays"
    node.store.release(held)
    while node.store.settle():
        pass
    assert node.arena.in_use_bytes < 10_500_000
    assert node.read(node.send(*arrays)) == [a.tobytes() for a in arrays]
    del arrays
    node.store.settle()
    assert node.arena.in_use_bytes == 0 == node.store.counts()["segments"]
    while node.store.settle(10**18):
        pass
    assert os.fstat(node.arena.fd_readonly).st_blocks == 0


def test_the_same_buffer_twice_moves_once(node: _Node) -> None:
    values = _noise(MIB)
    for _ in range(2):
        placement = node.send(values, values[:], values)
        assert len(set(placement.locations)) == 1 and len(placement.locations) == 3
    assert node.arena.in_use_bytes == MIB


def test_records_die_with_the_array(node: _Node) -> None:
    values = _noise(MIB)
    transposed = np.asfortranarray(_noise(MIB).reshape(256, 512))
    node.store.release(node.store.place([_flat(values), transposed.T.data.cast("B")]))
    assert node.store.counts()["records"] == 2
    node.store.settle()
    assert node.store.counts()["records"] == 2, "a view made for the encoding is not the owner"
    del values, transposed
    node.store.settle()
    assert node.store.counts() == dict.fromkeys(node.store.counts(), 0) | {
        "warm_bytes": node.arena.warm_bytes
    }


def test_owners_that_cannot_be_watched_are_forgotten_after_a_while(node: _Node) -> None:
    data = os.urandom(MIB)
    for _ in range(3):
        placement = node.store.place([memoryview(data)])
        node.store.release(placement)
    assert placement.moved_bytes == 0
    node.store.settle()
    assert node.store.counts()["records"] == 1
    node.store.settle(time.monotonic_ns() + 3_000_000_000)
    assert node.store.counts()["segments"] == 0


@needs_tracker
def test_rewritten_again_and_again_is_not_watched_until_it_rests(tracked: _Node) -> None:
    values = _noise(MIB)
    tracked.send(values)
    gc.collect()  # watches of what earlier tests left
    watches = get_tracker().watch_count
    for step in range(5):
        values += 1
        placement = tracked.send(values)
        assert tracked.read(placement) == [values.tobytes()] and placement.moved_bytes == MIB
        assert get_tracker().watch_count == watches - (step >= 1)
    for _ in range(3):
        assert tracked.send(values).moved_bytes == 0
    assert get_tracker().watch_count == watches
    values[3] = 0
    assert tracked.read(tracked.send(values)) == [values.tobytes()]


@needs_tracker
def test_results_are_watched_only_when_seen_again(tracked: _Node) -> None:
    before = get_tracker().watch_count
    values = _noise(MIB)
    tracked.store.release(tracked.place(values, arm=False))
    assert get_tracker().watch_count == before
    values[0] += 1
    for _ in range(3):
        placement = tracked.send(values)
        assert tracked.read(placement) == [values.tobytes()]
    assert get_tracker().watch_count == before + 1 and placement.moved_bytes == 0


@needs_tracker
def test_excluded_memory_is_compared(tracked: _Node) -> None:
    values = _noise(MIB)
    tracked.send(values)
    get_tracker().exclude(values.ctypes.data, values.nbytes)
    try:
        for _ in range(3):
            assert tracked.send(values).moved_bytes == 0
            values[3] += 1
            assert tracked.read(tracked.send(values)) == [values.tobytes()]
    finally:
        get_tracker().include(values.ctypes.data, values.nbytes)
    for _ in range(3):
        values[3] += 1
        assert tracked.read(tracked.send(values)) == [values.tobytes()]


def test_a_tracker_whose_kernel_lacks_it() -> None:
    node = _Node()
    node.store = BlobStore(node.arena, Tracker(disable=["userfaultfd"]), node.attachments)
    values = _noise(MIB)
    for _ in range(3):
        values[5] += 1
        assert node.read(node.send(values)) == [values.tobytes()]
        assert node.send(values).moved_bytes == 0
    node.close()


# Who holds what


def test_what_is_held_keeps_its_contents(node: _Node) -> None:
    values = _noise(MIB)
    content = values.tobytes()
    placement = node.place(values)
    ref = placement.segments[0]
    node.store.lend(ref, 5)
    node.store.release(placement)
    node.store.release(placement)
    values[0] = -1.0
    changed = node.send(values)
    assert changed.moved_bytes == MIB and changed.segments != [ref]
    assert node.read(placement) == [content]
    assert node.store.known_to(ref, 5) and not node.store.known_to(changed.segments[0], 5)
    node.store.returned(ref, 5)
    assert not node.store.known_to(ref, 5), "freed"
    values[0] = -2.0
    assert node.send(values).segments[0].arena_offset == changed.segments[0].arena_offset


def test_known_stays_true_when_a_segment_is_patched(node: _Node) -> None:
    values = _noise(MIB)
    first = node.place(values)
    node.store.lend(first.segments[0], 5)
    node.store.release(first)
    node.store.returned(first.segments[0], 5)
    values[0] = -1.0
    second = node.send(values)
    assert second.segments != first.segments
    assert node.store.known_to(second.segments[0], 5)
    node.store.peer_gone(5)
    assert not node.store.known_to(second.segments[0], 5)


def test_returns_may_overtake_loans(node: _Node) -> None:
    placement = node.place(_noise(MIB))
    ref = placement.segments[0]
    node.store.returned(ref, 5)
    node.store.returned(ref, 5)
    node.store.release(placement)
    gc.collect()
    node.store.settle()
    assert node.store.counts()["segments"] == 1
    node.store.lend(ref, 5, 2)
    assert node.store.counts()["segments"] == 0


def test_holds_of_the_dead_end(node: _Node) -> None:
    placement = node.place(_noise(MIB))
    ref = placement.segments[0]
    node.store.lend(ref, 5, 3)
    node.store.lend(ref, 6)
    node.store.release(placement)
    node.store.settle()
    node.store.peer_gone(5)
    node.store.returned(ref, 5)
    node.store.lend(ref, 5)
    assert node.store.counts()["lends"] == 1
    node.store.peer_gone(6)
    assert node.store.counts()["segments"] == 0
    node.store.returned(ref, 6)
    with pytest.raises(ProtocolError, match=f"segment {ref.serial} of rank 2"):
        node.store.lend(ref, 7)


def test_pins(node: _Node) -> None:
    placement = node.place(_noise(MIB))
    ref = placement.segments[0]
    node.store.pin(ref)
    node.store.release(placement)
    node.store.settle()
    assert node.store.counts()["segments"] == 1
    node.store.unpin(ref)
    assert node.store.counts()["segments"] == 0


# Case M10 and what arrived


def test_receivers_write_and_keep(node: _Node) -> None:
    other = _other(node)
    values = _noise(2 * MIB)
    content = values.tobytes()
    placement = node.place(values)
    ref = placement.segments[0]
    kept = []
    for _ in range(3):
        node.store.lend(ref, 3)
        kept.append(np.frombuffer(other.attachments.attach(ref), np.float64))
    node.store.release(placement)
    kept[0] *= 2
    np.random.default_rng(1).shuffle(kept[1])
    del kept[1]
    for returned in other.attachments.drain():
        node.store.returned(returned, 3)
    values[:] = 0
    assert node.read(node.send(values)) == [bytes(values.nbytes)]
    assert kept[1].tobytes() == content
    assert kept[0].tobytes() == (np.frombuffer(content) * 2).tobytes()
    del kept
    for returned in other.attachments.drain():
        node.store.returned(returned, 3)
    assert node.store.counts()["segments"] == 1
    other.close()


@needs_page_tables
def test_what_arrived_is_passed_on_under_its_id(node: _Node) -> None:
    other = _other(node)
    placement = node.place(_noise(2 * MIB))
    ref = placement.segments[0]
    node.store.lend(ref, 3)
    node.store.release(placement)
    values = np.frombuffer(other.attachments.attach(ref), np.float64)

    on = other.place(values)
    assert on.segments == [ref] and on.locations == [(ref, 0, 2 * MIB)]
    assert (on.moved_bytes, on.kept_bytes) == (0, 2 * MIB)
    half = other.place(values[-MIB // 8 :])
    assert half.locations == [(ref, MIB, MIB)]
    other.store.release(half)

    part = other.place(values[: MIB // 16])
    assert part.segments[0].owner == 3 and part.moved_bytes == MIB // 2
    again = other.place(values[: MIB // 16])
    assert again.segments == part.segments and again.moved_bytes == 0
    for one in (part, again):
        other.store.release(one)

    content = values.tobytes()
    values[0] += 1
    changed = other.place(values)
    assert changed.segments[0].owner == 3 and other.read(changed) == [values.tobytes()]
    part = other.place(values[: MIB // 16])
    assert other.read(part) == [values[: MIB // 16].tobytes()]
    for one in (part, changed):
        other.store.release(one)

    del values
    assert other.attachments.drain() == [], "the message that passed it on still holds it"
    assert node.read(on) == [content]
    other.store.release(on)
    assert other.attachments.drain() == [ref]
    other.store.settle()
    assert other.store.counts()["segments"] == 0
    other.close()


@needs_page_tables
def test_a_model_that_arrived_is_passed_on_whole_but_not_a_part_of_it(node: _Node) -> None:
    other = _other(node)
    placement = node.place(*[_noise(100_000, i) for i in range(20)])
    node.store.lend(placement.segments[0], 3)
    view = other.attachments.attach(placement.segments[0])
    arrays = [np.frombuffer(view[o : o + n], np.float64) for _, o, n in placement.locations]
    whole = other.place(*arrays)
    assert whole.locations == placement.locations and whole.moved_bytes == 0
    part = other.place(*arrays[:3])
    assert part.moved_bytes == 300_000 and part.segments[0].owner == 3
    arrays[4][0] = 1.0
    mixed = other.place(*arrays)
    assert {ref.owner for ref, _, _ in mixed.locations} == {2, 3}
    # neighbours in the written pages are copied too
    assert 100_000 <= mixed.moved_bytes <= 300_000
    for one in (whole, part, mixed):
        other.store.release(one)
    node.store.release(placement)
    del view, arrays
    other.close()


@needs_page_tables
def test_a_segment_of_its_own_comes_back(node: _Node) -> None:
    placement = node.place(_noise(2 * MIB))
    ref = placement.segments[0]
    node.store.lend(ref, 2)
    values = np.frombuffer(node.attachments.attach(ref), np.float64)
    node.store.release(placement)
    again = node.place(values)
    assert again.segments == [ref] and again.moved_bytes == 0
    del values
    assert node.attachments.drain() == [ref]
    node.store.returned(ref, 2)
    assert node.store.counts()["segments"] == 1
    node.store.release(again)
    node.store.settle()
    assert node.store.counts()["segments"] == 0


# Loose strings


def test_loose_strings_are_found_by_content(node: _Node) -> None:
    header = os.urandom(5000)
    first = node.store.place([], [header, b"x" * 10, header])
    assert first.moved_bytes == 5010 and first.kept_bytes == 5000
    assert node.read(first) == [header, b"x" * 10, header]
    second = node.store.place([_flat(_noise(MIB))], [bytes(header), b""])
    assert second.locations[1] == first.locations[0] and second.moved_bytes == MIB
    assert node.read(second)[1:] == [header, b""]
    for one in (first, second):
        node.store.release(one)
    assert node.store.counts()["loose"] == 3
    node.store.settle(time.monotonic_ns() + loose.UNUSED_NS + 1_000_000_000)
    gc.collect()
    node.store.settle()
    assert node.store.counts()["segments"] == 0


def test_equal_hashes_are_compared(node: _Node, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    monkeypatch.setattr(loose, "hash", lambda _: 5, raising=False)
    assert builtins.hash is not None
    for data in (b"a" * 100, b"b" * 100, b"a" * 100):
        placement = node.store.place([], [data])
        assert node.read(placement) == [data]
        node.store.release(placement)


def test_small_buffers_are_treated_as_loose(node: _Node) -> None:
    small, large = _noise(800), _noise(80_000)
    placement = node.place(small, large, small)
    assert node.read(placement) == [small.tobytes(), large.tobytes(), small.tobytes()]
    assert node.store.counts()["records"] == 1
    node.store.release(placement)


# Limits: case F8


def test_the_limit_is_an_error_before_anything_is_written() -> None:
    node = _Node(limit_bytes=8 * MIB)
    kept = _noise(2 * MIB)
    node.send(kept)
    before = os.fstat(node.arena.fd_readonly).st_blocks
    with pytest.raises(MemoryLimitError, match="memory_limit"):
        node.place(_noise(9 * MIB), kept)
    assert os.fstat(node.arena.fd_readonly).st_blocks <= before
    counts = node.store.counts()
    assert counts["pins"] == 0 and counts["in_use_bytes"] <= 2 * MIB
    assert node.read(node.send(kept)) == [kept.tobytes()]
    node.close()


def test_what_nobody_holds_makes_room() -> None:
    node = _Node(limit_bytes=8 * MIB)
    arrays = [_noise(3 * MIB, i) for i in range(4)]
    for _ in range(2):
        for values in arrays:
            assert node.read(node.send(values)) == [values.tobytes()]
    held = node.place(arrays[3])
    with pytest.raises(MemoryLimitError):
        node.place(arrays[0], arrays[1])
    node.store.release(held)
    data = os.urandom(7 * MIB)
    placement = node.store.place([], [data])
    assert node.read(placement) == [data]
    node.store.release(placement)
    node.close()


def test_one_shared_copy_and_no_more() -> None:
    node = _Node()
    values = _noise(32 * MIB)
    for step in range(4):
        placement = node.place(values)
        node.store.lend(placement.segments[0], 3)
        node.store.returned(placement.segments[0], 3)
        node.store.release(placement)
        values += step
        values[0] += 1
    assert os.fstat(node.arena.fd_readonly).st_blocks * 512 == 32 * MIB
    node.close()


@pytest.mark.skipif(not _CAPABILITIES.memfd, reason="no memfd here")
def test_a_small_dev_shm_does_not_matter() -> None:
    code = """
        import os
        import numpy as np
        from onehop._memory.arena import Arena
        from onehop.errors import MemoryLimitError

        arena = Arena(2)
        segment = arena.allocate(64 << 20)
        arena.write(segment, 0, bytes(64 << 20))
        limited = Arena(2, use_memfd=False)
        try:
            limited.allocate(64 << 20)
        except MemoryLimitError as error:
            assert "/dev/shm" in str(error), error
        else:
            raise SystemExit("no error")
        small = limited.allocate(500_000)
        limited.write(small, 0, bytes(500_000))
        print("fine")
    """
    mounted = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("may not mount here")
    result = subprocess.run(
        [
            *("unshare", "-m", "sh", "-c"),
            'mount -t tmpfs -o size=1m tmpfs /dev/shm; exec "$@"',
            *("sh", sys.executable, "-c", textwrap.dedent(code)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout == "fine\n", result.stderr


def test_many_arrays_need_few_descriptors_and_few_mappings() -> None:
    code = """
        import os, resource, threading
        import numpy as np
        from onehop._memory.arena import Arena
        from onehop._memory.blobs import BlobStore
        from onehop._memory.mapping import Attachments
        from onehop._memory.tracker import get_tracker

        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        arenas = Arena(2), Arena(3)
        sender, receiver = map(Attachments, arenas)
        store = BlobStore(arenas[0], get_tracker(), sender)
        receiver.add_arena(2, os.dup(arenas[0].fd_readonly))
        arrays = [np.full(100_000, i % 256, np.uint8) for i in range(10_000)]
        together = store.place([a.data for a in arrays[:5000]])
        single = [store.place([a.data]) for a in arrays[5000:]]
        refs = [ref for p in [together, *single] for ref in p.segments]
        views = [receiver.attach(ref) for ref in refs]
        assert all(view[5] == (5000 + i) % 256 for i, view in enumerate(views[1:]))
        assert len(os.listdir("/proc/self/fd")) < 40
        assert len(open("/proc/self/maps").readlines()) < 25_000
        threads = [threading.Thread(target=threading.Event().wait, args=(0.2,)) for _ in range(50)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        again = [store.place([a.data]) for a in arrays[5000:]]
        assert all(p.moved_bytes == 0 for p in again)
        for p in [together, *single, *again]: store.release(p)
        del views, arrays
        assert len(receiver.drain()) == len(refs)
        store.settle()
        assert store.counts()["segments"] == 0, store.counts()
        print("fine")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.stdout == "fine\n", result.stderr


# Threads


def test_loose_strings_and_returns_do_not_wait_for_a_long_copy(
    node: _Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = node.place(_noise(MIB))
    node.store.lend(held.segments[0], 5)
    copying, go_on = threading.Event(), threading.Event()
    write = Arena.write

    def slow(self: Arena, segment: Any, offset: int, buffer: Any) -> None:
        if len(buffer) == 4 * MIB:
            copying.set()
            assert go_on.wait(30)
        write(self, segment, offset, buffer)

    monkeypatch.setattr(Arena, "write", slow)
    values = _noise(4 * MIB)
    big = threading.Thread(target=node.send, args=(values,))
    big.start()
    try:
        assert copying.wait(10)
        placement = node.store.place([], [b"ping" * 300])
        node.store.lend(placement.segments[0], 5)
        node.store.returned(placement.segments[0], 5)
        node.store.returned(held.segments[0], 5)
        node.store.release(held)
        node.store.release(placement)
        node.store.settle()
        node.attachments.drain()
        node.store.peer_gone(5)
    finally:
        go_on.set()
        big.join()


def test_many_threads_place_the_same_arrays(node: _Node) -> None:
    arrays = [_noise(300_000, i) for i in range(6)]
    contents = [a.tobytes() for a in arrays]
    failures: list[object] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        own = _noise(200_000, seed)
        for step in range(60):
            own[step] = -1.0
            chosen = [int(i) for i in rng.integers(0, 6, 3)]
            placement = node.store.place(
                [_flat(own), *[_flat(arrays[i]) for i in chosen]], [bytes([step % 5]) * 3000]
            )
            expected = [own.tobytes(), *[contents[i] for i in chosen], bytes([step % 5]) * 3000]
            if node.read(placement) != expected:
                failures.append((seed, step))
            node.store.release(placement)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert node.store.counts()["pins"] == 0


# Processes


_RECEIVER = """
    import array, hashlib, os, socket, sys
    from onehop._contracts.buffers import SegmentRef
    from onehop._memory.arena import Arena
    from onehop._memory.mapping import Attachments

    link = socket.socket(fileno=int(sys.argv[1]))
    attachments = Attachments(Arena(3))
    kept = []
    while message := link.recvmsg(1000, 100):
        data, ancillary = message[:2]
        if not data:
            break
        for _, _, fds in ancillary:
            attachments.add_arena(2, array.array("i", fds)[0])
        command, *numbers = data.decode().split()
        if command == "attach":
            kept.append(attachments.attach(SegmentRef(*map(int, numbers))))
            answer = hashlib.sha256(kept[-1]).hexdigest()
        elif command == "hash":
            answer = hashlib.sha256(kept[int(numbers[0])]).hexdigest()
        elif command == "write":
            kept[int(numbers[0])][:100] = b"w" * 100
            answer = "written"
        elif command == "drop":
            kept.clear()
            answer = " ".join(str(ref.serial) for ref in attachments.drain())
            attachments.settle()
        link.send(answer.encode())
"""


def test_between_two_processes(node: _Node) -> None:
    import hashlib

    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_RECEIVER), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(30)

    def ask(text: str, *fds: int) -> str:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        ours.sendmsg([text.encode()], rights)
        return ours.recv(1000).decode()

    def attach(ref: SegmentRef, *fds: int) -> str:
        node.store.lend(ref, 3)
        return ask("attach " + " ".join(map(str, ref)), *fds)

    values = _noise(4 * MIB)
    hashes = []
    for step in range(4):
        placement = node.place(values)
        hashes.append(hashlib.sha256(values.tobytes()).hexdigest())
        fds = [node.arena.fd_readonly][step:]
        assert attach(placement.segments[0], *fds) == hashes[-1]
        node.store.release(placement)
        values[step] = -1.0
    assert ask("write 1") == "written"
    values[:] = 0
    node.send(values)
    assert [ask(f"hash {i}") == hashes[i] for i in range(4)] == [True, False, True, True]
    serials = ask("drop").split()
    assert len(serials) == 4
    by_serial = {s.ref.serial: s.ref for s in node.store._table._by_serial.values()}
    for serial in serials:
        node.store.returned(by_serial[int(serial)], 3)
    values[5] = 1.0
    placement = node.place(values)
    assert placement.moved_bytes < MIB, "patched in place"
    assert attach(placement.segments[0]) == hashlib.sha256(values.tobytes()).hexdigest()
    node.store.release(placement)
    ours.close()
    process.wait(30)
    node.store.peer_gone(3)
    del values
    node.store.settle()
    assert node.store.counts()["segments"] == 0


def test_a_forked_child_may_not_place(node: _Node) -> None:
    values = _noise(MIB)
    placement = node.place(values)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(ForkedError):
                node.place(values)
            node.store.release(placement)
            node.store.settle()
            values[0] = 5.0
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    values[0] = 6.0
    assert node.read(node.send(values)) == [values.tobytes()]
    node.store.release(placement)


def test_the_address_of_a_view_is_found_quickly_and_rightly() -> None:
    from onehop._memory.addresses import address_reader

    read = address_reader()
    numbers: Array = np.zeros(9)
    for made in (memoryview(bytes(100)), memoryview(bytearray(100)), numbers.data):
        view = made.cast("B")
        for part in (view, view[3:50], view[7:8], view.toreadonly()):
            assert read(part) == kernel.address_of(part)
