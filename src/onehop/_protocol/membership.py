"""Who belongs to the cluster, and what became of whom: a table of states, with reasons.

PURE: events in, changes out. Must never start, ask or watch a process; engines and links do, and tell it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from onehop.errors import ProtocolError

DIRECTOR = 1
"""Rank of the process that the user's program runs in."""

STARTING = "starting"
READY = "ready"
LEAVING = "leaving"
GONE = "gone"
DEAD = "dead"

TRANSITIONS: Mapping[str, tuple[str, ...]] = {
    STARTING: (READY, LEAVING, DEAD),
    READY: (LEAVING, DEAD),
    LEAVING: (GONE, DEAD),
    GONE: (),
    DEAD: (),
}
"""What may follow each state. Who goes without having been asked to is dead, with whatever exit code."""


class Member(NamedTuple):
    """One process of the cluster, as it is now."""

    rank: int
    """Never used again after it."""
    state: str
    """``starting``, ``ready``, ``leaving``, ``gone`` or ``dead``."""
    host_id: str = ""
    """Same for processes that can share memory; found by trying, and empty until then."""
    host: str = ""
    """Name, for people; two hosts may have the same."""
    pid: int = 0
    """0 until known."""
    reason: str = ""
    """Why it left or died."""

    @property
    def present(self) -> bool:
        """It may still take part."""
        return self.state in (READY, LEAVING)

    @property
    def over(self) -> bool:
        """It will never take part again."""
        return not TRANSITIONS[self.state]

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        process = f" (process {self.pid})" if self.pid else ""
        why = f": {self.reason}" if self.reason else ""
        return f"rank {self.rank}{where}{process} is {self.state}{why}"


class Membership:
    """The table of members.

    The director decides with `admit`, `ready`, `leave`, `gone` and `dead`; each gives the changed member, to be told
    to the others, who `learn` it. A member that is over stays in the table, so that errors can say what became of it.
    """

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._next_rank = DIRECTOR

    @property
    def next_rank(self) -> int:
        """The rank that the next newcomer will get."""
        return self._next_rank

    def admit(self, host: str = "", pid: int = 0) -> Member:
        """Give a newcomer its rank; it is starting."""
        member = Member(self._next_rank, STARTING, host=host, pid=pid)
        self._next_rank += 1
        self._members[member.rank] = member
        return member

    def ready(self, rank: int, host_id: str, host: str, pid: int) -> Member:
        """Say that a process has proven itself and takes calls."""
        return self._move(rank, READY, host_id=host_id, host=host, pid=pid)

    def leave(self, rank: int, reason: str = "") -> Member:
        """Say that a process was asked to go."""
        return self._move(rank, LEAVING, reason=reason)

    def gone(self, rank: int, reason: str = "") -> Member:
        """Say that a process that was asked to go has gone."""
        return self._move(rank, GONE, **({"reason": reason} if reason else {}))

    def dead(self, rank: int, reason: str) -> Member:
        """Say that a process has ended without having been asked, or in another way than asked."""
        return self._move(rank, DEAD, reason=reason)

    def _move(self, rank: int, state: str, **facts: Any) -> Member:
        member = self.member(rank)
        if state not in TRANSITIONS[member.state]:
            raise ProtocolError(f"{member}; it cannot become {state}")
        member = self._members[rank] = member._replace(state=state, **facts)
        return member

    def learn(self, told: Sequence[Any]) -> Member | None:
        """Take in what the director tells of one member.

        Parameters
        ----------
        told : Member
            Or what a wire made of it.

        Returns
        -------
        Member or None
            The member if anything is new.

        Raises
        ------
        ProtocolError
            If that cannot have followed what is known: somebody is back from the dead, or is another process.
        """
        try:
            member = Member(*told)
        except TypeError as error:
            raise ProtocolError("what was told of a member cannot be read") from error
        if type(member.rank) is not int or member.rank < DIRECTOR:
            raise ProtocolError(f"no process has rank {member.rank!r}")
        if member.state not in TRANSITIONS:
            raise ProtocolError(
                f"rank {member.rank} is told to be {member.state!r}, which is no state"
            )
        known = self._members.get(member.rank)
        if known == member:
            return None
        if known is not None:
            # One who joins late is told the present only, so states in between may be missing.
            if member.state != known.state and member.state not in _followers(known.state):
                raise ProtocolError(f"{known}; it cannot become {member.state}")
            if (known.pid and member.pid != known.pid) or (
                known.host_id and member.host_id != known.host_id
            ):
                raise ProtocolError(f"{known}; told to be another process: {member}")
        self._members[member.rank] = member
        self._next_rank = max(self._next_rank, member.rank + 1)
        return member

    def member(self, rank: int) -> Member:
        """Give a member, also one that is over."""
        try:
            return self._members[rank]
        except KeyError:
            raise ProtocolError(f"there never was a rank {rank} in this cluster") from None

    def __contains__(self, rank: object) -> bool:
        return rank in self._members

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> list[Member]:
        """All that ever were, by rank; also what a newcomer is told."""
        return [self._members[rank] for rank in sorted(self._members)]

    @property
    def present(self) -> list[Member]:
        """Those that take part, by rank."""
        return [member for member in self.members if member.present]

    def in_state(self, *states: str) -> list[Member]:
        """Those in one of these states, by rank."""
        return [member for member in self.members if member.state in states]

    def hosts(self) -> dict[str, list[int]]:
        """Ranks that take part, by host id."""
        hosts: dict[str, list[int]] = {}
        for member in self.present:
            hosts.setdefault(member.host_id, []).append(member.rank)
        return hosts

    def host_label(self, rank: int) -> str:
        """Name of a rank's host, with a number where another host has the same name."""
        member = self.member(rank)
        return _labels(self.members).get((member.host, member.host_id), member.host or "?")


def _followers(state: str) -> set[str]:
    """Give all states that may come after one, at once or later."""
    found: set[str] = set()
    waiting = list(TRANSITIONS[state])
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += TRANSITIONS[one]
    return found


def _labels(members: Iterable[Member]) -> dict[tuple[str, str], str]:
    ids: dict[str, list[str]] = {}
    for member in members:
        if member.host_id and member.host_id not in ids.setdefault(member.host, []):
            ids[member.host].append(member.host_id)
    return {
        (host, host_id): host if number == 1 else f"{host} ({number})"
        for host, host_ids in ids.items()
        for number, host_id in enumerate(host_ids, start=1)
    }
