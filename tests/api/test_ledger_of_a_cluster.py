"""The ledger and the routes, as a user reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onehop
from tests.support import assert_books_balance


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def nested(rank: int, array: Any) -> float:
    return float(onehop.current()[rank].call(np.sum, array))


def test_every_payload_has_a_record(cluster: Any) -> None:
    array = np.ones(200_000)
    with cluster.ledger.watch() as watch:
        cluster[2].call(np.sum, array)
    records = watch.records()
    moved = [r for r in records if r.outcome == "moved" and r.medium == "memory"]
    assert sum(r.size_bytes for r in moved) == pytest.approx(1_600_000, abs=8192)
    attached = [r for r in records if r.outcome == "attached"]
    assert any((r.source, r.target) == (1, 2) for r in attached)
    assert {r.message for r in records} >= {"call", "result"}
    for record in records:
        assert record.end_ns >= record.start_ns > 0
        assert record.count >= 1
        assert record.medium in ("memory", "unix", "inproc")
        assert record.outcome in ("moved", "attached", "avoided")


def test_totals_are_sums_of_records(cluster: Any) -> None:
    with cluster.ledger.watch() as watch:
        for k in range(20):
            cluster[2 + k % 2].call(nested, 3 - k % 2, np.full(20_000, float(k)))
    for outcome in ("moved", "attached", "avoided"):
        for medium in ("memory", "unix"):
            assert watch.total(outcome, medium=medium) == sum(
                r.size_bytes for r in watch.records() if (r.outcome, r.medium) == (outcome, medium)
            )


def test_avoided(cluster: Any) -> None:
    array = np.ones(200_000)
    cluster[2].call(np.sum, array)
    with cluster.ledger.watch() as watch:
        for _ in range(5):
            cluster[2].call(np.sum, array)
    assert watch.total("moved", medium="memory") == 0
    assert watch.total("avoided") >= 5 * 1_600_000


def test_between_processes_and_hosts(cluster: Any) -> None:
    cluster[2].call(nested, 3, np.ones(100_000))
    between = cluster.ledger.between_processes()
    assert (1, 2) in between
    assert (2, 3) in between
    shown = str(between)
    assert "1" in shown
    assert "unix" in shown or "memory" in shown
    hosts = cluster.ledger.between_hosts()
    assert str(hosts)
    html = getattr(hosts, "_repr_html_", lambda: "<table>")()
    assert "<script" not in html


def test_routes(cluster: Any) -> None:
    planned = cluster.route(2, 3)
    assert list(planned.ranks) == [2, 3]
    assert "2" in str(planned)
    future = cluster[2].submit(abs, -1)
    future.result()
    happened = future.route()
    assert list(happened.ranks)[:2] == [1, 2]
    with pytest.raises((LookupError, onehop.OnehopError)):
        cluster.route(2, 99)


def test_the_route_of_a_nested_call(cluster: Any) -> None:
    def one() -> int:
        return int(onehop.current()[3].call(two))

    def two() -> int:
        return int(onehop.current()[2].call(onehop.rank))

    future = cluster[2].submit(one)
    assert future.result() == 2
    shown = str(future.route())
    assert all(str(rank) in shown for rank in (1, 2, 3))


def test_balance_after_all_kinds_of_traffic(cluster: Any) -> None:
    array = np.random.default_rng(0).random(100_000)
    for k in range(10):
        cluster[2].call(nested, 3, array)
        array[k] += 1
        list(cluster.map(abs, range(100)))
        cluster.submit(np.add, array, 1).result()
        with pytest.raises(ZeroDivisionError):
            cluster[3].call(divmod, 1, 0)
    cluster.share(array)
    assert_books_balance(cluster)


def test_records_of_one_call(cluster: Any) -> None:
    future = cluster[2].submit(nested, 3, np.ones(100_000))
    future.result()
    all_records = cluster.ledger.records()
    causes = {r.cause for r in all_records if r.cause is not None}
    assert causes
    one = cluster.ledger.records(cause=next(iter(causes)))
    assert 0 < len(one) < len(all_records)


def test_a_ledger_can_be_read_after_the_end(clusters: Any) -> None:
    cluster = clusters(1)
    cluster[2].call(np.sum, np.ones(100_000))
    cluster.close()
    assert cluster.ledger.total("moved", medium="memory") >= 800_000
    assert str(cluster.ledger.between_hosts())
