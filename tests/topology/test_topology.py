"""Topologies and ways: against networkx, and by hand. Must never open a link."""

import pickle
import random
import subprocess
import sys

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onehop.errors import TopologyError
from onehop.topology import Member, Route, Topology, all_to_all, custom, shape_of, star, tree

HOSTS = [(1, "L"), (2, "R"), (3, "R"), (4, "S"), (5, "S")]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Member], dict[tuple[int, int], float]]:
    ranks = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9, unique=True))
    members = [Member(rank, draw(st.sampled_from("ABC"))) for rank in ranks]
    links: dict[tuple[int, int], float] = {}
    for one in ranks:
        for other in ranks:
            if one < other and draw(st.booleans()):
                # Integers as well as floats: equal costs must be drawn often.
                links[one, other] = draw(
                    st.one_of(
                        st.integers(1, 3).map(float),
                        st.floats(1e-9, 1e9, allow_nan=False, allow_infinity=False),
                    )
                )
    return members, links


def _networkx(members: list[Member], links: dict[tuple[int, int], float]) -> "networkx.Graph[int]":
    graph = networkx.Graph()
    graph.add_nodes_from(member.rank for member in members)
    graph.add_weighted_edges_from((one, other, cost) for (one, other), cost in links.items())
    return graph


@given(graphs())
def test_ways_are_as_short_as_those_of_networkx(
    drawn: tuple[list[Member], dict[tuple[int, int], float]],
) -> None:
    members, links = drawn
    graph = _networkx(members, links)
    topology = Topology(members, links, check=False)
    for source in topology.ranks:
        for target in topology.ranks:
            if not networkx.has_path(graph, source, target):
                with pytest.raises(TopologyError, match=f"no way from rank {source}"):
                    topology.route(source, target)
                continue
            way = topology.route(source, target)
            assert (way[0], way[-1]) == (source, target)
            assert len(set(way)) == len(way)
            assert all(topology.allows(*hop) for hop in way.hops)
            expected = networkx.shortest_path_length(graph, source, target, weight="weight")
            assert topology.route_cost(source, target) == pytest.approx(expected, rel=1e-9)


@given(graphs())
def test_with_equal_costs_ways_have_the_fewest_hops(
    drawn: tuple[list[Member], dict[tuple[int, int], float]],
) -> None:
    members, links = drawn
    graph = networkx.Graph(list(links))
    graph.add_nodes_from(member.rank for member in members)
    topology = Topology(members, dict.fromkeys(links, 1.0), check=False)
    for source, lengths in networkx.all_pairs_shortest_path_length(graph):
        for target, length in lengths.items():
            assert len(topology.route(source, target).hops) == length


@given(graphs())
def test_a_graph_that_cuts_somebody_off_is_refused(
    drawn: tuple[list[Member], dict[tuple[int, int], float]],
) -> None:
    members, links = drawn
    graph = _networkx(members, links)
    if networkx.is_connected(graph):
        assert Topology(members, links).unreachable(members[0].rank) == []
        return
    with pytest.raises(TopologyError, match="without any way") as caught:
        Topology(members, links)
    cut_off = set(graph) - networkx.node_connected_component(graph, min(graph))
    assert all(str(rank) in str(caught.value) for rank in cut_off)


@given(graphs(), st.randoms())
def test_processes_agree_whatever_the_order_of_what_they_know(
    drawn: tuple[list[Member], dict[tuple[int, int], float]], generator: random.Random
) -> None:
    members, links = drawn
    one = Topology(members, links, check=False)
    shuffled = list(links.items())
    generator.shuffle(shuffled)
    generator.shuffle(members)
    other = Topology(members, {(link[1], link[0]): cost for link, cost in shuffled}, check=False)
    assert one == other
    assert hash(one) == hash(other)
    for source in one.ranks:
        for target in set(one.ranks) - set(one.unreachable(source)):
            assert one.route(source, target) == other.route(source, target)


def test_all_to_all_is_direct() -> None:
    topology = all_to_all(HOSTS)
    assert topology.route(2, 3) == (2, 3)
    assert len(topology.links) == 10


def test_star_goes_over_the_director() -> None:
    assert str(star(HOSTS).route(2, 3)) == "2 → 1 → 3"
    assert star(HOSTS).neighbours(2) == [1]


def test_tree_goes_over_the_leaders() -> None:
    topology = tree([*HOSTS, (6, "L")])
    assert str(topology.route(3, 5)) == "3 → 2 → 1 → 4 → 5"
    assert topology.route(6, 3).relays == (1, 2)
    assert topology.route(3, 5).hosts == ("R", "R", "L", "S", "S")
    # A leader that died is followed by the next of its host.
    assert str(tree([member for member in HOSTS if member[0] != 2]).route(3, 5)) == "3 → 1 → 4 → 5"


def test_equal_costs_prefer_to_stay_on_a_host() -> None:
    members = [(1, "A"), (2, "B"), (3, "A"), (4, "A")]
    topology = custom([(1, 2), (1, 3), (2, 4), (3, 4)])(members)
    assert topology.route(1, 4) == (1, 3, 4)


def test_one_process_alone() -> None:
    for shape in (all_to_all, star, tree, custom([])):
        topology = shape([(1, "L")])
        assert topology.route(1, 1) == (1,)
        assert topology.next_hop(1, 1) == 1
        assert topology.route(1, 1).hops == ()
    assert all_to_all([]).ranks == []


@pytest.mark.parametrize(
    "graph",
    [
        [(1, 2), (2, 3, 5)],
        {(2, 1): 1, (3, 2): 5},
        networkx.Graph([(1, 2), (2, 3, {"weight": 5})]),
        networkx.DiGraph([(1, 2), (2, 3, {"weight": 5})]),
        networkx.MultiGraph([(1, 2), (2, 3, {"weight": 5})]),
        Topology([(1, "a"), (2, "a"), (3, "a")], {(1, 2): 1, (2, 3): 5}),
        lambda members: [(1, 2), (2, 3, 5)],
    ],
)
def test_graphs_of_ones_own(graph: object) -> None:
    topology = shape_of(graph)([(1, "a"), (2, "a"), (3, "a")])
    assert topology.links == {(1, 2): 1.0, (2, 3): 5.0}
    assert topology.route(3, 1) == (3, 2, 1)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ([(1, 2)], "leaves rank 3 without any way to rank 1"),
        ([(1, 2), (3, 3)], "links rank 3 to itself"),
        ([(1, 2), (2, 9)], "no rank 9"),
        ([(1, 2), (2, 3, -1)], "costs -1"),
        ([(1, 2), (2, 3, float("nan"))], "costs nan"),
        ([(1, 2), (2, 3, 1), (3, 2, 2)], "two costs"),
        ([(1, 2), (2, "three")], "graph of your own|topology of your own"),
        (7, "topology of your own"),
        ("ring", "no topology is called 'ring'; there are all_to_all, star, tree"),
    ],
)
def test_bad_graphs_are_refused_with_the_reason(graph: object, reason: str) -> None:
    with pytest.raises(TopologyError, match=reason):
        shape_of(graph)([(1, "a"), (2, "a"), (3, "a")])


def test_one_rank_twice_is_refused() -> None:
    with pytest.raises(TopologyError, match="twice"):
        all_to_all([(1, "a"), (1, "b")])


def test_a_death_leaves_what_can_still_be_reached() -> None:
    topology = custom([(1, 2), (2, 3), (1, 4)])([(rank, "a") for rank in (1, 2, 3, 4)])
    left = topology.without(2)
    assert left.route(1, 4) == (1, 4)
    assert left.unreachable(1) == [3]
    with pytest.raises(TopologyError, match="no way from rank 1 to rank 3"):
        left.next_hop(1, 3)
    with pytest.raises(TopologyError, match="no rank 2"):
        left.next_hop(1, 2)
    with pytest.raises(TopologyError, match="no link between rank 1 and rank 3"):
        left.cost(1, 3)


def test_routes_print_with_their_media() -> None:
    way = Route([2, 1, 3]).over(["unix", "tcp"])
    assert str(way) == "2 → 1 → 3 (unix, tcp)"
    assert way == (2, 1, 3)
    copy = pickle.loads(pickle.dumps(way))
    assert (copy, copy.media) == (way, ("unix", "tcp"))
    with pytest.raises(ValueError, match="1 media for 2 hops"):
        Route([2, 1, 3], ["unix"])


def test_a_topology_survives_pickling() -> None:
    topology = tree(HOSTS)
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    assert copy.name == "tree"


def test_routing_imports_no_networkx() -> None:
    code = "import sys, onehop.topology; print(sorted(m for m in ('networkx', 'rich', 'numpy', 'dataclasses', 'logging', 'asyncio') if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
