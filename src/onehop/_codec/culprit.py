"""Finds which part of an object cannot be encoded, to say so in the error.

Must never raise, nor take long: it runs after something has failed already, and only adds a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

_LIMIT_NS = 300_000_000
_DEPTH = 30
_HINTS = {
    "generator": "a generator has no value to send: make a list of it, or send the function that makes it",
    "memoryview": "send bytes, a bytearray or an array",
}


def explain(error: Exception, obj: object, attempt: Callable[[Any], object]) -> None:
    """Add a note to an error: the path to the innermost part that fails alone, and its type.

    Parameters
    ----------
    error : Exception
        Gets the note.
    obj : object
        What could not be encoded.
    attempt : callable
        Encodes its argument or raises.
    """
    if getattr(error, "__notes__", None) and any("onehop:" in note for note in error.__notes__):
        return  # an inner encode, called by a reducer, has named its culprit
    try:
        path, culprit = _search(obj, attempt, time.monotonic_ns() + _LIMIT_NS)
        name = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        where = f"value{path}" if path else "the value itself"
        hint = _HINTS.get(name)
        error.add_note(
            f"onehop: could not encode {where}, of type {name}" + (f" ({hint})" if hint else "")
        )
    except (
        Exception
    ):  # user code (properties, __len__ …) ran; the first error matters, not this one
        return


def _search(obj: object, attempt: Callable[[Any], object], deadline_ns: int) -> tuple[str, object]:
    path = ""
    seen = {id(obj)}
    for _ in range(_DEPTH):
        for step, part in _parts(obj):
            if time.monotonic_ns() > deadline_ns:
                return path, obj
            if type(part) in (int, float, str, bool, bytes, type(None)) or id(part) in seen:
                continue
            try:
                attempt(part)
            except Exception:
                path, obj = path + step, part
                seen.add(id(part))
                break
        else:
            break
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, object]]:
    if isinstance(obj, dict):
        for key, value in list(obj.items()):
            yield f"[{_brief(key)}]", value
            yield f".keys: {_brief(key)}", key
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in list(obj):
            yield f".members: {_brief(value)}", value
    if isinstance(obj, type):
        return
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in list(attributes.items()):
            yield f".{name}", value
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)
    closure = getattr(obj, "__closure__", None)
    code = getattr(obj, "__code__", None)
    if closure and code is not None:
        for name, cell in zip(code.co_freevars, closure, strict=False):
            try:
                yield f" captured {name}", cell.cell_contents
            except ValueError:
                continue
    if code is not None and hasattr(obj, "__globals__"):
        for name in code.co_names:
            if name in obj.__globals__:
                yield f" global {name}", obj.__globals__[name]
    if hasattr(obj, "func") and hasattr(obj, "args") and hasattr(obj, "keywords"):
        yield ".func", obj.func
        yield ".args", obj.args
        yield ".keywords", obj.keywords
    if hasattr(obj, "__self__") and hasattr(obj, "__func__"):
        yield ".__self__", obj.__self__


def _brief(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 40 else text[:37] + "..."
