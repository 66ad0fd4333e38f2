"""The function of a reduction's share: folds `function(item)` over a list of items, in order.

Must never know where it runs.
"""

from __future__ import annotations

from typing import Any


class Fold:
    """Called with the items of one share; sent once a reduction, as its function."""

    __slots__ = ("function", "op", "star")

    def __init__(self, op: Any, function: Any, star: bool) -> None:
        self.op = op
        self.function = function
        self.star = star

    def __getstate__(self) -> tuple[Any, Any, bool]:
        return (self.op, self.function, self.star)

    def __setstate__(self, state: tuple[Any, Any, bool]) -> None:
        self.op, self.function, self.star = state

    def __call__(self, items: list[Any]) -> Any:
        """Fold the items; there is at least one."""
        op, function, star = self.op, self.function, self.star
        values = (function(*item) if star else function(item) for item in items)
        total = next(values)
        for value in values:
            total = op(total, value)
        return total
