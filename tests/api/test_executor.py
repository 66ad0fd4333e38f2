"""The contract of concurrent.futures.Executor, which a Cluster keeps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import onehop
from onehop.errors import ClusterClosed, RemoteError
from tests.support import eventually


@pytest.fixture
def cluster(balanced: Any) -> Any:
    """One for all tests of this file."""
    return balanced


def slow(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


def fail(text: str) -> None:
    raise ValueError(text)


def wait_for_file(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.005)
    return "seen"


def keywords(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def test_it_is_an_executor(cluster: Any) -> None:
    assert isinstance(cluster, concurrent.futures.Executor)
    future = cluster.submit(pow, 2, 10)
    assert isinstance(future, concurrent.futures.Future)
    assert isinstance(future, onehop.Future)
    assert future.result() == 1024
    assert future.done()
    assert not future.running()
    assert future.exception() is None
    assert not future.cancelled()


def test_keywords_go_to_the_function(cluster: Any) -> None:
    got = cluster.submit(
        keywords, 1, timeout=2, retries=3, fn=4, function=5, self=6, urgent=7, target=8, on_error=9
    ).result()
    assert got == (
        (1,),
        {"timeout": 2, "retries": 3, "fn": 4, "function": 5, "self": 6, "urgent": 7, "target": 8, "on_error": 9},
    )  # fmt: skip
    got = cluster[2].call(keywords, 1, rank=2, timeout=3, self=4, f=5)
    assert got == ((1,), {"rank": 2, "timeout": 3, "self": 4, "f": 5})


def test_an_exception(cluster: Any) -> None:
    future = cluster.submit(fail, "no")
    with pytest.raises(ValueError, match="no") as caught:
        future.result()
    assert isinstance(caught.value, RemoteError)
    error = future.exception()
    assert isinstance(error, ValueError)
    assert "fail" in error.remote_traceback  # type: ignore[attr-defined]
    assert error.rank in (2, 3)  # type: ignore[attr-defined]


def test_the_remote_traceback_is_shown_to_the_user(cluster: Any) -> None:
    import traceback

    error = cluster.submit(fail, "no").exception()
    shown = "".join(traceback.format_exception(error))
    assert "raise ValueError(text)" in shown
    assert "rank" in shown or "worker" in shown


def test_timeouts(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "go"
    future = cluster.submit(wait_for_file, str(path))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0)
    path.touch()
    assert future.result(timeout=20) == "seen"


def test_cancel(clusters: Any, tmp_path: Path) -> None:
    cluster = clusters(1)
    path, ran = tmp_path / "go", tmp_path / "ran"
    running = cluster.submit(wait_for_file, str(path))
    eventually(running.running, 10)
    queued = [cluster.submit(ran.touch) for _ in range(20)]
    cancelled = [future.cancel() for future in queued]
    assert all(cancelled)
    for future in queued:
        assert future.cancelled()
        assert future.done()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
    path.touch()
    assert running.result(timeout=20) == "seen"
    assert cluster.submit(abs, -1).result(timeout=20) == 1
    assert not ran.exists(), "a cancelled call ran"
    assert not running.cancel()
    done = cluster.submit(int)
    done.result()
    assert not done.cancel()


def test_callbacks(cluster: Any) -> None:
    seen: list[Any] = []
    rang = threading.Event()

    def note(future: Any) -> None:
        seen.append(future.result())
        rang.set()

    future = cluster.submit(slow, 5, 0.05)
    future.add_done_callback(note)
    # without anyone waiting for the result
    assert rang.wait(20)
    assert seen == [5]
    future.add_done_callback(note)
    assert seen == [5, 5]


def test_a_callback_that_raises_or_submits(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    results: list[Any] = []
    rang = threading.Event()

    def wrong(_: Any) -> None:
        raise RuntimeError("in a callback")

    def note(future: Any) -> None:
        results.append(future.result())
        rang.set()

    def again(_: Any) -> None:
        cluster.submit(abs, -3).add_done_callback(note)

    future = cluster.submit(slow, 1, 0.02)
    future.add_done_callback(wrong)
    future.add_done_callback(again)
    assert future.result() == 1
    assert rang.wait(20)
    assert results == [3]
    assert "in a callback" in caplog.text


def test_wait_and_as_completed(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "go"
    held = cluster[2].submit(wait_for_file, str(path))
    quick = [cluster[3].submit(operator.mul, k, k) for k in range(10)]
    done, pending = concurrent.futures.wait(
        [held, *quick], return_when=concurrent.futures.FIRST_COMPLETED
    )
    assert done
    assert held in pending
    concurrent.futures.wait(quick)
    done, pending = concurrent.futures.wait([held], timeout=0.01)
    assert pending == {held}
    path.touch()
    completed = list(concurrent.futures.as_completed([held, *quick], timeout=20))
    assert set(completed) == {held, *quick}
    failing = [cluster.submit(fail, "x"), cluster.submit(slow, 1, 0.01)]
    done, _ = concurrent.futures.wait(failing, return_when=concurrent.futures.FIRST_EXCEPTION)
    assert failing[0] in done


def test_futures_of_two_clusters_and_of_threads_together(clusters: Any) -> None:
    one, other = clusters(1), clusters(1)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        futures = [pool.submit(slow, k, 0.02) for k, pool in enumerate((one, other, threads))]
        assert {f.result() for f in concurrent.futures.as_completed(futures, timeout=20)} == {
            0,
            1,
            2,
        }


def test_await(cluster: Any) -> None:
    async def main() -> list[int]:
        single = await cluster.submit(operator.add, 1, 2)
        several = await asyncio.gather(*(_one(cluster.submit(slow, k, 0.01)) for k in range(5)))
        wrapped = await asyncio.wrap_future(cluster.submit(abs, -9))
        in_loop = await asyncio.get_running_loop().run_in_executor(cluster, operator.neg, 4)
        with pytest.raises(ValueError, match="late"):
            await cluster.submit(fail, "late")
        return [single, *several, wrapped, in_loop]

    assert asyncio.run(main()) == [3, 0, 1, 2, 3, 4, 9, -4]


async def _one(future: Any) -> int:
    return int(await future)


def test_await_does_not_block_the_event_loop(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "go"

    async def main() -> str:
        async def open_the_gate() -> None:
            await asyncio.sleep(0.05)
            path.touch()

        gate = asyncio.create_task(open_the_gate())
        answer = await cluster.submit(wait_for_file, str(path))
        await gate
        return str(answer)

    assert asyncio.run(main()) == "seen"


def test_a_cancelled_await(clusters: Any, tmp_path: Path) -> None:
    cluster = clusters(1)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_one(cluster.submit(slow, 1, 60)), 0.1)

    asyncio.run(main())
    # the call was cancelled with its awaiter, so that the worker is free again
    assert cluster.submit(abs, -1).result(timeout=20) == 1


def test_future_wait(cluster: Any) -> None:
    """Waits without fetching the value, and hands the future on."""
    future = cluster.submit(slow, 4, 0.02)
    assert future.wait(20) is future
    assert future.done()
    late = cluster.submit(slow, 4, 0.5)
    with pytest.raises(TimeoutError):
        late.wait(0.01)
    failing = cluster.submit(fail, "x")
    assert failing.wait(20).done()


def test_shutdown_waits_for_what_is_pending(clusters: Any) -> None:
    cluster = clusters(2)
    futures = [cluster.submit(slow, k, 0.02) for k in range(10)]
    cluster.shutdown(wait=True)
    assert [future.result(timeout=0) for future in futures] == list(range(10))
    with pytest.raises(RuntimeError):
        cluster.submit(abs, 1)
    with pytest.raises(ClusterClosed):
        cluster[2].call(abs, 1)
    cluster.shutdown()
    cluster.close()


def test_shutdown_and_cancel(clusters: Any, tmp_path: Path) -> None:
    cluster = clusters(1)
    path = tmp_path / "go"
    running = cluster.submit(wait_for_file, str(path))
    eventually(running.running, 10)
    queued = [cluster.submit(abs, k) for k in range(50)]
    path.touch()
    cluster.shutdown(wait=True, cancel_futures=True)
    assert running.done()
    assert all(future.done() for future in queued)
    assert queued[-1].cancelled()


def test_shutdown_without_waiting(clusters: Any) -> None:
    cluster = clusters(1)
    future = cluster.submit(slow, 3, 0.1)
    cluster.shutdown(wait=False)
    assert future.result(timeout=20) == 3


def test_leaving_the_block_waits(clusters: Any) -> None:
    with onehop.Cluster(2) as cluster:
        future = cluster.submit(slow, 3, 0.1)
    assert future.result(timeout=0) == 3


def test_an_error_in_the_block_does_not_hang() -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), onehop.Cluster(1) as cluster:
        cluster.submit(time.sleep, 0.2)
        _ = 1 / 0
    assert time.monotonic() - start < 20


def test_close_cancels_or_ends_what_runs(clusters: Any) -> None:
    cluster = clusters(1)
    future = cluster.submit(time.sleep, 600)
    start = time.monotonic()
    cluster.close()
    assert time.monotonic() - start < 20
    assert future.done()


def test_code_written_for_an_executor() -> None:
    """As in the documentation of concurrent.futures."""

    def run(pool: concurrent.futures.Executor) -> dict[int, bool]:
        numbers = [112272535095293, 112582705942171, 115280095190773, 1099726899285419]
        return dict(zip(numbers, pool.map(is_prime, numbers), strict=True))

    with onehop.Cluster(2) as pool:
        found = run(pool)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert found == run(threads)


def is_prime(n: int) -> bool:
    return all(n % k for k in range(2, min(int(n**0.5), 100_000)))


def test_many_threads_submit(cluster: Any) -> None:
    results: dict[int, int] = {}

    def work(k: int) -> None:
        results[k] = sum(cluster.submit(abs, -j).result(timeout=40) for j in range(50))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: sum(range(50)) for k in range(8)}
