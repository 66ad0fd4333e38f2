"""What a header or a pack of small buffers differs in from one that was sent before.

A loop calls ``foo(model, k)``: all but the few bytes of ``k`` are the same each time. Strings of equal
length are compared block by block; a few changed bytes travel as edits of the earlier string.
Must never know what the bytes mean.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK_BYTES = 1024
GRAIN_BYTES = 16
MOST_EDITED_BYTES = 512
"""Beyond it the string is placed anew, and becomes what later ones are compared with."""
MOST_BASES = 64
MOST_BASE_BYTES = 64 << 20

Change = tuple[int, bytes]


class Bases:
    """The latest strings of each length, for a process that sends similar ones again and again."""

    def __init__(self) -> None:
        self._by_length: OrderedDict[int, bytes] = OrderedDict()
        self._size_bytes = 0

    def has_like(self, data: bytes) -> bool:
        """Whether a string like this one was seen before; it has been now."""
        base = self._by_length.get(len(data))
        if base is not None and changes_between(base, data, MOST_EDITED_BYTES) is not None:
            return True
        self._remember(data)
        return False

    def nearest(self, data: bytes) -> tuple[bytes, list[Change]]:
        """A string that was seen before and the changes that make `data` of it; or `data` itself."""
        length = len(data)
        base = self._by_length.get(length)
        if base is not None:
            changes = changes_between(base, data, MOST_EDITED_BYTES)
            if changes is not None:
                return base, changes
        self._remember(data)
        return data, []

    def _remember(self, data: bytes) -> None:
        # Several threads encode at once: an entry that another one has removed is not missed.
        if self._by_length.pop(len(data), None) is not None:
            self._size_bytes -= len(data)
        if len(data) > MOST_BASE_BYTES // 4:
            return
        self._by_length[len(data)] = data
        self._size_bytes += len(data)
        while len(self._by_length) > MOST_BASES or self._size_bytes > MOST_BASE_BYTES:
            try:
                length, _ = self._by_length.popitem(last=False)
            except KeyError:
                self._size_bytes = 0
                return
            self._size_bytes -= length


def changes_between(old: bytes, new: bytes, most_bytes: int) -> list[Change] | None:
    """The runs in which two strings of equal length differ; None if they sum to more than `most_bytes`."""
    if old == new:
        return []
    changes: list[Change] = []
    total = 0
    one, other = memoryview(old), memoryview(new)
    for start in range(0, len(old), BLOCK_BYTES):
        stop = start + BLOCK_BYTES
        if one[start:stop] == other[start:stop]:
            continue
        for at in range(start, min(stop, len(old)), GRAIN_BYTES):
            piece = bytes(other[at : at + GRAIN_BYTES])
            if one[at : at + GRAIN_BYTES] == piece:
                continue
            total += len(piece)
            if total > most_bytes:
                return None
            if changes and changes[-1][0] + len(changes[-1][1]) == at:
                changes[-1] = (changes[-1][0], changes[-1][1] + piece)
            else:
                changes.append((at, piece))
    return changes
