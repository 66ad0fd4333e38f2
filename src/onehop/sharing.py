"""Handles to objects that each worker builds once.

Must never know how the object travels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from onehop._runtime.parcels import Part
from onehop._runtime.transfers import Transfers

if TYPE_CHECKING:
    from onehop._runtime.process import Process

T = TypeVar("T")


class Shared(Generic[T]):
    """Stands for an object in the arguments of calls; made by `Cluster.share`.

    Attributes
    ----------
    value : object
        The object, in the program that shared it. Changes to it after `share` are not seen by tasks.
    """

    __slots__ = ("__weakref__", "_parcel", "_process", "value")

    def __init__(self, process: Process, value: T) -> None:
        self.value = value
        self._process = process
        outgoing = process.transfers.encode(value, edited=False)
        for part in outgoing.waiting:
            process.wait(lambda part=part: part.parcel is not None)  # type: ignore[misc]
        self._parcel = process.transfers.share(outgoing)
        # Finalizers may run anywhere: the list is worked off by the process's next tick.
        weakref.finalize(self, process.unshare, self._parcel.share, outgoing).atexit = False

    def _onehop_part(self, transfers: Transfers) -> Part:
        if transfers is not self._process.transfers:
            raise TypeError("a shared object belongs to the cluster that shared it")
        return Part(self._parcel, self)

    def __repr__(self) -> str:
        return f"<onehop shared {type(self.value).__name__}>"

    def __reduce__(self) -> Any:
        raise TypeError("a onehop shared object can be passed to calls of its own cluster only")
