"""Mappings that nobody uses at the moment, kept to be used again for the same place of the same arena.

Must never know who used them. An idle mapping holds nothing: what it maps may change, and shows through.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

IDLE_COUNT = 512
IDLE_BYTES = 64 << 30
"""Of address space: an idle mapping costs page tables (a 500th of this) and no memory of its own."""

IDLE_NS = 10_000_000_000
"""An idle mapping that was not wanted for so long is dropped."""

Key = tuple[int, int, int]


class Idle(Protocol):
    """What the pool needs to know of a mapping."""

    key: Key
    length: int
    idle_since_ns: int


T = TypeVar("T", bound=Idle)


class IdlePool(Generic[T]):
    """Idle mappings by key, bounded, the one idle for longest first to go. Not thread-safe."""

    __slots__ = ("_by_key", "_bytes", "_order")

    def __init__(self) -> None:
        self._by_key: dict[Key, list[T]] = {}
        self._order: OrderedDict[T, None] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def __contains__(self, mapping: T) -> bool:
        return mapping in self._order

    def put(self, mapping: T) -> None:
        """Add one; `surplus` may have something to give up then."""
        self._by_key.setdefault(mapping.key, []).append(mapping)
        self._order[mapping] = None
        self._bytes += mapping.length

    def take(self, key: Key) -> T | None:
        """Take the latest one for a key out of the pool."""
        same = self._by_key.get(key)
        if same is None:
            return None
        mapping = same[-1]
        self.remove(mapping)
        return mapping

    def remove(self, mapping: T) -> None:
        """Take this one out."""
        same = self._by_key[mapping.key]
        same.remove(mapping)
        if not same:
            del self._by_key[mapping.key]
        del self._order[mapping]
        self._bytes -= mapping.length

    def surplus(self, now_ns: int) -> T | None:
        """Take one out that is beyond the bounds, or was idle for too long."""
        if not self._order:
            return None
        oldest = next(iter(self._order))
        if (
            len(self._order) <= IDLE_COUNT
            and self._bytes <= IDLE_BYTES
            and now_ns - oldest.idle_since_ns < IDLE_NS
        ):
            return None
        self.remove(oldest)
        return oldest

    def pop(self) -> T | None:
        """Take any out; None when it is empty."""
        if not self._order:
            return None
        mapping = next(iter(self._order))
        self.remove(mapping)
        return mapping
