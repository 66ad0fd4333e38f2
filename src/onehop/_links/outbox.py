"""What a stream has yet to write, in an order that nothing can tear.

A program's main thread may be interrupted between any two bytecodes (Ctrl-C, a signal handler that
raises), also between the return of `send` and the line that notes how much it took. A stream that
forgets or repeats some bytes is lost for ever. So the result of every system call is stored by C code
(`list.extend(map(...))`) before the interpreter can look at signals, and every step that follows can be
done again from what is stored.

Must never know frames, ranks or when a descriptor is writable. Not locked: the link does that.
"""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence

# A program that restored SIGPIPE's default action must not die of a worker's death.
SEND_FLAGS = int(getattr(socket, "MSG_NOSIGNAL", 0))
_FLAGS = (SEND_FLAGS,)

MERGED_PART_BYTES = 1024
"""Parts of at most this size that wait are written together."""
MERGED_PARTS = 256
JOINED_BYTES = 64 << 10
"""Up to here joining header, control and payload is cheaper than a second system call."""

# (parts, progress, fds): `parts` is one buffer once anything of it was sent, before that several may be
# merged; `progress` holds what each call wrote; `fds` are ours, and go with the first byte.
Entry = tuple[list[bytes], list[int], list[int]]
_NO_FDS: list[int] = []

_RETRY = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))


class Outbox:
    """The bytes that wait for a stream socket, and the calls that write them."""

    __slots__ = ("_send", "_sendmsg", "entries")

    def __init__(self, sock: socket.socket) -> None:
        self.entries: deque[Entry] = deque()
        self._send = sock.send
        self._sendmsg = sock.sendmsg

    def put(self, data: bytes) -> bool:
        """Write `data`, or as much as goes, if nothing waits; false if something waits afterwards."""
        entries = self.entries
        if entries:
            parts, progress, fds = entries[-1]
            if (
                not progress
                and not fds
                and len(data) <= MERGED_PART_BYTES
                and len(parts[-1]) <= MERGED_PART_BYTES
                and len(parts) < MERGED_PARTS
            ):
                parts.append(data)
            else:
                entries.append(([data], [], _NO_FDS))
            return False
        progress = []
        entries.append(([data], progress, _NO_FDS))
        try:
            progress.extend(map(self._send, (data,), _FLAGS))
        except OSError as error:
            if error.errno not in _RETRY:
                raise
            return False
        if progress[0] == len(data):
            entries.popleft()
            return True
        return self.pump()

    def put_parts(self, parts: Sequence[bytes], own: list[int]) -> bool:
        """Like `put` for one thing in several parts; the descriptors `own` are ours from now on."""
        idle = not self.entries
        # One call: an interrupt must not leave half a frame behind.
        self.entries.extend(
            [([part], [], own if not i else _NO_FDS) for i, part in enumerate(parts)]
        )
        return self.pump() if idle else False

    def pump(self) -> bool:
        """Write until nothing waits (true) or the kernel takes no more (false)."""
        entries = self.entries
        while entries:
            parts, progress, fds = entries[0]
            try:
                if progress:
                    done = sum(progress)
                    if len(progress) > 64:
                        progress[:] = [done]
                    if done < len(parts[0]):
                        rest = memoryview(parts[0])[done:]
                        progress.extend(map(self._send, (rest,), _FLAGS))
                        continue
                    entries.popleft()
                elif fds:
                    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
                    progress.extend(map(self._sendmsg, (parts[:1],), (passed,), _FLAGS))
                    close_all(fds)
                else:
                    if len(parts) > 1:
                        parts[:] = [b"".join(parts)]
                    progress.extend(map(self._send, parts, _FLAGS))
            except OSError as error:
                if error.errno not in _RETRY:
                    raise
                return False
        return True

    def drop(self) -> None:
        """Forget everything that waits, and close the descriptors among it."""
        while self.entries:
            close_all(self.entries.popleft()[2])

    @property
    def size_bytes(self) -> int:
        """Bytes that wait."""
        # A copy of the deque: other threads may append meanwhile.
        return sum(
            sum(map(len, parts)) - sum(progress) for parts, progress, _ in list(self.entries)
        )


def duplicate(fds: Sequence[int]) -> list[int]:
    """Return descriptors of our own for the same files; all or none."""
    own: list[int] = []
    try:
        for fd in fds:
            own.append(os.dup(fd))  # noqa: PERF401 (a comprehension would lose those made so far)
    except BaseException:
        close_all(own)
        raise
    return own


def close_all(fds: list[int]) -> None:
    """Close descriptors and empty the list."""
    while fds:
        fd = fds.pop()
        try:
            os.close(fd)
        except OSError:
            pass
