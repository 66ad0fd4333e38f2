"""Every kind of value, by every operation: plain, nested, by value, passed on, empty of memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onehop._codec import Encoded, decode, encode
from tests.codec.values import ARRAYS, COUNT, GRID, VALUES, Keeping, assert_equal

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


def arrive(encoded: Encoded, **hooks: Any) -> Any:
    """Decode over memory of the receiver's own, writable, as after a transfer."""
    received = []
    for view in encoded.buffers:
        memory: Any = np.empty(view.nbytes, np.uint8)  # aligned, unlike a bytearray's
        memory[:] = view
        received.append(memoryview(memory))
    return decode(encoded.stream, received, **hooks)


def travel(value: Any) -> Any:
    return arrive(encode(value))


def nested(value: Any) -> Any:
    return travel({"k": [(value,)]})["k"][0][0]


def by_value(value: Any) -> Any:
    """Through cloudpickle, as something captured by a function that cannot be imported."""
    return travel(lambda: value)()


def twice(value: Any) -> Any:
    """Sent on by a receiver, whose arrays lie over buffers."""
    return travel(travel(value))


def with_placeholders(value: Any) -> Any:
    class Handle:
        pass

    handle = Handle()
    encoded = encode([handle, value, handle], frozenset([Handle]))
    assert encoded.substitutes == [handle]
    back = arrive(encoded, resolve=lambda number: encoded.substitutes[number])
    assert back[0] is back[2] is handle
    return back[1]


OPERATIONS: list[Callable[[Any], Any]] = [travel, nested, by_value, twice, with_placeholders]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("name", VALUES)
def test_arrives_equal(name: str, operation: Callable[[Any], Any]) -> None:
    value = VALUES[name]()
    assert_equal(value, operation(value))


@pytest.mark.parametrize("name", VALUES)
def test_the_same_object_twice_is_one(name: str) -> None:
    value = VALUES[name]()
    encoded = encode([value, value])
    back = arrive(encoded)
    if type(value) not in (int, float):
        assert back[0] is back[1]
    assert len(encoded.buffers) == len(encode(value).buffers)


@pytest.mark.parametrize("name", ARRAYS)
def test_buffers_are_flat_and_leave_the_stream(name: str) -> None:
    value = ARRAYS[name]()
    encoded = encode(value)
    for view in encoded.buffers:
        assert view.format == "B"
        assert view.ndim == 1
        assert view.contiguous
        assert view.nbytes > 0
    if value.dtype.kind != "T" and not value.dtype.hasobject:
        assert len(encoded.stream) < 1000
        mask_bytes = np.size(getattr(value, "mask", ())) + 16  # and a masked array's fill value
        assert sum(view.nbytes for view in encoded.buffers) <= value.nbytes + mask_bytes


@pytest.mark.parametrize("name", ARRAYS)
def test_shares_memory_or_says_that_it_copied(name: str) -> None:
    value = ARRAYS[name]()
    if not value.size or value.dtype.hasobject or isinstance(value, Keeping):
        return
    encoded = encode(value)
    plain = np.asarray(value)
    copied = [reason for reason, _ in encoded.copied]
    shared = any(
        np.may_share_memory(np.frombuffer(view, np.uint8), plain.view(np.ndarray))
        for view in encoded.buffers
    )
    assert shared or copied or value.dtype.kind == "T" or not value.nbytes, name
    assert not (shared and copied)


@pytest.mark.parametrize("name", ARRAYS)
def test_changing_what_arrived_changes_nothing_here(name: str) -> None:
    value, untouched = ARRAYS[name](), ARRAYS[name]()
    back = travel(value)
    if back.flags.writeable and back.size and not back.dtype.hasobject and back.dtype.itemsize:
        back[...] = back.flat[-1]
    assert_equal(value, untouched)


def test_a_view_takes_only_its_own_elements() -> None:
    for view in (GRID[::2, ::2], GRID[:, 3], GRID[4:9], GRID[::-7], GRID.T[3:50:5]):
        assert sum(b.nbytes for b in encode(view).buffers) == view.nbytes


def test_zero_and_overlapping_strides_stay_small() -> None:
    row = np.arange(1000.0)
    for view, size in (
        (np.broadcast_to(row, (10**6, 1000)), row.nbytes),
        (np.broadcast_to(row[::2], (10**6, 500)), row.nbytes // 2),
        (np.broadcast_to(7, (10**5, 10**5)), 8),
        (np.lib.stride_tricks.sliding_window_view(row, 900), row.nbytes),
        (np.lib.stride_tricks.sliding_window_view(row.astype("M8[s]"), 900)[::-1], row.nbytes),
    ):
        encoded = encode(view)
        assert sum(b.nbytes for b in encoded.buffers) <= size
        back = arrive(encoded)
        assert back.strides == view.strides or view.base is None or size < row.nbytes
        np.testing.assert_array_equal(back[:5], view[:5])


def test_an_array_met_a_thousand_times_is_one_buffer() -> None:
    big: Any = np.ones(100_000)
    encoded = encode([big] * 1000)
    assert len(encoded.buffers) == 1
    assert encoded.buffers[0].obj is big
    back = arrive(encoded)
    assert len({id(x) for x in back}) == 1


def test_beyond_two_gigabytes_without_touching_it() -> None:
    size = 2**31 + 4099
    value = np.zeros(size, np.uint8)  # never touched, so it takes no memory
    encoded = encode(value)
    assert encoded.buffers[0].nbytes == size
    assert decode(encoded.stream, encoded.buffers).shape == (size,)
    half = np.zeros(size, np.uint8)[::-1]
    encoded = encode(half)
    assert encoded.buffers[0].nbytes == size
    assert decode(encoded.stream, encoded.buffers).strides == (-1,)


def test_large_bytes_leave_the_stream_and_can_be_reused() -> None:
    big, other = b"x" * 200_000, bytearray(b"y" * 100_000)
    encoded = encode({"a": np.ones(10), "b": big, "c": [big, other]})
    assert len(encoded.stream) < 700
    assert [b.nbytes for b in encoded.buffers] == [80, 200_000, 100_000]
    assert encoded.buffers[1].obj is big
    assert encoded.copied == [("bytearray", 100_000)]
    built = []

    def reuse(number: int, view: memoryview) -> bytes:
        built.append((number, view.nbytes))
        return big

    back = arrive(encoded, resolve_bytes=reuse)
    assert back["b"] is back["c"][0] is big
    assert back["c"][1] == other
    assert built == [(1, 200_000)]


@pytest.mark.parametrize("size", [0, 1, 4095, 65_530, 65_535, 65_536, 65_537, 131_072, 1_000_001])
@pytest.mark.parametrize("filler", [0, 1, 40, 5000, 65_500, 65_536])
def test_bytes_of_any_size_anywhere_in_the_stream(size: int, filler: int) -> None:
    rng = np.random.default_rng(size + filler)
    payload = rng.bytes(size)
    before: list[Any] = [*range(filler % 6000), "é" * filler]
    value = [before, payload, bytearray(payload), "a" * size, payload, [payload, 1], b"z" * filler]
    assert travel(value) == value
    assert travel([payload]) == [payload]
    assert travel(payload) == payload
    assert travel((b"\x95" * size, b"B" * size, b"\x8e" * size)) == (
        b"\x95" * size,
        b"B" * size,
        b"\x8e" * size,
    )


def test_copies_are_told() -> None:
    reasons = [reason for reason, _ in encode([GRID[:, ::2], bytearray(10**5)]).copied]
    assert reasons == ["strided view", "bytearray"]
    assert encode([GRID, GRID.T, GRID[::-1], np.arange(COUNT).astype("M8[s]")]).copied == []
