"""Buffers of this process as blobs in its arena: what is there already, what is patched, what is copied.

Must never know about messages, links or pickles; a buffer here is an address, a length, and an object that owns the memory.

A *record* remembers that the bytes at an address were found equal to a place of a sealed segment. It proves nothing by
itself: at the next sight the tracker tells which pages were written since, those are compared, and where there is no
tracker all is compared. So a record can be wrong about whose memory it is, and harm nothing. It holds no user memory.

Locks, in this order: the tracker's (all records; held during scan, comparison, copy and publishing), the one of loose bytes,
the one of the segment table. Only the last is taken by what the loop calls (`lend`, `returned`, `release`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory.addresses import address_reader, owner_reference
from onehop._memory.arena import Arena, ArenaSegment
from onehop._memory.arrivals import find_arrived
from onehop._memory.changes import ChangeFinder
from onehop._memory.forks import follow_forks
from onehop._memory.loose import UNUSED_NS as LOOSE_UNUSED_NS
from onehop._memory.loose import LooseRecord, LooseStrings
from onehop._memory.mapping import Attachments
from onehop._memory.placement import Exporter, Location, Placement, Range, Record, lay_out
from onehop._memory.sealed import Sealed, SegmentTable
from onehop.errors import ForkedError, MemoryLimitError

if TYPE_CHECKING:
    from onehop._memory.tracker import Tracker

__all__ = ["BlobStore", "Placement"]

_OWN_SEGMENT_BYTES = 8 << 20
"""A buffer from this size on gets a segment of its own, which is freed or patched without its former neighbours."""


_PATIENCE_S = 5.0

_PUNCH_BYTES = 16 << 20
"""Given back at one call of `settle`: a few milliseconds of the loop's time."""

_UNUSED_NS = 800_000_000
_NS_PER_BYTE_KEPT = 5
"""Records of owners that can not be watched (`bytes`) are kept as long as loose strings and so much longer, so that copying them
again never takes more than a few percent of the time between."""


class BlobStore:
    """The blobs that this process owns.

    Parameters
    ----------
    arena : Arena
        Where they are written.
    tracker : Tracker or None
        None compares always.
    attachments : Attachments
        What arrived from elsewhere, to be passed on without a copy.
    """

    def __init__(self, arena: Arena, tracker: Tracker | None, attachments: Attachments) -> None:
        self._arena = arena
        self._attachments = attachments
        self._table = SegmentTable(arena)
        self._records: dict[tuple[int, int], Record] = {}
        self._records_lock: threading.RLock = threading.RLock() if tracker is None else tracker.lock
        self._unowned: dict[Record, None] = {}
        self._dead: deque[Exporter] = deque()
        self._changes = ChangeFinder(arena, tracker)
        self._loose = LooseStrings(arena, self._table, self._allocate_for_loose)
        self._address_of = address_reader()
        self._forked = False
        follow_forks(self)

    # Placing

    def place(
        self,
        buffers: Sequence[memoryview],
        loose: Sequence[bytes] = (),
        *,
        small_bytes: int = 4096,
        arm: bool = True,
    ) -> Placement:
        """See to it that the arena holds the bytes of all buffers as they are now.

        Parameters
        ----------
        buffers : sequence of memoryview
            Flat views whose exporters are alive.
        loose : sequence of bytes
            Strings without an owner worth remembering (headers, packs of small buffers), found again by content.
        small_bytes : int
            Buffers below this size are treated like loose strings.
        arm : bool
            False for values that are about to be dropped, such as results: watching them would not pay.

        Raises
        ------
        MemoryLimitError
            If they do not fit; nothing is held then.
        """
        if self._forked:
            raise ForkedError(
                "a forked child cannot place values in its parent's shared memory; make a cluster of its own there"
            )
        placement = Placement()
        try:
            if buffers:
                few = [i for i, view in enumerate(buffers) if view.nbytes < small_bytes]
                if few:
                    self._place_mixed(placement, buffers, few, arm)
                else:
                    placement.locations = self._place_buffers(placement, buffers, arm)
            if loose:
                placement.locations += self._loose.place(placement, loose)
        except BaseException:
            self.release(placement)
            raise
        placement.segments = [sealed.ref for sealed in placement.pinned]
        placement.segments += placement.arrivals
        return placement

    def _place_mixed(
        self, placement: Placement, buffers: Sequence[memoryview], few: list[int], arm: bool
    ) -> None:
        small = self._loose.place(placement, [bytes(buffers[i]) for i in few])
        locations = dict(zip(few, small, strict=True))
        rest = [i for i in range(len(buffers)) if i not in locations]
        if rest:
            large = self._place_buffers(placement, [buffers[i] for i in rest], arm)
            locations.update(zip(rest, large, strict=True))
        placement.locations = [locations[i] for i in range(len(buffers))]

    def _place_buffers(
        self, placement: Placement, buffers: Sequence[memoryview], arm: bool
    ) -> list[Location]:
        address_of = self._address_of
        keys = [(address_of(view), view.nbytes) for view in buffers]
        arrived: dict[int, Location] = {}
        proofs: dict[int, Any] = {}
        with self._records_lock:
            if self._dead:
                self._bury()
            if self._attachments.has_live:
                arrived, proofs = find_arrived(self._attachments, self._table, placement, keys)
            known = [*map(self._records.get, keys)]
            records: list[Record | None] = known
            fresh: list[Record] = []
            if arrived or None in known:
                records, fresh = self._sort_out(keys, known, arrived, proofs)
            views = {r: view for r, view in zip(records, buffers, strict=True) if r is not None}
            new = set(fresh)
            seen = [r for r in views if r not in new] if new else [*views]
            proven = {
                r for i, p in proofs.items() if (r := records[i]) is not None and r.proof is p
            }
            changed = self._changes.changed(seen, proven)
            moved = self._patch(placement, seen, changed, views) if changed else 0
            self._pin(placement, [r for r in seen if r not in changed] if changed else seen)
            if copies := [*fresh, *changed]:
                self._copy(placement, copies, views, arm)
                moved += sum(record.length for record in copies)
            for i, proof in proofs.items():
                if (record := records[i]) is not None:
                    record.proof = proof
            now_ns = time.monotonic_ns()
            for record in views:
                record.used_ns = now_ns
            placement.moved_bytes += moved
            placement.kept_bytes += sum([length for _, length in keys]) - moved
            # Before the lock is given up: a later placement may move a record to another segment.
            return [arrived[i] if r is None else r.location for i, r in enumerate(records)]

    def _sort_out(
        self,
        keys: list[tuple[int, int]],
        known: list[Record | None],
        arrived: dict[int, Location],
        proofs: dict[int, Any],
    ) -> tuple[list[Record | None], list[Record]]:
        """Make records for unknown buffers, one for equal ones; none for those that are passed on."""
        fresh: dict[tuple[int, int], Record] = {}
        records: list[Record | None] = []
        for i, key in enumerate(keys):
            record = None
            if i not in arrived:
                record = known[i] or fresh.get(key)
                if record is None:
                    record = fresh[key] = Record(*key)
            records.append(record)
        return records, [*fresh.values()]

    def _pin(self, placement: Placement, records: list[Record]) -> None:
        """Hold the segments of records for a placement."""
        pinned = placement.pinned
        for sealed in {record.sealed for record in records}:
            if sealed not in pinned:
                self._table.pin_sealed(sealed)
                pinned[sealed] = None

    def _patch(
        self,
        placement: Placement,
        seen: list[Record],
        changed: dict[Record, list[Range]],
        views: dict[Record, memoryview],
    ) -> int:
        """Write the changes where nobody else holds the old bytes; what has to be copied instead stays in `changed`."""
        reopened = {
            sealed
            for sealed in {record.sealed for record in changed}
            if sealed not in placement.pinned and self._table.reopen(sealed)
        }
        for sealed in reopened:
            for other in sealed.records:
                other.location = (sealed.ref, other.offset, other.length)
        # Now, so that making room for the others does not throw it out.
        self._pin(placement, [r for r in seen if r not in changed or r.sealed in reopened])
        moved = 0
        for record in [r for r in changed if r.sealed in reopened]:
            view = views[record]
            for start, stop in changed[record]:
                # If this fails in between, the pages are still marked as written and compared again.
                self._arena.write(record.sealed.segment, record.offset + start, view[start:stop])
                moved += stop - start
            self._changes.accepted(record)
            del changed[record]
        return moved

    def _copy(
        self,
        placement: Placement,
        records: list[Record],
        views: dict[Record, memoryview],
        arm: bool,
    ) -> None:
        """Copy buffers into new segments and remember where; all or nothing."""
        groups: list[list[Record]] = [[r] for r in records if r.length >= _OWN_SEGMENT_BYTES]
        if small := [r for r in records if r.length < _OWN_SEGMENT_BYTES]:
            groups.append(small)
        armed: list[Record] = []
        allocated: list[tuple[ArenaSegment, list[tuple[Record, int]]]] = []
        try:
            for group in groups:
                offsets, size_bytes = lay_out([record.length for record in group])
                segment = self._allocate(size_bytes)
                allocated.append((segment, [*zip(group, offsets, strict=True)]))
            for segment, places in allocated:
                for record, offset in places:
                    if arm and record.watch is None and not record.exporter:
                        # New. Armed before it is copied, so that a write meanwhile is seen the next time.
                        record.watch = self._changes.watch(record)
                        armed.append(record)
                    self._arena.write(segment, offset, views[record])
        except BaseException:
            for segment, _ in allocated:
                self._arena.free(segment)
            for record in armed:
                if record.watch is not None:
                    record.watch.close()
                    record.watch = None
            raise
        for segment, places in allocated:
            sealed = self._table.seal(segment)
            placement.pinned[sealed] = None
            for record, offset in places:
                self._publish(record, sealed, offset, views[record], arm)

    def _publish(
        self, record: Record, sealed: Sealed, offset: int, view: memoryview, arm: bool
    ) -> None:
        key = (record.address, record.length)
        if self._records.get(key) is record:
            self._changes.accepted(record)
            self._table.drop_record(record.sealed, record, record.extent())
        else:
            self._records[key] = record
            exporter = owner_reference(view, self._make_exporter)
            record.exporter = exporter
            if exporter is None:
                self._unowned[record] = None
            else:
                exporter.record = record
            record.calm = not arm  # to be watched when it is seen again
        record.sealed = sealed
        record.offset = offset
        record.location = (sealed.ref, offset, record.length)
        self._table.add_record(sealed, record)

    def _make_exporter(self, owner: Any) -> Exporter:
        return Exporter(owner, self._dead.append)

    # Room

    def _allocate(self, size_bytes: int) -> ArenaSegment:
        try:
            return self._arena.allocate(size_bytes)
        except MemoryLimitError:
            if not self._make_room(size_bytes):
                raise
            return self._arena.allocate(size_bytes)

    def _allocate_for_loose(self, size_bytes: int) -> ArenaSegment:
        try:
            return self._arena.allocate(size_bytes)
        except MemoryLimitError:
            # A long copy may hold the lock of the records.
            if not self._records_lock.acquire(timeout=_PATIENCE_S):
                raise
            try:
                if not self._make_room(size_bytes):
                    raise
            finally:
                self._records_lock.release()
            return self._arena.allocate(size_bytes)

    def _make_room(self, size_bytes: int) -> bool:
        """Forget what nobody holds, the longest unused first: it is only a chance to save a copy later."""
        self._bury()
        freed = 0
        candidates = sorted(
            self._table.held_by_records_only(),
            key=lambda sealed: max((record.used_ns for record in sealed.records), default=0),
        )
        for sealed in candidates:
            if freed >= size_bytes:
                break
            freed += sealed.segment.size_bytes
            for record in list(sealed.records):
                if isinstance(record, Record):
                    self._forget(record)
                elif isinstance(record, LooseRecord):
                    self._loose.forget(record)
        return freed > 0

    def _bury(self) -> None:
        """Forget the records whose memory's owner has died."""
        while True:
            try:
                exporter = self._dead.popleft()
            except IndexError:
                return
            if exporter.record is not None:
                self._forget(exporter.record)

    def _forget(self, record: Record) -> None:
        key = (record.address, record.length)
        if self._records.get(key) is not record:
            return
        del self._records[key]
        self._unowned.pop(record, None)
        record.exporter = None
        if record.watch is not None:
            record.watch.close()
            record.watch = None
        self._table.drop_record(record.sealed, record, record.extent())

    def settle(self, now_ns: int | None = None) -> bool:
        """Forget what is no longer of use and return idle memory, a little at a time; for when there is nothing else to do.

        Returns
        -------
        bool
            True if it should be called again soon.
        """
        if self._forked:
            return False
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        # A copy may be running: what is to be forgotten can wait, the loop can not.
        if (self._dead or self._unowned) and self._records_lock.acquire(blocking=False):
            try:
                self._bury()
                for record in list(self._unowned):
                    if now_ns - record.used_ns > _UNUSED_NS + _NS_PER_BYTE_KEPT * record.length:
                        self._forget(record)
            finally:
                self._records_lock.release()
        self._loose.forget_unused(now_ns - LOOSE_UNUSED_NS)
        more = self._table.punch_dead(_PUNCH_BYTES)
        more = self._arena.trim(now_ns=now_ns) or more
        return more or bool(self._dead)

    # Holds

    def release(self, placement: Placement) -> None:
        """Undo the holds of a placement; may be called twice."""
        pinned, placement.pinned = placement.pinned, {}
        placement.arrivals = {}
        if not self._forked:
            self._table.unpin_sealed(*pinned)

    def lend(self, ref: SegmentRef, peer: int, count: int = 1) -> None:
        """Count holds of a peer on a segment of this process, one for every attach that it may make."""
        self._table.lend(ref, peer, count)

    def returned(self, ref: SegmentRef, peer: int, count: int = 1) -> None:
        """Count ends of a peer's holds; may come before the `lend`."""
        self._table.returned(ref, peer, count)

    def known_to(self, ref: SegmentRef, peer: int) -> bool:
        """Tell whether a peer was lent this segment before, also before it was patched."""
        return self._table.known_to(ref, peer)

    def peer_gone(self, peer: int) -> None:
        """End all holds of a peer that is proven dead."""
        self._table.peer_gone(peer)

    def pin(self, ref: SegmentRef) -> None:
        """Hold a segment until `unpin`."""
        self._table.pin(ref)

    def unpin(self, ref: SegmentRef) -> None:
        """Undo one `pin`."""
        self._table.unpin(ref)

    def counts(self) -> dict[str, int]:
        """Return the sizes of all tables, and the memory."""
        return {
            "records": len(self._records),
            "loose": len(self._loose),
            **self._table.counts(),
            "in_use_bytes": self._arena.in_use_bytes,
            "warm_bytes": self._arena.warm_bytes,
        }

    def close(self) -> None:
        """Forget all records and end their watches."""
        if self._forked:
            return
        with self._records_lock:
            for record in list(self._records.values()):
                self._forget(record)
        self._loose.forget_unused(time.monotonic_ns())

    # Forks

    def after_fork_in_child(self) -> None:
        """Refuse all use."""
        self._forked = True
        self._table.after_fork_in_child()
