"""What tests from outside share: scripts in fresh interpreters, waiting with a bound, and the few looks inside.

The looks inside (books, tables, bytes in use) are functions here and nowhere else, so that a change of
the inside is followed in one place. Nothing here is imported by the product.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PATIENCE = float(os.environ.get("ONEHOP_TEST_PATIENCE", "4"))
"""Times in the cases are for an idle machine; tests run on busy ones, and wait this many times as long."""

FULL_SIZE = os.environ.get("ONEHOP_TEST_FULL", "") not in ("", "0")
"""Sizes as in the cases, for a machine with 32 GB and some minutes."""

MARK = "ONEHOP_TEST_MARK"


def eventually(
    predicate: Callable[[], object], within_s: float = 5.0, message: str = "it never became true"
) -> None:
    """Wait until `predicate` holds; fail with what it last gave."""
    end = time.monotonic() + within_s
    pause_s = 0.001
    while not (last := predicate()):
        if time.monotonic() > end:
            raise AssertionError(f"{message} (within {within_s} s; last answer {last!r})")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def is_alive(pid: int) -> bool:
    """Whether `pid` still runs; a zombie that its new parent has not yet reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def marked_processes(mark: str) -> list[int]:
    """Living processes whose environment carries the mark of one script, itself included."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
        except OSError:
            continue
        if needle in environment.split(b"\0") and is_alive(int(entry)):
            found.append(int(entry))
    return found


@dataclass
class Finished:
    """How a script ended."""

    code: int
    out: str
    err: str
    seconds: float
    mark: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def value(self, name: str) -> str:
        """The rest of the line that a script began with `name=`."""
        for line in self.lines:
            if line.startswith(name + "="):
                return line[len(name) + 1 :]
        raise AssertionError(
            f"the script printed no {name}=…\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )


class Script:
    """A Python script in a fresh interpreter and a process group of its own."""

    def __init__(
        self,
        text: str,
        folder: Path,
        *,
        wrapper: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        by_stdin: bool = False,
        stdio: dict[str, Any] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.path = folder / f"script_{self.mark[:8]}.py"
        self.path.write_text(textwrap.dedent(text))
        full = {**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1", **(environment or {})}
        # coverage and friends of the test run are not the script's business
        full.pop("PYTEST_CURRENT_TEST", None)
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE if by_stdin else subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        pipes.update(stdio or {})
        self._input = self.path.read_text() if by_stdin else None
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, *(["-"] if by_stdin else [str(self.path)])],
            text=True,
            env=full,
            cwd=folder,
            start_new_session=True,
            **pipes,
        )

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean()

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).rstrip("\n")

    def finish(self, timeout_s: float = 60) -> Finished:
        """Wait for the end; a script that does not end is killed and fails the test."""
        try:
            out, err = self.process.communicate(self._input, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_group()
            try:
                out, err = self.process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                # a worker outside the group still holds the pipes
                self.clean()
                out, err = "", "(its output could not be read)"
            raise AssertionError(
                f"the script did not end within {timeout_s} s\n--- stdout\n{out}\n--- stderr\n{err}"
            ) from None
        return Finished(
            self.process.returncode, out, err, time.monotonic() - self.started, self.mark
        )

    def kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def clean(self) -> None:
        """Kill whatever carries this script's mark, so that a failed test leaves nothing."""
        self.kill_group()
        for pid in marked_processes(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def run_script(
    text: str, folder: Path, *, timeout_s: float = 60, check: bool = True, **options: Any
) -> Finished:
    """Run a script to its end, and see that it left no process behind."""
    with Script(text, folder, **options) as script:
        finished = script.finish(timeout_s)
        if check and finished.code != 0:
            raise AssertionError(
                f"the script ended with {finished.code}\n--- stdout\n{finished.out}\n--- stderr\n{finished.err}"
            )
        eventually(
            lambda: not marked_processes(script.mark),
            within_s=1.0 * PATIENCE,
            message=f"the script left processes behind: {marked_processes(script.mark)}",
        )
        return finished


def proportional_bytes(pids: Iterable[int]) -> dict[str, int]:
    """Sum over processes of their proportional shares: Pss, Pss_Anon, Pss_Shmem, Pss_File in bytes."""
    total = {"Pss": 0, "Pss_Anon": 0, "Pss_Shmem": 0, "Pss_File": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) * 1024
    return total


# ---------------------------------------------------------------- the looks inside


def pids_of(cluster: Any) -> list[int]:
    """Process ids of the director and of all workers."""
    return [os.getpid(), *(worker.pid for worker in cluster.workers)]


def ask_neighbour(rank: int) -> int:
    """In a task: open the link to another worker."""
    import onehop

    return int(onehop.current()[rank].call(onehop.rank))


def arena_bytes(process: Any = None) -> int:
    """Bytes that are in use in the arena of the process this runs in (the director's, or a task's)."""
    import onehop

    process = onehop.current()._process if process is None else process
    return int(process.arena.in_use_bytes)


def arena_bytes_everywhere(cluster: Any) -> int:
    here = arena_bytes(cluster._process)
    return here + sum(int(there) for there in cluster.everywhere(arena_bytes))


def imbalance_here(process: Any = None) -> list[str]:
    """Compare the books of this process with its links' own counters; one line for every difference.

    The sum of the `moved` bytes of all records from here over a socket medium to a neighbour is what the
    link to that neighbour counted as sent. Both are read without a message between the readings.
    """
    import onehop

    process = onehop.current()._process if process is None else process
    counted: dict[int, int] = {}
    for link in list(process.peers.all_links):
        if link.medium != "inproc":
            counted[link.peer] = counted.get(link.peer, 0) + link.sent_bytes
    booked: dict[int, int] = {}
    for (_, source, target, medium, outcome), tally in process.book.figures()[1].items():
        if (source, medium, outcome) == (process.rank, "unix", "moved"):
            booked[target] = booked.get(target, 0) + tally.size_bytes
    return [
        f"rank {process.rank} → {peer}: the books say {booked.get(peer, 0)}, the link counted {size}"
        for peer, size in counted.items()
        if booked.get(peer, 0) != size
    ]


def assert_books_balance(cluster: Any) -> None:
    """In every process: what the ledger's books say moved over a link is what the link counted."""

    if cluster._process.refusing:
        return  # shut down by the test: it answers no questions any more

    def look() -> list[str]:
        found = imbalance_here(cluster._process)
        # urgent: a worker may still be busy with what the test left there
        for differences in cluster.options(urgent=True).everywhere(imbalance_here):
            found += differences
        return found

    # A frame may be between its booking and its counting in another thread: it balances once all is quiet.
    last: list[str] = []

    def balanced() -> bool:
        nonlocal last
        last = look()
        return not last

    try:
        eventually(balanced, within_s=1.0 * PATIENCE)
    except AssertionError:
        raise AssertionError("the books do not balance:\n" + "\n".join(last)) from None
