"""Attached segments: private to whoever attached them, reused only when clean, reported when the last slice has died."""

from __future__ import annotations

import array
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from onehop._contracts.buffers import SegmentRef
from onehop._memory import idle, kernel
from onehop._memory.arena import PAGE_SIZE, Arena
from onehop._memory.forks import ended
from onehop._memory.mapping import Attachments, Lifeline
from onehop.errors import ForkedError, ProtocolError

MIB = 1 << 20

_DISABLED = {"scan": (), "bits": ("pagemap_scan",), "none": ("pagemap_scan", "pagemap_bits")}


class _Side:
    """An owner (rank 2) and a receiver (rank 3) in one process, over a descriptor of its own."""

    def __init__(self, disable: tuple[str, ...] = (), **options: Any) -> None:
        self.arena = Arena(2)
        self.receiver_arena = Arena(3)
        self.attachments = Attachments(self.receiver_arena, kernel.probe(disable), **options)
        self.attachments.add_arena(2, os.dup(self.arena.fd_readonly))
        self._serial = 0

    def seal(self, data: bytes) -> SegmentRef:
        segment = self.arena.allocate(len(data))
        self.arena.write(segment, 0, data)
        self._serial += 1
        return SegmentRef(2, self._serial, segment.offset, segment.size_bytes)

    def rewrite(self, ref: SegmentRef, data: bytes) -> SegmentRef:
        os.pwrite(self.arena._fd, data, ref.arena_offset)
        self._serial += 1
        return ref._replace(serial=self._serial)

    def close(self) -> None:
        gc.collect()
        self.attachments.close()
        self.arena.close()
        self.receiver_arena.close()


@pytest.fixture(params=[*_DISABLED])
def side(request: pytest.FixtureRequest) -> Iterator[_Side]:
    made = _Side(_DISABLED[request.param])
    yield made
    made.close()


@pytest.fixture
def scan_side() -> Iterator[_Side]:
    made = _Side()
    if made.attachments._pagemap is None:
        made.close()
        pytest.skip("no page tables here")
    yield made
    made.close()


def _in_child(work: Callable[[], None], keep_running: int | None = None) -> int:
    """Fork; the child runs `work`, then waits for a byte on a descriptor, and ends with 0 unless something was raised."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            if keep_running is not None:
                os.read(keep_running, 1)
            code = 0
        except BaseException as error:
            os.write(2, f"in child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return pid


def test_writes_of_a_receiver_are_its_own(side: _Side) -> None:
    data = os.urandom(3 * MIB)
    ref = side.seal(data)
    first = side.attachments.attach(ref)
    second = side.attachments.attach(ref)
    assert not first.readonly and first.format == "B" and first.nbytes == ref.size_bytes
    first[MIB] ^= 0xFF
    assert first[MIB] != data[MIB]
    assert bytes(second[: len(data)]) == data
    del first
    assert side.attachments.drain() == [ref]
    third = side.attachments.attach(ref)
    assert bytes(third[: len(data)]) == data
    del second, third
    assert side.attachments.drain() == [ref, ref]


def test_slices_and_arrays_keep_a_mapping(side: _Side) -> None:
    ref = side.seal(bytes(range(256)) * 64)
    view = side.attachments.attach(ref)
    kept = np.frombuffer(view[4096:8192], np.uint8)[10:20].reshape(2, 5).T
    del view
    assert side.attachments.drain() == []
    assert kept[0, 0] == 10
    del kept
    assert side.attachments.drain() == [ref] and side.attachments.drain() == []


def test_a_clean_mapping_is_used_again_and_shows_the_new_content(scan_side: _Side) -> None:
    side = scan_side
    ref = side.seal(b"a" * MIB)
    view = side.attachments.attach(ref)
    address = kernel.address_of(view)
    assert bytes(view) == b"a" * MIB
    del view
    side.attachments.drain()
    for settle in (True, False):
        if settle:
            side.attachments.settle()
        ref = side.rewrite(ref, b"b" * MIB)
        view = side.attachments.attach(ref)
        assert kernel.address_of(view) == address
        assert bytes(view) == b"b" * MIB
        del view
        assert side.attachments.drain() == [ref]


@pytest.mark.parametrize("settle", [True, False])
def test_a_written_mapping_is_never_used_again(side: _Side, settle: bool) -> None:
    ref = side.seal(b"a" * MIB)
    for _ in range(4):
        view = side.attachments.attach(ref)
        assert bytes(view) == b"a" * MIB
        view[MIB - 1] = 0
        del view
        assert side.attachments.drain() == [ref]
        if settle:
            side.attachments.settle()
            assert side.attachments.counts()["idle"] == 0
        ref = side.rewrite(ref, b"a" * MIB)


def test_punched_and_written_again_shows_through_an_idle_mapping(scan_side: _Side) -> None:
    side = scan_side
    ref = side.seal(b"a" * MIB)
    view = side.attachments.attach(ref)
    assert view[5] == ord("a")
    del view
    side.attachments.drain()
    kernel.punch_hole(side.arena._fd, ref.arena_offset, ref.size_bytes)
    ref = side.rewrite(ref, b"c" * MIB)
    assert bytes(side.attachments.attach(ref)) == b"c" * MIB


def test_origin_of_unwritten_buffers(side: _Side) -> None:
    can_tell = side.attachments._pagemap is not None
    ref = side.seal(np.random.default_rng(1).random(MIB // 8).tobytes())
    view = side.attachments.attach(ref)
    numbers = np.frombuffer(view, np.float64)
    part = numbers[1000:2000]
    where = (part.ctypes.data, part.nbytes)
    assert side.attachments.unwritten_origin(*where) == ((ref, 8000) if can_tell else None)
    assert side.attachments.is_written(view) is not can_tell
    float(numbers.max())
    assert side.attachments.unwritten_origin(*where) == ((ref, 8000) if can_tell else None)
    numbers[2050] = 1.0  # another page
    assert side.attachments.unwritten_origin(*where) == ((ref, 8000) if can_tell else None)
    numbers[1999] = 1.0
    assert side.attachments.unwritten_origin(*where) is None
    assert side.attachments.is_written(view)
    other = np.zeros(1000)
    assert side.attachments.unwritten_origin(other.ctypes.data, other.nbytes) is None
    assert side.attachments.unwritten_origin(where[0], ref.size_bytes * 2) is None


def test_written_by_the_kernel_counts(scan_side: _Side) -> None:
    ref = scan_side.seal(bytes(8 * PAGE_SIZE))
    view = scan_side.attachments.attach(ref)
    with open("/dev/zero", "rb", buffering=0) as zeros:
        assert zeros.readinto(view[PAGE_SIZE : PAGE_SIZE + 1]) == 1
    assert scan_side.attachments.is_written(view)
    assert not scan_side.attachments.is_written(view[2 * PAGE_SIZE :])


def test_ends_inside_a_collection_while_the_lock_is_held(side: _Side) -> None:
    ref = side.seal(bytes(PAGE_SIZE))
    loop: list[Any] = [side.attachments.attach(ref)]
    loop.append(loop)
    del loop
    with side.attachments._lock:
        gc.collect()
    assert side.attachments.drain() == [ref]


def test_without_room_for_mappings_segments_are_copied() -> None:
    side = _Side(most_maps=3)
    refs = [side.seal(bytes([i]) * 9000) for i in range(10)]
    views = [side.attachments.attach(ref) for ref in refs]
    assert side.attachments.counts()["live"] == 3
    assert all(bytes(view[:9000]) == bytes([i]) * 9000 for i, view in enumerate(views))
    assert side.attachments.drain() == refs[3:], "a copy holds nothing"
    del views
    assert sorted(side.attachments.drain()) == refs[:3]
    side.close()


def test_idle_mappings_are_bounded(scan_side: _Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "IDLE_COUNT", 5)
    refs = [scan_side.seal(bytes(PAGE_SIZE)) for _ in range(20)]
    views = [scan_side.attachments.attach(ref) for ref in refs]
    del views
    assert len(scan_side.attachments.drain()) == 20
    assert scan_side.attachments.counts()["idle"] == 5
    monkeypatch.setattr(idle, "IDLE_NS", 0)
    scan_side.attachments.settle()
    assert scan_side.attachments.counts()["idle"] == 0


def test_arenas_are_closed_when_nothing_of_them_is_mapped(side: _Side) -> None:
    ref = side.seal(b"z" * PAGE_SIZE)
    fd = side.attachments.arena_fd(2)
    view = side.attachments.attach(ref)
    side.attachments.drop_arena(2)
    os.fstat(fd)
    assert bytes(view) == b"z" * PAGE_SIZE
    del view
    assert side.attachments.drain() == [ref]
    assert not side.attachments.has_arena(2)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    with pytest.raises(ProtocolError, match=r"rank 3 .* rank 2"):
        side.attachments.attach(ref)
    assert side.attachments.has_arena(3) and side.attachments.arena_fd(3) >= 0


def test_an_arena_sent_twice_keeps_one_descriptor(side: _Side) -> None:
    fd = side.attachments.arena_fd(2)
    second = os.dup(fd)
    side.attachments.add_arena(2, second)
    assert side.attachments.arena_fd(2) == fd
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(second)


def test_another_process_attaches_by_descriptor_and_outlives_the_owner() -> None:
    ours, theirs = socket.socketpair()
    data = os.urandom(4 * MIB)

    def owner() -> None:
        arena = Arena(2)
        segment = arena.allocate(len(data))
        arena.write(segment, 0, data)
        fds = array.array("i", [arena.fd_readonly])
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        theirs.recv(1)

    pid = _in_child(owner)
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    fd = array.array("i", ancillary[0][2])[0]
    arena = Arena(3)
    attachments = Attachments(arena)
    attachments.add_arena(2, fd)
    ref = SegmentRef(2, 1, 0, len(data))
    view = attachments.attach(ref)
    with pytest.raises(OSError, match=r"Permission denied|EACCES"):
        kernel.map_memory(
            4096, kernel.PROT_READ | kernel.PROT_WRITE, kernel.MAP_SHARED, attachments.arena_fd(2)
        )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert bytes(view) == data
    view[0:4] = b"mine"
    assert bytes(attachments.attach(ref)[:4]) == data[:4]
    del view
    attachments.drain()
    attachments.drop_arena(2)
    assert attachments.counts() == dict.fromkeys(attachments.counts(), 0)
    attachments.close()
    arena.close()
    ours.close()
    theirs.close()


def test_a_forked_child_holds_what_it_can_read(side: _Side) -> None:
    ref = side.seal(b"k" * MIB)
    kept = [side.attachments.attach(ref)]
    other = side.attachments.attach(ref)
    del other
    wait_read, wait_write = os.pipe()

    def child() -> None:
        assert bytes(kept[0]) == b"k" * MIB
        with pytest.raises(ForkedError):
            side.attachments.attach(ref)
        assert side.attachments.drain() == []
        side.attachments.settle()

    pid = _in_child(child, wait_read)
    assert side.attachments.drain() == [ref], "had died before the fork"
    kept.clear()
    assert side.attachments.drain() == [] and side.attachments.counts()["held_for_children"] == 1
    later = side.attachments.attach(ref)
    del later
    assert side.attachments.drain() == [ref], "made after the fork"
    fds = side.attachments.child_fds()
    assert len(fds) == 1 and not ended(fds[0])
    os.write(wait_write, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert ended(fds[0])
    assert side.attachments.drain() == [ref]
    assert side.attachments.counts()["held_for_children"] == 0
    assert side.attachments.child_fds() == []
    os.close(wait_read)
    os.close(wait_write)


def test_a_grandchild_holds_too_and_a_killed_one_lets_go(scan_side: _Side) -> None:
    side = scan_side
    ref = side.seal(b"g" * MIB)
    view = side.attachments.attach(ref)
    pid_read, pid_write = os.pipe()

    def child() -> None:
        grandchild = _in_child(lambda: time.sleep(60))
        os.write(pid_write, grandchild.to_bytes(4, "little"))

    os.waitpid(_in_child(child), 0)
    grandchild = int.from_bytes(os.read(pid_read, 4), "little")
    del view
    assert side.attachments.drain() == []
    os.kill(grandchild, signal.SIGKILL)
    end = time.monotonic() + 5
    while not (drained := side.attachments.drain()) and time.monotonic() < end:
        time.sleep(0.01)
    assert drained == [ref]
    os.close(pid_read)
    os.close(pid_write)


def test_a_child_keeps_its_data_and_closes_the_parents_descriptors(scan_side: _Side) -> None:
    side = scan_side
    ref = side.seal(b"d" * MIB)
    kept = [side.attachments.attach(ref)]
    fds = (side.attachments.arena_fd(2), side.arena.fd_readonly, side.arena._fd)

    def child() -> None:
        for fd in fds:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
        kept[0][0] = 1
        assert bytes(kept[0][1:]) == b"d" * (MIB - 1)

    assert os.waitpid(_in_child(child), 0)[1] == 0
    assert kept[0][0] == ord("d")
    kept.clear()
    assert side.attachments.drain() == [ref]


def test_forks_without_live_mappings_cost_no_descriptor(scan_side: _Side) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pid = _in_child(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before
    os.waitpid(pid, 0)


def test_a_program_started_in_between_holds_nothing(scan_side: _Side) -> None:
    import subprocess

    ref = scan_side.seal(b"s" * PAGE_SIZE)
    view = scan_side.attachments.attach(ref)
    with subprocess.Popen(["sleep", "30"]) as process:
        del view
        assert scan_side.attachments.drain() == [ref]
        process.kill()


def test_lifeline_ends_with_the_last_child() -> None:
    read_fd, write_fd = os.pipe()
    wait_read, wait_write = os.pipe()

    def parent() -> None:
        lifeline = Lifeline()
        _in_child(lambda: None, wait_read)
        with socket.socket(fileno=os.dup(theirs.fileno())) as link:
            fds = array.array("i", [lifeline.read_fd])
            link.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    ours, theirs = socket.socketpair()
    os.waitpid(_in_child(parent), 0)
    _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    lifeline_fd = array.array("i", ancillary[0][2])[0]
    assert not ended(lifeline_fd), "a child of the dead process lives on"
    os.write(wait_write, b"x")
    end = time.monotonic() + 5
    while not ended(lifeline_fd):
        assert time.monotonic() < end
        time.sleep(0.01)
    for fd in (read_fd, write_fd, wait_read, wait_write, lifeline_fd):
        os.close(fd)
    ours.close()
    theirs.close()


def test_many_threads(scan_side: _Side) -> None:
    side = scan_side
    datas = [bytes([i]) * (PAGE_SIZE * (1 + i % 5)) for i in range(20)]
    refs = [side.seal(data) for data in datas]
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        kept = []
        for _ in range(300):
            i = int(rng.integers(20))
            view = side.attachments.attach(refs[i])
            if bytes(view) != datas[i]:
                failures.append(f"segment {i}")
            if rng.random() < 0.3:
                view[int(rng.integers(len(view)))] = 255
            kept.append(view)
            if len(kept) > 5:
                del kept[int(rng.integers(5))]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    drained = 0
    while any(thread.is_alive() for thread in threads):
        drained += len(side.attachments.drain())
        side.attachments.settle()
        time.sleep(0.001)
    assert failures == []
    drained += len(side.attachments.drain())
    assert drained == 1200
    assert side.attachments.counts()["live"] == 0
