"""One watched buffer: what may have been written to it since its owner last looked.

Holds what the tracker's scans handed out to this buffer. Must never know how a scan is made, nor hold a reference to the object that
owns the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onehop._memory.intervals import joined
from onehop._memory.pagetable import PAGE_SIZE

if TYPE_CHECKING:
    from onehop._memory.tracker import Tracker

PAGE_MASK = -PAGE_SIZE
_PENDING_MAX = 1 << 16


class Watch:
    """One buffer that the tracker looks after; made by `Tracker.watch`.

    Attributes
    ----------
    address, length : int
        The buffer.
    start, stop : int
        Its whole pages, as addresses.
    believed : bool
        False once the range can no longer be believed (something else is mapped there, it was excluded, after a fork):
        `dirty` then always answers "all of it". Close such a watch and compare bytes.
    """

    __slots__ = (
        "_pending",
        "_shown",
        "_tracker",
        "address",
        "believed",
        "length",
        "start",
        "stop",
    )

    def __init__(self, tracker: Tracker, address: int, length: int) -> None:
        self._tracker = tracker
        self.address = address
        self.length = length
        self.believed = True
        self.start = address & PAGE_MASK
        self.stop = -(-(address + length) & PAGE_MASK)
        # Ranges of addresses, not clipped. The first `_shown` of them, sorted and joined, are what `dirty` last returned.
        self._pending: list[tuple[int, int]] = []
        self._shown = 0

    def dirty(self) -> list[tuple[int, int]]:
        """Scan, and return what may have been written since it was last accepted.

        Returns
        -------
        list of (start, stop)
            Byte offsets in the buffer, sorted, apart from each other; empty if every byte is as it was.
        """
        tracker = self._tracker
        with tracker.lock:
            if tracker._busy:
                return self._everything()
            tracker._busy = True
            try:
                if self.believed and not tracker._arm(self.start, self.stop):
                    self._disbelieve()
            finally:
                tracker._busy = False
            return self._show() if self._pending else []

    def accept(self) -> None:
        """Forget what the last `dirty` returned: the caller has compared or copied it.

        What was handed in since then stays, so another scan in between does no harm.
        """
        with self._tracker.lock:
            if self.believed:
                shown, self._shown = self._shown, 0
                del self._pending[:shown]

    def close(self, disarm: bool = False) -> None:
        """End the watch; may be called twice.

        Parameters
        ----------
        disarm : bool
            Also lift the protection, for a buffer that is about to be rewritten (saves a fault for every page). Other
            watches of the same pages will then see these as written.
        """
        with self._tracker.lock:
            self._tracker._close(self, disarm)

    def _show(self) -> list[tuple[int, int]]:
        pending = self._pending
        if len(pending) > 1:
            self._shown = 0
            pending = self._pending = joined(pending)
        self._shown = len(pending)
        address, length = self.address, self.length
        return [
            (max(start - address, 0), min(stop - address, length))
            for start, stop in pending
            if stop > address and start < address + length
        ]

    def _everything(self) -> list[tuple[int, int]]:
        self._shown = 0
        return [(0, self.length)]

    def _receive(self, ranges: list[tuple[int, int]]) -> None:
        pending = self._pending
        pending.extend(ranges)
        if len(pending) > _PENDING_MAX:
            # Nobody asked for long: exact ranges are not worth their memory. What `dirty` showed cannot be told apart any
            # more, so the next `accept` forgets nothing.
            pending = joined(pending)
            if len(pending) > _PENDING_MAX // 2:
                pending = [(pending[0][0], pending[-1][1])]
            self._pending, self._shown = pending, 0

    def _disbelieve(self) -> None:
        self.believed = False
        self._pending = [(self.start, self.stop)]
