"""How the arrays of numpy and of the standard library are taken apart without copying them.

Must never import numpy before the user does, and knows nothing of streams: a reducer puts
`pickle.PickleBuffer` objects into what it returns, and that is all.

numpy itself keeps most of these in the pickle stream: every view with strides, every subclass, every
datetime64. The rebuilt arrays have the form of the original: order of axes, strides, read-only flag.
"""

from __future__ import annotations

import functools
import sys
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from onehop._codec.registry import Reducer, Registry
from onehop.errors import SerializationError

if TYPE_CHECKING:
    import array

    import numpy as np

# One for the process, like `copyreg.dispatch_table`: how a type is taken apart depends on no cluster.
REGISTRY = Registry()

# Kinds of dtype whose elements are plain bytes. Not object (pointers) and not numpy's StringDType, whose
# elements point into an arena of their own.
_PLAIN_KINDS = frozenset("biufcmMSUV")
# Kinds that numpy exports through the buffer protocol as they are.
_EXPORTED_KINDS = frozenset("biufc")


def register_reducer(type_name: str, reducer: Reducer) -> None:
    """Say how instances of a type are taken apart, without importing the type's module.

    Parameters
    ----------
    type_name : str
        ``"module.qualname"``, an exact type.
    reducer : callable
        Takes an instance and returns what ``__reduce_ex__(5)`` may return, with `pickle.PickleBuffer`
        objects where memory should be shared instead of copied.
    """
    REGISTRY.register(type_name, reducer)


def reduce_array(array: Any) -> Any:
    """Take a plain numpy array apart."""
    dtype = array.dtype
    kind = dtype.kind
    flags = array.flags
    if kind in _EXPORTED_KINDS and flags.c_contiguous and array.size:
        # The common case: the constructor of numpy itself is what the unpickler calls.
        return type(array), (array.shape, dtype, PickleBuffer(array))
    if kind not in _PLAIN_KINDS or dtype.hasobject:
        return array.__reduce__()
    arguments = _layout(array)
    return sys.modules["numpy"].ndarray, arguments


def reduce_array_subclass(array: np.ndarray[Any, Any]) -> Any:
    """Take an array of a subclass that adds nothing which pickle would keep apart."""
    dtype = array.dtype
    if dtype.kind not in _PLAIN_KINDS or dtype.hasobject:
        return array.__reduce__()
    plain = array.view(sys.modules["numpy"].ndarray)
    return build_subclass, (type(array), *_layout(plain))


def build_subclass(cls: type[Any], *arguments: Any) -> Any:
    """Rebuild an array of a subclass; called by the unpickler only."""
    # Not through the subclass, whose constructor may take anything.
    return sys.modules["numpy"].ndarray.__new__(cls, *arguments)


def reduce_masked_array(masked: Any) -> Any:
    """Take a masked array apart: data and mask are arrays of their own."""
    ma = sys.modules["numpy.ma"]
    mask = masked._mask
    return build_masked_array, (
        type(masked),
        masked._data,
        None if mask is ma.nomask else mask,
        masked._fill_value,
        masked._hardmask,
        masked._optinfo,
    )


def build_masked_array(
    cls: type[Any], data: Any, mask: Any, fill_value: Any, hard: bool, info: dict[str, Any]
) -> Any:
    """Rebuild a masked array; called by the unpickler only."""
    import numpy.ma as ma

    masked = data.view(cls)
    masked._mask = ma.nomask if mask is None else mask
    masked._sharedmask = False
    masked._hardmask = hard
    masked._fill_value = fill_value
    masked._optinfo.update(info)
    return masked


def reduce_array_array(values: array.array[Any]) -> Any:
    """Take an `array.array` apart; it owns its memory, so that arriving means copying."""
    if not len(values):
        return values.__reduce_ex__(5)
    REGISTRY.copied[type(values)] = "array.array"
    return build_array_array, (values.typecode, PickleBuffer(values))


def build_array_array(typecode: str, buffer: memoryview) -> Any:
    """Rebuild an `array.array`; called by the unpickler only."""
    import array

    values = array.array(typecode)
    values.frombytes(buffer)
    return values


def refuse_memoryview(view: memoryview) -> Any:
    """Say what to send instead of a memoryview, whose memory belongs to somebody else."""
    raise SerializationError(
        f"a memoryview ({view.nbytes} bytes) cannot be sent to another process: send bytes, a bytearray or"
        " a numpy array of it"
    )


def array_subclasses(known: dict[type, Reducer]) -> dict[type, Reducer]:
    """Find the subclasses of numpy's array that leave pickling to numpy.

    Parameters
    ----------
    known : dict
        Types that have a reducer.

    Returns
    -------
    dict
        Type to reducer, for those not known.
    """
    # Also missing while another thread is importing it.
    base = getattr(sys.modules.get("numpy"), "ndarray", None)
    if base is None:
        return {}
    found: dict[type, Reducer] = {}
    pending = list(type.__subclasses__(base))
    while pending:
        cls = pending.pop()
        pending.extend(type.__subclasses__(cls))
        if cls not in known and all(
            getattr(cls, name) is getattr(base, name)
            for name in ("__reduce__", "__reduce_ex__", "__setstate__")
        ):
            found[cls] = reduce_array_subclass
    return found


def _layout(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Give the arguments of `numpy.ndarray` that rebuild an array over a buffer of its own elements."""
    dtype, shape = array.dtype, array.shape
    if not array.nbytes:
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return shape, dtype, None, 0, None, order
    if array.flags.c_contiguous:
        return shape, dtype, _buffer(array)
    if array.flags.f_contiguous:
        return shape, dtype, _buffer(array.T), 0, None, "F"
    return _strided(array)


def _strided(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]
    dtype, shape, item_bytes = array.dtype, array.shape, array.dtype.itemsize
    # The part that is really there: no axis of stride zero, all strides positive.
    core = array[
        tuple(
            slice(None, None, -1) if stride < 0 else slice(0, 1) if stride == 0 else slice(None)
            for stride in array.strides
        )
    ]
    axes = [axis for axis in range(core.ndim) if core.shape[axis] > 1]
    axes.sort(key=lambda axis: core.strides[axis])
    span_bytes = item_bytes + sum((core.shape[axis] - 1) * core.strides[axis] for axis in axes)
    readonly = not array.flags.writeable
    strides = list(core.strides)
    if _is_dense(core, axes):
        order = [axis for axis in range(core.ndim) if axis not in axes] + axes[::-1]
        buffer = _buffer(core.transpose(order))
    elif span_bytes <= core.nbytes:
        # Windows over each other. Between the bytes they show there may be others of the parent, but never
        # more than the windows would take one by one.
        first = core[(slice(0, 1),) * core.ndim].reshape(1)
        window = numpy.lib.stride_tricks.as_strided(
            first.view(numpy.uint8), (span_bytes,), (1,), writeable=array.flags.writeable
        )
        buffer = PickleBuffer(window)
    else:
        # Gaps: only the elements themselves travel, in the order of axes that they had.
        gathered = numpy.empty_like(core, order="K", subok=False)
        gathered[...] = core
        kept = gathered.view(_gathered_type())
        if readonly:
            kept.flags.writeable = False
        axes = sorted(range(core.ndim), key=lambda axis: -gathered.strides[axis])
        strides = list(gathered.strides)
        buffer = _buffer(kept.transpose(axes))
    offset = 0
    for axis, stride in enumerate(array.strides):
        if stride == 0:
            strides[axis] = 0
        elif stride < 0:
            offset += (shape[axis] - 1) * strides[axis]
            strides[axis] = -strides[axis]
    return shape, dtype, buffer, offset, tuple(strides)


def _is_dense(core: np.ndarray[Any, Any], axes: list[int]) -> bool:
    expected = core.dtype.itemsize
    for axis in axes:
        if core.strides[axis] != expected:
            return False
        expected *= core.shape[axis]
    return True


def _buffer(contiguous: Any) -> PickleBuffer:
    """Export a C-contiguous array; as bytes where numpy does not export the dtype."""
    if contiguous.dtype.kind in _EXPORTED_KINDS:
        return PickleBuffer(contiguous)
    flat = contiguous.reshape(-1)
    return PickleBuffer(flat.view(sys.modules["numpy"].uint8))


@functools.cache
def _gathered_type() -> type[Any]:
    """Make the type by which the encoder recognises a buffer that had to be gathered."""
    numpy = sys.modules["numpy"]
    gathered = type("GatheredArray", (numpy.ndarray,), {"__slots__": ()})
    REGISTRY.copied[gathered] = "strided view"
    return gathered


register_reducer("array.array", reduce_array_array)
register_reducer("builtins.memoryview", refuse_memoryview)
register_reducer("numpy.ndarray", reduce_array)
register_reducer("numpy.matrix", reduce_array_subclass)
register_reducer("numpy.memmap", reduce_array_subclass)
register_reducer("numpy.rec.recarray", reduce_array_subclass)
register_reducer("numpy.ma.MaskedArray", reduce_masked_array)
