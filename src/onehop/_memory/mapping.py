"""Segments of neighbours, and of this process itself, mapped here: private, writable, copied by the kernel when written.

Must never know what messages are, nor who is told that a mapping has ended.

A mapping belongs to one `attach`, which is one decode. When the last slice of it has died the mapping is idle; a clean one is
used again for the same place of the same arena. An idle mapping holds nothing: its owner may write that place again, and
its pages, none of which is a copy, then show the new content.

Finalizers run anywhere, also inside a collection while a lock is held here: they only append to a deque.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Any

from onehop._contracts.buffers import SegmentRef
from onehop._memory import kernel
from onehop._memory.arena import Arena
from onehop._memory.forks import ForkHold, Lifeline, follow_forks
from onehop._memory.idle import IdlePool
from onehop.errors import ForkedError, ProtocolError

__all__ = ["Attachments", "Lifeline", "Mapping"]

_MAX_RANGES = 4096
"""Beyond so many separate written places a mapping counts as written from there on."""


class _Keeper(weakref.ref[Any]):
    """Watches the object that all slices of a mapping keep alive."""

    __slots__ = ("mapping",)
    mapping: Mapping


class Mapping:
    """One private mapping of one segment; read-only outside this file."""

    __slots__ = ("address", "children", "idle_since_ns", "keeper", "key", "length", "proven", "ref")

    def __init__(self, address: int, ref: SegmentRef) -> None:
        self.address = address
        self.length = ref.size_bytes
        self.key = (ref.owner, ref.arena_offset, ref.size_bytes)
        self.ref = ref
        self.keeper: _Keeper | None = None
        self.children: list[ForkHold] = []
        self.idle_since_ns = 0
        self.proven = False
        """Idle, and known to be clean."""


class _ForeignArena:
    __slots__ = ("dropped", "fd", "mapped")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.mapped = 0
        self.dropped = False


class Attachments:
    """All mappings of segments in this process.

    Parameters
    ----------
    own_arena : Arena
        Its segments can be attached too.
    capabilities : kernel.Capabilities, optional
        What to use of the kernel; by default what there is.
    most_maps : int, optional
        Attach by copying beyond so many mappings; by default a quarter of what the kernel allows a process.
    """

    def __init__(
        self,
        own_arena: Arena,
        capabilities: kernel.Capabilities | None = None,
        most_maps: int | None = None,
    ) -> None:
        self._own_arena = own_arena
        self._arenas: dict[int, _ForeignArena] = {}
        self._lock = threading.RLock()
        self._live: dict[int, Mapping] = {}
        self._starts: list[int] = []
        self._dead: deque[_Keeper] = deque()
        self._ended: list[SegmentRef] = []
        self._idle: IdlePool[Mapping] = IdlePool()
        self._unproven: list[Mapping] = []
        self._held: list[tuple[SegmentRef, list[ForkHold]]] = []
        self._fork_hold: ForkHold | None = None
        self._forked = False
        self._types: dict[int, Any] = {}
        self._capabilities = kernel.probe() if capabilities is None else capabilities
        self._pagemap: kernel.Pagemap | None = None
        if self._capabilities.pagemap_scan or self._capabilities.pagemap_bits:
            self._pagemap = kernel.Pagemap(use_scan=self._capabilities.pagemap_scan)
        self._most_maps = _quarter_of_maps() if most_maps is None else most_maps
        follow_forks(self)

    # Arenas of others

    def add_arena(self, owner: int, fd: int) -> None:
        """Take over the read-only descriptor of another process's arena."""
        with self._lock:
            if (known := self._arenas.get(owner)) is not None:
                # Sent twice, when two links opened at once.
                os.close(fd)
                known.dropped = False
            else:
                self._arenas[owner] = _ForeignArena(fd)

    def has_arena(self, owner: int) -> bool:
        """Tell whether segments of that process can be attached."""
        return owner == self._own_arena.rank or owner in self._arenas

    def arena_fd(self, owner: int) -> int:
        """Return the descriptor of an arena, to be passed on."""
        if owner == self._own_arena.rank:
            return self._own_arena.fd_readonly
        if (arena := self._arenas.get(owner)) is None:
            raise ProtocolError(
                f"rank {self._own_arena.rank} was given a segment of rank {owner}, "
                "whose arena it has not received"
            )
        return arena.fd

    def drop_arena(self, owner: int) -> None:
        """Close an arena's descriptor as soon as nothing of it is mapped."""
        with self._lock:
            if (arena := self._arenas.get(owner)) is None:
                return
            arena.dropped = True
            self._collect()
            for mapping in [m for m in self._idle if m.ref.owner == owner]:
                self._idle.remove(mapping)
                self._unmap(mapping)
            if not arena.mapped:
                self._close_arena(owner)

    def _close_arena(self, owner: int) -> None:
        if (arena := self._arenas.pop(owner, None)) is not None:
            os.close(arena.fd)

    # Attaching

    def attach(self, ref: SegmentRef) -> memoryview:
        """Map a segment; the caller must hold it at its owner until `drain` reports the end of this attach.

        Returns
        -------
        memoryview
            Flat and writable. What is written to it, or to anything made of it, is seen by nobody else.
        """
        with self._lock:
            if self._forked:
                raise ForkedError(
                    "a forked child cannot attach shared memory; use the cluster in the process that made it"
                )
            if self._dead:
                self._collect()
            mapping = self._reuse(ref) or self._map(ref)
            if mapping is None:
                return self._copy(ref)
            address = mapping.address
            buffer = self._type_for(mapping.length).from_address(address)
            keeper = _Keeper(buffer, self._dead.append)
            keeper.mapping = mapping
            mapping.keeper = keeper
            mapping.ref = ref
            self._live[address] = mapping
            self._starts.insert(bisect_left(self._starts, address), address)
        return memoryview(buffer).cast("B")[: mapping.length]

    def _type_for(self, length: int) -> Any:
        # One type per power of two: a type made for each length would be garbage that only the cyclic collector frees.
        bits = length.bit_length()
        if (found := self._types.get(bits)) is None:
            found = self._types[bits] = ctypes.c_ubyte * (1 << bits)
        return found

    def _reuse(self, ref: SegmentRef) -> Mapping | None:
        key = (ref.owner, ref.arena_offset, ref.size_bytes)
        while (mapping := self._idle.take(key)) is not None:
            if mapping.proven or self._is_clean(mapping):
                return mapping
            self._unmap(mapping)
        return None

    def _map(self, ref: SegmentRef) -> Mapping | None:
        fd = self.arena_fd(ref.owner)
        for _ in range(2):
            if len(self._live) < self._most_maps:
                try:
                    address = kernel.map_private(fd, ref.arena_offset, ref.size_bytes)
                except OSError:
                    pass  # out of maps or address space, or overcommit is forbidden
                else:
                    if (arena := self._arenas.get(ref.owner)) is not None:
                        arena.mapped += 1
                    return Mapping(address, ref)
            if not self._drop_idle():
                break
        return None

    def _copy(self, ref: SegmentRef) -> memoryview:
        """Attach without a mapping, when the process has too many: exact, but costs memory."""
        view = memoryview(bytearray(ref.size_bytes))
        kernel.pread_all(self.arena_fd(ref.owner), view, ref.arena_offset)
        self._ended.append(ref)
        return view

    # Ends

    def drain(self) -> list[SegmentRef]:
        """Return the segments of the attaches that ended since the last call, one entry per attach."""
        if not (self._dead or self._ended or self._held):
            return []
        with self._lock:
            if self._forked:
                return []
            self._collect()
            if self._held:
                self._release_held()
            ended, self._ended = self._ended, []
        return ended

    def _collect(self) -> None:
        """Make the mappings idle whose last slice has died."""
        while self._dead:
            mapping = self._dead.popleft().mapping
            ref = mapping.ref
            del self._live[mapping.address]
            del self._starts[bisect_left(self._starts, mapping.address)]
            mapping.keeper = None
            if mapping.children and (still := [c for c in mapping.children if not c.gone()]):
                self._held.append((ref, still))
            else:
                self._ended.append(ref)
            mapping.children = []
            arena = self._arenas.get(ref.owner)
            if self._pagemap is None or (arena is not None and arena.dropped):
                self._unmap(mapping)
                continue
            mapping.idle_since_ns = time.monotonic_ns()
            mapping.proven = False
            self._idle.put(mapping)
            self._unproven.append(mapping)
            while (old := self._idle.surplus(mapping.idle_since_ns)) is not None:
                self._unmap(old)

    def _release_held(self) -> None:
        still = []
        for ref, children in self._held:
            if all(child.gone() for child in children):
                self._ended.append(ref)
            else:
                still.append((ref, children))
        self._held = still

    def settle(self) -> None:
        """Find out which idle mappings are clean, and drop the others; for when there is nothing else to do."""
        if self._forked or not (self._dead or self._idle):
            return
        with self._lock:
            self._collect()
            if self._unproven:
                unproven, self._unproven = self._unproven, []
                for mapping in unproven:
                    if mapping.proven or mapping not in self._idle:
                        continue  # in use again, or dropped
                    if self._is_clean(mapping):
                        mapping.proven = True
                    else:
                        self._idle.remove(mapping)
                        self._unmap(mapping)
            now_ns = time.monotonic_ns()
            while (old := self._idle.surplus(now_ns)) is not None:
                self._unmap(old)

    def _is_clean(self, mapping: Mapping) -> bool:
        try:
            return self._pagemap is not None and not self._pagemap.anon_pages(
                mapping.address, mapping.length
            )
        except OSError:
            return False

    def _drop_idle(self) -> bool:
        found = bool(self._idle)
        while (mapping := self._idle.pop()) is not None:
            self._unmap(mapping)
        return found

    def _unmap(self, mapping: Mapping) -> None:
        kernel.unmap(mapping.address, mapping.length)
        owner = mapping.ref.owner
        if (arena := self._arenas.get(owner)) is not None:
            arena.mapped -= 1
            if arena.dropped and not arena.mapped:
                self._close_arena(owner)

    # Where a buffer came from

    @property
    def has_live(self) -> bool:
        """True if any buffer of this process can lie in a mapping."""
        return bool(self._starts)

    def find(self, address: int, length: int) -> tuple[Mapping, Any] | None:
        """Find the live mapping that a buffer lies in, and the object that keeps it alive."""
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            mapping = self._live[self._starts[at]]
            if address + length > mapping.address + mapping.length or mapping.keeper is None:
                return None
            buffer = mapping.keeper()
            return None if buffer is None else (mapping, buffer)

    def written_ranges(self, mapping: Mapping, address: int, length: int) -> list[tuple[int, int]]:
        """Return the written pages in a part of a mapping as addresses; all of it where that can not be told."""
        everything = [(address, address + length)]
        if self._pagemap is None:
            return everything
        try:
            found = self._pagemap.anon_pages(address, length, _MAX_RANGES)
        except OSError:
            return everything
        if len(found) >= _MAX_RANGES:
            found[-1] = (found[-1][0], address + length)
        return found

    def unwritten_origin(self, address: int, length: int) -> tuple[SegmentRef, int] | None:
        """Name the segment that a buffer is a part of, if none of the buffer's pages was written since it arrived.

        Returns
        -------
        (SegmentRef, offset) or None
            The offset is in bytes from the start of the segment.
        """
        if not self._starts or (found := self.find(address, length)) is None:
            return None
        mapping = found[0]
        if self.written_ranges(mapping, address, length):
            return None
        return mapping.ref, address - mapping.address

    def is_written(self, view: memoryview) -> bool:
        """Tell whether anything was written to the pages of a view that `attach` gave."""
        address = kernel.address_of(view)
        found = self.find(address, view.nbytes)
        return found is None or bool(self.written_ranges(found[0], address, view.nbytes))

    # For tests, and for what a user may ask

    def counts(self) -> dict[str, int]:
        """Return the sizes of all tables."""
        with self._lock:
            self._collect()
            return {
                "live": len(self._live),
                "idle": len(self._idle),
                "held_for_children": len(self._held),
                "not_drained": len(self._ended),
                "arenas": len(self._arenas),
            }

    def child_fds(self) -> list[int]:
        """Return descriptors of which one becomes readable when a held segment may have ended; then `drain`."""
        with self._lock:
            children = {c for _, children in self._held for c in children}
            return sorted(c.fileno() for c in children if not c.gone())

    def close(self) -> None:
        """Drop the idle mappings and the descriptors; what user objects lie in stays mapped."""
        with self._lock:
            self._collect()
            self._drop_idle()
            for owner in list(self._arenas):
                self._close_arena(owner)
            if self._pagemap is not None:
                self._pagemap.close()
                self._pagemap = None

    # Forks

    def before_fork(self) -> None:
        """Prepare to learn when the child is gone, if it can read anything that is mapped here."""
        self._lock.acquire()  # no attach may slip in between
        if not self._forked and self._starts:
            self._collect()
            if self._live:
                self._fork_hold = ForkHold()

    def after_fork_in_parent(self) -> None:
        """Hold what the child can read until it is gone."""
        hold, self._fork_hold = self._fork_hold, None
        if hold is not None:
            hold.keep_parent_end()
            for mapping in self._live.values():
                mapping.children = [c for c in mapping.children if not c.gone()]
                mapping.children.append(hold)
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Close what is the parent's, report nothing and unmap nothing: objects of the user lie there."""
        self._lock = threading.RLock()
        hold, self._fork_hold = self._fork_hold, None
        if hold is not None:
            hold.keep_child_end()
        if self._forked:
            return
        self._forked = True
        for earlier in {
            *(c for m in self._live.values() for c in m.children),
            *(c for _, children in self._held for c in children),
        }:
            earlier.drop_in_child()
        for owner in list(self._arenas):
            self._close_arena(owner)
        if self._pagemap is not None:
            self._pagemap.close()
            self._pagemap = None


def _quarter_of_maps() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read()) // 4
    except (OSError, ValueError):
        return 16_000
