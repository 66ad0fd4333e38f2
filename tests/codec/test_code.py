"""Functions and classes: by reference where another process can import them, by value where it cannot."""

from __future__ import annotations

import collections
import functools
import math
import os
import posixpath
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from onehop._codec import decode, encode, function_reference, resolve_reference
from onehop._codec.functions import dynamic_modules, is_by_value


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (math.sqrt, "math:sqrt"),
        (len, "builtins:len"),
        (os.path.join, f"{posixpath.__name__}:join"),
        (collections.OrderedDict.fromkeys, None),
        (collections.Counter, "collections:Counter"),
        (textwrap.TextWrapper.fill, "textwrap:TextWrapper.fill"),
        (np.linalg.norm, "numpy.linalg:norm"),
        (encode, "onehop._codec.pickling:encode"),
        (lambda x: x, None),
        (functools.partial(len), None),
        ([].append, None),
        (3, None),
        (None, None),
    ],
    ids=str,
)
def test_references(function: Any, text: str | None) -> None:
    assert function_reference(function) == text
    if text is not None:
        assert resolve_reference(text) is function


def test_a_reference_never_names_somebody_else() -> None:
    @functools.wraps(math.factorial)
    def slower(x: int) -> int:
        return math.factorial(x)

    assert slower.__module__ == "math"
    assert function_reference(slower) is None
    assert decode(encode(slower).stream, [])(3) == 6


def test_a_missing_module_raises_the_original_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        resolve_reference("no_such_module:f")
    encoded = encode(math.sqrt)
    with pytest.raises(ModuleNotFoundError, match="mmth"):
        decode(encoded.stream.replace(b"math", b"mmth"), [])


def test_what_is_installed_or_on_the_path_is_importable() -> None:
    importable = {"onehop", "numpy", "pytest", "cloudpickle", "pandas", "scipy", "os", "json"}
    assert not importable & dynamic_modules()
    assert not any(name.startswith(("numpy.", "scipy.", "pandas.")) for name in dynamic_modules())
    assert is_by_value("__main__")
    assert is_by_value("__mp_main__")


def test_a_module_that_appears_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_by_value("onehop_test_made")
    monkeypatch.setitem(sys.modules, "onehop_test_made", types.ModuleType("onehop_test_made"))
    assert is_by_value("onehop_test_made")


def add(a: int, b: int) -> int:
    return a + b


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value

    @staticmethod
    def fixed() -> int:
        return 4

    @classmethod
    def name(cls) -> str:
        return cls.__name__


def _recursive() -> Callable[[int], int]:
    def down(n: int) -> int:
        return n if n <= 0 else down(n - 1)

    return down


CALLABLES: dict[str, tuple[Callable[..., Any], Any]] = {
    "partial": (functools.partial(add, 1, 2), 3),
    "partial of a lambda": (functools.partial(lambda a, b: a * b, 3, b=4), 12),
    "bound": (Holder(5).get, 5),
    "static": (Holder.fixed, 4),
    "class method": (Holder.name, "Holder"),
    "bound builtin": ([3].pop, 3),
    "bound of a mapping": ({}.keys, {}.keys()),
    "recursive": (functools.partial(_recursive(), 3), 0),
    "cached": (functools.lru_cache(lambda: 7), 7),
    "array method": (np.ones(3).sum, 3.0),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_callables(name: str) -> None:
    function, result = CALLABLES[name]
    encoded = encode(function)
    assert decode(encoded.stream, encoded.buffers)() == result


def test_functions_that_share_globals_or_cells_still_do() -> None:
    count = [0]

    def up() -> None:
        count[0] += 1

    def read() -> int:
        return count[0]

    encoded = encode((up, read))
    up_there, read_there = decode(encoded.stream, encoded.buffers)
    up_there()
    assert read_there() == 1
    assert read() == 0


@pytest.mark.parametrize("name", ["cloudpickle.cloudpickle", "numpy"])
def test_a_module_that_another_thread_is_importing_is_left_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What `sys.modules` shows meanwhile: the module, without what it will define.
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    encoded = encode({"a": [1, 2.5]})
    assert decode(encoded.stream, encoded.buffers) == {"a": [1, 2.5]}
    assert not is_by_value(textwrap.dedent)
