"""onehop: run functions in many processes; every byte moves at most once, and you can see where it went.

Public names, re-exported, nothing else. They are imported when they are first used, since a worker needs
none of them to start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onehop import errors
from onehop._contracts.version import VERSION as __version__
from onehop.errors import (
    CallLost,
    CallTimeout,
    ClusterClosed,
    ForkedError,
    HandshakeError,
    LinkClosed,
    MemoryLimitError,
    NestingLimitError,
    OnehopError,
    ProtocolError,
    RemoteError,
    SerializationError,
    SharedObjectModified,
    TopologyError,
    WorkerDied,
)

if TYPE_CHECKING:
    from onehop._runtime.context import rank
    from onehop.calls import Future
    from onehop.cluster import Cluster, current
    from onehop.comparing import always_compare
    from onehop.members import Host, Worker
    from onehop.sharing import Shared


__all__ = [
    "CallLost",
    "CallTimeout",
    "Cluster",
    "ClusterClosed",
    "ForkedError",
    "Future",
    "HandshakeError",
    "Host",
    "LinkClosed",
    "MemoryLimitError",
    "NestingLimitError",
    "OnehopError",
    "ProtocolError",
    "RemoteError",
    "SerializationError",
    "Shared",
    "SharedObjectModified",
    "TopologyError",
    "Worker",
    "WorkerDied",
    "__version__",
    "always_compare",
    "current",
    "errors",
    "rank",
]

_LATER = {
    "Cluster": "onehop.cluster",
    "Future": "onehop.calls",
    "Host": "onehop.members",
    "Shared": "onehop.sharing",
    "Worker": "onehop.members",
    "always_compare": "onehop.comparing",
    "current": "onehop.cluster",
    "rank": "onehop._runtime.context",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'onehop' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
