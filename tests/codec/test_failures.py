"""What cannot be taken apart, what does so while others do, and placeholders wherever they hide."""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onehop._codec import decode, encode, register_reducer
from onehop._codec.reducers import REGISTRY
from onehop.errors import SerializationError


class Handle:
    """Stands for a future or a cluster."""


class Refuses:
    def __reduce__(self) -> Any:
        raise OSError("the sensor is off")


class Has:
    def __init__(self, value: Any) -> None:
        self.value = value


SPECIAL = frozenset([Handle])


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("value", "error", "path", "kind"),
    [
        (Refuses(), OSError, "the value itself", "Refuses"),
        ({"a": [1, Refuses()]}, OSError, "value['a'][1]", "Refuses"),
        ([Has({3: (Refuses(),)})], OSError, "value[0].value[3][0]", "Refuses"),
        (threading.Lock(), TypeError, "the value itself", "lock"),
        ([np.ones(3), Has(threading.Lock())], TypeError, "value[1].value", "lock"),
        (_generator(), TypeError, "the value itself", "generator (a generator has no value"),
        ([lambda: 1, _generator()], TypeError, "value[1]", "generator (a generator has no value"),
        ((memoryview(b"123"),), SerializationError, "value[0]", "memoryview"),
        (sys._getframe(), TypeError, "the value itself", "frame"),
        (open, None, "", ""),
    ],
    ids=str,
)
def test_the_original_error_names_the_culprit(value: Any, error: Any, path: str, kind: str) -> None:
    if error is None:
        encode(value)
        return
    with pytest.raises(error) as caught:
        encode(value)
    (note,) = caught.value.__notes__
    assert f"could not encode {path}" in note or f"could not encode {path}," in note
    assert kind in note
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_a_captured_culprit_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError) as caught:
        encode(lambda: lock)
    assert "captured lock" in caught.value.__notes__[0]


def test_too_deep_is_an_error_and_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        encode(deep)
    while deep:  # freed step by step, or the interpreter recurses
        deep = deep[0]


def test_a_failure_leaves_no_trace() -> None:
    for _ in range(3):
        with pytest.raises(OSError, match="sensor"):
            encode([np.ones(10), Handle(), Refuses()], SPECIAL)
    encoded = encode([np.ones(10), Handle()], SPECIAL)
    assert len(encoded.buffers) == len(encoded.substitutes) == 1


def explode() -> None:
    raise ValueError("refuses to be rebuilt")


class Explodes:
    def __reduce__(self) -> Any:
        return explode, ()


def test_decoding_raises_the_original_error_and_forgets_its_hooks() -> None:
    with pytest.raises(ValueError, match="rebuilt"):
        decode(encode(Explodes()).stream, [], resolve=lambda number: number)
    encoded = encode(Handle(), SPECIAL)
    with pytest.raises(pickle.UnpicklingError, match="cluster"):
        decode(encoded.stream, encoded.buffers)


class Nests:
    """Encodes and decodes within its own reduction and state."""

    def __init__(self, handle: Any, depth: int) -> None:
        self.handle, self.depth = handle, depth

    def __getstate__(self) -> Any:
        inner = encode([self.handle, np.arange(self.depth + 1)], SPECIAL)
        assert inner.substitutes == [self.handle]
        return self.handle, self.depth, inner.stream, [bytearray(b) for b in inner.buffers]

    def __setstate__(self, state: Any) -> None:
        self.handle, self.depth, stream, buffers = state
        inner = decode(stream, [memoryview(b) for b in buffers], lambda number: ("inner", number))
        assert inner[0] == ("inner", 0)
        assert len(inner[1]) == self.depth + 1


def test_encodes_and_decodes_nest() -> None:
    handle, other = Handle(), Handle()
    value = [other, Nests(handle, 3), handle, Nests(other, 4), other]
    encoded = encode(value, SPECIAL)
    assert encoded.substitutes == [other, handle]
    back = decode(encoded.stream, encoded.buffers, lambda number: ("outer", number))
    assert back[0] == back[4] == back[3].handle == ("outer", 0)
    assert back[2] == back[1].handle == ("outer", 1)


def _giver(value: Any) -> Any:
    return lambda: value


def _pair(first: int, second: int) -> tuple[int, int]:
    return first, second


def test_many_threads() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                handle = Handle()
                number = seed * 1000 + step
                array = np.full(50, number)
                captured: list[Any] = [handle, Has(array), number]
                value = [handle, Nests(handle, 2), _giver(captured), array[::2]]
                encoded = encode(value, SPECIAL)
                assert encoded.substitutes == [handle]
                back = decode(encoded.stream, encoded.buffers, functools.partial(_pair, number))
                assert back[0] == back[1].handle == back[2]()[0] == (number, 0)
                assert back[2]()[1].value[0] == back[2]()[2] == number == back[3][0]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]


def test_a_dynamic_class_decoded_by_many_threads_at_once_is_one_whole_class(tmp_path: Path) -> None:
    # The class has to be unknown here, so that it is made by whichever thread comes first.
    import subprocess

    text = """
import sys
from onehop._codec import encode
class Fresh:
    def value(self): return 42
sys.stdout.buffer.write(encode(Fresh()).stream)
"""
    stream = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, check=True, timeout=60
    ).stdout
    found: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            made = decode(stream, [])
            found.append((type(made), made.value()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 160
    assert len({kind for kind, _ in found}) == 1
    assert all(value == 42 for _, value in found)


def test_placeholders_at_any_depth() -> None:
    first, second = Handle(), Handle()

    def inner() -> Any:
        return first

    def outer(default: Any = second) -> Any:
        return inner(), default

    class Local:
        attribute = first

        def __init__(self) -> None:
            self.value = {second: [first]}

    value = [Has(first), {"k": (second,)}, {first}, outer, Local(), Has(Has(second))]
    encoded = encode(value, SPECIAL)
    assert {id(x) for x in encoded.substitutes} == {id(first), id(second)}
    assert len(encoded.substitutes) == 2
    names = {id(first): "first", id(second): "second"}
    back = decode(encoded.stream, encoded.buffers, lambda n: names[id(encoded.substitutes[n])])
    assert back[0].value == "first"
    assert back[1]["k"] == ("second",)
    assert back[2] == {"first"}
    assert back[3]() == ("first", "second")
    assert back[4].value == {"second": ["first"]}
    assert back[5].value.value == "second"


def test_only_exact_types_are_special() -> None:
    class Derived(Handle):
        pass

    encoded = encode([Derived(), Handle], SPECIAL)
    assert encoded.substitutes == []


class Outside:
    """A type that pickle cannot do, with a reducer of its own."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.lock = threading.Lock()


def test_reducers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce_outside(value: Outside) -> Any:
        return Outside, (pickle.PickleBuffer(value.memory),)

    monkeypatch.setattr(REGISTRY, "table", dict(REGISTRY.table))
    register_reducer(f"{__name__}.Outside", reduce_outside)
    register_reducer("not_loaded_module.Kind", reduce_outside)
    for value in (Outside(bytearray(b"abc")), Outside(np.arange(3, dtype=np.uint8))):
        encoded = encode([value])
        assert len(encoded.buffers) == 1
        assert bytes(decode(encoded.stream, encoded.buffers)[0].memory) == bytes(value.memory)
    monkeypatch.setattr(REGISTRY, "_pending", {})


def test_reducers_of_copyreg_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Refuses, lambda value: (Has, (5,)))
    assert decode(encode(Refuses()).stream, []).value == 5
    assert decode(encode([Refuses(), lambda: 1]).stream, [])[0].value == 5


def test_without_numpy_nothing_imports_it() -> None:
    import subprocess

    text = (
        "import sys; from onehop._codec import encode, decode; import array;"
        "v = [1, 'a', b'x' * 100000, array.array('i', range(10)), (lambda: 3)]; e = encode(v);"
        "d = decode(e.stream, e.buffers); assert d[:4] == v[:4] and d[4]() == 3;"
        "assert 'numpy' not in sys.modules;"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
    text = (
        "import sys; from onehop._codec import encode, decode; encode([1, max]);"
        "assert not {'cloudpickle', 'numpy', 'asyncio', 'logging'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
