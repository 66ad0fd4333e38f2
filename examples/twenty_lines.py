"""The example of the README: one object in many calls, a change in place, a result that stays, a nested call."""

from typing import Any

import numpy as np

import onehop

model = {"hoppings": [np.random.rand(1000, 1000) for _ in range(25)]}  # 200 MB


def energy(model: dict[str, Any], k: int) -> float:
    """Something that needs the whole model."""
    return float(np.trace(model["hoppings"][k % 25]))


with onehop.Cluster(2) as cluster:
    # captured: it moves once, for both workers
    print(sum(cluster.map(lambda k: energy(model, k), range(100))))
    # as an argument, on worker 2: nothing moves
    print(cluster[2].call(energy, model, 7))
    # a change in place is seen; what did not change stays where it is
    model["hoppings"][7][0, 0] = 100.0
    print(cluster[2].call(energy, model, 7))

    # a future's value stays where it was made, and is taken from there
    half = cluster.submit(np.multiply, model["hoppings"][0], 0.5)
    print(cluster[3].call(np.sum, half))
    # worker 2 asks worker 3, straight
    print(cluster[2].call(lambda: onehop.current()[3].call(onehop.rank)))

    # the way that is planned, the way that it really went, and every byte by pair and medium
    print(cluster.route(2, 3), half.route(), sep="\n")
    print(cluster.ledger.between_processes())
