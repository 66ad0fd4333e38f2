"""What an engine promises: it starts processes, and reports their output and their end.

Must never know what the processes do, or how they talk once they have been started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol


class Poller(Protocol):
    """Who calls back when a descriptor is readable (the director's loop)."""

    def watch(self, fd: int, handler: Callable[[int], None], *, priority: int = 1) -> None:
        """Call `handler(events)` whenever `fd` is readable, low priorities first."""

    def forget(self, fd: int) -> None:
        """Stop; to be called before `fd` is closed."""

    def after(self, delay_s: float, action: Callable[[], None]) -> int:
        """Call `action` once, later."""


class Events(Protocol):
    """Who hears of what an engine sees; called by the poller's thread, or a thread of the engine's."""

    def printed(self, rank: int, stream: str, line: str) -> None:
        """A process wrote a line to "stdout" or "stderr"."""

    def exited(self, rank: int, how: str, last_lines: list[str]) -> None:
        """A process has ended (or could not be started): `how` names signal, status or error."""


class Engine(ABC):
    """Starts the processes of one cluster.

    Everything that was launched is gone, with its output read, when `close` returns.
    """

    host: str
    """Name of the host that it starts processes on."""

    @abstractmethod
    def launch(self, rank: int, bootstrap: bytes) -> None:
        """Start a process whose entry reads `bootstrap` from its standard input; does not block.

        `bootstrap` holds the cluster's secret: it must not be shown to anybody else.
        """

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a process at once, whatever it does; `exited` follows."""

    @abstractmethod
    def pid(self, rank: int) -> int:
        """Its process id on its host, 0 if it is not running."""

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Wait `grace_s` for processes to end, kill the rest, let go of everything."""
