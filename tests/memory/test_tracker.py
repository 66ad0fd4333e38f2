"""The tracker answers "not written" only when not one byte has changed."""

import ctypes
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onehop._memory import kernel
from onehop._memory.intervals import IntervalIndex, joined
from onehop._memory.tracker import Tracker, Watch, get_tracker

PAGE = kernel.PAGE_SIZE
HUGE = 2 << 20

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        not kernel.probe().userfaultfd, reason="this kernel cannot track written pages"
    ),
]


@pytest.fixture(params=["fast", "exact holes"])
def tracker(request: pytest.FixtureRequest) -> Iterator[Tracker]:
    """One tracker in each form of scan (some kernels need the second form)."""
    made = Tracker()
    assert made.available
    if request.param == "exact holes":
        assert made._pages is not None
        made._pages.close()
        made._pages = kernel.WrittenPages(exact_holes=True)
    yield made
    made.close()


class Memory:
    """Anonymous pages at a known address, huge ones if asked for, filled with ones."""

    def __init__(self, size: int, huge: bool = False, fill: bool = True) -> None:
        self.map = mmap.mmap(
            -1, size + (HUGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if huge:
            self.map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.map, np.uint8)
        self.lead = -whole.ctypes.data % HUGE if huge else 0
        self.array = whole[self.lead : self.lead + size]
        if fill:
            self.array[:] = 1
        self.address: int = self.array.ctypes.data

    def view(self, offset: int, length: int) -> memoryview:
        return self.array[offset : offset + length].data

    def advise(self, advice: int, offset: int, length: int) -> None:
        self.map.madvise(advice, self.lead + offset, length)


def address_and_length(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def watch(tracker: Tracker, array: np.ndarray[Any, Any]) -> Watch:
    made = tracker.watch(*address_and_length(array))
    assert made is not None
    return made


def taken(watch: Watch) -> list[tuple[int, int]]:
    ranges = watch.dirty()
    watch.accept()
    return ranges


both_page_sizes = pytest.mark.parametrize("huge", [False, True], ids=["4k", "huge"])


@both_page_sizes
def test_a_write_is_reported_once_and_only_where_it_was(tracker: Tracker, huge: bool) -> None:
    memory = Memory(4 * HUGE, huge)
    w = watch(tracker, memory.array)
    assert taken(w) == []
    memory.array[5 * PAGE + 17] = 9
    memory.array[6 * PAGE] = 9
    memory.array[-1] = 9
    size = len(memory.array)
    assert w.dirty() == [(5 * PAGE, 7 * PAGE), (size - PAGE, size)]
    assert taken(w) == [(5 * PAGE, 7 * PAGE), (size - PAGE, size)], "not accepted, so still there"
    assert taken(w) == []


def test_ranges_are_clipped_to_the_buffer(tracker: Tracker) -> None:
    memory = Memory(8 * PAGE)
    part = memory.array[100 : 3 * PAGE + 50]
    w = watch(tracker, part)
    part[:] = 2
    assert taken(w) == [(0, len(part))]
    part[-1] = 3
    assert taken(w) == [(3 * PAGE - 100, len(part))]
    memory.array[0] = 7  # a neighbour in the first page
    assert taken(w) == [(0, PAGE - 100)]
    memory.array[6 * PAGE] = 7
    assert taken(w) == []


@both_page_sizes
@pytest.mark.parametrize("advice", ["MADV_DONTNEED", "MADV_PAGEOUT", "MADV_FREE"])
def test_memory_given_back_counts_as_written(tracker: Tracker, huge: bool, advice: str) -> None:
    memory = Memory(4 * HUGE, huge)
    w = watch(tracker, memory.array)
    # A part of a page table, exactly one, and more than one
    for offset, length in ((3 * PAGE, 2 * PAGE), (HUGE, HUGE), (0, 4 * HUGE)):
        memory.array[offset : offset + length] = 1
        taken(w)
        before = memory.array.copy()
        code = {"MADV_DONTNEED": 4, "MADV_FREE": 8, "MADV_PAGEOUT": 21}[advice]
        memory.advise(code, offset, length)
        reported = w.dirty()
        expect_changes_covered(before, memory.array, reported)
        if advice == "MADV_DONTNEED":
            assert reported == [(offset, offset + length)]
        w.accept()
        # Reading a hole maps the page of zeros.
        before = memory.array.copy()
        taken(w)
        memory.array[offset + PAGE] = 5
        expect_changes_covered(before, memory.array, w.dirty())
        w.accept()


def expect_changes_covered(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], reported: list[tuple[int, int]]
) -> None:
    changed = before != after
    for start, stop in reported:
        changed[start:stop] = False
    assert not changed.any(), f"unseen change at byte {int(np.argmax(changed))}"


def test_zeros_at_the_address_of_freed_memory(tracker: Tracker) -> None:
    for _ in range(20):
        first = np.ones(300_000, np.uint8)
        address = first.ctypes.data
        w = watch(tracker, first)
        del first
        second = np.zeros(300_000, np.uint8)
        if second.ctypes.data == address:
            assert w.dirty() == [(0, 300_000)]
        w.close()
        del second


def test_freed_and_mapped_anew_at_the_same_address(tracker: Tracker) -> None:
    size = 16 * PAGE
    flags = kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS
    protection = kernel.PROT_READ | kernel.PROT_WRITE
    address = kernel.map_memory(size, protection, flags)
    ctypes.memset(address, 1, size)
    w = tracker.watch(address, size)
    assert w is not None
    inner = tracker.watch(address + 3 * PAGE, PAGE)
    assert inner is not None
    kernel.unmap(address, size)
    # the kernel hands out the same hole again
    for _ in range(3):
        again = kernel.map_memory(size, protection, flags)
        assert again == address
        assert w.dirty() == [(0, size)]
        w.accept()
        assert w.dirty() == [], "registered and armed again"
        assert taken(inner) == [(0, PAGE)], (
            "told too, although its own scan would have seen nothing"
        )
        assert taken(inner) == []
        ctypes.memset(address + 5 * PAGE, 1, 1)
        assert taken(w) == [(5 * PAGE, 6 * PAGE)]
        kernel.unmap(address, size)


def test_part_of_a_watched_range_mapped_anew(tracker: Tracker) -> None:
    memory = Memory(64 * PAGE)
    w = watch(tracker, memory.array)
    other = watch(tracker, memory.array[2 * PAGE : 3 * PAGE])
    memory.array[2 * PAGE] = 5
    map_fixed(memory.address + 10 * PAGE, 4 * PAGE)
    reported = w.dirty()
    covered = np.zeros(64 * PAGE, bool)
    for start, stop in reported:
        covered[start:stop] = True
    assert covered[10 * PAGE : 14 * PAGE].all()
    assert covered[2 * PAGE]
    assert taken(other) == [(0, PAGE)], "a failing scan had taken this mark"


def test_a_buffer_over_an_old_and_a_new_mapping(tracker: Tracker) -> None:
    """As at the end of a heap that grew: the watches in its old part stay as they were."""
    size = 32 * PAGE
    both = kernel.map_memory(2 * size, 3, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    kernel.unmap(both + size, size)
    ctypes.memset(both, 1, size)
    old = tracker.watch(both, size)
    assert old is not None
    map_fixed(both + size, size)
    ctypes.memset(both + size, 1, size)
    over = tracker.watch(both + 30 * PAGE, 20 * PAGE)
    assert over is not None
    assert taken(over) == []
    assert taken(old) == [(30 * PAGE, 32 * PAGE)], "only what was armed anew"
    ctypes.memset(both + 31 * PAGE, 1, 2 * PAGE)
    assert taken(over) == [(PAGE, 3 * PAGE)]
    assert taken(old) == [(31 * PAGE, 32 * PAGE)]
    kernel.unmap(both, 2 * size)


def map_fixed(address: int, size: int, fd: int = -1) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ),
    )
    flags = kernel.MAP_PRIVATE | kernel.MAP_FIXED | (kernel.MAP_ANONYMOUS if fd < 0 else 0)
    assert libc.mmap(address, size, 3, flags, fd, 0) == address


def test_a_neighbour_replaced_during_registration(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread maps a file over part of the mapping between the question and the registration."""
    size = 8 * PAGE
    address = kernel.map_memory(2 * size, 3, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    fd = kernel.memfd_create("test")
    os.ftruncate(fd, size)
    assert tracker.available
    pages = tracker._pages
    assert pages is not None

    def register_late(self: kernel.WrittenPages, start: int, stop: int) -> None:
        map_fixed(address + size, size, fd)
        original(self, start, stop)

    original = kernel.WrittenPages.register
    with monkeypatch.context() as patch:
        patch.setattr(kernel.WrittenPages, "register", register_late)
        w = tracker.watch(address, size)
    assert w is not None
    assert taken(w) == []
    assert tracker.watch(address + size, size) is None, "a file's pages may change unseen"
    kernel.unmap(address, 2 * size)
    os.close(fd)


def test_something_unbelievable_mapped_at_the_address(tracker: Tracker) -> None:
    size = 4 * PAGE
    flags = kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS
    address = kernel.map_memory(size, 3, flags)
    w = tracker.watch(address, size)
    assert w is not None
    kernel.unmap(address, size)
    fd = kernel.memfd_create("test")
    os.ftruncate(fd, size)
    assert kernel.map_private(fd, 0, size) == address
    for _ in range(3):
        assert w.dirty() == [(0, size)]
        assert not w.believed
        w.accept()
    assert tracker.dirty_many([w]) == {w: [(0, size)]}
    assert tracker.watch(address, size) is None
    kernel.unmap(address, size)
    os.close(fd)


def test_moved_and_grown_mappings(tracker: Tracker) -> None:
    """Realloc of a large block is mremap: grown in place, or moved with all page tables."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
    for grow in (2, 3, 50):
        size = 1 << 20
        address = libc.malloc(ctypes.c_size_t(size))
        ctypes.memset(address, 1, size)
        w = tracker.watch(address, size)
        assert w is not None
        moved = libc.realloc(ctypes.c_void_p(address), ctypes.c_size_t(grow * size))
        u = tracker.watch(moved, grow * size)
        assert u is not None
        assert taken(u) == []
        ctypes.memset(moved + 7 * PAGE, 2, 1)
        ctypes.memset(moved + size + 9 * PAGE, 2, 1)
        pages = {start // PAGE for start, _ in taken(u)}
        assert len(pages) == 2
        if moved == address:
            assert w.dirty() != []
        libc.free(ctypes.c_void_p(moved))
        w.close()
        u.close()


def test_grown_in_place_the_new_part_counts_as_written(tracker: Tracker) -> None:
    base = Memory(2 * HUGE + HUGE)
    start = -(-base.address // HUGE) * HUGE
    libc = ctypes.CDLL(None)
    libc.mremap.restype = ctypes.c_void_p
    w = tracker.watch(start, HUGE)
    assert w is not None
    # Shrunk and grown again: the pages of the second half are gone, the mapping is still registered.
    whole = tracker.watch(start, 2 * HUGE)
    assert whole is not None
    end = base.address + 3 * HUGE
    span = end - start
    shrunk = libc.mremap(
        ctypes.c_void_p(start), ctypes.c_size_t(span), ctypes.c_size_t(HUGE), ctypes.c_int(0)
    )
    assert shrunk == start
    grown = libc.mremap(
        ctypes.c_void_p(start), ctypes.c_size_t(HUGE), ctypes.c_size_t(span), ctypes.c_int(0)
    )
    assert grown == start
    assert taken(whole) == [(HUGE, 2 * HUGE)]
    assert taken(w) == []


def test_a_view_and_its_parent(tracker: Tracker) -> None:
    memory = Memory(20 * PAGE)
    parent, view = watch(tracker, memory.array), watch(tracker, memory.array[: 10 * PAGE])
    memory.array[2 * PAGE] = 5
    assert taken(view) == [(2 * PAGE, 3 * PAGE)]
    assert taken(parent) == [(2 * PAGE, 3 * PAGE)]
    memory.array[2 * PAGE] = 6
    memory.array[15 * PAGE] = 6
    assert taken(parent) == [(2 * PAGE, 3 * PAGE), (15 * PAGE, 16 * PAGE)]
    assert taken(view) == [(2 * PAGE, 3 * PAGE)]
    # arming a new watch takes marks too
    memory.array[3 * PAGE] = 7
    late = watch(tracker, memory.array[3 * PAGE : 4 * PAGE])
    assert taken(late) == []
    assert taken(view) == taken(parent) == [(3 * PAGE, 4 * PAGE)]


def test_two_arrays_in_one_page_and_two_owners_of_one_array(tracker: Tracker) -> None:
    memory = Memory(PAGE)
    left, right = memory.array[:2000], memory.array[2000:]
    a, b, again = watch(tracker, left), watch(tracker, right), watch(tracker, left)
    right[5] = 9
    assert taken(a) == [(0, 2000)], "the page was written: to be compared"
    assert taken(b) == [(0, PAGE - 2000)]
    assert taken(again) == [(0, 2000)]
    assert taken(a) == taken(b) == taken(again) == []


def test_accept_keeps_what_another_scan_brought_meanwhile(tracker: Tracker) -> None:
    memory = Memory(8 * PAGE)
    a, b = watch(tracker, memory.array), watch(tracker, memory.array)
    memory.array[0] = 2
    assert a.dirty() == [(0, PAGE)]
    memory.array[4 * PAGE] = 2
    assert b.dirty() == [(0, PAGE), (4 * PAGE, 5 * PAGE)]
    a.accept()
    assert a.dirty() == [(4 * PAGE, 5 * PAGE)]


def test_writes_by_the_kernel(tracker: Tracker, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 3 * PAGE)
    memory = Memory(16 * PAGE)
    w = watch(tracker, memory.array)
    with file.open("rb", buffering=0) as source:
        assert source.readinto(memory.view(4 * PAGE, 2 * PAGE)) == 2 * PAGE
    assert taken(w) == [(4 * PAGE, 6 * PAGE)]
    read_end, write_end = os.pipe()
    os.write(write_end, b"abc")
    os.readv(read_end, [memory.view(9 * PAGE, 3)])
    os.close(read_end)
    os.close(write_end)
    assert taken(w) == [(9 * PAGE, 10 * PAGE)]


def test_direct_io_that_has_ended(tracker: Tracker, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 4 * PAGE)
    memory = Memory(16 * PAGE)
    w = watch(tracker, memory.array)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct reads")
    try:
        assert os.preadv(fd, [memory.view(4 * PAGE, 4 * PAGE)], 0) == 4 * PAGE
    finally:
        os.close(fd)
    assert memory.array[4 * PAGE] == ord("x")
    assert taken(w) == [(4 * PAGE, 8 * PAGE)]


def test_more_ranges_than_one_answer_holds(tracker: Tracker) -> None:
    pages = 10_001
    memory = Memory(pages * PAGE)
    w, other = watch(tracker, memory.array), watch(tracker, memory.array[PAGE : 9 * PAGE])
    memory.array[:: 2 * PAGE] = 2
    expected = [(at * PAGE, (at + 1) * PAGE) for at in range(0, pages, 2)]
    assert tracker.dirty_many([w, other]) == {
        w: expected,
        other: [(at * PAGE, (at + 1) * PAGE) for at in (1, 3, 5, 7)],
    }
    w.accept()
    assert w.dirty() == []
    memory.array[:: 2 * PAGE] = 3
    assert taken(w) == expected
    assert taken(w) == []


def test_a_watch_that_nobody_asks_stays_small_and_right(tracker: Tracker) -> None:
    memory = Memory(200 * PAGE)
    idle, busy = watch(tracker, memory.array), watch(tracker, memory.array)
    for _ in range(1000):
        memory.array[:: 2 * PAGE] = 2
        taken(busy)
    assert len(idle._pending) <= 1 << 16
    shown = idle.dirty()
    assert shown
    assert all(any(a <= at * PAGE < b for a, b in shown) for at in range(0, 200, 2))


def test_untouched_and_huge_zero_pages(tracker: Tracker) -> None:
    for huge in (False, True):
        memory = Memory(4 * HUGE, huge, fill=False)
        w = watch(tracker, memory.array)
        assert taken(w) == []
        total = int(memory.array.sum())  # reads map pages of zeros
        assert total == 0
        before = memory.array.copy()
        memory.array[HUGE + 5] = 1
        expect_changes_covered(before, memory.array, taken(w))
        assert taken(w) == []


def test_what_must_not_be_believed(tracker: Tracker, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 4 * PAGE)
    mapped = np.memmap(file, np.uint8, mode="c")
    assert tracker.watch(*address_and_length(mapped)) is None
    shared = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8)  # shared anonymous
    assert tracker.watch(*address_and_length(shared)) is None
    read_only = kernel.map_memory(PAGE, kernel.PROT_READ, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    assert tracker.watch(read_only, PAGE) is None
    assert tracker.watch(read_only, 0) is None
    kernel.unmap(read_only, PAGE)
    good = Memory(4 * PAGE)
    tracker.exclude(good.address + PAGE, 10)
    assert tracker.watch(good.address, 4 * PAGE) is None
    assert tracker.watch(good.address, PAGE) is not None
    tracker.include(good.address + PAGE, 10)
    late = tracker.watch(good.address, 4 * PAGE)
    assert late is not None
    tracker.exclude(good.address + 3 * PAGE, 1)
    assert late.dirty() == [(0, 4 * PAGE)]
    late.accept()
    assert late.dirty() == [(0, 4 * PAGE)]


def test_a_range_of_another_userfaultfd(tracker: Tracker) -> None:
    size = 4 * PAGE
    address = kernel.map_memory(size, 3, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    foreign = kernel.WrittenPages()
    foreign.register(address, address + size)
    ctypes.memset(address, 1, size)
    assert tracker.watch(address, size) is None
    foreign.close()
    assert tracker.watch(address, size) is not None
    kernel.unmap(address, size)


def test_whole_mappings_are_registered_and_the_budget_holds() -> None:
    tracker = Tracker(map_budget=0)
    memory = Memory(1000 * PAGE)
    assert tracker.watch(memory.address, PAGE) is None, "no budget"
    tracker.close()
    tracker = Tracker()
    assert tracker.available
    assert tracker._mappings is not None
    before = tracker._mappings.count()
    watches = [tracker.watch(memory.address + at * PAGE, PAGE) for at in range(0, 1000, 3)]
    assert all(watches)
    assert tracker._mappings.count() <= before + 3
    tracker.close()


def test_arrays_made_and_watched_in_turn_stay_within_the_budget() -> None:
    # In an interpreter of its own: here earlier tests have left a heap that takes them all in one mapping.
    code = f"import runpy; runpy.run_path({__file__!r})['made_and_watched_in_turn']()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def made_and_watched_in_turn() -> None:
    tracker = Tracker(map_budget=100)
    assert tracker.available
    assert tracker._mappings is not None
    before = tracker._mappings.count()
    small: list[Watch | None] = []
    large: list[Watch | None] = []
    arrays = []
    for size, watches in ((200_000, small), (1 << 20, large)):
        for _ in range(300):
            arrays.append(np.ones(size, np.uint8))
            watches.append(tracker.watch(*address_and_length(arrays[-1])))
    assert tracker._mappings.count() <= before + 2 * 100 + 10
    assert any(small)
    assert not all(small)
    tracker.close()


def test_disabled_by_capability_and_text_form_of_the_map() -> None:
    memory = Memory(4 * PAGE)
    for name in ("userfaultfd", "pagemap_scan"):
        off = Tracker(disable=[name])
        assert not off.available
        assert off.watch(memory.address, PAGE) is None
        assert off.dirty_many([]) == {}
    without_query = Tracker(disable=["procmap_query"])
    w = watch(without_query, memory.array)
    memory.array[0] = 4
    assert taken(w) == [(0, PAGE)]
    assert taken(w) == []
    without_query.close()
    assert w.dirty() == [(0, 4 * PAGE)]
    with pytest.raises(ValueError, match="unknown"):
        kernel.probe(["spelling"])


def test_close_and_disarm(tracker: Tracker) -> None:
    memory = Memory(8 * PAGE)
    w, other = watch(tracker, memory.array), watch(tracker, memory.array[PAGE : 2 * PAGE])
    w.close(disarm=True)
    w.close()
    assert tracker.watch_count == 1
    assert taken(other) == [(0, PAGE)], "disarmed pages count as written"
    other.close()
    assert tracker.watch_count == 0
    assert other.dirty() == [(0, PAGE)]


def test_an_interrupt_in_the_middle_of_a_scan_loses_nothing(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(8 * PAGE)
    w, other = watch(tracker, memory.array), watch(tracker, memory.array)
    pages = tracker._pages
    assert pages is not None
    for ask in (lambda: w.dirty(), lambda: tracker.dirty_many([w, other])):
        memory.array[3 * PAGE] += 1
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(tracker, "_hand_out", interrupted)
            ask()
        for each in (other, w):
            assert any(a <= 3 * PAGE < b for a, b in each.dirty())
            each.accept()
        assert tracker.dirty_many([w, other]) == {}


def test_a_finalizer_that_asks_in_the_middle_of_a_scan(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(8 * PAGE)
    w = watch(tracker, memory.array)
    nested: list[Any] = []
    original = Tracker._hand_out

    def hand_out(self: Tracker, written: list[tuple[int, int]]) -> None:
        nested.append((w.dirty(), tracker.dirty_many([w]), tracker.watch(memory.address, 5)))
        w.accept()
        original(self, written)

    memory.array[2 * PAGE] = 8
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "_hand_out", hand_out)
        assert w.dirty() == [(2 * PAGE, 3 * PAGE)]
    everything = [(0, 8 * PAGE)]
    assert nested == [(everything, {w: everything}, None)]
    assert taken(w) == [(2 * PAGE, 3 * PAGE)]
    assert taken(w) == []


def test_fork_leaves_the_parent_exact_and_the_child_without(tracker: Tracker) -> None:
    memory = Memory(64 * PAGE)
    w = watch(tracker, memory.array)
    memory.array[PAGE] = 7
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 2
            assert not w.believed
            assert w.dirty() == [(0, 64 * PAGE)]
            memory.array[:] = 9  # must not hang
            assert not tracker.available
            fresh = get_tracker()
            u = watch(fresh, memory.array)
            memory.array[5 * PAGE] = 3
            assert taken(u) == [(5 * PAGE, 6 * PAGE)]
            os.write(ready_write, b"x")
            os.read(go_read, 1)
            code = 0
        finally:
            os._exit(code)
    assert os.read(ready_read, 1) == b"x"
    assert taken(w) == [(PAGE, 2 * PAGE)]
    memory.array[8 * PAGE] = 4  # copied on write, since the child shares the page
    assert taken(w) == [(8 * PAGE, 9 * PAGE)]
    assert taken(w) == []
    os.write(go_write, b"x")
    assert os.waitpid(child, 0)[1] == 0
    memory.array[8 * PAGE] = 5
    assert taken(w) == [(8 * PAGE, 9 * PAGE)]
    for fd in (ready_read, ready_write, go_read, go_write):
        os.close(fd)


def test_one_tracker_per_process() -> None:
    found: list[Tracker] = []
    threads = [threading.Thread(target=lambda: found.append(get_tracker())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == 1


def test_threads_that_write_while_others_ask(tracker: Tracker) -> None:
    """Whatever is written after an accepted answer must be reported by a later one."""
    memory = Memory(256 * PAGE)
    stop = threading.Event()

    def write(seed: int) -> None:
        chooser = random.Random(seed)
        while not stop.is_set():
            memory.array[chooser.randrange(256) * PAGE + seed] = chooser.randrange(256)

    def ask(w: Watch, copy: np.ndarray[Any, Any]) -> None:
        with tracker.lock:
            for a, b in w.dirty():
                copy[a:b] = memory.array[a:b]
            w.accept()

    copies = [memory.array.copy() for _ in range(3)]
    watches = [watch(tracker, memory.array) for _ in copies]
    for copy in copies:
        copy[:] = memory.array
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]

    def ask_often(w: Watch, copy: np.ndarray[Any, Any]) -> None:
        while not stop.is_set():
            ask(w, copy)

    askers = [
        threading.Thread(target=ask_often, args=pair) for pair in zip(watches, copies, strict=True)
    ]
    for thread in writers + askers:
        thread.start()
    time.sleep(1.0)
    stop.set()
    for thread in writers + askers:
        thread.join()
    for w, copy in zip(watches, copies, strict=True):
        ask(w, copy)
        assert np.array_equal(copy, memory.array)


# A model of the whole


class Shadow:
    """One buffer, a full copy of it, and the claim that the tracker says what differs."""

    def __init__(self, tracker: Tracker, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.watch = tracker.watch(*address_and_length(array))
        self.copy = array.copy()  # armed before copied

    def settle(self, ranges: list[tuple[int, int]]) -> None:
        expect_changes_covered(self.copy.view(np.uint8), self.array.view(np.uint8), ranges)
        self.copy[:] = self.array
        assert self.watch is not None
        self.watch.accept()


def random_steps(tracker: Tracker, seed: int, steps: int, scratch: Path) -> tuple[int, int]:
    chooser = random.Random(seed)
    numbers = np.random.default_rng(seed)
    sizes = (600, 3_000, 9_000, 40_000, 200_000, 3_000_000)  # elements of 8 bytes: heap and mmap
    source = scratch / "source"
    source.write_bytes(numbers.bytes(1 << 20))
    blocks: list[np.ndarray[Any, Any]] = []
    shadows: list[Shadow] = []
    asked = clean = 0

    def new_block() -> None:
        size = chooser.choice(sizes) + chooser.randrange(500)
        kind = chooser.randrange(4)
        if kind == 0:
            blocks.append(np.zeros(size))
        elif kind == 1:
            blocks.append(numbers.random(size))
        elif kind == 2:
            blocks.append(np.empty(size))
        else:
            memory = mmap.mmap(-1, 8 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if chooser.random() < 0.5:
                memory.madvise(mmap.MADV_HUGEPAGE)
            blocks.append(np.frombuffer(memory, np.float64))
            if chooser.random() < 0.7:
                blocks[-1][:] = 1.5

    def drop(number: int) -> None:
        block = blocks.pop(number)
        for shadow in [s for s in shadows if np.shares_memory(s.array, block)]:
            if shadow.watch is not None and chooser.random() < 0.7:
                shadow.watch.close()  # others are never closed: their watch goes on over dead memory
            shadows.remove(shadow)

    def mapping_of(block: np.ndarray[Any, Any]) -> mmap.mmap | None:
        base = block.base
        while isinstance(base, np.ndarray | memoryview):
            base = base.base if isinstance(base, np.ndarray) else base.obj
        return base if isinstance(base, mmap.mmap) else None

    for _ in range(12):
        new_block()
    for _ in range(steps):
        number = chooser.randrange(len(blocks))
        block = blocks[number]
        action = chooser.randrange(14)
        if action == 0:
            drop(number)
            gc.collect(0)
            new_block()
        elif action == 1:
            a = chooser.randrange(len(block))
            block[a : a + chooser.randrange(1, 2_000)] = chooser.random()
        elif action == 2:
            block[chooser.randrange(len(block))] = chooser.random()
        elif action == 3:
            block[:: chooser.randrange(1, 4_000)] = chooser.random()
        elif action == 4 and len(block) < 100_000:
            block.sort()
        elif action == 5:
            with source.open("rb", buffering=0) as file:
                a = chooser.randrange(len(block))
                file.readinto(block[a : a + 4_000].view(np.uint8).data)
        elif action == 6 and (memory := mapping_of(block)) is not None:
            first = chooser.randrange(0, block.nbytes, PAGE)
            span = min(chooser.choice([PAGE, 9 * PAGE, HUGE, 8 << 20]), block.nbytes - first)
            memory.madvise(chooser.choice([mmap.MADV_DONTNEED, 21]), first, span)
        elif action == 7 and block.flags.owndata:
            affected = [s for s in shadows if np.shares_memory(s.array, block)]
            for shadow in affected:
                shadows.remove(shadow)
            grown = max(100, int(len(block) * chooser.choice([0.5, 1.01, 2])))
            block.resize(min(grown, 4_000_000), refcheck=False)
        elif action in (8, 9):
            a = chooser.choice([0, chooser.randrange(len(block))])
            view = block[a : a + chooser.choice([len(block), 1 + chooser.randrange(len(block))])]
            shadow = Shadow(tracker, view)
            if shadow.watch is not None:
                shadows.append(shadow)
        elif action == 10:
            thread = threading.Thread(target=block.__setitem__, args=(len(block) // 2, 3.25))
            thread.start()
            thread.join()
        elif shadows:
            few = chooser.sample(shadows, min(len(shadows), chooser.choice([1, 1, 4, 20])))
            with tracker.lock:
                if len(few) == 1:
                    assert few[0].watch is not None
                    answers = {few[0].watch: few[0].watch.dirty()}
                else:
                    answers = tracker.dirty_many([s.watch for s in few if s.watch is not None])
                for shadow in few:
                    assert shadow.watch is not None
                    ranges = answers.get(shadow.watch, [])
                    asked += 1
                    clean += not ranges
                    if chooser.random() < 0.8:
                        shadow.settle(ranges)
                    else:  # an encode that failed: nothing is accepted
                        expect_changes_covered(
                            shadow.copy.view(np.uint8), shadow.array.view(np.uint8), ranges
                        )
        while len(shadows) > 60:
            gone = shadows.pop(chooser.randrange(len(shadows)))
            if gone.watch is not None:
                gone.watch.close()
    return asked, clean


@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps_against_full_copies(tracker: Tracker, seed: int, tmp_path: Path) -> None:
    steps = int(os.environ.get("ONEHOP_TEST_STEPS", "1200"))
    asked, clean = random_steps(tracker, seed, steps, tmp_path)
    assert asked > steps / 10
    assert clean > asked / 20, "an answer that is always 'written' would be right, and useless"
    print(f"{asked} questions, {clean} answered clean", file=sys.stderr)


# The bookkeeping


class _Item:
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop


def test_the_index_finds_what_a_plain_search_finds() -> None:
    chooser = random.Random(3)
    index: IntervalIndex[_Item] = IntervalIndex()
    items: list[_Item] = []
    for _ in range(3000):
        start = chooser.randrange(10_000)
        stop = start + chooser.choice([1, 5, 64, 1000, 9000])
        if items and chooser.random() < 0.4:
            gone = items.pop(chooser.randrange(len(items)))
            assert index.remove(gone)
            assert not index.remove(gone)
        else:
            items.append(_Item(start, stop))
            index.add(items[-1])
        found = index.overlapping(start, stop)
        assert len(found) == len(set(found))
        assert set(found) == {i for i in items if i.start < stop and start < i.stop}
    assert len(index) == len(items)
    assert set(index) == set(items)


def test_joined() -> None:
    assert joined([]) == []
    assert joined([(5, 6), (0, 2), (2, 4), (1, 3), (8, 9), (8, 9)]) == [(0, 4), (5, 6), (8, 9)]
