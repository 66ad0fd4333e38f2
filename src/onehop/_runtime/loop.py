"""One process's event loop, driven by whoever waits.

Handing an answer from a reader thread to the thread that waits for it costs a thread switch, which is
about as much as the message itself. So the *waiting* thread takes the reading role: it polls the links
itself until what it waits for is there, and leaves. In a worker the thread that waits for its next task
does the same, so that a call costs two process switches and no thread switch.

When nobody waits (the user's program computes; a task runs) the *standby* thread reads. It is not woken
each time a waiter leaves, since most come back within microseconds: it looks every `PATROL_S` whether
the role has been free since its last look, and only then takes it. A waiter that comes while it reads
asks it to step aside. While a waiter reads for long (an idle worker) standby is parked and costs nothing.

There is one role, so handlers never run concurrently with each other.
Must never know of messages, links or tasks: descriptors, handlers and waiters only.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable

from onehop._runtime.poller import IN, OUT, new_poller, wake_pipe

PATROL_S = 0.002
PATROLS_UNTIL_PARKED = 25
LONGEST_WAIT_S = 3600.0

Handler = Callable[[int], None]


class Waiter:
    """One thread that waits until `ready()` is true.

    A waiter that finds the role taken by another waiter sleeps on `bell`; it is rung when what it waits
    for happened, or when it is its turn to read.
    """

    __slots__ = ("bell", "ready")

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.bell = threading.Lock()
        self.bell.acquire()

    def ring(self) -> None:
        """Wake the waiter; harmless if it is awake."""
        try:
            self.bell.release()
        except RuntimeError:
            pass  # already rung


class Loop:
    """Polls descriptors on behalf of the thread that waits, or of the standby thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._role = threading.Lock()
        self._reader: int = 0  # ident of the thread that has the role
        self._handlers: dict[int, tuple[int, Handler]] = {}
        self._wake_read, self._wake_write = wake_pipe()
        self._poller = new_poller(self.wake)
        self._handlers[self._wake_read] = (0, self._drain_wake)
        self._poller.register(self._wake_read, IN)
        self._asked_aside = 0  # waiters that want the role while standby has it
        self._waiters: list[Waiter] = []  # those that sleep on their bell
        self._waiters_lock = threading.Lock()
        self._epoch = 0
        self._alarm = threading.Lock()
        self._alarm.acquire()
        self._parked = False
        self._standby_reads = False
        self._closed = False
        self._main_ident = threading.main_thread().ident
        self._shielded = False
        self.handling = 0
        """Ident of the thread that carries out handlers right now."""
        self.interrupted: Callable[[], None] | None = None
        self._timers: list[tuple[float, int]] = []
        self._actions: dict[int, Callable[[], None]] = {}
        self._timer_ids = itertools.count()
        self._standby = threading.Thread(target=self._stand_by, name=f"onehop-{name}", daemon=True)

    def start(self) -> None:
        """Start the standby thread."""
        self._standby.start()

    # --- descriptors and timers -----------------------------------------------------------------

    def watch(self, fd: int, handler: Handler, *, priority: int = 1) -> None:
        """Call `handler(events)` whenever `fd` is readable; lower priorities first in one poll."""
        self._handlers[fd] = (priority, handler)
        self._poller.register(fd, IN)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Say whether `fd` is to be reported when it is writable too."""
        mask = IN | (OUT if wanted else 0)
        try:
            self._poller.modify(fd, mask)
        except (OSError, ValueError, KeyError):
            return  # closed meanwhile
        if wanted:
            self.wake()

    def forget(self, fd: int) -> None:
        """Stop watching; must be called before `fd` is closed."""
        if self._handlers.pop(fd, None) is not None:
            try:
                self._poller.unregister(fd)
            except (OSError, ValueError, KeyError):
                pass

    def wake(self) -> None:
        """Make whoever polls look around, from any thread."""
        if self._reader != threading.get_ident():
            try:
                os.write(self._wake_write, b"\0")
            except (BlockingIOError, OSError):
                pass  # full: it will wake anyway; closed: nobody polls

    def _drain_wake(self, _events: int) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    # --- waiting ----------------------------------------------------------------------------------

    @property
    def reads_here(self) -> bool:
        """Whether the calling thread has the reading role, so that it must not block."""
        return self._reader == threading.get_ident()

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block the calling thread until `ready()`, reading if nobody else does.

        Returns False when `timeout_s` passed first. A handler that waits (it should not) reads on the
        spot, since nobody else can.
        """
        if ready():
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        if self._reader == me:
            return self._read_until(ready, deadline)
        if me != self._main_ident:
            return self._wait(ready, deadline, me)
        # See `hold_back`: from here on the main thread is interrupted only where it really waits.
        outer, self._shielded = self._shielded, True
        try:
            return self._wait(ready, deadline, me)
        finally:
            self._shielded = outer
            if not outer and self.interrupted is not None:
                self._raise_interrupt()

    def _wait(self, ready: Callable[[], bool], deadline: float | None, me: int) -> bool:
        waiter: Waiter | None = None
        while True:
            if self._role.acquire(blocking=False):
                taken = True
            else:
                if waiter is None:
                    waiter = Waiter(ready)
                taken = self._wait_for_role(waiter, deadline)
            if taken:
                self._reader = me
                try:
                    if self._read_until(ready, deadline):
                        return True
                finally:
                    if me == self._main_ident:
                        self._shielded = True
                    self._leave_role()
            if ready():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if self._closed:
                # No one reads any more: whoever completes things sets state directly.
                self._pause(0.005)

    def _pause(self, seconds: float) -> None:
        if threading.get_ident() == self._main_ident:
            self._open_to_interrupts()
            time.sleep(seconds)
            self._shielded = True
        else:
            time.sleep(seconds)

    def _wait_for_role(self, waiter: Waiter, deadline: float | None) -> bool:
        """Sleep until the role is the caller's (true), or something happened (false)."""
        if self._standby_reads:
            self._asked_aside += 1
            try:
                self.wake()
                return self._role.acquire(timeout=0.05)
            finally:
                self._asked_aside -= 1
        with self._waiters_lock:
            self._waiters.append(waiter)
        try:
            # Between the look at the role and the entry in the list the reader may have left without
            # seeing us: look again before sleeping.
            if self._role.acquire(blocking=False):
                return True
            if not waiter.ready():
                remaining = LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
                main = threading.get_ident() == self._main_ident
                if main:
                    self._open_to_interrupts()
                waiter.bell.acquire(timeout=max(0.0, min(remaining, LONGEST_WAIT_S)))
                if main:
                    self._shielded = True
        finally:
            if threading.get_ident() == self._main_ident:
                self._shielded = True
            with self._waiters_lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return False

    def _leave_role(self) -> None:
        self._epoch += 1
        self._reader = 0
        self._role.release()
        if self._waiters:
            with self._waiters_lock:
                if self._waiters:
                    self._waiters[0].ring()
        if self._parked:
            self._parked = False
            self._alarm.release()

    def ring_ready(self) -> None:
        """Ring every sleeping waiter whose condition has come true; for handlers to call."""
        if self._waiters:
            with self._waiters_lock:
                for waiter in self._waiters:
                    if waiter.ready():
                        waiter.ring()

    def _read_until(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        while not ready():
            remaining = None
            if deadline is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
            if self._closed:
                return ready()
            self._poll(remaining)
        return True

    def _poll(self, timeout_s: float | None) -> None:
        if self._timers:
            until = self._timers[0][0] - time.monotonic()
            timeout_s = max(0.0, until if timeout_s is None else min(until, timeout_s))
        me = threading.get_ident()
        if me == self._main_ident and self._shielded:
            self._open_to_interrupts()
            events = self._poller.poll(timeout_s)
            self._shielded = True
        else:
            events = self._poller.poll(timeout_s)
        if len(events) > 1:
            # What a worker printed before it answered is shown before the answer is.
            handlers = self._handlers
            events.sort(key=lambda event: handlers.get(event[0], (9,))[0])
        self.handling = me
        try:
            for fd, mask in events:
                entry = self._handlers.get(fd)
                if entry is not None:
                    try:
                        entry[1](mask)
                    except Exception:
                        _report()
            if self._timers:
                self._run_timers()
            if self._waiters:
                self.ring_ready()
        finally:
            self.handling = 0

    # --- interrupts -------------------------------------------------------------------------------

    def hold_back(self, interrupt: Callable[[], None]) -> bool:
        """For a signal handler, in the main thread: whether the interrupt must wait a moment.

        A KeyboardInterrupt between reading a frame and acting on it would lose the frame, and one
        between taking the role and saying so would lose the role, for everybody and for ever. So the
        main thread is open to interrupts only in the calls that really wait; what comes in between is
        delivered at the next of them, or when the wait is over.
        """
        if self._shielded or self.handling == threading.get_ident():
            self.interrupted = interrupt
            return True
        return False

    def shield(self) -> bool:
        """Hold interrupts of the calling thread back until `unshield`, if this returns true.

        For a few steps that belong together: what is noted as sent is sent, what is taken is used.
        """
        if threading.get_ident() != self._main_ident or self._shielded:
            return False
        self._shielded = True
        return True

    def unshield(self) -> None:
        """Let interrupts through again, also the one that came meanwhile."""
        self._open_to_interrupts()

    def _open_to_interrupts(self) -> None:
        self._shielded = False
        if self.interrupted is not None:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        interrupted, self.interrupted = self.interrupted, None
        if interrupted is not None:
            interrupted()

    # --- timers -----------------------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> int:
        """Run `action` in the reading thread after `delay_s`; returns a number for `drop_timer`."""
        number = next(self._timer_ids)
        self._actions[number] = action
        heapq.heappush(self._timers, (time.monotonic() + delay_s, number))
        self.wake()
        return number

    def drop_timer(self, number: int) -> None:
        """Do not run that action any more, and forget it now: it may hold a large value."""
        self._actions.pop(number, None)
        if len(self._timers) > 64 + 2 * len(self._actions) and self.reads_here:
            self._timers = [timer for timer in self._timers if timer[1] in self._actions]
            heapq.heapify(self._timers)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = self._actions.pop(heapq.heappop(self._timers)[1], None)
            if action is not None:
                try:
                    action()
                except Exception:
                    _report()

    # --- standby ----------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        while not self.closed:
            self._patrol_until_free()
            if not self._role.acquire(blocking=False):
                continue
            self._reader = threading.get_ident()
            self._standby_reads = True
            try:
                while not (self._closed or self._asked_aside):
                    self._poll(None)
            finally:
                self._standby_reads = False
                self._reader = 0
                self._role.release()

    def _patrol_until_free(self) -> None:
        """Return when the role has been free for a whole patrol."""
        seen = -1
        busy_rounds = 0
        while not self._closed:
            if self._role.locked() or self._asked_aside:
                busy_rounds = busy_rounds + 1 if self._epoch == seen else 0
                seen = self._epoch
                if busy_rounds > PATROLS_UNTIL_PARKED:
                    busy_rounds = 0
                    self._parked = True
                    # A reader that left between our look and this line did not see `_parked`.
                    if self._role.locked():
                        self._alarm.acquire()
                    else:
                        self._parked = False
                        self._alarm.acquire(blocking=False)
            elif self._epoch == seen:
                return
            else:
                seen = self._epoch
            time.sleep(PATROL_S)

    # --- end --------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Stop reading; wakes every waiter. Descriptors that are still watched stay open."""
        self._closed = True
        if self._parked:
            self._parked = False
            self._alarm.release()
        self.wake()
        with self._waiters_lock:
            for waiter in self._waiters:
                waiter.ring()
        if self._standby.ident is not None and self._standby is not threading.current_thread():
            self._standby.join(timeout=5.0)
        # Whoever reads leaves at once; only a handler that never returns could keep the role.
        taken = self._role.acquire(timeout=5.0)
        try:
            self._poller.close()
            self._handlers.clear()
            os.close(self._wake_read)
            write, self._wake_write = self._wake_write, -1
            os.close(write)
        finally:
            if taken:
                self._role.release()

    def abandon(self) -> None:
        """In a forked child: close our copies of the descriptors, touch nothing that is shared."""
        self._closed = True
        self._handlers.clear()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)
        self._poller.close()


def _report() -> None:
    """Show an error of a handler, which must neither end the reader nor reach whoever waits."""
    import sys
    import traceback

    try:
        traceback.print_exc()
    except Exception:
        # Even standard error fails: there is nobody left to tell.
        sys.exc_info()
