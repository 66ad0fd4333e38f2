"""Every system call that the memory layer makes, as plain functions on addresses and descriptors.

Two thirds of this file are numbers from the kernel's headers. Must never know what an arena, a blob or a watched buffer is,
and keeps no state: whoever opens a descriptor here owns it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
import sys
import threading
from collections.abc import Iterable
from typing import NamedTuple

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")

PROT_READ, PROT_WRITE = 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED = 1, 2, 0x10
MAP_ANONYMOUS = 0x20 if sys.platform == "linux" else 0x1000
MADV_DONTNEED = 4

_IO_CHUNK_BYTES = 0x40000000
"""One read or write call moves at most 2 GiB less a page on Linux and 2 GiB on macOS."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable interface; only the first field is read here."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# Memory by address


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a contiguous buffer (read-only ones too).

    The address is good only as long as the caller keeps the exporter of `view` alive.
    """
    buffer = _PyBuffer()
    _get_buffer(view, buffer, 0)
    address: int = buffer.buf or 0
    _release_buffer(buffer)
    return address


def memory_equal(first: int, second: int, length: int) -> bool:
    """Compare two ranges of this process's memory by address; the interpreter lock is released."""
    return bool(_libc.memcmp(first, second, length) == 0)


def memcmp(first: int, second: int, length: int) -> int:
    """Compare like C's memcmp."""
    return int(_libc.memcmp(first, second, length))


def map_memory(length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map `length` bytes and return the address.

    The `mmap` module is not used, because it keeps a duplicate of the descriptor for every mapping.
    """
    address: int | None = _libc.mmap(None, length, protection, flags, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise _failed(f"mmap of {length} bytes")
    return address


def map_private(fd: int, offset: int, length: int) -> int:
    """Map part of a file copy-on-write: readable and writable, nobody else sees the writes."""
    return map_memory(length, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, offset)


def map_shared_readonly(fd: int, offset: int, length: int) -> int:
    """Map part of a file for reading; later writes to the file show through."""
    return map_memory(length, PROT_READ, MAP_SHARED, fd, offset)


def unmap(address: int, length: int) -> None:
    """Remove a mapping made by `map_memory`."""
    if _libc.munmap(address, length):
        raise _failed(f"munmap of {length} bytes at {address:#x}")


def advise(address: int, length: int, advice: int) -> None:
    """Call madvise."""
    if _libc.madvise(address, length, advice):
        raise _failed(f"madvise({advice})")


# Files that hold memory


def memfd_create(name: str) -> int:
    """Open a new anonymous file in memory, closed on exec."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def unlinked_segment() -> tuple[int, int]:
    """Open a POSIX shared memory object whose name is gone already: (read-write, read-only) descriptors.

    For systems without memfd. Its size is 0; it is bounded by /dev/shm on Linux.
    """
    # Private, but what multiprocessing.shared_memory itself stands on.
    import _posixshmem  # type: ignore[import-not-found]
    import secrets

    name = "/onehop-" + secrets.token_hex(8)
    writable = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        readonly = _posixshmem.shm_open(name, os.O_RDONLY, mode=0o600)
    except BaseException:
        os.close(writable)
        raise
    finally:
        _posixshmem.shm_unlink(name)
    return writable, readonly


def reopen_readonly(fd: int) -> int:
    """Open the file behind `fd` again, for reading only (Linux)."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def pwrite_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Write all of a flat buffer at `offset`, in as many calls as it takes."""
    done, size = 0, len(buffer)
    while done < size:
        done += os.pwrite(fd, buffer[done : done + _IO_CHUNK_BYTES], offset + done)


def pread_all(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill a flat writable buffer from `offset`; a short file raises EOFError."""
    done, size = 0, len(buffer)
    while done < size:
        count = os.preadv(fd, [buffer[done : done + _IO_CHUNK_BYTES]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at {offset + done}, {size - done} bytes early")
        done += count


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give the memory of a range of a file back; its size stays, the range reads as zeros.

    Returns
    -------
    bool
        False where the system cannot; the memory then stays in use.
    """
    if sys.platform != "linux":
        return False
    libc = _libc
    result = libc.fallocate(
        ctypes.c_int(fd), ctypes.c_int(3), ctypes.c_int64(offset), ctypes.c_int64(length)
    )
    if result:
        if ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise _failed(f"fallocate of {length} bytes")
    return True


# What this kernel can do


class Capabilities(NamedTuple):
    """What was found to work, minus what was switched off."""

    memfd: bool
    userfaultfd: bool
    """Asynchronous write protection of pages (Linux 6.7), together with `pagemap_scan`."""
    pagemap_scan: bool
    pagemap_bits: bool
    """/proc/self/pagemap tells pages of files from private copies by bit 61."""
    procmap_query: bool


_NAMES = frozenset(Capabilities._fields)


@functools.cache
def _probe_all() -> Capabilities:
    linux = sys.platform == "linux"
    scan = bits = query = uffd = False
    if linux:
        try:
            pagemap = Pagemap(use_scan=True)
            bits = True
            scan = pagemap.can_scan()
            pagemap.close()
        except OSError:
            pass
    return Capabilities(hasattr(os, "memfd_create") and linux, uffd, scan, bits, query)


@functools.cache
def _from_environment() -> frozenset[str]:
    return frozenset(filter(None, os.environ.get("ONEHOP_DISABLE", "").split(",")))


def probe(disable: Iterable[str] = ()) -> Capabilities:
    """Return what works here, found out once; what `disable` or ONEHOP_DISABLE names counts as missing."""
    off = _from_environment() | frozenset(disable)
    if unknown := off - _NAMES:
        raise ValueError(f"unknown capabilities to disable: {sorted(unknown)}")
    return _probe_all()._replace(**dict.fromkeys(off, False))


# Page tables

_PAGEMAP_SCAN = 0xC0606610
_SCAN_WP_MATCHING, _SCAN_CHECK_WPASYNC = 1, 2
PAGE_IS_WRITTEN, PAGE_IS_FILE, PAGE_IS_PRESENT, PAGE_IS_SWAPPED = 2, 4, 8, 16


class Pagemap:
    """The page table of this process, through one descriptor of /proc/self/pagemap.

    The descriptor shows the process that opened it, also in a forked child: a child must close it and open its own.

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
        self._vector = (ctypes.c_uint64 * (3 * 64))()
        self._vector_address = ctypes.addressof(self._vector)
        self._argument = memoryview(bytearray(96)).cast("Q")

    def close(self) -> None:
        """Close the descriptor; may be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def can_scan(self) -> bool:
        """Tell whether this kernel has PAGEMAP_SCAN."""
        probe_page = ctypes.addressof(self._vector) // PAGE_SIZE * PAGE_SIZE
        try:
            self._anon_by_scan(probe_page, probe_page + PAGE_SIZE, 1)
        except OSError:
            return False
        return True

    def anon_pages(self, address: int, length: int, max_ranges: int = 1) -> list[tuple[int, int]]:
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

    def _anon_by_scan(self, start: int, stop: int, max_ranges: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        argument, vector = self._argument, self._vector
        while start < stop and len(found) < max_ranges:
            wanted = min(64, max_ranges - len(found))
            struct.pack_into(
                "12Q",
                argument,
                0,
                *(96, 0, start, stop, 0, self._vector_address, wanted, 0),
                # inverted, all of, any of, returned
                *(PAGE_IS_FILE, PAGE_IS_FILE, PAGE_IS_PRESENT | PAGE_IS_SWAPPED, PAGE_IS_PRESENT),
            )
            count = fcntl.ioctl(self._fd, _PAGEMAP_SCAN, argument, True)
            for at in range(0, 3 * count, 3):
                _append_range(found, vector[at], vector[at + 1])
            start = argument[4]
        return found

    def _anon_by_bits(self, start: int, stop: int, max_ranges: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
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
                    _append_range(found, page, page + PAGE_SIZE)
                    if len(found) > max_ranges:
                        return found[:max_ranges]
            start += len(data) // 8 * PAGE_SIZE
        return found


def _append_range(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
