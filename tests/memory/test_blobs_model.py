"""Several processes' stores in one, and thousands of random steps: what arrives is what was sent, always.

Values are placed, lent, attached, sent on, written by sender and receiver, dropped, and returned late and in odd orders.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from onehop._contracts.buffers import SegmentRef
from onehop._memory import blobs, kernel
from onehop._memory.arena import Arena
from onehop._memory.blobs import BlobStore, Placement
from onehop._memory.mapping import Attachments
from onehop._memory.tracker import get_tracker

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SIZES = [4096, 5000, 20_000, 70_000, 300_000, 1_500_000]


class _Node:
    """What one process has."""

    def __init__(self, rank: int, tracked: bool, disable: tuple[str, ...]) -> None:
        self.rank = rank
        self.arena = Arena(rank)
        self.attachments = Attachments(self.arena, kernel.probe(disable))
        tracker = get_tracker() if tracked else None
        self.store = BlobStore(self.arena, tracker, self.attachments)
        self.objects: list[tuple[Bytes, bytearray]] = []
        """Arrays of the user, and what is in them by our own account."""


class _Message:
    def __init__(self, placement: Placement, contents: list[bytes], target: int) -> None:
        self.locations = placement.locations
        self.segments = placement.segments
        self.contents = contents
        self.target = target


class _World:
    def __init__(self, seed: int, tracked: bool, disable: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        self.nodes = {rank: _Node(rank, tracked, disable) for rank in (1, 2, 3)}
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node:
                    fd = os.dup(other.arena.fd_readonly)
                    node.attachments.add_arena(other.rank, fd)
        self.messages: list[_Message] = []
        self.placements: list[tuple[_Node, Placement]] = []
        self.returns: list[tuple[SegmentRef, int]] = []
        self.moved = self.kept = 0

    def step(self) -> None:
        rng = self.rng
        node = self.nodes[rng.randint(1, 3)]
        actions = [
            (self.make, 2),
            (self.place, 6),
            (self.deliver, 6),
            (self.write, 5),
            (self.drop, 3),
            (self.replace, 1),
            (self.release, 5),
            (self.give_back, 6),
            (self.settle, 1),
            (self.check, 1),
        ]
        rng.choices([a for a, _ in actions], [w for _, w in actions])[0](node)

    def make(self, node: _Node) -> None:
        size = self.rng.choice(_SIZES)
        made = np.full(size, self.rng.randrange(256), np.uint8)
        if self.rng.random() < 0.5:
            made[:] = np.frombuffer(self.rng.randbytes(size), np.uint8)
        node.objects.append((made, bytearray(made)))

    def place(self, node: _Node) -> None:
        if not node.objects:
            return
        rng = self.rng
        chosen = [rng.choice(node.objects) for _ in range(rng.randint(1, 6))]
        views, contents = [], []
        for values, truth in chosen:
            start, stop = 0, len(values)
            if rng.random() < 0.3:
                start = rng.randrange(len(values))
                stop = rng.randint(start, len(values))
            if stop == start:
                continue
            views.append(values.data[start:stop])
            contents.append(bytes(truth[start:stop]))
        loose = [bytes([rng.randrange(4)]) * rng.choice([10, 2000, 9000]) for _ in range(2)]
        small = rng.choice([0, 4096])
        placement = node.store.place(views, loose, small_bytes=small, arm=rng.random() < 0.7)
        assert len(placement.locations) == len(views) + 2
        assert placement.moved_bytes + placement.kept_bytes == sum(map(len, contents + loose))
        self.moved += placement.moved_bytes
        self.kept += placement.kept_bytes
        for _ in range(rng.choice([0, 1, 1, 2])):
            target = rng.randint(1, 3)
            for ref in placement.segments:
                self.nodes[ref.owner].store.lend(ref, target)
            self.messages.append(_Message(placement, contents + loose, target))
        self.placements.append((node, placement))

    def deliver(self, _: _Node) -> None:
        if not self.messages:
            return
        message = self.messages.pop(self.rng.randrange(len(self.messages)))
        node = self.nodes[message.target]
        views = {ref: node.attachments.attach(ref) for ref in message.segments}
        for (ref, offset, length), content in zip(message.locations, message.contents, strict=True):
            assert views[ref][offset : offset + length] == content
            if self.rng.random() < 0.4 and length:
                values = np.frombuffer(views[ref][offset : offset + length], np.uint8)
                node.objects.append((values, bytearray(content)))

    def write(self, node: _Node) -> None:
        if not node.objects:
            return
        values, truth = self.rng.choice(node.objects)
        start = self.rng.randrange(len(values))
        how = self.rng.random()
        stop = (
            start + 1 if how < 0.5 else len(values) if how < 0.8 else min(start + 5000, len(values))
        )
        value = self.rng.randrange(256)
        # Objects may share memory: their truths are read anew.
        values[start:stop] = value
        truth[start:stop] = bytes([value]) * (stop - start)
        for others, other_truth in node.objects:
            if others is not values and np.may_share_memory(others, values):
                other_truth[:] = others.tobytes()

    def drop(self, node: _Node) -> None:
        if node.objects:
            node.objects.pop(self.rng.randrange(len(node.objects)))

    def replace(self, node: _Node) -> None:
        """Free an array and make one of the same size, often at the same address."""
        if node.objects:
            at = self.rng.randrange(len(node.objects))
            size = len(node.objects[at][0])
            del node.objects[at]
            node.objects.append((np.zeros(size, np.uint8), bytearray(size)))

    def release(self, _: _Node) -> None:
        if self.placements:
            node, placement = self.placements.pop(self.rng.randrange(len(self.placements)))
            node.store.release(placement)

    def give_back(self, node: _Node) -> None:
        self.returns += [(ref, node.rank) for ref in node.attachments.drain()]
        self.rng.shuffle(self.returns)
        for _ in range(self.rng.randint(0, len(self.returns))):
            ref, peer = self.returns.pop()
            self.nodes[ref.owner].store.returned(ref, peer)

    def settle(self, node: _Node) -> None:
        node.attachments.settle()
        node.store.settle()

    def check(self, node: _Node) -> None:
        for values, truth in node.objects:
            assert values.tobytes() == truth

    def end(self) -> None:
        while self.messages:
            self.deliver(self.nodes[1])
        for node in self.nodes.values():
            self.check(node)
            node.objects.clear()
        while self.placements:
            self.release(self.nodes[1])
        gc.collect()
        while self.returns or any(
            n.attachments.counts()["not_drained"] for n in self.nodes.values()
        ):
            for node in self.nodes.values():
                self.give_back(node)
        far = 10**18
        for node in self.nodes.values():
            node.store.settle(far)
            while node.store.settle(2 * far):
                pass
            counts = node.store.counts()
            assert counts == dict.fromkeys(counts, 0), f"rank {node.rank}"
        for node in self.nodes.values():
            node.attachments.close()
            node.store.close()
            node.arena.close()


@pytest.fixture(autouse=True)
def _few_own_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blobs, "_OWN_SEGMENT_BYTES", 250_000)
    yield


_MODES = {
    "tracked": (True, ()),
    "compared": (False, ()),
    "bits": (True, ("pagemap_scan",)),
    "never-reused": (False, ("pagemap_scan", "pagemap_bits")),
}


@pytest.mark.parametrize("mode", [*_MODES])
@pytest.mark.parametrize("seed", range(int(os.environ.get("ONEHOP_TEST_SEEDS", "3"))))
def test_what_arrives_is_what_was_sent(mode: str, seed: int) -> None:
    world = _World(seed, *_MODES[mode])
    for _ in range(1200):
        world.step()
    world.end()
    assert world.kept > 0 and world.moved > 0
