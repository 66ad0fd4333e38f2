"""100 tasks that capture an 800 MB array, two workers, first use: total time."""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np

import onehop
from benchmarks import peers, raw
from benchmarks.measure import Report, big_array, seconds
from benchmarks.workloads import identity


def main() -> None:
    report = Report("100 tasks that capture an 800 MB array, first use")
    array = big_array()
    write = report.time("one pwrite of it into a fresh memfd", raw.pwrite_s(array))

    def task(k: int) -> float:
        return float(array[k])

    with onehop.Cluster(2) as cluster:
        cluster.everywhere(lambda: np.zeros(1))
        totals = []
        for _ in range(3):
            # other memory each time, so that each is a first use; freed first, so that the arena starts cold
            array = array.copy()
            totals.append(seconds(lambda: list(cluster.map(task, range(100)))))
        with onehop.Cluster(2) as fresh:
            fresh.everywhere(lambda: np.zeros(1))
            first = report.time(
                "in a cluster just made", seconds(lambda: list(fresh.map(task, range(100))))
            )
        report.time("median of three first uses", statistics.median(totals))
        report.figure("total", first, "s", 1.5 * write + 0.1, "1.5 × pwrite + 0.1 s")
    if report.peers:
        for name, peer in peers.each(["joblib", "dask.distributed", "ray"], report.say):
            peer.map(identity, range(4))
            try:
                report.time(f"{name}, 10 tasks", seconds(partial(peer.map, task, range(10))))
            except Exception as error:
                report.say(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
    report.end()


if __name__ == "__main__":
    main()
