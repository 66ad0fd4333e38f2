"""Frames come out of a stream as they went in, however it is cut, and nothing else does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onehop._contracts.link import Frame
from onehop._protocol.framing import (
    CONTROL_LIMIT_BYTES,
    HEADER,
    HEADER_BYTES,
    FrameParser,
    pack_header,
)
from onehop.errors import ProtocolError


def encode(frame: Frame) -> bytes:
    header = pack_header(len(frame.control), len(frame.payload), frame.source, frame.destination)
    return header + frame.control + frame.payload


FRAMES = [
    Frame(1, 2, b"", b""),
    Frame(2**32 - 1, 0, b"control", b""),
    Frame(3, 4, b"", b"payload"),
    Frame(5, 6, b"both", b"parts of it"),
    Frame(7, 8, b"\0" * 20, b"\xff" * 3),
]
STREAM = b"".join(map(encode, FRAMES))


def parse_in_pieces(stream: bytes, cuts: list[int]) -> list[Frame]:
    parser = FrameParser()
    frames = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        frames += parser.feed(memoryview(stream)[start:stop])
    assert parser.held_bytes == 0
    assert parser.frame_count == len(frames)
    return frames


def test_a_header_has_the_documented_form() -> None:
    assert HEADER_BYTES == 16
    assert pack_header(1, 2, 3, 4) == bytes.fromhex("01000000 02000000 03000000 04000000")


@pytest.mark.parametrize("first", range(len(STREAM) + 1))
def test_every_two_cuts(first: int) -> None:
    for second in range(first, len(STREAM) + 1):
        assert parse_in_pieces(STREAM, [first, second]) == FRAMES


@pytest.mark.parametrize("size", [*range(1, 40), len(STREAM)])
def test_pieces_of_one_size(size: int) -> None:
    assert parse_in_pieces(STREAM, list(range(size, len(STREAM), size))) == FRAMES


PART = st.binary(max_size=300)
RANK = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.builds(Frame, RANK, RANK, PART, PART), max_size=8),
    st.lists(st.integers(0, 5000), max_size=20),
)
def test_any_frames_in_any_pieces(frames: list[Frame], places: list[int]) -> None:
    stream = b"".join(map(encode, frames))
    cuts = sorted(place % (len(stream) + 1) for place in places)
    assert parse_in_pieces(stream, cuts) == frames


def test_large_frames_between_small_ones_in_pieces_of_a_socket() -> None:
    random.seed(5)
    frames = [
        Frame(n, n, random.randbytes(n % 7 * 50_000), random.randbytes(n % 3 * 400_000))
        for n in range(20)
    ]
    stream = b"".join(map(encode, frames))
    assert parse_in_pieces(stream, list(range(65_536, len(stream), 65_536))) == frames


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_taken_and_may_be_reused(
    kind: type[bytes] | type[bytearray] | type[memoryview],
) -> None:
    buffer = bytearray(STREAM)
    parser = FrameParser()
    frames = parser.feed(kind(buffer)[:30])
    frames += parser.feed(kind(buffer)[30:])
    buffer[:] = bytes(len(buffer))
    assert frames == FRAMES
    assert all(type(frame.control) is bytes and type(frame.payload) is bytes for frame in frames)


def test_no_memory_for_what_was_only_announced() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        parser = FrameParser()
        assert parser.feed(HEADER.pack(CONTROL_LIMIT_BYTES, 2**32 - 1, 1, 2)) == []
        assert parser.feed(b"x" * 1000) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_too_much_control_is_refused_after_the_frames_before_it(size: int) -> None:
    stream = STREAM + HEADER.pack(CONTROL_LIMIT_BYTES + 1, 0, 1, 2) + b"garbage" * 5
    parser = FrameParser()
    frames: list[Frame] = []
    with pytest.raises(ProtocolError, match="rank 1 to rank 2"):
        for start in range(0, len(stream), size):
            frames += parser.feed(stream[start : start + size])
        parser.feed(b"")
    assert frames == FRAMES
    with pytest.raises(ProtocolError):
        parser.feed(b"")


def test_random_bytes_never_do_harm() -> None:
    random.seed(9)
    for _ in range(300):
        parser = FrameParser()
        try:
            for _ in range(20):
                parser.feed(random.randbytes(random.randrange(100)))
        except ProtocolError:
            continue
        assert parser.held_bytes <= 2000


def test_what_does_not_fit_a_frame_cannot_be_announced() -> None:
    with pytest.raises(ProtocolError, match="control part of a frame from rank 3 to rank 4"):
        pack_header(CONTROL_LIMIT_BYTES + 1, 0, 3, 4)
    with pytest.raises(ProtocolError, match="payload"):
        pack_header(0, 2**32, 3, 4)
