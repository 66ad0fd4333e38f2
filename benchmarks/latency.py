"""One call of a trivial function, beside a raw round trip; and what the ledger costs of it."""

from __future__ import annotations

import pickle
from functools import partial

import cloudpickle

import onehop
from benchmarks import peers, raw
from benchmarks.measure import Report, median_s, medians_in_turns_s
from benchmarks.workloads import nothing
from onehop.ledger import Book

NOTES = 100


def main() -> None:
    report = Report("worker.call of a trivial function")
    trivial = lambda: None  # noqa: E731
    book = Book()
    echo = raw.Echo()  # before the cluster: it forks
    with onehop.Cluster(2) as cluster:
        worker = cluster[2]
        found = medians_in_turns_s(
            {
                "raw blocking round trip of 100 bytes": echo.round_trip,
                "importable function": lambda: worker.call(nothing),
                "lambda": lambda: worker.call(trivial),
                "cloudpickle dumps + loads of the lambda": lambda: pickle.loads(
                    cloudpickle.dumps(trivial)
                ),
                f"{NOTES} records of the ledger": lambda: note_many(book),
            }
        )
        for name, value in found.items():
            report.time(name, value)
        trip, call, local, pickled, notes = found.values()
        nested = report.time("a worker calls a worker", worker.call(_nested_s, 3))
        report.figure("importable function", call / trip, "round trips", 4.0, "4 × raw")
        limit = 4.0 * trip + pickled
        report.figure("lambda", local * 1e6, "µs", limit * 1e6, "4 × raw + its pickling")
        report.say(f"  nested: {nested / trip:.2f} round trips")
        share = _records_of_a_call(cluster) * notes / NOTES / call * 100
        report.figure("recording", share, "% of a call", 2.0, "2 % of a call")
    echo.close()
    if report.peers:
        for name, peer in peers.each(peers.EVERY, report.say):
            report.time(name, median_s(partial(peer.call, nothing), 60, 20))
    report.end()


def _nested_s(rank: int) -> float:
    target = onehop.current()[rank]
    return median_s(lambda: target.call(nothing), 1500, 200)


def note_many(book: Book) -> None:
    for _ in range(NOTES):
        book.note("call", (1, 7), None, 1, 2, "unix", "moved", 1, 150, 1, 2)


def _records_of_a_call(cluster: onehop.Cluster) -> float:
    with cluster.ledger.watch() as watch:
        for _ in range(100):
            cluster[2].call(nothing)
    return sum(record.message in ("call", "result") for record in watch.records()) / 100


if __name__ == "__main__":
    main()
