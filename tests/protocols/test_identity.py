"""Keys, PeerIDs and signatures. The PeerID is the one that libp2p computes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import Identity, verify
from atoll.protocols.ids import digest, peer_bytes, peer_from_bytes, peer_id_of, public_key_of, short

# RFC 8032 §7.1, test 1: this seed has this public key.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def test_known_key_and_signature_scope():
    identity = Identity(SEED)
    assert identity.public_key == PUBLIC
    assert identity.peer_id == "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"
    assert identity.libp2p_private_key()[:4].hex() == "08011240"
    assert "9d61b19d" not in repr(identity)


def test_a_seed_of_another_length_is_a_config_error():
    with pytest.raises(ConfigError):
        Identity(b"short")


@settings(max_examples=30)
@given(st.binary(max_size=100), st.binary(min_size=32, max_size=32))
def test_a_signature_holds_for_its_peer_domain_and_message_only(message, seed):
    identity, other = Identity(seed), Identity(digest(seed))
    signature = identity.sign("feed/1", message)
    verify(identity.peer_id, "feed/1", message, signature)
    wrong = [
        (other.peer_id, "feed/1", message, signature),
        (identity.peer_id, "run/1", message, signature),
        (identity.peer_id, "feed/1", message + b"x", signature),
        (identity.peer_id, "feed/1", message, signature[:-1]),
        (identity.peer_id, "feed/1", message, bytes(64)),
    ]
    for case in wrong:
        with pytest.raises(SignatureFault):
            verify(*case)


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_round_trip(key):
    peer = peer_id_of(key)
    assert public_key_of(peer) == key
    assert peer_from_bytes(peer_bytes(peer)) == peer


@given(st.text(max_size=60) | st.text("123ABCabcKoDWz", min_size=50, max_size=54))
def test_text_is_a_peer_id_or_a_decode_error(text):
    try:
        assert peer_id_of(public_key_of(text)) == text
    except DecodeError:
        return


PEER = Identity(SEED).peer_id


@pytest.mark.parametrize(
    "text", ["", PEER + " ", " " + PEER, PEER + "\n", "1" + PEER, PEER[:-1], PEER[:-1] + "é", "\ud800" * 52]
)
def test_nearly_a_peer_id(text):
    with pytest.raises(DecodeError):
        public_key_of(text)


@given(st.binary(max_size=40))
def test_bytes_are_a_peer_id_or_a_decode_error(raw):
    with pytest.raises(DecodeError):
        peer_from_bytes(raw)


@pytest.mark.parametrize("key", [bytes(32), b"\x01" + bytes(31), b"\xff" * 32])
def test_weak_and_illegal_keys_verify_nothing(key):
    with pytest.raises(SignatureFault):
        verify(peer_id_of(key), "feed/1", b"message", b"\x02" * 64)


def test_digest_is_blake3_over_the_parts():
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest(b"a", memoryview(b"bc")) == digest(b"abc")
    assert short(digest(b"")) == "af1349b9"
    assert short(PEER) == PEER[-8:]
