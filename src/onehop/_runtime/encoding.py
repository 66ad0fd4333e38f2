"""Objects into parcels: what is taken out of a value, and where each piece of it is put.

Large buffers are placed in segments; the stream and the small buffers make the body. A body of up to
`INLINE_BYTES` travels in the message; a larger one that was seen before (the same structure sent again)
lies in a segment and is found by its bytes, or by its few differences (`edits`), so that a repeated call
stays a short message.

Must never know who gets the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onehop import errors
from onehop._codec import pickling
from onehop._codec.pickling import dumps
from onehop._contracts.buffers import SegmentRef
from onehop._protocol.messages import Parcel
from onehop._runtime.edits import Bases
from onehop._runtime.parcels import BARE, Outgoing, join_small, lay_out_body

if TYPE_CHECKING:
    from onehop._runtime.transfers import Transfers

SMALL_BYTES = 4096
INLINE_BYTES = 1024
FIRST_INLINE_BYTES = 16384
"""A body up to this size is inline the first time: most are never sent again."""
_LONGEST_STREAM = INLINE_BYTES - len(BARE)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types that pickle takes whole: no need to look for buffers or functions in them."""


class Encoder:
    """Encodes values for one process."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self.special: frozenset[type] = frozenset()
        """Types that travel by name; set by what users hold."""
        self._bases = Bases()

    def encode(
        self, value: object, *, kept: bool = True, edited: bool = True, repeated: bool = False
    ) -> Outgoing:
        """Encode `value` as it is now. Copies each new buffer into the arena, once.

        With `kept` false the value is about to be dropped: its memory is not watched for changes. With
        `edited` false the receiver need not write to its mappings to get the value. One that is
        `repeated` will be named by many messages.

        Raises whatever the value's own reduction raises, and MemoryLimitError.
        """
        self._transfers.settle_own()
        if type(value) in _ATOMS:
            stream = dumps(value, 5)
            if len(stream) <= _LONGEST_STREAM:
                return Outgoing(Parcel((), (), BARE + stream))
        encoded = pickling.encode(value, self.special)
        stream = encoded.stream
        if not encoded.buffers and not encoded.substitutes and len(stream) <= _LONGEST_STREAM:
            return Outgoing(Parcel((), (), BARE + stream))
        return self._encode_large(encoded, kept, edited, repeated)

    def encode_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outgoing | None:
        """Encode what a function is called with; None if that is nothing."""
        if not kwargs:
            if not args:
                return None
            for value in args:
                if type(value) not in _ATOMS:
                    break
            else:
                stream = dumps((args, kwargs), 5)
                if len(stream) <= _LONGEST_STREAM:
                    return Outgoing(Parcel((), (), BARE + stream))
        return self.encode((args, kwargs))

    def encode_inline(self, value: object) -> bytes:
        """Encode `value` as one string of bytes, for what must arrive without any segment.

        Raises SerializationError if it holds a future, a handle or a cluster.
        """
        encoded = pickling.encode(value, self.special)
        if encoded.substitutes:
            raise errors.SerializationError(
                f"{type(value).__name__} holds {type(encoded.substitutes[0]).__name__}, which cannot "
                "travel in an exception"
            )
        return lay_out_body(encoded.stream, [(buffer, None) for buffer in encoded.buffers])

    def _encode_large(
        self, encoded: pickling.Encoded, kept: bool, edited: bool, repeated: bool
    ) -> Outgoing:
        out = Outgoing(Parcel())
        out.transfers = self._transfers
        out.copied = encoded.copied
        for substitute in encoded.substitutes:
            out.parts.append(substitute._onehop_part(self._transfers))  # type: ignore[attr-defined]
        segments: dict[SegmentRef, int] = {}
        used: list[int] = []
        big = [buffer for buffer in encoded.buffers if buffer.nbytes >= SMALL_BYTES]
        places: Iterator[tuple[SegmentRef, int, int]] = iter(())
        if big:
            places = iter(self._transfers.put(out, big, arm=kept))
        located: list[tuple[memoryview, tuple[int, int] | None]] = []
        for buffer in encoded.buffers:
            if buffer.nbytes < SMALL_BYTES:
                located.append((buffer, None))
                continue
            ref, offset, length = next(places)
            index = segments.get(ref)
            if index is None:
                index = segments[ref] = len(segments)
                used.append(0)
            used[index] += length
            located.append((buffer, (index, offset)))

        edits: list[tuple[int, int, bytes]] = []

        def place_loose(data: bytes) -> tuple[int, int]:
            base, changes = self._bases.nearest(data) if edited else (data, [])
            ((ref, offset, length),) = self._transfers.put(out, (), (base,))
            index = segments.get(ref)
            if index is None:
                index = segments[ref] = len(segments)
                used.append(0)
            used[index] += length
            edits.extend((index, offset + at, new) for at, new in changes)
            return index, offset

        small = [number for number, (_, place) in enumerate(located) if place is None]
        if sum(located[number][0].nbytes for number in small) > INLINE_BYTES:
            # A blob of its own: it stays the same when something else in the value changes.
            starts: list[int] = []
            packed = join_small([located[number][0] for number in small], starts)
            index, base = place_loose(packed)
            for number, start in zip(small, starts, strict=True):
                located[number] = (located[number][0], (index, base + start))
        body = lay_out_body(encoded.stream, located)
        where = None
        if not self._inline(body, repeated):
            where = (*place_loose(body), len(body))
            body = b""
        out.parcel = Parcel(tuple(segments), tuple(used), body, where, (), tuple(edits))
        return out

    def _inline(self, body: bytes, repeated: bool) -> bool:
        """Whether a body travels in its message."""
        if len(body) <= INLINE_BYTES:
            return True
        # The first of its kind does, if it is short and not known to be sent again: most never are.
        return len(body) <= FIRST_INLINE_BYTES and not repeated and not self._bases.has_like(body)
