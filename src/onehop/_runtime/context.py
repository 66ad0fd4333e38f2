"""Which task, and which member of which cluster, the running code belongs to.

A task is found by its thread. Code in a thread that a task started belongs to no task, but in a worker
it still belongs to the one cluster that this process was started for: `home` is set once by `entry`,
stays None in every director, and is no cluster of its own.
Must never know how tasks are run.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onehop._runtime.process import Process
    from onehop._runtime.task import Task


class _PerThread(threading.local):
    task: Task | None = None


_here = _PerThread()


class _Home:
    process: Process | None = None


home = _Home()


def current_task() -> Task | None:
    """The task that the calling thread runs."""
    return _here.task


def set_current_task(task: Task | None) -> None:
    """Say what the calling thread runs from now on."""
    _here.task = task


def current_process() -> Process | None:
    """The member of a cluster that the calling code runs in; None in a program of its own."""
    task = _here.task
    return task.process if task is not None else home.process


def rank() -> int:
    """Return the rank of the process that this code runs in.

    Returns
    -------
    int
        In a task, the rank of the process that runs it; in the program that made the cluster, 1.

    Examples
    --------
    >>> import onehop
    >>> onehop.rank()
    1
    >>> with onehop.Cluster(1) as cluster:
    ...     cluster[2].call(onehop.rank)
    2
    """
    process = current_process()
    return 1 if process is None else process.rank
