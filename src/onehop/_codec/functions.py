"""Where code comes from: which modules other processes can import, and functions named by text.

Must never know what is done with an answer: no streams, buffers or processes here.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from typing import Any

_MAIN_NAMES = ("__main__", "__mp_main__")


_MOST_REFERENCES = 512
# What was found for a function lately: (function, names of its module, name, text, and what the answer
# depends on besides). The function is kept, so that its id is not given to another one.
_references: dict[int, tuple[Any, dict[str, Any], str, str, int, set[str]]] = {}


def function_reference(function: Any) -> str | None:
    """Name a function so that another process finds it by importing.

    Parameters
    ----------
    function : callable
        A plain or builtin function, a class, or anything else with a module and a qualified name.

    Returns
    -------
    str or None
        ``"module:qualname"``, or None if the function has to travel by value.
    """
    known = _references.get(id(function))
    if known is not None:
        kept, names, name, text, module_count, registered = known
        # Replaced in its module, or its module has become one that travels by value: looked at again.
        if (
            kept is function
            and names.get(name) is function
            and module_count == len(sys.modules)
            and registered == registered_modules()
        ):
            return text
    module_name = getattr(function, "__module__", None)
    qualified_name = getattr(function, "__qualname__", None)
    if type(module_name) is not str or type(qualified_name) is not str or "<" in qualified_name:
        return None
    module = sys.modules.get(module_name)
    if module is None or is_by_value(module_name):
        return None
    found: Any = module
    try:
        for name in qualified_name.split("."):
            found = getattr(found, name)
    except AttributeError:
        return None
    # A decorated function may carry the name of the one it wraps: only identity counts.
    if found is not function:
        return None
    text = f"{module_name}:{qualified_name}"
    if "." not in qualified_name:
        if len(_references) >= _MOST_REFERENCES:
            _references.clear()
        _references[id(function)] = (
            function, module.__dict__, qualified_name, text, len(sys.modules), registered_modules(),
        )  # fmt: skip
    return text


def resolve_reference(text: str) -> Any:
    """Find what `function_reference` named, importing its module if need be.

    Parameters
    ----------
    text : str
        ``"module:qualname"``.

    Returns
    -------
    object
        The function or class.
    """
    module_name, _, qualified_name = text.partition(":")
    found: Any = sys.modules.get(module_name)
    if found is None:
        __import__(module_name)
        found = sys.modules[module_name]
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found


def is_by_value(module_name: object) -> bool:
    """Say whether what a module defines has to travel by value.

    Parameters
    ----------
    module_name : str
        As in ``__module__``, which may be anything; then the answer is False.

    Returns
    -------
    bool
        True for the main module, one made by hand, one found outside ``sys.path``, or one that the user
        registered with cloudpickle.
    """
    if type(module_name) is not str:
        return False
    if module_name in dynamic_modules():
        return True
    registered = registered_modules()
    return bool(registered) and any(
        module_name == name or module_name.startswith(name + ".") for name in registered
    )


def registered_modules() -> set[str]:
    """Name the modules that the user told cloudpickle to send by value."""
    # If nobody imported cloudpickle, nobody registered anything; importing it here would cost 30 ms.
    # While another thread imports it, it is there without its functions, and nobody has registered either.
    cloudpickle = sys.modules.get("cloudpickle.cloudpickle")
    listing = getattr(cloudpickle, "list_registry_pickle_by_value", None)
    registered: set[str] = listing() if listing is not None else set()
    return registered


def dynamic_modules() -> frozenset[str]:
    """Name the loaded modules that another process cannot import."""
    return _dynamic_modules(len(sys.modules))


def by_value_marks() -> tuple[bytes, ...]:
    """List the byte strings one of which every pickle naming a by-value module contains.

    Returns
    -------
    tuple of bytes
        A pickle may contain one of them by accident, but none is missing when it names such a module.
    """
    marks = _dynamic_marks(len(sys.modules))
    registered = registered_modules()
    if registered:
        # The names of submodules begin with a registered name, so that no length can be demanded here.
        marks += tuple(name.encode() for name in registered)
    return marks


@functools.lru_cache(maxsize=1)
def _dynamic_marks(module_count: int) -> tuple[bytes, ...]:
    marks = []
    for name in sorted(_dynamic_modules(module_count)):
        text = name.encode()
        # The pickler writes a module's name as SHORT_BINUNICODE, length, text when it meets it first.
        marks.append(b"\x8c" + bytes([len(text)]) + text if len(text) < 256 else text)
    return tuple(marks)


@functools.lru_cache(maxsize=1)
def _dynamic_modules(module_count: int) -> frozenset[str]:
    # The count of loaded modules is the key of the cache: looking at all of them takes a millisecond, and
    # what a name means hardly changes without a module being added.
    modules = dict(sys.modules)
    directories = {os.path.abspath(entry) for entry in sys.path}
    judged: dict[str, bool] = {}
    found = set(_MAIN_NAMES)
    for name, module in modules.items():
        if type(name) is not str or not isinstance(module, types.ModuleType):
            continue
        top = name.partition(".")[0]
        if top not in judged:
            judged[top] = _is_dynamic_top(top, modules.get(top), directories)
        if judged[top] or (
            top != name and top not in sys.stdlib_module_names and _is_made_by_hand(module)
        ):
            found.add(name)
    return frozenset(found)


def _is_made_by_hand(module: types.ModuleType) -> bool:
    contents = module.__dict__
    return (
        contents.get("__spec__") is None
        and contents.get("__file__") is None
        and contents.get("__path__") is None
    )


def _is_dynamic_top(name: str, module: object, directories: set[str]) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return False
    if name == "cython_runtime" or name.startswith("_cython_"):
        return False  # compiled code makes these itself, in every process
    if not isinstance(module, types.ModuleType):
        # Its package is not loaded under this name, so nothing is known; others may import it.
        return False
    spec = module.__dict__.get("__spec__")
    file = module.__dict__.get("__file__")
    if spec is None and file is None:
        return True
    if type(module.__dict__.get("__loader__")) is importlib.machinery.ExtensionFileLoader:
        return False  # compiled functions cannot travel by value
    if file is not None:
        directory, base = os.path.split(file)
        if base.startswith("__init__."):
            directory, base = os.path.split(directory)
        if base.partition(".")[0] == name and directory in directories:
            return False
    return not _finders_agree(name, module)


def _finders_agree(name: str, module: types.ModuleType) -> bool:
    """Ask the finders of this process, since other processes get the same `sys.path`."""
    own = module.__dict__.get("__spec__")
    own_origin = getattr(own, "origin", None) or module.__dict__.get("__file__")
    if own_origin in ("built-in", "frozen"):
        return True
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        try:
            spec = find_spec(name, None)
        except Exception:  # a foreign finder may fail in any way; another one may know the name
            continue
        if spec is None:
            continue
        if spec.origin is not None and own_origin is not None:
            return bool(os.path.realpath(spec.origin) == os.path.realpath(own_origin))
        own_places = set(module.__dict__.get("__path__") or ())
        return bool(own_places & set(spec.submodule_search_locations or ()))
    return False
