"""Identifiers: distinct types for peers, runs, digests and rounds, and conversions of PeerIDs."""

from functools import lru_cache
from typing import Annotated, NewType, TypeAlias

import base58
from blake3 import blake3
from msgspec import Meta

from atoll.protocols.errors import DecodeError

DIGEST_BYTES = 32
_Hash: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
PeerId = NewType("PeerId", Annotated[str, Meta(max_length=54)])
"""libp2p PeerID of an Ed25519 key, in base58: `12D3Koo…`."""
RunId = NewType("RunId", _Hash)
"""BLAKE3 of the canonical RunSpec, 32 bytes."""
Digest = NewType("Digest", _Hash)
"""BLAKE3 hash, 32 bytes."""
Round = NewType("Round", int)
"""Number of an outer step, from 0."""
RecordRound: TypeAlias = Annotated[Round, Meta(ge=0, lt=1 << 24)]
"""A Round in a peer's record."""
Link: TypeAlias = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""A Digest, or empty for none; the message's own check refuses other lengths."""
_ED25519_MULTIHASH = bytes.fromhex("002408011220")  # identity multihash of a libp2p Ed25519 public key


def digest(*parts: bytes | memoryview) -> Digest:
    """BLAKE3 over the concatenation of `parts`."""
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return Digest(hasher.digest())


def short(value: bytes | str) -> str:
    """Eight characters for people: the start of a digest in hex, or the distinctive tail of a PeerID."""
    return value.hex()[:8] if isinstance(value, bytes) else value[-8:]


@lru_cache(maxsize=65536)
def peer_id_of(public_key: bytes) -> PeerId:
    """PeerID of a raw Ed25519 public key (32 bytes), as libp2p computes it."""
    if len(public_key) != 32:
        raise DecodeError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_ED25519_MULTIHASH + public_key).decode())


@lru_cache(maxsize=65536)
def public_key_of(peer: PeerId) -> bytes:
    """Raw Ed25519 public key inside a PeerID. Raises DecodeError for any other kind of PeerID."""
    return peer_bytes(peer)[6:]


@lru_cache(maxsize=65536)
def peer_bytes(peer: PeerId) -> bytes:
    """Multihash form (38 bytes) of a PeerID, used in libp2p's own messages. Raises DecodeError."""
    if not 50 <= len(peer) <= 54:
        raise DecodeError("not an Ed25519 PeerID: wrong length")
    try:
        raw: bytes = base58.b58decode(peer)
    except ValueError as error:
        raise DecodeError(f"not base58: {error}") from error
    if len(raw) != 38 or not raw.startswith(_ED25519_MULTIHASH) or base58.b58encode(raw).decode() != peer:
        raise DecodeError("not an Ed25519 PeerID")
    return raw


def peer_from_bytes(raw: bytes) -> PeerId:
    """PeerID with this multihash form. Raises DecodeError unless it belongs to an Ed25519 key."""
    if len(raw) != 38 or not raw.startswith(_ED25519_MULTIHASH):
        raise DecodeError("not an Ed25519 PeerID")
    return peer_id_of(raw[6:])
