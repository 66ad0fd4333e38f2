"""Processes and hosts of a cluster, as users hold them.

Must never know how a call is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from onehop import errors
from onehop._protocol import messages
from onehop._runtime.parcels import Part
from onehop._runtime.transfers import MEMBER, Transfers
from onehop.calls import Ask, Future
from onehop.options import PLAIN

if TYPE_CHECKING:
    from onehop.cluster import Cluster

T = TypeVar("T")


class Worker:
    """One process of a cluster, to call.

    Obtained as ``cluster[rank]``. May be passed to tasks, where it stands for the same process.
    """

    __slots__ = ("_cluster", "rank")

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank

    def call(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run a function there and wait for its value.

        Blocks; a task that calls gives up its slot meanwhile.

        Raises
        ------
        RemoteError
            It raised; also an instance of the original type where that can be rebuilt.
        CallLost
            Its process died.

        Examples
        --------
        >>> import onehop
        >>> with onehop.Cluster(2) as cluster:
        ...     cluster[2].call(lambda: onehop.current()[3].call(onehop.rank))
        3
        """
        cluster = self._cluster
        process = cluster._process
        ask = Ask()
        options = cluster._options
        if options is PLAIN:
            entry = process.call(self.rank, function, args, kwargs, ask)
        else:
            entry = process.call(
                self.rank, function, args, kwargs, ask, flags=options.flags,
                retries=options.retries, timeout_s=options.timeout,
            )  # fmt: skip
        try:
            process.wait(ask.ready)
        except BaseException:
            # Nobody will take the answer; left alone, a call that may not be waited for goes on nesting.
            process.outcalls.stop(entry)
            raise
        answer = ask.answer
        if answer is None:
            raise errors.ClusterClosed("the cluster was closed while the call was waited for")
        if options.on_error is None:
            return answer.value(process.transfers, entry)  # type: ignore[no-any-return]
        try:
            return answer.value(process.transfers, entry)  # type: ignore[no-any-return]
        except Exception as error:
            return options.on_error(error)  # type: ignore[no-any-return]

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a function there; returns at once."""
        return self._cluster._submit(self.rank, function, args, kwargs)

    def cast(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Run a function there and never hear of it; an error is printed there."""
        cluster = self._cluster
        cluster._process.call(self.rank, function, args, kwargs, None, flags=cluster._options.flags)

    def options(self, **options: Any) -> Worker:
        """Return the same worker with options set; see `Cluster.options`."""
        return self._cluster.options(**options)[self.rank]

    @property
    def host(self) -> Host:
        """The host it is on."""
        return self._cluster.host_of(self.rank)

    @property
    def pid(self) -> int:
        """Its process id on its host; waits until it has joined."""
        return self._cluster._member(self.rank).pid

    def __repr__(self) -> str:
        info = self._cluster._process.members.get(self.rank)
        where = f" on {info.host} (pid {info.pid}), {info.state}" if info is not None else ""
        return f"<onehop process {self.rank}{where}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Worker)
            and other.rank == self.rank
            and other._cluster._process is self._cluster._process
        )

    def __hash__(self) -> int:
        return hash((self.rank, id(self._cluster._process)))

    def _onehop_part(self, transfers: Transfers) -> Part:
        self._cluster._check_same(transfers)
        return Part(messages.Parcel(share=MEMBER, share_owner=self.rank))

    def __reduce__(self) -> Any:
        raise TypeError("a onehop worker can be passed to calls of its own cluster only")


class Host:
    """Processes that share memory, found by trying."""

    __slots__ = ("name", "processes")

    def __init__(self, name: str, processes: list[Worker]) -> None:
        self.name = name
        self.processes = processes

    @property
    def ranks(self) -> list[int]:
        """Ranks of its processes."""
        return [worker.rank for worker in self.processes]

    def __repr__(self) -> str:
        return f"<host {self.name}: ranks {', '.join(map(str, self.ranks))}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Host) and self.processes == other.processes

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.ranks)))
