"""A 200 MB array returned to the director, and touched there."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any

import onehop
from benchmarks import peers, raw
from benchmarks.measure import SCALE, Report, big_array, median_s
from benchmarks.workloads import make


def touch(array: Any) -> float:
    return float(array[:: mmap.PAGESIZE // 8].sum())


def get_and_touch(peer: peers.Peer, count: int) -> float:
    return touch(peer.call(make, count))


def main() -> None:
    report = Report("a 200 MB array returned to the director")
    count = int(200 * SCALE * 125_000)
    limit = report.time(
        "pwrite into a fresh memfd + first touch of a mapping",
        raw.pwrite_and_touch_s(big_array(200)),
    )
    with onehop.Cluster(2) as cluster:
        worker = cluster[2]
        build = report.time("making it there", worker.call(_making_s, count))
        whole = report.time(
            "call, and touch of every page", median_s(lambda: touch(worker.call(make, count)), 9, 0)
        )
        report.figure("returned", (whole - build) / limit, "× raw", 1.5, "pwrite + first touch")
    with onehop.Cluster(1) as cluster:
        cluster[2].call(make, 1)
        first = report.time(
            "the first one in a new cluster",
            median_s(lambda: touch(cluster[2].call(make, count)), 1, 0),
        )
        report.say(f"  first one, without the making: {(first - build) / limit:.2f} × raw")
    if report.peers:
        for name, peer in peers.each(peers.EVERY, report.say):
            report.time(name, median_s(partial(get_and_touch, peer, count), 3))
    report.end()


def _making_s(count: int) -> float:
    return median_s(lambda: make(count), 9)


if __name__ == "__main__":
    main()
