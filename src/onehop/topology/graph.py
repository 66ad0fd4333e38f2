"""Who is in a topology, and which links may be used.

Must never know how a link is made or whether it stands: this is the plan, the same for every process that knows the
same members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from onehop.errors import TopologyError
from onehop.topology.routing import Neighbours, Route, Table, distances

Link = tuple[int, int]
"""Two ranks, the lower first: a connection carries both ways."""


class Member(NamedTuple):
    """One process of a topology."""

    rank: int
    host: str
    """What tells hosts apart (not always a name)."""


class Topology:
    """Members, the links between them, and the cheapest ways.

    It never changes: a member that comes or goes makes a new one.

    Parameters
    ----------
    members : iterable of Member
        Or of pairs of rank and host.
    links : mapping
        Cost of the link between two ranks, by pair in either order; all costs positive. A link carries both ways.
    name : str
        What the shape is called.
    check : bool
        Refuse a graph that leaves somebody unreachable. When a process has died there is nothing left to refuse:
        without the check, `next_hop` raises for the pairs that are cut off.
    """

    def __init__(
        self,
        members: Iterable[tuple[int, str]],
        links: Mapping[Link, float],
        name: str = "custom",
        check: bool = True,
    ) -> None:
        self.name = name
        self._hosts: dict[int, str] = {}
        for rank, host in members:
            if rank in self._hosts:
                raise TopologyError(f"rank {rank} is twice among the members of topology {name!r}")
            self._hosts[rank] = host
        self._neighbours: Neighbours = {rank: {} for rank in sorted(self._hosts)}
        for (one, other), cost in links.items():
            self._add(one, other, cost)
        self._cheapest = min(
            (cost for costs in self._neighbours.values() for cost in costs.values()), default=1.0
        )
        self._tables: dict[int, Table] = {}
        if check:
            self._refuse_unreachable()

    def _add(self, one: int, other: int, cost: float) -> None:
        for rank in (one, other):
            if rank not in self._hosts:
                raise TopologyError(
                    f"topology {self.name!r} has a link {one}–{other}, but there is no rank {rank}; "
                    f"there are {_listed(self._hosts)}"
                )
        if one == other:
            raise TopologyError(
                f"topology {self.name!r} links rank {one} to itself, which needs no link"
            )
        if not (cost > 0 and isfinite(cost)):
            raise TopologyError(
                f"the link {one}–{other} costs {cost}; a cost is positive and finite"
            )
        earlier = self._neighbours[one].get(other)
        if earlier is not None and earlier != cost:
            raise TopologyError(f"the link {one}–{other} has two costs, {earlier} and {cost}")
        self._neighbours[one][other] = self._neighbours[other][one] = float(cost)

    def _refuse_unreachable(self) -> None:
        if not self._hosts:
            return
        root = min(self._hosts)
        cut_off = self.unreachable(root)
        if cut_off:
            raise TopologyError(
                f"topology {self.name!r} leaves rank {_listed(cut_off)} without any way to rank {root}; "
                "add a link to each group that is cut off"
            )

    @property
    def members(self) -> list[Member]:
        """All members, by rank."""
        return [Member(rank, self._hosts[rank]) for rank in sorted(self._hosts)]

    @property
    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted(self._hosts)

    @property
    def links(self) -> dict[Link, float]:
        """Cost of every link, the lower rank first."""
        return {
            (one, other): cost
            for one, costs in self._neighbours.items()
            for other, cost in sorted(costs.items())
            if one < other
        }

    @property
    def edges(self) -> list[Link]:
        """The links without their costs, as networkx names them."""
        return list(self.links)

    def host_of(self, rank: int) -> str:
        """Host of a rank."""
        self._know(rank)
        return self._hosts[rank]

    def neighbours(self, rank: int) -> list[int]:
        """Ranks that one may have a link to."""
        self._know(rank)
        return sorted(self._neighbours[rank])

    def allows(self, one: int, other: int) -> bool:
        """Say whether two processes may have a link."""
        return other in self._neighbours.get(one, ())

    def cost(self, one: int, other: int) -> float:
        """Cost of a link that there is."""
        try:
            return self._neighbours[one][other]
        except KeyError:
            raise TopologyError(
                f"topology {self.name!r} has no link between rank {one} and rank {other}"
            ) from None

    def unreachable(self, rank: int) -> list[int]:
        """Ranks without any way to this one."""
        self._know(rank)
        reached = self._table(rank)
        return [other for other in sorted(self._hosts) if other not in reached]

    def next_hop(self, source: int, target: int) -> int:
        """Rank to hand a frame to, so that it comes from `source` to `target`.

        All processes that know the same members and links agree, so that a frame never goes in a circle.
        """
        direct = self._neighbours.get(source, {}).get(target)
        # Any detour is two links at least; at equal cost fewer hops win. This spares the search in the usual case.
        if direct is not None and direct <= 2 * self._cheapest:
            return target
        self._know(source)
        self._know(target)
        if source == target:
            return target
        step = self._table(target).get(source)
        if step is None:
            raise TopologyError(
                f"topology {self.name!r} has no way from rank {source} to rank {target}"
            )
        return step.next_hop

    def route(self, source: int, target: int) -> Route:
        """The cheapest way: least cost, then fewest changes of host, then fewest hops, then lowest ranks."""
        ranks = [source]
        if source == target:
            self._know(source)
        while ranks[-1] != target:
            ranks.append(self.next_hop(ranks[-1], target))
        return Route(ranks, hosts=[self._hosts[rank] for rank in ranks])

    def route_cost(self, source: int, target: int) -> float:
        """Sum of the costs of the links of the cheapest way."""
        return sum(self.cost(one, other) for one, other in self.route(source, target).hops)

    def without(self, *ranks: int) -> Topology:
        """The same topology when these have died; whoever they connected may be cut off."""
        gone = set(ranks)
        return Topology(
            [member for member in self.members if member.rank not in gone],
            {link: cost for link, cost in self.links.items() if not gone.intersection(link)},
            self.name,
            check=False,
        )

    def _know(self, rank: int) -> None:
        if rank not in self._hosts:
            raise TopologyError(
                f"there is no rank {rank} in topology {self.name!r}; there are {_listed(self._hosts)}"
            )

    def _table(self, target: int) -> Table:
        # Filled on demand; two threads may both compute one, and get the same.
        table = self._tables.get(target)
        if table is None:
            table = self._tables[target] = distances(target, self._neighbours, self._hosts)
        return table

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self._hosts == other._hosts and self._neighbours == other._neighbours

    def __hash__(self) -> int:
        return hash((frozenset(self._hosts.items()), frozenset(self.links.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.members, self.links, self.name)

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {len(self._hosts)} processes, {len(self.links)} links>"


def _rebuilt(members: list[Member], links: dict[Link, float], name: str) -> Topology:
    return Topology(members, links, name, check=False)


def _listed(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:20]))
    return f"{shown} and {len(ordered) - 20} more" if len(ordered) > 20 else shown or "none"
