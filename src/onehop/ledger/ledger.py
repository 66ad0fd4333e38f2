"""What users hold: the books of all processes, merged, and parts of that.

Must never send anything itself (`pull`, given by whoever owns the links, does) and never wait while its lock is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from onehop.errors import ProtocolError
from onehop.ledger.book import KEPT_RECORDS, Book
from onehop.ledger.reading import Reading, Totals, sum_of
from onehop.ledger.records import RawRecord, Tally, TotalKey, record_from


class _Told:
    """What one other process has told of its book."""

    __slots__ = ("following", "noted", "totals")

    def __init__(self) -> None:
        self.following = 0
        self.noted = 0
        self.totals: dict[TotalKey, Tally] = {}


class Ledger(Reading):
    """The merged books of a cluster.

    Parameters
    ----------
    book : Book
        This process's own.
    pull : callable, optional
        Called before every reading, without locks held: it asks the other processes for their news and passes the
        answers to `merge`, from this thread or another, before it returns.
    host_of : callable, optional
        Gives the name of a rank's host, also of a rank that is gone.
    kept_records : int
        How many of the newest records of other processes are kept.
    rank : int
        This process's own, so that its own news, should they come back to it, are not counted twice; 0 if unknown.
    """

    def __init__(
        self,
        book: Book,
        pull: Callable[[], None] | None = None,
        host_of: Callable[[int], str] | None = None,
        kept_records: int = KEPT_RECORDS,
        rank: int = 0,
    ) -> None:
        self._book = book
        self._pull = pull
        self._name_of = host_of
        self._kept_records = kept_records
        self._rank = rank
        self._lock = threading.Lock()
        self._told: dict[int, _Told] = {}
        self._records: dict[tuple[int, int], RawRecord] = {}
        self._lost: set[int] = set()

    def following(self, rank: int) -> int:
        """Number of the first record of that rank's book that is not here yet: what to ask for."""
        with self._lock:
            told = self._told.get(rank)
            return told.following if told else 0

    def merge(self, rank: int, exported: Sequence[Any]) -> bool:
        """Take in what `Book.export` gave on another process.

        Parameters
        ----------
        rank : int
            Whose book it is.
        exported : Export
            Or what a wire made of it: four items, lists in place of tuples. The order of arrival does not matter,
            nor does one that arrives twice.

        Returns
        -------
        bool
            True if that book has more records to give, because the export was limited.
        """
        if rank == self._rank:
            return False
        try:
            first, noted, records, rows = exported
            totals = {(row[0], row[1], row[2], row[3], row[4]): Tally(*row[5:]) for row in rows}
            numbered = {
                (rank, number): tuple(record_from(raw))
                for number, raw in enumerate(records, start=first)
            }
            following = first + len(records)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(
                f"rank {rank} sent a report of its ledger that cannot be read"
            ) from error
        with self._lock:
            told = self._told.setdefault(rank, _Told())
            # Totals only grow, so the one that contains more is the newer, however late it arrives.
            if noted >= told.noted:
                told.noted, told.totals = noted, totals
            told.following = max(told.following, following)
            self._records.update(numbered)
            if len(self._records) > self._kept_records + self._kept_records // 4:
                self._forget()
            return told.following < told.noted

    def _forget(self) -> None:
        surplus = len(self._records) - self._kept_records
        if surplus > 0:
            oldest_first = sorted(self._records.items(), key=lambda item: item[1][9])
            self._records = dict(oldest_first[surplus:])

    def mark_lost(self, rank: int) -> None:
        """Say that a process died before it could tell its last news; what it had told stays."""
        with self._lock:
            self._lost.add(rank)

    @property
    def lost(self) -> list[int]:
        """Ranks that died before they could tell their last news: their totals are what they had told."""
        with self._lock:
            return sorted(self._lost)

    def watch(self) -> Watch:
        """Watch a part of a program.

        Returns
        -------
        Watch
            A context manager with the reading methods of the ledger, for what happened inside.

        Examples
        --------
        >>> with ledger.watch() as seen:  # doctest: +SKIP
        ...     cluster.map(f, xs)
        >>> seen.total("moved")  # doctest: +SKIP
        """
        return Watch(self)

    def _host_of(self, rank: int) -> str:
        return self._name_of(rank) if self._name_of else "this host"

    def _marks(self) -> _Marks:
        """How far every book is now, and its totals."""
        if self._pull is not None:
            self._pull()
        own_noted, totals = self._book.figures()
        with self._lock:
            noted = {rank: told.noted for rank, told in self._told.items()}
            parts = [totals, *(told.totals for told in self._told.values())]
        noted[self._rank] = own_noted
        return _Marks(noted, _merged(parts))

    def _rows_between(self, begin: _Marks, end: _Marks) -> list[RawRecord]:
        first, own = self._book.newest()
        rows = own[
            max(begin.noted.get(self._rank, 0) - first, 0) : max(
                end.noted.get(self._rank, 0) - first, 0
            )
        ]
        rows += self._foreign_between(begin, end)
        return rows

    def _dropped_between(self, begin: _Marks, end: _Marks) -> int:
        own_kept = end.noted.get(self._rank, 0) - max(
            self._book.dropped, begin.noted.get(self._rank, 0)
        )
        kept = max(own_kept, 0) + len(self._foreign_between(begin, end))
        return sum(end.noted.values()) - sum(begin.noted.values()) - kept

    def _foreign_between(self, begin: _Marks, end: _Marks) -> list[RawRecord]:
        with self._lock:
            # Some more are kept between readings, so that the oldest are cut seldom.
            self._forget()
            return [
                raw
                for (rank, number), raw in self._records.items()
                if begin.noted.get(rank, 0) <= number < end.noted.get(rank, 0)
            ]

    def _totals(self) -> Totals:
        return self._marks().totals

    def _rows(self) -> list[RawRecord]:
        return self._rows_between(_NOTHING, self._marks())

    @property
    def dropped(self) -> int:
        """Records that only the totals remember, because newer ones took their place."""
        return self._dropped_between(_NOTHING, self._marks())


class Watch(Reading):
    """What happened inside a ``with`` block: exact totals by difference, and the records that are still kept.

    Inside the block it reads what has happened so far.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begin: _Marks | None = None
        self._end: _Marks | None = None

    def __enter__(self) -> Watch:
        self._begin, self._end = self._ledger._marks(), None
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._ledger._marks()

    def _span(self) -> tuple[_Marks, _Marks]:
        if self._begin is None:
            raise RuntimeError("nothing was watched yet: use it as `with ledger.watch() as seen:`")
        return self._begin, self._end or self._ledger._marks()

    def _totals(self) -> Totals:
        begin, end = self._span()
        return _difference(end.totals, begin.totals)

    def _rows(self) -> list[RawRecord]:
        return self._ledger._rows_between(*self._span())

    @property
    def dropped(self) -> int:
        """Records of the block that only the totals remember."""
        return self._ledger._dropped_between(*self._span())

    def _host_of(self, rank: int) -> str:
        return self._ledger._host_of(rank)

    @property
    def lost(self) -> list[int]:
        """Ranks that died before they could tell their last news."""
        return self._ledger.lost


class _Marks(NamedTuple):
    """How far every book was at one moment."""

    noted: Mapping[int, int]
    totals: Totals


_NOTHING = _Marks({}, {})


def _merged(parts: Iterable[Totals]) -> dict[TotalKey, Tally]:
    merged: dict[TotalKey, Tally] = {}
    for part in parts:
        for key, tally in part.items():
            merged[key] = sum_of(merged.get(key), tally)
    return merged


def _difference(after: Totals, before: Totals) -> dict[TotalKey, Tally]:
    difference = {}
    for key, tally in after.items():
        earlier = before.get(key, Tally(0, 0, 0))
        if tally != earlier:
            difference[key] = Tally(
                tally.records - earlier.records,
                tally.count - earlier.count,
                tally.size_bytes - earlier.size_bytes,
            )
    return difference
