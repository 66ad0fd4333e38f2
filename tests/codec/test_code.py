"""Functions and classes: by reference where another process can import them, by value where it cannot."""

from __future__ import annotations

import collections
import functools
import math
import os
import posixpath
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onehop._codec import decode, encode, function_reference, resolve_reference
from onehop._codec.functions import dynamic_modules, is_by_value

WORKER = """
import pickle, sys
from onehop._codec import decode, encode
source, sink = sys.stdin.buffer, sys.stdout.buffer
sys.stdout = sys.stderr
while True:
    try:
        stream, buffers = pickle.load(source)
    except EOFError:
        break
    function, args = decode(stream, [memoryview(b) for b in buffers])
    try:
        reply = encode((True, function(*args)))
    except BaseException as error:
        reply = encode((False, repr(error)))
    pickle.dump((reply.stream, [bytearray(b) for b in reply.buffers]), sink)
    sink.flush()
    del function, args, reply
"""

DIRECTOR = """
import pickle, subprocess, sys
from onehop._codec import decode, encode
worker = subprocess.Popen([sys.executable, "worker.py"], stdin=-1, stdout=-1)
def call(function, *args):
    sent = encode((function, args))
    pickle.dump((sent.stream, [bytearray(b) for b in sent.buffers]), worker.stdin)
    worker.stdin.flush()
    stream, buffers = pickle.load(worker.stdout)
    good, value = decode(stream, [memoryview(b) for b in buffers])
    if not good:
        raise RuntimeError(value)
    return value
"""


def run_director(text: str, folder: Path) -> list[str]:
    """Run a script as `__main__`, with a worker in another process; its printed lines."""
    (folder / "worker.py").write_text(WORKER)
    script = folder / "script.py"
    script.write_text(
        DIRECTOR
        + textwrap.dedent(text)
        + "\nworker.stdin.close()\nworker.wait(20)\nworker.stdout.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_instances_of_main_come_back_as_themselves(tmp_path: Path) -> None:
    text = """
    import dataclasses, enum, abc, typing, collections, functools
    class Colour(enum.Enum):
        RED = 1
        BLUE = (1, 2)
    class Level(enum.IntFlag):
        LOW = 1
        HIGH = 2
    @dataclasses.dataclass(frozen=True)
    class Point:
        x: float
        colour: Colour = Colour.RED
        tags: list = dataclasses.field(default_factory=list)
        def moved(self, by):
            return dataclasses.replace(self, x=self.x + by * scale)
    @dataclasses.dataclass(slots=True)
    class Slotted:
        a: int
    class Base(abc.ABC):
        @abc.abstractmethod
        def run(self): ...
    class Child(Base):
        count = 0
        __slots__ = ("x",)
        def __init__(self): self.x = 1
        def run(self): return type(self).count
        @classmethod
        def make(cls): return cls()
        @property
        def twice(self): return 2 * self.x
    class Meta(type):
        made = 0
        def __new__(m, *a):
            m.made += 1
            return super().__new__(m, *a)
    class WithMeta(metaclass=Meta): pass
    T = typing.TypeVar("T")
    class Box(typing.Generic[T]):
        def __init__(self, v): self.v = v
    Pair = collections.namedtuple("Pair", "a b")
    class Typed(typing.NamedTuple):
        q: int = 3
    class Shape(typing.TypedDict):
        w: int
    class Runs(typing.Protocol):
        def run(self) -> int: ...
    @dataclasses.dataclass(slots=True, frozen=True)
    class SlottedBox(typing.Generic[T]):
        v: T
    class Private:
        __slots__ = ("__x", "y", "__weakref__")
        def __init__(self): self.__x = 3
        def x(self): return self.__x
    class Weird(dict, collections.abc.Hashable):
        def __hash__(self): return 1
        def __missing__(self, k): return super().get(k, k)
    class Odd(Exception): pass
    class Registered:
        seen = []
        def __init_subclass__(cls, **k): Registered.seen.append(cls.__name__)
    class Sub(Registered): pass
    class Node:
        def __init__(self): self.me, self.kind = self, type(self)
    scale = 10
    def echo(x): return x
    p = Point(1.0)
    assert type(call(echo, p)) is Point
    assert call(p.moved, 2).x == 21.0
    assert call(lambda: Colour.BLUE) is Colour.BLUE and call(echo, Level.LOW | Level.HIGH) == Level(3)
    assert type(call(echo, Level.LOW | Level.HIGH)) is Level
    assert call(echo, Point(2.0, Colour.BLUE)).colour is Colour.BLUE
    assert type(call(echo, Slotted(3))) is Slotted
    made = call(Child.make)
    assert type(made) is Child and isinstance(made, Base) and made.twice == 2
    made_before = Meta.made
    assert type(call(WithMeta)) is WithMeta and Meta.made == made_before, Meta.made
    assert type(call(Box, 4)) is Box and type(call(echo, Box[int](4))) is Box
    assert type(call(echo, Pair(1, 2))) is Pair and type(call(Typed)) is Typed
    assert type(call(echo, Odd("x"))) is Odd
    assert call(lambda: Shape(w=1)) == {"w": 1}
    assert type(call(echo, SlottedBox(4))) is SlottedBox and call(SlottedBox, 5).v == 5
    there = call(lambda: [hasattr(x, "__dict__") for x in (Slotted(1), SlottedBox(1), Private(), Child())])
    assert there == [False, False, False, True], there
    assert call(Private).x() == 3 and type(call(echo, Private())) is Private
    assert call(Weird)["k"] == "k" and type(call(lambda w: w, Weird(a=1))) is Weird
    assert call(lambda c: isinstance(c, Runs.__mro__[0].__class__), Runs) is True
    assert type(call(Sub)) is Sub and Registered.seen == ["Sub"], Registered.seen
    back = call(echo, Node())
    assert back.me is back and back.kind is Node
    classes = [Colour, Level, Point, Slotted, Base, Child, WithMeta, Meta, Box, Pair, Typed, Odd, Sub]
    classes += [Shape, Runs, SlottedBox, Private, Weird]
    assert all(a is b for a, b in zip(call(echo, classes), classes))
    assert call(lambda c, p: isinstance(p, c) and c is type(p), Point, p)

    # what comes back changes nothing of what is here
    Child.count = 7
    method = Child.__dict__["run"]
    assert call(Child).run() == 7 and Child.__dict__["run"] is method
    def change(): Child.count = 99; return Child()
    assert call(change).run() == 7
    Child.count = 8                      # but what changes here is seen there
    assert call(lambda: Child().run()) == 8
    assert method.__globals__ is globals()
    scale = 100
    assert call(p.moved, 1).x == 101.0 and p.moved(1).x == 101.0
    assert call(functools.partial(p.moved, by=1)).x == 101.0
    print("right")
    """
    assert run_director(text, tmp_path) == ["right"]


def test_local_classes_and_redefined_ones(tmp_path: Path) -> None:
    text = """
    import dataclasses, enum
    def make():
        @dataclasses.dataclass
        class Local:
            value: int
        class Mode(enum.IntEnum):
            A = 1
        return Local, Mode
    Local, Mode = make()
    back = call(lambda v: Local(v.value + 1), Local(1))
    assert type(back) is Local and back.value == 2 and call(lambda m: m, Mode.A) is Mode.A
    class Thing: version = 1
    first = call(lambda: Thing())
    class Thing: version = 2
    second = call(lambda: Thing())
    print(first.version, second.version, type(second) is Thing, type(first) is Thing)
    space = {"__name__": "cell"}
    exec("def double(x): return 2 * x\\nclass Thing: pass", space)
    print(call(space["double"], 21), type(call(space["Thing"])) is space["Thing"])
    """
    assert run_director(text, tmp_path) == ["1 2 True False", "42 True"]


def test_modules_made_by_hand_and_registered_ones(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "hidden.py").write_text(
        "factor = 3\nclass Kind:\n    pass\ndef f(x):\n    return factor * x\n"
    )
    text = """
    import importlib.util, sys, types
    made = types.ModuleType("made_by_hand")
    sys.modules["made_by_hand"] = made
    exec("class Kind: pass\\ndef f(x): return x + 1\\nf.more = 1", made.__dict__)
    assert call(made.f, 1) == 2 and type(call(made.Kind)) is made.Kind
    assert call(lambda: made.f(1)) == 2          # the module itself, as a global
    assert type(call(lambda k: k, made.Kind())) is made.Kind
    spec = importlib.util.spec_from_file_location("hidden", "away/hidden.py")
    hidden = importlib.util.module_from_spec(spec)
    sys.modules["hidden"] = hidden
    spec.loader.exec_module(hidden)
    assert call(hidden.f, 2) == 6 and type(call(hidden.Kind)) is hidden.Kind
    import cloudpickle, colorsys
    def name(f): return f.__code__.co_name, f.__module__ in sys.modules
    assert call(name, colorsys.rgb_to_hsv) == ("rgb_to_hsv", True)
    cloudpickle.register_pickle_by_value(colorsys)
    sent = encode(colorsys.rgb_to_hsv)
    assert b"rgb_to_hsv" in sent.stream and len(sent.stream) > 300
    cloudpickle.unregister_pickle_by_value(colorsys)
    assert len(encode(colorsys.rgb_to_hsv).stream) < 100
    print("right")
    """
    assert run_director(text, tmp_path) == ["right"]


def test_what_pickle_only_names(tmp_path: Path) -> None:
    text = """
    import functools, typing
    @functools.lru_cache(maxsize=5)
    def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
    fib.note = "kept"
    UserId = typing.NewType("UserId", int)
    P = typing.ParamSpec("P")
    T = typing.TypeVar("T")
    Ts = typing.TypeVarTuple("Ts")
    def typed(x: UserId, f: typing.Callable[P, T] = None, *rest: typing.Unpack[Ts]) -> T: return x + 1
    class Memo:
        @functools.cached_property
        def once(self): return 5
        @functools.cache
        def many(self, k): return 2 * k
    assert call(fib, 20) == 6765 and call(lambda: (fib(10), fib.note, fib.cache_parameters()["maxsize"])) == (55, "kept", 5)
    assert call(typed, 1) == 2 and call(lambda: typed.__annotations__["x"](3)) == 3
    assert call(lambda: (Memo().once, Memo().many(4))) == (5, 8)
    import re
    assert call(lambda f: f is re._compile_template if hasattr(re, "_compile_template") else True, getattr(re, "_compile_template", None))
    print("right")
    """
    assert run_director(text, tmp_path) == ["right"]


def test_captured_arrays_leave_the_stream_and_come_from_one_buffer(tmp_path: Path) -> None:
    text = """
    import numpy as np
    data = np.ones(10**6)
    view = data[::-1]
    def total(): return float(data.sum() + view[0]), view.strides
    sent = encode(total)
    assert len(sent.stream) < 3000 and [b.nbytes for b in sent.buffers] == [8 * 10**6] * 2
    assert sent.buffers[0].obj is data
    print(call(total))
    """
    assert run_director(text, tmp_path) == ["(1000001.0, (-8,))"]


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
