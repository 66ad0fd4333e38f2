"""The raw costs that figures are compared with: a round trip, a pwrite, a first touch, pickle's own walk."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import seconds


class Echo:
    """Another process that sends back what it is sent, over a blocking Unix socket."""

    def __init__(self, size_bytes: int = 100) -> None:
        self._here, there = socket.socketpair()
        self._message = b"x" * size_bytes
        self._pid = os.fork()
        if self._pid == 0:
            self._here.close()
            while data := there.recv(size_bytes):
                there.sendall(data)
            os._exit(0)
        there.close()

    def round_trip(self) -> None:
        self._here.sendall(self._message)
        self._here.recv(len(self._message))

    def close(self) -> None:
        self._here.close()
        os.waitpid(self._pid, 0)


def pwrite_s(buffer: Any, repeats: int = 3) -> float:
    """The median of writing a buffer into a fresh memfd."""
    view = memoryview(buffer).cast("B")
    times = []
    for _ in range(repeats):
        descriptor = os.memfd_create("benchmark")
        try:
            times.append(seconds(partial(_write_all, descriptor, view)))
        finally:
            os.close(descriptor)
    return statistics.median(times)


def pwrite_and_touch_s(buffer: Any, repeats: int = 5) -> float:
    """As `pwrite_s`, and then the first touch of every page of a private mapping of it."""
    view = memoryview(buffer).cast("B")
    times = []
    for _ in range(repeats):
        descriptor = os.memfd_create("benchmark")
        start = time.perf_counter()
        _write_all(descriptor, view)
        mapping = mmap.mmap(descriptor, view.nbytes, flags=mmap.MAP_PRIVATE)
        array = np.frombuffer(mapping, dtype=np.uint8)
        int(array[:: mmap.PAGESIZE].sum())
        times.append(time.perf_counter() - start)
        del array
        mapping.close()
        os.close(descriptor)
    return statistics.median(times)


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(descriptor, view[done : done + (1 << 30)], done)


def pickle_walk_s(value: Any, repeats: int = 9) -> float:
    """The median of `pickle.dumps` with out-of-band buffers and `loads` of that."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        pickle.loads(stream, buffers=buffers)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
