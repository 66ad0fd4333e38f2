"""What a link between two processes promises, and the unit that travels on it.

Must never know what a message means, nor which kinds of link exist: a new kind is a class that keeps
these promises (`onehop.testing.link_contract` tests them).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """The unit on a link: an encoded message, with the ranks at both ends of its route."""

    source: int
    """Rank of the process that made the frame; a relay leaves it as it is."""
    destination: int
    """Rank of the process that it is for."""
    control: bytes
    """The encoded message."""
    payload: bytes
    """Bytes that belong to the message and are not part of its encoding."""


class Link(ABC):
    """A connection to one other process, or to oneself, that carries frames in order.

    Everything that one process sends arrives whole, once and in order, or the link ends. Nothing here
    blocks, and nothing is thrown away silently.

    `send` may be called from any thread, and may be interrupted anywhere by an exception that a signal
    handler raises: the frame then goes as a whole or not at all. `receive` and `take_fds` belong to one
    thread at a time, and whoever calls them in a main thread has to hold such exceptions back, since a
    frame that is on its way from here to its handler is in nobody's books.

    Attributes
    ----------
    peer : int
        Rank of the process at the other end.
    medium : str
        What carries the bytes, in the ledger's words: "unix", "inproc", "tcp", "tls".
    on_blocked : callable or None
        Called with the link, from the thread that sent, when `want_write` has become true.
    on_ready : callable or None
        Called with the link when it has frames for `receive`; only by links without a descriptor.
    """

    peer: int
    medium: str
    on_blocked: "Callable[[Link], None] | None"
    on_ready: "Callable[[Link], None] | None"

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Control and payload bytes of all frames that `send` has taken."""

    @property
    @abstractmethod
    def received_bytes(self) -> int:
        """Control and payload bytes of all frames that `receive` has handed out."""

    @property
    @abstractmethod
    def overhead_bytes_sent(self) -> int:
        """Frame headers and the handshake: what the kernel counts beyond `sent_bytes`."""

    @property
    @abstractmethod
    def overhead_bytes_received(self) -> int:
        """Frame headers and the handshake: what the kernel counts beyond `received_bytes`."""

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes that were taken by `send` and not yet by the kernel; bulk senders bound this."""

    @property
    @abstractmethod
    def want_write(self) -> bool:
        """Whether `flush` has work to do once the descriptor is writable."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` or `abandon` was called."""

    @abstractmethod
    def fileno(self) -> int:
        """Descriptor to poll for reading, *level triggered*; -1 if the link has none."""

    @abstractmethod
    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Take one frame, from any thread, without ever blocking.

        Parameters
        ----------
        source, destination : int
            Ranks at both ends of the route.
        control, payload : bytes
            Not copied if they must wait, so they have to be immutable.
        fds : sequence of int
            Descriptors to pass; duplicated, so that the caller keeps its own.

        Raises
        ------
        LinkClosed
            The other end is gone, or the link was closed; the frame was not taken. What the peer had
            sent before may still be there: go on with `receive` until that raises too.
        ProtocolError
            The frame is too large, or has too many descriptors; the link is as it was.
        OSError
            A descriptor is not open, or there is no room for its duplicate; the link is as it was.
        """

    @abstractmethod
    def flush(self) -> bool:
        """Write what waits, as far as the kernel takes it; true when nothing waits any more.

        Never raises for a peer that is gone: `receive` says so, after everything that had arrived.
        """

    @abstractmethod
    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; empty if none has become complete.

        Raises
        ------
        LinkClosed
            The other end is gone and everything that it had sent in whole was returned before.
        ProtocolError
            The peer sent what the format does not allow; all frames before it were returned before.
        """

    @abstractmethod
    def take_fds(self, count: int | None = None) -> list[int]:
        """Hand over the next `count` (by default all) descriptors that arrived, in order.

        A frame's descriptors have always arrived by the time `receive` returns it. The caller owns
        what it took; what nobody took is closed with the link.
        """

    @abstractmethod
    def close(self) -> None:
        """End the link; idempotent, from any thread. The peer gets what the kernel had taken."""

    @abstractmethod
    def abandon(self) -> None:
        """In a forked child: let go of descriptors, take no lock, and leave the connection alone."""
