"""Values in and out of this process: the only file that moves blobs between processes.

`encode` turns an object into an `Outgoing` parcel: large buffers lie in segments (new ones are copied
into the arena here, once), everything else in its body. `mention` makes it travel: it lends every
segment to the receiver, tells foreign owners, and writes the ledger. `receive` takes the mentions of an
arrived parcel, `decode` builds the object over private mappings, and `settle` gives mentions back once
nothing of a segment is left here.

How a body is laid out: a header (`_HEAD`: number of buffers, length of the stream), one `_ENTRY` a
buffer (segment index or `_PACKED`, offset, length), the pickle stream, then the small buffers, each at
a multiple of 64 bytes. A body of up to `INLINE_BYTES` travels in the message; a larger one that was
seen before (the same structure sent again) lies in a segment, found by its bytes, so that a repeated
call stays a short message.

Must never know of sockets or tasks: it asks its `Post` to send a message to a rank.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from _pickle import dumps, loads
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from onehop import errors
from onehop._codec import pickling
from onehop._contracts.buffers import SegmentRef
from onehop._memory.blobs import BlobStore
from onehop._memory.mapping import Attachments
from onehop._protocol import messages
from onehop._protocol.messages import Parcel, WireRef
from onehop._runtime.edits import Bases
from onehop.ledger.book import Book

SMALL_BYTES = 4096
INLINE_BYTES = 1024
FIRST_INLINE_BYTES = 16384
"""A body up to this size is inline the first time: most are never sent again."""
_REMEMBERED_BODIES = 1024
_HEAD = struct.Struct("<IQ")
_ENTRY = struct.Struct("<IQQ")
_PACKED = 0xFFFFFFFF
_ALIGN = 64
_BARE = bytes(12)
"""What a body begins with that is nothing but a stream: no buffers, no parts; its length is not needed."""
_LONGEST_STREAM = INLINE_BYTES - len(_BARE)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Types that pickle takes whole: no need to look for buffers or functions in them."""

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

    __slots__ = ("_placements", "_transfers", "copied", "moved_bytes", "parcel", "parts", "pinned")

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.parts: list[Part] = []
        self.moved_bytes = 0
        self.copied: list[tuple[str, int]] = []
        self.pinned: list[SegmentRef] = []
        self._placements: list[Any] = []
        self._transfers: Transfers | None = None

    @property
    def bare(self) -> bool:
        """Nothing but a short stream: no segment to lend, nothing for the books beyond its message."""
        return self._transfers is None and not self.parts

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
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers._let_go.append((self._placements, self.pinned))
        self.parts = []

    def __del__(self) -> None:
        if self._transfers is not None:
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
        self._transfers._dropped.append(self._refs)


class _Shared:
    __slots__ = ("built", "failure", "lock", "received", "value", "views")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.built = False
        self.value: object = None
        self.failure = False
        self.received: Received | None = None
        self.views: list[memoryview] = []


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
        self.special: frozenset[type] = frozenset()
        """Types that travel by name; set by what users hold."""
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], list[int]] = {}  # (owner, serial): [uses here, mentions]
        # Finalizers may run inside a collection while any lock is held: they only append to these.
        self._dropped: deque[list[WireRef]] = deque()
        self._let_go: deque[tuple[list[Any], list[SegmentRef]]] = deque()
        self._debts: dict[int, list[tuple[int, int]]] = {}  # owner: returns not yet sent
        self._dead_owners: set[int] = set()
        self._introduced: dict[int, dict[tuple[int, int], None]] = {}
        self._arenas_sent: set[tuple[int, int]] = set()
        self._seen_bodies: dict[bytes, None] = {}
        self._bases = Bases()
        self._shared: dict[tuple[int, int], _Shared] = {}
        self._unshared: set[tuple[int, int]] = set()
        self._share_numbers = itertools.count(1)
        self.nothing = Outgoing(Parcel())
        """The value of what is not answered."""
        self.here: Callable[[int], object] = lambda rank: None
        """Builds what stands for the cluster (rank 0) or a member in decoded values."""

    # --- encoding ---------------------------------------------------------------------------------

    def encode(self, value: object, *, kept: bool = True, edited: bool = True) -> Outgoing:
        """Encode `value` as it is now. Copies each new buffer into the arena, once.

        With `kept` false the value is about to be dropped: its memory is not watched for changes. With
        `edited` false the receiver need not write to its mappings to get the value.

        Raises whatever the value's own reduction raises, and MemoryLimitError.
        """
        if self._let_go or self._dropped:
            self.settle(send=False)
        if type(value) in _ATOMS:
            stream = dumps(value, 5)
            if len(stream) <= _LONGEST_STREAM:
                return Outgoing(Parcel((), (), _BARE + stream))
        encoded = pickling.encode(value, self.special)
        stream = encoded.stream
        if not encoded.buffers and not encoded.substitutes and len(stream) <= _LONGEST_STREAM:
            return Outgoing(Parcel((), (), _BARE + stream))
        return self._encode_large(encoded, kept, edited)

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
                    return Outgoing(Parcel((), (), _BARE + stream))
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
        return _body(encoded.stream, [(buffer, None) for buffer in encoded.buffers])

    def decode_inline(self, body: bytes) -> Any:
        """Build what `encode_inline` encoded."""
        return self._decode(Parcel(body=body), Received(Parcel()), None, None)

    def _encode_large(self, encoded: pickling.Encoded, kept: bool, edited: bool) -> Outgoing:
        out = Outgoing(Parcel())
        out._transfers = self
        out.copied = encoded.copied
        for substitute in encoded.substitutes:
            out.parts.append(substitute._onehop_part(self))  # type: ignore[attr-defined]
        segments: dict[SegmentRef, int] = {}
        used: list[int] = []
        big = [buffer for buffer in encoded.buffers if buffer.nbytes >= SMALL_BYTES]
        places: Iterator[tuple[SegmentRef, int, int]] = iter(())
        if big:
            placement = self.store.place(big, arm=kept)
            places = iter(placement.locations)
            self._take(out, placement)
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
            placement = self.store.place((), (base,))
            self._take(out, placement)
            ref, offset, length = placement.locations[0]
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
            pack = _pack([located[number][0] for number in small], starts)
            index, base = place_loose(pack)
            for number, start in zip(small, starts, strict=True):
                located[number] = (located[number][0], (index, base + start))
        body = _body(encoded.stream, located)
        where = None
        if not self._inline(body):
            where = (*place_loose(body), len(body))
            body = b""
        out.parcel = Parcel(tuple(segments), tuple(used), body, where, (), tuple(edits))
        return out

    def _take(self, out: Outgoing, placement: Any) -> None:
        out._placements.append(placement)
        out.moved_bytes += placement.moved_bytes
        foreign = [ref for ref in placement.segments if ref.owner != self._rank]
        if foreign:
            # The arrays that this came from may die before the parcel is mentioned.
            with self._lock:
                for ref in foreign:
                    self._hold(ref, mentions=0)
            out.pinned.extend(foreign)
        self._post.expect_settling()

    def _inline(self, body: bytes) -> bool:
        if len(body) <= INLINE_BYTES:
            return True
        if len(body) > FIRST_INLINE_BYTES:
            return False
        if body in self._seen_bodies:
            return False
        self._seen_bodies[body] = None
        if len(self._seen_bodies) > _REMEMBERED_BODIES:
            # Another thread may be doing the same: whoever comes second finds nothing to remove.
            self._seen_bodies.pop(next(iter(self._seen_bodies)), None)
        return True

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
        if parcel.body[: len(_BARE)] == _BARE:
            return loads(memoryview(parcel.body)[len(_BARE) :])
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
        count, stream_length = _HEAD.unpack_from(body)
        stream_start = _HEAD.size + count * _ENTRY.size
        stream_end = stream_start + stream_length
        pack_start = stream_end + -stream_end % _ALIGN
        buffers: list[memoryview] = []
        for index, offset, length in _ENTRY.iter_unpack(body[_HEAD.size : stream_start]):
            if index == _PACKED:
                offset += pack_start
                buffers.append(body[offset : offset + length])
            else:
                buffers.append(view_of(index)[offset : offset + length])

        def resolve(number: int) -> object:
            return self._decode(parcel.parts[number], received, shares, None)

        return pickling.decode(body[stream_start:stream_end], buffers, resolve)

    # --- what travels by name ---------------------------------------------------------------------

    def _decode_named(self, parcel: Parcel, received: Received, shares: list[Any] | None) -> Any:
        if parcel.share == HERE:
            return self.here(0)
        if parcel.share == MEMBER:
            return self.here(parcel.share_owner)
        key = (parcel.share_owner, parcel.share)
        with self._lock:
            entry = self._shared.get(key)
            if entry is None:
                entry = _Shared()
                if key not in self._unshared:
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
                entry.value = self._decode(bare, received, None, entry.views)
                entry.received = received
                entry.built = True
        if shares is not None:
            shares.append((key, entry))
        return entry.value

    def written_shares(self, shares: list[Any]) -> int:
        """How many of the shared objects given to a task have been written to; they are forgotten."""
        written = 0
        for key, entry in shares:
            if any(self.attachments.is_written(view) for view in entry.views):
                written += 1
                with self._lock:
                    if self._shared.get(key) is entry:
                        del self._shared[key]
        return written

    def unshare(self, owner: int, numbers: Iterable[int]) -> None:
        """The last handle is gone: what was built here lives only as long as tasks still use it."""
        with self._lock:
            for number in numbers:
                self._shared.pop((owner, number), None)
                if owner != self._rank:
                    self._unshared.add((owner, number))

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
        with self._lock:
            for key in [key for key in self._shared if key[0] == rank]:
                del self._shared[key]
            self._debts = {owner: debt for owner, debt in self._debts.items() if owner != rank}

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has, or may soon have, something to do."""
        return bool(self._held or self._dropped or self._let_go or self._debts)


def _body(stream: bytes, located: Sequence[tuple[memoryview, tuple[int, int] | None]]) -> bytes:
    """Lay a body out; a buffer without a place is packed into it."""
    starts: list[int] = []
    pack = _pack([buffer for buffer, place in located if place is None], starts)
    next_start = iter(starts).__next__
    table = [
        _ENTRY.pack(_PACKED, next_start(), buffer.nbytes)
        if place is None
        else _ENTRY.pack(place[0], place[1], buffer.nbytes)
        for buffer, place in located
    ]
    head = _HEAD.pack(len(table), len(stream))
    if not pack:
        return b"".join((head, *table, stream))
    start = _HEAD.size + len(table) * _ENTRY.size + len(stream)
    return b"".join((head, *table, stream, bytes(-start % _ALIGN), pack))


def _pack(buffers: Iterable[memoryview], starts: list[int]) -> bytes:
    """Join small buffers, each at a multiple of `_ALIGN`, and say where each begins."""
    pieces: list[bytes | memoryview] = []
    length = 0
    for buffer in buffers:
        gap = -length % _ALIGN
        if gap:
            pieces.append(bytes(gap))
            length += gap
        starts.append(length)
        pieces.append(buffer)
        length += buffer.nbytes
    return b"".join(pieces)


def _count(tally: _Tally, owner: int, known: bool, used: int) -> None:
    entry = tally.setdefault((owner, known), [0, 0])
    entry[0] += 1
    entry[1] += used


def _collect(parcel: Parcel, refs: list[WireRef]) -> None:
    refs.extend(parcel.segments)
    for part in parcel.parts:
        _collect(part, refs)
