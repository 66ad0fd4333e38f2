"""R2, R3: a worker in a pure-Python loop still links and answers what is urgent; bulk never delays a ping."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onehop
from tests.support import FULL_SIZE, PATIENCE, eventually


def spin_until(stop: str, started: str) -> int:
    Path(started).touch()
    count = 0
    while not Path(stop).exists():
        for _ in range(100_000):
            count += 1
    return count


def ask_urgently(rank: int) -> tuple[int, float]:
    start = time.monotonic()
    answer = onehop.current()[rank].options(urgent=True).call(onehop.rank)
    return answer, time.monotonic() - start


def ask(rank: int) -> int:
    return int(onehop.current()[rank].call(onehop.rank))


@pytest.mark.timeout(60)
def test_a_first_call_to_a_busy_worker(cluster: Any, tmp_path: Path) -> None:
    stop, started = tmp_path / "stop", tmp_path / "started"
    busy = cluster[3].submit(spin_until, str(stop), str(started))
    try:
        eventually(started.exists, 10)
        answer, seconds = cluster[2].submit(ask_urgently, 3).result(timeout=1.0 * PATIENCE)
        assert answer == 3
        # the first one also opens the link
        assert seconds < 1.0 * PATIENCE
        answer, seconds = cluster[2].submit(ask_urgently, 3).result(timeout=1.0 * PATIENCE)
        assert seconds < 0.1 * PATIENCE
        queued = cluster[2].submit(ask, 3)
        time.sleep(0.2)
        assert not queued.done(), "an ordinary call ran beside the task"
        assert not busy.done()
    finally:
        stop.touch()
    assert busy.result(timeout=20) > 0
    assert queued.result(timeout=20) == 3


@pytest.mark.timeout(60)
def test_an_urgent_call_from_the_director(cluster: Any, tmp_path: Path) -> None:
    stop, started = tmp_path / "stop", tmp_path / "started"
    busy = cluster[2].submit(spin_until, str(stop), str(started))
    try:
        eventually(started.exists, 10)
        for _ in range(3):
            start = time.monotonic()
            assert cluster[2].options(urgent=True).call(onehop.rank) == 2
            assert time.monotonic() - start < 0.1 * PATIENCE
    finally:
        stop.touch()
    busy.result(timeout=20)


@pytest.mark.timeout(120)
def test_a_ping_beside_a_large_argument(cluster: Any) -> None:
    megabytes = 1000 if FULL_SIZE else 200
    big = np.ones(megabytes * 125_000)
    cluster[2].call(int)
    done: list[Any] = []
    sender = threading.Thread(target=lambda: done.append(cluster[2].submit(len, big)))
    sender.start()
    time.sleep(0.01)
    start = time.monotonic()
    cluster[2].options(urgent=True).call(int)
    seconds = time.monotonic() - start
    sender.join()
    assert seconds < 0.05 * PATIENCE
    assert done[0].result(timeout=60) == big.size


@pytest.mark.timeout(120)
def test_a_ping_beside_a_large_header(cluster: Any) -> None:
    """Many small objects: a large stream, hardly any buffers."""
    big = [str(k) for k in range(1_000_000)]
    cluster[2].call(int)
    future = cluster[3].submit(len, big)
    start = time.monotonic()
    cluster[2].call(int)
    assert time.monotonic() - start < 0.5 * PATIENCE
    assert future.result(timeout=60) == len(big)
