"""Which function takes which type apart, looked up only once the type's module is loaded.

Must never import the modules whose types it names: a program without numpy or CuPy pays nothing for them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

Reducer = Callable[[Any], Any]


class Registry:
    """A table from type to reducer that fills as modules appear.

    Attributes
    ----------
    table : dict
        Exact type to reducer, for the types whose modules are loaded.
    copied : dict
        Exact type of a buffer's exporter to the reason why its bytes are copied once more than others.
    """

    def __init__(self) -> None:
        self.table: dict[type, Reducer] = {}
        self.copied: dict[type, str] = {}
        self._pending: dict[str, list[tuple[str, Reducer]]] = {}
        self._lock = threading.Lock()

    def register(self, type_name: str, reducer: Reducer) -> None:
        """Note a reducer for a type that may not be loaded.

        Parameters
        ----------
        type_name : str
            ``"module.qualname"``; the module's name is all before the last dot.
        reducer : callable
            Takes an instance, and returns what ``__reduce_ex__(5)`` may return. It may put
            `pickle.PickleBuffer` objects into it, which leave the stream.
        """
        module_name, _, name = type_name.rpartition(".")
        with self._lock:
            self._pending.setdefault(module_name, []).append((name, reducer))

    def current(self) -> dict[type, Reducer]:
        """Return the table, after adding what became available.

        Returns
        -------
        dict
            The table itself, not to be changed.
        """
        for module_name in self._pending:
            if module_name in sys.modules:
                self._load()
                break
        return self.table

    def _load(self) -> None:
        with self._lock:
            # Replaced, never changed in place: encodes in other threads iterate over the old ones.
            table = dict(self.table)
            pending = {}
            for module_name, entries in self._pending.items():
                module = sys.modules.get(module_name)
                rest = []
                for name, reducer in entries:
                    found = getattr(module, name, None)
                    if isinstance(found, type):
                        table[found] = reducer
                    else:
                        # The module may be half imported just now.
                        rest.append((name, reducer))
                if rest:
                    pending[module_name] = rest
            self.table = table
            self._pending = pending
