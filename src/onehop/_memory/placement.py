"""What is remembered about one buffer and about one placement, and how buffers are laid out in a segment.

Data only; must never know how anything is compared, copied or freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory.kernel import PAGE_SIZE

if TYPE_CHECKING:
    from onehop._memory.sealed import Sealed
    from onehop._memory.tracker import Watch

Location = tuple[SegmentRef, int, int]
Range = tuple[int, int]

_ALIGNMENT_BYTES = 64
_PAGE_ALIGNED_BYTES = 1 << 20


class Placement:
    """Where buffers lie now; their segments stay as they are until `BlobStore.release`.

    Attributes
    ----------
    locations : list of (SegmentRef, offset, length)
        One per buffer, then one per loose string.
    segments : list of SegmentRef
        Each once.
    moved_bytes : int
        Written into the arena for this.
    kept_bytes : int
        Proven or compared equal to what lay there, or arrived from elsewhere and not written.
    """

    __slots__ = ("arrivals", "kept_bytes", "locations", "moved_bytes", "pinned", "segments")

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self.segments: list[SegmentRef] = []
        self.moved_bytes = 0
        self.kept_bytes = 0
        self.pinned: dict[Sealed, None] = {}
        """Segments of this process, each pinned once."""
        self.arrivals: dict[SegmentRef, Any] = {}
        """Segments of others, each with what keeps the mapping alive and thereby this process's hold."""


class Record:
    """Remembers that the bytes at an address were found equal to a place of a sealed segment."""

    __slots__ = (
        "address",
        "calm",
        "exporter",
        "length",
        "location",
        "offset",
        "proof",
        "rewrites",
        "sealed",
        "used_ns",
        "watch",
    )

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.length = length
        self.sealed: Sealed
        self.offset = 0
        self.location: Location
        self.watch: Watch | None = None
        self.exporter: weakref.ref[Any] | None = None
        self.proof: Any = None
        """The attach in which the buffer lies and was not written when it was copied."""
        self.rewrites = 0
        """How many times in a row it came back mostly written."""
        self.calm = False
        """Not watched, but worth it when it is seen again."""
        self.used_ns = 0

    def extent(self) -> tuple[int, int]:
        """Return the part of the segment that is its own, with the padding behind it."""
        return self.offset, -(-self.length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Exporter(weakref.ref[Any]):
    """Tells that the owner of a record's memory has died."""

    __slots__ = ("record",)

    def __init__(self, owner: Any, callback: Callable[[Exporter], object]) -> None:
        super().__init__(owner, callback)  # type: ignore[call-arg]
        self.record: Record | None = None


def lay_out(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Put buffers behind each other: the offset of each, and the size of all."""
    offsets = []
    at = 0
    for length in lengths:
        unit = PAGE_SIZE if length >= _PAGE_ALIGNED_BYTES else _ALIGNMENT_BYTES
        at = -(-at // unit) * unit
        offsets.append(at)
        at += length
    return offsets, max(at, 1)
