"""Fixtures of all tests: nothing outlives its owner, and the books balance.

A test that leaves a process, a thread, a descriptor or a file behind fails by itself, whatever it tested.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from tests import support

# What the page tracker holds for as long as its process lives, once per process and on purpose.
_PER_PROCESS_TARGETS = ("anon_inode:[userfaultfd]", "/proc/self/pagemap", "/proc/self/maps")
_COUNTED_TARGETS = ("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith(_COUNTED_TARGETS) and not target.startswith(_PER_PROCESS_TARGETS):
            found[int(name)] = target
    return found


def _threads() -> set[str]:
    return {f"{t.name}#{t.ident}" for t in threading.enumerate() if t.name.startswith("onehop")}


def _files() -> set[str]:
    found: set[str] = set()
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        found.update(f"{folder}/{name}" for name in names if "onehop" in name.lower())
    return found


# A helper process of multiprocessing, which it starts once per process; started here it belongs to the run.
resource_tracker.ensure_running()


@dataclass
class _Snapshot:
    children: set[int]
    threads: set[str]
    descriptors: dict[int, str]
    files: set[str]

    @classmethod
    def take(cls) -> _Snapshot:
        return cls(_children(), _threads(), _descriptors(), _files())

    def what_outlived(self) -> list[str]:
        now = _Snapshot.take()
        found = [f"child process {pid}" for pid in sorted(now.children - self.children)]
        found += [f"thread {name}" for name in sorted(now.threads - self.threads)]
        found += [
            f"descriptor {fd} → {target}"
            for fd, target in sorted(now.descriptors.items())
            if self.descriptors.get(fd) != target
        ]
        found += [f"file {name}" for name in sorted(now.files - self.files)]
        return found


@pytest.fixture(autouse=True)
def nothing_outlives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no child, no thread of ours, no descriptor, no file that was not there before."""
    before = _Snapshot.take()
    yield
    # Reaping, closing and unlinking may lag a little behind the end of a test; staying behind may not.
    end = time.monotonic() + 1.0 * support.PATIENCE
    lasting = "lasting_cluster" in request.fixturenames
    while left := before.what_outlived():
        if lasting:
            # Its owner lives on, and may have started a thread of its own only now.
            left = [line for line in left if not line.startswith("thread ")]
            if not left:
                break
        gc.collect()
        if time.monotonic() > end:
            pytest.fail("left behind:\n  " + "\n  ".join(left))
        time.sleep(0.01)


@contextlib.contextmanager
def _ends(made: list[Any]) -> Iterator[None]:
    """Close clusters whatever happens; should that hang, kill their workers and say where it hung."""
    pids: list[int] = []

    def end_it() -> None:
        faulthandler.dump_traceback(all_threads=True)
        for pid in _children() - before:
            os.kill(pid, signal.SIGKILL)
            pids.append(pid)

    before = _children()
    try:
        yield
    finally:
        timer = threading.Timer(10.0 * support.PATIENCE, end_it)
        timer.daemon = True
        timer.start()
        try:
            for one in made:
                one.close()
        finally:
            timer.cancel()
    assert not pids, "closing hung"


@pytest.fixture(autouse=True)
def last_resort(request: pytest.FixtureRequest) -> Iterator[None]:
    """A hang that not even the timeout's signal ends, ends the run, and says where it was."""
    faulthandler.dump_traceback_later(400, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two workers, ranks 2 and 3; at the end the books must balance."""
    import onehop

    made = onehop.Cluster(2)
    with _ends([made]):
        yield made
        support.assert_books_balance(made)


@pytest.fixture(scope="module")
def lasting_cluster() -> Iterator[Any]:
    """One cluster for all tests of a file, for files whose tests end no worker; they see it as `cluster`."""
    import onehop

    made = onehop.Cluster(2)
    with _ends([made]):
        # every link that there can be is opened now, so that no test is taken to have left it behind
        made[2].call(support.ask_neighbour, 3)
        yield made


@pytest.fixture
def balanced(lasting_cluster: Any) -> Iterator[Any]:
    """The lasting cluster, whose books must balance after every test too."""
    yield lasting_cluster
    support.assert_books_balance(lasting_cluster)


@pytest.fixture
def clusters() -> Iterator[Any]:
    """A maker of clusters, for tests that need other sizes or options; all are balanced and closed at the end."""
    import onehop

    made: list[Any] = []

    def make(*args: Any, **options: Any) -> Any:
        new = onehop.Cluster(*args, **options)
        made.append(new)
        return new

    with _ends(made):
        yield make
        for one in made:
            if not one._process.closed:
                support.assert_books_balance(one)
