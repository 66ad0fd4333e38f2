"""Functions and classes that other processes cannot import: sent by value, through cloudpickle.

Must never be imported before it is needed: cloudpickle takes 30 ms to load. The only file that knows it.
"""

from __future__ import annotations

import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle

from onehop._codec.functions import is_by_value


class _MadeClasses:
    """The classes of this process that were made from a stream; all others were defined here.

    cloudpickle keeps classes apart by an id, for the whole process, so this book is kept for the process too.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakSet[type] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, made: type) -> None:
        with self._lock:
            self._made.add(made)

    def __contains__(self, candidate: type) -> bool:
        with self._lock:
            return candidate in self._made


_made_classes = _MadeClasses()


def make_class(maker: Callable[..., type], *args: Any) -> type:
    """Find a class by its id, or make it; called by the unpickler only."""
    # cloudpickle makes a class before it looks for an equal one, and throws it away: that would run the
    # `__init_subclass__` of the bases once more for every instance that comes back.
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
    if known is not None:
        return known  # type: ignore[no-any-return]
    made = maker(*args)
    _made_classes.add(made)
    return made


def fill_class(made: type, state: Any) -> None:
    """Give a class its attributes, unless it was defined in this process; called by the unpickler only.

    A class that comes back to where it was defined keeps what it has there: its methods share the globals of
    their module, and its attributes may have changed since.
    """
    if made in _made_classes:
        cloudpickle._class_setstate(made, state)


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, with our table of reducers and our idea of what cannot be imported.

    Parameters
    ----------
    file : object
        Has ``write``.
    table : dict
        Exact type to reducer.
    buffer_callback : callable
        Gets each `pickle.PickleBuffer`.
    """

    def __init__(
        self,
        file: Any,
        table: dict[type, Any],
        buffer_callback: Callable[[pickle.PickleBuffer], bool],
    ) -> None:
        merged: dict[type, Any] = {}
        for part in reversed(cloudpickle.Pickler.dispatch_table.maps):
            merged.update(part)
        merged[types.ModuleType] = _reduce_module
        merged.update(table)
        # Before the C constructor runs, which looks the table up once.
        self.dispatch_table = merged
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        """Take functions and classes apart; called by the C pickler for most objects."""
        kind = type(obj)
        if kind is types.FunctionType:
            reduced = self._function_reduce(obj)
            if reduced is NotImplemented and is_by_value(obj.__module__):
                return self._dynamic_function_reduce(obj)
            return reduced
        if not issubclass(kind, type):
            return NotImplemented
        reduced = cloudpickle._class_reduce(obj)
        if reduced is NotImplemented and is_by_value(obj.__module__):
            reduced = cloudpickle._dynamic_class_reduce(obj)
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        maker, args, state = reduced[:3]
        return make_class, (maker, *args), state, None, None, fill_class


def _reduce_module(module: types.ModuleType) -> Any:
    name = module.__name__
    if name not in ("__main__", "__mp_main__") and is_by_value(name):
        contents = {k: v for k, v in module.__dict__.items() if k != "__builtins__"}
        return cloudpickle.dynamic_subimport, (name, contents)
    return cloudpickle._module_reduce(module)
