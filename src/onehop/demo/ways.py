"""The same sum over k-points, written as a user would write it: one process, a loop over a cluster, a map.

Must never measure anything: that is `job`'s part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onehop
from onehop.demo.bloch import KPoint
from onehop.demo.model import FloatArray, NoTBModel
from onehop.demo.spectrum import Recipe, spectrum

Tick = Callable[[], None]


def serial(
    model: NoTBModel, kpoints: Sequence[KPoint], recipe: Recipe, tick: Tick
) -> list[FloatArray]:
    """No cluster."""
    results = []
    for number, k in enumerate(kpoints):
        results.append(spectrum(model, k, recipe, number))
        tick()
    return results


def plain_loop(
    cluster: onehop.Cluster, model: NoTBModel, kpoints: Sequence[KPoint], recipe: Recipe, tick: Tick
) -> list[FloatArray]:
    """The model is an argument of every call; nothing is declared."""
    futures = [
        cluster.submit(spectrum, model, k, recipe, number) for number, k in enumerate(kpoints)
    ]
    results = []
    for future in futures:
        results.append(future.result())
        tick()
    return results


def captured_map(
    cluster: onehop.Cluster, model: NoTBModel, kpoints: Sequence[KPoint], recipe: Recipe, tick: Tick
) -> list[FloatArray]:
    """The model is a variable that the function mentions."""
    results = []
    for result in cluster.map(capturing(model, recipe), kpoints, range(len(kpoints))):
        results.append(result)
        tick()
    return results


def capturing(model: NoTBModel, recipe: Recipe) -> Callable[[KPoint, int], FloatArray]:
    """The function that `captured_map` maps; apart, so that its pickle can be measured."""
    return lambda k, number: spectrum(model, k, recipe, number)


def nested_route(cluster: onehop.Cluster) -> str:
    """Ask the first worker to ask the second one, and tell which way the call and its answer went."""
    ranks = [worker.rank for worker in cluster.workers]
    if not ranks:
        return "no workers: everything ran in this process"
    last = ranks[1] if len(ranks) > 1 else ranks[0]
    future = cluster[ranks[0]].submit(ask, last)
    if future.result() != last:
        raise AssertionError(f"rank {last} was asked for its rank and gave {future.result()}")
    return future.route().path


def ask(rank: int) -> int:
    """Runs on one worker, and calls another."""
    if rank == onehop.rank():
        return rank
    return int(onehop.current()[rank].call(onehop.rank))


def warm_up() -> None:
    """Import what the tasks need, so that no way pays for it instead of another."""
    import onehop.demo.spectrum  # noqa: F401 - the import is the purpose
