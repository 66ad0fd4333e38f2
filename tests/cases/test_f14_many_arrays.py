"""F14: very many arrays of 100 KB, few descriptors, and threads of the user's own afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import FULL_SIZE, run_script

COUNT = 100_000 if FULL_SIZE else 10_000

TEXT = f"""
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
import onehop

count = {COUNT}
arrays = [np.full(12_500, float(k)) for k in range(count)]

def total(items):
    return sum(float(item[0]) for item in items)

def first(item):
    return float(item[0])

with onehop.Cluster(2) as cluster:
    if HOW == "in one list":
        got = cluster[2].call(total, arrays)
    elif HOW == "one by one":
        got = sum(cluster.map(first, arrays))
    else:
        kept = cluster[2].call(lambda items: items, arrays)
        got = total(kept)
    print(f"right={{got == count * (count - 1) / 2}}")
    arrays[17][0] += 1
    again = cluster[2].call(first, arrays[17])
    print(f"changed={{again == 18.0}}")
    done = []
    threads = [threading.Thread(target=done.append, args=(k,)) for k in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"threads={{len(done)}}")
    print(f"maps={{len(open('/proc/self/maps').readlines())}}")
    print(f"fds={{len(__import__('os').listdir('/proc/self/fd'))}}")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["in one list", "one by one", "and kept"])
def test_many_arrays_then_threads(tmp_path: Path, how: str) -> None:
    text = TEXT.replace("HOW", repr(how))
    finished = run_script(text, tmp_path, timeout_s=280)
    assert finished.value("right") == "True"
    assert finished.value("changed") == "True"
    assert finished.value("threads") == "50"
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert int(finished.value("maps")) < limit / 2
    assert int(finished.value("fds")) < 100
