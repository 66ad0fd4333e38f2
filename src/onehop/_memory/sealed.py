"""The sealed segments of this process's arena and who holds each: peers that mapped it, placements, records.

Must never know what lies in a segment or why it is held. Its lock is held for moments only, so that the loop is never kept
waiting by a thread that copies.

A segment is free when nothing holds it. Counts of peers may be negative for a moment, since a return can overtake the
loan on another way; such a segment is held.
"""

from __future__ import annotations

import threading
from bisect import insort
from typing import Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory.arena import Arena, ArenaSegment
from onehop._memory.extents import FreeRanges
from onehop.errors import ProtocolError


class Sealed:
    """One segment whose content does not change as long as anybody but records holds it."""

    __slots__ = ("dead", "holes", "known", "lends", "pins", "records", "ref", "segment")

    def __init__(self, segment: ArenaSegment, ref: SegmentRef) -> None:
        self.segment = segment
        self.ref = ref
        self.pins = 0
        self.lends: dict[int, int] = {}
        self.known: set[int] = set()
        self.records: dict[Any, None] = {}
        """What remembers that its content lies here; a new serial is told to each."""
        self.dead = FreeRanges()
        """Parts that no record names any more; messages on their way may."""
        self.holes: list[tuple[int, int]] = []
        """Parts whose memory was given back."""


class SegmentTable:
    """All sealed segments of one arena.

    Parameters
    ----------
    arena : Arena
        Where freed segments go.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.lock = threading.RLock()
        self._by_serial: dict[int, Sealed] = {}
        self._next_serial = 1
        self._gone_peers: set[int] = set()
        self._partly_dead: dict[Sealed, None] = {}

    def __len__(self) -> int:
        return len(self._by_serial)

    def seal(self, segment: ArenaSegment) -> Sealed:
        """Give a written segment its id; it starts with one pin."""
        with self.lock:
            sealed = Sealed(segment, self._new_ref(segment))
            sealed.pins = 1
            self._by_serial[sealed.ref.serial] = sealed
        return sealed

    def _new_ref(self, segment: ArenaSegment) -> SegmentRef:
        serial = self._next_serial
        self._next_serial += 1
        return SegmentRef(self._arena.rank, serial, segment.offset, segment.size_bytes)

    def reopen(self, sealed: Sealed) -> bool:
        """Allow a segment to be written again, under a new id, if only records hold it."""
        with self.lock:
            if sealed.pins or sealed.lends:
                return False
            del self._by_serial[sealed.ref.serial]
            sealed.ref = self._new_ref(sealed.segment)
            self._by_serial[sealed.ref.serial] = sealed
            return True

    def get(self, ref: SegmentRef) -> Sealed | None:
        """Find a segment by its id."""
        return self._by_serial.get(ref.serial) if self.owns(ref) else None

    def owns(self, ref: SegmentRef) -> bool:
        """Tell whether a segment is, or was, of this arena."""
        return ref.owner == self._arena.rank

    # Holds

    def pin_sealed(self, sealed: Sealed) -> None:
        """Hold a segment once more for this process."""
        with self.lock:
            sealed.pins += 1

    def unpin_sealed(self, *many: Sealed) -> None:
        """Undo one pin of each."""
        with self.lock:
            for sealed in many:
                sealed.pins -= 1
                self._free_if_unheld(sealed)

    def pin(self, ref: SegmentRef) -> None:
        """Hold a segment by its id."""
        with self.lock:
            self._must_exist(ref).pins += 1

    def unpin(self, ref: SegmentRef) -> None:
        """Undo one `pin`."""
        with self.lock:
            self.unpin_sealed(self._must_exist(ref))

    def lend(self, ref: SegmentRef, peer: int, count: int = 1) -> None:
        """Count holds of a peer: one for every attach that it may make of a message on its way."""
        with self.lock:
            if peer in self._gone_peers:
                return
            sealed = self._must_exist(ref)
            self._change(sealed, peer, count)
            sealed.known.add(peer)

    def returned(self, ref: SegmentRef, peer: int, count: int = 1) -> None:
        """Count ends of a peer's holds."""
        with self.lock:
            sealed = self.get(ref)
            # Unknown: the peer was counted as gone meanwhile, and its holds with it.
            if sealed is not None and peer not in self._gone_peers:
                self._change(sealed, peer, -count)

    def _change(self, sealed: Sealed, peer: int, by: int) -> None:
        count = sealed.lends.get(peer, 0) + by
        if count:
            sealed.lends[peer] = count
        else:
            sealed.lends.pop(peer, None)
            self._free_if_unheld(sealed)

    def known_to(self, ref: SegmentRef, peer: int) -> bool:
        """Tell whether this place of the arena was lent to a peer before, in this form or before it was patched."""
        sealed = self.get(ref)
        return sealed is not None and peer in sealed.known

    def peer_gone(self, peer: int) -> None:
        """End all holds of a peer that is proven dead; ranks are never used again."""
        with self.lock:
            self._gone_peers.add(peer)
            for sealed in list(self._by_serial.values()):
                sealed.known.discard(peer)
                if sealed.lends.pop(peer, None) is not None:
                    self._free_if_unheld(sealed)

    # Records

    def add_record(self, sealed: Sealed, record: Any) -> None:
        """Let a record hold a segment."""
        with self.lock:
            sealed.records[record] = None

    def drop_record(
        self, sealed: Sealed, record: Any, extent: tuple[int, int] | None = None
    ) -> None:
        """Undo `add_record`; the record's part of the segment is dead then."""
        with self.lock:
            if record not in sealed.records:
                return
            del sealed.records[record]
            if extent is not None:
                sealed.dead.add(*extent)
                if sealed.records:
                    self._partly_dead[sealed] = None
            self._free_if_unheld(sealed)

    def punch_dead(self, most_bytes: int) -> bool:
        """Return the memory of dead parts of live segments to the system, a little at a time.

        Otherwise the last small matrix of a model would keep the place of all others that were replaced.

        Returns
        -------
        bool
            True if more can be done now.
        """
        while most_bytes > 0:
            with self.lock:
                # Whoever got a message that names a dead part may still read it.
                able = (s for s in self._partly_dead if not s.pins and not s.lends)
                if (sealed := next(able, None)) is None:
                    return False
                part = sealed.dead.pop_tail(most_bytes)
                if part is None:
                    del self._partly_dead[sealed]
                    continue
                sealed.pins += 1  # not to be freed, and given to somebody else, in the middle of it
            try:
                hole = self._arena.punch(sealed.segment, *part)
                if hole[1]:
                    insort(sealed.holes, hole)
                most_bytes -= part[1]
            finally:
                self.unpin_sealed(sealed)
        return True

    def held_by_records_only(self) -> list[Sealed]:
        """Return the segments that could be freed by forgetting records."""
        with self.lock:
            return [s for s in self._by_serial.values() if not s.pins and not s.lends]

    def _free_if_unheld(self, sealed: Sealed) -> None:
        if sealed.pins or sealed.lends or sealed.records:
            return
        if self._by_serial.pop(sealed.ref.serial, None) is not None:
            self._partly_dead.pop(sealed, None)
            self._arena.free(sealed.segment, sealed.holes)

    def _must_exist(self, ref: SegmentRef) -> Sealed:
        if (sealed := self.get(ref)) is None:
            raise ProtocolError(
                f"segment {ref.serial} of rank {ref.owner} is held by nobody any more "
                f"at rank {self._arena.rank}; whoever names it must hold it meanwhile"
            )
        return sealed

    def counts(self) -> dict[str, int]:
        """Return the sizes of the table and of what holds."""
        with self.lock:
            all_sealed = self._by_serial.values()
            return {
                "segments": len(all_sealed),
                "pins": sum(s.pins for s in all_sealed),
                "lends": sum(len(s.lends) for s in all_sealed),
            }

    def after_fork_in_child(self) -> None:
        """Start with a lock that no other thread of the parent holds."""
        self.lock = threading.RLock()
