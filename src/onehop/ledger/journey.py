"""The way that one call really took, read from its records.

Must never know the topology: this says what happened, not what was planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from onehop.ledger.records import ATTACHED, AVOIDED, MOVED, OUTCOMES, CallId, TransferRecord
from onehop.ledger.tables import Table, format_bytes

if TYPE_CHECKING:
    import rich.table


class Hop:
    """One step of a journey: a message from one process to the next, with all that it brought along.

    Attributes
    ----------
    source, target : int
        Ranks.
    message : str
        ``call`` or ``result``, the steps of the way; or ``blob`` or ``control``, for what was fetched or said aside.
    cause : tuple of int or None
        The call that it belongs to.
    records : list of TransferRecord
        What it is made of.
    """

    __slots__ = ("cause", "message", "records", "source", "target")

    def __init__(self, record: TransferRecord) -> None:
        self.source = record.source
        self.target = record.target
        self.message = record.message
        self.cause = record.cause
        self.records = [record]

    @property
    def label(self) -> str:
        """Name of the function, where one is known."""
        return next((record.label for record in self.records if record.label), "")

    @property
    def what(self) -> str:
        """Message and name."""
        return f"{self.message} {self.label}".rstrip()

    @property
    def media(self) -> tuple[str, ...]:
        """What it went over, the message's own first."""
        return tuple(dict.fromkeys(record.medium for record in self.records))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was copied, and why."""
        return tuple(dict.fromkeys(record.note for record in self.records if record.note))

    @property
    def start_ns(self) -> int:
        """Earliest start."""
        return min(record.start_ns for record in self.records)

    @property
    def end_ns(self) -> int:
        """Latest end."""
        return max(record.end_ns for record in self.records)

    def total(self, outcome: str) -> int:
        """Bytes with that outcome."""
        return sum(record.size_bytes for record in self.records if record.outcome == outcome)

    @property
    def moved_bytes(self) -> int:
        """Bytes that went over."""
        return self.total(MOVED)

    @property
    def attached_bytes(self) -> int:
        """Bytes that were mapped instead of copied."""
        return self.total(ATTACHED)

    @property
    def avoided_bytes(self) -> int:
        """Bytes that were there already."""
        return self.total(AVOIDED)

    def __repr__(self) -> str:
        return f"<Hop {self.source} → {self.target} {self.what}>"


class Journey:
    """The hops of a call, of the calls that it made, and of the way back; prints as ``1 → 2 → 3 → 2 → 1``.

    Parameters
    ----------
    call : tuple of int
        The call.
    hops : sequence of Hop
        In the order in which they are walked: there, then every nested call, then back.
    """

    def __init__(self, call: CallId, hops: Sequence[Hop]) -> None:
        self.call = call
        self.hops = list(hops)

    @property
    def legs(self) -> list[tuple[int, ...]]:
        """Ranks passed, cut where one hop does not begin where the last one ended."""
        legs: list[list[int]] = []
        for hop in self.hops:
            if hop.message not in ("call", "result"):
                continue
            if legs and legs[-1][-1] == hop.source:
                legs[-1].append(hop.target)
            else:
                legs.append([hop.source, hop.target])
        return [tuple(leg) for leg in legs]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks passed, one after the other."""
        return tuple(rank for leg in self.legs for rank in leg)

    @property
    def path(self) -> str:
        """The line ``1 → 2 → 1``."""
        return ", ".join(" → ".join(map(str, leg)) for leg in self.legs)

    def __len__(self) -> int:
        return len(self.hops)

    def __iter__(self) -> Iterator[Hop]:
        return iter(self.hops)

    def table(self) -> Table:
        """One row for each hop."""
        begin_ns = min((hop.start_ns for hop in self.hops), default=0)
        return Table(
            ["hop", "what", "medium", ">moved", ">attached", ">avoided", ">at", "note"],
            [
                [
                    f"{hop.source} → {hop.target}",
                    hop.what,
                    " + ".join(hop.media),
                    *(format_bytes(hop.total(outcome)) for outcome in OUTCOMES),
                    f"{(hop.start_ns - begin_ns) / 1e6:.2f} ms",
                    "; ".join(hop.notes),
                ]
                for hop in self.hops
            ],
            title=self.path,
        )

    def __str__(self) -> str:
        if not self.hops:
            return f"no records of call {self.call[0]}.{self.call[1]} are kept"
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> rich.table.Table:
        """Give rich its own kind of table."""
        return self.table().__rich__()


def causes_below(call: CallId, family: Iterable[tuple[CallId, CallId]]) -> set[CallId]:
    """Give a call and all calls made by its task, by their tasks, and so on, from pairs of child and parent."""
    children: dict[CallId, set[CallId]] = {}
    for child, parent in family:
        children.setdefault(parent, set()).add(child)
    found: set[CallId] = set()
    waiting = [call]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += children.get(one, ())
    return found


def route_of(call: CallId, records: Iterable[TransferRecord]) -> Journey:
    """Read a call's journey from records.

    Parameters
    ----------
    call : tuple of int
        Rank that made the call, and its serial number there.
    records : iterable of TransferRecord
        Any; those that belong to other calls are passed over.
    """
    call = (call[0], call[1])
    by_cause: dict[CallId, list[TransferRecord]] = {}
    parents: dict[CallId, CallId] = {}
    for record in sorted(records, key=lambda record: (record.start_ns, record.end_ns)):
        if record.cause is not None:
            by_cause.setdefault(record.cause, []).append(record)
            if record.parent is not None:
                parents[record.cause] = record.parent
    nested: dict[CallId, list[CallId]] = {}
    for child in by_cause:  # in the order of their first record
        if child in parents:
            nested.setdefault(parents[child], []).append(child)

    hops: list[Hop] = []
    entered: set[CallId] = set()
    # Tasks nest to any depth, deeper than Python recurses: what is still to be walked is a stack.
    walk: list[CallId | list[Hop]] = [call]
    while walk:
        step = walk.pop()
        if isinstance(step, list):
            hops += step
        elif step not in entered:
            entered.add(step)
            there, back = _hops_of(by_cause.get(step, []))
            hops += there
            # A call made without waiting may begin when the answer has gone.
            answered_ns = back[0].start_ns if back else None
            early = [
                child
                for child in nested.get(step, ())
                if answered_ns is None or by_cause[child][0].start_ns <= answered_ns
            ]
            late = [child for child in nested.get(step, ()) if child not in early]
            walk += [*reversed(late), back, *reversed(early)]
    return Journey(call, hops)


def _hops_of(records: Sequence[TransferRecord]) -> tuple[list[Hop], list[Hop]]:
    """Divide one call's own records into the way there and the way back."""
    there: list[Hop] = []
    back: list[Hop] = []
    aside: list[TransferRecord] = []
    for record in records:
        if record.message not in ("call", "result"):
            aside.append(record)
            continue
        way = there if record.message == "call" else back
        # One record per medium and outcome: they are one hop. A second sending is a hop of its own.
        for hop in way:
            if (hop.source, hop.target) == (record.source, record.target) and not any(
                (record.medium, record.outcome) == (other.medium, other.outcome)
                for other in hop.records
            ):
                hop.records.append(record)
                break
        else:
            way.append(Hop(record))
    fetched: dict[tuple[str, int, int], Hop] = {}
    for record in aside:
        # What was copied within a process belongs to the hop that it was copied for.
        inside = record.source == record.target
        carriers = [
            hop
            for hop in (*there, *back)
            if record.message == "blob"
            and hop.source == record.source
            and (inside or hop.target == record.target)
        ]
        if carriers:
            # The last that had begun: a process that calls itself has call and result on the same pair.
            begun = [hop for hop in carriers if hop.start_ns <= record.start_ns]
            (begun or carriers)[-1 if begun else 0].records.append(record)
            continue
        key = (record.message, record.source, record.target)
        if key in fetched:
            fetched[key].records.append(record)
        else:
            fetched[key] = Hop(record)
    return there + sorted(fetched.values(), key=lambda hop: hop.start_ns), back
