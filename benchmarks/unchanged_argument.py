"""An 800 MB array as argument of every call: what it costs more than a small argument."""

from __future__ import annotations

import itertools
from functools import partial

import onehop
from benchmarks import peers
from benchmarks.measure import SCALE, Report, big_array, median_s, medians_in_turns_s, seconds
from benchmarks.workloads import first


def main() -> None:
    report = Report("an unchanged 800 MB array as argument of every call")
    array, small = big_array(), big_array(0.0001 / SCALE)
    with onehop.Cluster(2) as cluster:
        worker = cluster[2]
        worker.call(first, small)
        report.time("first call with the array", seconds(lambda: worker.call(first, array)))
        found = medians_in_turns_s(
            {
                "call with a small argument": lambda: worker.call(first, small),
                "call with the array, unchanged": lambda: worker.call(first, array),
            },
            repeats=20,
        )
        base, unchanged = (report.time(name, value) for name, value in found.items())
        counter = itertools.count()

        def change_and_call() -> None:
            array[next(counter) * 7919 % array.size] += 1.0
            worker.call(first, array)

        changed = report.time(
            "one element changed before each call", median_s(change_and_call, 40, 3)
        )
        report.figure("extra time, unchanged", (unchanged - base) * 1e3, "ms", 1.0, "as measured")
        report.figure(
            "extra time, one element changed", (changed - base) * 1e3, "ms", 5.0, "as measured"
        )
    if report.peers:
        for name, peer in peers.each(peers.EVERY, report.say):
            peer.call(first, small)
            report.time(
                f"{name}, passed with the call", median_s(partial(peer.call, first, array), 2, 0)
            )
            held = peer.put(array)
            if held is not array:
                peer.call(first, held)
                report.time(f"{name}, put by hand", median_s(partial(peer.call, first, held), 20))
    report.end()


if __name__ == "__main__":
    main()
