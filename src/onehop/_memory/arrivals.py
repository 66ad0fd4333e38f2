"""Finds buffers that arrived from elsewhere and were not written: they are passed on under the id they came with.

Must never copy or compare; what it can not prove it leaves to others.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory.arena import PAGE_SIZE
from onehop._memory.mapping import Attachments
from onehop._memory.placement import Location, Placement, Range
from onehop._memory.sealed import SegmentTable

_stop_of = itemgetter(1)


def find_arrived(
    attachments: Attachments,
    table: SegmentTable,
    placement: Placement,
    keys: list[tuple[int, int]],
) -> tuple[dict[int, Location], dict[int, Any]]:
    """Find the buffers that lie unwritten in an attached segment.

    Parameters
    ----------
    placement : Placement
        Holds the segments that are passed on.
    keys : list of (address, length)
        The buffers.

    Returns
    -------
    locations : dict
        By index, where at least half of the segment is wanted. Otherwise a slice would keep all of a large segment: it
        has to be copied.
    proofs : dict
        By index, the attach in which an unwritten buffer lies that has to be copied.
    """
    indices_in: dict[Any, list[int]] = {}
    buffers: dict[Any, Any] = {}
    for i, (address, length) in enumerate(keys):
        if (found := attachments.find(address, length)) is not None:
            mapping, buffer = found
            indices_in.setdefault(mapping, []).append(i)
            buffers[mapping] = buffer
    locations: dict[int, Location] = {}
    proofs: dict[int, Any] = {}
    for mapping, indices in indices_in.items():
        first = min(keys[i][0] for i in indices)
        last = max(keys[i][0] + keys[i][1] for i in indices)
        written = attachments.written_ranges(mapping, first, last - first)
        clean = [i for i in indices if not _overlap(written, *keys[i])] if written else indices
        ref = mapping.ref
        wanted_bytes = sum(length for _, length in {keys[i] for i in clean})
        # Buffers are padded by less than a 64th in all, and by up to a page at the end.
        enough = 2 * wanted_bytes + ref.size_bytes // 64 + PAGE_SIZE >= ref.size_bytes
        if enough and _hold(table, placement, ref, buffers[mapping]):
            for i in clean:
                locations[i] = (ref, keys[i][0] - mapping.address, keys[i][1])
        else:
            proofs.update(dict.fromkeys(clean, mapping.keeper))
    return locations, proofs


def _hold(table: SegmentTable, placement: Placement, ref: SegmentRef, buffer: Any) -> bool:
    if not table.owns(ref):
        # Keeps the mapping alive, and with it this process's hold at the owner.
        placement.arrivals[ref] = buffer
        return True
    with table.lock:
        sealed = table.get(ref)
        if sealed is None:
            return False
        if sealed not in placement.pinned:
            table.pin_sealed(sealed)
            placement.pinned[sealed] = None
    return True


def _overlap(ranges: list[Range], address: int, length: int) -> bool:
    at = bisect_right(ranges, address, key=_stop_of)
    return at < len(ranges) and ranges[at][0] < address + length
