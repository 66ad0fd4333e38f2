"""The link of a process to itself.

Must never know what a frame means. No bytes move: a frame is handed over as it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from onehop._contracts.link import Frame, Link
from onehop._links.base import BaseLink
from onehop._links.outbox import duplicate


class InprocLink(BaseLink):
    """Gives back what it was sent.

    It has no descriptor: `on_ready` is called, from the thread that sent, whenever `receive` has
    something to return after it had nothing.

    Parameters
    ----------
    rank : int
        This process.
    on_ready : callable, optional
        Called with the link.
    """

    medium = "inproc"

    def __init__(self, rank: int, on_ready: Callable[[Link], None] | None = None) -> None:
        super().__init__(rank)
        self.on_ready = on_ready
        self._lock = threading.Lock()
        self._frames: deque[tuple[Frame, list[int]]] = deque()
        self._announced = False
        self._sent_bytes = 0
        self._received_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Control and payload bytes of all frames that `send` has taken."""
        return self._sent_bytes

    @property
    def received_bytes(self) -> int:
        """Control and payload bytes of all frames that `receive` has handed out."""
        return self._received_bytes

    @property
    def overhead_bytes_sent(self) -> int:
        """Nothing: a frame has no header here."""
        return 0

    @property
    def overhead_bytes_received(self) -> int:
        """Nothing: a frame has no header here."""
        return 0

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for `receive`."""
        return self._sent_bytes - self._received_bytes

    @property
    def want_write(self) -> bool:
        """Never: what is sent has arrived."""
        return False

    def fileno(self) -> int:
        """Return -1: there is nothing to poll."""
        return -1

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Take one frame, from any thread; see `Link.send`."""
        with self._lock:
            if self._closed:
                raise self._ended("this process closed it")
            own = duplicate(fds)
            self._frames.append((Frame(source, destination, control, payload), own))
            self._sent_bytes += len(control) + len(payload)
            announce = not self._announced
            self._announced = True
        if announce and self.on_ready is not None:
            self.on_ready(self)

    def flush(self) -> bool:
        """Return true: nothing ever waits to be written."""
        return True

    def receive(self) -> list[Frame]:
        """Return the frames that were sent."""
        with self._lock:
            if self._closed:
                raise self._ended("this process closed it")
            self._announced = False
            waiting = self._frames
            frames: list[Frame] = []
            while waiting:
                frame, fds = waiting.popleft()
                frames.append(frame)
                self._arrived_fds.extend(fds)
                self._received_bytes += len(frame.control) + len(frame.payload)
        return frames

    def close(self) -> None:
        """End the link; frames that nobody received are dropped with it."""
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """In a forked child: as `close`, but take no lock, whose holder is not here."""
        self._drop()

    def _drop(self) -> None:
        self._closed = True
        while self._frames:
            self._arrived_fds.extend(self._frames.popleft()[1])
        self._close_arrived_fds()
