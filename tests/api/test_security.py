"""Nothing is unpickled from a peer that has not proven the cluster's secret."""

from __future__ import annotations

import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def listening_addresses(pids: list[int]) -> list[bytes]:
    """Abstract and named Unix addresses that processes of the cluster listen on."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: list[bytes] = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and int(fields[3], 16) & 0x10000:
            address = fields[7].encode()
            found.append(b"\0" + address[1:] if address.startswith(b"@") else address)
    return found


@pytest.mark.parametrize("first", [b"", b"\0" * 64, b"garbage" * 5000, None])
def test_a_stranger_is_not_heard(cluster: Any, tmp_path: Path, first: bytes | None) -> None:
    cluster[2].call(lambda: None)
    addresses = listening_addresses([os.getpid(), *(worker.pid for worker in cluster.workers)])
    assert addresses, "nobody listens, so how do workers find each other?"
    marker = tmp_path / "exploded"
    payload = pickle.dumps(Bomb(str(marker))) if first is None else first
    for address in addresses:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(5)
            stranger.connect(address)
            try:
                stranger.sendall(payload)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass
    time.sleep(0.1)
    assert not marker.exists()
    # and the cluster goes on, also for links that are opened now
    assert cluster[2].call(lambda: __import__("onehop").current()[3].call(abs, -1)) == 1


def test_a_silent_stranger_blocks_nobody(cluster: Any) -> None:
    addresses = listening_addresses([os.getpid(), *(worker.pid for worker in cluster.workers)])
    silent = []
    for address in addresses:
        for _ in range(5):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.connect(address)
            silent.append(one)
    try:
        assert (
            cluster[2].submit(lambda: __import__("onehop").current()[3].call(abs, -1)).result(20)
            == 1
        )
        assert len(cluster.add_workers(1)) == 1
    finally:
        for one in silent:
            one.close()


def test_the_secret_is_not_on_the_command_line_or_in_the_environment(cluster: Any) -> None:
    for worker in cluster.workers:
        command = Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        words = command.split(b"\0")
        assert not any(
            len(word) >= 32 and all(c in b"0123456789abcdef" for c in word) for word in words
        )
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
        assert b"ONEHOP_SECRET" not in environment
