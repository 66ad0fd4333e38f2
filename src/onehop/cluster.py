"""What users hold: clusters, workers and hosts.

Everything here is a thin, documented surface: encoding, sending and waiting are the runtime's.
Longer than most files: half of it is what users read about each method.
Must never know how bytes move or processes start.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from onehop import errors, maps
from onehop._contracts.version import VERSION
from onehop._protocol import messages
from onehop._runtime import context
from onehop._runtime.director import Director
from onehop._runtime.parcels import Part
from onehop._runtime.transfers import HERE, Transfers
from onehop.calls import Future, Taken
from onehop.limits import cores, threads_per_worker
from onehop.members import Host, Worker
from onehop.options import PLAIN
from onehop.sharing import Shared

if TYPE_CHECKING:
    from onehop._runtime.process import Process
    from onehop.ledger import Ledger
    from onehop.topology import Route, Topology

T = TypeVar("T")


class Cluster(concurrent.futures.Executor):
    """Worker processes, and the program that made them (the director, rank 1).

    A `concurrent.futures.Executor`: code written for one works unchanged. A value that is passed,
    captured or returned is copied in meaning, but each large buffer in it moves at most once, however
    many calls name it; what was sent before and has not changed since is not sent again.

    Parameters
    ----------
    n : int, optional
        Workers to start on this machine; by default one for each core that this process may use. With 0
        every call runs in this process, at once, for debugging; values are still passed as copies.
    topology : str
        Only ``"all_to_all"`` on one machine: links between workers are opened on first use.
    memory_limit : int, optional
        Bytes of shared memory that each process may use for what it sends. By default as much as the
        machine and the control group of this process allow.
    output : bool
        Whether what workers print, warn and log is written to this program's streams, each line with
        the rank.
    threads : int
        Tasks that a worker runs at the same time.
    blas_threads : int, optional
        Threads that numerical libraries may use in each worker; by default the cores divided by the
        number of workers, unless the environment sets them already (``OMP_NUM_THREADS`` …).

    Examples
    --------
    >>> import onehop
    >>> with onehop.Cluster(2) as cluster:
    ...     list(cluster.map(lambda x: x * x, range(4)))
    [0, 1, 4, 9]
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        topology: str = "all_to_all",
        memory_limit: int | None = None,
        output: bool = True,
        threads: int = 1,
        blas_threads: int | None = None,
    ) -> None:
        count = cores() if n is None else _whole(n, "the number of workers", 0)
        _whole(threads, "threads", 1)
        if blas_threads is not None:
            _whole(blas_threads, "blas_threads", 1)
        if memory_limit is not None:
            _whole(memory_limit, "memory_limit", 1)
        if topology != "all_to_all":
            raise errors.TopologyError(
                f"topology {topology!r} is not there yet: on one machine every process reaches every "
                "other directly (all_to_all)"
            )
        from onehop.engines.local import LocalEngine

        environment = threads_per_worker(max(1, count), blas_threads)
        director = Director(
            lambda d: LocalEngine(d.process.loop, d, environment),
            slots=threads,
            memory_limit=memory_limit,
            show=_show if output else None,
            version=VERSION,
        )
        self._director: Director | None = director
        self._process: Process = director.process
        self._process.ledger = director.ledger
        self._options = PLAIN
        self._adopt()
        self._finalizer = weakref.finalize(self, _close, director)
        self._finalizer.atexit = False
        _close_at_exit(director)
        self._process.executor.inline = count == 0
        director.launch(count)

    def _adopt(self) -> None:
        transfers = self._process.transfers
        transfers.encoder.special = SPECIAL
        process = self._process
        transfers.here = lambda rank: member_of(process, rank)

    @classmethod
    def _of(cls, process: Process, director: Director | None = None) -> Cluster:
        self = cls.__new__(cls)
        self._director = director
        self._process = process
        self._options = PLAIN
        if SPECIAL is not process.transfers.encoder.special:
            self._adopt()
        return self

    @property
    def _here(self) -> bool:
        """Whether this cluster has no workers, and calls run in the thread that makes them."""
        return self._process.executor.inline

    # --- members ----------------------------------------------------------------------------------

    def __getitem__(self, rank: int) -> Worker:
        """Return the process with that rank; 1 is the director."""
        if rank not in self._process.members:
            raise IndexError(
                f"no process has rank {rank!r}; there are {self._ranks(include_director=True)}"
            )
        return Worker(self, rank)

    def _ranks(self, include_director: bool) -> list[int]:
        return sorted(
            info.rank
            for info in list(self._process.members.values())
            if info.state in ("starting", "ready") and (include_director or info.rank != 1)
        )

    def _member(self, rank: int) -> messages.MemberInfo:
        members = self._process.members
        self._process.wait(lambda: members[rank].state != "starting")
        return members[rank]

    @property
    def workers(self) -> list[Worker]:
        """Every process but the director, by rank."""
        return [Worker(self, rank) for rank in self._ranks(include_director=False)]

    @property
    def processes(self) -> list[Worker]:
        """The director and the workers, by rank."""
        return [Worker(self, rank) for rank in self._ranks(include_director=True)]

    @property
    def hosts(self) -> list[Host]:
        """The hosts, each with its processes; waits until every worker has joined."""
        groups: dict[tuple[str, str], list[Worker]] = {}
        for worker in self.processes:
            info = self._member(worker.rank)
            if info.state == "ready":
                groups.setdefault((info.host_id, info.host), []).append(worker)
        return [Host(name, processes) for (_, name), processes in groups.items()]

    def host_of(self, rank: int) -> Host:
        """The host of a process."""
        for host in self.hosts:
            if rank in host.ranks:
                return host
        raise IndexError(f"no process has rank {rank}; there are {self._ranks(True)}")

    def add_workers(self, n: int = 1) -> list[Worker]:
        """Start `n` more workers on this machine; returns once they have joined.

        Raises
        ------
        WorkerDied
            One of them could not start.
        """
        director = self._own_director("add_workers")
        ranks = director.launch(_whole(n, "the number of workers", 1))
        director.wait_ready(ranks)
        for rank in ranks:
            info = self._process.members[rank]
            if info.state != "ready":
                raise errors.WorkerDied(f"worker {rank} did not start: {info.reason}", False)
        self._process.executor.inline = False
        return [Worker(self, rank) for rank in ranks]

    def remove_workers(self, *ranks: int | Worker) -> None:
        """End workers, after the calls that were sent to them; blocks until they have ended."""
        director = self._own_director("remove_workers")
        numbers = [rank.rank if isinstance(rank, Worker) else rank for rank in ranks]
        present = self._ranks(include_director=False)
        for rank in numbers:
            if rank not in present:
                raise ValueError(f"rank {rank!r} is no worker of this cluster; there are {present}")
        director.wait_ready(numbers)
        director.remove(numbers)

    def _own_director(self, verb: str) -> Director:
        if self._director is None:
            raise errors.OnehopError(
                f"{verb} can be called in the program that made the cluster only"
            )
        self._process.check_usable()
        return self._director

    # --- calls ------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a function on some worker: where its data is, then the least busy.

        Arguments and captured variables are taken before this returns.

        Returns
        -------
        Future
            The answer, now or later.

        Raises
        ------
        SerializationError, MemoryLimitError
            An argument cannot be encoded, or does not fit; nothing was sent.
        """
        return self._submit(0, function, args, kwargs)

    def _submit(
        self, target: int, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[T]:
        process = self._process
        options = self._options
        future: Future[T] = Future(process)
        if target == 0 and self._here:
            target = process.rank
        process.call(
            target, function, args, kwargs, future, flags=options.flags, retries=options.retries,
            timeout_s=options.timeout, on_entry=future.made,
        )  # fmt: skip
        if options.on_error is not None:
            maps.guarded(future, options.on_error)
        if self._here:
            process.wait(future.done)
        return future

    def map(
        self,
        function: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        batch_size: int | None = None,
        retries: int | None = None,
        on_error: Callable[[BaseException], Any] | None = None,
        progress: bool | str | None = None,
    ) -> Generator[T, None, None]:
        """Apply a function to each item, on all workers; yields the values in order.

        The function, with what it captures, is encoded once. An input with a length starts at once; any
        other is pulled as room appears. Tiny tasks are batched by how long they take.

        Parameters
        ----------
        function : callable
            Called with one item of each iterable.
        timeout : float, optional
            Seconds from now after which waiting for a value raises TimeoutError.
        batch_size, chunksize : int, optional
            Items sent together; chosen by the time they take if not given (`chunksize` 1 counts as not
            given, as it is the default of an executor).
        retries : int
            How often an item that raised, or whose worker died, is run again.
        on_error : callable, optional
            Gets the exception of an item and returns the value that stands for it.
        progress : bool or str
            Show a progress bar, under that name.

        Returns
        -------
        iterator
            Closing it cancels what has not been done.
        """
        options = self._options.merged(
            batch_size=batch_size if batch_size is not None else _chunk(chunksize),
            retries=retries, on_error=on_error, progress=progress,
        )  # fmt: skip
        run = maps.MapRun(self, function, iterables, options, timeout)
        return maps.ordered(run)

    def map_unordered(
        self, function: Callable[..., T], /, *iterables: Iterable[Any], **options: Any
    ) -> Iterator[T]:
        """As `map`, but yields each value as soon as it is there."""
        timeout = options.pop("timeout", None)
        run = maps.MapRun(self, function, iterables, self._options.merged(**options), timeout)
        return maps.unordered(run)

    def reduce(
        self,
        op: Callable[[T, T], T],
        function: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        **options: Any,
    ) -> T:
        """Combine ``function(x)`` over all items with an associative operation, keeping their order.

        Each worker folds its share; partial results stay where they are made, and are combined in
        pairs; only the last one comes here.

        Raises
        ------
        ValueError
            There is no item.

        Examples
        --------
        >>> import onehop, operator
        >>> with onehop.Cluster(2) as cluster:
        ...     cluster.reduce(operator.add, lambda x: x * x, range(10))
        285
        """
        total: T = maps.reduce(self, op, function, iterables, self._options.merged(**options))
        return total

    def everywhere(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Run a function once on every worker, and wait; returns the values by rank."""
        if self._here:
            return [self[self._process.rank].call(function, *args, **kwargs)]
        futures = [worker.submit(function, *args, **kwargs) for worker in self.workers]
        return [future.result() for future in futures]

    def share(self, value: T) -> Shared[T]:
        """Encode a value once, as one object that each worker builds once and gives to all its tasks.

        For objects whose many small parts are dear to rebuild for each task. A task gets the object in
        place of the handle; one that writes to its buffers ends with SharedObjectModified. It is freed
        when the handle and the tasks that use it are gone.
        """
        self._process.check_usable()
        return Shared(self._process, value)

    def options(
        self,
        *,
        retries: int | None = None,
        timeout: float | None = None,
        urgent: bool | None = None,
        on_error: Callable[[BaseException], Any] | None = None,
        progress: bool | str | None = None,
        batch_size: int | None = None,
    ) -> Cluster:
        """Return the same cluster with options for the calls made through it.

        Parameters
        ----------
        retries : int
            How often a call that raised, or whose worker died, is run again.
        timeout : float
            Seconds, from when a call is sent to its worker, until it ends with CallTimeout and its task
            is interrupted.
        urgent : bool
            Run at once, in a thread of its own, also while the worker is busy.
        on_error : callable
            Gets the exception and returns the value that stands for it.
        progress : bool or str
            Show a progress bar for maps.
        batch_size : int
            Items of a map that are sent together.
        """
        view = Cluster._of(self._process, self._director)
        view._owner = self  # type: ignore[attr-defined]  # a cluster must not end while a view is used
        view._options = self._options.merged(
            retries=retries, timeout=timeout, urgent=urgent, on_error=on_error, progress=progress,
            batch_size=batch_size,
        )  # fmt: skip
        return view

    # --- seeing -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What moved, was attached and was avoided between all processes of the cluster."""
        if self._director is None:
            raise errors.OnehopError("the ledger is kept by the program that made the cluster")
        return self._director.ledger

    def route(self, source: int, target: int) -> Route:
        """Return the way a message from one process to another takes.

        Examples
        --------
        >>> import onehop
        >>> with onehop.Cluster(2) as cluster:
        ...     print(cluster.route(2, 3))
        2 → 3
        """
        return self._topology().route(source, target)

    def _topology(self) -> Topology:
        from onehop.topology import all_to_all

        members = [
            (info.rank, info.host)
            for info in sorted(self._process.members.values(), key=lambda info: info.rank)
            if info.state in ("starting", "ready")
        ]
        return all_to_all(members)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers and free everything; outstanding calls end as cancelled."""
        self._own_end().close()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the cluster, as an Executor does.

        Parameters
        ----------
        wait : bool
            Whether to let outstanding calls finish first.
        cancel_futures : bool
            Whether to cancel the calls that have not been sent to a worker.
        """
        director = self._own_end()
        process = self._process
        if process.closed or process.pid != os.getpid():
            return
        process.refusing = True
        if cancel_futures:
            for entry in process.calls.all():
                if not entry.target:
                    process.outcalls.stop(entry)
        if wait:
            process.wait(lambda: not len(process.calls))
            director.close()
        elif not len(process.calls):
            director.close()
        else:
            threading.Thread(
                target=_close_when_idle, args=(director,), name="onehop-closer", daemon=True
            ).start()

    def _own_end(self) -> Director:
        if self._director is None:
            raise errors.OnehopError("a cluster is closed by the program that made it")
        return self._director

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.shutdown(wait=True)
        else:
            self.close()

    def __repr__(self) -> str:
        if self._process.closed:
            return "<onehop cluster, closed>"
        return (
            f"<onehop cluster: rank {self._process.rank} of {self._ranks(include_director=True)}>"
        )

    def _check_same(self, transfers: Transfers) -> None:
        if transfers is not self._process.transfers:
            raise errors.SerializationError(
                f"{self!r} cannot be passed to another cluster: its links and memory stay here"
            )

    def _onehop_part(self, transfers: Transfers) -> Part:
        self._check_same(transfers)
        return Part(messages.Parcel(share=HERE))

    def __reduce__(self) -> Any:
        raise TypeError("a onehop cluster can be passed to its own calls only")


SPECIAL: frozenset[type] = frozenset((Cluster, Worker, Future, Shared, Taken))


def member_of(process: Process, rank: int) -> Cluster | Worker:
    """What stands for the cluster (rank 0) or one of its processes in `process`."""
    cluster = Cluster._of(process)
    return Worker(cluster, rank) if rank else cluster


def current() -> Cluster:
    """Return the cluster that the running task belongs to.

    Raises
    ------
    OnehopError
        This code runs in no task.
    """
    process = context.current_process()
    if process is None:
        raise errors.OnehopError(
            "onehop.current() is the cluster of the running task, and no task runs here; use the "
            "cluster that you made"
        )
    return Cluster._of(process)


def _show(rank: int, stream: str, line: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    text = f"[{rank}] {line}\n"
    try:
        try:
            out.write(text)
        except UnicodeEncodeError:
            encoding = getattr(out, "encoding", None) or "ascii"
            out.write(text.encode(encoding, "backslashreplace").decode(encoding))
        out.flush()
    except Exception:
        return  # closed, replaced by something that cannot write, or there is none


def _whole(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is a whole number, not {value!r}")
    number: int = value.__index__()
    if number < least:
        raise ValueError(f"{what} is at least {least}, not {number}")
    return number


def _chunk(chunksize: int | None) -> int | None:
    if chunksize is None:
        return None
    return None if _whole(chunksize, "chunksize", 1) == 1 else chunksize


def _close_when_idle(director: Director) -> None:
    process = director.process
    process.wait(lambda: process.closed or not len(process.calls))
    director.close()


def _close(director: Director) -> None:
    pending = len(director.process.calls)
    if pending and not director.closing and director.process.pid == os.getpid():
        warnings.warn(
            f"a onehop cluster ended with {pending} call(s) pending, which are cancelled; use "
            "`with onehop.Cluster(…)` or `cluster.shutdown()` to wait for them",
            RuntimeWarning,
            stacklevel=2,
        )
    director.close(grace_s=0.2)


def _close_at_exit(director: Director) -> None:
    reference = weakref.ref(director)

    def at_exit() -> None:
        alive = reference()
        if alive is not None:
            _close(alive)

    director.process.at_close = lambda: atexit.unregister(at_exit)
    atexit.register(at_exit)
