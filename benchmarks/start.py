"""From nothing to the first result, in a script that imports numpy at its top; beside a spawned pool."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Report

OURS = """
import time
import numpy as np
import onehop
def work(): return 1
if __name__ == "__main__":
    start = time.perf_counter()
    with onehop.Cluster(2) as cluster:
        cluster.submit(work).result()
        print(time.perf_counter() - start)
"""
THEIRS = """
import time
import numpy as np
import concurrent.futures, multiprocessing
def work(): return 1
if __name__ == "__main__":
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        pool.submit(work).result()
        print(time.perf_counter() - start)
"""


def main() -> None:
    report = Report("Cluster(2) to first result")
    times: dict[str, list[float]] = {"onehop": [], "concurrent.futures": []}
    with tempfile.TemporaryDirectory() as folder:
        scripts = {name: Path(folder, f"first_{k}.py") for k, name in enumerate(times)}
        for script, text in zip(scripts.values(), (OURS, THEIRS), strict=True):
            script.write_text(text)
        for _ in range(9):  # in turns, so that both meet the same machine
            for name, found in times.items():
                done = subprocess.run(
                    [sys.executable, str(scripts[name])],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                found.append(float(done.stdout.split()[-1]))
    ours = report.time("onehop", statistics.median(times["onehop"]))
    theirs = report.time(
        "concurrent.futures with spawn", statistics.median(times["concurrent.futures"])
    )
    report.figure(
        "to first result", ours * 1e3, "ms", theirs * 1e3, "concurrent.futures with spawn"
    )
    report.end()


if __name__ == "__main__":
    main()
