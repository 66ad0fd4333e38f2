"""Functions and classes that other processes cannot import: sent by value, through cloudpickle.

Must never be imported before it is needed: cloudpickle takes 30 ms to load. The only file that knows it.
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle

from onehop._codec.functions import is_by_value


class _ClassBook:
    """Which classes were defined in this process and left it, and which came from a stream.

    cloudpickle keeps classes apart by an id, for the whole process, so this book is kept for the process too.
    """

    def __init__(self) -> None:
        self._defined_here: weakref.WeakSet[type] = weakref.WeakSet()
        self._arrived: weakref.WeakSet[type] = weakref.WeakSet()
        self._lock = threading.Lock()

    def leaves(self, cls: type) -> None:
        with self._lock:
            if cls not in self._arrived:
                self._defined_here.add(cls)

    def arrives(self, cls: type) -> bool:
        """Note a class from a stream; False if it was defined here."""
        with self._lock:
            if cls in self._defined_here:
                return False
            self._arrived.add(cls)
            return True


_book = _ClassBook()


def make_class(maker: Callable[..., type], *args: Any) -> type:
    """Find a class by its id, or make it; called by the unpickler only."""
    # cloudpickle makes a class before it looks for an equal one, and throws it away: that would run the
    # `__init_subclass__` of the bases once more for every instance that comes back.
    known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
    if known is not None:
        return known  # type: ignore[no-any-return]
    try:
        return maker(*args)
    except TypeError as error:
        made = _make_class_quietly(maker, args)
        if made is None:
            raise error from None
        return made


def _make_class_quietly(maker: Callable[..., type], args: Any) -> type | None:
    """Make a class whose bases want keywords in `__init_subclass__`, which nobody has kept.

    What the keywords did to the class is in its state already.
    """
    bases = args[2]
    if maker is not cloudpickle._make_skeleton_class or not isinstance(bases, tuple):
        return None
    for silencer in (_Silencer, _SilencerWithoutDict):
        # Bases can be exchanged only for some of the same layout.
        try:
            made: type = maker(*args[:2], (silencer, *bases), *args[3:])
            made.__bases__ = types.resolve_bases(bases)
        except TypeError:
            continue
        return made
    return None


class _Silencer:
    def __init_subclass__(cls, **keywords: Any) -> None:
        pass


class _SilencerWithoutDict:
    __slots__ = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        pass


def fill_class(cls: type, state: Any) -> None:
    """Give a class its attributes, unless it was defined in this process; called by the unpickler only.

    A class that comes back to where it was defined keeps what it has there: its methods share the globals of
    their module, and its attributes may have changed since. Another thread may be filling the same new class
    just now; both do it then, since neither may go on with a class that is empty.
    """
    if _book.arrives(cls):
        cloudpickle._class_setstate(cls, state[:2])
        if len(state) > 2:
            members: Any = cls.__dict__["_member_map_"]
            for name, attributes in state[2].items():
                members[name].__dict__.update(attributes)


def make_dispatcher(base: Callable[..., Any]) -> Any:
    """Rebuild what `functools.singledispatch` made; called by the unpickler only."""
    return functools.singledispatch(base)


def fill_dispatcher(dispatcher: Any, registry: list[tuple[type, Any]]) -> None:
    """Register the functions of a dispatcher; called by the unpickler only."""
    for cls, function in registry:
        if cls is not object:
            dispatcher.register(cls, function)


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
        merged.update(_REDUCERS)
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
                reduced = self._dynamic_function_reduce(obj)
            if reduced is not NotImplemented and "_clear_cache" in obj.__dict__:
                # A dispatcher caches by weak references, which cannot travel.
                registry = getattr(obj, "registry", None)
                if type(registry) is types.MappingProxyType and object in registry:
                    found = list(registry.items())
                    return make_dispatcher, (registry[object],), found, None, None, fill_dispatcher
            return reduced
        if not issubclass(kind, type):
            return NotImplemented
        reduced = cloudpickle._class_reduce(obj)
        if reduced is NotImplemented and is_by_value(obj.__module__):
            reduced = cloudpickle._dynamic_class_reduce(obj)
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        _book.leaves(obj)
        maker, args, state = reduced[:3]
        slots = obj.__dict__.get("__slots__")
        made_by_typing = typing.NamedTuple in obj.__dict__.get("__orig_bases__", ())
        if (
            slots is not None
            and maker is cloudpickle._make_skeleton_class
            and not made_by_typing  # which refuses slots, and sets its own
        ):
            # cloudpickle sets this once the class is made, which is too late: instances would get a
            # `__dict__`, and could not come back to where they have none.
            args = (*args[:3], {**args[3], "__slots__": slots}, *args[4:])
            state[0].pop("__slots__", None)
        if maker is cloudpickle._make_skeleton_enum:
            # cloudpickle forgets second names of members, and what an `__init__` or `__new__` of the enum
            # gave to them.
            members = {name: member.value for name, member in obj.__members__.items()}
            args = (*args[:3], members, *args[4:])
            plain = {name: value for name, value in state[0].items() if name not in members}
            state = (plain, state[1], {name: _own(obj[name]) for name in members})
        return make_class, (maker, *args), state, None, None, fill_class


def _own(member: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(member).items() if k not in _MEMBER_NAMES}


_MEMBER_NAMES = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})


def _reduce_module(module: types.ModuleType) -> Any:
    name = module.__name__
    if name not in ("__main__", "__mp_main__") and is_by_value(name):
        contents = {k: v for k, v in module.__dict__.items() if k != "__builtins__"}
        return cloudpickle.dynamic_subimport, (name, contents)
    return cloudpickle._module_reduce(module)


def _reduce_named(obj: Any, by_value: Callable[[], Any]) -> Any:
    """Take something apart that pickle would only name, if the name means nothing elsewhere."""
    name = getattr(obj, "__qualname__", None) or obj.__name__
    module_name = obj.__module__
    if not is_by_value(module_name):
        found: Any = sys.modules.get(module_name)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is obj:
            return name
    return by_value()


def _reduce_cached(function: Any) -> Any:
    def by_value() -> Any:
        attributes = {k: v for k, v in function.__dict__.items() if k != "__wrapped__"}
        parameters = function.cache_parameters()
        return make_cached, (function.__wrapped__, parameters), attributes

    return _reduce_named(function, by_value)


def make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Rebuild what `functools.lru_cache` made, with an empty cache; called by the unpickler only."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(prop: functools.cached_property[Any]) -> Any:
    # Before Python 3.12 it holds a lock.
    state = {name: value for name, value in prop.__dict__.items() if name not in ("func", "lock")}
    return functools.cached_property, (prop.func,), state


def _reduce_new_type(new_type: Any) -> Any:
    def by_value() -> Any:
        names = {"__module__": new_type.__module__, "__qualname__": new_type.__qualname__}
        return typing.NewType, (new_type.__name__, new_type.__supertype__), names

    return _reduce_named(new_type, by_value)


def _reduce_parameter(parameter: Any) -> Any:
    return _reduce_named(parameter, lambda: (type(parameter), (parameter.__name__,)))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: _reduce_module,
    functools._lru_cache_wrapper: _reduce_cached,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_parameter,
    typing.TypeVarTuple: _reduce_parameter,
}
