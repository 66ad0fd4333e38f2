"""Whether this process is a forked child of the one that imported onehop.

Asking the kernel for the process id costs as much as a tenth of a small call; a fork tells by itself.
Must never know what is done about it.
"""

from __future__ import annotations

import os


class _Forks:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """Forks between the first import and this process; what is made later remembers it."""


forks = _Forks()


def _in_child() -> None:
    forks.count += 1


os.register_at_fork(after_in_child=_in_child)
