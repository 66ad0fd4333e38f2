"""Ctrl-C in the director: never between the arrival of a message and what it means.

The main thread may be the one that reads the links (see `loop`). KeyboardInterrupt is raised between any
two instructions, also between taking a frame out of a socket and acting on it, which would lose an
answer for ever. So while a cluster lives, SIGINT goes through here: while the main thread carries out
handlers the interrupt is kept until they have ended, which takes microseconds; otherwise the handler that
was there before is called at once.

Must never know what an interrupt does.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onehop._runtime.loop import Loop


class Interrupts:
    """Stands between SIGINT and the handler that the program had."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._previous: Any = None
        self._installed = False
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            # Default action and SIG_IGN run no Python code, so there is nothing to hold back.
            if callable(previous):
                self._previous = previous
                self._installed = True
                signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        call: Callable[[], Any] = lambda: self._previous(signum, frame)  # noqa: E731
        if not self._loop.hold_back(call):
            call()

    def close(self) -> None:
        """Put the former handler back, if this is still the one that is called, and may be changed here."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGINT) == self._on_signal:
            signal.signal(signal.SIGINT, self._previous)
