"""Only who knows the secret gets through, and nobody learns or gets anything before."""

from __future__ import annotations

import hashlib
import hmac
import os
import random

import pytest

from onehop._protocol.handshake import (
    HELLO_LIMIT_BYTES,
    MAGIC,
    NONCE_BYTES,
    TAG_BYTES,
    VERSION,
    Handshake,
    hmac_sha256,
    size_bytes,
)
from onehop.errors import HandshakeError

SECRET = bytes(range(32))


class Side:
    """One machine, with a record of what it said."""

    def __init__(
        self,
        role: str,
        secret: bytes = SECRET,
        cluster_id: str = "cluster",
        hello: bytes = b"",
        descriptors: int = 0,
    ) -> None:
        self.machine = Handshake(role, secret, cluster_id, hello or role.encode(), descriptors)
        self.said: list[bytes] = []
        self.said_with_descriptors: list[bytes] = []

    def start(self) -> bytes:
        data = self.machine.start()
        self.said.append(data)
        return data

    def hear(self, data: bytes, piece: int = 1 << 30) -> bytes:
        """Feed in pieces that the machine wants; return everything that it says."""
        answer = b""
        while data:
            count = min(self.machine.wanted, piece)
            assert count, "it has what it wanted"
            for output, with_descriptors in self.machine.feed(data[:count]):
                self.said.append(output)
                if with_descriptors:
                    self.said_with_descriptors.append(output)
                answer += output
            data = data[count:]
        return answer


def converse(connector: Side, acceptor: Side, piece: int = 1 << 30) -> None:
    """Carry bytes until nobody says anything any more."""
    data = connector.start()
    while data:
        data = acceptor.hear(data, piece)
        if data:
            data = connector.hear(data, piece)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 31, 1 << 30])
def test_both_get_the_other_ones_hello(piece: int) -> None:
    connector = Side("connect", hello=b"I am 3", descriptors=2)
    acceptor = Side("accept", hello=b"I am 1" * 1000)
    converse(connector, acceptor, piece)
    assert connector.machine.done
    assert acceptor.machine.done
    assert connector.machine.peer_hello == b"I am 1" * 1000
    assert acceptor.machine.peer_hello == b"I am 3"
    assert acceptor.machine.peer_descriptor_count == 2
    assert connector.machine.peer_descriptor_count == 0
    for side in (connector, acceptor):
        assert side.machine.wanted == 0
        # Descriptors go along with the hello alone, so after the peer's proof.
        assert side.said_with_descriptors == [side.said[-1]]
    assert sum(map(len, connector.said)) == size_bytes("connect", 6)
    assert sum(map(len, acceptor.said)) == size_bytes("accept", 6000)


def test_an_empty_hello_and_the_largest() -> None:
    for hello in (b"", b"h" * HELLO_LIMIT_BYTES):
        connector = Handshake("connect", SECRET, "c", hello)
        acceptor = Handshake("accept", SECRET, "c", hello)
        data = connector.start()
        here, there = acceptor, connector
        while data:
            replies = b""
            while data:
                count = here.wanted
                replies += b"".join(output for output, _ in here.feed(data[:count]))
                data = data[count:]
            data, here, there = replies, there, here
        assert connector.done
        assert acceptor.done
        assert connector.peer_hello == acceptor.peer_hello == hello


@pytest.mark.parametrize("wrong", ["connect", "accept"])
def test_a_wrong_secret_is_refused_by_both(wrong: str) -> None:
    sides = {
        role: Side(role, secret=os.urandom(32) if role == wrong else SECRET, hello=b"private")
        for role in ("connect", "accept")
    }
    with pytest.raises(HandshakeError, match="secret"):
        converse(sides["connect"], sides["accept"])
    assert not any(b"private" in said for side in sides.values() for said in side.said)


def test_an_acceptor_refuses_a_connector_that_ignores_the_failure() -> None:
    acceptor = Side("accept", hello=b"private")
    stranger = Side("connect")
    answer = acceptor.hear(stranger.start())
    assert len(answer) == 6 + NONCE_BYTES + TAG_BYTES
    with pytest.raises(HandshakeError, match="secret"):
        acceptor.hear(os.urandom(TAG_BYTES))
    assert not acceptor.machine.peer_proven
    assert acceptor.said_with_descriptors == []


def test_another_cluster_with_the_same_secret_is_refused() -> None:
    with pytest.raises(HandshakeError, match="another cluster"):
        converse(Side("connect", cluster_id="one"), Side("accept", cluster_id="two"))


def test_what_was_overheard_is_worth_nothing_later() -> None:
    """Replay, against either side."""
    connector, acceptor = Side("connect"), Side("accept")
    converse(connector, acceptor)
    again = Side("accept")
    again.hear(connector.said[0])
    with pytest.raises(HandshakeError, match="secret"):
        again.hear(b"".join(connector.said[1:]))
    victim = Side("connect")
    victim.start()
    with pytest.raises(HandshakeError, match="secret"):
        victim.hear(b"".join(acceptor.said))


def test_a_reflected_nonce_is_refused() -> None:
    connector = Side("connect")
    with pytest.raises(HandshakeError, match="reflection"):
        connector.hear(connector.start() + bytes(TAG_BYTES))


def test_an_acceptor_cannot_be_made_to_prove_for_an_attacker() -> None:
    """The attacker has no secret, and gets its answers from a second connection to the victim.

    As acceptor towards the victim's connector it needs a proof of the role "accept" over the nonces of
    that connection; any acceptor that it asks puts a fresh nonce of its own into its proof.
    """
    victim, oracle = Side("connect"), Side("accept")
    proof_of_oracle = oracle.hear(victim.start())
    # A pure relay is the only thing that works, and it is the cluster's own two members that talk then.
    forged = proof_of_oracle[:6] + os.urandom(NONCE_BYTES) + proof_of_oracle[6 + NONCE_BYTES :]
    with pytest.raises(HandshakeError, match="secret"):
        victim.hear(forged)


def test_a_proof_does_not_pass_for_the_other_role() -> None:
    acceptor = Side("accept")
    answer = acceptor.hear(Side("connect").start())
    with pytest.raises(HandshakeError, match="secret"):
        acceptor.hear(answer[-TAG_BYTES:])


def test_every_changed_bit_is_noticed() -> None:
    random.seed(3)
    for attempt in range(600):
        connector, acceptor = Side("connect", hello=b"some"), Side("accept", hello=b"other")
        data = connector.start()
        changed_turn = attempt % 4
        noticed = False
        for turn, side in enumerate((acceptor, connector, acceptor, connector)):
            if turn == changed_turn:
                place = random.randrange(len(data))
                changed = data[place] ^ 1 << random.randrange(8)
                data = data[:place] + bytes([changed]) + data[place + 1 :]
            try:
                data = side.hear(data)
            except HandshakeError:
                noticed = True
                break
        # A length that was made larger leaves the side waiting for what never comes.
        assert noticed or not (connector.machine.done and acceptor.machine.done)
        assert not connector.machine.done
        assert not (changed_turn < 3 and acceptor.machine.done)


@pytest.mark.parametrize("garbage", [b"G", b"GET / HTTP/1.1\r\n", b"\0" * 6, b"1hoq", b"\x80\x04"])
def test_garbage_is_refused_at_its_first_bytes(garbage: bytes) -> None:
    acceptor = Side("accept")
    with pytest.raises(HandshakeError, match="handshake"):
        acceptor.machine.feed(garbage[: acceptor.machine.wanted])
    with pytest.raises(HandshakeError):
        acceptor.machine.feed(b"")  # for ever


@pytest.mark.parametrize("role", ["connect", "accept"])
def test_another_version_is_named(role: str) -> None:
    side = Side(role)
    side.start()
    with pytest.raises(HandshakeError, match=f"version 77 .* version {VERSION}"):
        side.machine.feed(MAGIC + (77).to_bytes(2, "little"))
    if role == "accept":  # so that the connector can name it too
        other = Side("connect")
        other.start()
        other.hear(side.machine.farewell)
    else:
        assert side.machine.farewell == b""


def test_more_than_is_due_is_refused() -> None:
    acceptor = Side("accept")
    with pytest.raises(HandshakeError, match="where at most"):
        acceptor.machine.feed(b"1hop" + bytes(1000))


def test_a_hello_that_is_announced_too_long_is_refused() -> None:
    connector, acceptor = Side("connect"), Side("accept")
    answer = acceptor.hear(connector.start())
    words = connector.hear(answer)
    acceptor.hear(words[:TAG_BYTES])
    with pytest.raises(HandshakeError, match="hello of"):
        acceptor.hear((HELLO_LIMIT_BYTES + 1).to_bytes(4, "little") + b"\0")


def test_a_changed_count_of_descriptors_is_noticed() -> None:
    connector, acceptor = Side("connect", descriptors=1), Side("accept")
    words = bytearray(connector.hear(acceptor.hear(connector.start())))
    words[TAG_BYTES + 4] = 2
    with pytest.raises(HandshakeError, match="changed on the way"):
        acceptor.hear(bytes(words))


def test_misuse_is_an_ordinary_error() -> None:
    with pytest.raises(ValueError, match="role"):
        Handshake("listen", SECRET, "c", b"")
    with pytest.raises(ValueError, match="32 bytes"):
        Handshake("accept", b"short", "c", b"")
    with pytest.raises(ValueError, match="hello"):
        Handshake("accept", SECRET, "c", bytes(HELLO_LIMIT_BYTES + 1))
    with pytest.raises(ValueError, match="descriptors"):
        Handshake("accept", SECRET, "c", b"", 254)


def test_our_hmac_is_the_standard_one() -> None:
    random.seed(1)
    for key_length in (0, 1, 32, 63, 64, 65, 200):
        for length in (0, 1, 55, 64, 1000):
            key, message = random.randbytes(key_length), random.randbytes(length)
            assert hmac_sha256(key, message) == hmac.digest(key, message, hashlib.sha256)
