"""Cheapest ways through a graph, and what a way looks like.

Must never know where a graph comes from. Own Dijkstra, because a worker that routes must not import networkx.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

Neighbours = dict[int, dict[int, float]]
"""Cost of the link from a rank to each of its neighbours; the same both ways."""


class Step(NamedTuple):
    """How far the target is from one rank, and whom to hand a frame to."""

    cost: float
    crossings: int
    """Changes of host."""
    hops: int
    next_hop: int


Table = dict[int, Step]
"""For one target: the step from every rank that reaches it."""


def distances(target: int, neighbours: Neighbours, hosts: Mapping[int, str]) -> Table:
    """Search from the target outwards.

    Every process that computes the table of a target gets the same one, and along ``next_hop`` the triple of cost,
    crossings and hops falls strictly (the hops do where rounding eats a tiny cost): no frame can go in a circle.
    """
    table: Table = {}
    waiting: list[tuple[float, int, int, int, int]] = [(0.0, 0, 0, target, target)]
    while waiting:
        cost, crossings, hops, next_hop, rank = heappop(waiting)
        if rank in table:
            continue
        # Of equally good ways the heap gives the one over the lowest next rank first.
        table[rank] = Step(cost, crossings, hops, next_hop)
        for other, link_cost in neighbours[rank].items():
            if other not in table:
                crossing = int(hosts[rank] != hosts[other])
                heappush(waiting, (cost + link_cost, crossings + crossing, hops + 1, rank, other))
    return table


class Route(tuple[int, ...]):
    """The ranks on the way from one process to another, both included; prints as ``2 → 1 → 3``.

    Parameters
    ----------
    ranks : iterable of int
        The way.
    media : sequence of str, optional
        What each hop goes over, where that is known.
    hosts : sequence of str, optional
        Host of each rank.
    """

    media: tuple[str, ...]
    hosts: tuple[str, ...]

    def __new__(
        cls, ranks: Iterable[int], media: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Route:
        """Make a tuple of the ranks."""
        route = super().__new__(cls, ranks)
        route.media = tuple(media)
        route.hosts = tuple(hosts)
        if route.media and len(route.media) != len(route.hops):
            raise ValueError(f"{len(route.media)} media for {len(route.hops)} hops")
        if route.hosts and len(route.hosts) != len(route):
            raise ValueError(f"{len(route.hosts)} hosts for {len(route)} ranks")
        return route

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks as a plain tuple."""
        return tuple(self)

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """Pairs of neighbours on the way; none where somebody sends to itself."""
        return tuple(pairwise(self))

    @property
    def relays(self) -> tuple[int, ...]:
        """Who passes frames on."""
        return tuple(self[1:-1])

    def over(self, media: Sequence[str]) -> Route:
        """The same way, with what each hop goes over."""
        return Route(self, media, self.hosts)

    def __str__(self) -> str:
        way = " → ".join(map(str, self))
        return f"{way} ({', '.join(self.media)})" if self.media else way

    def __repr__(self) -> str:
        return f"<Route {self}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, (tuple(self), self.media, self.hosts)
