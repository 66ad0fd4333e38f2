"""The form of a frame in a stream of bytes, and the parser that finds frames again.

A frame is a fixed header (`HEADER`: control length, payload length, source, destination), the control
bytes and the payload bytes. Pure: must never know sockets, threads or clocks, nor what a message means.
"""

from __future__ import annotations

from struct import Struct

from onehop._contracts.link import Buffer, Frame
from onehop.errors import ProtocolError

HEADER = Struct("<IIII")
HEADER_BYTES = HEADER.size
CONTROL_LIMIT_BYTES = 64 << 20
KEPT_BYTES = 2 << 20
"""A parser keeps a buffer of up to this size while no frame is incomplete."""
PAYLOAD_LIMIT_BYTES = (1 << 32) - 1

_unpack = HEADER.unpack_from
_new = tuple.__new__


def pack_header(
    control_length: int, payload_length: int, source: int = 0, destination: int = 0
) -> bytes:
    """Return the bytes before a frame's control part.

    Raises
    ------
    ProtocolError
        A part is too long for one frame.
    """
    if control_length > CONTROL_LIMIT_BYTES or payload_length > PAYLOAD_LIMIT_BYTES:
        part, size, limit = (
            ("control", control_length, CONTROL_LIMIT_BYTES)
            if control_length > CONTROL_LIMIT_BYTES
            else ("payload", payload_length, PAYLOAD_LIMIT_BYTES)
        )
        raise ProtocolError(
            f"The {part} part of a frame from rank {source} to rank {destination} has {size} bytes; "
            f"one frame carries at most {limit}. Send the value as a blob, or in several frames."
        )
    return HEADER.pack(control_length, payload_length, source, destination)


class FrameParser:
    """Finds the frames in a stream that arrives in pieces of any size.

    Memory grows with what has really arrived, never with what a header claims.

    Attributes
    ----------
    violation : ProtocolError or None
        Set once the stream has broken the format. The frames before that are still returned; the next
        `feed` raises it.
    frame_count : int
        Frames returned so far.
    """

    __slots__ = (
        "_control_limit_bytes",
        "_held",
        "_held_bytes",
        "_needed_bytes",
        "frame_count",
        "violation",
    )

    def __init__(self, control_limit_bytes: int = CONTROL_LIMIT_BYTES) -> None:
        self.violation: ProtocolError | None = None
        self.frame_count = 0
        self._control_limit_bytes = control_limit_bytes
        # The beginning of a frame whose rest has not arrived: the first bytes of a buffer that is kept
        # from frame to frame, since to touch fresh memory costs more than to copy into it.
        self._held = bytearray()
        self._held_bytes = 0
        self._needed_bytes = HEADER_BYTES  # what must be held before it says more

    @property
    def held_bytes(self) -> int:
        """Bytes of an incomplete frame."""
        return self._held_bytes

    def feed(self, data: Buffer) -> list[Frame]:
        """Take the next bytes of the stream and return the frames that they complete.

        Fastest with `bytes`; nothing of `data` is referred to afterwards.
        """
        if self.violation is not None:
            raise self.violation
        if type(data) is not bytes:
            data = bytes(data)
        frames: list[Frame] = []
        position = self._continue(data, frames) if self._held_bytes else 0
        end = len(data)
        limit = self._control_limit_bytes
        needed = HEADER_BYTES
        while end - position >= HEADER_BYTES:
            control_length, payload_length, source, destination = _unpack(data, position)
            if control_length > limit:
                self._refuse(control_length, source, destination)
                position = end
                break
            start = position + HEADER_BYTES
            middle = start + control_length
            stop = middle + payload_length
            if stop > end:
                needed = stop - position
                break
            # `Frame(...)` does the same in twice the time.
            frames.append(_new(Frame, (source, destination, data[start:middle], data[middle:stop])))
            position = stop
        if position < end:
            self._needed_bytes = needed
            self._hold(data[position:])
        self.frame_count += len(frames)
        return frames

    def _continue(self, data: bytes, frames: list[Frame]) -> int:
        """Complete the held frame as far as `data` goes; return how much of it that took."""
        position = 0
        while True:
            missing = self._needed_bytes - self._held_bytes
            piece = data[position : position + missing]
            self._hold(piece)
            position += len(piece)
            if len(piece) < missing:
                return position
            held = self._held
            control_length, payload_length, source, destination = _unpack(held)
            if control_length > self._control_limit_bytes:
                self._refuse(control_length, source, destination)
                return len(data)
            middle = HEADER_BYTES + control_length
            stop = middle + payload_length
            if self._held_bytes < stop:
                self._needed_bytes = stop
                continue
            with memoryview(held) as whole:
                control, payload = bytes(whole[HEADER_BYTES:middle]), bytes(whole[middle:stop])
            frames.append(Frame(source, destination, control, payload))
            self._let_go()
            return position

    def _hold(self, piece: bytes) -> None:
        start, stop = self._held_bytes, self._held_bytes + len(piece)
        if stop > len(self._held):
            # Twice as much as has arrived, but no more than the frame has.
            size = max(stop, min(2 * stop, self._needed_bytes))
            self._held += bytes(size - len(self._held))
        self._held[start:stop] = piece
        self._held_bytes = stop

    def _let_go(self) -> None:
        self._held_bytes = 0
        self._needed_bytes = HEADER_BYTES
        if len(self._held) > KEPT_BYTES:
            self._held = bytearray()

    def _refuse(self, control_length: int, source: int, destination: int) -> None:
        self._held = bytearray()
        self._let_go()
        self.violation = ProtocolError(
            f"A frame that says it goes from rank {source} to rank {destination} announces "
            f"{control_length} bytes of control, more than the {self._control_limit_bytes} allowed: "
            "the stream is not one of frames, or the peer runs another version of onehop."
        )
