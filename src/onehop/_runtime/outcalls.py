"""The calls that this process makes: encoded, scheduled, sent, lost, stopped, answered.

Threads that call enter a call into the table and send it; the reading thread ends it. Whoever takes a
call out of the table ends it, so that an answer, a loss, a timeout and a cancellation cannot all do so.

A little longer than most files: every way in which a call can end stands here.
Must never know how a message travels, nor what users hold.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from onehop import errors
from onehop._codec.functions import function_reference
from onehop._protocol import calltable, messages, scheduling
from onehop._runtime import board, context
from onehop._runtime.answers import Answer
from onehop._runtime.parcels import Outgoing

if TYPE_CHECKING:
    from onehop._protocol.messages import CallId
    from onehop._runtime.process import Process

MOST_PENDING = 200_000
"""Outstanding calls of one process; whoever makes more waits until some have ended."""
STUCK_S = 0.9
"""A task that was interrupted and has not answered by then is stuck in native code. Less, and a busy
machine would make it look so."""


class Sink(Protocol):
    """Where the answer of a call goes; called once, by the reading thread or an errand."""

    def finish(self, answer: Answer) -> None:
        """Take the answer."""

    def sent(self) -> None:
        """The call is on its way, so that it may have started."""


class OutgoingCall:
    """A call that this process makes."""

    __slots__ = (
        "arguments", "chain", "depth", "flags", "function", "label", "lent", "parent", "parked", "retries",
        "scheduled", "serial", "sink", "state", "target", "timeout_s", "timer",
    )  # fmt: skip

    def __init__(self, serial: int, function: str | Outgoing, arguments: Outgoing | None) -> None:
        self.serial = serial
        self.function = function
        self.arguments = arguments
        self.state: str = calltable.WAITING
        self.target = 0
        self.sink: Sink | None = None
        self.parent: CallId | None = None
        self.depth = 0
        self.flags = 0
        self.chain: tuple[str, ...] = ()
        self.label = ""
        self.retries = 0
        self.scheduled = False
        self.parked = False
        self.timer: int | None = None
        self.timeout_s: float | None = None
        self.lent = (False, False)

    def close(self) -> None:
        """Let go of what was encoded, unless it is lent by the caller for several calls."""
        function_lent, arguments_lent = self.lent
        if not function_lent and type(self.function) is Outgoing:
            self.function.close()
        if not arguments_lent and self.arguments is not None:
            self.arguments.close()


class Outcalls:
    """The outstanding calls of one process, and the queue of those that may run anywhere."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.calls: calltable.CallTable[OutgoingCall] = calltable.CallTable()
        self.scheduler: scheduling.Scheduler[OutgoingCall] = scheduling.Scheduler()
        self._schedule_lock = threading.RLock()
        self._pumping = threading.Lock()
        self._pump_wanted = False
        self._stopped: dict[int, OutgoingCall] = {}  # given up here, and not yet answered

    def call(
        self,
        target: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sink: Sink | None,
        *,
        flags: int = 0,
        retries: int = 0,
        timeout_s: float | None = None,
        encoded_function: Outgoing | None = None,
        encoded_arguments: Outgoing | None = None,
        label: str = "",
        on_entry: Callable[[OutgoingCall], None] | None = None,
    ) -> OutgoingCall:
        """Encode a call as it is now, and send it to `target`, or to any worker if that is 0.

        Raises what encoding raises; nothing is kept then. Without a sink nobody is answered. What comes
        encoded already stays the caller's to close. `on_entry` gets the call before it can be answered.
        """
        self._process.check_usable()
        if self._process.rank == 1 and sys.path != self._process.path_told:
            self._process.tell_path()
        if len(self.calls) >= MOST_PENDING:
            self._wait_for_room()
        packed: str | Outgoing | None = encoded_function
        if packed is None:
            packed = function_reference(function)
        if packed is None:
            packed = self._process.transfers.encode(function)
        arguments = encoded_arguments
        if arguments is None:
            arguments = self._process.transfers.encode_arguments(args, kwargs)
        entry = OutgoingCall(self.calls.next_serial(), packed, arguments)
        entry.lent = encoded_function is not None, encoded_arguments is not None
        entry.sink = sink
        entry.flags = flags
        entry.retries = retries
        entry.label = label or (packed if type(packed) is str else _name_of(function))
        task = context.current_task()
        if task is not None and task.process is self._process:
            entry.parent = task.id
            entry.depth = task.call.depth + 1
            entry.chain = (*task.call.chain, task.label)[-24:]
        if sink is not None:
            self.calls.add(entry)
            if on_entry is not None:
                on_entry(entry)
            entry.timeout_s = timeout_s
        shielded = self._process.loop.shield()
        try:
            self._start(entry, packed, arguments, target)
        except BaseException:
            # It cannot be sent: nobody holds this call, so nobody must find it.
            self.calls.pop(entry.serial)
            raise
        finally:
            if shielded:
                self._process.loop.unshield()
        return entry

    def _start(
        self,
        entry: OutgoingCall,
        packed: str | Outgoing,
        arguments: Outgoing | None,
        target: int,
    ) -> None:
        """Send a call, now or once its parts are known."""
        parts = (arguments is not None and arguments.parts) or (
            type(packed) is Outgoing and packed.parts
        )
        if not parts or not self._process.when_known(
            (packed, arguments), lambda: self._dispatch(entry, target)
        ):
            self._dispatch(entry, target)

    def _wait_for_room(self) -> None:
        # Threads that complete calls must not wait for calls to complete.
        if not self._process.may_not_block:
            self._process.wait(
                lambda: self._process.closed or len(self.calls) < MOST_PENDING * 9 // 10
            )

    def _dispatch(self, entry: OutgoingCall, target: int) -> None:
        if entry.state == calltable.ENDED:
            return
        if target:
            self._send_call(entry, target)
            return
        calltable.advance(entry, "known")
        entry.scheduled = True
        entry.flags |= messages.CREDITED
        with self._schedule_lock:
            self.scheduler.put(
                entry, self._holders(entry), urgent=bool(entry.flags & messages.URGENT),
                alone=entry.timeout_s is not None,
            )  # fmt: skip
        self.pump()

    def _holders(self, entry: OutgoingCall) -> list[int]:
        """Who made the largest values among the arguments: they are attached there already."""
        arguments = entry.arguments
        if arguments is None or not arguments.parts:
            return []
        weight: dict[int, int] = {}
        for part in arguments.parts:
            if part.parcel is not None:
                for wire, used in zip(part.parcel.segments, part.parcel.used, strict=True):
                    weight[wire[0]] = weight.get(wire[0], 0) + used
        return sorted(weight, key=lambda rank: -weight[rank])

    def pump(self) -> None:
        """Send queued calls to workers that have room.

        One thread at a time; one that finds another at it only says that there is more to do. So a call
        that cannot be sent, and goes back to the queue, never sends the next one from within.
        """
        self._pump_wanted = True
        while self._pump_wanted and self._pumping.acquire(blocking=False):
            try:
                while self._pump_wanted:
                    self._pump_wanted = False
                    self._pump_all()
            finally:
                self._pumping.release()

    def _pump_all(self) -> None:
        while self.scheduler:
            with self._schedule_lock:
                chosen = self.scheduler.next()
            if chosen is None:
                return
            self._send_call(*chosen)

    def _send_call(self, entry: OutgoingCall, target: int) -> None:
        if entry.state == calltable.ENDED:
            self._credit(entry, target, 0)
            return
        function = entry.function
        arguments = entry.arguments
        cause = (self._process.rank, entry.serial)
        try:
            packed = None if arguments is None else arguments.complete()
            wire: str | messages.Parcel = function if type(function) is str else function.complete()  # type: ignore[union-attr]
        except BaseException as error:
            self._credit(entry, target, 0)
            self._end(entry, Answer(error=error))
            return
        if type(function) is Outgoing and not function.bare:
            self._process.transfers.mention(
                function.complete(), target, "call", cause, entry.parent, entry.label, function
            )
        if packed is not None and not arguments.bare:  # type: ignore[union-attr]
            self._process.transfers.mention(
                packed, target, "call", cause, entry.parent, entry.label, arguments
            )
        message = messages.Call(
            entry.serial if entry.sink is not None else 0,
            wire, packed, entry.parent, entry.depth, entry.flags, entry.chain,
        )  # fmt: skip
        entry.target = target
        calltable.advance(entry, "send")
        if entry.sink is not None:
            entry.sink.sent()
            if entry.timeout_s is not None and entry.timer is None:
                # From here on, so that a call does not pay for those that were before it in the queue.
                entry.timer = self._process.loop.after(
                    entry.timeout_s, lambda: self._on_timeout(entry)
                )
        sent = self._process.post(
            target, message, kind="call", cause=cause, parent=entry.parent, label=entry.label
        )
        if not sent:
            # Before anything else is sent there: its death will be reported a little later.
            self.leave(target)
            self._lose_call(entry, target, "it is gone", started=False)
        elif not entry.retries:
            entry.close()

    def _credit(self, entry: OutgoingCall, rank: int, run_ns: int) -> None:
        if entry.scheduled and rank:
            with self._schedule_lock:
                parked, entry.parked = entry.parked, False
                self.scheduler.finished(rank, run_ns, parked)

    def _end(self, entry: OutgoingCall, answer: Answer) -> None:
        if entry.timer is not None:
            self._process.loop.drop_timer(entry.timer)
        if entry.state != calltable.ENDED and self.calls.pop(entry.serial) is None:
            if entry.sink is not None:
                return  # somebody else ended it
            calltable.advance(entry, "end")
        entry.close()
        if entry.sink is not None:
            entry.sink.finish(answer)
            if not self._process.loop.handling:
                self._process.loop.wake()  # for a waiter: this is not the reading thread

    def fail_unsent(self, entry: OutgoingCall, error: BaseException) -> None:
        """End a call that waited for a worker."""
        self._end(entry, Answer(error=error))

    # --- losing and stopping calls ----------------------------------------------------------------

    def _lose_call(
        self, entry: OutgoingCall, rank: int, reason: str, started: bool, at_item: int = 0
    ) -> None:
        with self._schedule_lock:
            # The thread that failed to send and the one that hears of the death may both come here.
            if entry.target != rank or entry.state not in (calltable.SENT, calltable.PARKED):
                return
            self._credit(entry, rank, 0)
            again = (
                entry.scheduled and not self._process.closed and (entry.retries > 0 or not started)
            )
            if again:
                entry.retries -= started
                calltable.advance(entry, "requeue")
                entry.target = 0
                self.scheduler.put(entry, alone=entry.timeout_s is not None)
        if again:
            self.pump()
            return
        member = self._process.members.get(rank)
        host = member.host if member is not None else "an unknown host"
        kind = errors.WorkerDied if rank != 1 else errors.CallLost
        may = "it may have started" if started else "it had not started"
        self._end(
            entry,
            Answer(error=kind(
                f"the call of {entry.label or 'a function'} to rank {rank} on {host} was lost, {may}: "
                f"{reason}. Use `cluster.options(retries=…)` if it may run twice.", started,
            ), at_item=at_item),
        )  # fmt: skip

    def lose(self, rank: int, reason: str) -> None:
        """That process is gone: end or requeue what was sent to it."""
        with self._schedule_lock:
            self.scheduler.leave(rank)
        entries = self.calls.sent_to(rank)
        if entries:
            begun = self._begun_on(rank)
            for entry in entries:
                started = begun is None or entry.serial in begun
                at_item = 0 if begun is None else begun.get(entry.serial, 0)
                self._lose_call(entry, rank, reason, started, at_item)
        for serial, entry in list(self._stopped.items()):
            if entry.target == rank:
                self._stopped.pop(serial, None)
        self._process.transfers.forget_owner(rank)
        self.pump()

    def _begun_on(self, rank: int) -> dict[int, int] | None:
        """Which of our calls a dead process had begun, or None if it cannot be known."""
        if not self._process.attachments.has_arena(rank):
            return None
        return board.read(
            self._process.attachments.arena_fd(rank),
            self._process.boards.get(rank, 0),
            self._process.rank,
        )

    def _on_timeout(self, entry: OutgoingCall) -> None:
        error = errors.CallTimeout(
            f"the call of {entry.label} to rank {entry.target or '(none yet)'} was not answered in "
            f"{entry.timeout_s} s; its task is interrupted"
        )
        self.stop(entry, error)

    def stop(self, entry: OutgoingCall, error: BaseException | None = None) -> bool:
        """End a call here with `error` (cancelled by default), and interrupt its task; False if over."""
        shielded = self._process.loop.shield()
        try:
            return self._stop(entry, error)
        finally:
            if shielded:
                self._process.loop.unshield()

    def _stop(self, entry: OutgoingCall, error: BaseException | None) -> bool:
        if self.calls.pop(entry.serial) is None:
            return False
        if entry.scheduled and not entry.target:
            with self._schedule_lock:
                self.scheduler.drop(entry)
        if entry.target:
            self._stopped[entry.serial] = entry
            if self._process.post(entry.target, messages.Cancel(entry.serial), connect=False):
                self._process.loop.after(STUCK_S, lambda: self._look_if_stuck(entry))
        self._end(entry, Answer(error=error or _cancelled()))
        return True

    def stop_all(self) -> None:
        """End every call that this process waits for, as cancelled, and interrupt their tasks."""
        for entry in self.calls.all():
            self.stop(entry)

    def _look_if_stuck(self, entry: OutgoingCall) -> None:
        if entry.serial not in self._stopped or self._process.closed:
            return
        begun = self._begun_on(entry.target)
        if begun is None or entry.serial in begun:
            self._process.observer.stuck(self._process, entry.target, entry.label)
        else:
            # It waits behind another task that keeps its process from answering; that one is not ours to end.
            self._process.loop.after(STUCK_S, lambda: self._look_if_stuck(entry))

    # --- answers ----------------------------------------------------------------------------------

    def answered(self, source: int, serial: int, answer: Answer) -> None:
        """An answer has arrived."""
        entry = self.calls.get(serial)
        if entry is None:
            stopped = self._stopped.pop(serial, None)
            if stopped is not None:
                self._credit(stopped, source, 0)
                self.pump()
            return
        if answer.trouble is not None and entry.retries > 0 and answer.trouble.kind == "raised":
            self._credit(entry, source, answer.run_ns)
            entry.retries -= 1
            calltable.advance(entry, "requeue")
            target, entry.target = entry.target, 0
            if entry.scheduled:
                with self._schedule_lock:
                    self.scheduler.put(entry, alone=entry.timeout_s is not None)
                self.pump()
            else:
                self._send_call(entry, target)
            return
        if entry.scheduled:
            self._credit(entry, source, answer.run_ns)
            self._end(entry, answer)
            self.pump()
        else:
            self._end(entry, answer)

    def parked(self, source: int, serial: int) -> None:
        """A task gave up its slot: its worker may get another call."""
        entry = self.calls.get(serial)
        if entry is not None and entry.state == calltable.SENT:
            calltable.advance(entry, "park")
        else:
            entry = self._stopped.get(serial)
        if entry is not None and entry.scheduled and not entry.parked:
            with self._schedule_lock:
                entry.parked = True
                self.scheduler.parked(source)
            self.pump()

    # --- who takes calls --------------------------------------------------------------------------

    def join(self, rank: int, slots: int) -> None:
        """A worker takes calls from now on."""
        with self._schedule_lock:
            self.scheduler.join(rank, slots)
        self.pump()

    def leave(self, rank: int) -> None:
        """A worker takes no more calls."""
        with self._schedule_lock:
            self.scheduler.leave(rank)

    def end_all(self, reason: str) -> None:
        """End what is outstanding, as cancelled: the cluster closes."""
        for entry in self.calls.all():
            self._end(entry, Answer(error=_cancelled(reason)))


def _name_of(function: Any) -> str:
    name = getattr(function, "__qualname__", "")
    return name if type(name) is str and name.isascii() else ascii(name)[1:-1]


def _cancelled(*reason: str) -> BaseException:
    # Not imported at the top: it takes longer than a worker may take to start.
    from concurrent.futures import CancelledError

    return CancelledError(*reason)
