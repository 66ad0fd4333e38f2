"""Links over a connected stream socket.

Must never know what a frame means, nor who polls: it takes and gives frames, and never blocks. How the
socket came to be is in `meeting`, what it has yet to write in `outbox`.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from array import array
from collections.abc import Sequence

from onehop._contracts.link import Frame
from onehop._links.base import BaseLink
from onehop._links.meeting import (
    Listener,
    PeerCredentials,
    connect_unix,
    listen_unix,
    peer_credentials,
    prove,
)
from onehop._links.outbox import JOINED_BYTES, Outbox, close_all, duplicate
from onehop._protocol.framing import (
    HEADER,
    HEADER_BYTES,
    FrameParser,
    pack_header,
)
from onehop.errors import LinkClosed, ProtocolError

__all__ = [
    "Listener",
    "PeerCredentials",
    "UnixLink",
    "connect_unix",
    "listen_unix",
    "peer_credentials",
    "prove",
]

SOCKET_BUFFER_BYTES = 1 << 20
SMALL_READ_BYTES = 16 << 10
LARGE_READ_BYTES = (
    64 << 10
)  # above 128 KiB malloc takes fresh pages for every read, which cost more
READ_PER_CALL_BYTES = 1 << 20
"""After so much, `receive` lets the other links of a loop have their turn."""
DESCRIPTORS_PER_FRAME = 253
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_PER_FRAME * array("i").itemsize)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))

_TRUNCATED = int(socket.MSG_CTRUNC)  # an enum's `&` takes a microsecond

_pack = HEADER.pack


class UnixLink(BaseLink):
    """A link over a connected Unix socket, which passes descriptors too.

    Parameters
    ----------
    sock : socket.socket
        Connected, past the handshake; the link owns it from now on.
    peer : int
        Rank at the other end.
    handshake_bytes_sent, handshake_bytes_received : int
        What the handshake took, for the counters of overhead.
    """

    medium = "unix"

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        handshake_bytes_sent: int = 0,
        handshake_bytes_received: int = 0,
    ) -> None:
        super().__init__(peer)
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self._sock = sock
        self._fd = sock.fileno()
        self._outbox = Outbox(sock)
        self._put = self._outbox.put
        self._recvmsg = sock.recvmsg
        self._parser = FrameParser()
        self._send_lock = threading.Lock()
        self._reading = False
        self._blocked = False
        self._send_failure = ""
        self._receive_failure = ""
        self._handshake_bytes = (handshake_bytes_sent, handshake_bytes_received)
        self._sent_frames = 0
        self._sent_raw_bytes = 0
        self._received_raw_bytes = 0
        self._read_bytes = SMALL_READ_BYTES

    # --- counters -----------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> int:
        """Control and payload bytes of all frames that `send` has taken."""
        with self._send_lock:  # a frame that is being sent has not been counted yet
            return self._sent_raw_bytes - HEADER_BYTES * self._sent_frames

    @property
    def received_bytes(self) -> int:
        """Control and payload bytes of all frames that `receive` has handed out."""
        parser = self._parser
        complete = self._received_raw_bytes - parser.held_bytes
        return complete - HEADER_BYTES * parser.frame_count

    @property
    def overhead_bytes_sent(self) -> int:
        """Bytes of the handshake and of frame headers."""
        return self._handshake_bytes[0] + HEADER_BYTES * self._sent_frames

    @property
    def overhead_bytes_received(self) -> int:
        """Bytes of the handshake and of frame headers."""
        return self._handshake_bytes[1] + HEADER_BYTES * self._parser.frame_count

    @property
    def queued_bytes(self) -> int:
        """Bytes, headers included, that the kernel has not taken yet."""
        return self._outbox.size_bytes

    @property
    def want_write(self) -> bool:
        """Whether `flush` has work to do once the descriptor is writable."""
        return self._blocked

    def fileno(self) -> int:
        """Descriptor to poll, level triggered; -1 once closed."""
        return -1 if self._closed else self._fd

    # --- sending ------------------------------------------------------------------------------------

    def send(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
    ) -> None:
        """Take one frame, from any thread, without ever blocking; see `Link.send`."""
        size = HEADER_BYTES + len(control) + len(payload)
        if fds or size > JOINED_BYTES:
            self._send_parts(source, destination, control, payload, fds)
            return
        data = _pack(len(control), len(payload), source, destination) + control + payload
        try:
            with self._send_lock:
                if self._send_failure:
                    raise self._ended(self._send_failure)
                try:
                    written = self._put(data)
                except OSError as error:
                    raise self._fail_sending(error) from error
                self._sent_frames += 1
                self._sent_raw_bytes += size
                if written:
                    return
            if not self._blocked:
                self._note_blocked()
        except BaseException:
            # Interrupted: the frame, or the rest of it, may be waiting with nobody to write it.
            self._note_blocked()
            raise

    def _send_parts(
        self,
        source: int,
        destination: int,
        control: bytes,
        payload: bytes,
        fds: Sequence[int],
    ) -> None:
        """Send what is not worth joining, or has descriptors."""
        header = pack_header(len(control), len(payload), source, destination)
        if len(fds) > DESCRIPTORS_PER_FRAME:
            raise ProtocolError(
                f"One frame passes at most {DESCRIPTORS_PER_FRAME} descriptors, not {len(fds)}; "
                f"send the rest to rank {destination} with further frames."
            )
        parts = [header + control, payload] if payload else [header + control]
        own = duplicate(fds)
        try:
            with self._send_lock:
                if self._send_failure:
                    close_all(own)
                    raise self._ended(self._send_failure)
                try:
                    written = self._outbox.put_parts(parts, own)
                except OSError as error:
                    raise self._fail_sending(error) from error
                self._sent_frames += 1
                self._sent_raw_bytes += sum(map(len, parts))
                if written:
                    return
            if not self._blocked:
                self._note_blocked()
        except BaseException:
            self._note_blocked()
            raise

    def _note_blocked(self) -> None:
        # Not under the lock: the callback may take the loop's.
        if self._outbox.entries and not self._send_failure:
            self._blocked = True
            if self.on_blocked is not None:
                self.on_blocked(self)

    def _fail_sending(self, error: OSError) -> LinkClosed:
        """Note, with the lock held, that nothing can be sent any more."""
        self._send_failure = _reason(error)
        self._outbox.drop()
        self._blocked = False
        return self._ended(self._send_failure)

    def flush(self) -> bool:
        """Write what waits, as far as the kernel takes it; true when nothing waits any more."""
        with self._send_lock:
            try:
                self._blocked = not (self._send_failure or self._outbox.pump())
            except OSError as error:
                self._fail_sending(error)
            return not self._blocked

    # --- receiving ----------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; see `Link.receive`."""
        # Instead of a lock, which costs ten times as much: see `close`.
        self._reading = True
        try:
            if self._receive_failure:
                self._raise_ended()
            frames: list[Frame] = []
            total = 0
            while True:
                size = self._read_bytes
                try:
                    # Reading into a buffer of our own would save no copy: frames are slices of `data`.
                    data, passed, flags, _ = self._recvmsg(size, _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
                except BlockingIOError:
                    return frames
                except OSError as error:
                    # Reported once, so it is kept: there may be frames to return first.
                    self._receive_failure = _reason(error)
                    return frames or self._raise_ended()
                if passed:
                    self._keep_fds(passed)
                if flags & _TRUNCATED:
                    self._receive_failure = (
                        "descriptors that it passed were lost, because this process has as many open "
                        "files as it may; raise `ulimit -n`"
                    )
                    self._shut()
                if not data:
                    return frames or self._raise_ended()
                count = len(data)
                self._received_raw_bytes += count
                new = self._parser.feed(data)
                if self._parser.violation is not None:
                    self._receive_failure = str(self._parser.violation)
                    self._shut()
                    return frames + new or self._raise_ended()
                if count < size:
                    self._read_bytes = SMALL_READ_BYTES
                    return frames + new if frames else new
                frames += new
                total += count
                if total >= READ_PER_CALL_BYTES:
                    return frames
                self._read_bytes = LARGE_READ_BYTES
        except (LinkClosed, ProtocolError):
            raise
        except BaseException as error:
            # A signal's exception, or no memory: what was just read is lost, and a stream with a hole in
            # it would be taken for other frames.
            self._receive_failure = f"reading was interrupted by {type(error).__name__}"
            self._shut()
            raise
        finally:
            self._reading = False
            if self._closed:
                self._release()

    def _raise_ended(self) -> list[Frame]:
        if self._parser.violation is not None:
            raise self._parser.violation
        if not self._receive_failure:
            held = self._parser.held_bytes
            self._receive_failure = _GONE + (
                f", in the middle of a frame of which {held} bytes had arrived" if held else ""
            )
        raise self._ended(self._receive_failure)

    def _shut(self) -> None:
        """End the connection, but not the descriptor.

        The peer learns at once that nobody listens, and the descriptor is readable for ever, so that a
        level-triggered loop comes back to hear the reason.
        """
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def _keep_fds(self, passed: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in passed:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                if not _CLOSE_ON_EXEC:
                    for fd in fds:
                        os.set_inheritable(fd, False)
                self._arrived_fds.extend(fds)

    # --- the end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the link; idempotent, from any thread."""
        # The number of a descriptor must not be closed, and given to another file, while a thread is
        # about to use it. Senders have a lock. A reader has none: either it sees the failure set here
        # before it reads, or we see `_reading`, and leave the descriptor for it to close.
        with self._send_lock:
            if self._closed:
                return
            self._send_failure = self._receive_failure = "this process closed it"
            self._closed = True
            self._blocked = False
            self._outbox.drop()
        # The peer must see the end now, also where a forked child still has the descriptor.
        self._shut()
        if not self._reading:
            self._release()

    def abandon(self) -> None:
        """In a forked child: let go of descriptors, take no lock, and leave the connection alone."""
        self._send_failure = self._receive_failure = "this process is a forked child of its owner"
        self._closed = True
        self._blocked = False
        self._outbox.drop()
        self._release()

    def _release(self) -> None:
        self._sock.close()
        self._close_arrived_fds()


_GONE = "the process closed it or is gone"


def _reason(error: OSError) -> str:
    if error.errno in (errno.EPIPE, errno.ECONNRESET):
        return _GONE
    return os.strerror(error.errno) if error.errno else str(error)
