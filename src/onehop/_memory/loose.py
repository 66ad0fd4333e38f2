"""Byte strings in the arena that are found again by content: headers, packs of small buffers.

Must never know whose they are. They lie in segments of their own, so that a header that is used again does not keep an
array's segment; and they take neither the tracker's lock nor wait for a copy, so that a small call is never delayed by a
large one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from onehop._memory import kernel
from onehop._memory.addresses import address_reader
from onehop._memory.arena import Arena, ArenaSegment
from onehop._memory.placement import Location, Placement, lay_out
from onehop._memory.sealed import Sealed, SegmentTable

_COUNT, _BYTES = 1 << 16, 64 << 20
"""At most so much is remembered, the latest used."""

UNUSED_NS = 30_000_000_000
"""Forgotten after this time without use: a loop whose tasks take long still finds the header of its model."""


class LooseRecord:
    """Where one string lies."""

    __slots__ = ("key", "offset", "sealed", "used_ns")

    def __init__(self, key: tuple[int, int], sealed: Sealed, offset: int, used_ns: int) -> None:
        self.key = key
        """Length and hash; equal keys are compared byte by byte."""
        self.sealed = sealed
        self.offset = offset
        self.used_ns = used_ns


class LooseStrings:
    """All loose strings of one arena.

    Parameters
    ----------
    arena, table
        Where they are written and who holds them.
    allocate : callable
        Gives a segment, making room if necessary.
    """

    def __init__(
        self, arena: Arena, table: SegmentTable, allocate: Callable[[int], ArenaSegment]
    ) -> None:
        self._arena = arena
        self._table = table
        self._allocate = allocate
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[int, int], LooseRecord] = OrderedDict()
        self._bytes = 0
        self._address_of = address_reader()

    def __len__(self) -> int:
        return len(self._records)

    def place(self, placement: Placement, strings: Sequence[bytes]) -> list[Location]:
        """Find or write strings; their segments are pinned for the placement."""
        now_ns = time.monotonic_ns()
        found: list[Location | None] = []
        new: dict[bytes, list[int]] = {}
        for data in strings:
            location = self._find(placement, data, now_ns)
            if location is None:
                new.setdefault(data, []).append(len(found))
            else:
                placement.kept_bytes += len(data)
            found.append(location)
        if new:
            self._write(placement, new, found, now_ns)
        return [location for location in found if location is not None]

    def _find(self, placement: Placement, data: bytes, now_ns: int) -> Location | None:
        key = (len(data), hash(data))
        with self._lock:
            if (record := self._records.get(key)) is None:
                return None
            sealed = record.sealed
            new = sealed not in placement.pinned
            if new:
                self._table.pin_sealed(sealed)
            record.used_ns = now_ns
            self._records.move_to_end(key)
        view = self._arena.view_address(sealed.segment, record.offset)
        if not kernel.memory_equal(self._address_of(memoryview(data)), view, len(data)):
            if new:
                self._table.unpin_sealed(sealed)
            return None
        placement.pinned[sealed] = None
        return (sealed.ref, record.offset, len(data))

    def _write(
        self,
        placement: Placement,
        new: dict[bytes, list[int]],
        found: list[Location | None],
        now_ns: int,
    ) -> None:
        offsets, size_bytes = lay_out([len(data) for data in new])
        segment = self._allocate(size_bytes)
        try:
            for data, offset in zip(new, offsets, strict=True):
                self._arena.write(segment, offset, data)
        except BaseException:
            self._arena.free(segment)
            raise
        sealed = self._table.seal(segment)
        placement.pinned[sealed] = None
        for (data, indices), offset in zip(new.items(), offsets, strict=True):
            placement.moved_bytes += len(data)
            placement.kept_bytes += len(data) * (len(indices) - 1)
            for index in indices:
                found[index] = (sealed.ref, offset, len(data))
            record = LooseRecord((len(data), hash(data)), sealed, offset, now_ns)
            self._table.add_record(sealed, record)
            with self._lock:
                if (old := self._records.pop(record.key, None)) is not None:
                    self._drop(old)
                self._records[record.key] = record
                self._bytes += len(data)
                while len(self._records) > _COUNT or self._bytes > _BYTES:
                    self._drop(self._records.popitem(last=False)[1])

    def forget(self, record: LooseRecord) -> None:
        """Forget one string."""
        with self._lock:
            if self._records.get(record.key) is record:
                del self._records[record.key]
                self._drop(record)

    def forget_unused(self, before_ns: int) -> None:
        """Forget what was last used before a time."""
        with self._lock:
            while self._records:
                key, oldest = next(iter(self._records.items()))
                if oldest.used_ns >= before_ns:
                    break
                del self._records[key]
                self._drop(oldest)

    def _drop(self, record: LooseRecord) -> None:
        self._bytes -= record.key[0]
        self._table.drop_record(record.sealed, record)
