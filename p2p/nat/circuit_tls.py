"""TLS 1.3 between the two ends of a relayed circuit, as libp2p's TLS handshake does it.

Each side shows a self-signed certificate of a throw-away key; an extension holds its libp2p public key and that
key's signature over the throw-away key. So both ends know each other's PeerID and the relay sees ciphertext.
Rule: libp2p TLS spec, https://github.com/libp2p/specs/blob/master/tls/tls.md. No I/O here: bytes in, bytes out.
"""

import datetime
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from OpenSSL import SSL

from atoll.protocols.errors import SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, peer_id_of

RECORDS_BYTES: Final = 64 * 1024
"""Plain bytes that `seal` turns into one batch of records."""
SEALED_MAX_BYTES: Final = RECORDS_BYTES + 4096
"""Largest batch, record headers and tags included."""
_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_PREFIX: Final = b"libp2p-tls-handshake:"
_ED25519_PROTOBUF: Final = bytes.fromhex("08011220")
_SIGNED_KEY: Final = bytes((0x30, 4 + 36 + 64, 0x04, 36))
_UNPROVED: Final = (
    *(x509.ExtensionNotFound, x509.DuplicateExtension, InvalidSignature, UnsupportedAlgorithm),
    *(ValueError, TypeError),
)
_LIFE: Final = datetime.timedelta(days=3650)
_BORN: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
"""The dates are not checked: clocks of peers are not trusted. A fixed one tells nothing about ours."""


class Credentials:
    """This process's certificate; make one and use it for every circuit."""

    def __init__(self, identity: Identity) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        signed_key = (
            _SIGNED_KEY + _ED25519_PROTOBUF + identity.public_key + b"\x04\x40" + _libp2p_signature(identity, spki)
        )
        name = x509.Name([])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), 1, _BORN, _BORN + _LIFE)
            .add_extension(x509.UnrecognizedExtension(_EXTENSION, signed_key), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.peer_id = identity.peer_id
        self._context = SSL.Context(SSL.TLS_METHOD)
        self._context.set_min_proto_version(SSL.TLS1_3_VERSION)
        self._context.set_options(SSL.OP_NO_TICKET)
        self._context.use_certificate(certificate)
        self._context.use_privatekey(key)
        self._context.set_session_id(b"atoll")
        # Whom the certificate belongs to is decided by `peer` after the handshake, not by any authority.
        self._context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, lambda *_: True)

    def connection(self, *, client: bool) -> "Tls":
        """A new connection; the side that opened the circuit is the client."""
        connection = SSL.Connection(self._context)
        connection.set_connect_state() if client else connection.set_accept_state()
        return Tls(connection)


class Tls:
    """One connection. Bytes from the other side go into `feed`; what `outgoing` returns goes to the other side."""

    def __init__(self, connection: SSL.Connection) -> None:
        self._connection = connection

    def feed(self, data: bytes) -> None:
        """Bytes that the other side sent."""
        if data:  # OpenSSL takes an empty write for an error
            self._connection.bio_write(data)

    def outgoing(self) -> bytes:
        """Bytes for the other side; empty if there are none."""
        parts = []
        try:
            while True:
                parts.append(self._connection.bio_read(1 << 20))
        except SSL.WantReadError:
            return b"".join(parts)

    def shake(self) -> bool:
        """Go on with the handshake; True when it is over. Raises Unreachable."""
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise Unreachable(f"TLS handshake failed: {_reason(error)}") from error
        return True

    def peer(self) -> PeerId:
        """Who the other side proved to be. Raises SignatureFault."""
        certificate = self._connection.get_peer_certificate(as_cryptography=True)
        if certificate is None:
            raise SignatureFault("no certificate")
        return peer_of(certificate)

    def seal(self, data: bytes | memoryview) -> bytes:
        """Up to RECORDS_BYTES of plain bytes as records. Raises Unreachable."""
        try:
            sent = 0
            while sent < len(data):
                sent += self._connection.send(bytes(data[sent : sent + 16384]))
        except SSL.Error as error:
            raise Unreachable(f"TLS: {_reason(error)}") from error
        return self.outgoing()

    def plain(self) -> bytes:
        """Plain bytes that have come; empty if there are none. Raises Unreachable."""
        parts = []
        try:
            while True:
                parts.append(self._connection.recv(RECORDS_BYTES))
        except SSL.WantReadError:
            return b"".join(parts)
        except SSL.Error as error:
            raise Unreachable(f"TLS: {_reason(error)}") from error


def peer_of(certificate: x509.Certificate) -> PeerId:
    """PeerID that a libp2p certificate proves. Raises SignatureFault."""
    try:
        value = certificate.extensions.get_extension_for_oid(_EXTENSION).value
        assert isinstance(value, x509.UnrecognizedExtension)
        public_key, signature = _open_signed_key(value.value)
        spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _PREFIX + spki)
        certificate.verify_directly_issued_by(certificate)
    except _UNPROVED as error:
        raise SignatureFault("the certificate does not prove a PeerID") from error
    return peer_id_of(public_key)


def _open_signed_key(der: bytes) -> tuple[bytes, bytes]:
    """(Ed25519 public key, signature) of the extension; only the one form that Ed25519 keys have is legal."""
    head = len(_SIGNED_KEY) + len(_ED25519_PROTOBUF)
    if len(der) != head + 32 + 2 + 64 or der[:head] != _SIGNED_KEY + _ED25519_PROTOBUF:
        raise ValueError("not the signed key of an Ed25519 peer")
    if der[head + 32 : head + 34] != b"\x04\x40":
        raise ValueError("not the signed key of an Ed25519 peer")
    return der[head : head + 32], der[head + 34 :]


def _libp2p_signature(identity: Identity, spki: bytes) -> bytes:
    # libp2p's own domain: the bytes must equal what any libp2p implementation signs.
    seed = identity.libp2p_private_key()[4:36]
    return Ed25519PrivateKey.from_private_bytes(seed).sign(_PREFIX + spki)


def _reason(error: SSL.Error) -> str:
    details: Any = error.args[0] if error.args else ""
    return str(details[0][-1]) if isinstance(details, list) and details else type(error).__name__
