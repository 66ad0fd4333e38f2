"""The example of the README: one object in many calls, a change in place, a result that stays, a nested call."""

from typing import Any

import numpy as np

import onehop

model = {"hoppings": [np.random.rand(1000, 1000) for _ in range(25)]}  # 200 MB


def energy(model: dict[str, Any], k: int) -> float:
    """Something that needs the whole model."""
    return float(np.trace(model["hoppings"][k % 25]))


with onehop.Cluster(2) as cluster:
    print(
        sum(cluster.map(lambda k: energy(model, k), range(100)))
    )  # captured: moves once, for both
    print(cluster[2].call(energy, model, 7))  # on worker 2; moves nothing
    model["hoppings"][7][0, 0] = 100.0  # a change in place …
    print(cluster[2].call(energy, model, 7))  # … is seen; what did not change stays

    half = cluster.submit(
        np.multiply, model["hoppings"][0], 0.5
    )  # its value stays where it was made
    print(cluster[3].call(np.sum, half))  # taken from there, not through this program
    print(cluster[2].call(lambda: onehop.current()[3].call(onehop.rank)))  # 2 asks 3, straight

    print(cluster.route(2, 3), half.route(), sep="\n")  # planned, and what really happened
    print(cluster.ledger.between_processes())  # every byte, by pair and medium
