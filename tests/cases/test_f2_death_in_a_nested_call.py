"""F2 (one host): a worker is killed while it holds data and serves a nested call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onehop
from onehop.errors import CallLost, WorkerDied
from tests.support import PATIENCE, eventually


def serve_for_ever(marker: str) -> None:
    Path(marker).touch()
    time.sleep(600)


def ask_neighbour(rank: int, marker: str) -> str:
    try:
        onehop.current()[rank].call(serve_for_ever, marker)
    except WorkerDied as error:
        return f"WorkerDied: {error}"
    return "no error"


def make(length: int) -> np.ndarray[Any, Any]:
    return np.arange(length, dtype=np.float64)


def keep(array: np.ndarray[Any, Any]) -> float:
    globals()["_kept"] = array
    return float(array[-1])


def test_the_caller_of_a_dead_server_learns_it(cluster: Any, tmp_path: Path) -> None:
    marker = tmp_path / "serving"
    future = cluster[2].submit(ask_neighbour, 3, str(marker))
    eventually(marker.exists, 10)
    os.kill(cluster[3].pid, signal.SIGKILL)
    text = future.result(timeout=2 * PATIENCE)
    assert text.startswith("WorkerDied")
    assert "3" in text
    assert "SIGKILL" in text


def test_the_caller_dies_while_it_waits(cluster: Any, tmp_path: Path) -> None:
    marker = tmp_path / "serving"
    future = cluster[2].submit(ask_neighbour, 3, str(marker))
    eventually(marker.exists, 10)
    os.kill(cluster[2].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        future.result(timeout=2 * PATIENCE)


def test_data_with_another_holder_is_taken_from_there(cluster: Any) -> None:
    future = cluster[2].submit(make, 100_000)
    assert cluster[3].call(keep, future) == 99_999.0
    os.kill(cluster[2].pid, signal.SIGKILL)
    eventually(lambda: 2 not in [worker.rank for worker in cluster.workers], 2 * PATIENCE)
    np.testing.assert_array_equal(future.result(timeout=2 * PATIENCE), make(100_000))


def test_data_without_another_holder_is_an_error_not_a_hang(cluster: Any) -> None:
    future = cluster[2].submit(make, 100_000)
    future.wait(10)
    os.kill(cluster[2].pid, signal.SIGKILL)
    eventually(lambda: 2 not in [worker.rank for worker in cluster.workers], 2 * PATIENCE)
    # The owner's memory may still be reachable on this host; then the value must be right.
    try:
        value = future.result(timeout=2 * PATIENCE)
    except CallLost as error:
        assert "2" in str(error)
    else:
        np.testing.assert_array_equal(value, make(100_000))
