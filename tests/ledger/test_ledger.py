"""Merged books: any order, any repetition, the same totals. Must never start a process."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onehop.errors import ProtocolError
from onehop.ledger import Book, Ledger, Tally, TransferRecord
from onehop.ledger.records import TotalKey


def _record(number: int, rank: int) -> TransferRecord:
    return TransferRecord(
        ("call", "blob", "result")[number % 3],
        (rank, number),
        None,
        rank,
        1 + (rank + number) % 3,
        ("unix", "memory")[number % 2],
        ("moved", "attached", "avoided")[number % 3],
        1,
        number * rank,
        number,
        number + 1,
    )


def _wired(export: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(export))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 7), st.randoms(), st.data()
)
def test_any_order_of_merging_gives_the_same(
    sizes: list[int], limit: int, generator: random.Random, data: st.DataObject
) -> None:
    exports: list[tuple[int, Any]] = []
    expected: list[TransferRecord] = []
    for rank, size in enumerate(sizes, start=2):
        book = Book()
        for number in range(size):
            expected.append(_record(number, rank))
            book.note(*expected[-1])
            if data.draw(st.booleans()):
                exports.append((rank, book.export(limit=limit)))
        while (export := book.export(limit=limit)).following < export.noted:
            exports.append((rank, export))
        exports.append((rank, export))
    generator.shuffle(exports)
    ledger = Ledger(Book())
    for rank, export in exports + exports[:3]:
        ledger.merge(rank, _wired(export))
    sums: dict[TotalKey, Tally] = {}
    for record in expected:
        key = (record.message, record.source, record.target, record.medium, record.outcome)
        old = sums.get(key, Tally(0, 0, 0))
        sums[key] = Tally(old[0] + 1, old[1] + 1, old[2] + record.size_bytes)
    assert ledger._totals() == sums
    assert sorted(ledger.records()) == sorted(expected)  # none twice, none missing
    starts = [record.start_ns for record in ledger.records()]
    assert starts == sorted(starts)
    assert ledger.dropped == 0


def _pair(**options: Any) -> tuple[Book, Book, Ledger]:
    """The director's book, a worker's book, and the director's ledger, which pulls the worker's."""
    own, other = Book(), Book()

    def pull() -> None:
        while ledger.merge(2, _wired(other.export(ledger.following(2), limit=3))):
            pass

    hosts = {1: "L", 2: "R", 3: "R"}
    ledger = Ledger(own, pull, hosts.__getitem__, **options)
    return own, other, ledger


def _tell_a_story(own: Book, other: Book) -> None:
    own.note("blob", (1, 5), None, 1, 2, "memory", "moved", 1, 500, 90, 95, "bands")
    own.note("call", (1, 5), None, 1, 2, "unix", "moved", 1, 230, 100, 110, "bands")
    own.note("blob", (1, 5), None, 1, 2, "memory", "attached", 1, 800_000_000, 105, 110, "bands")
    other.note("call", (2, 1), (1, 5), 2, 3, "unix", "moved", 1, 120, 200, 210, "rank")
    other.note("result", (2, 1), (1, 5), 3, 2, "unix", "moved", 1, 60, 300, 310, "rank")
    other.note("result", (1, 5), None, 2, 1, "unix", "moved", 1, 90, 400, 410, "bands")
    own.note("call", (1, 6), None, 1, 3, "unix", "moved", 1, 210, 120, 130, "other")


def test_reading_brings_the_news_of_others() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    assert ledger.total("moved", medium="unix") == 230 + 120 + 60 + 90 + 210
    assert ledger.total("attached") == 800_000_000
    assert ledger.total("avoided") == 0
    assert ledger.total() == 800_000_000 + 1210
    assert ledger.total(source=2) == 210
    assert ledger.total(target=3, message="call") == 330
    assert ledger.count("moved") == 6
    assert ledger.count("moved", source=3) == 1
    other.note("call", None, None, 2, 3, "unix", "moved", 1, 1, 500, 500)
    assert ledger.count("moved") == 7


def test_records_are_given_in_time_order_and_by_property() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    starts = [record.start_ns for record in ledger.records()]
    assert starts == [90, 100, 105, 120, 200, 300, 400]
    assert [record.message for record in ledger.records(cause=(1, 5))] == [
        "blob",
        "call",
        "blob",
        "result",
    ]
    assert ledger.records(message="call", source=2)[0].label == "rank"
    assert ledger.records(medium="memory", outcome="attached", target=2)[0].end_ns == 110
    assert ledger.records(target=9) == []


def test_own_news_are_not_counted_twice() -> None:
    book = Book()
    ledger = Ledger(book, rank=1)
    book.note("call", None, None, 1, 2, "unix", "moved", 1, 5, 0, 0)
    assert not ledger.merge(1, book.export())
    assert ledger.total() == 5
    assert len(ledger.records()) == 1


@pytest.mark.parametrize("method", ["total", "count", "records"])
def test_a_misspelt_outcome_is_no_zero(method: str) -> None:
    with pytest.raises(ValueError, match="no outcome 'mvoed'; there are moved, attached, avoided"):
        getattr(Ledger(Book()), method)(outcome="mvoed")


def test_traffic_between_processes_and_hosts() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    traffic = ledger.between_processes()
    assert list(traffic) == [(1, 2), (1, 3), (2, 1), (2, 3), (3, 2)]
    assert traffic[1, 2] == {
        ("memory", "moved"): 500,
        ("memory", "attached"): 800_000_000,
        ("unix", "moved"): 230,
    }
    assert traffic[1, 2].moved_bytes == 730
    hosts = ledger.between_hosts()
    assert list(hosts) == [("L", "R"), ("R", "L"), ("R", "R")]
    assert hosts["R", "R"].total(medium="unix") == 180
    assert hosts["R", "R"].count() == 2
    assert hosts.total() == traffic.total() == ledger.total()
    assert hosts.total("attached", "memory") == 800_000_000


def test_a_watch_sees_what_happened_inside() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    with ledger.watch() as seen:
        assert seen.total() == 0
        assert seen.records() == []
        _tell_a_story(own, other)
        assert seen.total("attached") == 800_000_000
        with ledger.watch() as inner:
            own.note("call", (1, 9), None, 1, 2, "tcp", "moved", 2, 77, 900, 910)
        other.note("call", (1, 9), None, 2, 1, "tcp", "moved", 1, 23, 920, 930)
    own.note("call", (1, 10), None, 1, 2, "tcp", "moved", 1, 5000, 950, 960)
    assert inner.total() == 77
    assert inner.count() == 2
    assert [record.cause for record in inner.records()] == [(1, 9)]
    assert seen.total(medium="tcp") == 100
    assert len(seen.records()) == 9
    assert list(inner.between_hosts()) == [("L", "R")]
    assert seen.dropped == 0
    assert [hop.what for hop in inner.journey((1, 9))] == ["call"]


def test_a_watch_counts_what_is_no_longer_kept() -> None:
    own, other = Book(kept_records=10), Book(kept_records=10)

    def pull() -> None:
        ledger.merge(2, other.export(ledger.following(2)))

    ledger = Ledger(own, pull, kept_records=10)
    for _ in range(30):
        own.note("call", None, None, 1, 2, "unix", "moved", 1, 1, 0, 0)
    with ledger.watch() as seen:
        for _ in range(25):
            own.note("call", None, None, 1, 2, "unix", "moved", 1, 1, 1, 1)
            other.note("result", None, None, 2, 1, "unix", "moved", 1, 10, 2, 2)
    assert seen.total() == 25 + 250
    assert (len(seen.records()), seen.dropped) == (20, 30)
    assert ledger.dropped == 30 + 30


def test_a_watch_that_was_not_entered_says_how() -> None:
    with pytest.raises(RuntimeError, match=r"with ledger\.watch"):
        Ledger(Book()).watch().total()


def test_the_newest_records_of_others_are_kept() -> None:
    ledger = Ledger(Book(), kept_records=8)
    books = {2: Book(), 3: Book()}
    for number in range(40):
        books[2 + number % 2].note(
            "call", None, None, 2, 3, "unix", "moved", 1, number, number, number
        )
    for rank, book in books.items():
        ledger.merge(rank, book.export())
    assert [record.start_ns for record in ledger.records()] == list(range(32, 40))
    assert ledger.total() == sum(range(40))
    assert ledger.dropped == 32


def test_what_a_dead_process_had_told_stays_and_the_gap_is_named() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    before = ledger.total()
    ledger.mark_lost(2)
    assert ledger.lost == [2]
    assert ledger.total() == before
    assert "without the last news of rank 2" in str(ledger.between_hosts())
    assert "without the last news of rank 2" in str(ledger)
    with ledger.watch() as seen:
        pass
    assert seen.lost == [2]


@pytest.mark.parametrize("report", [(), (0, 1, [["call"]], []), (0, 1, [], [["x"]]), (0, 1, 2, 3)])
def test_an_unreadable_report_is_refused_whole(report: Any) -> None:
    ledger = Ledger(Book())
    with pytest.raises(ProtocolError, match="rank 2 sent a report"):
        ledger.merge(2, report)
    assert ledger.records() == []
    assert ledger.following(2) == 0


def test_a_story_is_a_call_and_all_that_it_led_to() -> None:
    own, other, ledger = _pair()
    _tell_a_story(own, other)
    assert [record.start_ns for record in ledger.story((1, 5))] == [90, 100, 105, 200, 300, 400]
    assert [record.start_ns for record in ledger.story((2, 1))] == [200, 300]
    assert ledger.story((7, 7)) == []
    assert ledger.journey((1, 5)).path == "1 → 2 → 3 → 2 → 1"
