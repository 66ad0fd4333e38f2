"""What links have in common: counters, the descriptors that arrived, and the errors at the end.

Must never know how bytes travel; that is each link's own file.
"""

from __future__ import annotations

from collections.abc import Callable

from onehop._contracts.link import Frame, Link
from onehop._links.outbox import close_all
from onehop.errors import LinkClosed, ProtocolError

__all__ = ["BaseLink", "Frame", "Link"]


class BaseLink(Link):
    """Counters and descriptors of a link.

    Parameters
    ----------
    peer : int
        Rank at the other end.
    """

    medium = "none"

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.on_blocked: Callable[[Link], None] | None = None
        self.on_ready: Callable[[Link], None] | None = None
        self._closed = False
        self._arrived_fds: list[int] = []

    @property
    def closed(self) -> bool:
        """Whether `close` or `abandon` was called."""
        return self._closed

    def take_fds(self, count: int | None = None) -> list[int]:
        """Hand over the next `count` (by default all) descriptors that arrived, in order.

        Raises
        ------
        ProtocolError
            Fewer have arrived; they stay.
        """
        arrived = self._arrived_fds
        if count is None:
            count = len(arrived)
        elif count > len(arrived):
            raise ProtocolError(
                f"Rank {self.peer} announced {count} descriptors over {self.medium} and "
                f"{len(arrived)} came."
            )
        taken = arrived[:count]
        del arrived[:count]
        return taken

    def _close_arrived_fds(self) -> None:
        close_all(self._arrived_fds)

    def _ended(self, reason: str) -> LinkClosed:
        return LinkClosed(f"The {self.medium} link to rank {self.peer} has ended: {reason}.")
