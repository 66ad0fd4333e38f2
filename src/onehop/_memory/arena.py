"""The arena of one process: a sparse file in memory from which segments are cut, written once and read by neighbours.

Must never know what lies in a segment, who holds it, or why it was freed.

The file is written only with `pwrite`: into pages that do not exist yet that is 2–3 times as fast as a copy through a
mapping (no fault for every page), and a limit of the file system comes back as an error where a mapping gets SIGBUS.
Freed memory stays *warm* (its pages exist) and is taken first; beyond a bound, or when it has not been wanted for a
while, it is punched out of the file and is *cold*: address space without memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from onehop._memory import kernel, limits
from onehop._memory.extents import FreeRanges
from onehop._memory.forks import follow_forks
from onehop.errors import MemoryLimitError

PAGE_SIZE = kernel.PAGE_SIZE

_WRITE_CHUNK_BYTES = 1 << 20
"""The file's lock is held during one write; a small write must not wait for a copy of gigabytes. Smaller chunks cost time."""

_PUNCH_CHUNK_BYTES = 8 << 20
"""Punching holds the file's lock too, and runs at about 4 GB/s."""

_WARM_SLACK_BYTES = 64 << 20
"""So much may stay warm beyond the highest use so far."""

_WARM_NS = 3_000_000_000
"""Warm memory that nobody wanted for so long goes back to the system."""

_SMALL_BYTES = 256 << 10
_LARGEST_SPLIT_BYTES = 4 << 20
"""A small segment that lives long must not spoil a large warm range for the next large segment."""

_CHECK_BYTES = 16 << 20
"""The system's limits are asked when so much new memory was taken since the last time: reading them costs 0.1 ms."""

_MARGIN_BYTES = 16 << 20
"""Left to the rest of the process when a limit is near."""

_VIEW_BYTES = 1 << 30
"""Address space of the first view of the file; doubled as needed."""

_MADV_DONTFORK, _MADV_DONTDUMP = 10, 16


class ArenaSegment(NamedTuple):
    """A range of the arena."""

    offset: int
    size_bytes: int


class Arena:
    """One process's arena.

    Parameters
    ----------
    rank : int
        Only for messages.
    limit_bytes : int, optional
        At most so much may be in use.
    use_memfd : bool
        False uses an unlinked POSIX shared memory object, as where there is no memfd.
    root : str
        Where the limits of the system are read; for tests.

    Attributes
    ----------
    fd_readonly : int
        A descriptor to hand to neighbours.
    in_use_bytes, peak_bytes : int
        Size of the segments that are allocated, and the most it ever was.
    """

    def __init__(
        self,
        rank: int,
        limit_bytes: int | None = None,
        use_memfd: bool = True,
        root: str = "/",
    ) -> None:
        self.rank = rank
        self.limit_bytes = limit_bytes
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._root = root
        self._lock = threading.Lock()
        self._warm = FreeRanges()
        self._cold = FreeRanges()
        self._end = 0
        self._file_bytes = 0
        self._unchecked_bytes = _CHECK_BYTES
        self._last_use_ns = time.monotonic_ns()
        self._views: list[tuple[int, int]] = []
        if use_memfd and kernel.probe().memfd:
            self._fd = kernel.memfd_create("onehop")
            self.fd_readonly = kernel.reopen_readonly(self._fd)
            self._bounded_by_file_system = False
        else:
            self._fd, self.fd_readonly = kernel.unlinked_segment()
            self._bounded_by_file_system = True
        follow_forks(self)

    @property
    def warm_bytes(self) -> int:
        """Freed memory that is kept for the next segments."""
        return self._warm.total_bytes

    def allocate(self, size_bytes: int) -> ArenaSegment:
        """Take a segment of at least so many bytes, rounded up to whole pages.

        Raises
        ------
        MemoryLimitError
            If it does not fit; nothing was written.
        """
        size_bytes = -(-size_bytes // PAGE_SIZE) * PAGE_SIZE
        with self._lock:
            if self.limit_bytes is not None and self.in_use_bytes + size_bytes > self.limit_bytes:
                raise self._refusal(
                    size_bytes,
                    self.limit_bytes - self.in_use_bytes,
                    f"the memory limit of the process (memory_limit = {self.limit_bytes} bytes)",
                )
            offset, cold_bytes = self._take(size_bytes)
            self.in_use_bytes += size_bytes
            surplus = 0
            if cold_bytes:
                bound = max(self.peak_bytes, _WARM_SLACK_BYTES)
                if self.limit_bytes is not None:
                    bound = min(bound, self.limit_bytes)
                surplus = self.in_use_bytes + self._warm.total_bytes - bound
        try:
            if surplus > 0:
                self._punch_warm(surplus)
            if cold_bytes:
                self._check_room(size_bytes, cold_bytes)
                self._grow_file()
        except BaseException:
            self._forget(offset, size_bytes)
            raise
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
            self._last_use_ns = time.monotonic_ns()
        return ArenaSegment(offset, size_bytes)

    def _grow_file(self) -> None:
        with self._lock:
            if self._end <= self._file_bytes:
                return
            # In steps, so that small segments do not each cost a call; the file is sparse.
            for wanted in (self._file_bytes + _VIEW_BYTES, self._end):
                if wanted < self._end:
                    continue
                try:
                    os.ftruncate(self._fd, wanted)
                except OSError as error:
                    failure = error
                else:
                    self._file_bytes = wanted
                    return
            raise self._refusal(
                self._end - self._file_bytes, 0, f"the limit on file sizes ({failure.strerror})"
            )

    def _take(self, size_bytes: int) -> tuple[int, int]:
        """Choose a place: its offset, and how many of its bytes have no memory yet."""
        small = size_bytes < _SMALL_BYTES
        start = self._warm.take(size_bytes, _LARGEST_SPLIT_BYTES if small else None)
        if start is not None:
            return start, 0
        if not small and (largest := self._warm.largest()) is not None:
            # The largest warm range, continued by cold space behind it.
            start, warm_bytes = largest
            rest = size_bytes - warm_bytes
            if rest > 0:
                behind = start + warm_bytes
                if behind == self._end:
                    self._end += rest
                    self._warm.remove(start, warm_bytes)
                    return start, rest
                if self._cold.size_at(behind) >= rest:
                    self._cold.remove(behind, rest)
                    self._warm.remove(start, warm_bytes)
                    return start, rest
        start = self._cold.take(size_bytes)
        if start is None:
            start = self._end
            self._end += size_bytes
        return start, size_bytes

    def _check_room(self, size_bytes: int, cold_bytes: int) -> None:
        with self._lock:
            self._unchecked_bytes += cold_bytes
            if self._unchecked_bytes < _CHECK_BYTES:
                return
            self._unchecked_bytes = 0
        found = self._room()
        if found is not None and cold_bytes + _MARGIN_BYTES > found.available_bytes:
            # What is kept warm is ours to give.
            self._punch_warm(self._warm.total_bytes)
            found = self._room()
        if found is not None and cold_bytes + _MARGIN_BYTES > found.available_bytes:
            with self._lock:
                self._unchecked_bytes = _CHECK_BYTES
            raise self._refusal(size_bytes, found.available_bytes, found.limit)

    def _room(self) -> limits.Room | None:
        found = limits.room(self._root)
        if self._bounded_by_file_system:
            system = os.fstatvfs(self._fd)
            free = limits.Room(system.f_bavail * system.f_frsize, "the size of /dev/shm")
            # A file system without a size of its own reports none.
            if system.f_blocks and (found is None or free < found):
                # No memory of the process is needed beyond the file system's own.
                found = limits.Room(free.available_bytes + _MARGIN_BYTES, free.limit)
        return found

    def _refusal(self, size_bytes: int, available_bytes: int, limit: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"rank {self.rank} on {os.uname().nodename} cannot take {size_bytes} bytes of shared memory: "
            f"{max(0, available_bytes)} bytes are left below {limit}; the process has {self.in_use_bytes} bytes "
            "of shared memory in use. Nothing was written. Drop values that are no longer needed, send "
            "smaller parts, or raise that limit."
        )

    def write(self, segment: ArenaSegment, offset: int, buffer: memoryview | bytes) -> None:
        """Copy a flat buffer into a segment."""
        view = memoryview(buffer)
        position, size = segment.offset + offset, len(view)
        done = 0
        try:
            if size <= _WRITE_CHUNK_BYTES:
                done = os.pwrite(self._fd, view, position)
            while done < size:
                done += os.pwrite(self._fd, view[done : done + _WRITE_CHUNK_BYTES], position + done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                raise
            raise MemoryLimitError(
                f"rank {self.rank} on {os.uname().nodename}: the system refused {size} bytes of shared memory "
                f"after {done} ({error.strerror}); raise the limit on shared memory or file sizes"
            ) from error

    def map_writable(self, segment: ArenaSegment) -> int:
        """Map a segment that this process goes on writing to; returns the address, to be unmapped by the caller.

        Only for what is never given out as a sealed segment.
        """
        return kernel.map_memory(
            segment.size_bytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED,
            self._fd,
            segment.offset,
        )

    def free(self, segment: ArenaSegment, holes: Sequence[tuple[int, int]] = ()) -> None:
        """Give a segment back; quick, since memory is only returned to the system by `trim` and `allocate`.

        Parameters
        ----------
        segment : ArenaSegment
            What `allocate` gave.
        holes : sequence of (offset, size)
            What `punch` returned for it, sorted.
        """
        at = segment.offset
        with self._lock:
            for offset, size_bytes in holes:
                start = segment.offset + offset
                if start > at:
                    self._warm.add(at, start - at)
                    self.in_use_bytes -= start - at
                self._cold.add(start, size_bytes)
                at = start + size_bytes
            rest = segment.offset + segment.size_bytes - at
            if rest:
                self._warm.add(at, rest)
                self.in_use_bytes -= rest
            self._last_use_ns = time.monotonic_ns()

    def trim(self, most_bytes: int = 32 << 20, now_ns: int | None = None) -> bool:
        """Return memory that was not wanted for a while to the system, in small steps.

        Returns
        -------
        bool
            True if more is to be done now.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if not self._warm.total_bytes or now_ns - self._last_use_ns < _WARM_NS:
            return False
        self._punch_warm(most_bytes)
        return self._warm.total_bytes > 0

    def punch(self, segment: ArenaSegment, offset: int, length: int) -> tuple[int, int]:
        """Return the memory of the whole pages inside a part of a live segment that nobody will read again.

        Returns
        -------
        (offset, size)
            What was punched, for `free`; its size may be 0.
        """
        start = -(-offset // PAGE_SIZE) * PAGE_SIZE
        size_bytes = max(0, (offset + length) // PAGE_SIZE * PAGE_SIZE - start)
        self._punch(segment.offset + start, size_bytes)
        with self._lock:
            self.in_use_bytes -= size_bytes
        return start, size_bytes

    def _punch_warm(self, most_bytes: int) -> None:
        while most_bytes > 0:
            with self._lock:
                taken = self._warm.pop_tail(min(most_bytes, _PUNCH_CHUNK_BYTES))
            if taken is None:
                return
            # In neither list meanwhile, so that nobody is given the range before its memory is gone.
            self._punch(*taken)
            most_bytes -= taken[1]
            with self._lock:
                self._cold.add(*taken)

    def _punch(self, start: int, size_bytes: int) -> None:
        while size_bytes > 0:
            kernel.punch_hole(self._fd, start, min(size_bytes, _PUNCH_CHUNK_BYTES))
            start += _PUNCH_CHUNK_BYTES
            size_bytes -= _PUNCH_CHUNK_BYTES

    def _forget(self, offset: int, size_bytes: int) -> None:
        """Undo an allocation that nothing was written to."""
        self._punch(offset, size_bytes)  # a part of it may have been warm
        with self._lock:
            self.in_use_bytes -= size_bytes
            if offset + size_bytes == self._end:
                self._end = offset
            else:
                self._cold.add(offset, size_bytes)

    def view_address(self, segment: ArenaSegment, offset: int = 0) -> int:
        """Return where a byte of a segment can be read in this process; good until `close`.

        Only what was written may be read: reading a hole would take memory.
        """
        stop = segment.offset + segment.size_bytes
        if not self._views or self._views[-1][1] < stop:
            with self._lock:
                self._grow_view(stop)
        return self._views[-1][0] + segment.offset + offset

    def _grow_view(self, stop: int) -> None:
        length = max(_VIEW_BYTES, self._views[-1][1] * 2 if self._views else 0)
        while length < stop:
            length *= 2
        if self._views and self._views[-1][1] >= stop:
            return
        # The old view stays, since another thread may be comparing with it; address space costs nothing.
        address = kernel.map_shared_readonly(self.fd_readonly, 0, length)
        if sys.platform == "linux":
            kernel.advise(address, length, _MADV_DONTFORK)
            kernel.advise(address, length, _MADV_DONTDUMP)
        self._views.append((address, length))

    def close(self) -> None:
        """Close the descriptors and the views; mappings by others keep the memory they show."""
        with self._lock:
            fds = (self._fd, self.fd_readonly)
            self._fd = self.fd_readonly = -1
            views, self._views = self._views, []
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        for address, length in views:
            kernel.unmap(address, length)

    def after_fork_in_child(self) -> None:
        """Close the descriptors, so that the parent's memory ends with the parent."""
        self._lock = threading.Lock()
        # The views are not inherited where the system can leave them out; elsewhere they end with the child.
        self._views = []
        self.close()
