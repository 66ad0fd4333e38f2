"""The way of a call as records tell it."""

import random
from typing import Any

import pytest

from onehop.ledger import Journey, TransferRecord, route_of


def _record(
    message: str,
    source: int,
    target: int,
    at: int,
    cause: tuple[int, int] = (1, 1),
    parent: tuple[int, int] | None = None,
    **more: Any,
) -> TransferRecord:
    fields: dict[str, Any] = {
        "medium": "unix",
        "outcome": "moved",
        "size_bytes": 100,
        "label": "f",
    } | more
    return TransferRecord(
        message, cause, parent, source, target, fields["medium"], fields["outcome"], 1,
        fields["size_bytes"], at, at + 1, fields["label"], fields.get("note", ""),
    )  # fmt: skip


def _path(*records: TransferRecord) -> str:
    shuffled = list(records)
    random.Random(5).shuffle(shuffled)
    return route_of((1, 1), shuffled).path


def test_there_and_back() -> None:
    assert _path(_record("call", 1, 2, 0), _record("result", 2, 1, 9)) == "1 → 2 → 1"


def test_through_a_relay() -> None:
    assert (
        _path(
            _record("call", 2, 1, 0),
            _record("call", 1, 3, 1),
            _record("result", 3, 1, 8),
            _record("result", 1, 2, 9),
        )
        == "2 → 1 → 3 → 1 → 2"
    )


def test_nested_calls_that_overlap_are_walked_one_after_the_other() -> None:
    assert (
        _path(
            _record("call", 1, 2, 0),
            _record("call", 2, 3, 1, (2, 1), (1, 1)),
            _record("call", 2, 4, 2, (2, 2), (1, 1)),
            _record("result", 3, 2, 3, (2, 1), (1, 1)),
            _record("result", 4, 2, 4, (2, 2), (1, 1)),
            _record("result", 2, 1, 5),
        )
        == "1 → 2 → 3 → 2 → 4 → 2 → 1"
    )


def test_a_call_without_answer_breaks_the_line() -> None:
    cast = _record("call", 2, 3, 1, (2, 1), (1, 1))
    first = _record("call", 1, 2, 0)
    last = _record("result", 2, 1, 5)
    assert _path(first, cast, last) == "1 → 2 → 3, 2 → 1"
    assert _path(first, cast._replace(start_ns=7), last) == "1 → 2 → 1, 2 → 3"


def test_a_call_sent_again_is_seen_twice() -> None:
    again = route_of(
        (1, 1),
        [_record("call", 1, 2, 0), _record("call", 1, 3, 5), _record("result", 3, 1, 9)],
    )
    assert again.path == "1 → 2, 1 → 3 → 1"
    assert again.legs == [(1, 2), (1, 3, 1)]
    twice = route_of((1, 1), [_record("call", 1, 2, 0), _record("call", 1, 2, 5)])
    assert twice.path == "1 → 2, 1 → 2"


def test_what_a_hop_brought_along() -> None:
    journey = route_of(
        (1, 1),
        [
            _record("blob", 1, 2, 0, medium="memory", size_bytes=4000),
            _record("blob", 1, 1, 0, medium="memory", size_bytes=7, note="copied: bytearray"),
            _record("call", 1, 2, 1, size_bytes=200, label="bands"),
            _record("blob", 1, 2, 2, medium="memory", outcome="attached", size_bytes=800),
            _record("blob", 3, 2, 3, medium="memory", outcome="attached", size_bytes=60),
            _record("result", 2, 1, 9),
            _record("blob", 2, 1, 9, medium="memory", outcome="avoided", size_bytes=5),
        ],
    )
    assert journey.path == "1 → 2 → 1"
    there, fetched, back = journey
    assert (there.what, there.media) == ("call bands", ("unix", "memory"))
    assert (there.moved_bytes, there.attached_bytes, there.avoided_bytes) == (4207, 800, 0)
    assert there.notes == ("copied: bytearray",)
    assert (fetched.source, fetched.target, fetched.message) == (3, 2, "blob")
    assert back.avoided_bytes == 5
    text = str(journey)
    assert text.splitlines()[0] == "1 → 2 → 1"
    assert "4.2 kB" in text
    assert "copied: bytearray" in text
    assert len(text.splitlines()) == 3 + len(journey)


def test_a_process_that_calls_itself() -> None:
    journey = route_of(
        (1, 1),
        [
            _record("call", 1, 1, 0, medium="inproc"),
            _record("result", 1, 1, 5, medium="inproc"),
            _record("blob", 1, 1, 6, medium="memory", size_bytes=9),
        ],
    )
    assert journey.path == "1 → 1 → 1"
    assert [hop.moved_bytes for hop in journey] == [100, 109]


def test_depth_has_no_bound() -> None:
    depth = 3000
    records = []
    for level in range(depth):
        parent = (1, level) if level else None
        records.append(_record("call", level, level + 1, level, (1, level + 1), parent))
        records.append(
            _record("result", level + 1, level, 2 * depth - level, (1, level + 1), parent)
        )
    ranks = route_of((1, 1), records).ranks
    assert ranks == (*range(depth + 1), *reversed(range(depth)))


def test_a_circle_of_parents_ends() -> None:
    journey = route_of(
        (1, 1),
        [_record("call", 1, 2, 0, (1, 1), (2, 1)), _record("call", 2, 1, 1, (2, 1), (1, 1))],
    )
    assert len(journey) == 2


@pytest.mark.parametrize("call", [(3, 4), [3, 4]])
def test_nothing_known(call: Any) -> None:
    journey = route_of(call, [_record("call", 1, 2, 0)])
    assert isinstance(journey, Journey)
    assert len(journey) == 0
    assert str(journey) == "no records of call 3.4 are kept"
    assert journey.ranks == ()
