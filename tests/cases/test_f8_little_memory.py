"""F8: a /dev/shm of 1 MB, and memory limits smaller than the object."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onehop.errors import MemoryLimitError
from tests.support import run_script

SHARE = """
import os
import numpy as np
import onehop

size = int(os.environ["SIZE"])
with onehop.Cluster(2) as cluster:
    array = np.ones(size // 8)
    shared = cluster.share(array)
    print(f"sums={cluster.everywhere(lambda a: float(a.sum()), shared)}")
    print(f"argument={cluster[2].call(lambda a: float(a.sum()), array)}")
    print(f"result={float(cluster[2].call(np.ones, size // 8).sum())}")
"""

LIMITED = """
import os
import numpy as np
import onehop
from onehop.errors import MemoryLimitError

with onehop.Cluster(1) as cluster:
    cluster[2].call(int)
    array = np.ones(int(os.environ["SIZE"]) // 8)
    with cluster.ledger.watch() as watch:
        try:
            cluster[2].call(len, array)
        except MemoryLimitError as error:
            print(f"error={error}")
    print(f"moved={watch.total('moved', medium='memory')}")
    print(f"alive={cluster[2].call(lambda: 42)}")
"""


def private_mounts_work() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return subprocess.run(probe, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.mark.timeout(90)
def test_a_tiny_dev_shm_does_not_matter(tmp_path: Path) -> None:
    if not private_mounts_work():
        pytest.skip("needs root and private mount namespaces")
    wrapper = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
        "-",
    ]
    finished = run_script(SHARE, tmp_path, wrapper=wrapper, environment={"SIZE": str(64 << 20)})
    count = float((64 << 20) // 8)
    assert finished.value("sums") == str([count, count])
    assert finished.value("argument") == str(count)
    assert finished.value("result") == str(count)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A cgroup with 300 MB, if this machine lets us make one."""
    name = f"onehop_test_{uuid.uuid4().hex[:8]}"
    for parent, limit_file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / limit_file).exists():
            group.rmdir()
            continue
        (group / limit_file).write_text(str(300 << 20))
        try:
            yield group
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    ctypes.CDLL(None).usleep(100_000)
        return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.timeout(90)
def test_a_cgroup_limit_is_named_before_anything_is_written(
    tmp_path: Path, limited_group: Path
) -> None:
    wrapper = ["sh", "-c", f'echo $$ > {limited_group}/cgroup.procs && exec "$@"', "-"]
    finished = run_script(LIMITED, tmp_path, wrapper=wrapper, environment={"SIZE": str(180 << 20)})
    error = finished.value("error")
    assert "cgroup" in error or "memory.max" in error or "memory.limit" in error
    assert int(finished.value("moved")) < 1_000_000
    assert finished.value("alive") == "42"


def test_the_cluster_s_own_limit(clusters: Any) -> None:
    cluster = clusters(1, memory_limit=32 << 20)
    array = np.ones(8 << 20)  # 64 MB
    with cluster.ledger.watch() as watch:
        with pytest.raises(MemoryLimitError, match=r"limit") as caught:
            cluster[2].call(len, array)
        with pytest.raises(MemoryLimitError):
            cluster.share(array)
    assert "1" in str(caught.value)  # the rank whose arena is full
    assert watch.total("moved", medium="memory") < 1_000_000
    assert cluster[2].call(len, array[:100_000]) == 100_000


def test_a_result_over_the_limit_is_an_error_for_that_call(clusters: Any) -> None:
    cluster = clusters(1, memory_limit=32 << 20)
    pid = cluster[2].pid
    with pytest.raises(MemoryLimitError):
        cluster[2].call(np.ones, 8 << 20)
    assert cluster[2].call(os.getpid) == pid


def test_space_below_the_limit_is_used_again_and_again(clusters: Any) -> None:
    cluster = clusters(1, memory_limit=32 << 20)
    for k in range(40):
        assert cluster[2].call(np.sum, np.full(1 << 21, float(k))) == k * float(
            1 << 21
        )  # 16 MB each
