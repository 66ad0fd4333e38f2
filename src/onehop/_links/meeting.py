"""How two processes of one host find each other: listen, connect, prove.

Must never know what a hello says, nor frames: it ends where the link begins.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from onehop._links.outbox import SEND_FLAGS, close_all
from onehop._protocol.handshake import DESCRIPTOR_LIMIT, Handshake
from onehop.errors import HandshakeError

BACKLOG = 128
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTOR_LIMIT * array("i").itemsize)


class PeerCredentials(NamedTuple):
    """What the kernel says about the process at the other end."""

    pid: int
    """0 where it cannot be seen from here (another pid namespace, or macOS)."""
    uid: int


class Listener:
    """Takes connections from processes of the same user on this host.

    Attributes
    ----------
    address : str
        For `connect_unix`; fits a command line. Begins with ``@`` where the name is in Linux's abstract
        space, which no file system and no crash can leave behind.
    refused : int
        Connections of other users, closed at once.
    """

    def __init__(self, sock: socket.socket, address: str, folder: str | None) -> None:
        self.address = address
        self.refused = 0
        self._sock = sock
        self._folder = folder
        self._pid = os.getpid()
        self._spare_fd = os.dup(
            sock.fileno()
        )  # given up to refuse somebody when there are no others

    def fileno(self) -> int:
        """Descriptor that becomes readable when somebody connects."""
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        """Return a connection of a process of the same user, still to `prove` itself; never blocks.

        Where this process may open no more files, whoever connects is refused: left waiting, they would
        keep the listener readable, and a level-triggered loop busy.
        """
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._refuse_one()
            return None
        if peer_credentials(sock).uid != os.geteuid():
            self.refused += 1
            sock.close()
            return None
        sock.setblocking(True)
        return sock

    def _refuse_one(self) -> None:
        spare, self._spare_fd = self._spare_fd, -1
        if spare >= 0:
            os.close(spare)
        try:
            self._sock.accept()[0].close()
            self.refused += 1
            self._spare_fd = os.dup(self._sock.fileno())
        except OSError:
            pass  # another thread was faster; the next call tries again

    def close(self) -> None:
        """Stop listening and remove the name; in a forked child only let go of the descriptor."""
        self._sock.close()
        spare, self._spare_fd = self._spare_fd, -1
        if spare >= 0:
            os.close(spare)
        if self._folder is not None and os.getpid() == self._pid:
            for remove, path in ((os.unlink, self.address), (os.rmdir, self._folder)):
                try:
                    remove(path)
                except OSError:
                    pass
            self._folder = None


def listen_unix(cluster_id: str, *, abstract: bool | None = None) -> Listener:
    """Open a listening Unix socket under a name that nobody else can have taken.

    Parameters
    ----------
    cluster_id : str
        Part of the name, for whoever looks at ``ss -xl``.
    abstract : bool, optional
        Whether the name is abstract (Linux), or a path in a private folder. Chosen by platform.
    """
    if abstract is None:
        abstract = sys.platform == "linux"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = None
    try:
        if abstract:
            shown = "".join(c if c.isalnum() and c.isascii() else "-" for c in cluster_id)[:40]
            address = f"@onehop-{shown}-{os.urandom(16).hex()}"
            sock.bind("\0" + address[1:])
        else:
            from tempfile import mkdtemp

            folder = mkdtemp(prefix="onehop-")  # mode 0700: nobody else can connect or replace it
            address = os.path.join(folder, "s")
            sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        if folder is not None:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Listener(sock, address, folder)


def connect_unix(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect to a `Listener`'s address.

    Raises
    ------
    OSError
        Nobody listens there, or not within `timeout_s`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout_s
    try:
        # A full backlog: blocks with a timeout of the socket, as a non-blocking one fails at once.
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect("\0" + address[1:] if address.startswith("@") else address)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody accepted at {address} in {timeout_s} s") from None
                time.sleep(0.002)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Ask the kernel who was at the other end when the connection was made."""
    if hasattr(socket, "SO_PEERCRED"):
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", packed)
        return PeerCredentials(pid, uid)
    # macOS: LOCAL_PEERCRED (1) at level SOL_LOCAL (0) gives a struct xucred: version, uid, groups.
    _, uid = struct.unpack_from("2I", sock.getsockopt(0, 1, 76))
    return PeerCredentials(0, uid)


def prove(
    sock: socket.socket,
    secret: bytes,
    cluster_id: str,
    role: str,
    hello: bytes,
    fds: Sequence[int] = (),
    timeout_s: float = 10.0,
) -> tuple[bytes, list[int], PeerCredentials]:
    """Run the handshake on a fresh connection, and exchange hellos and descriptors.

    Blocks up to `timeout_s` in all, however slowly the peer sends. Leaves what follows the handshake
    in the socket. On an error the socket is still the caller's to close.

    Parameters
    ----------
    sock : socket.socket
        Connected Unix socket.
    secret : bytes
        The cluster's secret, 32 bytes.
    cluster_id : str
        Has to be the same on both sides.
    role : {"connect", "accept"}
        Which side this is.
    hello : bytes
        What the peer gets from this side, once it has proven itself.
    fds : sequence of int
        Descriptors that the peer gets with it; the caller keeps its own.
    timeout_s : float
        For the whole handshake.

    Returns
    -------
    hello, fds, credentials
        The peer's; the caller owns the descriptors.

    Raises
    ------
    HandshakeError
        The peer is not one of this cluster, is of another user, or took too long.
    """
    credentials = peer_credentials(sock)
    if credentials.uid != os.geteuid():
        raise HandshakeError(
            f"The peer (process {credentials.pid}) belongs to user {credentials.uid} and this process "
            f"to user {os.geteuid()}: the processes of a cluster on one host have one user."
        )
    machine = Handshake(role, secret, cluster_id, hello, len(fds))
    deadline = time.monotonic() + timeout_s
    arrived: list[int] = []
    try:
        output = [(machine.start(), False)]
        while True:
            for data, with_fds in output:
                _send_all(sock, data, fds if with_fds else (), deadline)
            if machine.done:
                break
            output = machine.feed(_read(sock, machine, arrived, deadline))
        if len(arrived) != machine.peer_descriptor_count:
            raise HandshakeError(
                f"The peer (process {credentials.pid}) passed {machine.peer_descriptor_count} "
                f"descriptors and {len(arrived)} came; is this process at its limit of open files?"
            )
    except BaseException as error:
        close_all(arrived)
        if machine.farewell:
            _say_farewell(sock, machine.farewell)
        if isinstance(error, TimeoutError):
            raise HandshakeError(
                f"The peer (process {credentials.pid}) did not complete the handshake within "
                f"{timeout_s} s."
            ) from None
        if isinstance(error, OSError):
            raise HandshakeError(
                f"The connection to the peer (process {credentials.pid}) broke during the handshake: "
                f"{error}."
            ) from error
        raise
    sock.settimeout(None)
    return machine.peer_hello, arrived, credentials


def _until(sock: socket.socket, deadline: float) -> None:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    sock.settimeout(remaining_s)


def _send_all(sock: socket.socket, data: bytes, fds: Sequence[int], deadline: float) -> None:
    if fds:
        _until(sock, deadline)
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
        data = data[sock.sendmsg((data,), passed, SEND_FLAGS) :]
    while data:
        _until(sock, deadline)
        data = data[sock.send(data, SEND_FLAGS) :]


def _read(sock: socket.socket, machine: Handshake, arrived: list[int], deadline: float) -> bytes:
    _until(sock, deadline)
    if not machine.peer_proven:
        # Without room for them the kernel drops descriptors that a stranger passes.
        data = sock.recv(machine.wanted)
    else:
        data, passed, _, _ = sock.recvmsg(machine.wanted, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
        for level, kind, packed in passed:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
                arrived.extend(fds)
    if not data:
        raise HandshakeError(
            "The peer closed the connection during the handshake: it has another secret or belongs to "
            "another cluster or user, or it ended."
        )
    return data


def _say_farewell(sock: socket.socket, data: bytes) -> None:
    try:
        sock.settimeout(0)
        sock.send(data, SEND_FLAGS)
    except OSError:
        pass
