"""F3: results, arguments and exceptions that cannot make the journey. The call fails, the worker lives."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from onehop.errors import OnehopError, RemoteError, SerializationError


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def explode() -> None:
    raise ValueError("refuses to be rebuilt")


class CannotArrive:
    """Pickles well, unpickles never."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


class NeedsTwo(Exception):
    """An exception that pickle cannot rebuild, since `args` holds one value and `__init__` wants two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}/{second}")


class HoldsALock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def return_a_lock() -> object:
    return threading.Lock()


def return_something_that_cannot_arrive() -> object:
    return CannotArrive()


def return_big_and_a_lock() -> object:
    return [np.ones(1_000_000), threading.Lock()]


def raise_needs_two() -> None:
    raise NeedsTwo("alpha", "beta")


def raise_holds_a_lock() -> None:
    raise HoldsALock("gamma")


def raise_local_class() -> None:
    class Local(KeyError):
        pass

    raise Local("delta")


def raise_in_chain() -> None:
    try:
        raise HoldsALock("the cause")
    except HoldsALock as error:
        raise ValueError("the effect") from error


def raise_from_chain_to_exit() -> None:
    raise SystemExit(3)


def raise_remotely_base() -> None:
    class Odd(BaseException):
        pass

    raise Odd("not an Exception")


def take(*_: object) -> str:
    return "taken"


def alive(cluster: Any, pid: int) -> None:
    assert cluster[2].call(os.getpid) == pid


@pytest.fixture
def pid(cluster: Any) -> int:
    return int(cluster[2].pid)


def test_a_result_that_cannot_be_pickled(cluster: Any, pid: int) -> None:
    with pytest.raises(OnehopError, match="lock") as caught:
        cluster[2].call(return_a_lock)
    assert "return_a_lock" in str(caught.value) or "return_a_lock" in "".join(
        getattr(caught.value, "__notes__", [])
    )
    alive(cluster, pid)


def test_a_large_result_that_fails_half_way_leaves_nothing(cluster: Any, pid: int) -> None:
    for _ in range(3):
        with pytest.raises(OnehopError):
            cluster[2].call(return_big_and_a_lock)
    alive(cluster, pid)


def test_a_result_that_cannot_be_unpickled_here(cluster: Any, pid: int) -> None:
    with pytest.raises((SerializationError, ValueError), match="refuses to be rebuilt"):
        cluster[2].call(return_something_that_cannot_arrive)
    alive(cluster, pid)


def test_an_argument_that_cannot_be_unpickled_there(cluster: Any, pid: int) -> None:
    with pytest.raises(OnehopError, match="refuses to be rebuilt") as caught:
        cluster[2].call(take, CannotArrive())
    error = caught.value
    text = str(error) + str(getattr(error, "remote_traceback", "")) + repr(error.__cause__)
    assert "explode" in text, "the traceback from the worker is missing"
    alive(cluster, pid)


def test_an_argument_that_cannot_be_pickled_fails_at_the_caller(cluster: Any, pid: int) -> None:
    with pytest.raises((OnehopError, TypeError), match="lock"):
        cluster[2].call(take, threading.Lock())
    alive(cluster, pid)


@pytest.mark.parametrize(
    ("function", "name", "word"),
    [
        (raise_needs_two, "NeedsTwo", "alpha/beta"),
        (raise_holds_a_lock, "HoldsALock", "gamma"),
        (raise_local_class, "Local", "delta"),
        (raise_in_chain, "ValueError", "the effect"),
        (raise_remotely_base, "Odd", "not an Exception"),
    ],
)
def test_exceptions_arrive_whatever_they_are(
    cluster: Any, pid: int, function: Any, name: str, word: str
) -> None:
    with pytest.raises(RemoteError, match=word) as caught:
        cluster[2].call(function)
    error = caught.value
    assert error.rank == 2
    assert error.type_name.rpartition(".")[2] == name
    assert function.__name__ in error.remote_traceback
    alive(cluster, pid)


def test_a_chain_is_readable(cluster: Any) -> None:
    with pytest.raises(RemoteError) as caught:
        cluster[2].call(raise_in_chain)
    assert "the cause" in caught.value.remote_traceback


def test_system_exit_of_a_task_ends_the_task_only(cluster: Any, pid: int) -> None:
    error = cluster[2].submit(raise_from_chain_to_exit).exception(timeout=20)
    assert isinstance(error, RemoteError)
    assert "SystemExit" in error.type_name
    alive(cluster, pid)


def test_the_original_type_can_be_caught(cluster: Any) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        cluster[2].call(divmod, 1, 0)
    assert isinstance(caught.value, RemoteError)
    with pytest.raises(KeyError) as caught_key:
        cluster[2].call({}.__getitem__, "missing")
    assert isinstance(caught_key.value, RemoteError)


def test_other_items_of_a_map_are_served(cluster: Any) -> None:
    def odd(k: int) -> object:
        return threading.Lock() if k == 3 else k

    results = list(cluster.map(odd, range(6), on_error=lambda error: type(error).__name__))
    assert [r for r in results if isinstance(r, int)] == [0, 1, 2, 4, 5]
    assert isinstance(results[3], str)
