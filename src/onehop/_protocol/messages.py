"""The closed vocabulary: what one process of a cluster can say to another.

The wire, once. A frame (see `framing`) carries one message as its control part: a msgpack array whose
first element is the tag below, the others the fields in order. Nothing in it is ever unpickled by the
reader: user objects travel as *parcels*, which only the executor and the holder of a future decode.

A **parcel** is one encoded value. Its *body* (table of buffers, pickle stream, small buffers) is inline
when it is small; otherwise it lies in a segment like every other buffer. `segments` names what the
receiver must be able to attach; naming a segment in a message *is* lending it, once per mention:

* the owner that sends a mention counts it as lent to the receiver before the message leaves;
* whoever mentions somebody else's segment tells the owner first (`Lend`), on the link that will later
  carry its own `Return`: the owner therefore never sees the last return before the new loan;
* a mention that reaches the owner itself is a loan from the owner to itself;
* the receiver gives all mentions of a segment back (`Return`) when nothing of it is left there.

Must never know of sockets, threads, clocks or user types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

WireRef = tuple[int, int, int, int]
"""A SegmentRef as it travels: owner, serial, arena offset, size in bytes."""

CallId = tuple[int, int]
"""Rank of the caller, and its serial number for the call."""


class Parcel(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One encoded value."""

    segments: tuple[WireRef, ...] = ()
    used: tuple[int, ...] = ()
    """Bytes of the value in each segment; a segment may hold other values too."""
    body: bytes = b""
    where: tuple[int, int, int] | None = None
    """(segment index, offset, length) of the body, when it is not inline."""
    parts: tuple[Parcel, ...] = ()
    """Values of futures and shared handles that the pickle stream names by number."""
    edits: tuple[tuple[int, int, bytes], ...] = ()
    """(segment index, offset, bytes): what is to be written over the receiver's own copy of the body or of
    the small buffers, where they differ a little from what was sent before."""
    share: int = 0
    """Not 0: the object is built once per process and kept under (owner of the share, this number)."""
    share_owner: int = 0


class Trouble(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a call failed."""

    kind: str
    """`raised`, `undecodable`, `unencodable`, `interrupted`, `lost`, `nesting`, `shared-written`."""
    type_name: str
    message: str
    traceback: str
    rank: int
    host: str
    exception: bytes | None = None
    """The body of the original exception with all its buffers inline, where it could be encoded."""
    started: bool = True


class Call(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Run a function and answer; `serial` 0 asks for no answer."""

    serial: int
    function: str | Parcel
    """A Parcel, or `module:qualified.name` for what the target can import."""
    arguments: Parcel | None
    """(args, kwargs); None when both are empty."""
    parent: CallId | None = None
    depth: int = 0
    flags: int = 0
    """Bit 0: urgent. Bit 1: the caller counts credit and wants to hear of parking."""
    chain: tuple[str, ...] = ()
    """The nearest callers that wait for this call, outermost first, for the message of a limit."""


URGENT = 1
CREDITED = 2


class Result(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The function returned."""

    serial: int
    value: Parcel
    run_ns: int = 0
    returns: tuple[tuple[int, int], ...] = ()
    """Mentions given back with it: (segment serial, count), of segments that the receiver owns."""


class Failure(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The function raised, or could not be run."""

    serial: int
    trouble: Trouble
    run_ns: int = 0


class Cancel(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The caller no longer wants the answer; a running task is interrupted."""

    serial: int
    interrupt: bool = True


class Parked(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The task gave up its slot while it waits, so that the caller may send another."""

    serial: int


class Lend(msgspec.Struct, array_like=True, tag=6, gc=False):
    """To an owner: the sender, who holds these segments, mentions them to `to`."""

    to: int
    segments: tuple[WireRef, ...]


class Return(msgspec.Struct, array_like=True, tag=7, gc=False):
    """To an owner: mentions given back, as (segment serial, count)."""

    segments: tuple[tuple[int, int], ...]


class ArenaDescriptor(msgspec.Struct, array_like=True, tag=8, gc=False):
    """Travels with one file descriptor: the arena of `owner`, read-only."""

    owner: int


class MemberInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What everybody knows of a process."""

    rank: int
    state: str
    pid: int = 0
    host: str = ""
    host_id: str = ""
    address: str = ""
    reason: str = ""


class Members(msgspec.Struct, array_like=True, tag=9, gc=False):
    """From the director: news of some members."""

    members: tuple[MemberInfo, ...]


class LedgerPull(msgspec.Struct, array_like=True, tag=10, gc=False):
    """Send what your book has recorded from record `since` on."""

    serial: int
    since: int


class LedgerNews(msgspec.Struct, array_like=True, tag=11, gc=False):
    """The answer: the book's export, and what the links counted at the same moment."""

    serial: int
    book: Any
    links: tuple[tuple[int, str, int, int], ...]
    """(peer, medium, bytes sent, bytes received), one a link, of frames' control and payload."""


class Unshare(msgspec.Struct, array_like=True, tag=12, gc=False):
    """The last handle of these shared objects is gone: drop what was built of them."""

    shares: tuple[int, ...]


class Shutdown(msgspec.Struct, array_like=True, tag=13, gc=False):
    """End after the tasks that run now."""

    reason: str = ""


class Path(msgspec.Struct, array_like=True, tag=14, gc=False):
    """From the director: where modules are looked for from now on."""

    path: tuple[str, ...]


class Hello(msgspec.Struct, array_like=True, gc=False):
    """What both sides tell of themselves in the handshake, each already proven.

    With it go two descriptors: the read-only arena and the read end of the lifeline.
    """

    rank: int
    pid: int
    host: str
    host_id: str
    address: str
    python: str
    version: str
    board: int = 0
    """Where in its arena it shows which calls it runs; see `_runtime.board`."""


Message = (
    Call
    | Result
    | Failure
    | Cancel
    | Parked
    | Lend
    | Return
    | ArenaDescriptor
    | Members
    | LedgerPull
    | LedgerNews
    | Unshare
    | Shutdown
    | Path
)

_encoder = msgspec.msgpack.Encoder()
encode: Callable[[Message | Hello], bytes] = _encoder.encode
decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode
decode_hello: Callable[[bytes], Hello] = msgspec.msgpack.Decoder(Hello).decode
