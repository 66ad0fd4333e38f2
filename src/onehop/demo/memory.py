"""How much memory a group of processes takes, as the kernel counts it.

Private pages and shares of shared ones come from ``/proc/PID/smaps_rollup`` (Linux). Pages of memfds are counted at
the files instead: a mapping that has not touched them yet, or that is gone, would hide them. Must never know whose
processes they are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType


def memory_bytes(pids: Sequence[int]) -> int | None:
    """Memory of all these processes together, each shared page once; None where the system does not tell."""
    private_kib = shared_kib = 0
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
                for line in rollup:
                    name, _, rest = line.partition(":")
                    if name in ("Pss_Anon", "Pss_File"):
                        private_kib += int(rest.split()[0])
                    elif name == "Pss_Shmem":
                        shared_kib += int(rest.split()[0])
        except OSError:
            return None
        files.update(_memfds(pid))
    return private_kib * 1024 + max(shared_kib * 1024, sum(files.values()))


def _memfds(pid: int) -> dict[tuple[int, int], int]:
    """Bytes that each memfd which a process holds really occupies."""
    found = {}
    directory = f"/proc/{pid}/fd"
    for name in os.listdir(directory):
        try:
            if os.readlink(f"{directory}/{name}").startswith("/memfd:"):
                status = os.stat(f"{directory}/{name}")
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:  # closed between the listing and now
            continue
    return found


class PeakMemory:
    """Samples the memory of some processes while a block runs.

    Parameters
    ----------
    pids : sequence of int
        The processes.
    before_bytes : int, optional
        Their memory at an earlier time to compare with; by default when the block begins.
    """

    def __init__(
        self, pids: Sequence[int], before_bytes: int | None = None, interval_s: float = 0.1
    ) -> None:
        self._pids = list(pids)
        self._before_bytes = memory_bytes(self._pids) if before_bytes is None else before_bytes
        self._peak_bytes: int | None = None
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    @property
    def extra_bytes(self) -> int | None:
        """The largest memory seen, less that before; None where the system does not tell."""
        if self._before_bytes is None or self._peak_bytes is None:
            return None
        return max(0, self._peak_bytes - self._before_bytes)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._note()

    def _note(self) -> None:
        now = memory_bytes(self._pids)
        if now is not None:
            self._peak_bytes = max(now, self._peak_bytes or 0)
