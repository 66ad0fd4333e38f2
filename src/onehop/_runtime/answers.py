"""How a call ended, and what the caller gets: a value, or the exception that says what happened.

Must never know how the answer travelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onehop import errors

if TYPE_CHECKING:
    from onehop._protocol.messages import Trouble
    from onehop._runtime.parcels import Named, Received
    from onehop._runtime.transfers import Transfers


class Answer:
    """Exactly one of: a received value, a trouble that travelled, an error found here."""

    __slots__ = ("at_item", "error", "received", "run_ns", "trouble")

    def __init__(
        self,
        received: Received | None = None,
        trouble: Trouble | None = None,
        error: BaseException | None = None,
        run_ns: int = 0,
        at_item: int = 0,
    ) -> None:
        self.received = received
        self.trouble = trouble
        self.error = error
        self.run_ns = run_ns
        self.at_item = at_item
        """Of a lost batch: the item that it was at."""

    def value(self, transfers: Transfers, call: Named | None = None) -> Any:
        """Build the value here, or raise what happened; `call` is named in the ledger."""
        received = self.received
        if received is not None:
            if received.parcel.segments or received.parcel.parts:
                transfers.note_arrival(received.parcel, call)
            return transfers.decode(received)
        raise self.exception(transfers, call)

    def exception(self, transfers: Transfers, call: Named | None = None) -> BaseException:
        """What to raise; only if there is no value."""
        if self.trouble is not None:
            label = "" if call is None else call.label
            self.error = error_of(self.trouble, transfers, label)
            self.trouble = None
        if self.error is None:
            raise errors.ProtocolError("an answer was asked for its exception and has a value")
        return self.error


_OWN: dict[str, type[errors.RemoteError]] = {
    "undecodable": errors.RemoteSerializationError,
    "unencodable": errors.RemoteSerializationError,
    "shared-written": errors.RemoteSharedObjectModified,
}
_SAID: dict[str, str] = {
    "undecodable": "the function or arguments of {} could not be rebuilt",
    "unencodable": "the result of {} could not be encoded",
}


def error_of(trouble: Trouble, transfers: Transfers, label: str = "") -> BaseException:
    """Turn a trouble that travelled into the exception for the caller."""
    if trouble.kind == "interrupted":
        # Not at the top: it takes longer to import than a worker may take to start.
        from concurrent.futures import CancelledError

        return CancelledError(f"the task was interrupted on rank {trouble.rank} ({trouble.host})")
    if trouble.kind == "nesting":
        return errors.NestingLimitError(trouble.message)
    own = _OWN.get(trouble.kind)
    if own is not None:
        said = _SAID.get(trouble.kind)
        message = (
            f"{said.format(label or 'a call')} on rank {trouble.rank} ({trouble.host}): {trouble.type_name}: {trouble.message}"
            if said
            else trouble.message
        )
        error = own(message, trouble.rank, trouble.host, trouble.type_name, trouble.traceback)
        errors.note_remote(error)
        return error
    if trouble.exception is not None:
        try:
            original = transfers.decode_inline(trouble.exception)
        except Exception:
            original = None  # its class exists there only
        if isinstance(original, Exception):
            return errors.rebuild_remote(
                original, trouble.rank, trouble.host, trouble.type_name, trouble.traceback
            )
    error = errors.RemoteError(
        f"{trouble.type_name}: {trouble.message}",
        trouble.rank,
        trouble.host,
        trouble.type_name,
        trouble.traceback,
    )
    errors.note_remote(error)
    return error
