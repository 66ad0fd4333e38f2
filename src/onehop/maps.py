"""Maps and reductions: many items, few messages.

The function travels as one encoded value that every batch names; a batch's items are encoded when they
are pulled. How many items a batch has follows from how long they take: tiny tasks would otherwise cost
more in messages than in work, and long ones must not wait behind each other.

A little longer than most files: the ordered, unordered and reducing forms share its run.
Answers are decoded by the thread that consumes them, never by the one that reads the links.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, TypeVar

from onehop import errors
from onehop._runtime.answers import Answer, error_of
from onehop._runtime.executor import Batch
from onehop._runtime.folding import Fold
from onehop.calls import Future, Taken, deadline_of

if TYPE_CHECKING:
    from onehop._runtime.outcalls import OutgoingCall
    from onehop._runtime.parcels import Outgoing
    from onehop.cluster import Cluster
    from onehop.options import Options

T = TypeVar("T")

BATCH_NS = 5_000_000
"""How long a batch of tiny tasks should run: a hundred times the cost of its two messages."""
MOST_ITEMS = 20_000
GROWTH = 8
FLYING_PER_WORKER = 2
CHUNKS_PER_WORKER = 4


_STEADY = frozenset((list, tuple, range, set, frozenset, dict, str, bytes))
"""Inputs whose items do not change by pulling the next one."""
_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


def _is_plain(item: Any) -> bool:
    return type(item) in _PLAIN or (type(item) is tuple and all(type(i) in _PLAIN for i in item))


class _Piece:
    """Some items that were sent together, and what became of them. The sink of their call."""

    __slots__ = ("answer", "arguments", "count", "entry", "outcomes", "run", "tries", "wanted")

    def __init__(self, run: MapRun, count: int, arguments: Outgoing) -> None:
        self.run = run
        self.count = count
        self.arguments = arguments
        self.answer: Answer | None = None
        self.entry: OutgoingCall | None = None
        self.outcomes: list[tuple[bool, Any] | None] = [None] * count
        self.wanted = list(range(count))
        self.tries = 0

    def sent(self) -> None:
        """Nothing to note."""

    def finish(self, answer: Answer) -> None:
        """Take the answer; decoding it is the consumer's."""
        self.answer = answer
        self.run.answered(self, answer)


class MapRun:
    """One map under way."""

    def __init__(
        self,
        cluster: Cluster,
        function: Callable[..., Any],
        iterables: tuple[Iterable[Any], ...],
        options: Options,
        timeout: float | None,
    ) -> None:
        if not iterables:
            raise TypeError("map needs at least one iterable")
        if not callable(function):
            raise TypeError(f"map needs a function, and {function!r} cannot be called")
        process = cluster._process
        process.check_usable()
        self.process = process
        self.deadline = deadline_of(timeout)
        self._cluster = cluster
        self._options = options
        self._star = len(iterables) > 1
        lengths = [len(it) for it in iterables if isinstance(it, Sized)]
        self.total = min(lengths) if len(lengths) == len(iterables) else None
        self._items: Iterator[Any] = (
            zip(*iterables, strict=False) if self._star else iter(iterables[0])
        )
        self._steady = all(type(it) in _STEADY for it in iterables)
        self.source_error: Exception | None = None
        self._function = function
        self._encoded = process.transfers.encode(Batch(function, self._star), repeated=True)
        self._label = getattr(function, "__qualname__", type(function).__name__)
        self._lock = threading.Lock()
        self._pulling = threading.Lock()
        self.pieces: deque[_Piece] = deque()
        self.answered_pieces: deque[_Piece] = deque()
        self._flying = 0
        self._buffered = 0
        self._pulled = 0
        self._exhausted = False
        self._closed = False
        self._consumers = 0
        self._item_ns = 0.0
        self._size = options.batch_size or 1
        self.pump()

    # --- sending ----------------------------------------------------------------------------------

    def _room(self) -> bool:
        if self._closed or self._exhausted:
            return False
        workers = max(1, len(self.process.scheduler.ranks)) * self.process.executor.slots
        if self._flying >= workers * FLYING_PER_WORKER:
            return False
        # What nobody has taken yet is bounded too, unless the input is all there anyway.
        return self.total is not None or self._buffered < 2 * workers * FLYING_PER_WORKER * max(
            self._size, 16
        )

    def pump(self) -> None:
        """Pull and send items while there is room; runs the user's iterator."""
        if not self._pulling.acquire(blocking=False):
            return
        try:
            while self._room():
                size = self._next_size()
                items = self._pull(size)
                if items:
                    self._pulled += len(items)
                    self._buffered += len(items)
                    self._start(items)
        finally:
            self._pulling.release()

    def _start(self, items: list[Any]) -> None:
        """Encode and send some items; one that cannot be encoded fails by itself, in its place."""
        transfers = self.process.transfers
        try:
            piece = _Piece(self, len(items), transfers.encode(((items,), {})))
        except Exception:
            failures: dict[int, Exception] = {}
            for number, item in enumerate(items):
                try:
                    items[number] = Taken(item, transfers)
                except Exception as error:
                    failures[number] = error
                    items[number] = None
            piece = _Piece(self, len(items), transfers.encode(((items,), {})))
            for number, failure in failures.items():
                piece.outcomes[number] = (False, failure)
            piece.wanted = [n for n in range(len(items)) if n not in failures]
        with self._lock:
            self.pieces.append(piece)
        if len(piece.wanted) == len(items):
            self._send(piece, self._encoded)
        elif piece.wanted:
            picked = Batch(self._function, self._star, piece.wanted)
            self._send(piece, transfers.encode(picked))
        else:
            piece.answer = Answer(error=next(iter(failures.values())))
            with self._lock:
                self.answered_pieces.append(piece)
            self.process.loop.wake()

    def _pull(self, size: int) -> list[Any]:
        """Take up to `size` items; an error of the input comes after the values before it."""
        items: list[Any] = []
        try:
            if self._steady:
                items.extend(itertools.islice(self._items, size))
            else:
                # The next item may overwrite this one's memory, so each is encoded before the next is pulled.
                transfers = self.process.transfers
                items.extend(
                    item if _is_plain(item) else Taken(item, transfers)
                    for item in itertools.islice(self._items, size)
                )
        except Exception as error:
            self.source_error = error
            self._exhausted = True
        if len(items) < size:
            self._exhausted = True
        return items

    def _next_size(self) -> int:
        if self._options.batch_size:
            return self._options.batch_size
        if self._options.timeout is not None:
            return 1  # the time is given to each call
        if not self._item_ns:
            return 1
        size = int(min(BATCH_NS / self._item_ns, self._size * GROWTH, MOST_ITEMS))
        if self.total is not None:
            workers = max(1, len(self.process.scheduler.ranks))
            size = min(size, -(-(self.total - self._pulled) // (2 * workers)))
        self._size = max(1, size)
        return self._size

    def _send(self, piece: _Piece, function: Outgoing) -> None:
        with self._lock:
            self._flying += 1
        target = self.process.rank if self._cluster._here else 0
        piece.answer = None
        self.process.call(
            target, self._function, (), {}, piece, flags=self._options.flags,
            timeout_s=self._options.timeout, encoded_function=function,
            encoded_arguments=piece.arguments, label=self._label, on_entry=piece_entry(piece),
        )  # fmt: skip

    def answered(self, piece: _Piece, answer: Answer) -> None:
        """A piece has come back; called by the reading thread."""
        with self._lock:
            self._flying -= 1
            if answer.run_ns and answer.received is not None:
                each = answer.run_ns / max(1, len(piece.wanted))
                self._item_ns = 0.5 * self._item_ns + 0.5 * each if self._item_ns else each
            self.answered_pieces.append(piece)
            alone = not self._consumers
        if alone and self.total is not None and self._room():
            self.process.user_errand(self.pump)  # it runs the user's iterator

    # --- taking -----------------------------------------------------------------------------------

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`, pulling and sending meanwhile."""
        import time

        with self._lock:
            self._consumers += 1
        try:
            while True:
                self.pump()
                if ready() or self._closed:
                    return
                remaining = None
                if self.deadline is not None:
                    remaining = self.deadline - time.monotonic()
                    if remaining <= 0:
                        raise TimeoutError("the map has not finished in the time that was given")
                self.process.wait(lambda: ready() or self._closed or self._room(), remaining)
        finally:
            with self._lock:
                self._consumers -= 1

    def over(self) -> bool:
        """Whether every item that there is has been sent."""
        return self._exhausted and not self.pieces

    def raise_source_error(self) -> None:
        """Raise what the input raised, if it did."""
        error, self.source_error = self.source_error, None
        if error is not None:
            raise error

    def settle(self, piece: _Piece) -> bool:
        """Take an answered piece apart; False if some of its items run again."""
        answer = piece.answer
        assert answer is not None
        transfers = self.process.transfers
        if answer.received is not None:
            outcomes = answer.value(transfers, piece.entry)
        else:
            error = answer.exception(transfers, piece.entry)
            outcomes = [(False, error)] * len(piece.wanted)
            if isinstance(error, errors.CallLost):
                return self._settle_lost(piece, error, answer.at_item)
        failed = []
        for number, outcome in zip(piece.wanted, outcomes, strict=True):
            piece.outcomes[number] = outcome
            if not outcome[0]:
                failed.append(number)
        if failed and piece.tries < self._options.retries and not self._closed:
            piece.tries += 1
            piece.wanted = failed
            picked = Batch(self._function, self._star, failed)
            self._send(piece, transfers.encode(picked))
            return False
        return self._settled(piece)

    def _settle_lost(self, piece: _Piece, error: errors.CallLost, at_item: int) -> bool:
        """Their worker died: the items up to the one it was at are lost, the others run elsewhere."""
        begun = piece.wanted[: at_item + 1] if error.may_have_started else []
        rest = piece.wanted[len(begun) :]
        for number in begun:
            piece.outcomes[number] = (False, error)
        if begun and piece.tries < self._options.retries:
            piece.tries += 1
            rest = piece.wanted
        if rest and not self._closed:
            piece.wanted = rest
            self._send(
                piece, self.process.transfers.encode(Batch(self._function, self._star, rest))
            )
            return False
        return self._settled(piece)

    def _settled(self, piece: _Piece) -> bool:
        piece.arguments.close()
        with self._lock:
            self._buffered -= piece.count
        return True

    def value(self, outcome: tuple[bool, Any] | None) -> Any:
        """The value of one item, or raise what happened to it."""
        assert outcome is not None
        if outcome[0]:
            return outcome[1]
        error = outcome[1]
        if not isinstance(error, BaseException):
            error = error_of(error, self.process.transfers, self._label)
        if self._options.on_error is not None and isinstance(error, Exception):
            return self._options.on_error(error)
        raise error

    def close(self) -> None:
        """Cancel what has not been done, and let go of the function."""
        self._closed = True
        for piece in list(self.pieces):
            if piece.entry is not None and piece.answer is None:
                self.process.outcalls.stop(piece.entry)
            piece.arguments.close()
        self.pieces.clear()
        self._encoded.close()


def piece_entry(piece: _Piece) -> Callable[[OutgoingCall], None]:
    """What notes the call of a piece."""

    def note(entry: OutgoingCall) -> None:
        piece.entry = entry

    return note


def ordered(run: MapRun) -> Generator[Any, None, None]:
    """Yield the values in the order of the items."""
    advance = _progress(run)
    try:
        while True:
            run.wait_for(lambda: bool(run.pieces) or run.over())
            if not run.pieces:
                run.raise_source_error()
                return
            piece = run.pieces[0]
            while True:
                run.wait_for(lambda piece=piece: piece.answer is not None)  # type: ignore[misc]
                if run.settle(piece):
                    break
            run.pieces.popleft()
            outcomes = piece.outcomes
            del piece
            for number in range(len(outcomes)):
                outcome, outcomes[number] = outcomes[number], None
                advance(1)
                yield run.value(outcome)
    finally:
        advance(0)
        run.close()


def unordered(run: MapRun) -> Generator[Any, None, None]:
    """Yield each value as soon as it is there."""
    advance = _progress(run)
    try:
        while True:
            run.wait_for(lambda: bool(run.answered_pieces) or run.over())
            if not run.answered_pieces:
                run.raise_source_error()
                return
            piece = run.answered_pieces.popleft()
            if not run.settle(piece):
                continue
            run.pieces.remove(piece)
            for outcome in piece.outcomes:
                advance(1)
                yield run.value(outcome)
    finally:
        advance(0)
        run.close()


def _progress(run: MapRun) -> Callable[[int], None]:
    wanted = run._options.progress
    if not wanted:
        return lambda count: None
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    task = bar.add_task(wanted if isinstance(wanted, str) else run._label, total=run.total)
    bar.start()

    def advance(count: int) -> None:
        if count:
            bar.advance(task, count)
        else:
            bar.stop()

    return advance


def reduce(
    cluster: Cluster,
    op: Callable[[Any, Any], Any],
    function: Callable[..., Any],
    iterables: tuple[Iterable[Any], ...],
    options: Options,
) -> Any:
    """See `Cluster.reduce`."""
    if not iterables:
        raise TypeError("reduce needs at least one iterable")
    star = len(iterables) > 1
    items = list(zip(*iterables, strict=False) if star else iterables[0])
    if not items:
        raise ValueError("there is nothing to reduce: the input is empty")
    process = cluster._process
    workers = max(1, len(process.scheduler.ranks))
    count = min(len(items), workers * CHUNKS_PER_WORKER)
    if options.batch_size:
        count = -(-len(items) // options.batch_size)
    bounds = [len(items) * i // count for i in range(count + 1)]
    encoded = process.transfers.encode(Fold(op, function, star), repeated=True)
    target = process.rank if cluster._here else 0
    level: list[Future[Any]] = []
    try:
        for start, stop in itertools.pairwise(bounds):
            future: Future[Any] = Future(process)
            process.call(
                target, function, (items[start:stop],), {}, future, flags=options.flags,
                retries=options.retries, timeout_s=options.timeout, encoded_function=encoded,
                label=f"reduce {getattr(function, '__qualname__', '')}", on_entry=future.made,
            )  # fmt: skip
            level.append(future)
        view = cluster.options(retries=options.retries) if options.retries else cluster
        while len(level) > 1:
            # Neighbours only: the operation need not be commutative.
            pairs = [
                view._submit(0, op, (level[i], level[i + 1]), {})
                for i in range(0, len(level) - 1, 2)
            ]
            level = pairs + level[len(pairs) * 2 :]
        return level[0].result()
    except Exception as error:
        if options.on_error is not None:
            return options.on_error(error)
        raise
    finally:
        encoded.close()


def guarded(future: Future[T], on_error: Callable[[BaseException], Any]) -> Future[T]:
    """The same future, whose failure becomes a value."""
    future._on_error = on_error
    return future
