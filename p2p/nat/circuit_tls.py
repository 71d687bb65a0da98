"""TLS 1.3 between the two ends of a relayed circuit, as libp2p's TLS handshake does it.

A circuit crosses two encrypted connections, and the relay between them would read and change every byte. Each end
shows a self-signed certificate of a throw-away key; an extension holds its libp2p public key and that key's
signature over the throw-away key. So both ends know each other's PeerID and the relay sees ciphertext.
Rule: libp2p TLS spec, https://github.com/libp2p/specs/blob/master/tls/tls.md. No I/O here: bytes in, bytes out.
The first circuit imports this: most nodes have none, and X.509 takes 16 ms.
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
from atoll.protocols.nat import RECORDS_BYTES

_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_PREFIX: Final = b"libp2p-tls-handshake:"
_ED25519_PROTOBUF: Final = bytes.fromhex("08011220")
_SIGNED_KEY: Final = bytes((0x30, 4 + 36 + 64, 0x04, 36))
_UNPROVED: Final = (
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    InvalidSignature,
    UnsupportedAlgorithm,
    ValueError,
    TypeError,
)
# The dates are not checked: clocks of peers are not trusted. A fixed one reveals nothing about our clock.
_VALID_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_VALID_TO: Final = _VALID_FROM + datetime.timedelta(days=3650)


class Credentials:
    """The certificate of this process, used for every circuit."""

    def __init__(self, identity: Identity) -> None:
        # A throw-away key, so that TLS never signs with the key of the identity; P-256 is what every peer knows.
        key = ec.generate_private_key(ec.SECP256R1())
        spki = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        signed_key = (
            _SIGNED_KEY + _ED25519_PROTOBUF + identity.public_key + b"\x04\x40" + _libp2p_signature(identity, spki)
        )
        name = x509.Name([])
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), 1, _VALID_FROM, _VALID_TO)
            .add_extension(x509.UnrecognizedExtension(_EXTENSION, signed_key), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.peer_id = identity.peer_id
        self._context = SSL.Context(SSL.TLS_METHOD)
        self._context.set_min_proto_version(SSL.TLS1_3_VERSION)
        # No resumption: a ticket would skip the certificate, and with it the proof of the PeerID.
        self._context.set_options(SSL.OP_NO_TICKET)
        self._context.use_certificate(certificate)
        self._context.use_privatekey(key)
        self._context.set_session_id(b"atoll")
        # No authority signs these certificates: `Tls.peer` checks the proof in them after the handshake.
        self._context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, lambda *_: True)

    def connection(self, *, client: bool) -> "Tls":
        """Return a new connection; the side that opened the circuit is the client."""
        connection = SSL.Connection(self._context)
        if client:
            connection.set_connect_state()
        else:
            connection.set_accept_state()
        return Tls(connection)


class Tls:
    """One TLS connection in memory: received bytes go into `feed`, and what `outgoing` returns must be sent."""

    def __init__(self, connection: SSL.Connection) -> None:
        self._connection = connection

    def feed(self, data: bytes) -> None:
        """Hand in bytes that the other side sent."""
        if data:  # OpenSSL treats an empty write as an error
            self._connection.bio_write(data)

    def outgoing(self) -> bytes:
        """Return the bytes to send to the other side; empty if there are none."""
        parts = []
        try:
            while True:
                parts.append(self._connection.bio_read(1 << 20))
        except SSL.WantReadError:
            return b"".join(parts)

    def handshake(self) -> bool:
        """Advance the handshake; True when it is over. Raises Unreachable."""
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise Unreachable(f"TLS handshake failed: {_reason(error)}") from error
        return True

    def peer(self) -> PeerId:
        """Return the PeerID that the other side proved. Raises SignatureFault."""
        certificate = self._connection.get_peer_certificate(as_cryptography=True)
        if certificate is None:
            raise SignatureFault("no certificate")
        return peer_of(certificate)

    def seal(self, data: bytes | memoryview) -> bytes:
        """Encrypt up to RECORDS_BYTES of `data` into TLS records. Raises Unreachable."""
        try:
            sent = 0
            while sent < len(data):
                # A TLS record holds at most 2**14 bytes (RFC 8446 §5.1).
                sent += self._connection.send(bytes(data[sent : sent + 16384]))
        except SSL.Error as error:
            raise Unreachable(f"TLS: {_reason(error)}") from error
        return self.outgoing()

    def plaintext(self) -> bytes:
        """Decrypt what was fed in; empty until a whole record is there. Raises Unreachable."""
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
        # Self-signed: the holder of the throw-away key made the certificate and did not copy the extension.
        certificate.verify_directly_issued_by(certificate)
    except _UNPROVED as error:
        raise SignatureFault("the certificate does not prove a PeerID") from error
    return peer_id_of(public_key)


def _open_signed_key(der: bytes) -> tuple[bytes, bytes]:
    """Split the extension into (Ed25519 public key, signature). Raises ValueError for any other kind of key."""
    # DER has one encoding of an Ed25519 key with its signature, so a comparison of bytes replaces a parser.
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
