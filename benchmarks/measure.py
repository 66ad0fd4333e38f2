"""Measuring and printing: medians, and ratios of what was measured in one run beside each other."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SCALE = float(os.environ.get("ONEHOP_BENCH_SCALE", "1"))
"""Of large objects; below 1 for a look on a small machine, where the figures do not count."""


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def median_s(action: Callable[[], object], repeats: int = 15, warm_up: int = 1) -> float:
    """The median of several calls, with the collector at rest."""
    for _ in range(warm_up):
        action()
    gc.collect()
    gc.disable()
    try:
        return statistics.median(seconds(action) for _ in range(repeats))
    finally:
        gc.enable()


def medians_in_turns_s(
    actions: dict[str, Callable[[], object]], repeats: int = 300, rounds: int = 10
) -> dict[str, float]:
    """Medians of several actions, measured in turns, so that all of them meet the same machine."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        for _ in range(repeats // 3):
            action()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, action in actions.items():
                times[name] += [seconds(action) for _ in range(repeats)]
    finally:
        gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}


def big_array(megabytes: float = 800) -> Any:
    """An array of random doubles: nothing in it is compressible or equal."""
    return np.random.default_rng(1).random(int(megabytes * SCALE * 125_000))


@dataclass
class Figure:
    """One line of the table: what was measured, against what, and what was to reach."""

    what: str
    value: float
    unit: str
    limit: float
    limit_text: str
    better: str = "less"

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.better == "less" else self.value >= self.limit

    def __str__(self) -> str:
        sign = "≤" if self.better == "less" else "≥"
        mark = "reached" if self.reached else "MISSED"
        return (
            f"{self.what}: {self.value:.4g} {self.unit}"
            f" (to reach {sign} {self.limit:.4g} {self.unit}: {self.limit_text}) {mark}"
        )


class Report:
    """Collects the lines of one script and prints them as they come."""

    def __init__(self, title: str) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
        parser.add_argument("--no-peers", action="store_true", help="leave the other systems out")
        options = parser.parse_args()
        self._json: bool = options.json
        self.peers: bool = not options.no_peers
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.say(f"## {title}")

    def say(self, text: str) -> None:
        self.notes.append(text)
        if not self._json:
            print(text, flush=True)

    def time(self, what: str, value_s: float) -> float:
        """Print a duration in a unit that suits it."""
        unit, size = next(
            (pair for pair in (("s", 1.0), ("ms", 1e-3)) if value_s >= pair[1]), ("µs", 1e-6)
        )
        self.say(f"  {what}: {value_s / size:.3g} {unit}")
        return value_s

    def figure(self, *args: Any, **options: Any) -> None:
        made = Figure(*args, **options)
        self.figures.append(made)
        self.say(f"  → {made}")

    def end(self) -> None:
        if self._json:
            print(
                json.dumps(
                    {
                        "notes": self.notes,
                        "figures": [asdict(f) | {"reached": f.reached} for f in self.figures],
                    }
                )
            )
