"""What a process is running, where its peers can still read it after it was killed.

A few pages at the start of the arena hold one cell for each runner: caller, serial number of its call,
and, for a batch, the position of the item. A caller whose peer has died so learns which of its calls had
begun, and sends the others elsewhere; without it every call that was on its way would count as "may have
started".

A cell is cleared after the answer was sent: a process killed in between has its answer in the link.
Must never know what a call is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from onehop._memory import kernel
from onehop._memory.arena import Arena

CELLS = 682
_CELL = struct.Struct("<QQQ")
SIZE_BYTES = -(-CELLS * _CELL.size // mmap.PAGESIZE) * mmap.PAGESIZE


class Board:
    """The cells of this process."""

    def __init__(self, arena: Arena) -> None:
        self._segment = arena.allocate(SIZE_BYTES)
        arena.write(self._segment, 0, bytes(SIZE_BYTES))
        self.offset = self._segment.offset
        self._address = arena.map_writable(self._segment)
        self._words: memoryview = (
            memoryview((ctypes.c_uint64 * (CELLS * 3)).from_address(self._address))
            .cast("B")
            .cast("Q")
        )
        self._free = list(range(CELLS - 1, -1, -1))

    def begin(self, caller: int, serial: int) -> int:
        """Say that a call begins; returns its cell, or -1 if none is free."""
        try:
            cell = self._free.pop()
        except IndexError:
            return -1
        words, at = self._words, cell * 3
        try:
            words[at + 2] = 0
            words[at + 1] = serial
            words[at] = caller  # last: a cell counts once it has a caller
        except ValueError:
            return -1  # closed meanwhile
        return cell

    def at_item(self, cell: int, position: int) -> None:
        """Say which item of its batch a call is at."""
        try:
            if cell >= 0:
                self._words[cell * 3 + 2] = position
        except ValueError:
            return  # closed meanwhile

    def end(self, cell: int) -> None:
        """Say that a call was answered."""
        try:
            if cell >= 0 and self._words[cell * 3]:
                self._words[cell * 3] = 0
                self._free.append(cell)
        except ValueError:
            return  # closed: the process left its cluster while the task ran

    def close(self) -> None:
        """Unmap the cells."""
        self._words.release()
        kernel.unmap(self._address, SIZE_BYTES)


def read(arena_fd: int, offset: int, caller: int) -> dict[int, int]:
    """Calls of `caller` that had begun, by serial number, with the item that each was at."""
    raw = os.pread(arena_fd, SIZE_BYTES, offset)
    return {
        serial: position
        for who, serial, position in _CELL.iter_unpack(raw[: len(raw) - len(raw) % _CELL.size])
        if who == caller
    }
