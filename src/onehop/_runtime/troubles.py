"""Exceptions on their way to the caller: what kind of trouble, its text, and itself if it can travel.

Must never know who the caller is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onehop import errors
from onehop._protocol import messages

if TYPE_CHECKING:
    from onehop._runtime.process import Process
    from onehop._runtime.task import Task


MOST_TEXT = 64 << 10
MOST_BODY_BYTES = 16 << 20
"""An exception travels whole in one frame, so one that holds more does so as text only."""


def _safe(text: str) -> str:
    """What can be sent: no lone surrogates (they stand in odd file names), and not without end."""
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]}\n… {len(text) - MOST_TEXT} characters left out …\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def kind_of(task: Task, error: BaseException, kind: str) -> str:
    if isinstance(error, KeyboardInterrupt) and task.interrupted:
        return "interrupted"
    if isinstance(error, errors.NestingLimitError):
        return "nesting"
    if isinstance(error, errors.OnehopError):
        return "raised"  # it says itself what is wrong: a memory limit, a lost value
    return kind


def describe(
    process: Process, kind: str, error: BaseException, own_file: str = ""
) -> messages.Trouble:
    """Put an exception into a message, with its traceback as text and itself if it can travel."""
    import traceback

    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == own_file:
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # a broken __str__ or __repr__ of the user's
        text = "".join(traceback.format_tb(frames)) + f"{type(error).__name__} (cannot be shown)\n"
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    message, text = _safe(message), _safe(text)
    body = None
    if isinstance(error, Exception):
        try:
            body = process.transfers.encode_inline(error)
            # An exception that cannot be rebuilt is found out here, not at the caller.
            process.transfers.decode_inline(body)
            if len(body) > MOST_BODY_BYTES:
                body = None
        except Exception:
            body = None
    type_name = _safe(
        f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    )
    trouble = messages.Trouble(
        kind, type_name, message, text, process.rank, process.host, body, kind != "undecodable"
    )
    # The traceback's frames hold the arguments: let them go.
    error.__traceback__ = None
    return trouble
