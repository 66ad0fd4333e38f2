"""Runs tasks: the only file that runs user code (functions, and what decoding an argument runs).

A process has `slots` (one by default). A task takes a slot, and gives it up while it waits for another
call, so that the next one may start in another thread; the resumed one goes before new ones. Deeper
calls go before shallower ones, which keeps the number of waiting tasks near the depth of nesting
instead of the width of the outermost map. When `MOST_WAITING` tasks wait, a further nested call fails
with an error that names the chain: nothing ever hangs.

The worker's main thread is the first runner, so that user code finds itself where it expects to be
(signals, GUI libraries); more runners start only when a task waits or is urgent, and end when idle.

A little longer than most files: user code runs in this one only.
Must never know of links or where bytes lie.
"""

from __future__ import annotations

import ctypes
import gc
import heapq
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onehop import errors
from onehop._codec import functions, pickling
from onehop._protocol import messages
from onehop._runtime import context
from onehop._runtime.parcels import Holding
from onehop._runtime.task import Task
from onehop._runtime.troubles import describe, kind_of

if TYPE_CHECKING:
    from onehop._runtime.parcels import Outgoing
    from onehop._runtime.process import Process

MOST_WAITING = 256
"""Tasks of one process that may wait for other calls at the same time."""
IDLE_RUNNER_S = 10.0


class Executor:
    """The tasks of one process."""

    def __init__(self, process: Process, slots: int) -> None:
        self._process = process
        self.slots = slots
        self._lock = threading.Lock()
        self._ready: list[tuple[int, int, Task]] = []
        self._order = itertools.count()
        self._running = 0
        self._resuming: list[threading.Lock] = []
        self._idle = 0  # runners that wait for a task
        self.waiting = 0
        self.tasks: dict[messages.CallId, Task] = {}
        self.inline = False
        """Whether waiting threads run the tasks (a cluster without workers)."""
        self._main_task: Task | None = None
        self._main_ident = threading.main_thread().ident
        self._closing = False
        self._threads = itertools.count(1)

    # --- called by the reading thread -------------------------------------------------------------

    def accept(self, task: Task) -> None:
        """Queue a task; never blocks and runs nothing itself."""
        self.tasks[task.id] = task
        if task.call.flags & messages.URGENT:
            self._start_runner(task)
            return
        with self._lock:
            heapq.heappush(self._ready, (-task.call.depth, next(self._order), task))
            spawn = self._needs_runner()
        if spawn:
            self._start_runner(None)

    def _needs_runner(self) -> bool:
        """Whether tasks wait that no idle runner will take (an idle one may be on its way to another)."""
        return (
            not self.inline
            and len(self._ready) > self._idle
            and self._running + self._idle < self.slots
        )

    def caller_lost(self, rank: int) -> None:
        """Nobody waits any more for what that process has called."""
        for task in list(self.tasks.values()):
            if task.caller == rank:
                self.cancel(task.id, True)

    def cancel(self, task_id: messages.CallId, interrupt: bool) -> None:
        """Forget a queued task; raise KeyboardInterrupt in a running one."""
        task = self.tasks.get(task_id)
        if task is None:
            return
        with self._lock:
            task.cancelled = True
            started = task.started
        if not started:
            self._ended(task)
            self._process.answer_unstarted(task)
        elif interrupt:
            self._interrupt(task)

    def interrupt_all(self) -> None:
        """Interrupt whatever runs, and forget what is queued."""
        for task in list(self.tasks.values()):
            self.cancel(task.id, True)

    def _interrupt(self, task: Task) -> None:
        task.interrupted = True
        if task.waits:
            self._process.loop.wake()  # it looks, and raises by itself
            return
        if (
            context.home.process is not self._process
            and task.thread == threading.main_thread().ident
        ):
            return  # a task that runs inside the user's own program, which Ctrl-C stops by itself
        if task.thread == self._main_ident:
            # A signal also ends what sleeps in a system call. The handler looks again whether this
            # task still runs.
            if self._main_task is task:
                signal.pthread_kill(task.thread, signal.SIGINT)
        elif task.thread:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(task.thread), ctypes.py_object(KeyboardInterrupt)
            )

    def on_sigint(self, _signum: int, _frame: object) -> None:
        """Handle SIGINT in a worker: the terminal's is ignored, only an interrupted task stops."""
        if not self._process.loop.hold_back(self._stop_main_task):
            self._stop_main_task()

    def _stop_main_task(self) -> None:
        task = self._main_task
        if task is not None and task.interrupted:
            raise KeyboardInterrupt

    # --- runners ----------------------------------------------------------------------------------

    def _can_start(self) -> bool:
        return bool(self._ready and self._running < self.slots and not self._resuming) or (
            self._closing
        )

    def _start_runner(self, task: Task | None) -> None:
        if task is None:
            # Counted as idle from now on, or every call that arrives meanwhile would start another.
            with self._lock:
                self._idle += 1
        threading.Thread(
            target=self._extra_runner,
            args=(task,),
            name=f"onehop-task-{next(self._threads)}",
            daemon=True,
        ).start()

    def _extra_runner(self, task: Task | None) -> None:
        if task is not None:
            self._run(task)
            return
        self.serve(IDLE_RUNNER_S, counted=True)

    def serve(self, idle_s: float | None, *, counted: bool = False) -> None:
        """Run tasks in the calling thread until closed, or until idle for `idle_s`."""
        can_start = self._can_start
        loop = self._process.loop
        if not counted:
            with self._lock:
                self._idle += 1
        idle = True
        try:
            while not self._closing:
                with self._lock:
                    task = None
                    if self._ready and self._running < self.slots and not self._resuming:
                        task = heapq.heappop(self._ready)[2]
                        self._running += 1
                        self._idle -= 1
                        idle = False
                if task is None:
                    if not loop.wait(can_start, idle_s):
                        return
                    continue
                try:
                    self._run(task)
                except KeyboardInterrupt:
                    self._process.answer_unstarted(task)
                finally:
                    task = None
                    with self._lock:
                        self._release_slot()
                        self._idle += 1
                        idle = True
        finally:
            if idle:
                with self._lock:
                    self._idle -= 1

    def run_here(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Run tasks in the calling thread until `ready()`; False after `timeout_s`."""
        loop = self._process.loop
        while not ready():
            task = None
            with self._lock:
                if self._ready:
                    task = heapq.heappop(self._ready)[2]
            if task is not None:
                self._run(task)
            elif not loop.wait(lambda: ready() or bool(self._ready), timeout_s):
                return False
        return True

    def _release_slot(self) -> None:
        self._running -= 1
        if self._resuming and self._running < self.slots:
            self._running += 1
            self._resuming.pop(0).release()

    # --- giving a slot up -------------------------------------------------------------------------

    def park(self, task: Task, *, chain_of: str = "") -> None:
        """Give up the slot of `task`, which is about to wait; raises NestingLimitError."""
        urgent = bool(task.call.flags & messages.URGENT)
        with self._lock:
            if self.waiting >= MOST_WAITING:
                chain = " → ".join((*task.call.chain, task.label))
                raise errors.NestingLimitError(
                    f"{self.waiting} tasks of rank {self._process.rank} on {self._process.host} wait "
                    f"for other calls, the most that is allowed; {chain} may not wait too. Let tasks "
                    "return futures or values instead of waiting for calls at this depth."
                )
            self.waiting += 1
            task.waits += 1
            if task.waits > 1:
                return
            if not urgent:
                self._release_slot()
            wake = bool(self._ready and self._running < self.slots)
            spawn = wake and self._needs_runner()
        if task.call.flags & messages.CREDITED:
            self._process.post(task.caller, messages.Parked(task.call.serial), connect=False)
        if spawn:
            self._start_runner(None)
        elif wake:
            self._process.loop.wake()

    def unpark(self, task: Task, *, block: bool = True) -> None:
        """Take a slot again, before any new task does."""
        bell: threading.Lock | None = None
        with self._lock:
            self.waiting -= 1
            task.waits -= 1
            if task.waits or task.call.flags & messages.URGENT:
                return
            if self._running < self.slots or not block:
                self._running += 1
                return
            bell = threading.Lock()
            bell.acquire()
            self._resuming.append(bell)
        try:
            bell.acquire()
        except BaseException:
            # Interrupted while it waited for its slot: it goes on (to unwind) without waiting more.
            with self._lock:
                if bell in self._resuming:
                    self._resuming.remove(bell)
                    self._running += 1
            raise

    # --- one task ---------------------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        process = self._process
        outer = context.current_task()
        task.thread = threading.get_ident()
        main = task.thread == self._main_ident
        with self._lock:
            if task.cancelled:
                return
            task.started = True
        task.cell = process.board.begin(task.caller, task.call.serial)
        context.set_current_task(task)
        start_ns = time.monotonic_ns()
        try:
            if main:
                self._main_task = task
            answer = self._outcome(task, process)
        except KeyboardInterrupt:
            # Interrupted between the task's end and our noticing it.
            answer = self._trouble(task, "interrupted", KeyboardInterrupt())
        finally:
            if main:
                self._main_task = None
            context.set_current_task(outer)
        if process.forked:
            os._exit(0)  # the task forked, and this is the child: it is not a worker
        captured = type(task.function) is Holding
        self._ended(task)
        if captured and process.attachments.has_live:
            # A function that came by value and its globals name each other; what it captured would
            # stay mapped here, and held, until some collection. The young generation is quickly done.
            gc.collect(1)
        try:
            if task.interrupted and not main:
                # It may have been set just before the task ended, and not have been raised yet.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(task.thread), None)
            process.answer(task, answer, time.monotonic_ns() - start_ns)
        except KeyboardInterrupt:
            # It hit our own code; a second answer does no harm, none would leave the caller waiting.
            process.answer_unstarted(task)
            process.board.end(task.cell)

    def _ended(self, task: Task) -> None:
        self.tasks.pop(task.id, None)
        task.function = task.function if isinstance(task.function, str) else None
        task.arguments = None

    def _outcome(self, task: Task, process: Process) -> Outgoing | messages.Trouble:
        transfers = process.transfers
        function: Any = None
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        value: Any = None
        try:
            try:
                if isinstance(task.function, str):
                    function = functions.resolve_reference(task.function)
                elif task.function is not None:
                    function = transfers.decode(task.function, task.shares)
                if task.arguments is not None:
                    args, kwargs = transfers.decode(task.arguments, task.shares)
                    task.arguments = None
            except BaseException as error:
                return self._trouble(task, kind_of(task, error, "undecodable"), error)
            task.globals = getattr(getattr(function, "function", function), "__globals__", {})
            try:
                value = function(*args, **kwargs)
            except BaseException as error:
                return self._trouble(task, kind_of(task, error, "raised"), error)
            if process.forked:
                os._exit(0)
            if task.shares:
                # Views of a shared object in the value are encoded before they are looked at.
                written = transfers.shares.forget_written(task.shares)
                if written:
                    return self._trouble(
                        task,
                        "shared-written",
                        errors.SharedObjectModified(
                            f"{task.label} wrote to the buffers of {written} object(s) that "
                            "`Cluster.share` gives to all tasks; other tasks get them anew. Copy what "
                            "you change, or pass the object as an ordinary argument."
                        ),
                    )
            if not task.call.serial:
                return transfers.nothing
            try:
                if type(value) is Outcomes:
                    return value.encode(process, task)
                return transfers.encode(value, kept=False)
            except BaseException as error:
                return self._trouble(task, kind_of(task, error, "unencodable"), error)
        finally:
            # Argument objects die here, so that their segments go back with the answer.
            task.globals = {}
            function = args = kwargs = value = None  # type: ignore[assignment]
            task.shares = []

    def _trouble(self, task: Task, kind: str, error: BaseException) -> messages.Trouble:
        return describe(self._process, kind, error, __file__)

    def from_main(self, name: str) -> Any:
        """What the director's `__main__` calls `name`, as far as a running task brought it along.

        For code that pickles by reference in a task (multiprocessing with fork): a function of the script
        is not in this process's `__main__`.
        """
        current = context.current_task()
        for task in (current, *list(self.tasks.values())):
            if task is not None and name in task.globals:
                return task.globals[name]
        raise AttributeError(f"module '__main__' has no attribute {name!r}")

    def close(self) -> None:
        """Let idle runners end; tasks that run go on until they end."""
        self._closing = True
        self._process.loop.wake()


class Outcomes:
    """What a batch of a map returns: one (True, value) or (False, exception) an item."""

    __slots__ = ("items",)

    def __init__(self, items: list[tuple[bool, Any]]) -> None:
        self.items = items

    def encode(self, process: Process, task: Task) -> Outgoing:
        """Encode all in one; if one of them cannot be, that one becomes an error of its own."""
        try:
            return process.transfers.encode(self.items, kept=False)
        except Exception:
            checked: list[tuple[bool, Any]] = []
            for ok, value in self.items:
                try:
                    pickling.encode(value)
                    checked.append((ok, value))
                except Exception as error:
                    checked.append((False, describe(process, "unencodable", error)))
            return process.transfers.encode(checked, kept=False)


class Batch:
    """Runs a function over the items of a batch; sent once a map, as its function."""

    __slots__ = ("function", "only", "star")

    def __init__(self, function: Any, star: bool, only: list[int] | None = None) -> None:
        self.function = function
        self.star = star
        self.only = only
        """Positions of the items that are to be run (again); None for all."""

    def __getstate__(self) -> tuple[Any, bool, list[int] | None]:
        return (self.function, self.star, self.only)

    def __setstate__(self, state: tuple[Any, bool, list[int] | None]) -> None:
        self.function, self.star, self.only = state

    def __call__(self, items: list[Any]) -> Outcomes:
        """Run every item; an item that raises does not stop the others."""
        function, star = self.function, self.star
        outcomes: list[tuple[bool, Any]] = []
        if self.only is not None:
            items = [items[position] for position in self.only]
        task = context.current_task()
        board, cell = (None, -1) if task is None else (task.process.board, task.cell)
        for position, item in enumerate(items):
            if board is not None:
                board.at_item(cell, position)
            try:
                outcomes.append((True, function(*item) if star else function(item)))
            except BaseException as error:
                process = context.current_process()
                if process is None or (task is not None and task.interrupted):
                    raise
                outcomes.append((False, describe(process, "raised", error, __file__)))
        return Outcomes(outcomes)


def flush_output() -> None:
    """Write out what tasks printed, so that it arrives before their answer."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            continue  # closed or replaced by the task
