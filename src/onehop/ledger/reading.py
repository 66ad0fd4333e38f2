"""How books are read: the methods that a ledger and a part of one have in common.

Must never know where the figures come from, nor change them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

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

Totals = Mapping[TotalKey, Tally]
_End = TypeVar("_End", int, str)


class Reading(ABC):
    """The methods that a ledger and a part of one have in common."""

    @abstractmethod
    def _totals(self) -> Totals:
        """Bring everything up to date and give the totals alone, which is quick."""

    @abstractmethod
    def _rows(self) -> list[RawRecord]:
        """Bring everything up to date and give the records that are still kept, in any order."""

    @property
    @abstractmethod
    def dropped(self) -> int:
        """Records that only the totals remember, because newer ones took their place."""

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
        rows = self._rows()
        if cause is not None:
            rows = [raw for raw in rows if raw[1] is not None and tuple(raw[1]) == tuple(cause)]
        # One pass for each property that is asked for, because there are 10⁵ records and mostly one property.
        for place, want in ((0, message), (3, source), (4, target), (5, medium), (6, outcome)):
            if want is not None:
                rows = [raw for raw in rows if raw[place] == want]
        return _in_order(rows)

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

    def between_processes(self) -> Traffic[int]:
        """Who sent how much to whom, hop by hop."""
        return self._traffic(lambda rank: rank)

    def between_hosts(self) -> Traffic[str]:
        """The same between hosts; the row from a host to itself is what stayed inside."""
        return self._traffic(self._host_of)

    def _traffic(self, end: Callable[[int], _End]) -> Traffic[_End]:
        flows: dict[tuple[_End, _End], dict[tuple[str, str], Tally]] = {}
        for (_, source, target, medium, outcome), tally in self._totals().items():
            flow = flows.setdefault((end(source), end(target)), {})
            flow[medium, outcome] = sum_of(flow.get((medium, outcome)), tally)
        return Traffic({pair: Flow(flow) for pair, flow in flows.items()}, self._footer())

    def story(self, call: CallId) -> list[TransferRecord]:
        """Give the records of a call and of all calls that it made, in time order."""
        rows = [raw for raw in self._rows() if raw[1] is not None]
        family = ((tuple(raw[1]), tuple(raw[2])) for raw in rows if raw[2] is not None)
        causes = causes_below((call[0], call[1]), family)
        return _in_order([raw for raw in rows if tuple(raw[1]) in causes])

    def journey(self, call: CallId) -> Journey:
        """The way that a call really took, there and back, with what every hop carried."""
        return route_of(call, self.story(call))

    def table(self) -> Table:
        """Totals by message and medium."""
        rows: dict[tuple[str, str], dict[str, Tally]] = {}
        for (message, _, _, medium, outcome), tally in self._totals().items():
            row = rows.setdefault((message, medium), {})
            row[outcome] = sum_of(row.get(outcome), tally)
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


def _check_outcome(outcome: str | None) -> None:
    # A misspelt outcome would silently give 0, which looks like good news.
    if outcome is not None and outcome not in OUTCOMES:
        raise ValueError(f"no outcome {outcome!r}; there are {', '.join(OUTCOMES)}")


def _matches(key: Sequence[object], wanted: Sequence[object]) -> bool:
    return all(want is None or have == want for have, want in zip(key, wanted, strict=True))


def _in_order(rows: list[RawRecord]) -> list[TransferRecord]:
    return [record_from(raw) for raw in sorted(rows, key=itemgetter(9, 10))]


def sum_of(one: Tally | None, other: Tally) -> Tally:
    """Add two tallies, the first of which may not be there yet."""
    return (
        other
        if one is None
        else Tally(
            one.records + other.records,
            one.count + other.count,
            one.size_bytes + other.size_bytes,
        )
    )
