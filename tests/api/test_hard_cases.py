"""What somebody found who tried to break it: each was a hang, a lost value or a dead worker once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

import onehop
from tests.support import run_script


class Unbuildable:
    """Can be sent, and cannot be rebuilt here."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be rebuilt")


def make_unbuildable() -> Any:
    return Unbuildable()


def test_an_item_that_cannot_be_sent_fails_alone_and_in_its_place(cluster: Any) -> None:
    items: list[Any] = list(range(60))
    items[30] = threading.Lock()
    results = cluster.map(str, items)
    time.sleep(0.3)  # items are sent meanwhile, by a thread that nobody waits for
    got = []
    with pytest.raises(TypeError, match="lock"):
        got.extend(results)
    replaced = list(cluster.map(abs, [*range(5), threading.Lock(), 6], on_error=lambda e: -1))
    assert replaced == [0, 1, 2, 3, 4, -1, 6]


def test_calls_that_end_while_they_wait_give_their_credit_back(clusters: Any) -> None:
    cluster = clusters(1)

    def waits() -> None:
        onehop.current()[1].call(time.sleep, 0.1)

    timed = cluster.options(timeout=0.05)
    for _ in range(70):
        with pytest.raises(TimeoutError):
            timed.submit(waits).result()
    assert cluster.submit(abs, -3).result(timeout=20) == 3


def test_an_interrupted_task_that_waits_ends_and_its_worker_lives(clusters: Any) -> None:
    cluster = clusters(2)
    pid = cluster[2].call(os.getpid)

    def waits() -> None:
        onehop.current()[3].call(time.sleep, 2)

    futures = [cluster.options(timeout=0.3)[2].submit(waits) for _ in range(4)]
    for future in futures:
        with pytest.raises(TimeoutError):
            future.result()
    time.sleep(1.0)  # longer than it takes to be called stuck
    assert cluster[2].call(os.getpid) == pid


def test_a_death_under_werror_reaches_nobody_else(clusters: Any) -> None:
    cluster = clusters(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(onehop.WorkerDied):
            cluster[2].call(os.kill, cluster[2].pid, signal.SIGKILL)
        assert [cluster.submit(abs, -k).result(timeout=20) for k in range(20)] == list(range(20))


def test_a_death_while_shutting_down(clusters: Any) -> None:
    cluster = clusters(2)
    doomed = cluster.submit(os._exit, 3)
    others = [cluster.submit(time.sleep, 0.05) for _ in range(6)]
    cluster.shutdown(wait=True)
    with pytest.raises(onehop.WorkerDied):
        doomed.result(timeout=0)
    for future in others:
        assert future.done()


@pytest.mark.parametrize("text", ["\udcff odd", "x" * 50_000_000], ids=["surrogate", "huge"])
def test_messages_of_exceptions_that_cannot_be_sent_as_they_are(cluster: Any, text: str) -> None:
    def fails() -> None:
        raise ValueError(text[:5] * (len(text) // 5))

    pid = cluster[2].call(os.getpid)
    with pytest.raises(onehop.RemoteError):
        cluster[2].call(fails)
    assert cluster[2].call(os.getpid) == pid


def test_a_task_may_replace_its_streams(cluster: Any) -> None:
    class Bad:
        def write(self, _text: str) -> int:
            raise RuntimeError("no")

        def flush(self) -> None:
            raise RuntimeError("no")

    def replace() -> int:
        sys.stdout = Bad()
        return 7

    def restore() -> None:
        sys.stdout = sys.__stdout__

    assert cluster[2].call(replace) == 7
    assert cluster[2].call(abs, -1) == 1
    cluster[2].call(restore)


def test_a_callback_may_call_and_wait(cluster: Any) -> None:
    done: list[int] = []

    def slow() -> int:
        time.sleep(0.2)
        return 4

    def callback(_future: Any) -> None:
        done.append(cluster.submit(abs, cluster.submit(slow)).result(timeout=20))

    cluster.submit(abs, -1).add_done_callback(callback)
    deadline = time.monotonic() + 20
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done == [4]


def test_awaiting_what_cannot_be_rebuilt_raises(cluster: Any) -> None:
    future = cluster[2].submit(make_unbuildable)

    async def wait() -> None:
        await future

    with pytest.raises(onehop.SerializationError):
        asyncio.run(asyncio.wait_for(wait(), 20))
    assert isinstance(future.exception(), onehop.SerializationError)


def test_waiting_for_our_futures_and_others_together(cluster: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ours, other = cluster.submit(time.sleep, 3), pool.submit(time.sleep, 0.2)
        done, _ = concurrent.futures.wait(
            [ours, other], return_when=concurrent.futures.FIRST_COMPLETED
        )
        assert done == {other}
        ours.interrupt()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_one_item_that_wants_to_end_everything(cluster: Any, kind: type[BaseException]) -> None:
    def fails(k: int) -> int:
        if k == 3:
            raise kind
        return k

    got = list(cluster.map(fails, range(10), batch_size=5, on_error=lambda e: -1))
    assert got == [0, 1, 2, -1, 4, 5, 6, 7, 8, 9]


def test_a_timeout_is_for_each_item(cluster: Any) -> None:
    def slow(k: int) -> int:
        time.sleep(3 if k == 3 else 0)
        return k

    got = list(cluster.options(timeout=1.0).map(slow, range(8), on_error=lambda e: -1))
    assert got == [0, 1, 2, -1, 4, 5, 6, 7]


def test_ended_calls_leave_no_timer_behind(cluster: Any) -> None:
    patient = cluster.options(timeout=3600)
    for k in range(500):
        assert patient.submit(abs, -k).result() == k
    assert len(cluster._process.loop._actions) < 20


def test_a_worker_that_closed_its_descriptors_dies_once(cluster: Any) -> None:
    future = cluster.submit(os.closerange, 3, 200)
    with pytest.raises(onehop.WorkerDied):
        future.result(timeout=20)
    assert cluster.submit(abs, -1).result(timeout=20) == 1


def test_many_interrupts_lose_nothing(tmp_path: Any) -> None:
    script = """
        import os, random, signal, threading, time
        import onehop

        cluster = onehop.Cluster(2)
        assert [w.call(abs, -1) for w in cluster.workers] == [1, 1]
        armed = False

        def interrupts():
            while True:
                time.sleep(random.random() * 0.01 + 0.002)
                if armed:
                    os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupts, daemon=True).start()
        hits, end = 0, time.monotonic() + 5
        while time.monotonic() < end:
            try:
                armed = True
                try:
                    while True:
                        [f.result() for f in [cluster.submit(abs, -i) for i in range(4)]]
                        list(cluster.map(abs, range(-4, 0)))
                        cluster[2].call(abs, -1)
                finally:
                    armed = False
            except KeyboardInterrupt:
                hits += 1
            assert cluster.submit(abs, -2).result(timeout=10) == 2
            assert cluster[3].call(abs, -3) == 3
        assert hits > 5, hits
        cluster.close()
        print("fine")
    """
    finished = run_script(script, tmp_path)
    assert finished.out.strip().endswith("fine")


def test_output_that_the_terminal_cannot_show(tmp_path: Any) -> None:
    script = """
        import onehop
        with onehop.Cluster(1) as cluster:
            cluster[2].call(print, "h\\u00e9llo")
    """
    finished = run_script(script, tmp_path, environment={"PYTHONIOENCODING": "ascii"})
    assert "h\\xe9llo" in finished.out


def test_values_that_went_round(clusters: Any) -> None:
    cluster = clusters(3)
    array = np.arange(100_000, dtype=np.float64)

    def forward(a: Any, ranks: list[int]) -> Any:
        if not ranks:
            a[0] += 1  # its own copy
            return a
        back = onehop.current()[ranks[0]].call(forward, a, ranks[1:])
        back[1] += 1
        return back

    got = cluster[2].call(forward, array, [3, 4, 2])
    assert got[0] == 1.0
    assert got[1] == 4.0
    assert array[0] == 0.0
    assert array[1] == 1.0


def test_a_task_whose_caller_died_is_ended(clusters: Any) -> None:
    cluster = clusters(2)

    def outer() -> None:
        onehop.current()[3].call(time.sleep, 60)

    cluster[2].submit(outer)
    time.sleep(0.3)
    os.kill(cluster[2].pid, signal.SIGKILL)
    # worker 3 has one slot, which the sleep held
    assert cluster[3].submit(abs, -1).result(timeout=10) == 1


def scaled(a: Any) -> float:
    return float(a[0]) * 2


def test_what_a_function_captured_is_let_go(cluster: Any) -> None:
    for k in range(12):
        array = np.full(500_000, float(k))

        def captures(array: Any = array) -> float:
            return scaled(array)

        scope: dict[str, Any] = {"scaled": scaled, "array": array}
        exec("task = lambda: scaled(array)", scope)
        assert cluster[2].call(scope["task"]) == cluster[2].call(captures) == 2.0 * k
    del scope, array, captures
    gc.collect()  # here the scope and its function name each other too
    deadline = time.monotonic() + 10
    while cluster._process.arena.in_use_bytes > 8_000_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cluster._process.arena.in_use_bytes <= 8_000_000


def test_a_middling_header_moves_once(cluster: Any) -> None:
    model = {f"matrix {k}": np.full(40, float(k)) for k in range(60)}
    for k in range(3):
        cluster[2].call(len, [model, k])
    with cluster.ledger.watch() as watch:
        for k in range(20):
            assert cluster[2].call(len, [model, 100 + k]) == 2
    assert watch.total("moved", medium="memory") == 0
    assert watch.total("moved", medium="unix") < 20 * 1500


def test_a_removed_worker_leaves_its_books(cluster: Any) -> None:
    cluster[3].call(np.ones, 100_000)
    cluster.remove_workers(3)
    assert cluster.ledger.lost == []
    assert cluster.ledger.total("moved", medium="memory", source=3) >= 800_000
