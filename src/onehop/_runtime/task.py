"""A call that was made of this process, from its arrival to its answer.

Must never know how it is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onehop._protocol import messages

if TYPE_CHECKING:
    from onehop._runtime.parcels import Received
    from onehop._runtime.process import Process


class Task:
    """A call that was made of this process."""

    __slots__ = (
        "arguments",
        "call",
        "caller",
        "cancelled",
        "cell",
        "function",
        "globals",
        "interrupted",
        "process",
        "shares",
        "started",
        "thread",
        "waits",
    )

    def __init__(
        self,
        process: Process,
        caller: int,
        call: messages.Call,
        function: str | Received,
        arguments: Received | None,
    ) -> None:
        self.process = process
        self.caller = caller
        self.call = call
        self.function: str | Received | None = function
        self.arguments = arguments
        self.cancelled = False
        self.interrupted = False
        self.started = False
        self.globals: dict[str, Any] = {}
        self.cell = -1
        self.thread = 0
        self.waits = 0
        self.shares: list[Any] = []

    @property
    def id(self) -> messages.CallId:
        """Caller and serial."""
        return (self.caller, self.call.serial)

    @property
    def label(self) -> str:
        """What the task is called in messages."""
        name = self.function if isinstance(self.function, str) else "a function"
        return f"{name} (called by {self.caller}) on {self.process.rank}"
