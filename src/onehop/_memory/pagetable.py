"""What the kernel tells about the pages of this process: its mappings, private copies, and pages written since they were armed.

Numbers and byte layouts of Linux's headers, and nothing that decides. Must never know what a buffer, a blob or a watch is.
Every object here belongs to the process that made it: /proc/self/pagemap and a userfaultfd go on showing the *parent* in a
forked child, which must close them and open its own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from typing import NamedTuple

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

_PAGEMAP_SCAN = 0xC0606610
_PROCMAP_QUERY = 0xC0686611
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_UNREGISTER = 0x8010AA01
_UFFDIO_WRITEPROTECT = 0xC018AA06

_WRITTEN, _FILE, _PRESENT, _SWAPPED = 2, 4, 8, 16
_SCAN_WP_MATCHING, _SCAN_CHECK_WPASYNC = 1, 2

_FEATURE_WP_UNPOPULATED, _FEATURE_WP_ASYNC = 1 << 13, 1 << 15
_REGISTER_MODE_WP = 2
_USER_MODE_ONLY = 1
_USERFAULTFD_NUMBERS = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "ppc64le": 364}

_SMALL_VECTOR, _LARGE_VECTOR = 64, 4096
"""The kernel allocates room for as many answers: 512 and more cost 0.6 µs a call, so most scans ask for few."""

Ranges = list[tuple[int, int]]


# Mappings


class MappingInfo(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    stop: int
    private_anonymous: bool
    """Readable and writable, private, and of no file: only these may be believed when a scan says "not written"."""


class MemoryMap:
    """The mappings of this process.

    Parameters
    ----------
    use_query : bool
        Ask for one mapping with PROCMAP_QUERY (Linux 6.11); otherwise read the whole text.
    """

    __slots__ = ("_fd", "use_query")

    def __init__(self, use_query: bool = True) -> None:
        self.use_query = use_query
        self._fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def can_query(self) -> bool:
        """Tell whether this kernel has PROCMAP_QUERY."""
        here = ctypes.c_uint64()
        try:
            return self._query(ctypes.addressof(here)) is not None
        except OSError:
            return False

    def at_or_after(self, address: int) -> MappingInfo | None:
        """Return the mapping that holds `address`, or else the next one."""
        if self.use_query:
            return self._query(address)
        for line in self._lines():
            start, _, stop = line.split(b" ", 1)[0].partition(b"-")
            if int(stop, 16) > address:
                _, flags, _, device, inode = line.split(None, 5)[:5]
                anonymous = flags[:2] == b"rw" and flags[3:4] == b"p" and inode == b"0"
                return MappingInfo(
                    int(start, 16), int(stop, 16), anonymous and device.strip(b"0") == b":"
                )
        return None

    def count(self) -> int:
        """Count the mappings; slow (it reads the whole text)."""
        return len(self._lines())

    def _lines(self) -> list[bytes]:
        # A new descriptor for each reading: the position of a shared one would be a race between threads.
        with open("/proc/self/maps", "rb", buffering=0) as file:
            parts = []
            while part := file.read(1 << 20):
                parts.append(part)
        return b"".join(parts).splitlines()

    def _query(self, address: int) -> MappingInfo | None:
        argument = bytearray(104)
        struct.pack_into("3Q", argument, 0, 104, 0x10, address)  # "covering or next"
        try:
            fcntl.ioctl(self._fd, _PROCMAP_QUERY, argument, True)
        except FileNotFoundError:
            return None
        start, stop, flags, _, _, inode, device = struct.unpack_from("7Q", argument, 24)
        # flags: 1 readable, 2 writable, 8 shared
        return MappingInfo(start, stop, flags & 0b1011 == 0b0011 and inode == 0 and device == 0)


# Private copies of a file's pages


class Pagemap:
    """The page table of this process, as far as private file mappings are concerned.

    Parameters
    ----------
    use_scan : bool
        Ask with PAGEMAP_SCAN; otherwise read an entry of 8 bytes for every page.
    """

    __slots__ = ("_argument", "_fd", "_lock", "_vector", "_vector_address", "use_scan")

    def __init__(self, use_scan: bool = True) -> None:
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.use_scan = use_scan
        self._lock = threading.Lock()
        self._vector = (ctypes.c_uint64 * (3 * _SMALL_VECTOR))()
        self._vector_address = ctypes.addressof(self._vector)
        self._argument = memoryview(bytearray(96)).cast("Q")

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def can_scan(self) -> bool:
        """Tell whether this kernel has PAGEMAP_SCAN."""
        page = self._vector_address // PAGE_SIZE * PAGE_SIZE
        try:
            self._anon_by_scan(page, page + PAGE_SIZE, 1)
        except OSError:
            return False
        return True

    def anon_pages(self, address: int, length: int, max_ranges: int = 1) -> Ranges:
        """Find pages of a private file mapping that are the process's own copies, hence were written.

        Parameters
        ----------
        address, length : int
            The range; it is widened to whole pages.
        max_ranges : int
            Stop after so many.

        Returns
        -------
        list of (start, stop)
            Addresses; empty if all pages are still the file's.
        """
        start = address // PAGE_SIZE * PAGE_SIZE
        stop = -(-(address + length) // PAGE_SIZE) * PAGE_SIZE
        with self._lock:
            if self.use_scan:
                return self._anon_by_scan(start, stop, max_ranges)
            return self._anon_by_bits(start, stop, max_ranges)

    def _anon_by_scan(self, start: int, stop: int, max_ranges: int) -> Ranges:
        found: Ranges = []
        vector = self._vector
        while start < stop and len(found) < max_ranges:
            wanted = min(_SMALL_VECTOR, max_ranges - len(found))
            argument = self._argument
            struct.pack_into(
                "12Q",
                argument,
                0,
                *(96, 0, start, stop, 0, self._vector_address, wanted, 0),
                # inverted, all of, any of, returned
                *(_FILE, _FILE, _PRESENT | _SWAPPED, _PRESENT),
            )
            count = fcntl.ioctl(self._fd, _PAGEMAP_SCAN, argument, True)
            for at in range(0, 3 * count, 3):
                append_range(found, vector[at], vector[at + 1])
            start = argument[4]
        return found

    def _anon_by_bits(self, start: int, stop: int, max_ranges: int) -> Ranges:
        found: Ranges = []
        chunk_pages = 8192
        while start < stop and len(found) < max_ranges:
            pages = min(chunk_pages, (stop - start) // PAGE_SIZE)
            data = os.pread(self._fd, 8 * pages, start // PAGE_SIZE * 8)
            if len(data) < 8:
                raise OSError(errno.EIO, "/proc/self/pagemap ended early")
            for number, entry in enumerate(memoryview(data).cast("Q")):
                # bit 63 present, bit 62 swapped, bit 61 page of a file or shared
                if entry >> 61 in (2, 4, 6):
                    page = start + number * PAGE_SIZE
                    append_range(found, page, page + PAGE_SIZE)
                    if len(found) > max_ranges:
                        return found[:max_ranges]
            start += len(data) // 8 * PAGE_SIZE
        return found


# Pages written since they were armed


class WrittenPages:
    """A userfaultfd in asynchronous write-protect mode, and scans for the pages that were written.

    A page is *armed* when it was reported by `take`; it counts as written again from the first write on, and whenever its
    memory was given back (MADV_DONTNEED, a reclaimed MADV_FREE page). Not thread-safe: the arguments of the calls are
    allocated once.

    Parameters
    ----------
    exact_holes : bool
        Select "written or neither present nor swapped" explicitly, which costs 2.5 times as much. Kernels differ in whether
        the fast form (only "written") reports pages whose memory is gone; whoever makes this object tries it out.

    Raises
    ------
    OSError
        If the kernel lacks it (before Linux 6.7) or a container forbids it.
    """

    __slots__ = ("_argument", "_fd", "_look", "_pagemap", "_take", "_vector", "exact_holes")

    def __init__(self, exact_holes: bool = True) -> None:
        self._fd = self._pagemap = -1
        number = _USERFAULTFD_NUMBERS.get(os.uname().machine)
        if number is None:
            raise OSError(errno.ENOSYS, f"userfaultfd: {os.uname().machine} was not tried yet")
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        self._fd = libc.syscall(ctypes.c_long(number), ctypes.c_long(flags))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        try:
            features = _FEATURE_WP_ASYNC | _FEATURE_WP_UNPOPULATED
            fcntl.ioctl(self._fd, _UFFDIO_API, bytearray(struct.pack("3Q", 0xAA, features, 0)))
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise
        self._vector = (ctypes.c_uint64 * (3 * _LARGE_VECTOR))()
        self.exact_holes = exact_holes
        self._take = self._arguments(_SCAN_WP_MATCHING | _SCAN_CHECK_WPASYNC)
        self._look = self._arguments(_SCAN_CHECK_WPASYNC)

    def _arguments(self, flags: int) -> memoryview:
        selection = (0, _WRITTEN, 0, _WRITTEN)
        if self.exact_holes:
            selection = (_PRESENT, 0, _WRITTEN | _PRESENT, _WRITTEN | _PRESENT | _SWAPPED)
        vector = ctypes.addressof(self._vector)
        data = struct.pack("12Q", 96, flags, 0, 0, 0, vector, _SMALL_VECTOR, 0, *selection)
        return memoryview(bytearray(data)).cast("Q")

    def close(self) -> None:
        """Close both descriptors, which ends all protection in the process that opened them; may be called twice."""
        fds, self._fd, self._pagemap = (self._fd, self._pagemap), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def is_registered(self, page: int) -> bool:
        """Tell whether the mapping of one page is registered."""
        try:
            self.look(page, page + PAGE_SIZE)
        except OSError:
            return False
        return True

    def register(self, start: int, stop: int) -> None:
        """Register one whole mapping that is not; right afterwards none of its pages counts as armed.

        Raises
        ------
        OSError
            EBUSY where another userfaultfd holds the range, EINVAL where it cannot be registered.
        """
        fcntl.ioctl(
            self._fd,
            _UFFDIO_REGISTER,
            bytearray(struct.pack("4Q", start, stop - start, _REGISTER_MODE_WP, 0)),
        )
        # Before Linux 6.13 pages moved by mremap kept the mark "armed" though they could be written unseen meanwhile.
        stale = bytearray(
            struct.pack(
                "12Q",
                *(96, _SCAN_CHECK_WPASYNC, start, stop, 0, ctypes.addressof(self._vector), 1, 1),
                *(_WRITTEN, _WRITTEN, _PRESENT | _SWAPPED, _WRITTEN),
            )
        )
        if fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, stale):
            self.disarm(start, stop)

    def owns(self, start: int, stop: int) -> bool:
        """Tell whether registered pages are registered *here*: scans succeed on another userfaultfd's pages too."""
        try:
            fcntl.ioctl(
                self._fd,
                _UFFDIO_REGISTER,
                bytearray(struct.pack("4Q", start, stop - start, _REGISTER_MODE_WP, 0)),
            )
        except OSError:
            return False
        return True

    def unregister(self, start: int, stop: int) -> None:
        """Undo `register` for a range; scans of it fail from now on."""
        fcntl.ioctl(self._fd, _UFFDIO_UNREGISTER, bytearray(struct.pack("2Q", start, stop - start)))

    def disarm(self, start: int, stop: int) -> None:
        """Let whole pages be written without a fault; they count as written from now on."""
        fcntl.ioctl(
            self._fd, _UFFDIO_WRITEPROTECT, bytearray(struct.pack("3Q", start, stop - start, 0))
        )

    def look(self, start: int, stop: int) -> int:
        """Return the address of the first written page, or `stop`; nothing is armed.

        Raises
        ------
        PermissionError
            If part of the range is not registered and fewer than 64 ranges before that part were written.
        """
        argument = self._look
        argument[2] = start
        argument[3] = stop
        count = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, argument, True)
        if not count:
            return stop
        if not self.exact_holes:
            return self._vector[0]
        found = self._collect(argument, count, stop)
        return found[0][0] if found else stop

    def take(self, start: int, stop: int) -> Ranges:
        """Return the ranges of written pages and arm them, in one step for each page.

        Raises
        ------
        PermissionError
            If part of the range is not registered: some marks may have been taken, so all of it counts as written.
        """
        argument = self._take
        argument[2] = start
        argument[3] = stop
        count = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, argument, True)
        if not count:
            return []
        return self._collect(argument, count, stop)

    def _collect(self, argument: memoryview, count: int, stop: int) -> Ranges:
        found: Ranges = []
        vector, exact = self._vector, self.exact_holes
        argument[6] = _LARGE_VECTOR
        try:
            while True:
                for at in range(0, 3 * count, 3):
                    # Swapped out and not written, or armed before it was ever touched (the kernel counts that as swapped).
                    if exact and vector[at + 2] & (_WRITTEN | _SWAPPED) == _SWAPPED:
                        continue
                    append_range(found, vector[at], vector[at + 1])
                if argument[4] >= stop:
                    return found
                argument[2] = argument[4]
                count = fcntl.ioctl(self._pagemap, _PAGEMAP_SCAN, argument, True)
        finally:
            argument[6] = _SMALL_VECTOR


def append_range(ranges: Ranges, start: int, stop: int) -> None:
    """Append a range that lies behind all others; it is joined with the last one where they touch."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
