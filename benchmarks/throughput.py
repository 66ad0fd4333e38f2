"""Tiny tasks per second: through map, and through submit one by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import onehop
from benchmarks import peers
from benchmarks.measure import Report, seconds
from benchmarks.workloads import square


def rate(action: Callable[[int], Any], count: int, repeats: int = 5) -> float:
    action(min(count, 200))
    return count / statistics.median(seconds(lambda: action(count)) for _ in range(repeats))


def map_squares(peer: peers.Peer, count: int) -> None:
    peer.map(square, range(count))


def main() -> None:
    report = Report("tiny tasks per second")
    with onehop.Cluster(2) as cluster:

        def by_map(count: int) -> None:
            assert sum(1 for _ in cluster.map(square, range(count))) == count

        def by_submit(count: int) -> None:
            futures = [cluster.submit(square, k) for k in range(count)]
            assert futures[-1].result() == (count - 1) ** 2
            for future in futures:
                future.result()

        mapped = rate(by_map, 100_000)
        submitted = rate(by_submit, 5_000)
    report.say(f"  onehop map: {mapped:,.0f} /s")
    report.say(f"  onehop submit: {submitted:,.0f} /s")
    if report.peers:
        for name, peer in peers.each(peers.EVERY, report.say):
            count = {"joblib": 20_000, "concurrent.futures": 5_000}.get(name, 1_000)
            theirs = rate(partial(map_squares, peer), count, 3)
            report.say(f"  {name} map: {theirs:,.0f} /s")
            wanted = 3.0 if name == "joblib" else 10.0
            report.figure(f"map against {name}", mapped / theirs, "×", wanted, name, better="more")
            if isinstance(peer, peers.Futures):

                def by_pool(count: int, pool: Any = peer.pool) -> None:
                    futures = [pool.submit(square, k) for k in range(count)]
                    for future in futures:
                        future.result()

                theirs = rate(by_pool, 5_000)
                report.say(f"  {name} submit: {theirs:,.0f} /s")
                report.figure(
                    "submit against it", submitted / theirs, "×", 2.0, name, better="more"
                )
    report.end()


if __name__ == "__main__":
    main()
