"""Which bytes of this process's memory may have been written since somebody last looked.

The kernel marks *pages*, and a scan takes the marks away for everyone who cares about them: views and their parents, two
arrays in one page, two clusters. Therefore one tracker per process (`get_tracker`, the one deliberate module-level state of
the package), and one rule: whatever a scan reports is handed to **every** watch that overlaps it, before anybody reads it.

Why an answer "not written" can be believed:

- Only private anonymous memory is registered, always whole mappings, checked after registration (a mapping never changes its
  kind; a new one at the same address is not registered, and a scan of it fails).
- Right after registration nothing counts as armed. A page gets armed only by the scan that reported it.
- Pages whose memory was given back count as written (`kernel.open_written_pages` tries that out).

Not seen, hence to be named by `Tracker.exclude`: memory that a device writes past the page tables (pinned by
cudaHostRegister, RDMA or io_uring buffers, a read with O_DIRECT that is still under way while the range is scanned).

Must never know what the bytes are for, nor hold a reference to the objects that own them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

from onehop._memory import kernel
from onehop._memory.intervals import IntervalIndex
from onehop._memory.watch import PAGE_MASK, Watch

__all__ = ["Tracker", "Watch", "get_tracker"]

_GAP_BYTES = 16 * kernel.PAGE_SIZE
"""Neighbours this close are scanned by one call, which arms the pages between them too: a call costs as much as the walk over
a thousand pages, and a page armed in vain costs its owner one fault."""
_LARGE_BYTES = 1 << 20
_PLANS_KEPT = 8
_RECOUNT_NS = 1_000_000_000

_by_start = attrgetter("start")
_stop_of = itemgetter(1)
_start_of = itemgetter(0)


class Tracker:
    """Everything that is known about written pages in this process. Get it from `get_tracker`.

    Parameters
    ----------
    disable : iterable of str
        Capabilities of the kernel to do without, as in ONEHOP_DISABLE.
    map_budget : int, optional
        Most mappings that registration may cost; a quarter of vm.max_map_count if not given.

    Attributes
    ----------
    lock : threading.RLock
        Hold it over scan, comparison and publication. Never taken by a finalizer of the caller: one may run at any moment,
        also in the middle of a scan in the same thread, where this lock would let it in.
    """

    def __init__(self, disable: Iterable[str] = (), map_budget: int | None = None) -> None:
        self.lock = threading.RLock()
        self._disable = frozenset(disable)
        self._pages: kernel.WrittenPages | None = None
        self._mappings: kernel.MemoryMap | None = None
        self._ended = False
        self._index: IntervalIndex[Watch] = IntervalIndex()
        self._excluded: list[tuple[int, int]] = []
        self._plans: dict[tuple[Watch, ...], list[_Span]] = {}
        # A signal handler or a finalizer may call in again in the middle of a scan, in the same thread, where the lock lets it
        # in and the buffers of the scan are in use: it is told "everything may have been written".
        self._busy = False
        self._in_flight: tuple[int, int] | None = None
        self._map_budget = _map_budget() if map_budget is None else map_budget
        self._maps_charged = 0
        self._recount_after_ns = 0

    @property
    def available(self) -> bool:
        """Whether this kernel can tell what was written; opens the descriptors at first use."""
        with self.lock:
            return self._pages is not None or self._open()

    @property
    def watch_count(self) -> int:
        """Number of open watches."""
        return len(self._index)

    def watch(self, address: int, length: int) -> Watch | None:
        """Arm the pages of a buffer. Do this *before* copying it, so that a write during the copy is seen afterwards.

        Returns
        -------
        Watch or None
            None where the kernel's answer could not be believed (memory of files, shared or excluded memory, a mapping of
            another userfaultfd, too many mappings, an old kernel): compare bytes instead.
        """
        if length <= 0:
            return None
        with self.lock:
            if not self.available:
                return None
            watch = Watch(self, address, length)
            start, stop = watch.start, watch.stop
            if any(a < stop and start < b for a, b in self._excluded):
                return None
            pages = self._pages
            if pages is None or self._busy:
                return None
            self._busy = True
            try:
                if not self._arm(start, stop) or not pages.owns(start, stop):
                    return None
            finally:
                self._busy = False
            self._index.add(watch)
            return watch

    def dirty_many(self, watches: Sequence[Watch]) -> dict[Watch, list[tuple[int, int]]]:
        """Ask `Watch.dirty` of many watches at once: neighbours share a scan.

        Returns
        -------
        dict
            Only those of which anything may have been written.
        """
        with self.lock:
            if self._busy:
                return {watch: watch._everything() for watch in watches}
            self._busy = True
            try:
                return self._dirty_many(tuple(watches))
            finally:
                self._busy = False

    def exclude(self, address: int, length: int) -> None:
        """Never believe the kernel about this range: compare it. For memory that a device writes on its own."""
        start, stop = address & PAGE_MASK, -(-(address + length) & PAGE_MASK)
        with self.lock:
            self._excluded.append((start, stop))
            for watch in self._index.overlapping(start, stop):
                watch._disbelieve()

    def include(self, address: int, length: int) -> None:
        """Undo one `exclude` of exactly this range (before the memory is freed)."""
        with self.lock:
            self._excluded.remove((address & PAGE_MASK, -(-(address + length) & PAGE_MASK)))

    def close(self) -> None:
        """Close the descriptors, which ends all protection; no watch is believed afterwards."""
        with self.lock:
            self._ended = True
            if self._pages is not None:
                self._pages.close()
            if self._mappings is not None:
                self._mappings.close()
            self._pages = self._mappings = None
            for watch in self._index:
                watch._disbelieve()

    # Everything below is called with the lock held.

    def _open(self) -> bool:
        if self._ended:
            return False
        capabilities = kernel.probe(self._disable)
        if not (capabilities.userfaultfd and capabilities.pagemap_scan):
            self._ended = True
            return False
        try:
            self._mappings = kernel.MemoryMap(capabilities.procmap_query)
            self._pages = kernel.open_written_pages()
        except OSError:
            self.close()
            return False
        # Inherited descriptors go on showing the parent's memory, and the lock may have been held by a thread that the child
        # does not have.
        reference = weakref.ref(self)

        def abandon() -> None:
            if (tracker := reference()) is not None:
                tracker.lock = threading.RLock()
                tracker.close()

        os.register_at_fork(after_in_child=abandon)
        return True

    def _dirty_many(self, key: tuple[Watch, ...]) -> dict[Watch, list[tuple[int, int]]]:
        if self._in_flight is not None:
            self._hand_out([self._in_flight])
            self._in_flight = None
        # Programs ask about the same buffers again and again: sorting 500 of them takes longer than the scans.
        plan = self._plans.get(key)
        if plan is None:
            while len(self._plans) >= _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = _spans(sorted(key, key=_by_start), _GAP_BYTES)
        for start, stop, members in plan:
            self._sweep_span(start, stop, members, _GAP_BYTES)
        return {watch: watch._show() for watch in key if watch._pending}

    def _take(self, pages: kernel.WrittenPages, start: int, stop: int) -> bool:
        """Scan whole pages, hand out what was written, leave them armed.

        False where part of the range is not registered (never was, or something new is mapped there): the scan may have
        taken marks before it failed, so all of it was handed out.
        """
        # KeyboardInterrupt can be raised between any two lines here. What a scan took away and nobody received would be a
        # change that is never seen, so the range is noted first, and handed out whole by whoever comes next.
        if self._in_flight is not None:
            self._hand_out([self._in_flight])
        self._in_flight = start, stop
        try:
            written = pages.take(start, stop)
            complete = True
        except OSError:
            written = [(start, stop)]
            complete = False
        if written:
            self._hand_out(written)
        self._in_flight = None
        return complete

    def _arm(self, start: int, stop: int) -> bool:
        """As `_take`, but register what is not; False if the range cannot be believed."""
        pages = self._pages
        if pages is None:
            return False
        return self._take(pages, start, stop) or (
            self._register(pages, start, stop) and self._take(pages, start, stop)
        )

    def _register(self, pages: kernel.WrittenPages, start: int, stop: int) -> bool:
        mappings = self._mappings
        assert mappings is not None
        at = start
        while at < stop:
            mapping = mappings.at_or_after(at)
            if mapping is None or mapping.start > at or not mapping.private_anonymous:
                return False
            # A buffer at the end of the heap may lie in the mapping that was registered and in the one it grew by. What is
            # armed in the first one stays so: other watches live there.
            if not pages.is_registered(at):
                if not self._may_register(stop - start):
                    return False
                # The whole mapping, since part of one would be split off.
                try:
                    pages.register(mapping.start, mapping.stop)
                except OSError:
                    return False
                self._verify(pages, mapping.start, mapping.stop)
            at = mapping.stop
        return True

    def _verify(self, pages: kernel.WrittenPages, start: int, stop: int) -> None:
        # Only the buffer itself is sure to stay. Another thread may have replaced its neighbours since we asked for the
        # mapping, by something that must not be believed, and is registered now.
        assert self._mappings is not None
        while start < stop:
            mapping = self._mappings.at_or_after(start)
            if mapping is None or mapping.start >= stop:
                return
            if not mapping.private_anonymous:
                try:
                    pages.unregister(mapping.start, mapping.stop)
                except OSError:
                    self.exclude(mapping.start, mapping.stop - mapping.start)
            start = mapping.stop

    def _may_register(self, size_bytes: int) -> bool:
        # A registered mapping never merges again with one that was not registered when it was first written: a program that
        # makes and sends arrays in turn gets one mapping for each. Without any left of those that vm.max_map_count allows,
        # it could not even start a thread. The last half of the budget is for large buffers.
        assert self._mappings is not None
        limit = self._map_budget if size_bytes >= _LARGE_BYTES else self._map_budget // 2
        if self._maps_charged >= limit:
            now_ns = time.monotonic_ns()
            if now_ns < self._recount_after_ns:
                return False
            self._recount_after_ns = now_ns + _RECOUNT_NS
            self._maps_charged = self._mappings.count()
            if self._maps_charged >= limit:
                return False
        self._maps_charged += 1
        return True

    def _sweep_span(self, start: int, stop: int, members: Sequence[Watch], gap_bytes: int) -> None:
        pages = self._pages
        if pages is not None and len(members) > 1:
            try:
                # Look before taking: where part is not registered, a scan that takes marks fails half-way and loses all.
                written_from = pages.look(start, stop)
            except OSError:
                if gap_bytes:
                    for part in _spans(members, 0):
                        self._sweep_span(*part, 0)
                    return
            else:
                if written_from >= stop or self._take(pages, written_from, stop):
                    return
        for watch in members:
            if watch.believed and not self._arm(watch.start, watch.stop):
                watch._disbelieve()

    def _hand_out(self, written: list[tuple[int, int]]) -> None:
        if not written:
            return
        single = len(written) == 1
        for watch in self._index.overlapping(written[0][0], written[-1][1]):
            if not watch.believed:
                continue
            if single:
                watch._receive(written)
                continue
            first = bisect_right(written, watch.start, key=_stop_of)
            last = bisect_left(written, watch.stop, first, key=_start_of)
            if first < last:
                watch._receive(written[first:last])

    def _close(self, watch: Watch, disarm: bool) -> None:
        if self._index.remove(watch) and disarm and watch.believed and self._pages is not None:
            try:
                self._pages.disarm(watch.start, watch.stop)
            except OSError:
                pass  # not registered any more: nothing is armed there
        watch._disbelieve()


_Span = tuple[int, int, Sequence[Watch]]


def _spans(ordered: Sequence[Watch], gap_bytes: int) -> list[_Span]:
    """Cut watches, sorted by start, into groups that one scan can cover."""
    spans: list[_Span] = []
    first, span_start, span_stop, limit = 0, 0, 0, -1
    for number, watch in enumerate(ordered):
        if watch.start > limit:
            if number:
                spans.append((span_start, span_stop, ordered[first:number]))
            first, span_start, span_stop = number, watch.start, 0
        if watch.stop > span_stop:
            span_stop, limit = watch.stop, watch.stop + gap_bytes
    if ordered:
        spans.append((span_start, span_stop, ordered[first:]))
    return spans


def _map_budget() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read()) // 4
    except OSError:
        return 65530 // 4


_tracker: Tracker | None = None
_tracker_pid = 0
_creation_lock = threading.Lock()


def get_tracker() -> Tracker:
    """Return this process's tracker. A forked child gets a new one, without any of its parent's watches."""
    global _tracker, _tracker_pid
    tracker = _tracker
    if tracker is not None and _tracker_pid == os.getpid():
        return tracker
    with _creation_lock:
        if _tracker is None or _tracker_pid != os.getpid():
            _tracker, _tracker_pid = Tracker(), os.getpid()
        return _tracker


def _forget_parent() -> None:
    global _creation_lock
    _creation_lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_parent)
