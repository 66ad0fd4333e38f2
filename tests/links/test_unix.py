"""Unix links where it gets rough: half frames, killed peers, full sockets, signals, lost descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from onehop._contracts.link import Frame
from onehop._links.stream import READ_PER_CALL_BYTES, UnixLink, listen_unix
from onehop._protocol.framing import CONTROL_LIMIT_BYTES, HEADER, HEADER_BYTES, pack_header
from onehop.errors import LinkClosed, ProtocolError


@pytest.fixture
def pair() -> Iterator[tuple[UnixLink, UnixLink]]:
    left, right = socket.socketpair()
    a, b = UnixLink(left, 2), UnixLink(right, 1)
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def raw_and_link() -> Iterator[tuple[socket.socket, UnixLink]]:
    """A bare socket, for what no link would send, and the link at its other end."""
    left, right = socket.socketpair()
    link = UnixLink(right, 7)
    yield left, link
    left.close()
    link.close()


def receive_until_end(link: UnixLink) -> tuple[list[Frame], Exception]:
    frames: list[Frame] = []
    while True:
        assert select.select([link], [], [], 20)[0], "neither a frame nor the end came"
        try:
            frames += link.receive()
        except (LinkClosed, ProtocolError) as error:
            return frames, error


def encode(control: bytes, payload: bytes = b"") -> bytes:
    return pack_header(len(control), len(payload), 7, 1) + control + payload


# --- the end of the other side ----------------------------------------------------------------------


@pytest.mark.parametrize("length", range(len(encode(b"control", b"payload"))))
def test_the_end_inside_a_frame(raw_and_link: tuple[socket.socket, UnixLink], length: int) -> None:
    raw, link = raw_and_link
    raw.sendall(encode(b"whole") + encode(b"control", b"payload")[:length])
    raw.close()
    frames, error = receive_until_end(link)
    assert [frame.control for frame in frames] == [b"whole"]
    assert isinstance(error, LinkClosed)
    assert "rank 7" in str(error)
    assert ("in the middle of a frame" in str(error)) == bool(length)


def test_the_end_at_a_full_read(raw_and_link: tuple[socket.socket, UnixLink]) -> None:
    """The read that finds the end comes right after one that filled the buffer."""
    raw, link = raw_and_link
    raw.sendall(encode(b"c" * (16 * 1024 - HEADER_BYTES)))
    raw.close()
    frames, error = receive_until_end(link)
    assert len(frames) == 1
    assert isinstance(error, LinkClosed)


def test_what_breaks_the_format_ends_the_link_after_the_frames_before_it(
    raw_and_link: tuple[socket.socket, UnixLink],
) -> None:
    raw, link = raw_and_link
    raw.sendall(encode(b"good") + HEADER.pack(CONTROL_LIMIT_BYTES + 1, 0, 1, 2) + b"junk")
    frames, error = receive_until_end(link)
    assert [frame.control for frame in frames] == [b"good"]
    assert isinstance(error, ProtocolError)
    with pytest.raises(ProtocolError):
        link.receive()
    assert raw.recv(10) == b""  # the peer was told
    with pytest.raises(LinkClosed):
        link.send(1, 2, b"x")


def test_a_killed_peer(raw_and_link: tuple[socket.socket, UnixLink]) -> None:
    """SIGKILL in the middle of its sending: what came is whole and in order, then the link ends."""
    raw, link = raw_and_link
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            link.abandon()
            mine = UnixLink(raw, 1)
            for number in range(1_000_000):
                mine.send(number, 1, b"c" * (number % 300), b"p" * (number % 70_000))
                while mine.want_write:
                    select.select([], [mine], [])
                    mine.flush()
        os._exit(1)
    raw.close()
    frames: list[Frame] = []
    while len(frames) < 50:
        frames += link.receive()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    more, error = receive_until_end(link)
    for number, frame in enumerate(frames + more):
        assert frame == (number, 1, b"c" * (number % 300), b"p" * (number % 70_000))
    assert isinstance(error, LinkClosed)


def test_a_peer_that_is_killed_with_our_frames_unread(
    raw_and_link: tuple[socket.socket, UnixLink],
) -> None:
    """The kernel reports a reset then, and what the peer had sent still comes first."""
    raw, link = raw_and_link
    child = os.fork()
    if child == 0:
        link.abandon()
        raw.sendall(encode(b"last words") * 3)
        signal.pause()
    raw.close()
    link.send(1, 2, b"never read")
    assert select.select([link], [], [], 20)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(LinkClosed):
        link.send(1, 2, b"too late")
    frames, error = receive_until_end(link)
    assert [frame.control for frame in frames] == [b"last words"] * 3
    assert isinstance(error, LinkClosed)


def test_close_is_seen_at_once_although_a_forked_child_has_the_descriptor(
    pair: tuple[UnixLink, UnixLink],
) -> None:
    a, b = pair
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        a.close()
        assert isinstance(receive_until_end(b)[1], LinkClosed)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_dead_peer_kills_nobody_by_sigpipe() -> None:
    """Also in a program that gave SIGPIPE its default action back."""
    code = """
import os, select, signal, socket
from onehop._links.stream import UnixLink
from onehop.errors import LinkClosed
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
a, b = socket.socketpair()
link = UnixLink(a, 1)
b.close()
for body in (b"x", b"x" * 100_000):
    try:
        link.send(1, 2, body, b"", [0])
    except LinkClosed:
        print("closed")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "closed\nclosed\n"), result


# --- descriptors ------------------------------------------------------------------------------------


def test_descriptors_that_this_process_has_no_room_for_end_the_link(
    pair: tuple[UnixLink, UnixLink],
) -> None:
    """The kernel drops them; later frames must not be given the wrong ones."""
    a, b = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    a.send(1, 2, b"eight", b"", [0] * 8)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    fillers: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for fd in fillers[-3:]:
            os.close(fd)
        del fillers[-3:]
        _, error = receive_until_end(b)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert isinstance(error, LinkClosed)
    assert "ulimit -n" in str(error)


def test_the_most_descriptors_that_one_frame_carries(pair: tuple[UnixLink, UnixLink]) -> None:
    a, b = pair
    with pytest.raises(ProtocolError, match="253"):
        a.send(1, 2, b"x", b"", [0] * 254)
    a.send(1, 2, b"x", b"", [0] * 253)
    assert len(b.receive()) == 1
    fds = b.take_fds()
    assert len(fds) == 253
    for fd in fds:
        os.close(fd)


def test_a_bad_descriptor_is_the_callers_error(pair: tuple[UnixLink, UnixLink]) -> None:
    a, b = pair
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Bad file descriptor"):
        a.send(1, 2, b"x", b"", [0, 10**6])
    assert os.listdir("/proc/self/fd") == before
    a.send(1, 2, b"fine")
    assert [frame.control for frame in b.receive()] == [b"fine"]


# --- much at once -----------------------------------------------------------------------------------


def test_too_large_a_frame_is_refused_and_the_link_goes_on(pair: tuple[UnixLink, UnixLink]) -> None:
    a, b = pair
    with pytest.raises(ProtocolError, match="control part"):
        a.send(1, 2, bytes(CONTROL_LIMIT_BYTES + 1))
    a.send(1, 2, b"fine")
    assert [frame.control for frame in b.receive()] == [b"fine"]
    assert a.sent_bytes == 4


def test_200_000_small_frames(pair: tuple[UnixLink, UnixLink]) -> None:
    """From one thread to another, with all the waiting that comes of it."""
    a, b = pair
    count = 200_000
    blocked = threading.Event()
    a.on_blocked = lambda _link: blocked.set()

    def send_all() -> None:
        for number in range(count):
            a.send(number, 2, b"x" * 100)

    def flush_all() -> None:
        while not done.is_set():
            if blocked.wait(0.01):
                blocked.clear()
                while not a.flush():
                    select.select([], [a], [], 1)

    done = threading.Event()
    threads = [threading.Thread(target=send_all), threading.Thread(target=flush_all)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    received = 0
    while received < count:
        assert select.select([b], [], [], 20)[0]
        for frame in b.receive():
            assert frame.source == received
            received += 1
    duration = time.perf_counter() - start
    done.set()
    for thread in threads:
        thread.join()
    assert a.sent_bytes == b.received_bytes == 100 * count
    print(f"{count / duration:.0f} frames per second")


def test_frames_that_wait_are_written_together(pair: tuple[UnixLink, UnixLink]) -> None:
    a, b = pair
    count = 0
    while not a.want_write:
        a.send(count, 2, b"x")
        count += 1
    for number in range(count, count + 10_000):
        a.send(number, 2, b"x")
    assert len(a._outbox.entries) < 100
    frames: list[Frame] = []
    while len(frames) < count + 10_000:
        frames += b.receive()
        a.flush()
    assert [frame.source for frame in frames] == list(range(count + 10_000))


def test_one_receive_has_a_bound(pair: tuple[UnixLink, UnixLink]) -> None:
    """A link that always has more must not keep a loop from the others."""
    a, b = pair

    def send_for_ever() -> None:
        with contextlib.suppress(LinkClosed):
            while True:
                a.send(1, 2, b"", b"p" * 60_000)
                while not a.flush():
                    select.select([], [a], [], 0.01)

    sender = threading.Thread(target=send_for_ever)
    sender.start()
    for _ in range(50):
        select.select([b], [], [], 10)
        assert sum(len(frame.payload) for frame in b.receive()) < 2 * READ_PER_CALL_BYTES
    b.close()
    a.close()
    sender.join(10)
    assert not sender.is_alive()


def test_many_small_frames_fit_before_anybody_reads(pair: tuple[UnixLink, UnixLink]) -> None:
    """What the socket buffer is set for: the system's default takes fewer than 300."""
    a, _ = pair
    count = 0
    while not a.want_write:
        a.send(1, 2, b"x" * 150)
        count += 1
    most_bytes = int(Path("/proc/sys/net/core/wmem_max").read_text())
    assert count > min(1000, most_bytes // 1000)


def test_the_handshake_counts_as_overhead() -> None:
    left, right = socket.socketpair()
    link = UnixLink(left, 2, 100, 200)
    link.send(1, 2, b"x")
    assert link.overhead_bytes_sent == 100 + HEADER_BYTES
    assert link.overhead_bytes_received == 200
    link.close()
    right.close()


# --- signals ----------------------------------------------------------------------------------------


class Interrupted(BaseException):
    pass


# One that falls into a finalizer is swallowed by the interpreter, as any exception there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_send_never_tears_the_stream(pair: tuple[UnixLink, UnixLink]) -> None:
    """As by Ctrl-C, hundreds of times, in a main thread that sends frames of all sizes."""
    a, b = pair
    a._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    frames: list[Frame] = []
    ended = threading.Event()

    def body(number: int) -> tuple[bytes, bytes]:
        return b"%d " % number * (number % 50), b"p" * (
            number % 13 * 800 * (1 + number % 31 // 30 * 9)
        )

    def read_all() -> None:
        while not (ended.is_set() and not select.select([b], [], [], 0.05)[0]):
            select.select([b], [], [], 0.05)
            frames.extend(b.receive())
            for fd in b.take_fds():
                os.close(fd)

    reader = threading.Thread(target=read_all)
    reader.start()
    enabled = False

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal enabled
        if enabled:
            enabled = False  # once a send: what handles the exception is not interrupted again
            raise Interrupted

    taken: set[int] = set()
    unsure: set[int] = set()
    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    try:
        number = 0
        deadline = time.monotonic() + 20
        while (len(unsure) < 400 or number < 2000) and time.monotonic() < deadline:
            try:
                enabled = True
                control, payload = body(number)
                a.send(number, 2, control, payload, [0] if number % 5 == 0 else [])
                if number % 3 == 0:
                    a.flush()
                enabled = False
                taken.add(number)
            except Interrupted:
                enabled = False
                unsure.add(number)
            number += 1
            while a.queued_bytes > 1 << 20:
                with contextlib.suppress(Interrupted):
                    a.flush()
    finally:
        enabled = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    while not a.flush():
        select.select([], [a], [], 1)
    ended.set()
    reader.join(20)
    sources = [frame.source for frame in frames]
    assert sources == sorted(set(sources)), "a frame came twice, or out of order"
    assert taken <= set(sources) <= taken | unsure
    for frame in frames:
        assert (frame.control, frame.payload) == body(frame.source)
    assert len(unsure) >= 100, "the signals hardly ever hit"


def test_an_interrupted_sender_leaves_the_lock_open(pair: tuple[UnixLink, UnixLink]) -> None:
    a, b = pair

    def fail(_link: object) -> None:
        raise Interrupted

    a.on_blocked = fail
    with pytest.raises(Interrupted):
        while True:
            a.send(1, 2, b"x" * 60_000)
    a.on_blocked = None
    assert a.want_write
    while not a.flush():
        b.receive()
    a.send(3, 4, b"goes")
    last = [Frame(0, 0, b"", b"")]
    while last[-1].control != b"goes":
        last += b.receive()


def test_an_interrupted_reader_loses_the_link_and_not_the_order(
    pair: tuple[UnixLink, UnixLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is gone, so that the rest must not be taken for frames."""
    a, b = pair

    def interrupt(_data: bytes) -> list[Frame]:
        raise Interrupted

    a.send(1, 2, b"first")
    with monkeypatch.context() as patch:
        patch.setattr("onehop._protocol.framing.FrameParser.feed", lambda _, data: interrupt(data))
        with pytest.raises(Interrupted):
            b.receive()
    with pytest.raises(LinkClosed, match="interrupted by Interrupted"):
        b.receive()
    assert isinstance(receive_until_end(a)[1], LinkClosed)


# --- in passing -------------------------------------------------------------------------------------


def test_a_link_is_cheap_to_import() -> None:
    """A worker's start pays for it."""
    code = "import sys, onehop._links.stream; print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not {"hashlib", "ssl", "logging", "asyncio", "tempfile", "numpy"} & set(
        eval(result.stdout)
    )


def test_a_listener_takes_links_and_not_only_sockets() -> None:
    from onehop._links.stream import connect_unix

    listener = listen_unix("c")
    a = UnixLink(connect_unix(listener.address), 2)
    sock = None
    while sock is None:
        sock = listener.accept()
    b = UnixLink(sock, 1)
    a.send(1, 2, b"x")
    assert b.receive() == [Frame(1, 2, b"x", b"")]
    for thing in (a, b, listener):
        thing.close()
