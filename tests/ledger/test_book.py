"""The book of one process: exact, bounded, and written by many threads. Must never time anything."""

import subprocess
import sys
import threading
from collections import Counter
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onehop.ledger import Book, Tally, TransferRecord
from onehop.ledger.book import FOLD_AFTER
from onehop.ledger.records import TotalKey

call_ids = st.none() | st.tuples(st.integers(1, 4), st.integers(0, 5))
records = st.builds(
    TransferRecord,
    message=st.sampled_from(["call", "result", "control", "blob"]),
    cause=call_ids,
    parent=call_ids,
    source=st.integers(1, 4),
    target=st.integers(1, 4),
    medium=st.sampled_from(["memory", "unix", "tcp"]),
    outcome=st.sampled_from(["moved", "attached", "avoided"]),
    count=st.integers(0, 10),
    size_bytes=st.integers(0, 2**45),
    start_ns=st.integers(0, 1000),
    end_ns=st.integers(1000, 2000),
    label=st.sampled_from(["", "f"]),
    note=st.sampled_from(["", "copied: bytearray"]),
)


def summed(noted: list[TransferRecord]) -> dict[TotalKey, Tally]:
    """Count by hand."""
    sums: dict[TotalKey, list[int]] = {}
    for record in noted:
        key = (record.message, record.source, record.target, record.medium, record.outcome)
        tally = sums.setdefault(key, [0, 0, 0])
        for place, amount in enumerate((1, record[7], record.size_bytes)):
            tally[place] += amount
    return {key: Tally(*tally) for key, tally in sums.items()}


@given(st.lists(records, max_size=40), st.integers(1, 10))
def test_totals_are_the_sums_of_everything_noted(noted: list[TransferRecord], kept: int) -> None:
    book = Book(kept_records=kept)
    for record in noted:
        book.note(*record)
    assert book.totals() == summed(noted)
    assert book.noted == len(noted)
    assert book.records() == noted[-kept:]
    assert book.dropped == max(0, len(noted) - kept)


def test_the_newest_are_kept_over_many_folds() -> None:
    book = Book(kept_records=100)
    many = 5 * FOLD_AFTER + 17
    for number in range(many):
        book.note("call", (1, number), None, 1, 2, "unix", "moved", 1, number, number, number)
        assert len(book._pending) <= FOLD_AFTER
        assert book._packed + len(book._tail) <= 100 + 2 * FOLD_AFTER
    assert [record.size_bytes for record in book.records()] == list(range(many - 100, many))
    assert book.dropped == many - 100
    assert book.totals() == {("call", 1, 2, "unix", "moved"): Tally(many, many, sum(range(many)))}


@settings(max_examples=10)
@given(st.lists(st.lists(records, min_size=1, max_size=15), min_size=2, max_size=5))
def test_totals_are_exact_from_many_threads(shares: list[list[TransferRecord]]) -> None:
    book = Book(kept_records=50)
    rounds = 200
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reading = threading.Event()
    exported: Counter[int] = Counter()

    def write(share: list[TransferRecord]) -> None:
        for _ in range(rounds):
            for record in share:
                book.note(*record)

    def read() -> None:
        while not reading.is_set():
            export = book.export()
            exported.update(range(export.first, export.following))
            assert sum(row[5] for row in export.totals) == export.noted

    threads = [threading.Thread(target=write, args=(share,)) for share in shares]
    reader = threading.Thread(target=read)
    try:
        for thread in (*threads, reader):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        reading.set()
        reader.join()
        sys.setswitchinterval(interval)
    everything = [record for share in shares for record in share] * rounds
    assert book.totals() == summed(everything)
    assert book.noted == len(everything)
    assert max(exported.values(), default=1) == 1


def test_noting_never_waits_for_the_lock() -> None:
    book = Book()
    with book._lock:  # as below a finalizer that runs while this very thread folds
        for _ in range(FOLD_AFTER + 5):
            book.note("blob", None, None, 1, 2, "memory", "attached", 1, 7, 0, 0)
        book.fold()
    assert book.noted == FOLD_AFTER + 5
    assert book.totals()["blob", 1, 2, "memory", "attached"].size_bytes == 7 * (FOLD_AFTER + 5)


@pytest.mark.parametrize("size", [2**70, numpy.int64(9)])
def test_integers_of_any_kind_are_kept(size: int) -> None:
    book = Book()
    for _ in range(2 * FOLD_AFTER):
        book.note("call", None, None, 1, 2, "unix", "moved", 1, size, 0, 0)
    assert {record.size_bytes for record in book.records()} == {size}
    assert book.totals()["call", 1, 2, "unix", "moved"].size_bytes == 2 * FOLD_AFTER * int(size)


def test_an_export_continues_where_the_last_ended() -> None:
    book = Book(kept_records=20)
    for number in range(10):
        book.note("call", None, None, 1, 2, "unix", "moved", 1, number, 0, 0)
    export = book.export(limit=6)
    assert (export.first, export.following, export.noted) == (0, 6, 10)
    assert [raw[8] for raw in book.export(limit=6).records] == [6, 7, 8, 9]
    assert list(book.export().records) == []
    assert [raw[8] for raw in book.export(since=3, limit=2).records] == [3, 4]
    assert book.export(since=99).first == 10
    for number in range(10, 40):
        book.note("call", None, None, 1, 2, "unix", "moved", 1, number, 0, 0)
    export = book.export()
    assert (export.first, export.following, export.noted) == (20, 40, 40)
    assert export.totals == [("call", 1, 2, "unix", "moved", 40, 40, sum(range(40)))]


def test_an_export_survives_the_wire() -> None:
    book = Book()
    book.note("call", (1, 2), None, 1, 2, "unix", "moved", 1, 2**40, 0, 5, "f", "copied: bytearray")
    export: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(book.export()))
    assert export[2][0][:3] == ["call", [1, 2], None]


def test_a_book_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Book(kept_records=0)


def test_a_book_imports_little() -> None:
    heavy = [
        "rich",
        "dataclasses",
        "logging",
        "asyncio",
        "numpy",
        "networkx",
        "psutil",
        "html",
        "re",
        "inspect",
    ]
    code = (
        "import sys, threading, typing; before = set(sys.modules); import onehop.ledger;"
        f"print(sorted(m for m in {heavy} if m in sys.modules and m not in before));"
        "print(sorted(m for m in sys.modules if m.startswith('onehop.ledger.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["[]", "['onehop.ledger.book', 'onehop.ledger.records']"]
