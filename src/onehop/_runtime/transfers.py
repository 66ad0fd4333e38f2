"""Values in and out of this process: the only file that moves blobs between processes.

`encode` turns an object into an `Outgoing` parcel: large buffers lie in segments (new ones are copied
into the arena here, once), everything else in its body. `mention` makes it travel: it lends every
segment to the receiver, tells foreign owners, and writes the ledger. `receive` takes the mentions of an
arrived parcel, `decode` builds the object over private mappings, and `settle` gives mentions back once
nothing of a segment is left here.

Longer than most files, since the lending, holding and giving back of a segment are one protocol, and
have to be read together.
Must never know of sockets or tasks: it asks its `Post` to send a message to a rank.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from onehop._codec import pickling
from onehop._codec.pickling import loads
from onehop._contracts.buffers import SegmentRef
from onehop._memory.blobs import BlobStore
from onehop._memory.mapping import Attachments
from onehop._protocol import messages
from onehop._protocol.messages import Parcel, WireRef
from onehop._runtime.encoding import Encoder
from onehop._runtime.parcels import (
    ALIGN,
    BARE,
    ENTRY,
    HEAD,
    PACKED,
    Holding,
    Named,
    Outgoing,
    Received,
)
from onehop._runtime.shares import Shares
from onehop.ledger.book import Book

_Tally = dict[tuple[int, bool], list[int]]
"""(owner, known there before): [segments, bytes]"""

HERE = -1
"""`Parcel.share` of a part that stands for the cluster itself at the receiver."""
MEMBER = -2
"""`Parcel.share` of a part that stands for the member with rank `share_owner`."""


class Post(Protocol):
    """What transfers need of the process: somebody who sends."""

    rank: int

    def post(
        self, rank: int, message: messages.Message, fds: Sequence[int] = (), *, connect: bool = True
    ) -> bool:
        """Send; False when that process is gone."""

    def expect_settling(self) -> None:
        """Something is held now, so `settle` will have to be called."""


class Transfers:
    """Encodes, lends, receives, decodes and gives back, for one process."""

    def __init__(
        self,
        post: Post,
        store: BlobStore,
        attachments: Attachments,
        book: Book,
    ) -> None:
        self._post = post
        self._rank = post.rank
        self.store = store
        self.attachments = attachments
        self._book = book
        self.encoder = Encoder(self)
        self.encode = self.encoder.encode
        self.encode_arguments = self.encoder.encode_arguments
        self.encode_inline = self.encoder.encode_inline
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], list[int]] = {}  # (owner, serial): [uses here, mentions]
        # Finalizers may run inside a collection while any lock is held: they only append to these.
        self._dropped: deque[list[WireRef]] = deque()
        self._let_go: deque[tuple[list[Any], list[SegmentRef]]] = deque()
        self._debts: dict[int, list[tuple[int, int]]] = {}  # owner: returns not yet sent
        self._dead_owners: set[int] = set()
        self._introduced: dict[int, dict[tuple[int, int], None]] = {}
        self._arenas_sent: set[tuple[int, int]] = set()
        self.shares = Shares(attachments.is_written)
        self._share_numbers = itertools.count(1)
        self.nothing = Outgoing(Parcel())
        """The value of what is not answered."""
        self.here: Callable[[int], object] = lambda rank: None
        """Builds what stands for the cluster (rank 0) or a member in decoded values."""

    # --- going out -------------------------------------------------------------------------------

    def put(
        self,
        out: Outgoing,
        buffers: Sequence[memoryview],
        loose: Sequence[bytes] = (),
        *,
        arm: bool = True,
    ) -> list[tuple[SegmentRef, int, int]]:
        """See to it that the arena has these bytes, until the value is mentioned or dropped."""
        placement = self.store.place(buffers, loose, arm=arm)
        out.placements.append(placement)
        out.moved_bytes += placement.moved_bytes
        foreign = [ref for ref in placement.segments if ref.owner != self._rank]
        if foreign:
            # The arrays that this came from may die before the parcel is mentioned.
            with self._lock:
                for ref in foreign:
                    self._hold(ref, mentions=0)
            out.pinned.extend(foreign)
        self._post.expect_settling()
        return placement.locations

    def dropped(self, refs: list[WireRef]) -> None:
        """A received value is gone; called by its finalizer, so it only takes a note."""
        self._dropped.append(refs)

    def let_go(self, out: Outgoing) -> None:
        """The value is needed no more; may be called by a finalizer."""
        self._let_go.append((out.placements, out.pinned))

    def settle_own(self) -> None:
        """Before more is placed: free what can be freed in this process's own arena."""
        if self._let_go or self._dropped:
            self.settle(send=False)

    def share(self, outgoing: Outgoing) -> Parcel:
        """Name the encoded value as one object that each process builds once."""
        p = outgoing.complete()
        number = next(self._share_numbers)
        return Parcel(p.segments, p.used, p.body, p.where, p.parts, p.edits, number, self._rank)

    # --- mentioning -------------------------------------------------------------------------------

    def mention(
        self,
        parcel: Parcel,
        peer: int,
        message: str,
        cause: messages.CallId | None,
        parent: messages.CallId | None,
        label: str = "",
        outgoing: Outgoing | None = None,
    ) -> None:
        """Lend every segment of `parcel` to `peer`, before the message that carries it is sent."""
        if outgoing is not None and (outgoing.moved_bytes or outgoing.copied):
            now = time.monotonic_ns()
            moved, outgoing.moved_bytes = outgoing.moved_bytes, 0
            if moved:
                self._book.note(
                    "blob",
                    cause,
                    parent,
                    self._rank,
                    peer,
                    "memory",
                    "moved",
                    1,
                    moved,
                    now,
                    now,
                    label,
                )
            copied, outgoing.copied = outgoing.copied, []
            for reason, size_bytes in copied:
                self._book.note(
                    "blob", cause, parent, self._rank, self._rank, "memory", "moved", 1, size_bytes,
                    now, now, label, f"copied: {reason}",
                )  # fmt: skip
        if not parcel.segments and not parcel.parts:
            return
        lends: dict[int, list[WireRef]] = {}
        tally: _Tally = {}
        self._lend(parcel, peer, lends, tally)
        for owner, refs in lends.items():
            if owner != peer:
                self._introduce_arena(owner, peer)
                self._post.post(owner, messages.Lend(peer, tuple(refs)))
        # What a result holds is attached when somebody looks at it, and noted there: it may be passed on
        # without ever being looked at here.
        if message != "result":
            self._note(tally, peer, cause, parent, label)

    def _lend(
        self, parcel: Parcel, peer: int, lends: dict[int, list[WireRef]], tally: _Tally
    ) -> None:
        for wire, used in zip(parcel.segments, parcel.used, strict=True):
            owner = wire[0]
            if owner == self._rank:
                ref = SegmentRef(*wire)
                known = self.store.known_to(ref, peer)
                self.store.lend(ref, peer)
            else:
                known = owner == peer or self._introduce(peer, (owner, wire[1]))
                lends.setdefault(owner, []).append(wire)
            _count(tally, owner, known, used)
        for part in parcel.parts:
            self._lend(part, peer, lends, tally)

    def note_arrival(self, parcel: Parcel, call: Named | None) -> None:
        """Write down what a value that is about to be built here attaches."""
        tally: _Tally = {}
        self._count_arrival(parcel, tally)
        cause = None if call is None else (self._rank, call.serial)
        parent = None if call is None else call.parent
        self._note(tally, self._rank, cause, parent, "" if call is None else call.label)

    def _count_arrival(self, parcel: Parcel, tally: _Tally) -> None:
        for wire, used in zip(parcel.segments, parcel.used, strict=True):
            own = wire[0] == self._rank
            known = own or self._introduce(self._rank, (wire[0], wire[1]))
            _count(tally, wire[0], known, used)
        for part in parcel.parts:
            self._count_arrival(part, tally)

    def _note(
        self,
        tally: _Tally,
        peer: int,
        cause: messages.CallId | None,
        parent: messages.CallId | None,
        label: str,
    ) -> None:
        now = time.monotonic_ns()
        for (owner, known), (count, size_bytes) in tally.items():
            self._book.note(
                "blob", cause, parent, owner, peer, "memory", "avoided" if known else "attached",
                count, size_bytes, now, now, label,
            )  # fmt: skip

    def _introduce(self, peer: int, key: tuple[int, int]) -> bool:
        """Whether `peer` heard of a foreign segment from here before; it has now."""
        known = self._introduced.setdefault(peer, {})
        if key in known:
            return True
        known[key] = None
        if len(known) > 10_000:
            known.pop(next(iter(known)), None)
        return False

    def _introduce_arena(self, owner: int, peer: int) -> None:
        # The owner may be gone, or have no link to the peer: the descriptor goes with the mention.
        if (peer, owner) in self._arenas_sent or peer == self._rank:
            return
        if self.attachments.has_arena(owner):
            self._arenas_sent.add((peer, owner))
            fd = self.attachments.arena_fd(owner)
            self._post.post(peer, messages.ArenaDescriptor(owner), (fd,))

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, parcel: Parcel) -> Received:
        """Take the mentions of a parcel that arrived; call it before anything that came later."""
        if not parcel.segments and not parcel.parts:
            return Received(parcel)
        refs: list[WireRef] = []
        _collect(parcel, refs)
        with self._lock:
            for wire in refs:
                self._hold(wire, mentions=1)
        for wire in refs:
            if wire[0] == self._rank:
                self.store.lend(SegmentRef(*wire), self._rank)
        self._post.expect_settling()
        return Holding(parcel, refs, self)

    def keep_here(self, outgoing: Outgoing) -> Received:
        """Turn an encoded value into a received one of this very process."""
        parcel = outgoing.complete()
        self.mention(parcel, self._rank, "call", None, None, outgoing=outgoing)
        refs: list[WireRef] = []
        _collect(parcel, refs)
        with self._lock:
            for wire in refs:
                self._hold(wire, mentions=1)
        return Holding(parcel, refs, self)

    def _hold(self, ref: WireRef | SegmentRef, mentions: int) -> None:
        entry = self._held.get((ref[0], ref[1]))
        if entry is None:
            self._held[(ref[0], ref[1])] = [1, mentions]
        else:
            entry[0] += 1
            entry[1] += mentions

    def decode_inline(self, body: bytes) -> Any:
        """Build what `encode_inline` encoded."""
        return self._decode(Parcel(body=body), Received(Parcel()), None, None)

    def decode(self, received: Received, shares: list[Any] | None = None) -> Any:
        """Build the object anew over private mappings of its buffers.

        `shares` collects the shared objects that were given out, for `written_shares`.
        Raises whatever rebuilding raises; runs user code (`__setstate__`, imports).
        """
        return self._decode(received.parcel, received, shares, None)

    def _decode(
        self,
        parcel: Parcel,
        received: Received,
        shares: list[Any] | None,
        keep_views: list[memoryview] | None,
    ) -> Any:
        if parcel.share:
            return self._decode_named(parcel, received, shares)
        if parcel.body[: len(BARE)] == BARE:
            return loads(memoryview(parcel.body)[len(BARE) :])
        views: dict[int, memoryview] = {}

        def view_of(index: int) -> memoryview:
            view = views.get(index)
            if view is None:
                ref = SegmentRef(*parcel.segments[index])
                with self._lock:
                    self._hold(ref, mentions=0)
                try:
                    view = self.attachments.attach(ref)
                except BaseException:
                    self._dropped.append([ref])
                    raise
                views[index] = view
                if keep_views is not None:
                    keep_views.append(view)
            return view

        for index, offset, new in parcel.edits:
            # The mapping is private to this decode: nobody else sees the edit.
            view_of(index)[offset : offset + len(new)] = new
        body: memoryview
        if parcel.where is None:
            # A copy, since the receiver may write to the small buffers packed into it.
            body = memoryview(bytearray(parcel.body))
        else:
            index, offset, length = parcel.where
            body = view_of(index)[offset : offset + length]
        count, stream_length = HEAD.unpack_from(body)
        stream_start = HEAD.size + count * ENTRY.size
        stream_end = stream_start + stream_length
        pack_start = stream_end + -stream_end % ALIGN
        buffers: list[memoryview] = []
        for index, offset, length in ENTRY.iter_unpack(body[HEAD.size : stream_start]):
            if index == PACKED:
                offset += pack_start
                buffers.append(body[offset : offset + length])
            else:
                buffers.append(view_of(index)[offset : offset + length])

        def resolve(number: int) -> object:
            return self._decode(parcel.parts[number], received, shares, None)

        return pickling.decode(body[stream_start:stream_end], buffers, resolve)

    def _decode_named(self, parcel: Parcel, received: Received, shares: list[Any] | None) -> Any:
        if parcel.share == HERE:
            return self.here(0)
        if parcel.share == MEMBER:
            return self.here(parcel.share_owner)
        given = self.shares.get(
            parcel, received, lambda bare, views: self._decode(bare, received, None, views)
        )
        if shares is not None:
            shares.append(given)
        return given[1].value

    # --- giving back ------------------------------------------------------------------------------

    def settle(self, *, send: bool = True, to: int = 0) -> tuple[tuple[int, int], ...]:
        """Give back what nothing here uses any more; returns what belongs to rank `to`.

        With `send` false only what concerns this process's own arena is done. Never blocks for long:
        messages are only queued.
        """
        while self._let_go:
            try:
                placements, pinned = self._let_go.popleft()
            except IndexError:
                break
            for placement in placements:
                self.store.release(placement)
            if pinned:
                self._dropped.append(list(pinned))
        ended: list[Sequence[int]] = list(self.attachments.drain())
        while self._dropped:
            try:
                ended.extend(self._dropped.popleft())
            except IndexError:
                break
        back: dict[int, list[tuple[int, int]]] = {}
        if ended:
            with self._lock:
                for ref in ended:
                    key = (ref[0], ref[1])
                    entry = self._held[key]
                    entry[0] -= 1
                    if not entry[0]:
                        del self._held[key]
                        if entry[1]:
                            back.setdefault(ref[0], []).append((ref[1], entry[1]))
        for serial, count in back.pop(self._rank, ()):
            self.store.returned(SegmentRef(self._rank, serial, 0, 0), self._rank, count)
        self._owed(back)
        if self._dead_owners:
            self._drop_dead_arenas()
        if not send:
            return ()
        with self._lock:
            owed, self._debts = self._debts, {}
        answer = tuple(owed.pop(to, ()))
        for owner, segments in owed.items():
            self._post.post(owner, messages.Return(tuple(segments)))
        return answer

    def _owed(self, back: dict[int, list[tuple[int, int]]]) -> None:
        if back:
            with self._lock:
                self._debts = {
                    owner: self._debts.get(owner, []) + back.get(owner, [])
                    for owner in {*self._debts, *back}
                }

    def returned(self, peer: int, segments: Iterable[tuple[int, int]]) -> None:
        """A peer gives mentions back."""
        for serial, count in segments:
            self.store.returned(SegmentRef(self._rank, serial, 0, 0), peer, count)

    def lent_by(self, message: messages.Lend) -> None:
        """Somebody who holds our segments mentions them to a third process."""
        for wire in message.segments:
            self.store.lend(SegmentRef(*wire), message.to)

    def forget_owner(self, rank: int) -> None:
        """That process is dead, so nobody changes its arena any more: keep it while values lie there."""
        self._dead_owners.add(rank)
        self._drop_dead_arenas()

    def _drop_dead_arenas(self) -> None:
        with self._lock:
            needed = {owner for owner, _ in self._held}
        for rank in self._dead_owners - needed:
            self._dead_owners.discard(rank)
            self.attachments.drop_arena(rank)

    def forget_peer(self, rank: int) -> None:
        """That process is proven gone: nothing of ours can be read there any more."""
        self.store.peer_gone(rank)
        self._introduced.pop(rank, None)
        self._arenas_sent = {pair for pair in self._arenas_sent if pair[0] != rank}
        self.shares.forget_owner(rank)
        with self._lock:
            self._debts = {owner: debt for owner, debt in self._debts.items() if owner != rank}

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has, or may soon have, something to do."""
        return bool(self._held or self._dropped or self._let_go or self._debts)


def _count(tally: _Tally, owner: int, known: bool, used: int) -> None:
    entry = tally.setdefault((owner, known), [0, 0])
    entry[0] += 1
    entry[1] += used


def _collect(parcel: Parcel, refs: list[WireRef]) -> None:
    refs.extend(parcel.segments)
    for part in parcel.parts:
        _collect(part, refs)
