"""Objects that `Cluster.share` gave out: built once in each process, and watched for writes.

Must never know how a value is decoded, or who holds the handle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from onehop._protocol.messages import Parcel
from onehop._runtime.parcels import Received

Key = tuple[int, int]
"""Rank of the process that shared it, and its number there."""


class Shared:
    __slots__ = ("built", "failure", "lock", "received", "value", "views")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.built = False
        self.value: object = None
        self.failure = False
        self.received: Received | None = None
        self.views: list[memoryview] = []


class Shares:
    """The shared objects of one process."""

    def __init__(self, is_written: Callable[[memoryview], bool]) -> None:
        self._is_written = is_written
        self._lock = threading.Lock()
        self._shared: dict[Key, Shared] = {}
        self._dropped: set[Key] = set()

    def get(
        self,
        parcel: Parcel,
        received: Received,
        build: Callable[[Parcel, list[memoryview]], Any],
    ) -> tuple[Key, Shared]:
        """The object that a parcel stands for; built if this is the first time."""
        key = (parcel.share_owner, parcel.share)
        with self._lock:
            entry = self._shared.get(key)
            if entry is None:
                entry = Shared()
                if key not in self._dropped:
                    self._shared[key] = entry
        with entry.lock:
            if not entry.built:
                bare = Parcel(
                    parcel.segments,
                    parcel.used,
                    parcel.body,
                    parcel.where,
                    parcel.parts,
                    parcel.edits,
                )
                entry.value = build(bare, entry.views)
                entry.received = received
                entry.built = True
        return key, entry

    def forget_written(self, given: list[tuple[Key, Shared]]) -> int:
        """How many of the objects given to a task have been written to; they are forgotten."""
        written = 0
        for key, entry in given:
            if any(self._is_written(view) for view in entry.views):
                written += 1
                with self._lock:
                    if self._shared.get(key) is entry:
                        del self._shared[key]
        return written

    def drop(self, owner: int, numbers: Iterable[int], *, own: bool) -> None:
        """The last handle is gone: what was built here lives only as long as tasks still use it."""
        with self._lock:
            for number in numbers:
                self._shared.pop((owner, number), None)
                if not own:
                    # A call that names it may still be on its way: it builds the object for itself.
                    self._dropped.add((owner, number))

    def forget_owner(self, rank: int) -> None:
        """That process is gone, and its handles with it."""
        with self._lock:
            for key in [key for key in self._shared if key[0] == rank]:
                del self._shared[key]
