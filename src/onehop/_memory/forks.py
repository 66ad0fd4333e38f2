"""What forked children mean for memory: they keep reading what their parent had mapped.

Must never know what is mapped. A pipe tells that a child, and everything that it forked in turn, is gone: each of them
holds the write end, and a read end sees the end of the stream when the last one has closed it. That needs no process
ids, which are reused, and no signal, which belongs to the user's program. (A child that closes every descriptor by
hand while it goes on reading is not seen.)
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Callable


def follow_forks(follower: object) -> None:
    """Call methods of an object around every fork of this process, for as long as the object lives.

    Parameters
    ----------
    follower : object
        Any of its methods `before_fork`, `after_fork_in_parent`, `after_fork_in_child` is called.
    """
    reference = weakref.ref(follower)  # handlers can not be removed again, so they must not keep it

    def caller(name: str) -> Callable[[], None] | None:
        method = getattr(type(follower), name, None)
        if method is None:
            return None

        def call() -> None:
            if (target := reference()) is not None:
                method(target)

        return call

    handlers = {
        "before": caller("before_fork"),
        "after_in_parent": caller("after_fork_in_parent"),
        "after_in_child": caller("after_fork_in_child"),
    }
    os.register_at_fork(**{when: call for when, call in handlers.items() if call is not None})


class ForkHold:
    """Tells whether the child of one fork, or a process that it forked, still lives.

    To be made just before the fork.
    """

    __slots__ = ("_gone", "_read_fd", "_write_fd")

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._gone = False

    def keep_parent_end(self) -> None:
        """In the parent, after the fork."""
        os.close(self._write_fd)

    def keep_child_end(self) -> None:
        """In the child; its write end stays open until it ends."""
        os.close(self._read_fd)

    def gone(self) -> bool:
        """Tell whether nobody is left; stays true."""
        if not self._gone and ended(self._read_fd):
            self._gone = True
            os.close(self._read_fd)
        return self._gone

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when nobody is left."""
        return self._read_fd

    def drop_in_child(self) -> None:
        """In a child of a later fork: this hold is the parent's business."""
        if not self._gone:
            self._gone = True
            os.close(self._read_fd)


class Lifeline:
    """Proof of the end of this process and of everything that it forked, to be given to peers.

    A closed link is no proof that nobody can read shared memory any more; the end of this stream is.

    Attributes
    ----------
    read_fd : int
        To be sent to peers: they see the end of the stream when the last holder of the write end has died.
    write_fd : int
        Never written to; forked children keep it, programs started with exec do not.
    """

    __slots__ = ("__weakref__", "read_fd", "write_fd")

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def close(self) -> None:
        """Give the proof now: the owner promises that nothing is mapped any more."""
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1


def ended(read_fd: int) -> bool:
    """Tell, without waiting, whether the last holder of a lifeline's write end is gone."""
    poll = select.poll()
    poll.register(read_fd, 0)
    return bool(poll.poll(0))
