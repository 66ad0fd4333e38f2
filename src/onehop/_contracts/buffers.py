"""Where bytes lie: the names of segments and the extents of buffers in them.

Must never know how a segment is mapped, sent or freed: these are names only, and travel between processes.
"""

from typing import NamedTuple


class SegmentRef(NamedTuple):
    """Names one sealed segment, anywhere in the cluster."""

    owner: int
    """Rank of the process whose arena holds the segment."""
    serial: int
    """Never used twice by that owner, so that it stands for the content."""
    arena_offset: int
    """Bytes from the start of the owner's arena; a multiple of the page size."""
    size_bytes: int
    """A multiple of the page size."""


class Extent(NamedTuple):
    """Where one buffer's bytes are, within the list of segments of one encoded value."""

    segment: int
    """Index into the value's list of segments."""
    offset: int
    """Bytes from the start of the segment."""
    length: int
    """Bytes."""
