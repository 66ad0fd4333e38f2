"""System calls by address and descriptor, and the page table of private file mappings, in every form of asking."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from onehop._memory import kernel

PAGE = kernel.PAGE_SIZE

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not kernel.probe().memfd, reason="needs memfd"),
]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = kernel.memfd_create("onehop-test")
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(b"abcdef")),
        memoryview(b"abcdef"),
        memoryview(bytearray(b"xxabcdef"))[2:],
        memoryview(b"xxabcdefyy")[2:8],
    ],
    ids=["writable", "read-only", "slice", "slice of bytes"],
)
def test_the_address_of_a_view(view: memoryview) -> None:
    assert ctypes.string_at(kernel.address_of(view), 6) == b"abcdef"


def test_the_address_of_nothing() -> None:
    assert isinstance(kernel.address_of(memoryview(b"")), int)
    assert isinstance(kernel.address_of(memoryview(bytearray())), int)


def test_comparing_memory() -> None:
    a, b = memoryview(b"a" * 5000 + b"x"), memoryview(b"a" * 5000 + b"y")
    at, bt = kernel.address_of(a), kernel.address_of(b)
    assert kernel.memory_equal(at, bt, 5000)
    assert not kernel.memory_equal(at, bt, 5001)
    assert kernel.memcmp(at, bt, 5001) < 0 < kernel.memcmp(bt, at, 5001)


def test_private_and_shared_maps_of_a_file(memfd: int) -> None:
    os.ftruncate(memfd, 4 * PAGE)
    readonly = kernel.reopen_readonly(memfd)
    try:
        kernel.pwrite_all(memfd, memoryview(b"s" * PAGE), PAGE)
        private = kernel.map_private(readonly, PAGE, 2 * PAGE)
        shared = kernel.map_shared_readonly(readonly, PAGE, 2 * PAGE)
        ctypes.memset(private, ord("p"), 10)
        assert ctypes.string_at(shared, 10) == b"s" * 10
        assert ctypes.string_at(private, 11) == b"p" * 10 + b"s"
        with pytest.raises(PermissionError):
            kernel.map_memory(
                PAGE, kernel.PROT_READ | kernel.PROT_WRITE, kernel.MAP_SHARED, readonly
            )
        kernel.unmap(private, 2 * PAGE)
        kernel.unmap(shared, 2 * PAGE)
        with pytest.raises(OSError, match="mmap of 0 bytes"):
            kernel.map_private(readonly, 0, 0)
    finally:
        os.close(readonly)


def test_reading_and_writing_in_many_calls(memfd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_IO_CHUNK_BYTES", 1000)
    data = os.urandom(10_500)
    kernel.pwrite_all(memfd, memoryview(data), 77)
    back = bytearray(len(data))
    kernel.pread_all(memfd, memoryview(back), 77)
    assert back == data
    with pytest.raises(EOFError, match="1 bytes early"):
        kernel.pread_all(memfd, memoryview(back), 78)


def test_a_hole_gives_memory_back_and_reads_as_zeros(memfd: int) -> None:
    kernel.pwrite_all(memfd, memoryview(b"z" * (64 * PAGE)), 0)
    before = os.fstat(memfd).st_blocks
    assert kernel.punch_hole(memfd, 16 * PAGE, 32 * PAGE)
    after = os.fstat(memfd)
    assert (before - after.st_blocks) * 512 == 32 * PAGE
    assert after.st_size == 64 * PAGE
    assert os.pread(memfd, 2, 16 * PAGE - 1) == b"z\0"


def test_a_segment_without_a_name() -> None:
    names = set(os.listdir("/dev/shm"))
    writable, readonly = kernel.unlinked_segment()
    try:
        assert set(os.listdir("/dev/shm")) == names
        os.ftruncate(writable, PAGE)
        kernel.pwrite_all(writable, memoryview(b"hi"), 0)
        assert os.pread(readonly, 2, 0) == b"hi"
        with pytest.raises(OSError, match="Bad file"):
            os.pwrite(readonly, b"x", 0)
    finally:
        os.close(writable)
        os.close(readonly)


@pytest.mark.parametrize("use_scan", [True, False], ids=["scan", "bits"])
def test_private_copies_of_pages_are_found(memfd: int, use_scan: bool) -> None:
    capabilities = kernel.probe()
    if not (capabilities.pagemap_scan if use_scan else capabilities.pagemap_bits):
        pytest.skip("not on this kernel")
    pages = 400
    os.ftruncate(memfd, pages * PAGE)
    kernel.pwrite_all(memfd, memoryview(b"f" * (pages // 2 * PAGE)), 0)
    address = kernel.map_private(memfd, 0, pages * PAGE)
    pagemap = kernel.Pagemap(use_scan)
    try:

        def found(limit: int = 1000, first: int = 0, count: int = pages) -> list[tuple[int, int]]:
            ranges = pagemap.anon_pages(address + first * PAGE, count * PAGE, limit)
            return [((a - address) // PAGE, (b - address) // PAGE) for a, b in ranges]

        assert found() == [], "never touched"
        assert ctypes.string_at(address, pages * PAGE).count(b"f") == pages // 2 * PAGE
        assert found() == [], "only read"
        for page in (3, 4, 9, 399):
            ctypes.memset(address + page * PAGE + 7, 1, 1)
        assert found() == [(3, 5), (9, 10), (399, 400)]
        assert found(1) == [(3, 5)]
        assert found(2) == [(3, 5), (9, 10)]
        assert found(10, first=5, count=4) == []
        assert pagemap.anon_pages(address + 9 * PAGE + 5, 1) != []
        # written through the file: nobody's copy
        kernel.pwrite_all(memfd, memoryview(b"g"), 20 * PAGE)
        assert found(10, first=10, count=100) == []
        # dropped copies are the file's again
        kernel.advise(address, pages * PAGE, kernel.MADV_DONTNEED)
        assert found() == []
        for page in range(0, pages, 2):
            ctypes.memset(address + page * PAGE, 1, 1)
        assert found() == [(page, page + 1) for page in range(0, pages, 2)]
        assert len(found(130)) == 130
    finally:
        pagemap.close()
        pagemap.close()
        kernel.unmap(address, pages * PAGE)


@pytest.mark.parametrize("use_query", [True, False], ids=["query", "text"])
def test_kinds_of_mappings(memfd: int, use_query: bool) -> None:
    if use_query and not kernel.probe().procmap_query:
        pytest.skip("not on this kernel")
    mappings = kernel.MemoryMap(use_query)
    os.ftruncate(memfd, PAGE)
    anonymous = kernel.map_memory(3 * PAGE, 3, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    shared = kernel.map_memory(PAGE, 3, kernel.MAP_SHARED | kernel.MAP_ANONYMOUS)
    of_file = kernel.map_private(memfd, 0, PAGE)
    read_only = kernel.map_memory(PAGE, 1, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
    try:
        for address, believable in (
            (anonymous + PAGE, True),
            (shared, False),
            (of_file, False),
            (read_only, False),
        ):
            mapping = mappings.at_or_after(address)
            assert mapping is not None
            assert mapping.start <= address < mapping.stop
            assert mapping.private_anonymous is believable
        kernel.unmap(anonymous + PAGE, PAGE)
        after_hole = mappings.at_or_after(anonymous + PAGE + 5)
        assert after_hole is not None
        assert after_hole.start == anonymous + 2 * PAGE
        assert mappings.at_or_after(0xFFFF_FFFF_FFFF_F000) is None
        assert mappings.count() > 10
    finally:
        mappings.close()
        kernel.unmap(anonymous, 3 * PAGE)
        kernel.unmap(shared, PAGE)
        kernel.unmap(of_file, PAGE)
        kernel.unmap(read_only, PAGE)


def test_capabilities_can_be_switched_off() -> None:
    everything = kernel.probe()
    assert kernel.probe(["memfd"]) == everything._replace(memfd=False)
    code = "from onehop._memory import kernel; print(kernel.probe())"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ, ONEHOP_DISABLE="userfaultfd,pagemap_scan"),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    assert "userfaultfd=False, pagemap_scan=False" in printed
