"""F1: a task kills its own process in the middle of a map."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from onehop.errors import CallLost, WorkerDied


def deadly(item: int) -> int:
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def deadly_once(item: int, marker: str) -> int:
    if item == 2 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def minus_one(error: BaseException) -> int:
    assert isinstance(error, WorkerDied)
    return -1


@pytest.mark.parametrize("workers", [1, 2])
def test_on_error_stands_in_for_the_item_that_killed(clusters: Any, workers: int) -> None:
    cluster = clusters(workers)
    assert list(cluster.map(deadly, [1, 2, 3, 4, 5], on_error=minus_one)) == [1, -1, 3, 4, 5]


def test_on_error_as_option(cluster: Any) -> None:
    assert list(cluster.options(on_error=minus_one).map(deadly, [1, 2, 3, 4, 5])) == [
        1,
        -1,
        3,
        4,
        5,
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_retry_runs_elsewhere(clusters: Any, tmp_path: Path, workers: int) -> None:
    cluster = clusters(workers)
    marker = str(tmp_path / "killed")
    results = cluster.map(deadly_once, [1, 2, 3, 4, 5], [marker] * 5, retries=1)
    assert list(results) == [1, 2, 3, 4, 5]


def test_retries_run_out(cluster: Any) -> None:
    results = cluster.map(deadly, [1, 2, 3], retries=1)
    assert next(results) == 1
    with pytest.raises(WorkerDied):
        next(results)


def test_the_error_names_worker_host_and_signal(cluster: Any) -> None:
    future = cluster[2].submit(deadly, 2)
    error = future.exception(timeout=20)
    assert isinstance(error, CallLost)
    assert error.may_have_started
    text = str(error)
    assert "SIGKILL" in text
    assert "2" in text
    host = cluster.host_of(3)
    assert str(getattr(host, "name", host)) in text


def test_others_are_not_disturbed_and_ranks_are_not_reused(cluster: Any) -> None:
    before = cluster[3].pid
    cluster[2].submit(deadly, 2).exception(timeout=20)
    assert cluster[3].call(os.getpid) == before
    added = cluster.add_workers(1)
    assert all(worker.rank > 3 for worker in added)
    assert 2 not in [worker.rank for worker in cluster.workers]
