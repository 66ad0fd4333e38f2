"""Membership: ranks, states and reasons. Must never start a process."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onehop._protocol.membership import (
    DEAD,
    GONE,
    LEAVING,
    READY,
    STARTING,
    TRANSITIONS,
    Member,
    Membership,
)
from onehop.errors import ProtocolError

STATES = [STARTING, READY, LEAVING, GONE, DEAD]


def test_a_life_from_admission_to_leaving() -> None:
    table = Membership()
    assert table.admit().rank == 1
    worker = table.admit(host="r", pid=10)
    assert worker == Member(2, STARTING, host="r", pid=10)
    assert table.ready(2, "id", "r", 10).present
    assert table.leave(2, "removed by the user").reason == "removed by the user"
    gone = table.gone(2)
    assert gone.over
    assert gone.reason == "removed by the user"
    assert table.member(2).host == "r"
    assert [member.rank for member in table.present] == []


def test_ranks_are_never_used_again() -> None:
    table = Membership()
    table.admit()
    second = table.admit()
    table.dead(second.rank, "killed by signal 9")
    assert table.admit().rank == 3
    assert table.next_rank == 4


def test_a_replica_does_not_give_a_rank_that_it_heard_of() -> None:
    replica = Membership()
    replica.learn(Member(7, DEAD, reason="killed"))
    assert replica.admit().rank == 8


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", [READY, LEAVING, GONE, DEAD])
def test_only_the_transitions_of_the_table_are_possible(before: str, after: str) -> None:
    table = Membership()
    table.learn(Member(1, before, "id", "h", 5))
    moves = {
        READY: lambda: table.ready(1, "id", "h", 5),
        LEAVING: lambda: table.leave(1),
        GONE: lambda: table.gone(1),
        DEAD: lambda: table.dead(1, "killed"),
    }
    if after in TRANSITIONS[before]:
        assert moves[after]().state == after
    else:
        with pytest.raises(ProtocolError, match=f"rank 1 .*{before}.*cannot become {after}"):
            moves[after]()
        assert table.member(1).state == before


def test_what_is_told_may_skip_states_but_nobody_comes_back() -> None:
    replica = Membership()
    assert replica.learn(Member(2, STARTING)) is not None
    assert replica.learn(Member(2, LEAVING, "id", "h", 9)) is not None
    assert replica.learn(Member(2, LEAVING, "id", "h", 9)) is None
    replica.learn(Member(2, DEAD, "id", "h", 9, "killed by signal 9"))
    with pytest.raises(ProtocolError, match="killed by signal 9; it cannot become ready"):
        replica.learn(Member(2, READY, "id", "h", 9))


@pytest.mark.parametrize(
    "told",
    [
        (2, READY, "other", "h", 9),
        (2, READY, "id", "h", 10),
        (2, "asleep"),
        (0, READY),
        ("2", READY),
        (2,),
        (2, READY, "id", "h", 9, "", "more"),
    ],
)
def test_nonsense_is_refused(told: tuple[object, ...]) -> None:
    replica = Membership()
    replica.learn(Member(2, READY, "id", "h", 9))
    with pytest.raises(ProtocolError):
        replica.learn(told)
    assert replica.members == [Member(2, READY, "id", "h", 9)]


def test_a_rank_that_never_was() -> None:
    with pytest.raises(ProtocolError, match="never was a rank 4"):
        Membership().member(4)


def test_hosts_with_one_name_are_told_apart() -> None:
    table = Membership()
    for host_id in ("a", "b", "a"):
        table.ready(table.admit().rank, host_id, "node", 1)
    assert table.hosts() == {"a": [1, 3], "b": [2]}
    assert [table.host_label(rank) for rank in (1, 2, 3)] == ["node", "node (2)", "node"]
    assert table.host_label(table.admit().rank) == "?"


@given(st.data())
def test_a_replica_that_hears_every_change_agrees(data: st.DataObject) -> None:
    table, replica = Membership(), Membership()
    wire = msgspec.msgpack
    for _ in range(data.draw(st.integers(0, 25))):
        rank = data.draw(st.integers(1, table.next_rank))
        move = data.draw(st.sampled_from(["admit", "ready", "leave", "gone", "dead"]))
        try:
            if move == "admit":
                change = table.admit()
            elif move == "ready":
                change = table.ready(rank, f"id{rank % 2}", "h", rank)
            elif move == "dead":
                change = table.dead(rank, "killed")
            else:
                change = getattr(table, move)(rank)
        except ProtocolError:
            continue
        replica.learn(wire.decode(wire.encode(change)))
    assert replica.members == table.members
    assert replica.next_rank == table.next_rank
    late = Membership()
    for member in reversed(table.members):
        late.learn(member)
    assert late.members == table.members
