"""Ed25519 keys whose PeerID equals the libp2p PeerID, and signatures under a named domain.

A signature covers `"atoll/" domain "\\0" run-id? message`, so that bytes signed for one purpose never verify for
another.
"""

from typing import Annotated, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from atoll.protocols.errors import ConfigError, SignatureFault
from atoll.protocols.ids import PeerId, peer_id_of, public_key_of

SIGNATURE_BYTES = 64
Signature: TypeAlias = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""An Ed25519 key: the public one, or the seed of a private one."""


class Identity:
    """An Ed25519 private key and its libp2p PeerID."""

    def __init__(self, seed: bytes) -> None:
        """`seed`: 32 secret bytes. Raises ConfigError for another length."""
        if len(seed) != 32:
            raise ConfigError(f"an identity seed has 32 bytes, not {len(seed)}")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @property
    def public_key(self) -> bytes:
        """Raw public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, domain: str, message: bytes) -> bytes:
        """64-byte signature over `message` under `domain`."""
        return self._key.sign(_scoped(domain, message))

    def libp2p_private_key(self) -> bytes:
        """libp2p's protobuf `PrivateKey{Ed25519, seed || public}`, the content of p2pd's `-id` file."""
        return bytes.fromhex("08011240") + self._seed + self.public_key

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(peer: PeerId, domain: str, message: bytes, signature: bytes) -> None:
    """Raise SignatureFault unless `peer` signed `message` under `domain`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key_of(peer)).verify(signature, _scoped(domain, message))
    except InvalidSignature as error:
        raise SignatureFault(f"signature of {peer} does not verify for {domain}") from error


def _scoped(domain: str, message: bytes) -> bytes:
    return b"atoll/" + domain.encode() + b"\0" + message
