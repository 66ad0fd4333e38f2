"""The life of a worker: what it is told on standard input, its tasks, its end.

Imports as little as it can: a worker needs to be there before the user's program wants it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

# msgspec looks for typing_extensions, which takes longer to import than all of onehop, and goes on without.
_hidden = "typing_extensions" not in sys.modules
if _hidden:
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
import msgspec  # noqa: E402

if _hidden:
    del sys.modules["typing_extensions"]

from onehop._protocol import messages  # noqa: E402
from onehop._runtime import context  # noqa: E402
from onehop._runtime.process import Process  # noqa: E402

PR_SET_PDEATHSIG = 1


class Bootstrap(msgspec.Struct):
    """What a worker is told before it is anybody; it holds the cluster's secret."""

    cluster_id: str
    secret: bytes
    rank: int
    director: messages.MemberInfo
    parent_pid: int
    path: list[str]
    folder: str
    slots: int
    memory_limit: int | None
    version: str


class WorkerLife:
    """Decides what a worker does when others join, leave or go."""

    def met(self, process: Process, hello: messages.Hello) -> None:
        """Nothing to decide: the director says who is a member."""

    def lost(self, process: Process, rank: int, reason: str) -> None:
        """Without the director there is no cluster; of others the director says what happened."""
        if rank == 1:
            end_now()

    def message(self, process: Process, source: int, message: messages.Message) -> None:
        """Obey the director's shutdown."""
        if type(message) is messages.Shutdown and source == 1:
            process.executor.interrupt_all()
            process.executor.close()

    def stuck(self, process: Process, rank: int, label: str) -> None:
        """Only the director ends processes."""


def end_now() -> None:
    """End without running anything of the user's: its director is gone, nobody would hear of it."""
    os._exit(70)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, also while native code keeps the GIL."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It may have died before the line above; in another pid namespace the parent has no number.
        if os.getppid() not in (parent_pid, 0):
            end_now()


def main() -> None:
    """Be a worker until the director says otherwise."""
    told = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Bootstrap)
    die_with_parent(told.parent_pid)
    sys.stdin.close()
    null = os.open(os.devnull, os.O_RDONLY)
    if null:
        os.dup2(null, 0)
        os.close(null)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    try:
        os.chdir(told.folder)
    except OSError as error:
        sys.stderr.write(f"onehop: this worker cannot enter the director's folder: {error}\n")
    sys.path[:] = told.path
    sys.argv = [""]
    import faulthandler

    faulthandler.enable()
    process = Process(
        told.rank,
        told.cluster_id,
        told.secret,
        WorkerLife(),
        slots=told.slots,
        memory_limit=told.memory_limit,
    )
    del told.secret
    context.home.process = process
    process.transfers.here = _here(process)
    sys.modules["__main__"].__getattr__ = process.executor.from_main  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, process.executor.on_sigint)
    process.peers.hello = messages.Hello(
        told.rank,
        process.pid,
        process.host,
        "",
        process.peers.listener.address,
        ".".join(map(str, sys.version_info[:3])),
        told.version,
        process.board.offset,
    )
    process.members[1] = told.director
    process.start()
    process.peers.open(1, told.director.address)
    # Everything so far lives for ever: collections need not look at it again.
    gc.freeze()
    process.executor.serve(None)
    process.close()


def _here(process: Process):  # type: ignore[no-untyped-def]  # noqa: ANN202
    def here(rank: int) -> object:
        # By name, when it is first wanted: what users hold lies above this layer, and takes time to import.
        from importlib import import_module

        return import_module("onehop.cluster").member_of(process, rank)

    return here
