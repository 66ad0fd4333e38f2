"""The director's side of membership: starts workers, tells everybody who is there, replaces the dead.

Must never know what users hold, nor how an engine starts a process.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from onehop import errors
from onehop._contracts.engine import Engine
from onehop._protocol import membership, messages
from onehop._runtime.entry import Bootstrap
from onehop._runtime.interrupts import Interrupts
from onehop._runtime.process import Process
from onehop.ledger.ledger import Ledger

GRACE_S = 1.0
MOST_FAILED_STARTS = 3
PULL_S = 5.0
LAST_PULL_S = 0.2

EngineFactory = Callable[["Director"], Engine]


class Director:
    """One cluster, seen from the program that made it.

    Parameters
    ----------
    engine : callable
        Makes the engine, given this object (a Poller by `process.loop`, and the engine's Events).
    slots : int
        Tasks that a worker runs at a time.
    memory_limit : int or None
        Bytes that each process may keep in shared memory.
    show : callable or None
        Gets (rank, stream name, line) of what workers print.
    version : str
        Of this library; workers with another one are refused.
    """

    def __init__(
        self,
        engine: EngineFactory,
        *,
        slots: int = 1,
        memory_limit: int | None = None,
        show: Callable[[int, str, str], None] | None = None,
        version: str = "",
    ) -> None:
        self._secret = os.urandom(32)
        self.cluster_id = os.urandom(4).hex()
        self._slots = slots
        self._memory_limit = memory_limit
        self._show = show
        self._version = version
        self.membership = membership.Membership()
        own = self.membership.admit()
        self.process = Process(
            own.rank, self.cluster_id, self._secret, self, slots=slots, memory_limit=memory_limit,
            name="director",
        )  # fmt: skip
        process = self.process
        host = process.host
        self.membership.ready(own.rank, self.cluster_id, host, process.pid)
        process.peers.hello = messages.Hello(
            own.rank, process.pid, host, "", process.peers.listener.address,
            ".".join(map(str, sys.version_info[:3])), version, process.board.offset,
        )  # fmt: skip
        self._info(own.rank, address=process.peers.listener.address)
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._failed_starts = 0
        self._doomed: dict[int, str] = {}
        self._last_words: dict[int, list[str]] = {}
        self._pulls: dict[int, set[int]] = {}
        self._audits: dict[int, tuple[tuple[int, str, int, int], ...]] = {}
        self._pull_serial = 0
        self._path_at_launch: list[str] = []
        self.closing = False
        self.ledger = Ledger(process.book, rank=1, pull=self.pull_ledgers, host_of=self.host_of)
        self._interrupts = Interrupts(process.loop)
        process.start()
        self.engine = engine(self)
        _abandon_in_children(self)

    # --- members ----------------------------------------------------------------------------------

    def _info(self, rank: int, address: str = "") -> messages.MemberInfo:
        member = self.membership.member(rank)
        known = self.process.members.get(rank)
        info = messages.MemberInfo(
            rank, member.state, member.pid, member.host, member.host_id,
            address or (known.address if known is not None else ""), member.reason,
        )  # fmt: skip
        self.process.members[rank] = info
        return info

    def host_of(self, rank: int) -> str:
        """Name of the host of a process, also of one that is gone."""
        info = self.process.members.get(rank)
        return info.host if info is not None else ""

    def launch(self, count: int) -> list[int]:
        """Start workers; returns their ranks at once."""
        ranks = []
        with self._lock:
            for _ in range(count):
                member = self.membership.admit(host=self.engine.host)
                self._tell(self._info(member.rank))
                ranks.append(member.rank)
        director = self.process.members[1]
        self._path_at_launch = list(sys.path)
        for rank in ranks:
            bootstrap = Bootstrap(
                self.cluster_id, self._secret, rank, director, os.getpid(), list(sys.path),
                os.getcwd(), self._slots, self._memory_limit, self._version,
            )  # fmt: skip
            self.engine.launch(rank, msgspec.msgpack.encode(bootstrap))
        return ranks

    def present(self) -> list[int]:
        """Ranks of workers that are there or about to be."""
        return [
            info.rank
            for info in list(self.process.members.values())
            if info.rank != 1 and info.state in ("starting", "ready")
        ]

    def wait_ready(self, ranks: list[int]) -> None:
        """Block until each of these workers has joined or failed."""
        members = self.process.members
        self.process.wait(lambda: all(members[rank].state != "starting" for rank in ranks))

    def met(self, process: Process, hello: messages.Hello) -> None:
        """A worker has joined (called by the thread that met it)."""
        with self._lock:
            try:
                member = self.membership.member(hello.rank)
            except errors.ProtocolError:
                process.peers.drop(hello.rank, "nobody with that rank was started")
                return
            if member.state != membership.STARTING:
                return
            self._failed_starts = 0
            self.membership.ready(hello.rank, self.cluster_id, hello.host, hello.pid)
            news = self._info(hello.rank, address=hello.address)
            others = list(process.members.values())
            process.post(hello.rank, messages.Members(tuple(others)), connect=False)
            if process.path_told != self._path_at_launch:
                path = messages.Path(tuple(process.path_told))
                process.post(hello.rank, path, connect=False)
            self._tell(news)
            process.update_member(news)
            self._ready.notify_all()
        process.loop.wake()

    def _tell(self, news: messages.MemberInfo) -> None:
        for rank in self.present():
            if rank != news.rank:
                self.process.post(rank, messages.Members((news,)), connect=False)

    def lost(self, process: Process, rank: int, reason: str) -> None:
        """The link to a worker ended; the engine says soon how, or it is made to end."""
        if not self.closing:
            process.loop.after(GRACE_S, lambda: self.engine.kill(rank))

    def stuck(self, process: Process, rank: int, label: str) -> None:
        """A worker did not react to an interruption: native code holds it."""
        if self.closing or rank in self._doomed or rank == 1:
            return
        self._doomed[rank] = f"it was stuck in native code in {label or 'a task'} and was ended"
        self.engine.kill(rank)

    # --- what the engine reports ------------------------------------------------------------------

    def printed(self, rank: int, stream: str, line: str) -> None:
        """A worker wrote a line."""
        if self._show is not None:
            self._show(rank, stream, line)

    def exited(self, rank: int, how: str, last_lines: list[str]) -> None:
        """A worker has ended."""
        with self._lock:
            member = self.membership.member(rank)
            if member.over:
                return
            asked = member.state == membership.LEAVING
            was_starting = member.state == membership.STARTING
            reason = self._doomed.pop(rank, how)
            if was_starting and not self.closing:
                self._failed_starts += 1
            if last_lines and not asked:
                reason += "; its last lines:\n" + "\n".join(f"  {line}" for line in last_lines)
            if asked:
                self.membership.gone(rank, "it was removed")
            else:
                self.membership.dead(rank, reason)
            news = self._info(rank)
            self._pulls = {
                serial: asked_ranks - {rank} for serial, asked_ranks in self._pulls.items()
            }
            if not (asked or self.closing):
                self.ledger.mark_lost(rank)
            process = self.process
            process.peers.drop(rank, reason)
            replacement: list[int] = []
            if not self.closing:
                self._tell(news)
                wanted = not process.refusing or len(process.calls) > 0
                if not asked and wanted and self._failed_starts < MOST_FAILED_STARTS:
                    replacement = self.launch(1)
            process.update_member(news)
            if not self.closing and not self.present():
                self._nobody_left(reason)
            self._ready.notify_all()
            if not asked and not self.closing:
                # Elsewhere, since a warning may be made an exception, or handled by the user's code.
                process.user_errand(lambda: self._name_the_loss(rank, reason, replacement))
        process.loop.wake()

    def _name_the_loss(self, rank: int, reason: str, replacement: list[int]) -> None:
        instead = f"rank {replacement[0]} takes its place" if replacement else "nobody replaces it"
        text = (
            f"rank {rank} on {self.host_of(rank)} has died ({reason}); {instead}. Lost with it: module "
            "state, globals and caches of its process."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _nobody_left(self, reason: str) -> None:
        process = self.process
        for entry in process.scheduler.clear():
            process.outcalls.fail_unsent(
                entry,
                errors.WorkerDied(f"no worker is left to run it; the last one: {reason}", False),
            )

    def remove(self, ranks: list[int]) -> None:
        """Ask workers to end after their current tasks; blocks until they have."""
        with self._lock:
            for rank in ranks:
                self.membership.leave(rank, "it was removed")
                news = self._info(rank)
                self._tell(news)
                self.process.update_member(news)
        process = self.process
        members = process.members
        process.wait(lambda: not any(process.calls.sent_to(rank) for rank in ranks))
        self.pull_ledgers()
        for rank in ranks:
            if not process.post(rank, messages.Shutdown("removed"), connect=False):
                self.engine.kill(rank)
        if not process.wait(
            lambda: all(members[rank].state in ("gone", "dead") for rank in ranks), 5.0
        ):
            for rank in ranks:
                self.engine.kill(rank)
            process.wait(lambda: all(members[rank].state in ("gone", "dead") for rank in ranks))

    # --- the ledger -------------------------------------------------------------------------------

    def pull_ledgers(self, timeout_s: float = PULL_S) -> None:
        """Fetch what the workers have recorded; those that do not answer are named by the ledger."""
        process = self.process
        if process.closed or process.pid != os.getpid():
            return
        while True:
            with self._lock:
                self._pull_serial += 1
                serial = self._pull_serial
                asked = {
                    info.rank
                    for info in list(process.members.values())
                    if info.rank != 1 and info.state in ("ready", "leaving")
                }
                self._pulls[serial] = asked.copy()
            self._more = False
            for rank in sorted(asked):
                pull = messages.LedgerPull(serial, self.ledger.following(rank))
                if not process.post(rank, pull, connect=False):
                    self._pulls[serial].discard(rank)
            process.wait(lambda serial=serial: not self._pulls[serial], timeout_s)  # type: ignore[misc]
            self._pulls.pop(serial, None)
            if not self._more:
                return

    def message(self, process: Process, source: int, message: messages.Message) -> None:
        """Take ledger news."""
        if type(message) is messages.LedgerNews:
            if self.ledger.merge(source, message.book):
                self._more = True
            self._audits[source] = message.links
            waiting = self._pulls.get(message.serial)
            if waiting is not None:
                waiting.discard(source)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, grace_s: float = GRACE_S) -> None:
        """End every worker and everything that is ours."""
        process = self.process
        if self.closing or process.pid != os.getpid():
            return
        # Their last news; one that does not answer at once is too busy to be waited for.
        self.pull_ledgers(LAST_PULL_S)
        self.closing = True
        for rank in self.present():
            if not process.post(rank, messages.Shutdown("closed"), connect=False):
                self.engine.kill(rank)
        self.engine.close(grace_s)
        process.close()
        self._interrupts.close()


def _abandon_in_children(director: Director) -> None:
    reference = weakref.ref(director)

    def in_child() -> None:
        parent: Any = reference()
        if parent is not None and not parent.process.closed:
            parent.process.abandon()
            parent.engine.abandon()

    os.register_at_fork(after_in_child=in_child)
