"""The links of one process: opened on first use, proven, and ended.

Must never know what a message means, or what a rank is for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from onehop import errors
from onehop._contracts.link import Frame, Link
from onehop._links.inproc import InprocLink
from onehop._links.meeting import connect_unix, listen_unix, prove
from onehop._links.stream import UnixLink
from onehop._memory.forks import Lifeline
from onehop._protocol import messages
from onehop._protocol.handshake import size_bytes as handshake_bytes
from onehop._runtime.poller import OUT, wake_pipe

if TYPE_CHECKING:
    import socket

    from onehop._memory.mapping import Attachments
    from onehop._runtime.loop import Loop

HANDSHAKE_S = 10.0


class Observer(Protocol):
    """Who wants to know of frames, joins and losses. Called by the reading thread, except `met`."""

    def on_frames(self, link: Link, frames: list[Frame]) -> None:
        """Frames arrived, in order."""

    def met(self, hello: messages.Hello, link: Link) -> None:
        """A process has proven itself; its link works already."""

    def on_link_lost(self, rank: int, reason: str) -> None:
        """The last link to a process ended."""

    def on_gone(self, rank: int) -> None:
        """Neither that process nor a fork of it can read anything any more."""


class Peers:
    """Links by rank, and the listener that others use to find this process."""

    def __init__(
        self,
        rank: int,
        cluster_id: str,
        secret: bytes,
        loop: Loop,
        attachments: Attachments,
        arena_fd: int,
        observer: Observer,
    ) -> None:
        self._rank = rank
        self._cluster_id = cluster_id
        self._secret = secret
        self._loop = loop
        self._attachments = attachments
        self._observer = observer
        self.lifeline = Lifeline()
        self._arena_fd = arena_fd
        self.hello = messages.Hello(rank, os.getpid(), "", "", "", "", "")
        self.links: dict[int, Link] = {}
        self.all_links: list[Link] = []
        self._lifelines: dict[int, int] = {}  # read end: rank
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}
        self._closed = False
        self.listener = listen_unix(cluster_id)
        loop.watch(self.listener.fileno(), self._on_connection)
        own = InprocLink(rank)
        own.on_ready = self._on_own_ready
        self._own = own
        self.links[rank] = own
        self.all_links.append(own)
        self._own_read, self._own_write = wake_pipe()
        loop.watch(self._own_read, self._on_own)

    # --- meeting ----------------------------------------------------------------------------------

    def open(self, rank: int, address: str) -> Link:
        """Connect to a listener and prove both sides; blocks for at most `HANDSHAKE_S`."""
        with self._lock:
            gate = self._opening.setdefault(rank, threading.Lock())
        with gate:
            link = self.links.get(rank)
            if link is not None:
                return link
            try:
                sock = connect_unix(address, HANDSHAKE_S)
            except OSError as error:
                raise errors.LinkClosed(
                    f"rank {rank} does not listen any more ({error})"
                ) from error
            return self._prove(sock, "connect")

    def _on_connection(self, _events: int) -> None:
        while True:
            sock = self.listener.accept()
            if sock is None:
                return
            # A handshake waits for its peer, which the reading thread must not.
            threading.Thread(
                target=self._accept, args=(sock,), name="onehop-accept", daemon=True
            ).start()

    def _accept(self, sock: socket.socket) -> None:
        try:
            self._prove(sock, "accept")
        except (errors.HandshakeError, errors.LinkClosed, OSError):
            return  # whoever it was has been told; this process owes it nothing

    def _prove(self, sock: socket.socket, role: str) -> Link:
        fds: list[int] = []
        own_hello = bytes(messages.encode(self.hello))
        other_role = "accept" if role == "connect" else "connect"
        try:
            raw, fds, _credentials = prove(
                sock,
                self._secret,
                self._cluster_id,
                role,
                own_hello,
                (self._arena_fd, self.lifeline.read_fd),
                HANDSHAKE_S,
            )
            hello = messages.decode_hello(raw)
            if len(fds) != 2:
                raise errors.HandshakeError(
                    f"rank {hello.rank} did not pass its arena and its lifeline"
                )
        except BaseException:
            for fd in fds:
                os.close(fd)
            sock.close()
            raise
        arena_fd, lifeline_fd = fds
        link = UnixLink(
            sock,
            hello.rank,
            handshake_bytes(role, len(own_hello)),
            handshake_bytes(other_role, len(raw)),
        )
        link.on_blocked = self._on_blocked
        with self._lock:
            if self._closed:
                link.close()
                os.close(arena_fd)
                os.close(lifeline_fd)
                raise errors.LinkClosed("this process has left its cluster")
            self._attachments.add_arena(hello.rank, arena_fd)
            self.all_links.append(link)
            # Both sides may have connected at once: both links are read, each side sends on its first.
            self.links.setdefault(hello.rank, link)
            if hello.rank in self._lifelines.values():
                os.close(lifeline_fd)
            else:
                self._lifelines[lifeline_fd] = hello.rank
                self._loop.watch(lifeline_fd, self._lifeline_handler(lifeline_fd, hello.rank))
        self._observer.met(hello, link)
        self._loop.watch(link.fileno(), self._reader(link))
        if link.want_write:
            self._loop.want_write(link.fileno(), True)
        return link

    def _on_blocked(self, link: Link) -> None:
        self._loop.want_write(link.fileno(), True)

    # --- reading ----------------------------------------------------------------------------------

    def _reader(self, link: Link) -> Callable[[int], None]:
        observer = self._observer
        receive = link.receive

        def on_event(events: int) -> None:
            if events & OUT and link.flush():
                self._loop.want_write(link.fileno(), False)
                # Another thread may have blocked again between the flush and this line.
                if link.want_write:
                    self._loop.want_write(link.fileno(), True)
            if events & ~OUT:
                try:
                    frames = receive()
                except (errors.LinkClosed, errors.ProtocolError) as error:
                    self._lose(link, str(error))
                    return
                if frames:
                    observer.on_frames(link, frames)

        return on_event

    def _lose(self, link: Link, reason: str) -> None:
        self._loop.forget(link.fileno())
        with self._lock:
            if link in self.all_links:
                self.all_links.remove(link)
            if self.links.get(link.peer) is link:
                del self.links[link.peer]
                for other in self.all_links:
                    if other.peer == link.peer:
                        self.links[link.peer] = other
            last = link.peer not in self.links
        link.close()
        if last:
            self._observer.on_link_lost(link.peer, reason)

    def _lifeline_handler(self, fd: int, rank: int) -> Callable[[int], None]:
        def on_event(_events: int) -> None:
            self._loop.forget(fd)
            self._lifelines.pop(fd, None)
            os.close(fd)
            self._observer.on_gone(rank)

        return on_event

    def _on_own_ready(self, _link: Link) -> None:
        try:
            os.write(self._own_write, b"\0")
        except (BlockingIOError, OSError):
            pass  # full, so it will be read; or closed

    def _on_own(self, _events: int) -> None:
        try:
            os.read(self._own_read, 4096)
        except BlockingIOError:
            pass
        frames = self._own.receive()
        if frames:
            self._observer.on_frames(self._own, frames)

    # --- the end ----------------------------------------------------------------------------------

    def drop(self, rank: int, reason: str) -> None:
        """End every link to a process; called by the reading thread."""
        for link in [link for link in self.all_links if link.peer == rank]:
            self._lose(link, reason)

    def stop_listening(self) -> None:
        """Take no new connections."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.forget(self.listener.fileno())
                self.listener.close()

    def close(self) -> None:
        """Close every descriptor; the loop must have ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.listener.close()
            for link in self.all_links:
                link.close()
            self.all_links.clear()
            self.links.clear()
            for fd in self._lifelines:
                os.close(fd)
            self._lifelines.clear()
        self.lifeline.close()
        for fd in (self._own_read, self._own_write):
            os.close(fd)

    def abandon(self) -> None:
        """In a forked child: let go of our copies; the lifeline stays, it says that we may still read."""
        for link in self.all_links:
            link.abandon()
        self.listener.close()
        for fd in (*self._lifelines, self._own_read, self._own_write):
            os.close(fd)
        self._lifelines.clear()
