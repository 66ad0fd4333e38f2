"""Finds out which bytes of known buffers differ from their copies in the arena: by the tracker, else by comparing all.

Must never know what is done about it. Everything is called with the lock of the records held.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from onehop._memory import kernel
from onehop._memory.arena import Arena
from onehop._memory.placement import Range, Record

if TYPE_CHECKING:
    from onehop._memory.tracker import Tracker, Watch

_WATCH_BYTES = 16 << 10
"""Smaller buffers are compared: a call for one costs less than a scan, and they share their pages with too much else."""

_COMPARE_BYTES = 256 << 10
"""What is compared, and if different written, in one piece."""

_MANY_RANGES = 32
_NEARBY_BYTES = 64 << 10
"""When many pages were written, those so close to each other are compared together: a call costs as much as 16 KiB."""

_REWRITES = 2
"""A buffer that came back mostly written so often is no longer watched: a fault for each page costs more than a comparison."""


class ChangeFinder:
    """Compares records with what is true.

    Parameters
    ----------
    arena : Arena
        Where the copies lie.
    tracker : Tracker or None
        None compares always.
    """

    def __init__(self, arena: Arena, tracker: Tracker | None) -> None:
        self._arena = arena
        self._tracker = tracker

    def watch(self, record: Record) -> Watch | None:
        """Arm the pages of a buffer; to be done before it is compared or copied."""
        if self._tracker is None or record.length < _WATCH_BYTES:
            return None
        return self._tracker.watch(record.address, record.length)

    def changed(
        self, records: Sequence[Record], proven: Container[Record]
    ) -> dict[Record, list[Range]]:
        """Scan and compare.

        Parameters
        ----------
        records : sequence of Record
            Each once.
        proven : container of Record
            Those that are known to be unchanged for another reason.

        Returns
        -------
        dict
            What differs, by record. `accepted` must be called for each when it has been copied; until then the tracker
            goes on reporting it.
        """
        found: dict[Record, list[Range]] = {}
        watched = []
        for record in records:
            if record.watch is not None:
                watched.append(record)
            elif record not in proven:
                self._compare_all(record, found)
        if watched and self._tracker is not None:
            written = self._tracker.dirty_many([r.watch for r in watched if r.watch is not None])
            if written:
                for record in watched:
                    if record.watch is not None and record.watch in written:
                        self._compare_written(record, written[record.watch], found)
        return found

    def _compare_written(
        self, record: Record, written: list[Range], found: dict[Record, list[Range]]
    ) -> None:
        watch = record.watch
        assert watch is not None
        if not watch.believed:
            # Something else is mapped there now, or it was excluded: compare, and try again when it is seen unchanged.
            watch.close()
            record.watch = None
            record.rewrites = 1
            self._compare_all(record, found)
            return
        differences = self._differences(record, written)
        if not differences:
            record.rewrites = 0
            watch.accept()
            return
        found[record] = differences
        mostly = 2 * sum(stop - start for start, stop in differences) >= record.length
        record.rewrites = record.rewrites + 1 if mostly else 0

    def _compare_all(self, record: Record, found: dict[Record, list[Range]]) -> None:
        if record.calm:
            # Armed before it is compared, so that no write slips in between.
            record.watch = self.watch(record)
            record.calm = False
            record.rewrites = 0
        if differences := self._differences(record, [(0, record.length)]):
            found[record] = differences
        elif record.watch is None and record.rewrites:
            record.calm = True

    def accepted(self, record: Record) -> None:
        """The differences of a record were copied."""
        record.proof = None
        if record.watch is None:
            return
        if record.rewrites >= _REWRITES:
            record.watch.close(disarm=True)
            record.watch = None
        else:
            record.watch.accept()

    def _differences(self, record: Record, ranges: list[Range]) -> list[Range]:
        address = record.address
        view = self._arena.view_address(record.sealed.segment, record.offset)
        equal = kernel.memory_equal
        different: list[Range] = []
        for start, stop in _joined(ranges) if len(ranges) > _MANY_RANGES else ranges:
            while start < stop:
                end = min(start + _COMPARE_BYTES, stop)
                if not equal(address + start, view + start, end - start):
                    if different and different[-1][1] == start:
                        different[-1] = (different[-1][0], end)
                    else:
                        different.append((start, end))
                start = end
        return different


def _joined(ranges: list[Range]) -> list[Range]:
    """Join ranges that are close to each other; what lies between is compared too, which harms nothing."""
    joined = [ranges[0]]
    for start, stop in ranges[1:]:
        if start - joined[-1][1] <= _NEARBY_BYTES:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
