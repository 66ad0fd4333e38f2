"""Links that behave badly on purpose, by wrapping good ones.

A `DelayedLink` is slow, a `BrokenLink` ends at a chosen byte, a `CountingLink` tells what went through.
Each wraps any link and is one itself. Must never be imported by the product.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from onehop._contracts.link import Frame, Link
from onehop._links.outbox import close_all, duplicate
from onehop.errors import LinkClosed

__all__ = ["BrokenLink", "CountingLink", "DelayedLink", "WrappedLink"]


class WrappedLink(Link):
    """Passes everything on to another link; a base for links that change something.

    Parameters
    ----------
    inner : Link
        Owned by the wrapper from now on.
    """

    def __init__(self, inner: Link) -> None:
        self.inner = inner
        self.peer = inner.peer
        self.medium = inner.medium
        self.on_blocked: Callable[[Link], None] | None = None
        self.on_ready: Callable[[Link], None] | None = None
        inner.on_blocked = self._tell_blocked
        inner.on_ready = self._tell_ready

    def _tell_blocked(self, _inner: Link) -> None:
        if self.on_blocked is not None:
            self.on_blocked(self)

    def _tell_ready(self, _inner: Link) -> None:
        if self.on_ready is not None:
            self.on_ready(self)

    @property
    def sent_bytes(self) -> int:
        """As `Link.sent_bytes`, of the link beneath."""
        return self.inner.sent_bytes

    @property
    def received_bytes(self) -> int:
        """As `Link.received_bytes`, of the link beneath."""
        return self.inner.received_bytes

    @property
    def overhead_bytes_sent(self) -> int:
        """As `Link.overhead_bytes_sent`, of the link beneath."""
        return self.inner.overhead_bytes_sent

    @property
    def overhead_bytes_received(self) -> int:
        """As `Link.overhead_bytes_received`, of the link beneath."""
        return self.inner.overhead_bytes_received

    @property
    def queued_bytes(self) -> int:
        """As `Link.queued_bytes`, of the link beneath."""
        return self.inner.queued_bytes

    @property
    def want_write(self) -> bool:
        """As `Link.want_write`, of the link beneath."""
        return self.inner.want_write

    @property
    def closed(self) -> bool:
        """As `Link.closed`, of the link beneath."""
        return self.inner.closed

    def fileno(self) -> int:
        """As `Link.fileno`, of the link beneath."""
        return self.inner.fileno()

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Send over the link beneath."""
        self.inner.send(source, destination, control, payload, fds)

    def flush(self) -> bool:
        """Flush the link beneath."""
        return self.inner.flush()

    def receive(self) -> list[Frame]:
        """Receive from the link beneath."""
        return self.inner.receive()

    def take_fds(self, count: int | None = None) -> list[int]:
        """Take descriptors from the link beneath."""
        return self.inner.take_fds(count)

    def close(self) -> None:
        """Close the link beneath."""
        self.inner.close()

    def abandon(self) -> None:
        """Abandon the link beneath."""
        self.inner.abandon()


class DelayedLink(WrappedLink):
    """Sends everything later, in order, from a thread of its own.

    Parameters
    ----------
    inner : Link
        The link that is made slow.
    delay_s : float
        Between `send` here and `send` beneath.
    """

    def __init__(self, inner: Link, delay_s: float) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._waiting: deque[tuple[float, int, int, bytes, bytes, list[int]]] = deque()
        self._bell = threading.Condition()
        self._failure: LinkClosed | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="delayed-link", daemon=True)
        self._thread.start()

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Send over the link beneath after the delay; its errors come with the next `send`."""
        with self._bell:
            if self._failure is not None:
                raise self._failure
            if self._ending:
                raise LinkClosed(f"The delayed link to rank {self.peer} was closed.")
            own = duplicate(fds)
            due = time.monotonic() + self.delay_s
            self._waiting.append((due, source, destination, control, payload, own))
            self._bell.notify()

    @property
    def queued_bytes(self) -> int:
        """What waits for its time, and what waits beneath."""
        with self._bell:
            delayed = sum(len(item[3]) + len(item[4]) for item in self._waiting)
        return delayed + self.inner.queued_bytes

    def _run(self) -> None:
        while True:
            with self._bell:
                while not self._waiting and not self._ending:
                    self._bell.wait()
                if self._ending:
                    for item in self._waiting:
                        close_all(item[5])
                    self._waiting.clear()
                    return
                remaining_s = self._waiting[0][0] - time.monotonic()
                if remaining_s > 0:
                    self._bell.wait(remaining_s)
                    continue
                _, source, destination, control, payload, fds = self._waiting.popleft()
            try:
                self.inner.send(source, destination, control, payload, fds)
            except LinkClosed as error:
                with self._bell:
                    self._failure = error
            finally:
                close_all(fds)

    def close(self) -> None:
        """Drop what waits, end the thread and close the link beneath."""
        with self._bell:
            self._ending = True
            self._bell.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.inner.close()


class BrokenLink(WrappedLink):
    """Ends, in both directions, once so many bytes were sent.

    Parameters
    ----------
    inner : Link
        The link that breaks.
    after_bytes : int
        Control and payload bytes that still go through. The frame that would exceed them does not.
    """

    def __init__(self, inner: Link, after_bytes: int) -> None:
        super().__init__(inner)
        self._left_bytes = after_bytes
        self._lock = threading.Lock()

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Send, or break."""
        with self._lock:
            self._left_bytes -= len(control) + len(payload)
            broken = self._left_bytes < 0
        if broken:
            self.inner.close()
        self.inner.send(source, destination, control, payload, fds)


class CountingLink(WrappedLink):
    """Keeps what went through, for a test to look at.

    Attributes
    ----------
    sent, received : list of Frame
        In order; `sent` as given to `send`, from whichever thread.
    """

    def __init__(self, inner: Link) -> None:
        super().__init__(inner)
        self.sent: list[Frame] = []
        self.received: list[Frame] = []

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Send and keep."""
        self.inner.send(source, destination, control, payload, fds)
        self.sent.append(Frame(source, destination, control, payload))

    def receive(self) -> list[Frame]:
        """Receive and keep."""
        frames = self.inner.receive()
        self.received += frames
        return frames
