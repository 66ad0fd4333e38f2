"""The book that every process keeps of what it sent and attached: the hot path of the ledger.

Must never know who reads it, wait for anything, or import more than a worker's start can afford.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from onehop.ledger.records import (
    CallId,
    Export,
    RawRecord,
    Tally,
    TotalKey,
    TransferRecord,
    record_from,
)

KEPT_RECORDS = 100_000
FOLD_AFTER = 1024
EXPORT_LIMIT = 10_000


class _Chunk(NamedTuple):
    """Records that were packed together."""

    first: int
    """Number of the first."""
    count_records: int
    packed: bytes | list[RawRecord]


_key_of: Callable[[RawRecord], TotalKey] = itemgetter(0, 3, 4, 5, 6)
_count_of: Callable[[RawRecord], int] = itemgetter(7)
_size_of: Callable[[RawRecord], int] = itemgetter(8)


class Book:
    """Notes transfers; keeps the newest as records, and all of them in exact totals.

    Any number of threads may note at once. `note` never blocks, so that it may be called from a finalizer or a
    signal handler, also one that interrupts this very class.

    Parameters
    ----------
    kept_records : int
        How many of the newest records are kept.
    """

    __slots__ = (
        "_chunks",
        "_exported",
        "_folded",
        "_lock",
        "_packed",
        "_pending",
        "_tail",
        "_totals",
        "kept_records",
    )

    def __init__(self, kept_records: int = KEPT_RECORDS) -> None:
        if kept_records < 1:
            raise ValueError(f"a book keeps at least one record, not {kept_records}")
        self.kept_records = kept_records
        self._pending: list[RawRecord] = []
        self._chunks: deque[_Chunk] = deque()
        self._packed = 0
        self._tail: list[RawRecord] = []
        self._totals: dict[TotalKey, list[int]] = {}
        self._folded = 0
        self._exported = 0
        self._lock = threading.Lock()

    if TYPE_CHECKING:

        def note(
            self,
            message: str,
            cause: CallId | None,
            parent: CallId | None,
            source: int,
            target: int,
            medium: str,
            outcome: str,
            count: int,
            size_bytes: int,
            start_ns: int,
            end_ns: int,
            label: str = "",
            note: str = "",
            /,
        ) -> None:
            """Write one transfer down; the arguments are the fields of `TransferRecord`."""

    else:

        def note(self, *record: Any) -> None:
            """Write one transfer down; the arguments are the fields of `TransferRecord`, by position."""
            # The arguments arrive as the very tuple that is kept: with named ones, and a tuple built of them, this
            # takes more than twice as long. The type checker watches over their number and kind.
            pending = self._pending
            pending.append(record)
            # Only tried, never waited for: whoever holds the lock may be this thread, below a finalizer. The next
            # note tries again, and readers fold too, so nothing is left behind.
            if len(pending) >= FOLD_AFTER and self._lock.acquire(False):
                try:
                    self._fold()
                finally:
                    self._lock.release()

    def _fold(self) -> None:
        # The list is emptied from its front and never exchanged for another: a thread that has already read
        # self._pending, but not yet appended, would write to the old one, and its record would be lost. Slicing and
        # deleting the slice are atomic each, and appends between them go behind it. (`batch` still holds the tuples
        # while they are deleted, so no destructor runs in the middle.)
        pending = self._pending
        batch = pending[: len(pending)]
        del pending[: len(batch)]
        groups: dict[TotalKey, list[RawRecord]] = {}
        for key, raw in zip(map(_key_of, batch), batch, strict=True):
            try:
                groups[key].append(raw)
            except KeyError:
                groups[key] = [raw]
        for key, group in groups.items():
            tally = self._totals.setdefault(key, [0, 0, 0])
            tally[0] += len(group)
            tally[1] += sum(map(_count_of, group))
            tally[2] += sum(map(_size_of, group))
        self._folded += len(batch)
        self._tail += batch
        if len(self._tail) >= FOLD_AFTER:
            self._pack()

    def _pack(self) -> None:
        # 10⁵ tuples are 25 MB in each process, and writing every new one to memory that is never warm doubles the
        # time of `note`. Packed they are 5 MB, and the memory of the tuples is used again and again.
        chunk = _Chunk(self._folded - len(self._tail), len(self._tail), _packed(self._tail))
        self._chunks.append(chunk)
        self._packed += chunk.count_records
        self._tail = []
        while self._packed - self._chunks[0].count_records >= self.kept_records:
            self._packed -= self._chunks.popleft().count_records

    def fold(self) -> None:
        """Add what was noted to the totals now; for a process that is idle anyway."""
        if self._pending and self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    @property
    def noted(self) -> int:
        """Records ever noted."""
        return self.figures()[0]

    @property
    def dropped(self) -> int:
        """Records that only the totals remember."""
        with self._lock:
            self._fold()
            return self._oldest()

    def _oldest(self) -> int:
        kept = min(self._packed + len(self._tail), self.kept_records)
        return self._folded - kept

    def totals(self) -> dict[TotalKey, Tally]:
        """Exact totals of everything ever noted."""
        return self.figures()[1]

    def figures(self) -> tuple[int, dict[TotalKey, Tally]]:
        """How many records were noted, and their totals, of one moment."""
        with self._lock:
            self._fold()
            return self._folded, {key: Tally(*tally) for key, tally in self._totals.items()}

    def records(self) -> list[TransferRecord]:
        """The newest records, in the order in which they were noted."""
        return [record_from(raw) for raw in self.newest()[1]]

    def newest(self) -> tuple[int, list[RawRecord]]:
        """Number of the first record that is kept, and the records; call ids in them may be lists."""
        with self._lock:
            self._fold()
            first = self._oldest()
            chunks, folded = self._all_chunks(), self._folded
        return first, _unpacked(chunks, first, folded)

    def _all_chunks(self) -> list[_Chunk]:
        tail = self._tail.copy()
        return [*self._chunks, _Chunk(self._folded - len(tail), len(tail), tail)]

    def export(self, since: int | None = None, limit: int = EXPORT_LIMIT) -> Export:
        """Give the news to another process.

        Parameters
        ----------
        since : int, optional
            Number of the first record wanted, as `Export.following` or `Ledger.following` said; a lost answer then
            costs nothing. By default: what no export has given yet.
        limit : int
            Records at most; ask again while ``following < noted``.

        Returns
        -------
        Export
            Plain tuples and lists; the totals are exact even where records were dropped or did not fit.
        """
        with self._lock:
            self._fold()
            first = max(self._exported if since is None else since, self._oldest())
            first = min(first, self._folded)
            following = min(first + limit, self._folded)
            self._exported = max(self._exported, following)
            chunks, folded = self._all_chunks(), self._folded
            totals = [(*key, *tally) for key, tally in self._totals.items()]
        return Export(first, folded, _unpacked(chunks, first, following), totals)


def _packed(records: list[RawRecord]) -> bytes | list[RawRecord]:
    import msgspec

    try:
        return msgspec.msgpack.encode(records)
    except (TypeError, OverflowError):
        # An integer of numpy's, or one beyond 64 bits: kept as it is, rather than lost.
        return records


def _unpacked(chunks: list[_Chunk], first: int, following: int) -> list[RawRecord]:
    """Give the records with the numbers from `first` on and before `following`."""
    import msgspec

    records: list[RawRecord] = []
    for chunk in chunks:
        if chunk.first + chunk.count_records > first and chunk.first < following:
            packed = chunk.packed
            raw = msgspec.msgpack.decode(packed) if isinstance(packed, bytes) else packed
            records += raw[max(first - chunk.first, 0) : following - chunk.first]
    return records
