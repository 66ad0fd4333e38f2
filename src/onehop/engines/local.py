"""The engine for this machine: subprocesses of this interpreter.

The workers ask the kernel to be killed when the *thread* that started them ends, so that also a director
killed by SIGKILL, and a worker stuck in native code, leave nothing behind. All are therefore started by
one thread that lives as long as the engine.

Standard output and error of a worker are pipes to here: what it wrote is read even when it was killed.
Must never know of calls or links.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from onehop._contracts.engine import Engine, Events, Poller

LAST_LINES = 20
LONGEST_LINE_BYTES = 1 << 20
_START = "import sys;sys.path.insert(0,sys.argv[1]);from onehop._runtime.entry import main;main()"


class _Pipe:
    """One output stream of one worker, cut into lines."""

    __slots__ = ("fd", "lines", "name", "rest")

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.rest = b""

    def read(self) -> tuple[list[str], bool]:
        """Whole lines that are there, and whether the stream has ended."""
        ended = False
        data = self.rest
        for _ in range(16):
            try:
                chunk = os.read(self.fd, 65536)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                ended = True
                break
            data += chunk
        *lines, self.rest = data.split(b"\n")
        if self.rest and (ended or len(self.rest) > LONGEST_LINE_BYTES):
            lines.append(self.rest)
            self.rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines], ended


class _Child:
    __slots__ = ("last_lines", "over", "pidfd", "pipes", "popen")

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.pidfd = -1
        self.pipes: list[_Pipe] = []
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.over = False


class LocalEngine(Engine):
    """Starts workers as subprocesses.

    Parameters
    ----------
    poller : Poller
        Reads their output and sees them end.
    events : Events
        Hears of it.
    environment : dict of str to str
        Added to this process's environment for each worker.
    """

    def __init__(self, poller: Poller, events: Events, environment: dict[str, str]) -> None:
        self.host = socket.gethostname()
        self._poller = poller
        self._events = events
        self._environment = environment
        self._children: dict[int, _Child] = {}
        self._killed: set[int] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._requests: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="onehop-launcher", daemon=True)
        self._thread.start()

    def launch(self, rank: int, bootstrap: bytes) -> None:
        """Start a worker; its failure to start is reported as its exit."""
        self._requests.put((rank, bootstrap))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            rank, bootstrap = request
            if self._closing:
                continue
            try:
                self._start(rank, bootstrap)
            except OSError as error:
                self._events.exited(rank, f"it could not be started: {error}", [])

    def _start(self, rank: int, bootstrap: bytes) -> None:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        arguments = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        popen = subprocess.Popen(
            [sys.executable, *arguments, "-P", "-c", _START, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self._environment},
            # Its own group: the terminal's Ctrl-C is the director's to pass on.
            process_group=0,
        )
        assert popen.stdin is not None
        child = _Child(popen)
        try:
            popen.stdin.write(bootstrap)
            popen.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already, which is reported below
        for stream, name in ((popen.stdout, "stdout"), (popen.stderr, "stderr")):
            assert stream is not None
            fd = os.dup(stream.fileno())
            stream.close()
            os.set_blocking(fd, False)
            child.pipes.append(_Pipe(fd, name))
        with self._lock:
            self._children[rank] = child
            killed = rank in self._killed or self._closing
        if killed:
            popen.kill()
        for pipe in child.pipes:
            self._poller.watch(pipe.fd, self._reader(rank, child, pipe), priority=0)
        if hasattr(os, "pidfd_open"):
            child.pidfd = os.pidfd_open(popen.pid)
            self._poller.watch(child.pidfd, lambda _events: self._ended(rank, child), priority=2)

    def _reader(self, rank: int, child: _Child, pipe: _Pipe) -> Callable[[int], None]:
        def on_readable(_events: int) -> None:
            if self._read(rank, child, pipe):
                self._poller.forget(pipe.fd)
                if child.pidfd < 0:
                    self._ended(rank, child)

        return on_readable

    def _read(self, rank: int, child: _Child, pipe: _Pipe) -> bool:
        lines, ended = pipe.read()
        for line in lines:
            child.last_lines.append(line)
            self._events.printed(rank, pipe.name, line)
        return ended

    def _ended(self, rank: int, child: _Child) -> None:
        with self._lock:
            if child.over:
                return
            child.over = True
        code = child.popen.wait()
        for pipe in child.pipes:
            # What it wrote before it died is in the pipe; a child of its own may hold the pipe open.
            self._read(rank, child, pipe)
            if pipe.rest:
                child.last_lines.append(pipe.rest.decode("utf-8", "replace"))
                self._events.printed(rank, pipe.name, child.last_lines[-1])
            self._poller.forget(pipe.fd)
            os.close(pipe.fd)
        if child.pidfd >= 0:
            self._poller.forget(child.pidfd)
            os.close(child.pidfd)
        with self._lock:
            self._children.pop(rank, None)
        self._events.exited(rank, _how(code), list(child.last_lines))

    def kill(self, rank: int) -> None:
        """Send SIGKILL; also to one that is about to be started."""
        with self._lock:
            self._killed.add(rank)
            child = self._children.get(rank)
            if child is not None and not child.over:
                child.popen.kill()

    def pid(self, rank: int) -> int:
        """Process id, 0 if it is not running."""
        child = self._children.get(rank)
        return 0 if child is None else child.popen.pid

    def close(self, grace_s: float) -> None:
        """Wait for the workers, kill the rest, and end the launching thread last: they die with it."""
        self._closing = True
        deadline = time.monotonic() + grace_s
        with self._lock:
            children = dict(self._children)
        for child in children.values():
            try:
                child.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.popen.kill()
        for rank, child in children.items():
            child.popen.wait()
            self._ended(rank, child)
        self._requests.put(None)
        self._thread.join()
        # One that was being started while the list above was taken.
        for rank, child in dict(self._children).items():
            child.popen.kill()
            self._ended(rank, child)

    def abandon(self) -> None:
        """In a forked child: the workers are the parent's."""
        for child in self._children.values():
            child.popen.returncode = 0  # or its finalizer would wait for somebody else's child
            for pipe in child.pipes:
                os.close(pipe.fd)
            if child.pidfd >= 0:
                os.close(child.pidfd)
        self._children.clear()


def _how(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"it was killed by signal {-code} ({name})"
    return f"it exited with status {code}"
