"""F15: what a worker prints, warns and logs reaches the director, with its rank."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from onehop.errors import WorkerDied
from tests.support import eventually, run_script


def say(text: str) -> None:
    print(text)
    print(text + "-err", file=sys.stderr)


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=1)


def log(text: str) -> None:
    logging.getLogger("somewhere").warning(text)


def native(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def half_a_line(text: str) -> None:
    sys.stdout.write(text)


def print_and_die(text: str) -> None:
    print(text)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def print_natively_and_die(text: str) -> None:
    os.write(2, text.encode() + b"\n")
    os.abort()


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


@pytest.mark.parametrize(
    ("function", "word"),
    [(say, "apple"), (say, "apple-err"), (warn, "pear"), (log, "plum"), (native, "fig")],
    ids=["print", "stderr", "warning", "logging", "native"],
)
def test_lines_arrive_with_the_rank(cluster: Any, function: Any, word: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cluster[3].call(function, word.removesuffix("-err"))
        eventually(lambda: lines_with(out.getvalue() + err.getvalue(), word), 5)
    (line, *_) = lines_with(out.getvalue() + err.getvalue(), word)
    assert "3" in line.split(word)[0]


def test_stdout_and_stderr_stay_apart(cluster: Any) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cluster[2].call(say, "kiwi")
        eventually(lambda: "kiwi" in out.getvalue() and "kiwi-err" in err.getvalue(), 5)
    assert "kiwi-err" not in out.getvalue()


def test_lines_of_two_workers_do_not_mix(cluster: Any) -> None:
    def many(k: int) -> None:
        for _ in range(100):
            print(f"<{k}" + "x" * 200 + f"{k}>")

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        list(cluster.map(many, [1, 2, 3, 4], batch_size=1))
        eventually(lambda: len(lines_with(out.getvalue(), "xxx")) == 400, 5)
    for line in lines_with(out.getvalue(), "xxx"):
        k = line.partition("<")[2][0]
        assert line.endswith("x" * 200 + f"{k}>")


def test_a_line_without_its_end_is_not_lost(clusters: Any) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cluster = clusters(1)
        cluster[2].call(half_a_line, "unfinished")
        cluster.close()
    assert "unfinished" in out.getvalue()


def test_it_can_be_switched_off(clusters: Any) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cluster = clusters(1, output=False)
        cluster[2].call(say, "secret")
        cluster.close()
    assert out.getvalue() == ""


@pytest.mark.parametrize("function", [print_and_die, print_natively_and_die])
def test_the_last_lines_are_in_the_error(cluster: Any, function: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        error = cluster[2].submit(function, "last words").exception(timeout=20)
    assert isinstance(error, WorkerDied)
    assert "last words" in str(error) + "".join(getattr(error, "__notes__", []))


def test_a_closed_or_replaced_stdout_does_no_harm(tmp_path: Path) -> None:
    text = """
    import sys
    import onehop
    with onehop.Cluster(1) as cluster:
        sys.stdout = None
        cluster[2].call(print, "into the void")
        sys.stdout = sys.__stdout__
        print(f"answer={cluster[2].call(lambda: 42)}")
    """
    assert run_script(text, tmp_path).value("answer") == "42"


def test_output_reaches_a_plain_terminal_or_file(tmp_path: Path) -> None:
    text = """
    import onehop
    with onehop.Cluster(1) as cluster:
        cluster[2].call(print, "hello from a worker")
    """
    finished = run_script(text, tmp_path)
    assert len(lines_with(finished.out, "hello from a worker")) == 1
