"""What runs in workers, of onehop and of its peers alike; importable, since some of them need that."""

from __future__ import annotations

from typing import Any


def nothing() -> None:
    """The least that a call can do."""


def identity(value: Any) -> Any:
    return value


def first(array: Any, k: int = 0) -> float:
    """Touch an array in one place."""
    return float(array[k])


def length(array: Any) -> int:
    return len(array)


def square(k: int) -> int:
    return k * k


def make(count: int) -> Any:
    """An array of `count` doubles that is not all zero pages."""
    import numpy as np

    return np.full(count, 1.5)
