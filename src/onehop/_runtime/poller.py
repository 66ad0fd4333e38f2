"""Which descriptors are ready: epoll where there is one, else poll.

Must never know what the descriptors are.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

IN, OUT = 0x001, 0x004
"""Readable (or ended), writable: the bits of poll and epoll alike."""


class Poller(Protocol):
    """What the loop needs; all but `poll` may be called while another thread polls."""

    def register(self, fd: int, mask: int) -> None:
        """Watch a descriptor."""

    def modify(self, fd: int, mask: int) -> None:
        """Change what it is watched for; OSError or KeyError if it is not watched."""

    def unregister(self, fd: int) -> None:
        """Stop watching it; OSError or KeyError if it is not watched."""

    def poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait until one of them is ready, or the time is over."""

    def close(self) -> None:
        """Let go of everything."""


class PortablePoller:
    """The same with poll, for systems without epoll (macOS).

    Changes made while a thread polls are seen after it was woken.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._masks: dict[int, int] = {}
        self._lock = threading.Lock()

    def register(self, fd: int, mask: int) -> None:
        """Watch a descriptor."""
        with self._lock:
            self._masks[fd] = mask
        self._wake()

    def modify(self, fd: int, mask: int) -> None:
        """Change what it is watched for."""
        with self._lock:
            if fd not in self._masks:
                raise KeyError(fd)
            self._masks[fd] = mask
        self._wake()

    def unregister(self, fd: int) -> None:
        """Stop watching it."""
        with self._lock:
            del self._masks[fd]
        self._wake()

    def poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait until one of them is ready, or the time is over."""
        poll = select.poll()
        with self._lock:
            watched = dict(self._masks)
        for fd, mask in watched.items():
            poll.register(fd, mask)
        ready = poll.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        # One that was closed meanwhile is nobody's any more.
        return [(fd, mask) for fd, mask in ready if not mask & select.POLLNVAL]

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._masks.clear()


def new_poller(wake: Callable[[], None]) -> Poller:
    """Make the best poller that this system has."""
    if hasattr(select, "epoll") and "epoll" not in os.environ.get("ONEHOP_DISABLE", "").split(","):
        return select.epoll()
    return PortablePoller(wake)


def wake_pipe() -> tuple[int, int]:
    """A pipe neither end of which blocks, or is inherited by programs that are started."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
