"""F9: a script that never closes its cluster ends by itself, soon and with code 0."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import PATIENCE, Script, run_script


def test_idle_workers(tmp_path: Path) -> None:
    text = """
    import time
    import onehop
    cluster = onehop.Cluster(16)
    print(f"sum={sum(cluster.map(abs, range(-5, 0)))}")
    print(f"end={time.clock_gettime(time.CLOCK_MONOTONIC)}", flush=True)
    """
    finished = run_script(text, tmp_path)
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert finished.value("sum") == "15"
    assert finished.err == ""
    assert ended - float(finished.value("end")) < 2.0 * PATIENCE


@pytest.mark.parametrize("call", ["time.sleep, 600", "spin", "native"])
def test_pending_calls_are_cancelled_with_a_warning(tmp_path: Path, call: str) -> None:
    text = f"""
    import ctypes, time
    import onehop

    def spin():
        while True:
            pass

    def native():
        ctypes.PyDLL(None).sleep(600)

    cluster = onehop.Cluster(2)
    futures = [cluster.submit({call}) for _ in range(6)]
    time.sleep(0.2)
    print(f"end={{time.clock_gettime(time.CLOCK_MONOTONIC)}}", flush=True)
    """
    finished = run_script(text, tmp_path)
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert ended - float(finished.value("end")) < 2.0 * PATIENCE
    assert "cancel" in finished.err.lower()
    assert "6" in finished.err
    assert "Traceback" not in finished.err


def test_an_error_at_the_top_keeps_its_code(tmp_path: Path) -> None:
    text = """
    import onehop
    cluster = onehop.Cluster(2)
    cluster.map(abs, range(4))
    raise SystemExit(7)
    """
    assert run_script(text, tmp_path, check=False).code == 7


def test_a_cluster_in_a_reference_cycle_and_one_dropped(tmp_path: Path) -> None:
    text = """
    import onehop
    class Holder: pass
    holder = Holder(); holder.me = holder; holder.cluster = onehop.Cluster(1)
    onehop.Cluster(1)
    print("end")
    """
    finished = run_script(text, tmp_path)
    assert finished.lines == ["end"]


def test_results_that_live_on_at_exit(tmp_path: Path) -> None:
    text = """
    import numpy as np
    import onehop
    with onehop.Cluster(1) as cluster:
        kept = cluster[2].call(np.arange, 1_000_000)
        shared = cluster.share(np.ones(1_000_000))
    kept += 1
    print(f"last={kept[-1]}")
    """
    finished = run_script(text, tmp_path)
    assert finished.value("last") == "1000000"
    assert finished.err == ""


def test_a_thread_that_still_submits_at_exit(tmp_path: Path) -> None:
    text = """
    import threading, time
    import onehop
    cluster = onehop.Cluster(1)
    def work():
        try:
            while True:
                cluster.submit(abs, 1).result()
        except BaseException as error:
            pass
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    """
    with Script(text, tmp_path) as script:
        finished = script.finish(20)
        assert finished.code == 0, finished.err
