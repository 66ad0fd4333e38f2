"""The promises of every link, asked of each kind that there is, bare and wrapped."""

from __future__ import annotations

import socket

from onehop._contracts.link import Link
from onehop._links.inproc import InprocLink
from onehop._links.stream import UnixLink
from onehop.testing.link_contract import LinkContract
from onehop.testing.links import BrokenLink, CountingLink, WrappedLink


class TestUnixLink(LinkContract):
    medium = "unix"
    passes_descriptors = True
    overhead_bytes_per_frame = 16

    def make_pair(self) -> tuple[Link, Link]:
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return UnixLink(a, 2), UnixLink(b, 1)


class TestInprocLink(LinkContract):
    medium = "inproc"
    passes_descriptors = True
    two_ends = False

    def make_pair(self) -> tuple[Link, Link]:
        link = InprocLink(1)
        return link, link


class TestWrappedUnixLink(TestUnixLink):
    """Wrappers keep the promises, as long as they do not break on purpose."""

    def make_pair(self) -> tuple[Link, Link]:
        a, b = super().make_pair()
        return CountingLink(BrokenLink(a, 1 << 40)), WrappedLink(b)
