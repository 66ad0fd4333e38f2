"""The shapes that have names, and graphs of the user's own.

Must never know whether a link can really be made. A shape is a function of the members, because they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from math import isfinite
from typing import Any

from onehop.errors import TopologyError
from onehop.topology.graph import Link, Member, Topology

Shape = Callable[[Iterable[tuple[int, str]]], Topology]
"""Makes the topology of these members (pairs of rank and host)."""


def all_to_all(members: Iterable[tuple[int, str]]) -> Topology:
    """Link everyone to everyone; links are opened on first use."""
    members = _sorted(members)
    links = {(one.rank, other.rank): 1.0 for one, other in combinations(members, 2)}
    return Topology(members, links, "all_to_all")


def star(members: Iterable[tuple[int, str]]) -> Topology:
    """Link everyone to the director, the lowest rank, and to nobody else."""
    members = _sorted(members)
    links = {(members[0].rank, other.rank): 1.0 for other in members[1:]}
    return Topology(members, links, "star")


def tree(members: Iterable[tuple[int, str]]) -> Topology:
    """Link the director to one leader on each host, and each leader to the others of its host.

    The director leads its own host; elsewhere the lowest rank does, and the next one after it has died.
    """
    members = _sorted(members)
    leaders: dict[str, int] = {}
    links: dict[Link, float] = {}
    for member in members:
        leader = leaders.setdefault(member.host, member.rank)
        if leader != member.rank:
            links[leader, member.rank] = 1.0
        elif member.rank != members[0].rank:
            links[members[0].rank, member.rank] = 1.0
    return Topology(members, links, "tree")


def custom(graph: Any) -> Shape:
    """Make a shape of a graph.

    Parameters
    ----------
    graph : networkx graph, mapping or iterable
        Anything with ``edges`` whose nodes are ranks, the attribute ``weight`` being the cost; a mapping from pairs
        of ranks to costs; or pairs or triples (rank, rank, cost). A direction means nothing: a link carries both
        ways. Without a cost a link costs 1.
    """
    links = _links_of(graph)

    def shape(members: Iterable[tuple[int, str]]) -> Topology:
        return Topology(members, links, "custom")

    return shape


_NAMED: Mapping[str, Shape] = {"all_to_all": all_to_all, "star": star, "tree": tree}


def shape_of(topology: Any) -> Shape:
    """Give the shape that a user means.

    Parameters
    ----------
    topology : str, graph or callable
        A name; a graph as `custom` takes it; or a function from members to a `Topology` or such a graph.
    """
    if isinstance(topology, str):
        try:
            return _NAMED[topology.replace("-", "_")]
        except KeyError:
            raise TopologyError(
                f"no topology is called {topology!r}; there are {', '.join(_NAMED)}, or a graph of your own"
            ) from None
    if isinstance(topology, Topology):
        return custom(topology.links)
    if callable(topology) and not hasattr(topology, "edges"):
        return _checked(topology)
    return custom(topology)


def _checked(function: Callable[[list[Member]], Any]) -> Shape:
    def shape(members: Iterable[tuple[int, str]]) -> Topology:
        members = _sorted(members)
        made = function(members)
        return made if isinstance(made, Topology) else custom(made)(members)

    return shape


def _links_of(graph: Any) -> dict[Link, float]:
    edges = getattr(graph, "edges", None)
    rows: Iterable[Any]
    if edges is not None:
        # Those of networkx are called to get the weights; a property with pairs does as well.
        rows = edges(data="weight", default=1.0) if callable(edges) else edges
    elif isinstance(graph, Mapping):
        rows = [(*pair, cost) for pair, cost in graph.items()]
    else:
        rows = graph
    links: dict[Link, float] = {}
    try:
        for row in rows:
            one, other, *cost = row
            if len(cost) > 1 or type(one) is not int or type(other) is not int:
                raise TypeError(row)
            link = (min(one, other), max(one, other))
            price = float(cost[0]) if cost and cost[0] is not None else 1.0
            # What is no finite price is refused later, with its own reason; nan differs even from itself.
            if links.setdefault(link, price) != price and isfinite(price):
                raise TopologyError(
                    f"the link {one}–{other} has two costs, {links[link]} and {price}"
                )
    except (TypeError, ValueError) as error:
        raise TopologyError(
            "a topology of your own is a graph with ranks as nodes, or pairs of ranks, with or without a cost; "
            f"this is not: {error}"
        ) from error
    return links


def _sorted(members: Iterable[tuple[int, str]]) -> list[Member]:
    return sorted(Member(*member) for member in members)
