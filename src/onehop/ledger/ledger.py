"""What users read: the books of all processes, merged.

Must never send anything itself (`pull`, given by whoever owns the links, does) and never wait while its lock is held.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onehop.errors import ProtocolError
from onehop.ledger.book import KEPT_RECORDS, Book
from onehop.ledger.journey import Journey, causes_below, route_of
from onehop.ledger.records import (
    OUTCOMES,
    CallId,
    RawRecord,
    Tally,
    TotalKey,
    TransferRecord,
    record_from,
)
from onehop.ledger.tables import Flow, Table, Traffic, format_bytes

if TYPE_CHECKING:
    import rich.table

OWN = 0
"""Stands for the own book among those of the ranks, which begin at 1."""

Totals = Mapping[TotalKey, Tally]
_E = TypeVar("_E", int, str)


class Contents(NamedTuple):
    """The records of a reading."""

    records: list[RawRecord]
    """Those that are still kept, in time order."""
    noted: int
    """How many there were."""


class Reading(ABC):
    """The methods that a ledger and a part of one have in common."""

    @abstractmethod
    def _totals(self) -> Totals:
        """Bring everything up to date and give the totals alone, which is quick."""

    @abstractmethod
    def _contents(self) -> Contents:
        """Bring everything up to date and give the records."""

    @abstractmethod
    def _host_of(self, rank: int) -> str:
        """Name of a rank's host."""

    @property
    @abstractmethod
    def lost(self) -> list[int]:
        """Ranks that died before they could tell their last news: their totals are what they had told."""

    def _footer(self) -> str:
        lost = self.lost
        return f"without the last news of rank {', '.join(map(str, lost))}, lost" if lost else ""

    def records(
        self,
        cause: CallId | None = None,
        *,
        message: str | None = None,
        source: int | None = None,
        target: int | None = None,
        medium: str | None = None,
        outcome: str | None = None,
    ) -> list[TransferRecord]:
        """Give the records that are still kept, in time order.

        Parameters
        ----------
        cause : tuple of int, optional
            Only those that this call needed; `story` includes its nested calls.
        message, source, target, medium, outcome : optional
            Only those with this value; None stands for any.
        """
        _check_outcome(outcome)
        cause = None if cause is None else (cause[0], cause[1])
        wanted = (message, source, target, medium, outcome)
        return [
            record
            for record in map(record_from, self._contents().records)
            if cause in (None, record.cause)
            and _matches(
                (record.message, record.source, record.target, record.medium, record.outcome),
                wanted,
            )
        ]

    def total(
        self,
        outcome: str | None = None,
        medium: str | None = None,
        source: int | None = None,
        target: int | None = None,
        message: str | None = None,
    ) -> int:
        """Bytes with these properties, exact for ever; None stands for any.

        A payload that a relay passed on counts on every hop, as on the links.
        """
        _check_outcome(outcome)
        wanted = (message, source, target, medium, outcome)
        return sum(
            tally.size_bytes for key, tally in self._totals().items() if _matches(key, wanted)
        )

    def count(
        self,
        outcome: str | None = None,
        medium: str | None = None,
        source: int | None = None,
        target: int | None = None,
        message: str | None = None,
    ) -> int:
        """Payloads with these properties, exact for ever; None stands for any."""
        _check_outcome(outcome)
        wanted = (message, source, target, medium, outcome)
        return sum(tally.count for key, tally in self._totals().items() if _matches(key, wanted))

    @property
    def dropped(self) -> int:
        """Records that only the totals remember, because newer ones took their place."""
        contents = self._contents()
        return contents.noted - len(contents.records)

    def between_processes(self) -> Traffic[int]:
        """Who sent how much to whom, hop by hop."""
        return self._traffic(lambda rank: rank)

    def between_hosts(self) -> Traffic[str]:
        """The same between hosts; the row from a host to itself is what stayed inside."""
        return self._traffic(self._host_of)

    def _traffic(self, end: Callable[[int], _E]) -> Traffic[_E]:
        flows: dict[tuple[_E, _E], dict[tuple[str, str], Tally]] = {}
        for (_, source, target, medium, outcome), tally in self._totals().items():
            flow = flows.setdefault((end(source), end(target)), {})
            flow[medium, outcome] = _sum(flow.get((medium, outcome)), tally)
        return Traffic({pair: Flow(flow) for pair, flow in flows.items()}, self._footer())

    def story(self, call: CallId) -> list[TransferRecord]:
        """Give the records of a call and of all calls that it made, in time order."""
        records = [record_from(raw) for raw in self._contents().records]
        causes = causes_below((call[0], call[1]), records)
        return [record for record in records if record.cause in causes]

    def journey(self, call: CallId) -> Journey:
        """The way that a call really took, there and back, with what every hop carried."""
        return route_of(call, [record_from(raw) for raw in self._contents().records])

    def table(self) -> Table:
        """Totals by message and medium."""
        rows: dict[tuple[str, str], dict[str, Tally]] = {}
        for (message, _, _, medium, outcome), tally in self._totals().items():
            row = rows.setdefault((message, medium), {})
            row[outcome] = _sum(row.get(outcome), tally)
        return Table(
            ["message", "medium", ">count", ">moved", ">attached", ">avoided"],
            [
                [message, medium, str(sum(tally.count for tally in row.values()))]
                + [
                    format_bytes(row[outcome].size_bytes if outcome in row else 0)
                    for outcome in OUTCOMES
                ]
                for (message, medium), row in sorted(rows.items())
            ],
            footer=self._footer(),
        )

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> rich.table.Table:
        """Give rich its own kind of table."""
        return self.table().__rich__()


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
    """

    def __init__(
        self,
        book: Book,
        pull: Callable[[], None] | None = None,
        host_of: Callable[[int], str] | None = None,
        kept_records: int = KEPT_RECORDS,
    ) -> None:
        self._book = book
        self._pull = pull
        self._name_of = host_of
        self._kept_records = kept_records
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
            False if that book has more records, because the export was limited.
        """
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
            return told.following >= told.noted

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
        first, records, totals = self._book.snapshot()
        with self._lock:
            noted = {rank: told.noted for rank, told in self._told.items()}
            parts = [totals, *(told.totals for told in self._told.values())]
        noted[OWN] = first + len(records)
        return _Marks(noted, _merged(parts))

    def _between(self, begin: _Marks, end: _Marks) -> Contents:
        first, own, _ = self._book.snapshot()
        with self._lock:
            # Some more are kept between readings, so that the oldest are cut seldom.
            self._forget()
            records = dict(self._records)
        records.update({(OWN, number): raw for number, raw in enumerate(own, start=first)})
        inside = [
            raw
            for (rank, number), raw in records.items()
            if begin.noted.get(rank, 0) <= number < end.noted.get(rank, 0)
        ]
        inside.sort(key=lambda raw: (raw[9], raw[10]))
        return Contents(inside, sum(end.noted.values()) - sum(begin.noted.values()))

    def _totals(self) -> Totals:
        return self._marks().totals

    def _contents(self) -> Contents:
        return self._between(_NOTHING, self._marks())


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

    def _contents(self) -> Contents:
        return self._ledger._between(*self._span())

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


def _check_outcome(outcome: str | None) -> None:
    # A misspelt outcome would silently give 0, which looks like good news.
    if outcome is not None and outcome not in OUTCOMES:
        raise ValueError(f"no outcome {outcome!r}; there are {', '.join(OUTCOMES)}")


def _matches(key: Sequence[object], wanted: Sequence[object]) -> bool:
    return all(want is None or have == want for have, want in zip(key, wanted, strict=True))


def _sum(one: Tally | None, other: Tally) -> Tally:
    return (
        other
        if one is None
        else Tally(
            one.records + other.records,
            one.count + other.count,
            one.size_bytes + other.size_bytes,
        )
    )


def _merged(parts: Iterable[Totals]) -> dict[TotalKey, Tally]:
    merged: dict[TotalKey, Tally] = {}
    for part in parts:
        for key, tally in part.items():
            merged[key] = _sum(merged.get(key), tally)
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
