"""F7: SIGKILL to the director, or to its whole process group, while memory is shared."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.support import FULL_SIZE, PATIENCE, Script, eventually, is_alive, marked_processes

MEGABYTES = 1000 if FULL_SIZE else 150

SCRIPT = f"""
import ctypes, os, time
import numpy as np
import onehop

def hold(array, how):
    globals()["kept"] = array
    return os.getpid(), float(array.sum())

def idle(how):
    if how == "stuck":
        ctypes.PyDLL(None).sleep(600)
    elif how == "loop":
        while True:
            pass
    elif how == "sleep":
        time.sleep(600)

cluster = onehop.Cluster(2)
array = np.ones({MEGABYTES} * 125_000)
handle = cluster.share(array)
pids = [pid for pid, total in cluster.everywhere(hold, handle, "x")]
results = [cluster[2].submit(np.zeros, 10_000_000)]
results[0].wait()
for worker in cluster.workers:
    worker.submit(idle, os.environ["HOW"])
print(" ".join(map(str, pids)), flush=True)
time.sleep(600)
"""


def names_in(*folders: str) -> set[str]:
    return {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}


def shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Shmem in /proc/meminfo")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("whole_group", [False, True], ids=["director", "group"])
@pytest.mark.parametrize("how", ["free", "sleep", "loop", "stuck"])
def test_nothing_is_left(tmp_path: Path, how: str, whole_group: bool) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = names_in("/dev/shm")
    environment = {"HOW": how, "TMPDIR": str(temporary)}
    with Script(SCRIPT, tmp_path, environment=environment) as script:
        first = script.line()
        assert first, script.finish(5).err
        workers = [int(word) for word in first.split()]
        time.sleep(0.3)
        assert all(is_alive(pid) for pid in workers)
        peak = shared_bytes()
        if whole_group:
            os.killpg(script.process.pid, signal.SIGKILL)
        else:
            script.process.kill()
        eventually(
            lambda: not marked_processes(script.mark) and not any(map(is_alive, workers)),
            5.0 * PATIENCE,
            "workers outlive their director",
        )
        assert names_in("/dev/shm") - before == set()
        assert os.listdir(temporary) == []
        # the test machine is shared, so half of what was held is enough to see
        eventually(
            lambda: peak - shared_bytes() > MEGABYTES * 500_000 or not FULL_SIZE,
            5.0,
            "the memory is not back",
        )


@pytest.mark.timeout(60)
def test_killed_while_it_starts(tmp_path: Path) -> None:
    text = """
    import onehop
    print("starting", flush=True)
    cluster = onehop.Cluster(4)
    print("started", flush=True)
    import time; time.sleep(60)
    """
    for pause_s in (0.0, 0.02, 0.08):
        with Script(text, tmp_path) as script:
            assert script.line() == "starting"
            time.sleep(pause_s)
            script.process.kill()
            eventually(lambda: not marked_processes(script.mark), 5.0 * PATIENCE)


def test_temporary_folder_is_not_used_by_a_clean_run(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    text = """
    import onehop
    with onehop.Cluster(1) as cluster:
        print(f"answer={cluster[2].call(sum, [1, 2, 3])}")
    """
    with Script(text, tmp_path, environment={"TMPDIR": str(temporary)}) as script:
        assert script.finish(30).value("answer") == "6"
    assert os.listdir(temporary) == []
    assert not [n for n in os.listdir(tempfile.gettempdir()) if "onehop" in n]
