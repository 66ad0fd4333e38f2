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
            {"__notes__": list(getattr(self, "__notes__", []))},
        )


class FileFormatError(OnehopError, ValueError):
    """A file does not hold what its format demands.

    Attributes
    ----------
    path : str
        The file.
    line : int
        The line, counted from 1, at which reading had to stop.
    reason : str
        What is wrong there.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.reason)


class MissingExtraError(OnehopError, ImportError):
    """A part of onehop was used whose optional packages are not installed; says how to get them."""


class RemoteSerializationError(RemoteError, SerializationError):
    """A call's function, arguments or result could not be rebuilt or encoded on the other process."""


class RemoteSharedObjectModified(RemoteError, SharedObjectModified):
    """A task wrote to the buffers of an object that all tasks of its worker share."""


def rebuild_remote(
    original: Exception, rank: int, host: str, type_name: str, remote_traceback: str
) -> RemoteError:
    """Make an exception that is both a RemoteError and of the type of `original`.

    Where the type does not allow it (its layout conflicts, its constructor refuses), a plain RemoteError
    with `original` as its cause.
    """
    base = type(original)
    try:
        if isinstance(original, RemoteError):
            mixed: RemoteError = original
        else:
            namespace = {
                "__module__": base.__module__,
                "__qualname__": f"Remote{base.__qualname__}",
                "__str__": base.__str__,
                "__init__": _begin_empty,
                "__reduce__": _reduce_remote,
                "_original": original,
            }
            # Called, and not made by `cls.__new__`, which some types (MemoryError) refuse to subclasses.
            cls = type(f"Remote{base.__name__}", (base, RemoteError), namespace)
            mixed = cls(*original.args)
            # What a type of C keeps besides its arguments; Python's own types keep all in their dict.
            builtin = next(kind for kind in base.__mro__ if kind.__module__ == "builtins")
            builtin.__init__(mixed, *original.args)  # type: ignore[misc]
            mixed.args = original.args
            mixed.__dict__.update(original.__dict__)
            mixed.rank, mixed.host, mixed.type_name = rank, host, type_name
            str(mixed)
    except Exception:
        mixed = RemoteError(f"{type_name}: {original!r}", rank, host, type_name, remote_traceback)
        mixed.__cause__ = original
    mixed.remote_traceback = remote_traceback
    note_remote(mixed)
    return mixed


def _begin_empty(self: Any, *_args: Any) -> None:
    """Leave everything to `rebuild_remote`, which knows what the original held."""


def _reduce_remote(self: Any) -> tuple[Any, ...]:
    return (
        rebuild_remote,
        (self._original, self.rank, self.host, self.type_name, self.remote_traceback),
    )


def note_remote(error: RemoteError) -> None:
    """Show the remote traceback below the local one, wherever the exception is printed."""
    notes = [
        note
        for note in getattr(error, "__notes__", [])
        if not note.startswith("remote traceback (rank ")
    ]
    where = f"remote traceback (rank {error.rank} on {error.host}):"
    notes.append(f"{where}\n{error.remote_traceback}".rstrip())
    error.__notes__ = notes
