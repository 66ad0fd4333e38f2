"""Sorted ranges, and an index that finds the ranges that overlap one.

Pure bookkeeping on numbers; must never know of pages or the kernel.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

_start_of = attrgetter("start")


class Interval(Protocol):
    """Something that covers `start` to `stop`; neither changes while it is in an index."""

    @property
    def start(self) -> int:
        """First number covered."""

    @property
    def stop(self) -> int:
        """First number behind."""


T = TypeVar("T", bound=Interval)


class IntervalIndex(Generic[T]):
    """Intervals, findable by overlap. One row for each power of two of their length, sorted by start.

    Within a row an overlapping interval starts at most one length before the range asked for, so that a few long ones do not
    make the search among many short ones slow. Each change is one operation on one list: an interrupt (Ctrl-C) in between
    cannot leave the index half changed.
    """

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[int, list[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def __iter__(self) -> Iterator[T]:
        for row in self._rows.values():
            yield from row

    def add(self, item: T) -> None:
        """Add one; equal intervals may be there several times."""
        insort(
            self._rows.setdefault((item.stop - item.start).bit_length(), []), item, key=_start_of
        )

    def remove(self, item: T) -> bool:
        """Remove this very object; False if it is not there."""
        row = self._rows.get((item.stop - item.start).bit_length(), [])
        at = bisect_left(row, item.start, key=_start_of)
        while at < len(row) and row[at].start == item.start:
            if row[at] is item:
                del row[at]
                return True
            at += 1
        return False

    def overlapping(self, start: int, stop: int) -> list[T]:
        """Return all that share a number with `start` to `stop`."""
        found: list[T] = []
        for power, row in self._rows.items():
            first = bisect_right(row, start - (1 << power), key=_start_of)
            last = bisect_left(row, stop, first, key=_start_of)
            found += [item for item in row[first:last] if item.stop > start]
        return found


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges, and join those that touch or overlap."""
    result: list[tuple[int, int]] = []
    last_stop: int | None = None
    for start, stop in sorted(ranges):
        if last_stop is None or start > last_stop:
            result.append((start, stop))
            last_stop = stop
        elif stop > last_stop:
            result[-1] = (result[-1][0], stop)
            last_stop = stop
    return result
