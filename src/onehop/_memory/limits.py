"""How much memory this process may still take, and what would stop it: cgroup, machine.

Must never know what the memory is for. Values are read anew at every question, since other processes share the limits.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as the largest page multiple below 2**63."""


class Room(NamedTuple):
    """The tightest limit of those that apply."""

    available_bytes: int
    limit: str
    """What limits, in words for an error message."""


def room(root: str = "/") -> Room | None:
    """Find the limit that leaves the least room.

    Parameters
    ----------
    root : str
        Where `proc` and `sys` are; tests put a made-up tree there.

    Returns
    -------
    Room or None
        None where the system tells nothing (not Linux).
    """
    found = [
        *_cgroup_rooms(root),
        *_machine_rooms(root),
    ]
    return min(found, default=None)


def _machine_rooms(root: str) -> list[Room]:
    text = _read(os.path.join(root, "proc/meminfo"))
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return [
                Room(int(line.split()[1]) * 1024, "the memory that is available on the machine")
            ]
    return []


def _cgroup_rooms(root: str) -> list[Room]:
    rooms = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _walk(root, ("sys/fs/cgroup", "sys/fs/cgroup/unified"), path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _walk(root, ("sys/fs/cgroup/memory",), path, _V1)
    return rooms


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _walk(root: str, mounts: tuple[str, ...], path: str, files: _Files) -> list[Room]:
    """Collect the room below the limit of a group and of every group above it."""
    rooms = []
    for mount in mounts:
        base = os.path.join(root, mount)
        at = path.strip("/")
        while True:
            # Inside a container the path may name a group that is not visible there; the mount itself then is ours.
            if (one := _room_of_group(os.path.join(base, at), files)) is not None:
                rooms.append(one)
            if not at:
                break
            at = os.path.dirname(at)
    return rooms


def _room_of_group(folder: str, files: _Files) -> Room | None:
    limit_text = _read(os.path.join(folder, files.limit)).strip()
    usage_text = _read(os.path.join(folder, files.usage)).strip()
    if not limit_text.isdigit() or not usage_text.isdigit():  # also "max", and no such file
        return None
    limit = int(limit_text)
    if limit >= _UNLIMITED_BYTES:
        return None
    reclaimable = 0
    for line in _read(os.path.join(folder, "memory.stat")).splitlines():
        name, _, value = line.partition(" ")
        if name == files.reclaimable:
            reclaimable = int(value)
    # Cached pages of files are counted as used, but the kernel drops them before it kills anybody.
    available = max(0, limit - int(usage_text) + reclaimable)
    return Room(available, f"the memory limit of the cgroup ({files.limit} = {limit} bytes)")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
