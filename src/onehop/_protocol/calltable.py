"""The calls that this process has made and not yet seen the end of.

Pure: it says what an event means for a call, and never sends, waits or completes anything itself.
A call's life is the table `NEXT`; a pair that is not in it raises.

`add`, `answered` and `advance` touch one dictionary entry each, which is atomic, so that the sending
threads and the reading thread need no lock between them. `pop` decides races: whoever takes the entry
out (an answer, a loss, a timeout, a cancellation) ends the call, and everybody else finds nothing.

Must never know of links, threads, clocks or user objects.
"""

from __future__ import annotations

import itertools
from typing import Final, Generic, Protocol, TypeVar

from onehop import errors

WAITING: Final = "waiting"
"""For the value of a future among its arguments."""
QUEUED: Final = "queued"
"""For a worker with room."""
SENT: Final = "sent"
PARKED: Final = "parked"
"""Sent; its task waits for another call and has given up its slot."""
ENDED: Final = "ended"

NEXT: Final[dict[tuple[str, str], str]] = {
    (WAITING, "known"): QUEUED,
    (WAITING, "send"): SENT,
    (WAITING, "end"): ENDED,
    (QUEUED, "send"): SENT,
    (QUEUED, "end"): ENDED,
    (SENT, "park"): PARKED,
    (SENT, "end"): ENDED,
    (SENT, "requeue"): QUEUED,  # its worker went before it can have started, or it is retried
    (PARKED, "park"): PARKED,
    (PARKED, "end"): ENDED,
    (PARKED, "requeue"): QUEUED,
}


class Entry(Protocol):
    """What the table needs to know of a call."""

    serial: int
    target: int
    """Rank it was sent to; 0 until then."""
    state: str


E = TypeVar("E", bound=Entry)


class CallTable(Generic[E]):
    """Outstanding calls by serial number."""

    def __init__(self) -> None:
        self._entries: dict[int, E] = {}
        self.next_serial = itertools.count(1).__next__

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: E) -> None:
        """Enter a call that has been made."""
        self._entries[entry.serial] = entry

    def get(self, serial: int) -> E | None:
        """The call with that number, if it has not ended."""
        return self._entries.get(serial)

    def pop(self, serial: int) -> E | None:
        """Take a call out to end it; None if somebody else has."""
        entry = self._entries.pop(serial, None)
        if entry is not None:
            advance(entry, "end")
        return entry

    def sent_to(self, rank: int) -> list[E]:
        """Calls that were sent to `rank` and not answered."""
        return [e for e in list(self._entries.values()) if e.target == rank]

    def all(self) -> list[E]:
        """Every outstanding call."""
        return list(self._entries.values())


def advance(entry: Entry, event: str) -> None:
    """Move a call along the table."""
    state = NEXT.get((entry.state, event))
    if state is None:
        raise errors.ProtocolError(
            f"call {entry.serial}: {event!r} cannot happen when {entry.state}"
        )
    entry.state = state
