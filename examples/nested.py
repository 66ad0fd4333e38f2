"""Workers ask each other, straight; every future can tell which way its call and answer went."""

from typing import Any

import onehop


def through(ranks: list[int]) -> list[int]:
    """Runs on one worker, asks the next one in the list, and adds itself in front of the answer."""
    if not ranks:
        return [onehop.rank()]
    answer: list[int] = onehop.current()[ranks[0]].call(through, ranks[1:])
    return [onehop.rank(), *answer]


with onehop.Cluster(3) as cluster:
    future = cluster[2].submit(through, [3, 4])
    print("asked:", future.result())
    print("went: ", future.route())
    print("2 to 4 would go:", cluster.route(2, 4))
    # A future stands for its value: 2 makes it, and 3 takes it from there, without the director in between.
    large: Any = cluster[2].submit(bytes, 50_000_000)
    print("length:", cluster[3].call(len, large))
    print(cluster.ledger.between_processes())
