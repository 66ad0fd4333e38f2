"""Encoded values as they are held here: going out, arrived, and what their bodies look like.

How a body is laid out: a header (`HEAD`: number of buffers, length of the stream), one `ENTRY` a buffer
(segment index or `PACKED`, offset, length), the pickle stream, then the small buffers, each at a multiple
of 64 bytes. A body of nothing but a stream begins with `BARE`.

Must never know how a value is encoded, or where it goes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onehop import errors
from onehop._contracts.buffers import SegmentRef
from onehop._protocol import messages
from onehop._protocol.messages import Parcel, WireRef

if TYPE_CHECKING:
    from onehop._runtime.transfers import Transfers

HEAD = struct.Struct("<IQ")
ENTRY = struct.Struct("<IQQ")
PACKED = 0xFFFFFFFF
ALIGN = 64
BARE = bytes(HEAD.size)
"""What a body begins with that is nothing but a stream: no buffers, no parts; its length is not needed."""


class Named(Protocol):
    """A call, as far as the ledger names it."""

    @property
    def serial(self) -> int:
        """Its number among the calls of its caller."""

    @property
    def parent(self) -> messages.CallId | None:
        """The call whose task made it."""

    @property
    def label(self) -> str:
        """The name of its function."""


class Substitute(Protocol):
    """What travels by name instead of by value: futures, shared handles, clusters, workers."""

    def _onehop_part(self, transfers: Transfers) -> Part:
        """Return what stands for this object, now or once it is known."""


class Part:
    """What one substitute becomes: known now, or when `when_known` has called back."""

    __slots__ = ("holder", "parcel", "trouble", "waits_for")

    def __init__(
        self,
        parcel: Parcel | None = None,
        holder: object = None,
        waits_for: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.parcel = parcel
        self.holder = holder
        """Keeps the segments of `parcel` held until this part was mentioned."""
        self.waits_for = waits_for
        """Registers a callback for when `parcel` or `trouble` will have been filled in."""
        self.trouble: BaseException | None = None


class Outgoing:
    """One encoded value that may be mentioned to any number of processes, until `close`."""

    __slots__ = ("copied", "moved_bytes", "parcel", "parts", "pinned", "placements", "transfers")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.parts: list[Part] = []
        self.moved_bytes = 0
        self.copied: list[tuple[str, int]] = []
        self.pinned: list[SegmentRef] = []
        self.placements: list[Any] = []
        self.transfers: Transfers | None = None

    @property
    def bare(self) -> bool:
        """Nothing but a short stream: no segment to lend, nothing for the books beyond its message."""
        return self.transfers is None and not self.parts

    @property
    def waiting(self) -> list[Part]:
        """Parts that are not known yet."""
        return [part for part in self.parts if part.parcel is None]

    def complete(self) -> Parcel:
        """The parcel with all its parts; they must be known. Raises a part's trouble."""
        if not self.parts:
            return self.parcel
        known: list[Parcel] = []
        for part in self.parts:
            if part.trouble is not None:
                raise part.trouble
            if part.parcel is None:
                raise errors.ProtocolError("a parcel was completed before its parts were known")
            known.append(part.parcel)
        p = self.parcel
        return Parcel(
            p.segments, p.used, p.body, p.where, tuple(known), p.edits, p.share, p.share_owner
        )

    def close(self) -> None:
        """Let go of the segments; what was mentioned stays lent to its receivers."""
        transfers, self.transfers = self.transfers, None
        if transfers is not None:
            transfers.let_go(self)
        self.parts = []

    def __del__(self) -> None:
        if self.transfers is not None:
            self.close()


class Received:
    """A parcel that arrived."""

    __slots__ = ("parcel",)

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel


class Holding(Received):
    """A parcel whose segments stay held until it is dropped."""

    __slots__ = ("_refs", "_transfers")

    def __init__(self, parcel: Parcel, refs: list[WireRef], transfers: Transfers) -> None:
        super().__init__(parcel)
        self._refs = refs
        self._transfers = transfers

    def __del__(self) -> None:
        self._transfers.dropped(self._refs)


def lay_out_body(
    stream: bytes, located: Sequence[tuple[memoryview, tuple[int, int] | None]]
) -> bytes:
    """Lay a body out; a buffer without a place is packed into it."""
    starts: list[int] = []
    packed = join_small([buffer for buffer, place in located if place is None], starts)
    next_start = iter(starts).__next__
    table = [
        ENTRY.pack(PACKED, next_start(), buffer.nbytes)
        if place is None
        else ENTRY.pack(place[0], place[1], buffer.nbytes)
        for buffer, place in located
    ]
    head = HEAD.pack(len(table), len(stream))
    if not packed:
        return b"".join((head, *table, stream))
    start = HEAD.size + len(table) * ENTRY.size + len(stream)
    return b"".join((head, *table, stream, bytes(-start % ALIGN), packed))


def join_small(buffers: Iterable[memoryview], starts: list[int]) -> bytes:
    """Join small buffers, each at a multiple of `ALIGN`, and say where each begins."""
    pieces: list[bytes | memoryview] = []
    length = 0
    for buffer in buffers:
        gap = -length % ALIGN
        if gap:
            pieces.append(bytes(gap))
            length += gap
        starts.append(length)
        pieces.append(buffer)
        length += buffer.nbytes
    return b"".join(pieces)
