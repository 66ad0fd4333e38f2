"""The addresses of many buffers, quickly, and what object their memory belongs to.

Must never keep a buffer alive, nor know what it is wanted for.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from onehop._memory import kernel

Reference = TypeVar("Reference", bound="weakref.ref[Any]")


@functools.cache
def address_reader() -> Callable[[memoryview], int]:
    """Return the quickest function for the address of a view's first byte.

    `PyObject_GetBuffer` through ctypes takes 2.4 µs, and a model has hundreds of buffers. A memoryview object holds the address
    in one of its words; where that word is, is found out by looking and then tried. If the trial fails (another
    interpreter), the slow way stays.
    """
    offset = _offset_of_address()
    if offset is None:
        return kernel.address_of
    word = ctypes.c_size_t.from_address

    def read(view: memoryview) -> int:
        return word(id(view) + offset).value

    return read


def _offset_of_address() -> int | None:
    size = ctypes.sizeof(ctypes.c_size_t)
    samples = [memoryview(bytes(64)), memoryview(bytearray(4096))[100:], memoryview(b"x" * 99)[7:]]
    candidates = set(range(0, memoryview.__basicsize__, size))
    for view in samples:
        address = kernel.address_of(view)
        candidates &= {
            at for at in candidates if ctypes.c_size_t.from_address(id(view) + at).value == address
        }
    return min(candidates, default=None) if len(candidates) == 1 else None


def owner_reference(view: memoryview, make: Callable[[Any], Reference]) -> Reference | None:
    """Make a weak reference to the object that a view's memory ends with.

    Parameters
    ----------
    view : memoryview
        A view whose exporter is alive.
    make : callable
        Makes the reference, with whatever callback.

    Returns
    -------
    weakref.ref or None
        None if nothing on the way to the memory can be referenced (`bytes`).
    """
    numpy = sys.modules.get("numpy")
    found = None
    at: Any = view.obj
    for _ in range(32):
        if isinstance(at, memoryview):
            at = at.obj
            continue
        try:
            found = make(at)
        except TypeError:
            break  # the memory belongs to something like bytes: the nearest that can be watched must do
        # An array that was made only for the encoding (a transpose) names the array that has the memory.
        if numpy is None or not isinstance(at, numpy.ndarray) or at.base is None:
            break
        at = at.base
    return found
