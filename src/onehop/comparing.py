"""How a program says that the kernel must not be asked about some memory.

Must never know how the kernel is asked.
"""

from __future__ import annotations

import weakref
from typing import TypeVar

from onehop._memory.kernel import address_of
from onehop._memory.tracker import get_tracker

B = TypeVar("B")


def always_compare(buffer: B) -> B:
    """Have the bytes of a buffer compared each time it is sent, whatever the kernel says of its pages.

    For memory that something else than this process's own instructions writes to: pinned for a device
    (``cudaHostRegister``, RDMA, registered io_uring buffers). Shared and file mappings need no such word.
    Lasts as long as the object does.

    Parameters
    ----------
    buffer : buffer
        An array, or anything with a contiguous buffer.

    Returns
    -------
    buffer
        The same object.
    """
    view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
    tracker = get_tracker()
    address, length = address_of(view), view.nbytes
    tracker.exclude(address, length)
    weakref.finalize(buffer, tracker.include, address, length).atexit = False
    return buffer
