"""F13: os.fork in the director and inside a task, the child living on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import PATIENCE, Script, eventually, is_alive, run_script

pytestmark = pytest.mark.timeout(120)


def test_the_child_of_the_director_gets_a_clear_error(tmp_path: Path) -> None:
    text = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import onehop
    cluster = onehop.Cluster(2)
    array = np.arange(1_000_000)
    got = cluster[2].call(lambda a: a * 2, array)
    future = cluster[2].submit(lambda: 5)
    future.result()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            cluster[2].call(int)
        except onehop.errors.ForkedError as error:
            code = 0
        try:
            cluster.submit(int)
        except onehop.errors.ForkedError:
            pass
        else:
            code = 2
        got += 1            # the child's own copy
        assert got[10] == 21 and future.result() == 5
        cluster.close()     # must not touch the parent's workers
        sys.exit(code)      # runs exit handlers on purpose
    _, status = os.waitpid(pid, 0)
    print(f"child={os.waitstatus_to_exitcode(status)}")
    assert got[10] == 20
    array[3] = -7
    print(f"value={cluster[2].call(lambda a: int(a[3]), array)}")
    print(f"sum={sum(cluster.map(abs, range(10)))}")
    """
    finished = run_script(text, tmp_path)
    assert finished.value("child") == "0", finished.err
    assert finished.value("value") == "-7"
    assert finished.value("sum") == "45"


def test_a_fresh_cluster_in_the_child_works(tmp_path: Path) -> None:
    text = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import onehop
    cluster = onehop.Cluster(1)
    array = np.zeros(200_000)
    cluster[2].call(len, array)
    pid = os.fork()
    if pid == 0:
        with onehop.Cluster(1) as own:
            array[5] = 1.0
            assert own[2].call(np.sum, array) == 1.0
            array[6] = 1.0
            assert own[2].call(np.sum, array) == 2.0
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print(f"child={os.waitstatus_to_exitcode(status)}")
    print(f"sum={float(cluster[2].call(np.sum, array))}")
    """
    finished = run_script(text, tmp_path)
    assert finished.value("child") == "0", finished.err
    assert finished.value("sum") == "0.0"


def test_multiprocessing_with_fork_in_the_director(tmp_path: Path) -> None:
    text = """
    import multiprocessing, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import onehop
    def square(k):
        return k * k
    cluster = onehop.Cluster(2)
    array = np.ones(500_000)
    print(f"before={cluster[2].call(np.sum, array)}")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(f"pool={pool.map(square, range(4))}")
    array[0] = 3
    print(f"after={cluster[2].call(np.sum, array)}")
    """
    finished = run_script(text, tmp_path)
    assert finished.value("pool") == "[0, 1, 4, 9]"
    assert finished.value("after") == "500002.0"


def test_fork_inside_a_task(tmp_path: Path) -> None:
    text = """
    import os, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import onehop

    def task(array):
        import multiprocessing, warnings
        warnings.simplefilter("ignore")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(abs, [0, -1, -4, -9])
        pid = os.fork()
        if pid == 0:
            array[:] = -1
            try:
                onehop.current()[1].call(int)
            except onehop.errors.ForkedError:
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        return squares, os.waitstatus_to_exitcode(status), float(array.sum())

    cluster = onehop.Cluster(2)
    print(f"task={cluster[2].call(task, np.ones(300_000))}")
    print(f"again={cluster[2].call(task, np.ones(300_000))}")
    print(f"other={cluster[3].call(lambda: 1)}")
    """
    finished = run_script(text, tmp_path)
    assert finished.value("task") == "([0, 1, 4, 9], 0, 300000.0)"
    assert finished.value("again") == finished.value("task")
    assert finished.value("other") == "1"


CHILD_LIVES_ON = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import onehop

def fork_and_stay(array):
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(30)
        # still readable, although its parent and the owner have gone on
        os._exit(0 if float(array.sum()) == 300_000.0 else 1)
    return pid, os.getpid()
"""


def test_the_death_of_a_worker_is_seen_though_its_child_lives_on(tmp_path: Path) -> None:
    text = (
        CHILD_LIVES_ON
        + """
cluster = onehop.Cluster(2)
child, worker = cluster[2].call(fork_and_stay, np.ones(300_000))
future = cluster[2].submit(time.sleep, 60)
time.sleep(0.3)
start = time.monotonic()
os.kill(worker, signal.SIGKILL)
error = future.exception(timeout=20)
print(f"error={type(error).__name__}")
print(f"seconds={time.monotonic() - start}")
os.kill(child, signal.SIGKILL)
"""
    )
    finished = run_script(text, tmp_path)
    assert finished.value("error") == "WorkerDied"
    assert float(finished.value("seconds")) < 2.0 * PATIENCE


def test_the_death_of_the_director_is_seen_though_its_child_lives_on(tmp_path: Path) -> None:
    text = (
        CHILD_LIVES_ON
        + """
cluster = onehop.Cluster(2)
array = cluster[2].call(np.ones, 300_000)
pids = cluster.everywhere(os.getpid)
child, _ = fork_and_stay(array)
print(child, *pids, flush=True)
time.sleep(60)
"""
    )
    with Script(text, tmp_path) as script:
        first = script.line()
        assert first, script.finish(5).err
        child, *workers = (int(word) for word in first.split())
        script.process.kill()
        eventually(
            lambda: not any(is_alive(pid) for pid in workers),
            5.0 * PATIENCE,
            "the workers wait for the director's child",
        )
        assert is_alive(child)


def test_memory_that_a_forked_child_reads_is_not_used_again(tmp_path: Path) -> None:
    text = """
    import gc, os, time, warnings
    warnings.simplefilter("ignore")
    import numpy as np
    import onehop
    cluster = onehop.Cluster(1)
    array = cluster[2].call(np.full, 300_000, 7.0)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read_end, 1)
        os._exit(0 if (array == 7.0).all() else 1)
    del array
    gc.collect()
    for k in range(30):
        cluster[2].call(np.full, 300_000, float(k))
    os.write(write_end, b"x")
    _, status = os.waitpid(pid, 0)
    print(f"child={os.waitstatus_to_exitcode(status)}")
    """
    assert run_script(text, tmp_path).value("child") == "0"


def test_subprocess_of_a_task_does_not_hold_our_descriptors(tmp_path: Path) -> None:
    text = """
    import os, subprocess, sys
    import onehop
    def names():
        code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')])"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    cluster = onehop.Cluster(1)
    both = cluster[2].call(names) + names()
    print(f"leak={'memfd' in both or 'socket:' in both or 'userfaultfd' in both}")
    """
    assert run_script(text, tmp_path).value("leak") == "False"
