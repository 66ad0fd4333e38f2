"""F10: no main guard, notebooks, lambdas, local classes, and classes of `__main__` whose instances come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import run_script

NO_GUARD = """
import dataclasses, enum
import onehop

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass
class Point:
    x: float
    colour: Colour = Colour.RED

    def moved(self, by):
        return Point(self.x + by, Colour.BLUE)

class Odd(Exception):
    pass

scale = 3

def scaled(point):
    return Point(point.x * scale, point.colour)

def fail():
    raise Odd("from afar")

cluster = onehop.Cluster(2)
assert list(cluster.map(lambda k: k * k, range(5))) == [0, 1, 4, 9, 16]

point = cluster[2].call(scaled, Point(2.0))
assert isinstance(point, Point) and type(point) is Point, type(point)
assert point == Point(6.0)
assert point.colour is Colour.RED
assert cluster[2].call(point.moved, 1.0).colour is Colour.BLUE
assert cluster[2].call(lambda p: isinstance(p, Point), point)
assert cluster[2].call(lambda c: c is Colour.RED, Colour.RED)
scale = 5
assert cluster[2].call(scaled, Point(2.0)).x == 10.0, "a global that was rebound"

seen = cluster[3].call(lambda: [Point(1.0), Colour.BLUE, Point])
assert type(seen[0]) is Point and seen[1] is Colour.BLUE and seen[2] is Point
try:
    cluster[2].call(fail)
except Odd as error:
    assert isinstance(error, onehop.RemoteError) and "from afar" in str(error)
else:
    raise AssertionError("no error")

def make():
    @dataclasses.dataclass
    class Local:
        value: int
    class Mode(enum.IntEnum):
        A = 1
    return Local, Mode

Local, Mode = make()
back = cluster[2].call(lambda v: Local(v.value + 1), Local(1))
assert type(back) is Local and back.value == 2
assert cluster[2].call(lambda m: m, Mode.A) is Mode.A
# nested: what a worker sends to a worker
assert cluster[2].call(lambda: type(onehop.current()[3].call(lambda: Point(4.0))) is Point)
print("all=right")
"""


@pytest.mark.parametrize("by_stdin", [False, True], ids=["file", "stdin"])
def test_a_script_without_a_main_guard(tmp_path: Path, by_stdin: bool) -> None:
    finished = run_script(NO_GUARD, tmp_path, by_stdin=by_stdin)
    assert finished.lines == ["all=right"], "the script ran more than once"


def test_notebook_like_cells(tmp_path: Path) -> None:
    text = f"""
    import types, sys
    cells = {NO_GUARD.split("cluster = onehop.Cluster(2)")!r}
    main = sys.modules["__main__"]
    space = main.__dict__
    exec(compile(cells[0], "<ipython-input-1>", "exec"), space)
    exec(compile("cluster = onehop.Cluster(2)" + cells[1], "<ipython-input-2>", "exec"), space)
    """
    assert run_script(text, tmp_path).lines == ["all=right"]


def test_a_namespace_that_is_no_module(tmp_path: Path) -> None:
    text = """
    cell = [
        "import onehop",
        "def double(x): return 2 * x",
        "class Thing: pass",
        "cluster = onehop.Cluster(1)",
        "print(cluster[2].call(double, 21), type(cluster[2].call(Thing)).__name__)",
    ]
    exec(chr(10).join(cell), {"__name__": "cell"})
    """
    assert run_script(text, tmp_path).lines == ["42 Thing"]


def test_a_class_defined_again_between_cells(tmp_path: Path) -> None:
    text = """
    import onehop
    cluster = onehop.Cluster(1)
    class Thing:
        version = 1
    first = cluster[2].call(lambda: Thing())
    class Thing:
        version = 2
    second = cluster[2].call(lambda: Thing())
    print(first.version, second.version, type(second) is Thing, type(first) is Thing)
    """
    assert run_script(text, tmp_path).lines == ["1 2 True False"]


def test_a_module_beside_the_script_and_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    text = """
    import os, sys
    import beside
    import onehop
    os.environ["COLOUR"] = "blue"
    cluster = onehop.Cluster(1)
    print(cluster[2].call(beside.triple, 14))
    print(cluster[2].call(os.getcwd) == os.getcwd(), cluster[2].call(os.getenv, "COLOUR"))
    """
    assert run_script(text, tmp_path).lines == ["42", "True blue"]


def test_a_folder_added_to_the_path_after_the_start(tmp_path: Path) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "later.py").write_text("def half(x):\n    return x / 2\n")
    text = """
    import os, sys
    import onehop
    cluster = onehop.Cluster(1)
    cluster[2].call(int)
    sys.path.insert(0, os.path.abspath("added"))
    import later
    print(cluster[2].call(later.half, 84))
    """
    assert run_script(text, tmp_path).lines == ["42.0"]


def test_functions_local_to_a_test(cluster: Any) -> None:
    bound = 17

    class Adder:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, x: int) -> int:
            return x + self.by + bound

    assert list(cluster.map(Adder(5), [1, 2])) == [23, 24]
    bound = 0
    assert cluster[2].call(Adder(5), 1) == 6
    back = cluster[2].call(lambda: Adder(1))
    assert type(back) is Adder


def test_interactive_modules_stay_what_they_are(cluster: Any) -> None:
    assert cluster[2].call(lambda: __name__) == __name__
