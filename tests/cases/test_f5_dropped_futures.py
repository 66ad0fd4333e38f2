"""F5: values made on one worker, passed to another, and dropped; nothing stays."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import psutil

from tests.support import FULL_SIZE, PATIENCE, arena_bytes_everywhere, eventually, pids_of

ROUNDS = 10_000 if FULL_SIZE else 1_500


def create(k: int) -> np.ndarray[Any, Any]:
    return np.full(20_000, float(k))


def take(array: np.ndarray[Any, Any]) -> float:
    return float(array[0])


def resident_bytes(cluster: Any) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids_of(cluster))


def rounds(cluster: Any, count: int) -> None:
    pending = []
    for k in range(count):
        pending.append((k, cluster[3].submit(take, cluster[2].submit(create, k))))
        if len(pending) == 50:
            for number, future in pending:
                assert future.result(timeout=30) == number
            pending.clear()
    for number, future in pending:
        assert future.result(timeout=30) == number


def test_tables_are_empty_and_memory_is_flat(cluster: Any) -> None:
    gc.disable()  # reference counts alone must do
    try:
        rounds(cluster, 200)
        before = resident_bytes(cluster)
        rounds(cluster, ROUNDS)
        eventually(
            lambda: arena_bytes_everywhere(cluster) <= 1_000_000,
            1.0 * PATIENCE,
            "segments of dropped values stay in use",
        )
        # 1,500 rounds of 160 KB are 240 MB; a leak of one header per round would be far below 30 MB
        assert resident_bytes(cluster) - before < 30_000_000
    finally:
        gc.enable()


def test_a_dropped_future_that_nobody_took(cluster: Any) -> None:
    for k in range(50):
        cluster[2].submit(create, k)
    cluster[2].call(int)
    eventually(lambda: arena_bytes_everywhere(cluster) <= 1_000_000, 1.0 * PATIENCE)


def test_a_value_lives_as_long_as_its_future(cluster: Any) -> None:
    kept = cluster[2].submit(create, 7)
    kept.wait(10)
    for k in range(100):
        cluster[2].submit(create, k).wait(10)
    assert take(kept.result()) == 7.0
    assert cluster[3].call(take, kept) == 7.0
