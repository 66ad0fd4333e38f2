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
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory import kernel
from onehop._memory.addresses import address_reader, owner_reference
from onehop._memory.arena import PAGE_SIZE, Arena, ArenaSegment
from onehop._memory.forks import follow_forks
from onehop._memory.mapping import Attachments
from onehop._memory.sealed import Sealed, SegmentTable
from onehop.errors import ForkedError, MemoryLimitError

if TYPE_CHECKING:
    from onehop._memory.tracker import Tracker, Watch

Location = tuple[SegmentRef, int, int]
Range = tuple[int, int]

_ALIGNMENT_BYTES = 64
_PAGE_ALIGNED_BYTES = 1 << 20
_OWN_SEGMENT_BYTES = 8 << 20
"""A buffer from this size on gets a segment of its own, which is freed or patched without its former neighbours."""

_WATCH_BYTES = 64 << 10
"""Smaller buffers are compared: they share their pages with too much else."""

_COMPARE_BYTES = 256 << 10
"""What is compared, and if different written, in one piece."""

_NEARBY_BYTES = 64 << 10
"""When many pages were written, those so close to each other are compared together: a call costs as much as 16 KiB."""

_LOOSE_COUNT, _LOOSE_BYTES = 1024, 64 << 20
_UNUSED_NS = 800_000_000
"""What can be had again for little (loose bytes, records of owners that can not be watched) is forgotten after this time."""

_NS_PER_BYTE_KEPT = 5
"""… and large ones of those later, so that copying them again never takes more than a few percent of the time between."""


class Placement:
    """Where buffers lie now; their segments stay as they are until `BlobStore.release`.

    Attributes
    ----------
    locations : list of (SegmentRef, offset, length)
        One per buffer, then one per loose string.
    segments : list of SegmentRef
        Each once.
    moved_bytes : int
        Written into the arena for this.
    kept_bytes : int
        Proven or compared equal to what lay there, or arrived from elsewhere and not written.
    """

    __slots__ = ("_keepers", "_sealed", "kept_bytes", "locations", "moved_bytes", "segments")

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self.segments: list[SegmentRef] = []
        self.moved_bytes = 0
        self.kept_bytes = 0
        self._sealed: dict[Sealed, None] = {}
        self._keepers: dict[SegmentRef, Any] = {}


class _Exporter(weakref.ref[Any]):
    """Tells that the owner of a record's memory has died."""

    __slots__ = ("record",)
    record: _Record


class _Record:
    __slots__ = (
        "address",
        "calm",
        "exporter",
        "length",
        "location",
        "offset",
        "proof",
        "rewrites",
        "sealed",
        "used_ns",
        "watch",
    )

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self.sealed: Sealed
        self.offset = 0
        self.location: Location
        self.watch: Watch | None = None
        self.exporter: weakref.ref[Any] | None = None
        self.proof: Any = None
        """The attach in which the buffer lies and was not written when it was copied."""
        self.rewrites = 0
        """How many times in a row it came back mostly written."""
        self.calm = False
        """Not watched, but worth it when it is seen again."""
        self.used_ns = 0


class _Loose:
    __slots__ = ("key", "length", "offset", "sealed", "used_ns")

    def __init__(self, key: tuple[int, int], sealed: Sealed, offset: int, used_ns: int) -> None:
        self.key = key
        self.length = key[0]
        self.sealed = sealed
        self.offset = offset
        self.used_ns = used_ns


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
        self._tracker = tracker
        self._attachments = attachments
        self._table = SegmentTable(arena)
        self._records: dict[tuple[int, int], _Record] = {}
        self._records_lock: threading.RLock = threading.RLock() if tracker is None else tracker.lock
        self._unowned: dict[_Record, None] = {}
        self._dead: deque[_Exporter] = deque()
        self._loose: OrderedDict[tuple[int, int], _Loose] = OrderedDict()
        self._loose_bytes = 0
        self._loose_lock = threading.Lock()
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
        slots: list[Any] = []
        try:
            if buffers:
                few = [i for i, view in enumerate(buffers) if view.nbytes < small_bytes]
                if few:
                    self._place_mixed(placement, buffers, few, slots, arm)
                else:
                    self._place_buffers(placement, buffers, slots, arm)
            if loose:
                self._place_loose(placement, loose, slots)
        except BaseException:
            self.release(placement)
            raise
        placement.locations = [s if type(s) is tuple else s.location for s in slots]
        placement.segments = [sealed.ref for sealed in placement._sealed]
        placement.segments += placement._keepers
        return placement

    def _place_mixed(
        self,
        placement: Placement,
        buffers: Sequence[memoryview],
        few: list[int],
        slots: list[Any],
        arm: bool,
    ) -> None:
        small_slots: list[Any] = []
        self._place_loose(placement, [bytes(buffers[i]) for i in few], small_slots)
        small = dict(zip(few, small_slots, strict=True))
        large_slots: list[Any] = []
        large = [view for i, view in enumerate(buffers) if i not in small]
        if large:
            self._place_buffers(placement, large, large_slots, arm)
        rest = iter(large_slots)
        slots += [small[i] if i in small else next(rest) for i in range(len(buffers))]

    def _place_buffers(
        self, placement: Placement, buffers: Sequence[memoryview], slots: list[Any], arm: bool
    ) -> None:
        address_of = self._address_of
        keys = [(address_of(view), view.nbytes) for view in buffers]
        with self._records_lock:
            if self._dead:
                self._bury()
            known: list[_Record | None] = [*map(self._records.get, keys)]
            proofs: dict[int, Any] = {}
            arrived: dict[int, Location] = {}
            if self._attachments.has_live:
                arrived, proofs = self._find_arrived(placement, keys)
            views: dict[_Record, memoryview] = {}
            seen: list[_Record] = []
            fresh: dict[tuple[int, int], _Record] = {}
            if not arrived and None not in known:
                slots += known
                views = dict(zip(known, buffers, strict=True))  # type: ignore[arg-type]
                seen = [*views]
            else:
                for i, key in enumerate(keys):
                    if i in arrived:
                        slots.append(arrived[i])
                        continue
                    record = known[i] or fresh.get(key)
                    if record is None:
                        record = fresh[key] = _Record(*key)
                        record.proof = proofs.get(i)
                    elif known[i] is not None and record not in views:
                        seen.append(record)
                    views[record] = buffers[i]
                    slots.append(record)
            total = sum([key[1] for key in keys])
            proven = {known[i] for i, proof in proofs.items() if _proves(known[i], proof)}
            changed = self._find_changed(seen, proven) if seen else {}
            moved = self._settle_changed(placement, seen, changed, views) if changed else 0
            copies = [*fresh.values(), *changed]
            if not changed:
                self._pin(placement, seen)
            if copies:
                self._copy(placement, copies, views, arm)
                moved += sum(record.length for record in copies)
                for i, proof in proofs.items():
                    if (record := known[i]) in changed and record is not None:
                        record.proof = proof
            now_ns = time.monotonic_ns()
            for record in views:
                record.used_ns = now_ns
            placement.moved_bytes += moved
            placement.kept_bytes += max(0, total - moved)

    def _pin(self, placement: Placement, records: list[_Record]) -> None:
        """Hold the segments of records for a placement."""
        pinned = placement._sealed
        for sealed in {record.sealed for record in records}:
            if sealed not in pinned:
                self._table.pin_sealed(sealed)
                pinned[sealed] = None

    def _find_arrived(
        self, placement: Placement, keys: list[tuple[int, int]]
    ) -> tuple[dict[int, Location], dict[int, Any]]:
        """Find the buffers that lie unwritten in an attached segment.

        Returns
        -------
        locations : dict
            By index, where most of the segment is wanted. Otherwise a slice would pin a large segment: it is copied.
        proofs : dict
            By index, the attach in which an unwritten buffer lies that is to be copied.
        """
        by_mapping: dict[Any, list[int]] = {}
        buffers: dict[Any, Any] = {}
        for i, (address, length) in enumerate(keys):
            if (found := self._attachments.find(address, length)) is not None:
                mapping, buffer = found
                by_mapping.setdefault(mapping, []).append(i)
                buffers[mapping] = buffer
        locations: dict[int, Location] = {}
        proofs: dict[int, Any] = {}
        for mapping, indices in by_mapping.items():
            first = min(keys[i][0] for i in indices)
            last = max(keys[i][0] + keys[i][1] for i in indices)
            written = self._attachments.written_ranges(mapping, first, last - first)
            clean = indices
            if written:
                clean = [i for i in indices if not _overlap(written, *keys[i])]
            wanted_bytes = sum(length for _, length in {keys[i] for i in clean})
            ref = mapping.ref
            # Padding between buffers is at most a hundredth, and up to a page at the end.
            if 2 * wanted_bytes + ref.size_bytes // 64 + PAGE_SIZE >= ref.size_bytes and self._hold(
                placement, ref, buffers[mapping]
            ):
                for i in clean:
                    locations[i] = (ref, keys[i][0] - mapping.address, keys[i][1])
            else:
                proofs.update(dict.fromkeys(clean, mapping.keeper))
        return locations, proofs

    def _hold(self, placement: Placement, ref: SegmentRef, buffer: Any) -> bool:
        if ref.owner != self._arena.rank:
            # Keeps the mapping alive, and with it this process's hold at the owner.
            placement._keepers[ref] = buffer
            return True
        with self._table.lock:
            sealed = self._table.get(ref)
            if sealed is None:
                return False
            if sealed not in placement._sealed:
                self._table.pin_sealed(sealed)
                placement._sealed[sealed] = None
        return True

    def _find_changed(
        self, records: list[_Record], proven: set[_Record | None]
    ) -> dict[_Record, list[Range]]:
        """Scan and compare: which bytes of which records differ from what lies in the arena."""
        changed: dict[_Record, list[Range]] = {}
        watched = [r for r in records if r.watch is not None]
        if len(watched) < len(records):
            for record in records:
                if record.watch is None and record not in proven:
                    self._compare_all(record, changed)
        for record, ranges in self._scan(watched):
            differences = self._differences(record, ranges)
            if differences:
                changed[record] = differences
                if record.watch is None:
                    continue
                if 2 * sum(stop - start for start, stop in differences) >= record.length:
                    record.rewrites += 1
                else:
                    record.rewrites = 0
            elif record.watch is not None:
                record.rewrites = 0
                record.watch.accept()
        return changed

    def _scan(self, records: list[_Record]) -> list[tuple[_Record, list[Range]]]:
        """Return those records of which pages may have been written, with the ranges."""
        if self._tracker is None or not records:
            return []
        written = self._tracker.dirty_many([r.watch for r in records if r.watch is not None])
        if not written:
            return []
        found = []
        for record in records:
            if record.watch is not None and (ranges := written.get(record.watch)) is not None:
                found.append((record, ranges))
                if not record.watch.believed:
                    # Something else is mapped there now, or it was excluded: compare, and try again later.
                    record.watch.close()
                    record.watch = None
                    record.rewrites = 1
        return found

    def _compare_all(self, record: _Record, changed: dict[_Record, list[Range]]) -> None:
        if record.calm:
            # Worth watching again. Armed before it is compared, so that no write slips in between.
            record.watch = self._watch(record)
            record.calm = False
            record.rewrites = 0
        if differences := self._differences(record, [(0, record.length)]):
            changed[record] = differences
            record.calm = False
        elif record.watch is None and record.rewrites:
            record.calm = True

    def _watch(self, record: _Record) -> Watch | None:
        if self._tracker is None or record.length < _WATCH_BYTES:
            return None
        return self._tracker.watch(record.address, record.length)

    def _differences(self, record: _Record, ranges: list[Range]) -> list[Range]:
        """Compare parts of a buffer with its copy; returns the pieces that differ."""
        address = record.address
        view = self._arena.view_address(record.sealed.segment, record.offset)
        equal = kernel.memory_equal
        different: list[Range] = []
        for start, stop in _joined(ranges) if len(ranges) > 32 else ranges:
            while start < stop:
                end = min(start + _COMPARE_BYTES, stop)
                if not equal(address + start, view + start, end - start):
                    if different and different[-1][1] == start:
                        different[-1] = (different[-1][0], end)
                    else:
                        different.append((start, end))
                start = end
        return different

    def _settle_changed(
        self,
        placement: Placement,
        seen: list[_Record],
        changed: dict[_Record, list[Range]],
        views: dict[_Record, memoryview],
    ) -> int:
        """Patch what nobody else holds; what has to be copied instead stays in `changed`.

        All that is kept is pinned first, so that making room for the copies does not throw it out.
        """
        sealed_changed = {record.sealed for record in changed}
        open_again = {
            sealed
            for sealed in sealed_changed
            if sealed not in placement._sealed and self._table.reopen(sealed)
        }
        for sealed in open_again:
            for other in sealed.records:
                other.location = (sealed.ref, other.offset, other.length)
        patched = [record for record in changed if record.sealed in open_again]
        self._pin(placement, [r for r in seen if r not in changed or r.sealed in open_again])
        moved = 0
        for record in patched:
            view = views[record]
            for start, stop in changed[record]:
                # If this fails in between, the pages are still marked as written and compared again.
                self._arena.write(record.sealed.segment, record.offset + start, view[start:stop])
                moved += stop - start
            self._after_change(record)
            del changed[record]
        return moved

    def _after_change(self, record: _Record) -> None:
        record.proof = None
        if record.watch is None:
            return
        record.watch.accept()
        if record.rewrites >= 2:
            # Rewritten between calls again and again: faults for each page would cost more than a comparison.
            record.watch.close(disarm=True)
            record.watch = None

    def _copy(
        self,
        placement: Placement,
        records: list[_Record],
        views: dict[_Record, memoryview],
        arm: bool,
    ) -> None:
        """Copy buffers into new segments and remember where; all or nothing."""
        groups: list[list[_Record]] = [[r] for r in records if r.length >= _OWN_SEGMENT_BYTES]
        if small := [r for r in records if r.length < _OWN_SEGMENT_BYTES]:
            groups.append(small)
        armed: list[_Record] = []
        allocated: list[tuple[ArenaSegment, list[tuple[_Record, int]]]] = []
        try:
            for group in groups:
                layout = _lay_out([record.length for record in group])
                segment = self._allocate(layout.pop())
                allocated.append((segment, [*zip(group, layout, strict=True)]))
            for segment, places in allocated:
                for record, offset in places:
                    if arm and record.watch is None and not record.exporter and not record.proof:
                        # New. Armed before it is copied, so that a write meanwhile is seen the next time.
                        record.watch = self._watch(record)
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
            placement._sealed[sealed] = None
            for record, offset in places:
                self._publish(record, sealed, offset, views[record], arm)

    def _publish(
        self, record: _Record, sealed: Sealed, offset: int, view: memoryview, arm: bool
    ) -> None:
        key = (record.address, record.length)
        if self._records.get(key) is record:
            self._after_change(record)
            self._table.drop_record(record.sealed, record)
        else:
            self._records[key] = record
            record.exporter = owner_reference(view, self._make_exporter)
            if record.exporter is None:
                self._unowned[record] = None
            else:
                record.exporter.record = record  # type: ignore[attr-defined]
            record.calm = not arm  # to be watched when it is seen again
        record.sealed = sealed
        record.offset = offset
        record.location = (sealed.ref, offset, record.length)
        self._table.add_record(sealed, record)

    def _make_exporter(self, owner: Any) -> _Exporter:
        return _Exporter(owner, self._dead.append)

    # Loose strings

    def _place_loose(self, placement: Placement, loose: Sequence[bytes], slots: list[Any]) -> None:
        now_ns = time.monotonic_ns()
        new: dict[bytes, list[int]] = {}
        first = len(slots)
        for data in loose:
            at = self._find_loose(placement, data, now_ns)
            if at is None:
                new.setdefault(data, []).append(len(slots))
            else:
                placement.kept_bytes += len(data)
            slots.append(at)
        if not new:
            return
        layout = _lay_out([len(data) for data in new])
        segment = self._allocate(layout.pop(), for_loose=True)
        try:
            for data, offset in zip(new, layout, strict=True):
                self._arena.write(segment, offset, data)
        except BaseException:
            self._arena.free(segment)
            del slots[first:]
            raise
        sealed = self._table.seal(segment)
        placement._sealed[sealed] = None
        for (data, indices), offset in zip(new.items(), layout, strict=True):
            placement.moved_bytes += len(data)
            placement.kept_bytes += len(data) * (len(indices) - 1)
            for index in indices:
                slots[index] = (sealed.ref, offset, len(data))
            record = _Loose((len(data), hash(data)), sealed, offset, now_ns)
            self._table.add_record(sealed, record)
            with self._loose_lock:
                if (old := self._loose.pop(record.key, None)) is not None:
                    self._drop_loose(old)
                self._loose[record.key] = record
                self._loose_bytes += record.length
                while len(self._loose) > _LOOSE_COUNT or self._loose_bytes > _LOOSE_BYTES:
                    self._drop_loose(self._loose.popitem(last=False)[1])

    def _find_loose(self, placement: Placement, data: bytes, now_ns: int) -> Location | None:
        key = (len(data), hash(data))
        with self._loose_lock:
            if (record := self._loose.get(key)) is None:
                return None
            sealed = record.sealed
            new = sealed not in placement._sealed
            if new:
                self._table.pin_sealed(sealed)
            record.used_ns = now_ns
            self._loose.move_to_end(key)
        view = self._arena.view_address(sealed.segment, record.offset)
        if not kernel.memory_equal(self._address_of(memoryview(data)), view, len(data)):
            if new:
                self._table.unpin_sealed(sealed)
            return None
        if new:
            placement._sealed[sealed] = None
        return (sealed.ref, record.offset, len(data))

    def _forget_loose(self, record: _Loose) -> None:
        with self._loose_lock:
            if self._loose.get(record.key) is record:
                del self._loose[record.key]
                self._drop_loose(record)

    def _drop_loose(self, record: _Loose) -> None:
        self._loose_bytes -= record.length
        self._table.drop_record(record.sealed, record)

    # Room

    def _allocate(self, size_bytes: int, for_loose: bool = False) -> ArenaSegment:
        try:
            return self._arena.allocate(size_bytes)
        except MemoryLimitError:
            # What nobody holds is only a chance to save a copy later. A place of loose strings does not wait for the lock
            # of the records, which a long copy may hold.
            if not self._records_lock.acquire(blocking=not for_loose):
                raise
            try:
                if not self._make_room(size_bytes):
                    raise
            finally:
                self._records_lock.release()
            return self._arena.allocate(size_bytes)

    def _make_room(self, size_bytes: int) -> bool:
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
                if isinstance(record, _Record):
                    self._forget(record)
                else:
                    self._forget_loose(record)
        return freed > 0

    def _bury(self) -> None:
        """Forget the records whose memory's owner has died."""
        while True:
            try:
                record = self._dead.popleft().record
            except IndexError:
                return
            except AttributeError:  # died before it was published
                continue
            self._forget(record)

    def _forget(self, record: _Record) -> None:
        key = (record.address, record.length)
        if self._records.get(key) is not record:
            return
        del self._records[key]
        self._unowned.pop(record, None)
        record.exporter = None
        if record.watch is not None:
            record.watch.close()
            record.watch = None
        self._table.drop_record(record.sealed, record)

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
        with self._loose_lock:
            while self._loose:
                key, oldest = next(iter(self._loose.items()))
                if now_ns - oldest.used_ns <= _UNUSED_NS:
                    break
                del self._loose[key]
                self._drop_loose(oldest)
        more = self._arena.trim(now_ns=now_ns)
        return more or bool(self._dead)

    # Holds

    def release(self, placement: Placement) -> None:
        """Undo the holds of a placement; may be called twice."""
        sealed, placement._sealed = placement._sealed, {}
        placement._keepers = {}
        if not self._forked:
            self._table.unpin_sealed(*sealed)

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
        with self._loose_lock:
            while self._loose:
                self._drop_loose(self._loose.popitem()[1])

    # Forks

    def before_fork(self) -> None:
        """Nothing: the child uses none of this."""

    def after_fork_in_parent(self) -> None:
        """Nothing."""

    def after_fork_in_child(self) -> None:
        """Refuse all use."""
        self._forked = True
        self._table.after_fork_in_child()


def _lay_out(lengths: list[int]) -> list[int]:
    """Return the offset of each buffer, and in the end the size of all."""
    offsets = []
    at = 0
    for length in lengths:
        unit = PAGE_SIZE if length >= _PAGE_ALIGNED_BYTES else _ALIGNMENT_BYTES
        at = -(-at // unit) * unit
        offsets.append(at)
        at += length
    return [*offsets, at]


def _joined(ranges: list[Range]) -> list[Range]:
    """Join ranges that are close to each other; what lies between is compared too, which harms nothing."""
    joined = [ranges[0]]
    for start, stop in ranges[1:]:
        if start - joined[-1][1] <= _NEARBY_BYTES:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _overlap(ranges: list[Range], address: int, length: int) -> bool:
    return any(start < address + length and stop > address for start, stop in ranges)


def _proves(record: _Record | None, proof: Any) -> bool:
    return record is not None and proof is not None and record.proof is proof
