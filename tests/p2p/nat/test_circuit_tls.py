"""TLS between the ends of a circuit: both prove their PeerIDs, nobody else can, no change of bytes passes."""

import contextlib
import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.nat.circuit_tls import Credentials, Tls, peer_of
from atoll.protocols.errors import SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.nat import RECORDS_BYTES, SEALED_MAX_BYTES

A, B = Identity(b"a" * 32), Identity(b"b" * 32)


def shaken(first: Credentials, second: Credentials) -> tuple[Tls, Tls]:
    client, server = first.connection(client=True), second.connection(client=False)
    for _ in range(4):
        client.handshake()
        server.feed(client.outgoing())
        server.handshake()
        client.feed(server.outgoing())
    assert client.handshake()
    assert server.handshake()
    return client, server


@pytest.fixture(scope="module")
def pair() -> tuple[Credentials, Credentials]:
    return Credentials(A), Credentials(B)


def test_both_ends_learn_who_the_other_is(pair):
    client, server = shaken(*pair)
    assert client.peer() == B.peer_id
    assert server.peer() == A.peer_id


@given(st.lists(st.binary(max_size=50_000), max_size=4))
@settings(max_examples=20, deadline=None)
def test_what_is_sealed_comes_out(parts):
    client, server = shaken(Credentials(A), Credentials(B))
    for part in parts:
        server.feed(client.seal(part))
        assert server.plaintext() == part
    client.feed(server.seal(b"back"))
    assert client.plaintext() == b"back"


def test_a_batch_fits_its_cap(pair):
    client, _ = shaken(*pair)
    assert RECORDS_BYTES < len(client.seal(bytes(RECORDS_BYTES))) <= SEALED_MAX_BYTES


@given(st.integers(min_value=0), st.integers(1, 255))
@settings(max_examples=25, deadline=None)
def test_a_changed_byte_never_passes(at, flip):
    client, server = shaken(Credentials(A), Credentials(B))
    sealed = bytearray(client.seal(b"the weights"))
    sealed[at % len(sealed)] ^= flip
    server.feed(bytes(sealed))
    with contextlib.suppress(Unreachable):
        assert server.plaintext() == b""


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None)
def test_garbage_ends_the_handshake(data):
    server = Credentials(B).connection(client=False)
    server.feed(data)
    with contextlib.suppress(Unreachable):
        assert not server.handshake()


def certificate(
    extension: bytes | None, key: ec.EllipticCurvePrivateKey, shown: ec.EllipticCurvePublicKey | None = None
) -> x509.Certificate:
    """A certificate that `key` signs, of its own public key or of the one that is `shown`."""
    name, day = x509.Name([]), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, shown or key.public_key(), 1, day, day + datetime.timedelta(days=9999)
    )
    if extension is not None:
        oid = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, extension), critical=True)
    return builder.sign(key, hashes.SHA256())


def test_a_certificate_of_another_key_proves_nothing(pair):
    client, _ = shaken(*pair)
    real = client._connection.get_peer_certificate(as_cryptography=True)
    oid = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
    stolen = real.extensions.get_extension_for_oid(oid).value.value
    thief = ec.generate_private_key(ec.SECP256R1())
    for extension in (stolen, None, b"", stolen[:-1], stolen + b"\0", bytes(len(stolen))):
        with pytest.raises(SignatureFault):
            peer_of(certificate(extension, thief))
    assert peer_of(real) == B.peer_id


def test_a_certificate_of_our_key_that_another_signed_proves_nothing(pair):
    client, _ = shaken(*pair)
    real = client._connection.get_peer_certificate(as_cryptography=True)
    proof = real.extensions.get_extension_for_oid(x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")).value.value
    with pytest.raises(SignatureFault):
        peer_of(certificate(proof, ec.generate_private_key(ec.SECP256R1()), real.public_key()))
