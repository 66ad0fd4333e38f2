"""F12: all workers together use no more BLAS threads than there are cores."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def blas_threads(_: int = 0) -> int:
    import threadpoolctl

    a = np.ones((50, 50))
    _product = a @ a
    found = [
        int(pool["num_threads"])
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return max(found, default=1)


def imported_late() -> int:
    # the limit holds also for a library that the task itself brings in
    import scipy.linalg  # noqa: F401

    return blas_threads()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def test_four_workers_share_the_cores(clusters: Any) -> None:
    cluster = clusters(4)
    counts = cluster.everywhere(blas_threads)
    assert sum(counts) <= max(4, cores())
    assert all(count >= 1 for count in counts)
    assert sum(cluster.everywhere(imported_late)) <= max(4, cores())


def test_one_worker_has_them_all(clusters: Any) -> None:
    assert clusters(1).everywhere(blas_threads) == [cores()]


def test_the_user_can_raise_it(clusters: Any) -> None:
    # to the number of cores each, which is the most that the library itself takes
    assert clusters(2, blas_threads=cores()).everywhere(blas_threads) == [cores(), cores()]


def test_a_task_can_change_it_for_itself(clusters: Any) -> None:
    def two() -> int:
        import threadpoolctl

        with threadpoolctl.threadpool_limits(2):
            return blas_threads()

    assert clusters(2)[2].call(two) == 2
