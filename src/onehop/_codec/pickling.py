"""Objects to a small stream and flat buffers, and back.

Must never know where buffers are kept, which process is which, or what a placeholder stands for.

The fast way is the C pickler with a table of reducers. What it cannot do (functions and classes that
other processes cannot import) is done again by `byvalue`, with the same table.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onehop._codec.functions import by_value_marks, is_by_value
from onehop._codec.reducers import REGISTRY, array_subclasses

dumps = pickle.dumps
loads = pickle.loads
"""For values that need no looking into: what C does alone, without this file's care."""

Resolve = Callable[[int], object]
ResolveBytes = Callable[[int, memoryview], bytes]

# Opcodes of pickle protocol 5 that are read or written here.
_FRAME, _FRAME_HEADER_BYTES = 0x95, 9
_BINBYTES, _BINUNICODE = 0x42, 0x58
_BINBYTES8, _BINUNICODE8, _BYTEARRAY8 = 0x8E, 0x8D, 0x96
_LONG_PAYLOADS = (_BINBYTES8, _BINUNICODE8, _BYTEARRAY8)
_NEXT_BUFFER_AND_CALL = b"\x97\x86R"
_read_u64 = struct.Struct("<Q").unpack_from
# The pickler drops a frame of fewer bytes than this.
_FRAME_MIN_BYTES = 4
_BYTES_GLOBAL = b"conehop._codec.pickling\nbuild_bytes\nJ"
_BYTEARRAY_GLOBAL = b"conehop._codec.pickling\nbuild_bytearray\nJ"

_PLAIN_TYPES = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        tuple,
        list,
        dict,
        set,
        frozenset,
    }
)


class Encoded:
    """What an object became.

    Attributes
    ----------
    stream : bytes
        A pickle of protocol 5.
    buffers : list of memoryview
        Flat, of format ``B``, in the order of the stream; each keeps its exporter alive. A bytearray cannot be
        resized while one of its memoryviews lives, so drop this object soon.
    substitutes : list
        The objects of special types, by their number in the stream.
    copied : list of (str, int)
        Why and how many bytes of buffers are copied (here or on arrival) because of their type.
    """

    __slots__ = ("buffers", "copied", "stream", "substitutes")

    def __init__(self) -> None:
        self.stream = b""
        self.buffers: list[memoryview] = []
        self.substitutes: list[object] = []
        self.copied: list[tuple[str, int]] = []


class _Sink:
    """The file that the C pickler writes to; takes large bytes and bytearrays out of the stream.

    The pickler hands a payload of 64 KiB or more straight to ``write``, as the object itself, after a chunk
    that ends with the opcode and the length. The opcode is replaced by a call that takes the next buffer and
    leaves one object on the stack, as the opcode would have, so that the numbering of the memo stays right.
    Were the chunks ever cut differently, nothing would be recognised and all would stay in the stream.
    """

    __slots__ = ("_header_bytes", "_kind", "_size_bytes", "chunks", "encoded", "took_payload")

    def __init__(self, encoded: Encoded) -> None:
        self.chunks: list[bytes] = []
        self.encoded = encoded
        self.took_payload = False
        self._kind = 0
        self._header_bytes = 0
        self._size_bytes = -1

    def write(self, chunk: Any) -> None:
        if self._size_bytes >= 0:
            self._payload(chunk)
            return
        self.chunks.append(chunk)
        # All chunks but those before a payload consist of one whole frame (after the protocol's two bytes).
        start = 2 if len(self.chunks) == 1 else 0
        size = len(chunk)
        if size > start + _FRAME_HEADER_BYTES and chunk[start] == _FRAME:
            frame_start = start + _FRAME_HEADER_BYTES
            header_start = frame_start + _read_u64(chunk, start + 1)[0]
            if header_start == size:
                return
            room = 0
        else:
            header_start, room = start, _FRAME_MIN_BYTES - 1
        tail = size - header_start
        if 5 <= tail <= 5 + room and chunk[-5] in (_BINBYTES, _BINUNICODE):
            self._kind, self._header_bytes = chunk[-5], 5
        elif 9 <= tail <= 9 + room and chunk[-9] in _LONG_PAYLOADS:
            self._kind, self._header_bytes = chunk[-9], 9
        else:
            return
        self._size_bytes = int.from_bytes(chunk[1 - self._header_bytes :], "little")

    def _payload(self, payload: Any) -> None:
        size, self._size_bytes = self._size_bytes, -1
        textual = self._kind in (_BINUNICODE, _BINUNICODE8)
        if textual or len(payload) != size or type(payload) not in (bytes, bytearray):
            # A long text: the memory belongs to the pickler and is gone after this call.
            self.chunks.append(bytes(payload))
            return
        self.took_payload = True
        self.chunks[-1] = self.chunks[-1][: -self._header_bytes]
        encoded = self.encoded
        number = len(encoded.buffers).to_bytes(4, "little")
        if self._kind == _BYTEARRAY8:
            self.chunks.append(_BYTEARRAY_GLOBAL + number + _NEXT_BUFFER_AND_CALL)
            encoded.copied.append(("bytearray", size))
        else:
            self.chunks.append(_BYTES_GLOBAL + number + _NEXT_BUFFER_AND_CALL)
        encoded.buffers.append(memoryview(payload))


class _Hooks(threading.local):
    """What a running decode calls for placeholders, per thread; decodes nest by saving and restoring it.

    The C unpickler calls plain functions faster than methods of a subclass, but they need to be found by name.
    """

    resolve: Resolve | None = None
    resolve_bytes: ResolveBytes | None = None
    encoding: tuple[dict[int, int], list[object]] = ({}, [])
    """Numbers by id, and the objects they stand for, of the encode that runs."""


_hooks = _Hooks()


def encode(obj: object, special: frozenset[type] = frozenset()) -> Encoded:
    """Take an object apart into a stream and buffers.

    Parameters
    ----------
    obj : object
        Anything that pickle or cloudpickle can take apart.
    special : frozenset of type
        Exact types whose instances are replaced by numbers, wherever they are found.

    Returns
    -------
    Encoded
        Shares memory with `obj`.

    Raises
    ------
    Exception
        What the reduction of an object raised, with a note saying where it was found.
    """
    failure: Exception | None = None
    if not _begins_by_value(obj):
        try:
            encoded = _encode_fast(obj, special)
        except (pickle.PicklingError, AttributeError, TypeError, ImportError) as error:
            failure = error
        except Exception as error:
            _explain(error, obj, special)
            raise
        else:
            find = encoded.stream.find  # `in` raises and clears an error for each mark, inside
            for mark in by_value_marks():
                if find(mark) >= 0:
                    break
            else:
                return encoded
    # The first failure ("not found as …") would only hide the second one, so they are not chained.
    del failure
    try:
        return _encode_by_value(obj, special)
    except Exception as error:
        _explain(error, obj, special)
        raise


def decode(
    stream: bytes | memoryview,
    buffers: Sequence[memoryview],
    resolve: Resolve | None = None,
    resolve_bytes: ResolveBytes | None = None,
) -> Any:
    """Rebuild an object over its buffers.

    Parameters
    ----------
    stream : bytes-like
        From `Encoded.stream`.
    buffers : sequence of memoryview
        As many as were encoded, in the same order; the object keeps them.
    resolve : callable, optional
        Gets the number of a placeholder and returns what stands there.
    resolve_bytes : callable, optional
        Gets the number of a buffer and the buffer, and returns the bytes object made of it, so that it may be
        made once and used again.

    Returns
    -------
    object
        Equal to what was encoded.
    """
    hooks = _hooks
    outer, outer_bytes = hooks.resolve, hooks.resolve_bytes
    hooks.resolve, hooks.resolve_bytes = resolve, resolve_bytes
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        hooks.resolve, hooks.resolve_bytes = outer, outer_bytes


def resolve_placeholder(number: int) -> object:
    """Stand in a stream for an object of a special type; called by the unpickler only."""
    resolve = _hooks.resolve
    if resolve is None:
        raise pickle.UnpicklingError(
            "this pickle contains an object that only exists inside its onehop cluster"
        )
    return resolve(number)


def build_bytes(number: int, buffer: memoryview) -> bytes:
    """Make a bytes object of a buffer; called by the unpickler only."""
    build = _hooks.resolve_bytes
    return bytes(buffer) if build is None else build(number, buffer)


def build_bytearray(number: int, buffer: memoryview) -> bytearray:
    """Make a bytearray of a buffer; called by the unpickler only."""
    return bytearray(buffer)


def _substitute(obj: object) -> tuple[Any, ...]:
    """Put a number in the place of an object of a special type; called by the pickler only."""
    numbers, substitutes = _hooks.encoding
    number = numbers.get(id(obj))
    if number is None:
        number = numbers[id(obj)] = len(substitutes)
        substitutes.append(obj)
    return resolve_placeholder, (number,)


class _Table:
    """The reducers of the latest encode: most encodes need the same ones."""

    __slots__ = ("reducers", "registered", "special", "table")

    def __init__(
        self, special: frozenset[type], registered: dict[type, Any], reducers: dict[type, Any]
    ) -> None:
        self.special = special
        self.registered = dict(registered)
        self.reducers = reducers
        # An exact dict: the C pickler looks into any other mapping through slower calls.
        self.table: dict[type, Any] = {**registered, **reducers}
        for kind in special:
            self.table[kind] = _substitute


_latest = _Table(frozenset(), copyreg.dispatch_table, REGISTRY.table)


def _table(special: frozenset[type]) -> dict[type, Any]:
    """Return the table of reducers; it is not to be changed."""
    global _latest
    reducers = REGISTRY.current()
    latest = _latest
    if (
        latest.reducers is not reducers
        or latest.special is not special
        or latest.registered != copyreg.dispatch_table
    ):
        _latest = latest = _Table(special, copyreg.dispatch_table, reducers)
    return latest.table


def _buffer_callback(encoded: Encoded) -> Callable[[pickle.PickleBuffer], bool]:
    buffers = encoded.buffers
    copied = encoded.copied
    reasons = REGISTRY.copied

    def take(buffer: pickle.PickleBuffer) -> bool:
        flat = buffer.raw()
        if not flat.nbytes:
            return True
        buffers.append(flat)
        reason = reasons.get(type(flat.obj))
        if reason is not None:
            copied.append((reason, flat.nbytes))
        return False

    return take


def _encode_fast(obj: object, special: frozenset[type]) -> Encoded:
    return _dump(obj, special, _fast_pickler)


def _encode_by_value(obj: object, special: frozenset[type]) -> Encoded:
    # Importing cloudpickle takes 30 ms, which a worker that only gets importable functions never pays.
    from onehop._codec.byvalue import ByValuePickler

    return _dump(obj, special, ByValuePickler)


def _dump(
    obj: object,
    special: frozenset[type],
    make_pickler: Callable[..., Any],
    more: Mapping[type, Any] | None = None,
) -> Encoded:
    encoded = Encoded()
    sink = _Sink(encoded)
    table = _table(special)
    if more:
        table = {**table, **more}
    hooks = _hooks
    outer = hooks.encoding
    hooks.encoding = ({}, encoded.substitutes)
    try:
        make_pickler(sink, table, _buffer_callback(encoded)).dump(obj)
    finally:
        hooks.encoding = outer
    chunks = sink.chunks
    encoded.stream = stream = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if sink.took_payload and more is None and b"_reconstruct" in stream:
        # numpy has copied an array of a subclass into bytes. The subclasses are looked for only now, since
        # going through them for every encode would cost more than this rare second pass.
        classes = array_subclasses(table)
        named = {c: r for c, r in classes.items() if c.__name__.encode() in stream}
        if named:
            return _dump(obj, special, make_pickler, named)
    return encoded


def _fast_pickler(
    sink: _Sink, table: dict[type, Any], take: Callable[[pickle.PickleBuffer], bool]
) -> pickle.Pickler:
    pickler = pickle.Pickler(sink, 5, buffer_callback=take)
    pickler.dispatch_table = table
    return pickler


def _begins_by_value(obj: object) -> bool:
    """Guess cheaply that the fast way would be in vain, to spare a large object from being done twice."""
    parts: Any = obj if type(obj) in (tuple, list) else (obj,)
    for part in parts[:8]:
        kind = type(part)
        if kind in _PLAIN_TYPES:
            continue
        if kind is types.FunctionType:
            if part.__name__ == "<lambda>":
                return True
            module_name = part.__module__
        elif isinstance(part, type):
            module_name = part.__module__
        else:
            module_name = kind.__module__
        if is_by_value(module_name):
            return True
    return False


def _explain(error: Exception, obj: object, special: frozenset[type]) -> None:
    from onehop._codec.culprit import explain

    explain(error, obj, lambda part: _encode_by_value(part, special))
