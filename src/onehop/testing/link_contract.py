"""What every link has to do, as tests that the author of a new link inherits.

A test class for a new link is this class with its hooks filled in::

    class TestMyLink(LinkContract):
        def make_pair(self) -> tuple[Link, Link]:
            ...

and pytest runs every promise of `onehop._contracts.link.Link` against it. Plain assertions only, so that
other test runners can call the methods too. Must never be imported by the product.
"""

# ruff: noqa: D102 (the name of a test says what it tests)
from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

from onehop._contracts.link import Frame, Link
from onehop.errors import LinkClosed, ProtocolError

__all__ = ["LinkContract"]

_DEADLINE_S = 30.0


class LinkContract:
    """Tests of the promises that a `Link` makes; subclass it and give the hooks.

    Attributes
    ----------
    medium : str
        What the links have to call themselves.
    passes_descriptors : bool
        Whether `send(fds=...)` works.
    two_ends : bool
        False where both links of a pair are the same object, so that closing one closes the other.
    overhead_bytes_per_frame : int
        What a frame costs beyond control and payload.
    """

    medium: str = ""
    passes_descriptors: bool = False
    two_ends: bool = True
    overhead_bytes_per_frame: int = 0

    # --- hooks --------------------------------------------------------------------------------------

    def make_pair(self) -> tuple[Link, Link]:
        """Return two connected links, ready for frames; what one sends the other receives."""
        raise NotImplementedError

    # --- tools --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pair(self) -> Iterator[tuple[Link, Link]]:
        """Give a pair, close it, and check that no descriptor was left open."""
        before = _open_descriptors()
        a, b = self.make_pair()
        try:
            yield a, b
        finally:
            a.close()
            b.close()
        assert _open_descriptors() == before, "the links left descriptors open"

    def collect(self, receiver: Link, count: int, sender: Link | None = None) -> list[Frame]:
        """Receive until `count` frames are there, flushing `sender` meanwhile as a loop would."""
        frames: list[Frame] = []
        deadline = time.monotonic() + _DEADLINE_S
        while len(frames) < count:
            assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
            if sender is not None and sender.want_write:
                sender.flush()
            new = receiver.receive()
            frames += new
            if not new and not (sender is not None and sender.want_write):
                self.await_readable(receiver)
        return frames

    def await_readable(self, link: Link, timeout_s: float = 1.0) -> None:
        """Wait until a link may have something to receive."""
        if link.fileno() >= 0:
            select.select([link], [], [], timeout_s)
        else:
            time.sleep(0.0005)

    # --- frames -------------------------------------------------------------------------------------

    def test_medium_and_peer_are_told(self) -> None:
        with self.pair() as (a, b):
            assert a.medium == b.medium == self.medium
            assert isinstance(a.peer, int)
            assert isinstance(b.peer, int)

    def test_frames_arrive_whole_and_in_order(self) -> None:
        sizes = [0, 1, 15, 16, 17, 150, 4096, 65_519, 65_520, 65_521, 300_000, 2_000_000, 3]
        sent = []
        for number, size in enumerate(sizes):
            sent.append(Frame(number, 7, os.urandom(size), b""))
            sent.append(Frame(2**32 - 1, number, b"c", os.urandom(size)))
            sent.append(Frame(1, 2, os.urandom(number), os.urandom(size)))
        with self.pair() as (a, b):
            for frame in sent:
                a.send(*frame)
            assert self.collect(b, len(sent), a) == sent

    def test_both_directions_are_independent(self) -> None:
        with self.pair() as (a, b):
            a.send(1, 2, b"there")
            assert self.collect(b, 1, a) == [Frame(1, 2, b"there", b"")]
            b.send(2, 1, b"back", b"payload")
            assert self.collect(a, 1, b) == [Frame(2, 1, b"back", b"payload")]

    def test_receive_without_frames_returns_at_once(self) -> None:
        with self.pair() as (_, b):
            assert b.receive() == []
            assert b.receive() == []

    def test_parts_are_bytes(self) -> None:
        with self.pair() as (a, b):
            a.send(1, 2, b"", b"")
            a.send(1, 2, b"c" * 70_000, b"p" * 70_000)
            for frame in self.collect(b, 2, a):
                assert type(frame.control) is bytes
                assert type(frame.payload) is bytes

    def test_counters_agree_with_the_frames(self) -> None:
        with self.pair() as (a, b):
            overhead = a.overhead_bytes_sent, b.overhead_bytes_received
            total = 0
            for size in (0, 10, 1000, 100_000):
                a.send(1, 2, b"c" * size, b"p" * (2 * size))
                total += 3 * size
            self.collect(b, 4, a)
            assert a.sent_bytes == b.received_bytes == total
            assert a.queued_bytes == 0
            extra = 4 * self.overhead_bytes_per_frame
            assert a.overhead_bytes_sent == overhead[0] + extra
            assert b.overhead_bytes_received == overhead[1] + extra

    # --- many at once -------------------------------------------------------------------------------

    def test_send_never_blocks_and_keeps_the_order(self) -> None:
        """The peer does not read: 16 MiB are taken all the same, and come out in order later."""
        blocked: list[Link] = []
        with self.pair() as (a, b):
            a.on_blocked = blocked.append
            sent = [
                Frame(number, 2, b"%d" % number, b"p" * (64 << 10 if number % 3 else 5))
                for number in range(384)
            ]

            def send_all() -> None:
                for frame in sent:
                    a.send(*frame)

            _run_in_time(send_all)
            if a.want_write:
                assert blocked
                assert blocked[0] is a
                assert a.queued_bytes > 0
                assert a.flush() is False
            else:
                assert not blocked
            assert self.collect(b, len(sent), a) == sent
            assert a.flush() is True
            assert not a.want_write
            assert a.queued_bytes == 0

    def test_frames_of_several_threads_never_interleave(self) -> None:
        threads, each = 4, 500
        with self.pair() as (a, b):

            def send_mine(source: int) -> None:
                for number in range(each):
                    body = b"%d " % number * (number % 40 + 1)
                    a.send(source, number, body, bytes([source]) * (number * 37 % 9000))

            senders = [threading.Thread(target=send_mine, args=(n,)) for n in range(threads)]
            for sender in senders:
                sender.start()
            frames = self.collect(b, threads * each, a)
            for sender in senders:
                sender.join()
            for source in range(threads):
                mine = [frame for frame in frames if frame.source == source]
                assert [frame.destination for frame in mine] == list(range(each))
                for number, frame in enumerate(mine):
                    assert frame.control == b"%d " % number * (number % 40 + 1)
                    assert frame.payload == bytes([source]) * (number * 37 % 9000)
            assert a.sent_bytes == b.received_bytes

    def test_a_ready_callback_is_enough_where_there_is_no_descriptor(self) -> None:
        with self.pair() as (a, b):
            if b.fileno() >= 0:
                return
            bell = threading.Event()
            b.on_ready = lambda _link: bell.set()
            for number in range(1000):
                sender = threading.Thread(target=a.send, args=(number, 2, b"x"))
                sender.start()
                assert bell.wait(_DEADLINE_S)
                bell.clear()
                frames = b.receive()
                sender.join()
                assert [frame.source for frame in frames] == [number]

    # --- descriptors --------------------------------------------------------------------------------

    def test_descriptors_arrive_in_order_with_their_frames(self) -> None:
        if not self.passes_descriptors:
            return
        with self.pair() as (a, b):
            wanted = []
            for number in range(20):
                pipes = [os.pipe() for _ in range(number % 3)]
                a.send(1, 2, b"%d" % number, b"p" * (number * 1000), [read for read, _ in pipes])
                for index, (read, write) in enumerate(pipes):
                    text = b"%d.%d" % (number, index)
                    os.write(write, text)
                    os.close(read)  # `send` has its own by now
                    os.close(write)
                    wanted.append(text)
            got = []
            for number, frame in enumerate(self.collect(b, 20, a)):
                assert frame.control == b"%d" % number
                for fd in b.take_fds(number % 3):
                    assert not os.get_inheritable(fd)
                    got.append(os.read(fd, 100))
                    os.close(fd)
            assert got == wanted
            assert b.take_fds() == []

    def test_descriptors_that_had_to_wait_arrive_too(self) -> None:
        if not self.passes_descriptors:
            return
        with self.pair() as (a, b):
            for _ in range(64):
                a.send(1, 2, b"fill", b"x" * 60_000)
            read, write = os.pipe()
            a.send(1, 2, b"with", b"", [read])
            os.close(read)
            os.write(write, b"late")
            os.close(write)
            assert self.collect(b, 65, a)[-1].control == b"with"
            (fd,) = b.take_fds()
            assert os.read(fd, 10) == b"late"
            os.close(fd)

    def test_descriptors_that_nobody_took_are_closed(self) -> None:
        """Those in the kernel, those that wait at the sender and those that have arrived."""
        if not self.passes_descriptors:
            return
        with self.pair() as (a, b):
            read, write = os.pipe()
            for _ in range(3):
                a.send(1, 2, b"with", b"", [read, write])
            self.collect(b, 3, a)
            for _ in range(64):
                a.send(1, 2, b"fill", b"x" * 60_000)
            a.send(1, 2, b"with", b"", [read, write])
            os.close(read)
            os.close(write)

    def test_more_descriptors_than_came_cannot_be_taken(self) -> None:
        if not self.passes_descriptors:
            return
        with self.pair() as (a, b):
            a.send(1, 2, b"one", b"", [0])
            self.collect(b, 1, a)
            _assert_raises(ProtocolError, lambda: b.take_fds(2))
            (fd,) = b.take_fds(1)
            os.close(fd)

    # --- the end ------------------------------------------------------------------------------------

    def test_everything_that_was_sent_arrives_before_the_end(self) -> None:
        if not self.two_ends:
            return
        with self.pair() as (a, b):
            for number in range(100):
                a.send(number, 2, b"last words", b"w" * 100)
            assert a.flush()
            a.close()
            frames = []
            with contextlib.suppress(LinkClosed):
                while True:
                    frames += b.receive()
            assert [frame.source for frame in frames] == list(range(100))
            _assert_raises(LinkClosed, b.receive)  # and again, for ever
            _assert_raises(LinkClosed, lambda: b.send(2, 1, b"nobody there"))

    def test_what_the_peer_sent_arrives_although_sending_fails(self) -> None:
        if not self.two_ends:
            return
        with self.pair() as (a, b):
            a.send(1, 2, b"unread by the time that b finds a gone")
            a.close()
            deadline = time.monotonic() + _DEADLINE_S
            with contextlib.suppress(LinkClosed):
                while time.monotonic() < deadline:
                    b.send(2, 1, b"x")
            assert b.flush() is True
            assert not b.want_write
            assert self.collect(b, 1)[0].source == 1
            _assert_raises(LinkClosed, b.receive)

    def test_a_closed_link_says_so(self) -> None:
        with self.pair() as (a, _b):
            states = [a.closed]
            for _ in range(2):
                a.close()
                states.append(a.closed)
            assert states == [False, True, True]
            assert a.fileno() == -1
            assert a.flush() is True
            _assert_raises(LinkClosed, lambda: a.send(1, 2, b"x"))
            _assert_raises(LinkClosed, a.receive)

    def test_errors_name_the_peer(self) -> None:
        with self.pair() as (a, _b):
            a.close()
            error = _assert_raises(LinkClosed, lambda: a.send(1, 2, b"x"))
            assert f"rank {a.peer}" in str(error)

    def test_closing_while_others_send_and_receive(self) -> None:
        for _ in range(20):
            with self.pair() as (a, b):

                def send_until_closed(link: Link = a) -> None:
                    with contextlib.suppress(LinkClosed):
                        while True:
                            link.send(1, 2, b"x" * 1000)
                            if link.queued_bytes > 1 << 20:
                                time.sleep(0.0001)

                def receive_until_closed(link: Link = b) -> None:
                    with contextlib.suppress(LinkClosed):
                        while True:
                            link.receive()

                users = [
                    threading.Thread(target=send_until_closed),
                    threading.Thread(target=send_until_closed),
                    threading.Thread(target=receive_until_closed),
                ]
                for user in users:
                    user.start()
                time.sleep(0.005)
                a.close()
                for user in users:
                    user.join(_DEADLINE_S)
                    assert not user.is_alive()

    def test_a_forked_child_that_abandons_its_copy_disturbs_nobody(self) -> None:
        with self.pair() as (a, b):
            a.send(1, 2, b"before")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    a.abandon()
                    b.abandon()
                    closed = a.closed and b.closed and a.fileno() == b.fileno() == -1
                    status = 0 if closed else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            a.send(1, 2, b"after")
            assert [frame.control for frame in self.collect(b, 2, a)] == [b"before", b"after"]


def _open_descriptors() -> set[str]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    names = set(os.listdir(folder))
    # The descriptor of the listing itself is among them.
    return {name for name in names if os.path.exists(f"{folder}/{name}") or _is_open(int(name))}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _assert_raises(kind: type[Exception], action: Callable[[], object]) -> Exception:
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def _run_in_time(action: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    assert not thread.is_alive(), "a call that must not block did"
    if failures:
        raise failures[0]
