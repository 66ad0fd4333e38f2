"""One member of a cluster: what it sends, what it is sent, and the calls it waits for.

The reading thread (see `loop`) calls `on_frames`; nothing below it blocks, runs user code or decodes a
user's object. Threads that make calls enter them into the call table and send; threads that wait do so
in `wait`, where a task gives up its slot. Whatever might block (opening a link on behalf of the reading
thread, a callback of the user's) is done by the errands thread.

Longer than most files: it is the table of what each message does, which is best read in one place.
Must never know how processes are started, nor what users hold.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onehop import errors
from onehop._contracts.link import Frame, Link
from onehop._memory.arena import Arena
from onehop._memory.blobs import BlobStore
from onehop._memory.mapping import Attachments
from onehop._memory.tracker import get_tracker
from onehop._protocol import messages
from onehop._runtime import board, context
from onehop._runtime.answers import Answer
from onehop._runtime.executor import Executor, flush_output
from onehop._runtime.forked import forks
from onehop._runtime.loop import Loop
from onehop._runtime.outcalls import Outcalls
from onehop._runtime.parcels import Outgoing
from onehop._runtime.peers import Peers
from onehop._runtime.task import Task
from onehop._runtime.transfers import Transfers
from onehop._runtime.troubles import describe
from onehop.ledger.book import Book

if TYPE_CHECKING:
    from onehop._protocol.messages import CallId, MemberInfo, Message

TICK_S = 0.2


class Observer(Protocol):
    """Who decides about membership: the director, or a worker's life."""

    def met(self, process: Process, hello: messages.Hello) -> None:
        """A process has joined, or linked up."""

    def lost(self, process: Process, rank: int, reason: str) -> None:
        """The last link to a process ended."""

    def message(self, process: Process, source: int, message: Message) -> None:
        """Something for the observer alone: shutdown, ledger news."""

    def stuck(self, process: Process, rank: int, label: str) -> None:
        """A task there was interrupted and has not stopped."""


class Process:
    """One member of a cluster."""

    def __init__(
        self,
        rank: int,
        cluster_id: str,
        secret: bytes,
        observer: Observer,
        *,
        slots: int = 1,
        memory_limit: int | None = None,
        name: str = "",
    ) -> None:
        self.rank = rank
        self.cluster_id = cluster_id
        self.host = socket.gethostname()
        self.pid = os.getpid()
        self._forks = forks.count
        self.observer = observer
        self.book = Book()
        self.loop = Loop(name or f"rank-{rank}")
        self.arena = Arena(rank, memory_limit)
        self.attachments = Attachments(self.arena)
        self.store = BlobStore(self.arena, get_tracker(), self.attachments)
        self.transfers = Transfers(self, self.store, self.attachments, self.book)
        self.board = board.Board(self.arena)
        self.executor = Executor(self, slots)
        self.outcalls = Outcalls(self)
        self.call = self.outcalls.call
        self.calls = self.outcalls.calls
        self.scheduler = self.outcalls.scheduler
        self.members: dict[int, MemberInfo] = {}
        self.peers = Peers(
            rank, cluster_id, secret, self.loop, self.attachments, self.arena.fd_readonly, self
        )
        self._links = self.peers.links
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._errand_thread: threading.Thread | None = None
        self._errand_lock = threading.Lock()
        self._user_errands: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._ticking = False
        self._live_after_collection = 0
        self.path_told = list(sys.path)
        self.boards: dict[int, int] = {}  # rank: where its arena shows what it runs
        self._unshared: deque[tuple[int, Outgoing]] = deque()
        self.at_close: Callable[[], object] | None = None
        self.ledger: Any = None
        self.closed = False
        self.refusing = False
        """Shut down: calls under way finish, no new one is taken."""
        self._handlers: dict[type, Callable[[int, Link, Any], None]] = {
            messages.Call: self._on_call,
            messages.Result: self._on_result,
            messages.Failure: self._on_failure,
            messages.Cancel: self._on_cancel,
            messages.Parked: self._on_parked,
            messages.Lend: self._on_lend,
            messages.Return: self._on_return,
            messages.ArenaDescriptor: self._on_arena,
            messages.Members: self._on_members,
            messages.LedgerPull: self._on_ledger_pull,
            messages.Unshare: self._on_unshare,
            messages.Path: self._on_path,
        }

    # --- sending ----------------------------------------------------------------------------------

    def post(
        self,
        rank: int,
        message: Message,
        fds: Sequence[int] = (),
        *,
        kind: str = "control",
        cause: CallId | None = None,
        parent: CallId | None = None,
        label: str = "",
        connect: bool = True,
    ) -> bool:
        """Send a message; False when that process is gone. Opens the link if there is none."""
        link = self._links.get(rank)
        if link is None:
            if not connect:
                return False
            if self.loop.reads_here:
                kept = [os.dup(fd) for fd in fds]
                self.errand(
                    lambda: self._post_later(rank, message, kept, kind, cause, parent, label)
                )
                return True
            link = self._open(rank)
            if link is None:
                return False
        control = messages.encode(message)
        now = time.monotonic_ns()
        # Before it is sent: whoever has the message may ask for the book at once.
        self.book.note(
            kind, cause, parent, self.rank, rank, link.medium, "moved", 1, len(control), now, now,
            label, "",
        )  # fmt: skip
        try:
            link.send(self.rank, rank, control, b"", fds)
        except errors.LinkClosed:
            self.book.note(
                kind, cause, parent, self.rank, rank, link.medium, "moved", -1, -len(control), now,
                now, label, "not sent: the link had ended",
            )  # fmt: skip
            return False
        return True

    def _post_later(
        self,
        rank: int,
        message: Message,
        fds: list[int],
        kind: str,
        cause: CallId | None,
        parent: CallId | None,
        label: str,
    ) -> None:
        try:
            self.post(rank, message, fds, kind=kind, cause=cause, parent=parent, label=label)
        finally:
            for fd in fds:
                os.close(fd)

    def _open(self, rank: int) -> Link | None:
        member = self.members.get(rank)
        if member is None or member.state in ("dead", "gone") or self.closed:
            return None
        if member.state == "starting" or not member.address:
            self.wait(lambda: self._known(rank))
            member = self.members[rank]
            link = self._links.get(rank)
            if link is not None or member.state != "ready":
                return link
        try:
            return self.peers.open(rank, member.address)
        except (errors.LinkClosed, errors.HandshakeError, OSError):
            return None

    def _known(self, rank: int) -> bool:
        member = self.members.get(rank)
        return self.closed or member is None or member.state != "starting"

    def tell_path(self) -> None:
        """Have workers look for modules where this program does, from the next call on."""
        self.path_told = list(sys.path)
        for rank in [rank for rank in list(self._links) if rank != self.rank]:
            self.post(rank, messages.Path(tuple(self.path_told)), connect=False)

    def _on_path(self, source: int, _link: Link, path: messages.Path) -> None:
        if source == 1:
            sys.path[:] = path.path

    def unshare(self, number: int, outgoing: Outgoing) -> None:
        """The last handle of a shared object is gone; called by a finalizer, so it only takes a note."""
        self._unshared.append((number, outgoing))
        self.expect_settling()

    def when_known(self, values: Iterable[object], action: Callable[[], None]) -> bool:
        """Have `action` run once every part of these values is known; False if they are already."""
        waiting = [part for v in values if type(v) is Outgoing for part in v.waiting]
        if not waiting:
            return False
        remaining = [len(waiting)]
        lock = threading.Lock()

        def known() -> None:
            with lock:
                remaining[0] -= 1
                last = not remaining[0]
            if last:
                # The thread that makes a value known may be reading: sending must not wait there.
                self.errand(action)

        for part in waiting:
            # Taken out, or the part and what waits for it would keep each other alive.
            register, part.waits_for = part.waits_for, None
            assert register is not None
            register(known)
        return True

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block until `ready()`; a task gives up its slot meanwhile. False after `timeout_s`."""
        if self.executor.inline:
            return self.executor.run_here(ready, timeout_s)
        task = context.current_task()
        if task is None:
            try:
                return self.loop.wait(ready, timeout_s)
            except KeyboardInterrupt:
                # The terminal's Ctrl-C reaches this program only: stop what it has started elsewhere.
                self.outcalls.stop_all()
                raise
        if ready():
            return True
        executor = task.process.executor
        executor.park(task)
        try:
            # An exception set from outside would not end the wait, and might hit the loop's own code.
            in_time = self.loop.wait(lambda: task.interrupted or ready(), timeout_s)
        finally:
            executor.unpark(task)
        if task.interrupted and not ready():
            raise KeyboardInterrupt
        return in_time

    def check_usable(self) -> None:
        """Raise if the cluster cannot take a call from here."""
        if self._forks != forks.count:
            self.check_not_forked()
        if self.closed or self.refusing:
            raise errors.ClusterClosed("this cluster was closed; make a new one")

    @property
    def forked(self) -> bool:
        """Whether this is a child that was forked after the process joined its cluster."""
        return self._forks != forks.count

    def check_not_forked(self) -> None:
        """Raise in a forked child of the process."""
        if self.forked:
            raise errors.ForkedError(
                f"this process (pid {os.getpid()}) was forked from rank {self.rank} (pid {self.pid}), "
                "and the cluster stayed there. Make a cluster of its own here, or send calls from the "
                "parent."
            )

    @property
    def may_not_block(self) -> bool:
        """Whether the calling thread is one that others wait for."""
        return self.loop.reads_here or threading.current_thread() is self._errand_thread

    def user_errand(self, action: Callable[[], None]) -> None:
        """Run code of the user's soon, in a thread that nothing of ours waits for."""
        with self._errand_lock:
            if self._user_errands is None:
                self._user_errands = queue.SimpleQueue()
                threading.Thread(
                    target=_work_off,
                    args=(self._user_errands,),
                    name="onehop-callbacks",
                    daemon=True,
                ).start()
        self._user_errands.put(action)

    def errand(self, action: Callable[[], None]) -> None:
        """Run `action`, which is ours, soon in a thread that may block."""
        if self._errand_thread is None:
            with self._errand_lock:
                if self._errand_thread is None:
                    self._errand_thread = threading.Thread(
                        target=_work_off, args=(self._errands,), name="onehop-errands", daemon=True
                    )
                    self._errand_thread.start()
        self._errands.put(action)

    # --- what arrives -----------------------------------------------------------------------------

    def on_frames(self, link: Link, frames: list[Frame]) -> None:
        """Carry out each message, in order."""
        decode = messages.decode
        handlers = self._handlers
        for frame in frames:
            message = decode(frame.control)
            handler = handlers.get(type(message))
            if handler is None:
                self.observer.message(self, frame.source, message)
            else:
                handler(frame.source, link, message)

    def _on_call(self, source: int, _link: Link, call: messages.Call) -> None:
        receive = self.transfers.receive
        function = call.function if type(call.function) is str else receive(call.function)  # type: ignore[arg-type]
        arguments = None if call.arguments is None else receive(call.arguments)
        self.executor.accept(Task(self, source, call, function, arguments))

    def _on_result(self, source: int, _link: Link, result: messages.Result) -> None:
        received = self.transfers.receive(result.value)
        if result.returns:
            self.transfers.returned(source, result.returns)
        self.outcalls.answered(source, result.serial, Answer(received, run_ns=result.run_ns))

    def _on_failure(self, source: int, _link: Link, failure: messages.Failure) -> None:
        self.outcalls.answered(
            source, failure.serial, Answer(trouble=failure.trouble, run_ns=failure.run_ns)
        )

    def _on_cancel(self, source: int, _link: Link, cancel: messages.Cancel) -> None:
        self.executor.cancel((source, cancel.serial), cancel.interrupt)

    def _on_parked(self, source: int, _link: Link, parked: messages.Parked) -> None:
        self.outcalls.parked(source, parked.serial)

    def _on_lend(self, _source: int, _link: Link, lend: messages.Lend) -> None:
        self.transfers.lent_by(lend)

    def _on_return(self, source: int, _link: Link, back: messages.Return) -> None:
        self.transfers.returned(source, back.segments)

    def _on_arena(self, _source: int, link: Link, arena: messages.ArenaDescriptor) -> None:
        (fd,) = link.take_fds(1)
        if self.attachments.has_arena(arena.owner):
            os.close(fd)
        else:
            self.attachments.add_arena(arena.owner, fd)

    def _on_unshare(self, source: int, _link: Link, unshare: messages.Unshare) -> None:
        self.transfers.shares.drop(source, unshare.shares, own=False)
        self.expect_settling()

    def _on_members(self, _source: int, _link: Link, news: messages.Members) -> None:
        for member in news.members:
            self.update_member(member)

    def update_member(self, member: MemberInfo) -> None:
        """Take news of a member, from the director."""
        self.members[member.rank] = member
        if member.state == "ready" and member.rank != 1:
            self.outcalls.join(member.rank, self.executor.slots)
        elif member.state != "ready":
            self.outcalls.leave(member.rank)
        if member.state in ("dead", "gone"):
            self.executor.caller_lost(member.rank)
            self.outcalls.lose(member.rank, member.reason or "it left the cluster")
        self.loop.ring_ready()

    def _on_ledger_pull(self, source: int, _link: Link, pull: messages.LedgerPull) -> None:
        links = tuple(
            (link.peer, link.medium, link.sent_bytes, link.received_bytes)
            for link in self.peers.all_links
        )
        exported = self.book.export(since=pull.since)
        self.post(source, messages.LedgerNews(pull.serial, exported, links))

    # --- answering --------------------------------------------------------------------------------

    def answer(self, task: Task, outcome: Outgoing | messages.Trouble, run_ns: int) -> None:
        """Send what a task came to; called by the thread that ran it."""
        try:
            if self._answer(task, outcome, run_ns) or task.caller != 1:
                self.board.end(task.cell)
            # Otherwise this process is cut off from its director, which has to see that the task had begun.
        except Exception as error:
            # Whatever cannot be sent, the caller hears that; the worker lives on.
            if task.call.serial:
                trouble = describe(self, "unencodable", error)
                self.post(
                    task.caller, messages.Failure(task.call.serial, trouble, run_ns), kind="result",
                    cause=task.id, parent=task.call.parent,
                )  # fmt: skip
            self.board.end(task.cell)

    def _answer(self, task: Task, outcome: Outgoing | messages.Trouble, run_ns: int) -> bool:
        """Send the answer, or have it sent later; False if the caller cannot be reached."""
        flush_output()
        serial = task.call.serial
        if not serial:
            if type(outcome) is messages.Trouble:
                self._report(task, outcome)
            self._settle()
            return True
        if type(outcome) is messages.Trouble:
            failure = messages.Failure(serial, outcome, run_ns)
            sent = self.post(
                task.caller, failure, kind="result", cause=task.id, parent=task.call.parent
            )
            self._settle()
            return sent
        assert isinstance(outcome, Outgoing)
        if outcome.parts and self.when_known(
            (outcome,), lambda: self.answer(task, outcome, run_ns)
        ):
            return True
        try:
            parcel = outcome.complete()
        except BaseException as error:
            return self._answer(task, describe(self, "raised", error), run_ns)
        returns: tuple[tuple[int, int], ...] = ()
        if outcome.parcel.segments or outcome.parts:
            self.transfers.mention(
                parcel, task.caller, "result", task.id, task.call.parent, "", outcome
            )
            outcome.close()
        if self.transfers.unsettled:
            returns = self.transfers.settle(to=task.caller)
        sent = self.post(
            task.caller, messages.Result(serial, parcel, run_ns, returns), kind="result",
            cause=task.id, parent=task.call.parent,
        )  # fmt: skip
        if self.transfers.unsettled:
            self._settle()
        return sent

    def answer_unstarted(self, task: Task) -> None:
        """Tell the caller of a cancelled task that it will not run."""
        if task.call.serial:
            trouble = messages.Trouble(
                "interrupted",
                "",
                "cancelled before it started",
                "",
                self.rank,
                self.host,
                None,
                False,
            )
            self.post(
                task.caller, messages.Failure(task.call.serial, trouble), kind="result",
                cause=task.id, parent=task.call.parent, connect=False,
            )  # fmt: skip

    def _report(self, task: Task, trouble: messages.Trouble) -> None:
        try:
            sys.stderr.write(
                f"{task.label} was cast, so nobody gets its error:\n{trouble.traceback}"
            )
            sys.stderr.flush()
        except Exception:
            return  # the task replaced or closed its streams

    def _settle(self) -> None:
        self.transfers.settle()
        self.attachments.settle()
        self.book.fold()
        if self.transfers.unsettled:
            self.expect_settling()

    def expect_settling(self) -> None:
        """Something is held now, which has to be given back once it has died."""
        # Objects may die at any time, and their finalizers can do no more than append to a list.
        if not self._ticking:
            self._ticking = True
            self.loop.after(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._ticking = False
        if self.closed:
            return
        numbers: list[int] = []
        while self._unshared:
            number, outgoing = self._unshared.popleft()
            numbers.append(number)
            outgoing.close()
        if numbers:
            self.transfers.shares.drop(self.rank, numbers, own=True)
            for rank in [rank for rank in list(self._links) if rank != self.rank]:
                self.post(rank, messages.Unshare(tuple(numbers)), connect=False)
        if not self.executor.tasks and self.attachments.has_live:
            self._collect_once()
        self._settle()
        if self.store.settle():
            self.expect_settling()

    def _collect_once(self) -> None:
        # Idle, and something that arrived is still alive: kept by the user, or by a cycle that the young
        # generation's collection after its task did not reach. One full collection tells which.
        live = self.attachments.counts()["live"]
        if self.rank != 1 and live != self._live_after_collection:
            gc.collect()
            self._live_after_collection = self.attachments.counts()["live"]

    # --- membership -------------------------------------------------------------------------------

    def met(self, hello: messages.Hello, link: Link) -> None:
        """A process has proven itself over a new link."""
        self.boards[hello.rank] = hello.board
        self.observer.met(self, hello)

    def on_link_lost(self, rank: int, reason: str) -> None:
        """The last link to a process ended: its calls are lost, once somebody said why."""
        if not self.closed:
            self.observer.lost(self, rank, reason)

    def on_gone(self, rank: int) -> None:
        """Nothing of that process can read our arena any more."""
        self.transfers.forget_peer(rank)

    # --- the end ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read."""
        self.loop.start()

    def close(self, reason: str = "the cluster was closed") -> None:
        """Leave the cluster; pending calls end as cancelled."""
        if self.closed:
            return
        self.closed = True
        if self.at_close is not None:
            self.at_close()
        self.outcalls.end_all(reason)
        self.executor.close()
        if self._user_errands is not None:
            self._user_errands.put(None)
        if self._errand_thread is not None:
            self._errands.put(None)
            if threading.current_thread() is not self._errand_thread:
                self._errand_thread.join(timeout=2.0)
        self.loop.close()
        self.peers.close()
        self.attachments.close()
        self.store.close()
        self.board.close()
        self.arena.close()

    def abandon(self) -> None:
        """In a forked child: let go of descriptors; `check_usable` refuses from now on."""
        self.closed = True
        self.loop.abandon()
        self.peers.abandon()


def _work_off(errands: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """Carry out errands until None comes."""
    while (action := errands.get()) is not None:
        try:
            action()
        except BaseException:
            import traceback

            traceback.print_exc()
        action = None
