"""Who may connect, who may not, and that a refused one leaves and learns nothing."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from onehop._links.stream import (
    Listener,
    PeerCredentials,
    connect_unix,
    listen_unix,
    peer_credentials,
    prove,
)
from onehop._protocol.handshake import HELLO_LIMIT_BYTES, MAGIC, VERSION, Handshake
from onehop.errors import HandshakeError

SECRET = os.urandom(32)
CLUSTER = "test cluster/1"


def open_descriptors() -> set[str]:
    listed = os.listdir("/proc/self/fd")
    return {name for name in listed if os.path.exists(f"/proc/self/fd/{name}")} | {
        name for name in listed if _is_open(name)
    }


def _is_open(name: str) -> bool:
    try:
        os.fstat(int(name))
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


class Proving(threading.Thread):
    """`prove` in a thread, with its result or error."""

    def __init__(self, sock: socket.socket, role: str = "accept", **changed: object) -> None:
        super().__init__(daemon=True)
        arguments: dict[str, object] = {
            "secret": SECRET,
            "cluster_id": CLUSTER,
            "role": role,
            "hello": f"hello of {role}".encode(),
            "timeout_s": 10.0,
        }
        arguments.update(changed)
        self._call: Callable[[], tuple[bytes, list[int], PeerCredentials]] = lambda: prove(
            sock,
            **arguments,  # type: ignore[arg-type]
        )
        self._result: tuple[bytes, list[int], PeerCredentials] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:
            self.error = error

    def result(self) -> tuple[bytes, list[int], PeerCredentials]:
        self.join(20)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return self._result


def accept(listener: Listener) -> socket.socket:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        sock = listener.accept()
        if sock is not None:
            return sock
        time.sleep(0.001)
    raise AssertionError("nobody came")


# --- listening and connecting -----------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [True, False])
def test_listen_connect_prove(abstract: bool) -> None:
    listener = listen_unix(CLUSTER, abstract=abstract)
    assert listener.accept() is None
    with connect_unix(listener.address) as connector, accept(listener) as acceptor:
        assert "\0" not in listener.address
        other = Proving(acceptor)
        hello, fds, credentials = prove(connector, SECRET, CLUSTER, "connect", b"hello")
        assert (hello, fds) == (b"hello of accept", [])
        assert credentials == PeerCredentials(os.getpid(), os.geteuid())
        assert other.result() == (b"hello", [], credentials)
        assert connector.gettimeout() is None
    listener.close()
    with pytest.raises(OSError):
        connect_unix(listener.address)


def test_a_path_is_private_and_removed() -> None:
    listener = listen_unix(CLUSTER, abstract=False)
    folder = os.path.dirname(listener.address)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    child = os.fork()
    if child == 0:
        listener.close()  # only its own descriptor
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(listener.address)
    connect_unix(listener.address).close()
    listener.close()
    listener.close()
    assert not os.path.exists(folder)


def test_names_of_one_cluster_differ() -> None:
    listeners = [listen_unix("same" * 50) for _ in range(3)]
    assert len({listener.address for listener in listeners}) == 3
    for listener in listeners:
        listener.close()


def test_many_connect_while_nobody_accepts() -> None:
    """More than the backlog: they wait, and get in once somebody accepts."""
    listener = listen_unix(CLUSTER)
    connected: list[socket.socket] = []

    def connect() -> None:
        connected.append(connect_unix(listener.address))

    threads = [threading.Thread(target=connect) for _ in range(150)]
    for thread in threads:
        thread.start()
    accepted = [accept(listener) for _ in threads]
    for thread in threads:
        thread.join(10)
    assert len(connected) == len(accepted) == 150
    for sock in connected + accepted:
        sock.close()
    listener.close()


def test_connecting_to_a_full_backlog_gives_up_in_time() -> None:
    listener = listen_unix(CLUSTER)
    waiting: list[socket.socket] = []
    with pytest.raises(OSError):
        while len(waiting) < 1000:
            waiting.append(connect_unix(listener.address, timeout_s=0.05))
    for sock in waiting:
        sock.close()
    listener.close()


def test_a_process_without_free_descriptors_refuses_and_does_not_spin() -> None:
    listener = listen_unix(CLUSTER)
    waiting = [connect_unix(listener.address) for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for refused in (1, 2, 3):
            assert listener.accept() is None
            assert listener.refused == refused
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    for sock in waiting:
        with sock:
            assert sock.recv(1) == b""
    with connect_unix(listener.address), accept(listener):
        assert listener.accept() is None
    listener.close()


# --- descriptors ------------------------------------------------------------------------------------


def test_descriptors_go_both_ways() -> None:
    here, there = os.pipe(), os.pipe()
    with socket_pair() as (a, b):
        other = Proving(b, fds=[here[1], here[0], 0])
        hello, fds, _ = prove(a, SECRET, CLUSTER, "connect", b"x" * 100_000, [there[0]])
        assert hello == b"hello of accept"
        os.write(fds[0], b"through")
        assert os.read(here[0], 10) == b"through"
        assert len(fds) == 3
        their_hello, their_fds, _ = other.result()
        assert their_hello == b"x" * 100_000
        os.write(there[1], b"back")
        assert os.read(their_fds[0], 10) == b"back"
        for fd in [*fds, *their_fds, *here, *there]:
            assert not os.get_inheritable(fd)
            os.close(fd)


def test_descriptors_of_one_who_fails_are_closed() -> None:
    """A member that lies about their number: what came is not kept."""
    with socket_pair() as (a, b):
        other = Proving(b)
        machine = Handshake("connect", SECRET, CLUSTER, b"hello", 3)
        output = [(machine.start(), False)]
        while output:
            for data, with_descriptors in output:
                if with_descriptors:
                    socket.send_fds(a, [data], [0, 0])
                else:
                    a.sendall(data)
            output = []
            while machine.wanted and not output:
                output = machine.feed(a.recv(machine.wanted))
            if any(with_descriptors for _, with_descriptors in output):
                for data, with_descriptors in output:
                    if with_descriptors:
                        socket.send_fds(a, [data], [0, 0])
                    else:
                        a.sendall(data)
                break
        with pytest.raises(HandshakeError, match="passed 3 descriptors and 2 came"):
            other.result()


def test_a_stranger_cannot_make_us_hold_descriptors() -> None:
    with socket_pair() as (a, b):
        other = Proving(b, timeout_s=0.3)
        before = open_descriptors()
        socket.send_fds(a, [MAGIC + VERSION.to_bytes(2, "little") + bytes(32)], [0] * 200)
        a.recv(200)
        assert open_descriptors() == before
        socket.send_fds(a, [bytes(10)], [0] * 200)
        with pytest.raises(HandshakeError):
            other.result()


# --- strangers --------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused() -> None:
    with socket_pair() as (a, b):
        other = Proving(b)
        with pytest.raises(HandshakeError, match="secret"):
            prove(a, os.urandom(32), CLUSTER, "connect", b"hello")
        a.close()
        with pytest.raises(HandshakeError, match="closed the connection"):
            other.result()


def test_another_cluster_is_refused() -> None:
    with socket_pair() as (a, b):
        other = Proving(b, cluster_id="another")
        with pytest.raises(HandshakeError, match="another cluster"):
            prove(a, SECRET, CLUSTER, "connect", b"hello")
        a.close()
        with pytest.raises(HandshakeError):
            other.result()


def test_two_acceptors_or_two_connectors_do_not_hang() -> None:
    for role in ("accept", "connect"):
        with socket_pair() as (a, b):
            other = Proving(b, role, timeout_s=0.2)
            with pytest.raises(HandshakeError):
                prove(a, SECRET, CLUSTER, role, b"hello", timeout_s=0.2)
            with pytest.raises(HandshakeError):
                other.result()


@pytest.mark.parametrize("role", ["accept", "connect"])
@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x05" + b"pickle" * 100, b"1", os.urandom(5000)],
    ids=["http", "pickle", "one byte", "noise"],
)
def test_garbage_is_refused(garbage: bytes, role: str) -> None:
    with socket_pair() as (a, b):
        other = Proving(b, role)
        a.sendall(garbage)
        a.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            other.result()


def test_an_echo_is_refused() -> None:
    """The peer sends back whatever it gets: the simplest reflection."""
    with socket_pair() as (a, b):
        other = Proving(b, "connect")
        a.sendall(a.recv(1000))
        a.sendall(os.urandom(32))
        with pytest.raises(HandshakeError, match="reflection"):
            other.result()


def test_one_who_sends_slowly_is_cut_off() -> None:
    """A byte every 20 ms never lets a read time out, but the whole has its bound."""
    with socket_pair() as (a, b):
        other = Proving(b, timeout_s=0.3)
        greeting = MAGIC + VERSION.to_bytes(2, "little") + os.urandom(32)
        for byte in greeting:
            if not other.is_alive():
                break
            a.send(bytes([byte]))
            time.sleep(0.02)
        with pytest.raises(HandshakeError, match=r"within 0\.3 s"):
            other.result()


def test_one_who_sends_nothing_is_cut_off() -> None:
    with socket_pair() as (_a, b), pytest.raises(HandshakeError, match=r"within 0\.1 s"):
        prove(b, SECRET, CLUSTER, "accept", b"hello", timeout_s=0.1)


def test_one_who_never_reads_is_cut_off() -> None:
    """Our hello does not fit its buffer."""
    with socket_pair() as (a, b):
        b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        hello = b"h" * HELLO_LIMIT_BYTES
        other = Proving(b, "connect", hello=hello, timeout_s=0.3)
        machine = Handshake("accept", SECRET, CLUSTER, b"")
        output = b""
        while not output:
            output = b"".join(data for data, _ in machine.feed(a.recv(machine.wanted)))
        a.sendall(output)
        with pytest.raises(HandshakeError, match=r"within 0\.3 s"):
            other.result()


def test_one_who_goes_away_is_an_error_at_every_moment() -> None:
    for length in (0, 3, 38):
        with socket_pair() as (a, b):
            other = Proving(b)
            a.sendall((MAGIC + VERSION.to_bytes(2, "little") + os.urandom(32))[:length])
            a.close()
            with pytest.raises(HandshakeError, match=r"closed the connection|broke"):
                other.result()


def test_what_follows_the_handshake_stays_in_the_socket() -> None:
    with socket_pair() as (a, b):
        other = Proving(b)
        prove(a, SECRET, CLUSTER, "connect", b"hello")
        a.sendall(b"the first frame")
        other.result()
        assert b.recv(100) == b"the first frame"


# --- users ------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# What is needed later is imported by root: the other user may not be able to read the interpreter's home.
AS_OTHER_USER = """
import os, socket
from onehop._links.stream import connect_unix, listen_unix, prove
from onehop.errors import HandshakeError
os.setgid(65534)
os.setuid(65534)
"""


def as_other_user(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", AS_OTHER_USER + body], stdout=subprocess.PIPE, text=True
    )


@needs_root
def test_a_process_of_another_user_is_refused_by_the_listener() -> None:
    listener = listen_unix(CLUSTER)
    body = f"""
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + {listener.address!r}[1:])
print("connected", flush=True)
try:
    print("got", sock.recv(100))
except ConnectionResetError:
    print("got", b"")
"""
    with as_other_user(body) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "connected\n"
        deadline = time.monotonic() + 10
        while not listener.refused and time.monotonic() < deadline:
            assert listener.accept() is None
        assert listener.refused == 1
        assert other.stdout.readline() == "got b''\n"
    assert other.returncode == 0
    listener.close()


@needs_root
def test_another_user_is_refused_even_with_the_secret() -> None:
    listener = listen_unix(CLUSTER)
    body = f"""
sock = connect_unix({listener.address!r})
try:
    prove(sock, bytes.fromhex({SECRET.hex()!r}), {CLUSTER!r}, "connect", b"hello")
except HandshakeError as error:
    print(error, flush=True)
"""
    with as_other_user(body) as other:
        assert other.stdout is not None
        line = other.stdout.readline()
        assert "belongs to user 0 and this process to user 65534" in line
        raw, _ = listener._sock.accept()  # past the listener's own check
        with raw:
            assert peer_credentials(raw) == PeerCredentials(other.pid, 65534)
            with pytest.raises(HandshakeError, match=f"process {other.pid}. belongs to user 65534"):
                prove(raw, SECRET, CLUSTER, "accept", b"hello")
    assert other.returncode == 0
    listener.close()


@needs_root
def test_a_listener_of_another_user_is_refused() -> None:
    """Somebody else took the name: nothing is said to them, not even a nonce."""
    body = """
listener = listen_unix("trap")
print(listener.address, flush=True)
listener._sock.setblocking(True)
peer, _ = listener._sock.accept()
try:
    print("got", peer.recv(100), flush=True)
except ConnectionResetError:
    print("got", b"", flush=True)
"""
    with as_other_user(body) as other:
        assert other.stdout is not None
        address = other.stdout.readline().strip()
        with connect_unix(address) as sock, pytest.raises(HandshakeError, match="user 65534"):
            prove(sock, SECRET, CLUSTER, "connect", b"hello")
        assert other.stdout.readline() == "got b''\n"
    assert other.returncode == 0
