"""Members: ranks, workers, hosts, joining and leaving, two clusters, none at all."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onehop
from onehop.errors import ClusterClosed, OnehopError
from tests.support import PATIENCE, eventually, is_alive

_local: dict[str, Any] = {}


def remember(value: Any) -> None:
    _local["value"] = value


def recall() -> Any:
    return _local.get("value")


def append_line(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text + "\n")


def ranks(processes: Any) -> list[int]:
    return [getattr(process, "rank", process) for process in processes]


def chain() -> Any:
    return onehop.current()[3].call(onehop.rank)


def test_ranks_and_processes(cluster: Any) -> None:
    assert onehop.rank() == 1
    assert ranks(cluster.workers) == [2, 3]
    assert ranks(cluster.processes) == [1, 2, 3]
    assert cluster.everywhere(onehop.rank) == [2, 3]
    assert cluster[2].call(onehop.rank) == 2
    assert cluster[1].call(onehop.rank) == 1
    assert cluster[2].rank == 2
    assert cluster[2].pid == cluster[2].call(os.getpid) != os.getpid()
    assert cluster[3].host
    assert ranks(cluster.host_of(2).processes) == [1, 2, 3]
    assert len(cluster.hosts) == 1
    assert socket.gethostname() in repr(cluster.hosts) or socket.gethostname() in str(
        cluster[2].host
    )


def test_no_such_rank(cluster: Any) -> None:
    with pytest.raises((IndexError, KeyError, OnehopError), match="9"):
        cluster[9]
    with pytest.raises((IndexError, KeyError, OnehopError)):
        cluster[0]


def test_representations_say_something(cluster: Any) -> None:
    assert "2" in repr(cluster)
    assert "2" in repr(cluster[2])
    future = cluster.submit(abs, -1)
    future.result()
    assert "onehop" in repr(future).lower() or "Future" in repr(future)


def test_submit_call_cast(cluster: Any, tmp_path: Path) -> None:
    assert cluster[2].submit(abs, -3).result() == 3
    path = tmp_path / "out"
    assert cluster[2].cast(append_line, str(path), "cast") is None
    eventually(path.exists, 10)
    cluster[2].cast(lambda: 1 / 0)  # nobody hears of it but the worker's stderr
    assert cluster[2].call(abs, -1) == 1


def test_casts_and_calls_to_one_worker_keep_their_order(cluster: Any) -> None:
    for k in range(50):
        cluster[2].cast(remember, k)
        assert cluster[2].call(recall) == k


def test_everywhere(cluster: Any) -> None:
    cluster.everywhere(remember, "x")
    assert cluster.everywhere(recall) == ["x", "x"]
    with pytest.raises(ZeroDivisionError):
        cluster.everywhere(divmod, 1, 0)


def test_workers_talk_straight(cluster: Any) -> None:
    assert cluster[2].call(lambda: onehop.current()[3].call(onehop.rank)) == 3
    assert cluster[2].call(chain) == 3
    assert cluster[2].call(lambda: ranks(onehop.current().workers)) == [2, 3]
    with cluster.ledger.watch() as watch:
        size = cluster[2].call(lambda: int(onehop.current()[3].call(np.ones, 100_000).size))
    assert size == 100_000
    moved = [r for r in watch.records() if r.size_bytes >= 800_000 and r.outcome != "avoided"]
    assert {(r.source, r.target) for r in moved} <= {(3, 2), (3, 3)}


def test_add_and_remove(cluster: Any) -> None:
    (added,) = cluster.add_workers(1)
    assert added.rank == 4
    assert added.call(onehop.rank) == 4
    assert ranks(cluster.workers) == [2, 3, 4]
    pid = cluster[2].pid
    cluster.remove_workers(2)
    assert ranks(cluster.workers) == [3, 4]
    eventually(lambda: not is_alive(pid), 2.0 * PATIENCE)
    with pytest.raises((IndexError, OnehopError)):
        cluster[2].call(abs, 1)
    assert sorted(set(cluster.everywhere(onehop.rank))) == [3, 4]
    assert cluster[3].call(lambda: onehop.current()[4].call(onehop.rank)) == 4
    (again,) = cluster.add_workers(1)
    assert again.rank == 5


def test_removing_keeps_what_others_hold(cluster: Any) -> None:
    kept = cluster[2].call(np.full, 100_000, 7.0)
    there = cluster[2].submit(np.full, 100_000, 8.0)
    cluster[3].call(remember, kept)
    assert cluster[3].call(np.sum, there) == 800_000.0
    cluster.remove_workers(2)
    assert kept[0] == kept[-1] == 7.0
    kept += 1
    assert float(cluster[3].call(recall).sum()) == 700_000.0
    assert cluster[3].call(np.sum, kept) == 800_000.0


def test_a_worker_added_during_a_map_takes_part(clusters: Any) -> None:
    import time

    def who(_: int) -> int:
        time.sleep(0.01)
        return onehop.rank()

    cluster = clusters(1)
    results = cluster.map(who, iter(range(200)), batch_size=1)
    first = next(results)
    cluster.add_workers(1)
    assert {first, *results} == {2, 3}


def test_two_clusters(clusters: Any) -> None:
    one, other = clusters(1), clusters(2)
    array = np.ones(100_000)
    assert one[2].pid != other[2].pid
    assert one[2].call(np.sum, array) == other[3].call(np.sum, array) == 100_000
    result = one[2].call(np.full, 100_000, 2.0)
    assert other[2].call(np.sum, result) == 200_000
    one.close()
    assert other[2].call(np.sum, result) == 200_000
    assert result[5] == 2.0
    with pytest.raises(ClusterClosed):
        one[2].call(abs, 1)


def test_a_cluster_cannot_be_reached_by_another_s_future(clusters: Any) -> None:
    one, other = clusters(1), clusters(1)
    future = one[2].submit(np.ones, 1000)
    # taken over through this process, since the two know nothing of each other
    assert other[2].call(np.sum, future) == 1000


def test_a_cluster_inside_a_task(cluster: Any) -> None:
    def inner() -> list[int]:
        with onehop.Cluster(1) as own:
            return [own[2].call(onehop.rank), onehop.rank(), own[2].call(os.getpid)]

    rank, here, pid = cluster[3].call(inner)
    assert (rank, here) == (2, 3)
    assert not is_alive(pid)


def test_no_workers_at_all(clusters: Any) -> None:
    cluster = clusters(0)
    assert ranks(cluster.workers) == []
    array = np.zeros(10)
    here = os.getpid()
    assert cluster.submit(os.getpid).result() == here
    # values are passed as they would be to another process
    assert cluster.submit(lambda a: a.__iadd__(1), array).result()[0] == 1.0
    assert array[0] == 0.0
    with pytest.raises(ZeroDivisionError):
        cluster.submit(divmod, 1, 0).result()
    assert cluster[1].call(onehop.rank) == 1
    assert cluster.everywhere(onehop.rank) in ([], [1])
    assert cluster.submit(lambda: onehop.current().submit(abs, -4).result()).result() == 4


def test_bad_numbers_of_workers() -> None:
    bads: list[Any] = [-1, 1.5, "2"]
    for bad in bads:
        with pytest.raises((TypeError, ValueError)):
            onehop.Cluster(bad)


def test_as_many_as_cores() -> None:
    with onehop.Cluster() as cluster:
        assert len(cluster.workers) == len(os.sched_getaffinity(0))


def test_workers_see_path_folder_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONEHOP_TEST_COLOUR", "green")
    monkeypatch.syspath_prepend(str(tmp_path / "extra"))
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "onehop_test_module.py").write_text("answer = 42\n")
    with onehop.Cluster(1) as cluster:
        assert cluster[2].call(os.getcwd) == str(tmp_path)
        assert cluster[2].call(os.getenv, "ONEHOP_TEST_COLOUR") == "green"
        assert cluster[2].call(lambda: sys.path[0]) == sys.path[0]
        assert cluster[2].call(lambda: __import__("onehop_test_module").answer) == 42


def test_current_outside_of_a_task() -> None:
    with pytest.raises((OnehopError, RuntimeError, LookupError)):
        onehop.current()


def test_current_in_a_thread_of_a_task(cluster: Any) -> None:
    def work() -> list[int]:
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.extend([onehop.rank(), onehop.current()[3].call(onehop.rank)])
        )
        thread.start()
        thread.join()
        return found

    assert cluster[2].call(work) == [2, 3]


def make_barrier(parties: int) -> None:
    _local["barrier"] = threading.Barrier(parties)


def meet() -> int:
    return int(_local["barrier"].wait(timeout=20) >= 0)


def most_inside() -> int:
    import time

    _local["inside"] = _local.get("inside", 0) + 1
    time.sleep(0.005)
    most = int(_local["inside"])
    _local["inside"] -= 1
    return most


def test_several_tasks_at_a_time(clusters: Any) -> None:
    cluster = clusters(1, threads=4)
    cluster[2].call(make_barrier, 4)
    assert [f.result(timeout=30) for f in [cluster.submit(meet) for _ in range(4)]] == [1] * 4


def test_one_task_at_a_time_by_default(clusters: Any) -> None:
    cluster = clusters(1)
    assert [f.result() for f in [cluster.submit(most_inside) for _ in range(20)]] == [1] * 20


def test_start_that_fails_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    # the workers start while the program goes on, so the error may come with their first use
    with pytest.raises((OnehopError, OSError)), onehop.Cluster(1) as cluster:
        cluster[2].call(abs, 1)


def test_a_worker_stopped_by_a_signal_is_named(cluster: Any) -> None:
    future = cluster[2].submit(signal.pause)
    eventually(future.running, 10)
    os.kill(cluster[2].pid, signal.SIGTERM)
    error = future.exception(timeout=20)
    assert error is not None
    assert "SIGTERM" in str(error) or "15" in str(error)
