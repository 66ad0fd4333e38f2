"""The links that misbehave on purpose do so as they say."""

from __future__ import annotations

import select
import socket
import time

import pytest

from onehop._contracts.link import Frame
from onehop._links.stream import UnixLink
from onehop.errors import LinkClosed
from onehop.testing.links import BrokenLink, CountingLink, DelayedLink


def unix_pair() -> tuple[UnixLink, UnixLink]:
    a, b = socket.socketpair()
    return UnixLink(a, 2), UnixLink(b, 1)


def receive(link: UnixLink, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        assert select.select([link], [], [], 10)[0]
        frames += link.receive()
    return frames


def test_a_delayed_link_delays_and_keeps_the_order() -> None:
    a, b = unix_pair()
    slow = DelayedLink(a, 0.03)
    start = time.monotonic()
    for number in range(50):
        slow.send(number, 2, b"x", b"", [0] if number == 7 else [])
    assert slow.queued_bytes > 0
    frames = receive(b, 50)
    assert time.monotonic() - start >= 0.03
    assert [frame.source for frame in frames] == list(range(50))
    b.close()
    deadline = time.monotonic() + 10
    with pytest.raises(LinkClosed):
        while time.monotonic() < deadline:
            slow.send(1, 2, b"nobody there")
    slow.close()
    assert slow.closed


def test_a_closed_delayed_link_drops_what_waits() -> None:
    a, b = unix_pair()
    slow = DelayedLink(a, 60)
    slow.send(1, 2, b"never", b"", [0])
    slow.close()
    with pytest.raises(LinkClosed):
        b.receive()
    with pytest.raises(LinkClosed):
        slow.send(1, 2, b"x")
    b.close()


def test_a_broken_link_breaks_at_its_byte() -> None:
    a, b = unix_pair()
    fragile = BrokenLink(a, 10)
    fragile.send(1, 2, b"12345", b"67890")
    with pytest.raises(LinkClosed):
        fragile.send(1, 2, b"1")
    assert [frame.control for frame in receive(b, 1)] == [b"12345"]
    with pytest.raises(LinkClosed):
        b.receive()
    with pytest.raises(LinkClosed):
        fragile.receive()
    b.close()


def test_a_counting_link_keeps_what_went_through() -> None:
    a, b = unix_pair()
    left, right = CountingLink(a), CountingLink(b)
    left.send(1, 2, b"c", b"p")
    right.send(2, 1, b"back")
    assert right.receive() == right.received == left.sent == [Frame(1, 2, b"c", b"p")]
    assert left.receive() == left.received == right.sent == [Frame(2, 1, b"back", b"")]
    left.close()
    right.close()
