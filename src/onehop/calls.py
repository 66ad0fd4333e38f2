"""Futures: what a caller holds of a call.

Must never know how a call is sent, or by which road its value comes.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from onehop import errors
from onehop._protocol.messages import CallId, Parcel
from onehop._runtime import context
from onehop._runtime.answers import Answer
from onehop._runtime.parcels import Part
from onehop._runtime.transfers import Transfers

if TYPE_CHECKING:
    from onehop._runtime.outcalls import OutgoingCall
    from onehop._runtime.process import Process
    from onehop.ledger import Journey

T = TypeVar("T")

# The states of concurrent.futures, which its `wait` and `as_completed` compare with.
_PENDING, _RUNNING = "PENDING", "RUNNING"
_CANCELLED, _FINISHED = "CANCELLED_AND_NOTIFIED", "FINISHED"
_OVER = frozenset(("CANCELLED", _CANCELLED, _FINISHED))


class Ask:
    """The sink of a call whose caller waits on the spot."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Answer | None = None

    def finish(self, answer: Answer) -> None:
        """Take the answer."""
        self.answer = answer

    def sent(self) -> None:
        """Nothing to note."""

    def ready(self) -> bool:
        """Whether the answer is there."""
        return self.answer is not None


class _Event(threading.Event):
    """The event that `concurrent.futures.wait` waits for; a task that does gives up its slot."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def wait(self, timeout: float | None = None) -> bool:
        return self._process.wait(self.is_set, timeout)

    def set(self) -> None:
        super().set()
        self._process.loop.wake()  # it may be set by a future of somebody else's


class _Waiters(list[Any]):
    """What `concurrent.futures.wait` and `as_completed` enter themselves into.

    They would sleep on a plain event, which gives no slot up and reads no link; they get ours.
    """

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def append(self, waiter: Any) -> None:
        if type(getattr(waiter, "event", None)) is threading.Event:
            waiter.event = _Event(self._process)
        super().append(waiter)


class Future(concurrent.futures.Future[T], Generic[T]):
    """The answer of a call, now or later.

    A `concurrent.futures.Future`, usable with that module's `wait` and `as_completed`, and awaitable. The
    value stays with the process that made it until `result` is called here; passed as an argument, at
    any depth of lists, tuples, dicts or objects, it goes straight from there to where it is needed.

    Made by `Cluster.submit` and `Worker.submit`, never directly.
    """

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._waiters = _Waiters(process)
        self._process = process
        self._entry: OutgoingCall | None = None
        self._id: CallId = (process.rank, 0)
        self.parent: CallId | None = None
        self.label = ""
        self._answer: Answer | None = None
        self._built = False
        self._build_lock = threading.Lock()
        self._watchers: list[Callable[[], None]] = []
        self._on_error: Callable[[BaseException], Any] | None = None

    # --- the sink ---------------------------------------------------------------------------------

    def made(self, entry: OutgoingCall) -> None:
        """Take the call that this is the answer of."""
        self._entry = entry
        self._id = (self._process.rank, entry.serial)
        self.parent, self.label = entry.parent, entry.label

    def sent(self) -> None:
        """The call may have started, so it cannot be cancelled any more."""
        with self._condition:
            if self._state == _PENDING:
                self._state = _RUNNING

    def finish(self, answer: Answer) -> None:
        """Take the answer: wakes whoever waits; callbacks run elsewhere, since they may block."""
        self._answer = answer
        error = answer.error
        cancelled = isinstance(error, CancelledError) or (
            answer.trouble is not None and answer.trouble.kind == "interrupted"
        )
        failed = self._on_error is None and (error is not None or answer.trouble is not None)
        with self._condition:
            self._entry = None
            self._state = _CANCELLED if cancelled else _FINISHED
            for waiter in self._waiters:
                if cancelled:
                    waiter.add_cancelled(self)
                elif failed:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher()
        if self._done_callbacks:  # type: ignore[attr-defined]
            self._process.user_errand(self._invoke_callbacks)  # type: ignore[attr-defined]

    # --- concurrent.futures -----------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value and build it in this process.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; TimeoutError after that, and the call goes on.

        Returns
        -------
        object
            The same object each time; it is the caller's, who may write to its arrays.

        Raises
        ------
        RemoteError
            The function raised; also an instance of the original type where that can be rebuilt.
        CallLost
            Its process died first, or its link broke.
        concurrent.futures.CancelledError
            It was cancelled.
        """
        self._wait(timeout)
        if not self._built:
            self._build()
        if self._exception is not None:
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # break the cycle with the traceback
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what `result` would raise, or None."""
        self._wait(timeout)
        if self._state != _FINISHED:
            raise CancelledError
        if not self._built:
            # Also where there is a value: building it may fail, and `result` would raise that.
            self._build()
        return self._exception

    def _wait(self, timeout: float | None) -> None:
        if self._state not in _OVER:
            self._process.check_not_forked()
            try:
                in_time = self._process.wait(self._over, timeout)
            except errors.NestingLimitError:
                self.interrupt()  # left alone it would go on nesting
                raise
            if not in_time:
                raise TimeoutError(f"call {self._id} has no answer after {timeout} s; it goes on")

    def _over(self) -> bool:
        return self._state in _OVER

    def _build(self) -> None:
        with self._build_lock:
            if self._built:
                return
            answer = self._answer
            if answer is None or self._state != _FINISHED:
                raise (
                    CancelledError if answer is None else answer.exception(self._process.transfers)
                )
            try:
                self._result: T = self._value(answer)
            except Exception as error:
                self._exception: BaseException | None = error
            self._built = True

    def _value(self, answer: Answer) -> T:
        transfers = self._process.transfers
        if answer.received is None:
            error = answer.exception(transfers, self)
            if self._on_error is None or not isinstance(error, Exception):
                raise error
            return self._on_error(error)  # type: ignore[no-any-return]
        try:
            return answer.value(transfers, self)  # type: ignore[no-any-return]
        except Exception as error:
            raise errors.SerializationError(
                f"the result of call {self._id} could not be rebuilt on rank "
                f"{self._process.rank} ({self._process.host}): {type(error).__name__}: {error}"
            ) from error

    def cancel(self) -> bool:
        """Cancel the call if it has not been sent to a worker; False if it has, or is over.

        A task that runs is ended by `interrupt`.
        """
        entry = self._entry
        with self._condition:
            if self._state in ("CANCELLED", _CANCELLED):
                return True
            if self._state != _PENDING or entry is None:
                return False
        return self._process.outcalls.stop(entry) or self.cancelled()

    def interrupt(self) -> bool:
        """Cancel the call also if its task runs: KeyboardInterrupt is raised in it.

        A task that native code keeps from noticing is ended with its process within a second.
        """
        entry = self._entry
        return entry is not None and self._process.outcalls.stop(entry)

    def wait(self, timeout: float | None = None) -> Future[T]:
        """Wait until the call is over, without fetching its value; returns the future."""
        self._wait(timeout)
        return self

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        task = context.current_task()
        if task is not None and self._state not in _OVER:
            executor = task.process.executor
            executor.park(task)
            try:
                yield from asyncio.wrap_future(self).__await__()
            finally:
                executor.unpark(task, block=False)
        elif self._state not in _OVER:
            yield from asyncio.wrap_future(self).__await__()
        return self.result()

    # --- what is ours -----------------------------------------------------------------------------

    @property
    def id(self) -> CallId:
        """Rank of the caller, and the number it gave the call; the cause of its ledger records."""
        return self._id

    @property
    def serial(self) -> int:
        """The number of the call among those of its caller."""
        return self._id[1]

    def route(self) -> Journey:
        """Return the way that this call, and the calls it made in turn, really took.

        Waits for the answer. Prints as ``1 → 2 → 3 → 2 → 1`` with a line for each hop.
        """
        self._wait(None)
        journey: Journey = self._process.ledger.journey(self._id)
        return journey

    def when_over(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` when the call is over, in the thread that finds out; it must not block."""
        with self._condition:
            if self._state not in _OVER:
                self._watchers.append(watcher)
                return
        watcher()

    def _onehop_part(self, transfers: Transfers) -> Part:
        if transfers is not self._process.transfers:
            return _encoded(self.result(), transfers)
        part = Part()
        if self._state in _OVER:
            self._fill(part, transfers)
            return part

        def register(known: Callable[[], None]) -> None:
            def over() -> None:
                self._fill(part, transfers)
                known()

            self.when_over(over)

        part.waits_for = register
        return part

    def _fill(self, part: Part, transfers: Transfers) -> None:
        answer = self._answer
        if self._state != _FINISHED or answer is None:
            part.trouble = CancelledError(
                f"call {self._id}, whose value is an argument, was cancelled"
            )
        elif answer.received is not None:
            part.parcel = answer.received.parcel
            part.holder = answer.received
            return
        elif self._on_error is not None:
            try:
                filled = _encoded(self.result(), transfers)
                part.parcel, part.holder = filled.parcel, filled.holder
                return
            except Exception as error:
                part.trouble = error
        else:
            part.trouble = answer.exception(transfers)
        part.parcel = Parcel()

    def __repr__(self) -> str:
        state = "cancelled" if self._state == _CANCELLED else self._state.lower()
        return f"<onehop future of call {self._id}: {self.label or 'a function'}, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a onehop future can be passed to calls of its own cluster only; pass its result() instead"
        )


class Taken:
    """Stands for a value that was encoded earlier than what holds it."""

    __slots__ = ("_outgoing",)

    def __init__(self, value: object, transfers: Transfers) -> None:
        self._outgoing = transfers.encode(value)

    def _onehop_part(self, transfers: Transfers) -> Part:
        outgoing = self._outgoing
        if not outgoing.waiting:
            return Part(outgoing.complete(), outgoing)
        part = Part(holder=outgoing)
        remaining = [len(outgoing.waiting)]

        def register(known: Callable[[], None]) -> None:
            def one_known() -> None:
                remaining[0] -= 1
                if not remaining[0]:
                    try:
                        part.parcel = outgoing.complete()
                    except BaseException as error:
                        part.trouble, part.parcel = error, Parcel()
                    known()

            for inner in outgoing.waiting:
                inner_register, inner.waits_for = inner.waits_for, None
                if inner_register is not None:
                    inner_register(one_known)

        part.waits_for = register
        return part


def _encoded(value: object, transfers: Transfers) -> Part:
    outgoing = transfers.encode(value)
    return Part(outgoing.complete(), outgoing)


def deadline_of(timeout: float | None) -> float | None:
    """The moment at which `timeout` seconds from now are over."""
    return None if timeout is None else time.monotonic() + timeout
