"""Which worker gets the next call that may run anywhere.

Pure. Work waits here, not at the workers, so that it goes to whoever is free first; but a worker that
sits idle while its next call is on the way wastes the round trip. Credit is therefore small for long
tasks and larger for tiny ones, by what the workers report of their run times. A task that waits for
another call gives its credit back (`parked`): otherwise nested maps would fill the windows with calls
that wait for calls that cannot be sent.

Must never know of messages, clocks or what a call is: tokens and ranks only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

TINY_NS = 1_000_000
SHORT_NS = 20_000_000
TINY_WINDOW = 16
SHORT_WINDOW = 2
MOST_PARKED = 64
"""Tasks of one submitter that may be parked on a worker before it gets no more."""


_Entry = list[Any]
"""[urgency, order, token or None if dropped, preferred ranks, alone]; the order is unique, so no token is compared."""


class _Seat:
    __slots__ = ("flying", "mean_ns", "parked", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.flying = 0
        self.parked = 0
        self.mean_ns = float("inf")  # unknown counts as long: nothing is queued behind it

    @property
    def window(self) -> int:
        if self.mean_ns < TINY_NS:
            return TINY_WINDOW + self.slots
        if self.mean_ns < SHORT_NS:
            return SHORT_WINDOW + self.slots - 1
        return self.slots


class Scheduler(Generic[T]):
    """A queue of tokens and the credit of each worker."""

    def __init__(self) -> None:
        self._seats: dict[int, _Seat] = {}
        self._queue: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by the token's id; what was dropped is not in it
        self._order = itertools.count()

    def join(self, rank: int, slots: int = 1) -> None:
        """`rank` takes calls from now on."""
        self._seats.setdefault(rank, _Seat(slots))

    def leave(self, rank: int) -> None:
        """`rank` takes no more calls; those in flight there are the caller's business."""
        self._seats.pop(rank, None)

    @property
    def ranks(self) -> list[int]:
        """Who takes calls."""
        return list(self._seats)

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        token: T,
        preferred: Iterable[int] = (),
        *,
        urgent: bool = False,
        alone: bool = False,
    ) -> None:
        """Queue a token; `preferred` names the ranks that hold its data, most first.

        One that is `alone` is not sent to wait behind another: its time would run meanwhile.
        """
        entry: _Entry = [0 if urgent else 1, next(self._order), token, tuple(preferred), alone]
        self._entries[id(token)] = entry
        heapq.heappush(self._queue, entry)

    def drop(self, token: T) -> bool:
        """Take a token out again; False if it was not in the queue."""
        entry = self._entries.pop(id(token), None)
        if entry is None:
            return False
        entry[2] = None  # its place is passed over when its turn comes
        return True

    def next(self) -> tuple[T, int] | None:
        """The next token and who gets it, or None while nobody has room."""
        while self._queue and self._queue[0][2] is None:
            heapq.heappop(self._queue)
        if not self._queue:
            return None
        best = self._pick(self._queue[0][3], self._queue[0][4])
        if best is None:
            return None
        token = heapq.heappop(self._queue)[2]
        del self._entries[id(token)]
        self._seats[best].flying += 1
        return token, best

    def _pick(self, preferred: tuple[int, ...], alone: bool) -> int | None:
        best: int | None = None
        best_key: tuple[int, int] | None = None
        for rank, seat in self._seats.items():
            active = seat.flying - seat.parked
            if active >= (seat.slots if alone else seat.window) or seat.parked >= MOST_PARKED:
                continue
            # Idle workers first, then the one with the data, then the least busy.
            holds = preferred.index(rank) if rank in preferred else len(preferred)
            waits = max(0, active - seat.slots + 1)
            key = (waits, holds) if preferred else (active, 0)
            if best_key is None or key < best_key:
                best, best_key = rank, key
        return best

    def finished(self, rank: int, run_ns: int, parked: bool = False) -> None:
        """A call that was sent to `rank` has ended there."""
        seat = self._seats.get(rank)
        if seat is not None:
            seat.flying -= 1
            if parked:
                seat.parked -= 1
            if run_ns:
                known = seat.mean_ns != float("inf")
                seat.mean_ns = 0.7 * seat.mean_ns + 0.3 * run_ns if known else float(run_ns)

    def parked(self, rank: int) -> None:
        """A task there waits for another call and does not use its slot."""
        seat = self._seats.get(rank)
        if seat is not None:
            seat.parked += 1

    def load(self, rank: int) -> int:
        """Calls in flight there."""
        seat = self._seats.get(rank)
        return seat.flying if seat is not None else 0

    def clear(self) -> list[T]:
        """Empty the queue; returns what was in it, in order."""
        tokens = [entry[2] for entry in sorted(self._queue) if entry[2] is not None]
        self._queue.clear()
        self._entries.clear()
        return tokens
