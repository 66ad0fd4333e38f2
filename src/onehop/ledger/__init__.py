"""The books of what moved, what was attached and what was avoided; pure: no clocks, sockets or threads.

Names are imported when they are first used, because a worker's start needs no more than `Book`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onehop.ledger.book import Book
from onehop.ledger.records import CallId, Export, Tally, TransferRecord

if TYPE_CHECKING:
    from onehop.ledger.journey import Hop, Journey, route_of
    from onehop.ledger.ledger import Ledger, Watch
    from onehop.ledger.tables import Flow, Table, Traffic, format_bytes

__all__ = [
    "Book",
    "CallId",
    "Export",
    "Flow",
    "Hop",
    "Journey",
    "Ledger",
    "Table",
    "Tally",
    "Traffic",
    "TransferRecord",
    "Watch",
    "format_bytes",
    "route_of",
]

_LATER = {
    "Hop": "journey",
    "Journey": "journey",
    "route_of": "journey",
    "Ledger": "ledger",
    "Watch": "ledger",
    "Flow": "tables",
    "Table": "tables",
    "Traffic": "tables",
    "format_bytes": "tables",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
