"""Every system call that the memory layer makes, as plain functions on addresses and descriptors.

What concerns page tables is in `pagetable`, and reached through here. Must never know what an arena, a blob or a watched buffer is,
and keeps no state: whoever opens a descriptor here owns it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from onehop._memory.pagetable import (
    PAGE_SIZE,
    MappingInfo,
    MemoryMap,
    Pagemap,
    WrittenPages,
)

__all__ = [
    "MADV_DONTNEED",
    "MAP_ANONYMOUS",
    "MAP_FIXED",
    "MAP_PRIVATE",
    "MAP_SHARED",
    "PAGE_SIZE",
    "PROT_READ",
    "PROT_WRITE",
    "Capabilities",
    "MappingInfo",
    "MemoryMap",
    "Pagemap",
    "WrittenPages",
    "address_of",
    "advise",
    "map_memory",
    "map_private",
    "map_shared_readonly",
    "memcmp",
    "memfd_create",
    "memory_equal",
    "open_written_pages",
    "pread_all",
    "probe",
    "punch_hole",
    "pwrite_all",
    "reopen_readonly",
    "unlinked_segment",
    "unmap",
]

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
if sys.platform == "linux":
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


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


_byte_of = ctypes.c_char.from_buffer
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
    if not view.readonly and view.nbytes:
        return ctypes.addressof(_byte_of(view))  # three times as quick
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
    if sys.platform != "linux":
        return Capabilities(False, False, False, False, False)
    scan = bits = query = written = False
    try:
        pagemap = Pagemap()
        bits = True
        scan = pagemap.can_scan()
        pagemap.close()
        mappings = MemoryMap()
        query = mappings.can_query()
        mappings.close()
        WrittenPages().close()
        written = scan
    except OSError:
        pass
    return Capabilities(hasattr(os, "memfd_create"), written, scan, bits, query)


@functools.cache
def _from_environment() -> frozenset[str]:
    named = frozenset(filter(None, os.environ.get("ONEHOP_DISABLE", "").split(",")))
    return named - {"epoll"}  # the loop's


def probe(disable: Iterable[str] = ()) -> Capabilities:
    """Return what works here, found out once; what `disable` or ONEHOP_DISABLE names counts as missing."""
    off = _from_environment() | frozenset(disable)
    if unknown := off - _NAMES:
        raise ValueError(f"unknown capabilities to disable: {sorted(unknown)}")
    return _probe_all()._replace(**dict.fromkeys(off, False))


def open_written_pages() -> WrittenPages:
    """Open a userfaultfd and make sure, on memory of its own, that this kernel reports what must be reported.

    Raises
    ------
    OSError
        If the kernel lacks it, a container forbids it, or a trial failed: buffers are then to be compared.
    """
    for exact_holes in (False, True):
        pages = WrittenPages(exact_holes)
        try:
            if _reports_everything(pages):
                return pages
        except BaseException:
            pages.close()
            raise
        pages.close()
    raise OSError(errno.EOPNOTSUPP, "PAGEMAP_SCAN does not report all pages that changed")


def _reports_everything(pages: WrittenPages) -> bool:
    table_span = PAGE_SIZE * (PAGE_SIZE // 8)  # what one lowest page table covers
    address = map_memory(3 * table_span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS)
    base = -(-address // table_span) * table_span
    middle, end = base + table_span, base + 2 * table_span
    try:
        unmap(middle, end - middle)
        pages.register(address, middle)
        ctypes.memset(base, 1, 3 * PAGE_SIZE)
        ok = pages.take(base, middle) == [(base, middle)]
        ok = ok and pages.look(base, middle) == middle
        ctypes.memset(base + PAGE_SIZE, 2, 1)
        ok = ok and pages.take(base, middle) == [(base + PAGE_SIZE, base + 2 * PAGE_SIZE)]
        advise(base, PAGE_SIZE, MADV_DONTNEED)
        ok = ok and pages.take(base, middle) == [(base, base + PAGE_SIZE)]
        # Grown in place, a mapping stays registered, and its new part has no page table at all: the only sure way to make
        # such a hole. Kernels differ in what they say about it.
        if ok and _libc.mremap(base, table_span, 2 * table_span, 0) == base:
            return pages.take(middle, end) == [(middle, end)]
        return ok and pages.exact_holes
    finally:
        unmap(address, 3 * table_span)
