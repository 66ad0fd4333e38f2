"""Runs the demo's sum in each way, measures, and compares with the serial run.

Must never print: it takes a `stage` callable to report progress to, and returns an `Outcome`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import cloudpickle
import numpy as np

import onehop
from onehop.demo import ways
from onehop.demo.bloch import KPoint, grid
from onehop.demo.memory import PeakMemory, memory_bytes
from onehop.demo.model import FloatArray, NoTBModel, apply_potential, pickled_bytes
from onehop.demo.spectrum import (
    Recipe,
    density_of_states,
    exact_density_of_states,
    recipe_for,
    spectrum,
)
from onehop.demo.supercell import repeat_for_size, size_of_supercell_bytes, supercell
from onehop.errors import MemoryLimitError

POTENTIAL_EV = 0.5
DEFAULT_SIZE_BYTES = 200_000_000
TOLERANCE = 1e-9
"""Largest accepted difference from the serial run, relative to its largest number: sums may be ordered differently
where a process has another number of BLAS threads."""

Stage = Callable[[str, int], ways.Tick]


class Plan(NamedTuple):
    """What the command line asked for."""

    source: str
    repeat: int | None
    workers: int
    kpoints: tuple[int, int, int]
    moments: int


@dataclass
class Way:
    """One way of doing the sum, measured."""

    name: str
    time_s: float
    pool_bytes: int = 0
    moved_bytes: int = 0
    attached_bytes: int = 0
    avoided_bytes: int = 0
    extra_bytes: int | None = None
    difference: float = 0.0
    """Largest difference from the serial run, relative to its largest number."""


@dataclass
class Outcome:
    """Everything that the demo found."""

    plan: Plan
    repeat: int
    orbitals: int
    matrices: int
    size_bytes: int
    changed_bytes: int
    build_s: float
    start_s: float
    serial_s: float
    serial_extra_bytes: int | None
    serial_changed_s: float
    change_effect: float
    """How much the change moved the serial result; what a stale copy would be wrong by."""
    recipe: Recipe
    ways: list[Way]
    route: str
    energies_ev: FloatArray
    density: FloatArray
    exact_density: FloatArray | None
    failures: list[str] = field(default_factory=list)

    @property
    def deviation(self) -> float | None:
        """Largest distance from the exact bands' density of states, relative to its peak."""
        if self.exact_density is None:
            return None
        return float(
            np.abs(self.density - self.exact_density).max() / np.abs(self.exact_density).max()
        )


def run(cell: NoTBModel, plan: Plan, stage: Stage) -> Outcome:
    """Do the whole job.

    Parameters
    ----------
    cell : NoTBModel
        The unit cell.
    plan : Plan
        Sizes and counts.
    stage : callable
        Called with a title and a number of steps; gives what is to be called after each step.
    """
    repeat = plan.repeat or repeat_for_size(cell, DEFAULT_SIZE_BYTES)
    _check_memory(size_of_supercell_bytes(cell, repeat), repeat)
    tick = stage("building the supercell", 1)
    begin = time.perf_counter()
    model = supercell(cell, repeat)
    recipe = recipe_for(cell, model, plan.moments, POTENTIAL_EV)
    kpoints = grid(plan.kpoints)
    build_s = time.perf_counter() - begin
    tick()

    tick = stage("serial", len(kpoints))
    with PeakMemory([os.getpid()]) as memory:
        expected, serial_s = _timed(lambda: ways.serial(model, kpoints, recipe, tick))

    tick = stage("starting workers", 1)
    begin = time.perf_counter()
    with onehop.Cluster(plan.workers) as cluster:
        cluster.everywhere(ways.warm_up)
        start_s = time.perf_counter() - begin
        tick()
        meter = _Meter(cluster, model, kpoints, recipe, stage)
        done = [
            meter.measure("plain loop", ways.plain_loop),
            meter.measure("map", ways.captured_map),
        ]
        # The first layer of cells: neighbours in memory too, so that a small part of one matrix changes.
        layer = slice(0, cell.norbits * repeat * repeat)
        changed_bytes = 16 * apply_potential(model, layer, POTENTIAL_EV)
        done.append(meter.measure("loop, changed", ways.plain_loop))
        route = ways.nested_route(cluster)

    tick = stage("serial, changed", len(kpoints))
    expected_changed, serial_changed_s = _timed(lambda: ways.serial(model, kpoints, recipe, tick))

    tick = stage("density of states", 1)
    first_loop = meter.results[0]
    energies, density = density_of_states(first_loop, recipe, cell.norbits)
    exact = exact_density_of_states(cell, recipe)[1] if cell.is_orthogonal else None
    tick()
    outcome = Outcome(
        plan=plan,
        repeat=repeat,
        orbitals=model.norbits,
        matrices=sum(1 for _ in model.matrices()),
        size_bytes=model.size_bytes,
        changed_bytes=changed_bytes,
        build_s=build_s,
        start_s=start_s,
        serial_s=serial_s,
        serial_extra_bytes=memory.extra_bytes,
        serial_changed_s=serial_changed_s,
        change_effect=_difference(expected_changed, expected),
        recipe=recipe,
        ways=done,
        route=route,
        energies_ev=energies,
        density=density,
        exact_density=exact,
    )
    for way, results, right in zip(
        done, meter.results, (expected, expected, expected_changed), strict=True
    ):
        way.difference = _difference(results, right)
        if not way.difference <= TOLERANCE:
            outcome.failures.append(
                f"{way.name}: differs from the serial run by {way.difference:.1e} of its largest number"
            )
    if not outcome.change_effect > 100 * TOLERANCE:
        outcome.failures.append(
            "the changed matrix made no difference, so the check proves nothing"
        )
    return outcome


def _check_memory(size_bytes: int, repeat: int) -> None:
    """Refuse a model that this machine cannot hold, before minutes are spent on it."""
    # The lists of elements that the matrices are made of, the model, the shared copy, the tasks' vectors.
    needed_bytes = 4 * size_bytes
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > memory_bytes:
        raise MemoryLimitError(
            f"{repeat}×{repeat}×{repeat} cells are a model of {size_bytes / 1e9:.1f} GB, and the demo needs four times that; "
            f"this machine has {memory_bytes / 1e9:.1f} GB: use a smaller --supercell"
        )


def _timed(work: Callable[[], list[FloatArray]]) -> tuple[list[FloatArray], float]:
    begin = time.perf_counter()
    results = work()
    return results, time.perf_counter() - begin


def _difference(found: Sequence[FloatArray], right: Sequence[FloatArray]) -> float:
    scale = max(float(np.abs(one).max()) for one in right)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, right, strict=True)) / scale


class _Meter:
    """Runs ways on one cluster, and keeps what they returned."""

    def __init__(
        self,
        cluster: onehop.Cluster,
        model: NoTBModel,
        kpoints: list[KPoint],
        recipe: Recipe,
        stage: Stage,
    ) -> None:
        self.results: list[list[FloatArray]] = []
        self._cluster = cluster
        self._model = model
        self._kpoints = kpoints
        self._recipe = recipe
        self._stage = stage
        self._pids = [os.getpid(), *(worker.pid for worker in cluster.workers)]
        # The user's own model and idle workers with their libraries: what there was before anything was sent.
        self._before_bytes = memory_bytes(self._pids)

    def measure(
        self,
        name: str,
        way: Callable[
            [onehop.Cluster, NoTBModel, Sequence[KPoint], Recipe, ways.Tick], list[FloatArray]
        ],
    ) -> Way:
        tick = self._stage(name, len(self._kpoints))
        with (
            self._cluster.ledger.watch() as traffic,
            PeakMemory(self._pids, self._before_bytes) as memory,
        ):
            results, time_s = _timed(
                lambda: way(self._cluster, self._model, self._kpoints, self._recipe, tick)
            )
        self.results.append(results)
        return Way(
            name=name,
            time_s=time_s,
            pool_bytes=self._pool_bytes(way is ways.captured_map),
            moved_bytes=traffic.total("moved"),
            attached_bytes=traffic.total("attached"),
            avoided_bytes=traffic.total("avoided"),
            extra_bytes=memory.extra_bytes,
        )

    def _pool_bytes(self, captured: bool) -> int:
        """What a process pool would write: one task's pickle, measured, times the tasks."""
        if captured:
            task: object = _ByCloudpickle(ways.capturing(self._model, self._recipe))
        else:
            task = (spectrum, self._model, self._kpoints[0], self._recipe, 0)
        return pickled_bytes(task) * len(self._kpoints)


class _ByCloudpickle:
    """Pickles a function as the pools that take closures do."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._pickle = cloudpickle.dumps(function)

    def __reduce__(self) -> tuple[object, ...]:
        return cloudpickle.loads, (self._pickle,)
