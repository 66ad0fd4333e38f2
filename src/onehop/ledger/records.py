"""The words of the ledger: one record per payload, hop, medium and outcome.

Must never know how a transfer is made, nor who reads the record. Workers import this module when they start, so it
imports nothing but typing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

CallId = tuple[int, int]
"""Rank of the process that made the call, and its serial number there."""

RawRecord = tuple[Any, ...]
"""The fields of a `TransferRecord` in their order; building the named form costs more than all of `Book.note`."""

TotalKey = tuple[str, int, int, str, str]
"""What exact totals are kept by: message, source, target, medium, outcome."""

MOVED = "moved"
ATTACHED = "attached"
AVOIDED = "avoided"
OUTCOMES = (MOVED, ATTACHED, AVOIDED)


class TransferRecord(NamedTuple):
    """One payload over one hop.

    The order of the fields is the order of the arguments of `Book.note`: the hot path stores plain tuples, and they
    become records only when somebody looks.
    """

    message: str
    """``call``, ``result``, ``control`` or ``blob``."""
    cause: CallId | None
    """The call that needed it."""
    parent: CallId | None
    """The call whose task made that call."""
    source: int
    """Rank that it left."""
    target: int
    """Rank that it reached: the next on the way, where a relay lies between."""
    medium: str
    """``memory``, ``inproc``, ``unix``, ``tcp``, ``tls`` or ``mpi``."""
    outcome: str
    """``moved``, ``attached`` (same host, nothing copied) or ``avoided`` (already there)."""
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    """Payloads of this message with this medium and outcome."""
    size_bytes: int
    """Bytes of all of them."""
    start_ns: int
    """CLOCK_MONOTONIC, which the processes of one host share."""
    end_ns: int
    """CLOCK_MONOTONIC."""
    label: str = ""
    """Name of the function, or of what the message was for."""
    note: str = ""
    """``copied: reason`` where a buffer could not travel as it was."""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


class Tally(NamedTuple):
    """An exact total."""

    records: int
    """Records folded into it."""
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    """Payloads."""
    size_bytes: int
    """Bytes."""


class Export(NamedTuple):
    """What a book tells another process: news since the last time, and exact totals since its beginning.

    It survives any wire that keeps lists, strings and integers; tuples may arrive as lists.
    """

    first: int
    """Number, in that book, of the first record given."""
    noted: int
    """Records that the book has ever noted, and that the totals contain."""
    records: Sequence[Sequence[Any]]
    """Oldest first; some may still be missing at the end where a limit was given (``following < noted``)."""
    totals: Sequence[Sequence[Any]]
    """Rows of message, source, target, medium, outcome, records, count, bytes."""

    @property
    def following(self) -> int:
        """Number of the record to ask for next."""
        return self.first + len(self.records)


def record_from(raw: Sequence[Any]) -> TransferRecord:
    """Build the named record; lists that a wire made of call ids become tuples again."""
    cause, parent = raw[1], raw[2]
    if isinstance(cause, list) or isinstance(parent, list):
        raw = [raw[0], cause and tuple(cause), parent and tuple(parent), *raw[3:]]
    return TransferRecord(*raw)
