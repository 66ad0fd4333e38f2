"""Free ranges of a line of bytes: neighbours are joined, the best fit is found by bisection.

Pure; must never know what the bytes are, nor whether memory lies behind them.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """A set of free ranges."""

    __slots__ = ("_by_size", "_sizes", "_starts_by_end", "total_bytes")

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._starts_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, start: int, size_bytes: int) -> None:
        """Free a range; it joins its free neighbours."""
        self.total_bytes += size_bytes
        before = self._starts_by_end.get(start)
        if before is not None:
            size_bytes += self._drop(before)
            start = before
        if start + size_bytes in self._sizes:
            size_bytes += self._drop(start + size_bytes)
        self._insert(start, size_bytes)

    def take(self, size_bytes: int, largest_split: int | None = None) -> int | None:
        """Take a range out of the smallest free one that it fits into.

        Parameters
        ----------
        size_bytes : int
            What is wanted.
        largest_split : int, optional
            Leave free ranges beyond this size whole, unless they fit exactly.

        Returns
        -------
        int or None
            Where it starts.
        """
        at = bisect_left(self._by_size, (size_bytes, -1))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        if largest_split is not None and found > largest_split and found != size_bytes:
            return None
        self._drop(start)
        if found > size_bytes:
            self._insert(start + size_bytes, found - size_bytes)
        self.total_bytes -= size_bytes
        return start

    def largest(self) -> tuple[int, int] | None:
        """Return (start, size) of the largest free range."""
        if not self._by_size:
            return None
        size_bytes, start = self._by_size[-1]
        return start, size_bytes

    def size_at(self, start: int) -> int:
        """Return the size of the free range that starts here; 0 if none does."""
        return self._sizes.get(start, 0)

    def remove(self, start: int, size_bytes: int) -> None:
        """Take the head of the free range that starts at `start`."""
        found = self._drop(start)
        if found > size_bytes:
            self._insert(start + size_bytes, found - size_bytes)
        self.total_bytes -= size_bytes

    def pop_tail(self, most_bytes: int) -> tuple[int, int] | None:
        """Take at most so many bytes off the end of the largest free range: (start, size)."""
        if not self._by_size or most_bytes <= 0:
            return None
        found, start = self._by_size[-1]
        taken = min(found, most_bytes)
        self._drop(start)
        if taken < found:
            self._insert(start, found - taken)
        self.total_bytes -= taken
        return start + found - taken, taken

    def _insert(self, start: int, size_bytes: int) -> None:
        self._sizes[start] = size_bytes
        self._starts_by_end[start + size_bytes] = start
        insort(self._by_size, (size_bytes, start))

    def _drop(self, start: int) -> int:
        size_bytes = self._sizes.pop(start)
        del self._starts_by_end[start + size_bytes]
        del self._by_size[bisect_left(self._by_size, (size_bytes, start))]
        return size_bytes
