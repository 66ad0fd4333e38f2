"""The command line, the measuring of memory, and the whole demo on a small crystal and a real cluster."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onehop.demo
from onehop.cli import main
from onehop.demo.memory import PeakMemory, memory_bytes
from onehop.demo.report import size_text
from onehop.errors import MissingExtraError


def demo(*arguments: str) -> int:
    return main(["demo", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--supercell", "0"], "must be at least 1, not 0"),
        (["--supercell", "two"], "'two' is not an integer"),
        (["--workers", "-1"], "must be at least 0"),
        (["--kpoints", "2x2"], "neither a number of points N nor a grid"),
        (["--kpoints", "0"], "neither a number of points N nor a grid"),
        (["--moments", "1"], "must be at least 2"),
        (["--plot", "dos.txt"], "must end in .png, .pdf or .svg"),
        (["--plot", "no_such_folder/dos.png"], "no folder to write to"),
        (["--nonsense"], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        demo(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_file_ends_the_command_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad_hr.dat"
    path.write_text("comment\neight\n")
    assert demo("--hr", str(path)) == 1
    error = capsys.readouterr().err
    assert error == (
        f"onehop demo: {path}, line 2: the number of Wannier functions must be an integer, "
        "not 'eight'\n"
    )
    assert demo("--hr", str(tmp_path / "absent")) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_model_larger_than_the_machine_is_refused_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo("--supercell", "5000") == 1
    error = capsys.readouterr().err
    assert "this machine has" in error
    assert "use a smaller --supercell" in error


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'onehop\[demo\]'") as caught:
        onehop.demo.require("numpy", "no_such_package", "nor_this")
    assert "needs no_such_package and nor_this" in str(caught.value)


def test_without_numpy_the_command_says_what_to_install() -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n in ('numpy', 'scipy', 'matplotlib') else find(n, *a)\n"
        "from onehop.cli import main; sys.exit(main(['demo']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "numpy and scipy, not installed" in ended.stderr
    assert "pip install 'onehop[demo]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_imports_no_numpy() -> None:
    code = (
        "import sys; from onehop.cli import main; code = main([]); "
        "assert not {'numpy', 'scipy', 'rich', 'matplotlib'} & set(sys.modules); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "demo" in ended.stdout


def test_memory_counts_private_pages_and_each_memfd_once() -> None:
    if memory_bytes([os.getpid()]) is None:
        pytest.skip("this system has no /proc/PID/smaps_rollup")
    size = 32 * 1024 * 1024
    with PeakMemory([os.getpid()]) as memory:
        # Pages of its own: an array might lie in memory that an earlier test had made resident.
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(bytes(size))
    assert memory.extra_bytes == pytest.approx(size, rel=0.1)
    block.close()
    fd = os.memfd_create("onehop-demo-test")
    again = os.dup(fd)
    try:
        with PeakMemory([os.getpid()]) as memory:
            for _ in range(32):
                os.write(fd, bytes(1024 * 1024))
        # Never mapped, so that a PSS alone would not see it.
        assert memory.extra_bytes == pytest.approx(size, rel=0.1)
    finally:
        os.close(fd)
        os.close(again)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "not known here"),
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (194_900_000, "195 MB"),
        (1_560_000_000, "1.56 GB"),
        (2 * 10**15, "2e+03 TB"),
    ],
)
def test_sizes_are_readable(size_bytes: int | None, text: str) -> None:
    assert size_text(size_bytes) == text


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert demo("--json", *arguments) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_demo_on_a_small_crystal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "dos.png"
    pytest.importorskip("matplotlib")
    # 10×10×10 cells: 5 MB, large enough that every matrix is many pages.
    result = run_json(
        capsys, "--supercell", "10", "--moments", "16", "--kpoints", "3x2x1", "--plot", str(picture)
    )
    size = result["size_bytes"]
    loop, mapped, changed = result["ways"]
    assert result["failures"] == []
    assert result["change_effect"] > 1e-4
    assert result["route"] == "1 → 2 → 3 → 2 → 1"
    assert loop["pool_bytes"] == pytest.approx(6 * size, rel=0.01)
    # The model is copied once, at the first call that mentions it, and never again.
    assert size <= loop["moved_bytes"] <= 1.2 * size
    assert mapped["moved_bytes"] <= 0.1 * size
    assert 0 < result["changed_bytes"] <= changed["moved_bytes"] <= 0.9 * size
    for way in result["ways"]:
        assert way["difference"] <= 1e-9
        assert way["attached_bytes"] + way["avoided_bytes"] >= 5 * size * 0.9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_on_a_real_file(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(
        capsys, "--hr", str(data_folder / "silicon_hr.dat"), "--supercell", "1", "--kpoints", "2"
    )
    assert result["failures"] == []
    dos = result["density_of_states"]
    states = np.trapezoid(dos["states_per_ev_and_cell"], dos["energies_ev"])
    assert states == pytest.approx(8, abs=0.1)


def test_the_demo_without_workers_and_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    for workers, route in (("0", "no workers"), ("1", "1 → 2 → 1")):
        result = run_json(
            capsys, "--supercell", "4", "--moments", "8", "--kpoints", "2x1x1", "--workers", workers
        )
        assert result["failures"] == []
        assert result["route"].startswith(route)


def test_the_table_says_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--supercell", "4", "--moments", "8", "--kpoints", "2x1x1") == 0
    out = capsys.readouterr().out
    for word in (
        "GaAs",
        "pool would pickle",
        "moved",
        "attached",
        "avoided",
        "extra memory",
        "1 → 2",
    ):
        assert word in out, out
