"""F6: Ctrl-C once, at a terminal, during a map of long calls."""

from __future__ import annotations

import os
import pty
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support import PATIENCE, Script, eventually, is_alive

SCRIPT = """
import ctypes, os, sys, time
import onehop

def compute(k):
    import numpy as np
    end = time.monotonic() + 60
    a = np.ones((300, 300))
    while time.monotonic() < end:
        a = a @ a
        a /= a.max()
    return k

def stuck(k):
    # native code that never lets go of the interpreter: no signal handler of Python's can run
    ctypes.PyDLL(None).sleep(60)
    return k

work = {"compute": compute, "stuck": stuck, "sleep": lambda k: time.sleep(60)}[os.environ["WORK"]]

with onehop.Cluster(2) as cluster:
    before = {worker.rank: worker.pid for worker in cluster.workers}
    cluster.everywhere(os.getpid)
    print("ready", flush=True)
    try:
        list(cluster.map(work, range(4)))
        print("not interrupted", flush=True)
    except KeyboardInterrupt:
        print("\\ninterrupted", flush=True)  # after the ^C that the terminal shows
    answers = list(cluster.map(lambda k: k * k, range(8)))
    print(f"usable={answers}", flush=True)
    after = {worker.rank: worker.pid for worker in cluster.workers}
    print(f"before={sorted(before)}", flush=True)
    print(f"after={sorted(after)}", flush=True)
    gone = [pid for rank, pid in before.items() if rank not in after]
    print(f"zombies={[pid for pid in gone if os.path.exists(f'/proc/{pid}')]}", flush=True)
print("done", flush=True)
"""


class Terminal:
    """A script at a terminal of its own; what it prints is collected with the time of each line."""

    def __init__(self, folder: Path, work: str) -> None:
        self._master, slave = pty.openpty()
        self.script = Script(
            SCRIPT,
            folder,
            environment={"WORK": work},
            wrapper=["setsid", "--ctty", "--wait"],
            stdio={"stdin": slave, "stdout": slave, "stderr": slave},
        )
        os.close(slave)
        self.text = ""
        self._times: dict[str, float] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:
                return
            if not data:
                return
            self.text += data.decode(errors="replace").replace("\r\n", "\n")
            for line in self.text.splitlines():
                self._times.setdefault(line, time.monotonic())

    def wait_for(self, line: str, within_s: float) -> float:
        try:
            eventually(lambda: line in self._times, within_s, f"no line {line!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- so far\n{self.text}") from None
        return self._times[line]

    def value(self, name: str) -> str:
        for line in self.text.splitlines():
            if line.startswith(name + "="):
                return line[len(name) + 1 :]
        raise AssertionError(f"no {name}= in\n{self.text}")

    def press_ctrl_c(self) -> float:
        now = time.monotonic()
        os.write(self._master, b"\x03")
        return now

    def close(self) -> None:
        self.script.clean()
        os.close(self._master)
        self._reader.join(5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("work", ["compute", "sleep"])
def test_the_prompt_is_back_and_the_workers_live_on(tmp_path: Path, work: str) -> None:
    terminal = Terminal(tmp_path, work)
    try:
        terminal.wait_for("ready", 20)
        time.sleep(0.5)
        pressed = terminal.press_ctrl_c()
        back = terminal.wait_for("interrupted", 1.0 * PATIENCE)
        assert back - pressed < 1.0 * PATIENCE
        terminal.wait_for("done", 10 * PATIENCE)
        assert terminal.value("usable") == str([k * k for k in range(8)])
        assert terminal.value("after") == terminal.value("before") == "[2, 3]"
        assert "not interrupted" not in terminal.text
        assert "Traceback" not in terminal.text, terminal.text
    finally:
        terminal.close()


@pytest.mark.timeout(120)
def test_a_worker_stuck_in_native_code_is_replaced(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "stuck")
    try:
        terminal.wait_for("ready", 20)
        time.sleep(0.5)
        terminal.press_ctrl_c()
        terminal.wait_for("interrupted", 1.0 * PATIENCE)
        terminal.wait_for("done", 15 * PATIENCE)
        assert terminal.value("usable") == str([k * k for k in range(8)])
        # both were stuck: two others stand in, under ranks that were never used
        assert terminal.value("after") == "[4, 5]"
        assert terminal.value("zombies") == "[]"
    finally:
        terminal.close()


def test_sigint_to_a_worker_alone_is_ignored(cluster: object, tmp_path: Path) -> None:
    pid = cluster[2].pid  # type: ignore[index]
    os.kill(pid, signal.SIGINT)
    assert cluster[2].call(os.getpid) == pid  # type: ignore[index]


@pytest.mark.timeout(120)
def test_interrupt_of_a_single_call(tmp_path: Path) -> None:
    text = """
    import os, signal, threading, time
    import onehop

    with onehop.Cluster(1) as cluster:
        cluster[2].call(int)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            cluster[2].call(time.sleep, 60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(f"answer={cluster[2].call(lambda: 42)}")
        print(f"seconds={time.monotonic() - start:.2f}")
    """
    with Script(text, tmp_path) as script:
        finished = script.finish(60)
        assert "interrupted" in finished.out, finished.err
        assert finished.value("answer") == "42"
        assert float(finished.value("seconds")) < 0.5 + 1.0 * PATIENCE
        assert not is_alive(script.process.pid)
