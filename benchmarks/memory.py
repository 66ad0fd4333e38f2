"""Memory of all processes while 800 MB are captured by the tasks of 2 and of 8 workers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

import onehop
from benchmarks.measure import Report, big_array


def proportional_bytes(pids: list[int]) -> int:
    """Anonymous and shared memory of processes; a page that several map counts once in sum."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def available_bytes() -> int:
    """What the kernel says is left; unmapped pages of an arena are in this one too."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable")


def main() -> None:
    report = Report("memory of all processes, 800 MB captured")
    for workers in (2, 8):
        with onehop.Cluster(workers) as cluster:
            cluster.everywhere(lambda: float(np.ones(10).sum()))
            pids = [os.getpid(), *(worker.pid for worker in cluster.workers)]
            before, available = proportional_bytes(pids), available_bytes()
            array = big_array()

            def whole(k: int, array: object = array) -> float:
                return float(np.asarray(array)[k % 2 :: 512].sum())

            list(cluster.map(whole, range(8 * workers), batch_size=1))
            after = proportional_bytes(pids)
            used = available - available_bytes()
            report.say(
                f"  {workers} workers: {(after - before) / 1e6:,.0f} MB; the system has {used / 1e6:,.0f} MB less"
            )
            report.figure(
                f"{workers} workers",
                (after - before) / array.nbytes,
                "× the object",
                2.1,
                "its own and one copy",
            )
            del array, whole
    report.end()


if __name__ == "__main__":
    main()
