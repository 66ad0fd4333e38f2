"""F10 without a cluster: what a script defines works in another process and is known when it comes back."""

from __future__ import annotations

from pathlib import Path

from tests.codec.two_processes import run_director

DEFINITIONS = """
import enum, functools, dataclasses, contextlib, asyncio, typing, traceback
class Planet(enum.Enum):
    EARTH = (1, 2)
    MARS = (3, 4)
    HOME = (1, 2)
    def __init__(self, a, b): self.a = a; self.b = b
    @property
    def total(self): return self.a + self.b
class Coded(str, enum.Enum):
    X = ("x", 5)
    Y = ("y", 6)
    def __new__(cls, text, code):
        o = str.__new__(cls, text); o._value_ = text; o.code = code; return o
class Auto(enum.StrEnum):
    ONE = enum.auto()
class Fl(enum.Flag):
    A = enum.auto(); B = enum.auto(); AB = A | B
@enum.unique
class IntE(enum.IntEnum):
    P = 3
    def next(self): return IntE.P
    @classmethod
    def _missing_(cls, v): return cls.P
class Fun(enum.Enum):
    F = enum.member(len) if hasattr(enum, "member") else 1
@functools.singledispatch
def sd(x): return "any"
@sd.register
def _(x: int): return "int"
@sd.register(list)
def _(x): return "list"
class SM:
    @functools.singledispatchmethod
    def f(self, x): return "any"
    @f.register
    def _(self, x: int): return "int"
@contextlib.contextmanager
def cm(): yield 4
def use():
    with cm() as c: return c
async def co(): return 5
def gen():
    yield 1; yield 2
@dataclasses.dataclass
class DC:
    a: dataclasses.InitVar[int]
    _: dataclasses.KW_ONLY
    c: typing.ClassVar[int] = 3
    b: int = 2
    def __post_init__(self, a): self.z = a
class A:
    def f(self): return "A"
class B(A):
    def f(self): return super().f() + "B"
    class Inner:
        v = 1
    def inner(self): return self.Inner()
def outer():
    n = 0
    def inc():
        nonlocal n
        n += 1
        return n
    return inc
class Desc:
    def __set_name__(self, owner, name): self.name = name
    def __get__(self, o, t): return self.name
class WithDesc:
    d = Desc()
class Tagged:
    def __init_subclass__(cls, *, tag, **k): cls.tag = tag
class Sub(Tagged, tag="t"): pass
class Gen(typing.Generic[typing.TypeVar("Q")]): pass
class GetState:
    def __init__(self): self.x = 1
    def __getstate__(self): return {"x": 2}
    def __setstate__(self, s): self.__dict__.update(s)
def echo(x): return x
"""

CHECKS = {
    "planet attr": (
        "call(lambda: (Planet.EARTH.a, Planet.MARS.total, Planet.HOME is Planet.EARTH))",
        "(1, 7, True)",
    ),
    "planet is": ("call(echo, Planet.MARS) is Planet.MARS", "True"),
    "coded": ('call(lambda: (Coded.X.code, Coded.X == "x", Coded("y").code))', "(5, True, 6)"),
    "coded is": ("call(echo, Coded.X) is Coded.X", "True"),
    "auto": ("call(lambda: Auto.ONE) is Auto.ONE", "True"),
    "flag": (
        "(call(lambda: Fl.A | Fl.B) is Fl.AB, call(lambda: (Fl.AB.name, Fl.A in Fl.AB, list(Fl), Fl(3) is Fl.AB)))",
        "(True, ('AB', True, [Fl.A, Fl.B], True))",
    ),
    "intenum": ("(call(lambda: IntE(77) is IntE.P), call(IntE.P.next) is IntE.P)", "(True, True)"),
    "sd": ('call(lambda: (sd(1), sd([]), sd("x")))', "('int', 'list', 'any')"),
    "sd direct": ("call(sd, 1)", "'int'"),
    "sm": ('call(lambda: (SM().f(1), SM().f("x")))', "('int', 'any')"),
    "cm": ("call(use)", "4"),
    "co": ("call(lambda: asyncio.run(co()))", "5"),
    "gen": ("call(lambda: list(gen()))", "[1, 2]"),
    "dc": (
        "(call(lambda: DC(1, b=4).z), type(call(lambda: DC(1, b=4))) is DC, call(lambda: DC(1)) == DC(1))",
        "(1, True, True)",
    ),
    "super": (
        "(call(lambda: B().f()), type(call(lambda: B().inner())) is B.Inner)",
        "('AB', True)",
    ),
    "nonlocal": ("call(outer())", "1"),
    "desc": ("call(lambda: WithDesc.d)", "'d'"),
    "sub": ("(call(lambda: Sub.tag), type(call(Sub)) is Sub)", "('t', True)"),
    "getstate": ("call(GetState).x", "2"),
}


def test_definitions_work_there_as_here(tmp_path: Path) -> None:
    checks = "".join(
        f"check({name!r}, lambda: {expression}, {expected})\n"
        for name, (expression, expected) in CHECKS.items()
    )
    text = (
        DEFINITIONS
        + """
def check(name, expression, expected):
    try:
        value = expression()
    except Exception as error:
        value = error
    if value != expected:
        print(name, repr(value))
"""
        + checks
    )
    assert run_director(text, tmp_path) == []


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
