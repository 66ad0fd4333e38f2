"""How many cores this process may use, and how many threads that leaves for each worker.

Must never know what the workers do with them.
"""

from __future__ import annotations

import os

BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def cores() -> int:
    """Cores that this process may use: its affinity, and the processor time of its control group."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        count = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group of version 2
    return count


def threads_per_worker(workers: int, wanted: int | None) -> dict[str, str]:
    """Environment by which numerical libraries of all workers together use no more than the cores.

    Libraries read it when they are loaded, so it has to be there before a worker imports anything. What
    the user's environment sets is left alone, unless `wanted` is given.
    """
    each = str(wanted if wanted is not None else max(1, cores() // workers))
    return {name: each for name in BLAS_VARIABLES if wanted is not None or name not in os.environ}
