"""Every exception of onehop, in one tree.

Each one says what happened, to what, on which rank and host, and what to do; each one survives pickling. Must never import anything of onehop.
"""

from __future__ import annotations

from typing import Any


class OnehopError(Exception):
    """Root of everything that onehop raises itself."""


class ProtocolError(OnehopError):
    """A peer sent what the wire format does not allow; the link is closed."""


class HandshakeError(OnehopError):
    """A peer could not prove that it belongs to the cluster; nothing it sent was unpickled."""


class LinkClosed(OnehopError):
    """The link to a process has ended."""


class TopologyError(OnehopError):
    """A graph of links is invalid, or leaves somebody unreachable."""


class MemoryLimitError(OnehopError, MemoryError):
    """A value does not fit; raised before anything of it was written, and names the limit."""


class SerializationError(OnehopError):
    """A value cannot be encoded or decoded; the cause is attached."""


class ClusterClosed(OnehopError, RuntimeError):
    """The cluster was closed, so it takes no calls."""


class ForkedError(OnehopError, RuntimeError):
    """A forked child used its parent's cluster."""


class NestingLimitError(OnehopError, RecursionError):
    """Too many tasks of one process wait for others; the message names the chain of calls."""


class SharedObjectModified(OnehopError):
    """A task wrote to the buffers of an object that `Cluster.share` gave to all tasks."""


class CallLost(OnehopError):
    """The link or the process went before the call was answered.

    Attributes
    ----------
    may_have_started : bool
        False only if the function has certainly not begun to run.
    """

    def __init__(self, message: str, may_have_started: bool = True) -> None:
        super().__init__(message)
        self.may_have_started = may_have_started

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.may_have_started)


class WorkerDied(CallLost):
    """The process that a call ran on, or was sent to, has died."""


class CallTimeout(OnehopError, TimeoutError):
    """A call was not answered in the time that its options allow; its task was interrupted."""


class RemoteError(OnehopError):
    """A function ran on another process and raised.

    Where the original exception can be rebuilt, what `result()` raises is also an instance of its type.

    Attributes
    ----------
    rank : int
        The process that raised.
    host : str
        Its host.
    type_name : str
        Qualified name of the original type.
    remote_traceback : str
        The traceback as text, as it was there.
    """

    def __init__(
        self,
        message: str,
        rank: int = 0,
        host: str = "",
        type_name: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (str(self), self.rank, self.host, self.type_name, self.remote_traceback),
        )
