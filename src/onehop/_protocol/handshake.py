"""How two processes prove to each other that they belong to one cluster, before anything is decoded.

Both hold the cluster's 32-byte secret. In order, each line in one direction::

    connector -> acceptor   magic, version, nonce
    acceptor -> connector   magic, version, nonce, proof
    connector -> acceptor   proof
    connector -> acceptor   hello and its tag (descriptors travel with it)
    acceptor -> connector   hello and its tag (descriptors travel with it)

A proof is an HMAC-SHA256 under a key derived from the secret, the version, the cluster's id and both
nonces, over a label that names the role. So a proof is worth nothing in another connection (replay), in
the other direction (reflection) or in another cluster. A hello is opaque here, and goes out only after
the peer's proof was accepted.

Pure: bytes in, bytes out; must never know sockets, threads, clocks or what a hello says.
"""

from __future__ import annotations

import os
import struct
from _operator import _compare_digest  # `hmac.compare_digest`, without importing OpenSSL
from collections.abc import Callable

from onehop.errors import HandshakeError

# Importing hashlib loads OpenSSL: 5 ms, a tenth of a worker's start, for a few hundred bytes of input.
try:
    from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore]  # Python >= 3.12
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # a build without its own hashes
        from hashlib import sha256

VERSION = 1
MAGIC = b"1hop"
SECRET_BYTES = 32
NONCE_BYTES = 32
TAG_BYTES = 32
HELLO_LIMIT_BYTES = 1 << 20
DESCRIPTOR_LIMIT = 253  # of one SCM_RIGHTS message

_PREAMBLE = struct.Struct(
    "<4sH"
)  # must stay the same in every version, so that versions can differ
_HELLO_HEAD = struct.Struct("<IB")
_OTHER = {"connect": "accept", "accept": "connect"}


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 (RFC 2104) of `message`."""
    if len(key) > 64:
        key = sha256(key).digest()
    key = key.ljust(64, b"\0")
    inner = sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
    digest: bytes = sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()
    return digest


def size_bytes(role: str, hello_length: int) -> int:
    """Return how many bytes the side with that role sends in a handshake that succeeds."""
    del role  # both send the same parts, in another order
    return _PREAMBLE.size + NONCE_BYTES + TAG_BYTES + _HELLO_HEAD.size + hello_length + TAG_BYTES


class Handshake:
    """One side of a handshake, as a table of steps.

    Call `start`, then `feed` with at most `wanted` bytes at a time, sending what each returns, until
    `done`. Reading no more than `wanted` leaves the first frames in the socket for the link.

    Parameters
    ----------
    role : {"connect", "accept"}
        Which side this is.
    secret : bytes
        The cluster's secret, 32 bytes.
    cluster_id : str
        Bound into every proof.
    hello : bytes
        Sent to the peer once it has proven itself.
    descriptor_count : int
        Descriptors that travel with the hello; authenticated with it.
    nonce : bytes, optional
        Only tests give one.

    Attributes
    ----------
    wanted : int
        Most bytes that the next `feed` takes.
    done : bool
        Whether both sides have proven themselves and both hellos are exchanged.
    peer_proven : bool
        Whether the peer knows the secret; before that nothing it sends may be kept.
    peer_hello : bytes
        The peer's hello, once done.
    peer_descriptor_count : int
        Descriptors that the peer said it sends.
    farewell : bytes
        What to send before closing after an error, so that the peer can name the reason itself.
    """

    def __init__(
        self,
        role: str,
        secret: bytes,
        cluster_id: str,
        hello: bytes,
        descriptor_count: int = 0,
        nonce: bytes | None = None,
    ) -> None:
        if role not in _OTHER:
            raise ValueError(f"role must be 'connect' or 'accept', not {role!r}")
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a cluster's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        if len(hello) > HELLO_LIMIT_BYTES:
            raise ValueError(f"a hello of {len(hello)} bytes exceeds {HELLO_LIMIT_BYTES}")
        if descriptor_count > DESCRIPTOR_LIMIT:
            raise ValueError(f"{descriptor_count} descriptors exceed {DESCRIPTOR_LIMIT}")
        self.role = role
        self.done = False
        self.peer_proven = False
        self.peer_hello = b""
        self.peer_descriptor_count = 0
        self.farewell = b""
        self._secret = secret
        self._cluster_id = cluster_id.encode()
        self._hello = _HELLO_HEAD.pack(len(hello), descriptor_count) + hello
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._session_key = b""
        self._failed: HandshakeError | None = None
        self._received = bytearray()
        self._steps = iter(_STEPS)
        self._hello_head = b""
        self._advance()

    def _advance(self) -> None:
        """Move to the next row of the table."""
        row = next(self._steps, None)
        if row is None:
            self.done = True
            self._step_bytes = 0
        else:
            self._step_bytes, self._action = row

    @property
    def wanted(self) -> int:
        """Most bytes that the next `feed` takes; 0 when done."""
        return self._step_bytes - len(self._received)

    def start(self) -> bytes:
        """Return what this side sends first: the connector speaks, the acceptor listens."""
        if self.role == "connect":
            return _PREAMBLE.pack(MAGIC, VERSION) + self._nonce
        return b""

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Take bytes of the peer; return what to send, each with whether descriptors go along.

        Raises
        ------
        HandshakeError
            The peer is not one of this cluster; close the connection. Every later call raises too.
        """
        if self._failed is not None:
            raise self._failed
        try:
            if len(data) > self.wanted:
                raise HandshakeError(
                    f"A peer sent {len(data)} bytes where at most {self.wanted} were due; "
                    "it does not speak onehop's handshake."
                )
            self._received += data
            if self._step_bytes == _PREAMBLE.size and not MAGIC.startswith(
                bytes(self._received[:4])
            ):
                raise HandshakeError(
                    f"A peer began with {bytes(self._received[:4])!r}: it does not speak onehop's "
                    "handshake. Some other program has connected to this cluster."
                )
            if self.wanted:
                return []
            message = bytes(self._received)
            self._received.clear()
            return self._action(self, message)
        except HandshakeError as error:
            self._failed = error
            raise

    # --- the steps: each takes a complete part and returns what to send ---------------------------

    def _take_preamble(self, message: bytes) -> list[tuple[bytes, bool]]:
        _, version = _PREAMBLE.unpack(message)
        if version != VERSION:
            if self.role == "accept":
                self.farewell = _PREAMBLE.pack(MAGIC, VERSION)
            raise HandshakeError(
                f"A peer speaks version {version} of onehop's protocol and this process version "
                f"{VERSION}: install the same version of onehop for all processes of the cluster."
            )
        self._advance()
        return []

    def _take_nonce(self, message: bytes) -> list[tuple[bytes, bool]]:
        if _compare_digest(message, self._nonce):
            raise HandshakeError("A peer sent this process's own nonce back: a reflection attack.")
        nonces = self._nonce + message if self.role == "connect" else message + self._nonce
        self._session_key = hmac_sha256(
            self._secret,
            b"onehop session\0"
            + _PREAMBLE.pack(MAGIC, VERSION)
            + struct.pack("<I", len(self._cluster_id))
            + self._cluster_id
            + nonces,
        )
        self._advance()
        if self.role == "connect":
            return []
        return [
            (_PREAMBLE.pack(MAGIC, VERSION) + self._nonce + self._tag(self.role, "proof"), False)
        ]

    def _take_proof(self, message: bytes) -> list[tuple[bytes, bool]]:
        if not _compare_digest(message, self._tag(_OTHER[self.role], "proof")):
            raise HandshakeError(
                "A peer does not know this cluster's secret, or belongs to another cluster. Nothing "
                "that it sent was used. A stale address is the usual reason; otherwise somebody tries."
            )
        self.peer_proven = True
        self._advance()
        if self.role == "accept":
            return []
        # Apart from the hello: descriptors must not arrive together with a proof that is unread.
        return [(self._tag(self.role, "proof"), False), self._own_hello()]

    def _take_hello_head(self, message: bytes) -> list[tuple[bytes, bool]]:
        length, self.peer_descriptor_count = _HELLO_HEAD.unpack(message)
        if length > HELLO_LIMIT_BYTES:
            raise HandshakeError(
                f"A peer announced a hello of {length} bytes; at most {HELLO_LIMIT_BYTES} are allowed."
            )
        self._hello_head = message
        self._advance()
        self._step_bytes = length + TAG_BYTES
        return []

    def _take_hello(self, message: bytes) -> list[tuple[bytes, bool]]:
        hello, tag = message[:-TAG_BYTES], message[-TAG_BYTES:]
        if not _compare_digest(
            tag, self._tag(_OTHER[self.role], "hello", self._hello_head + hello)
        ):
            raise HandshakeError(
                "A peer's hello was changed on the way; the connection is refused."
            )
        self.peer_hello = hello
        self._advance()
        return [self._own_hello()] if self.role == "accept" else []

    def _own_hello(self) -> tuple[bytes, bool]:
        return self._hello + self._tag(self.role, "hello", self._hello), True

    def _tag(self, role: str, label: str, message: bytes = b"") -> bytes:
        return hmac_sha256(self._session_key, f"{role} {label}".encode() + b"\0" + message)


_Action = Callable[[Handshake, bytes], list[tuple[bytes, bool]]]
# What either side reads, in order: size in bytes, and what is done with it. The last size is set by
# the head before it.
_STEPS: tuple[tuple[int, _Action], ...] = (
    (_PREAMBLE.size, Handshake._take_preamble),
    (NONCE_BYTES, Handshake._take_nonce),
    (TAG_BYTES, Handshake._take_proof),
    (_HELLO_HEAD.size, Handshake._take_hello_head),
    (TAG_BYTES, Handshake._take_hello),
)
