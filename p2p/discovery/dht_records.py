"""DHT records: small, signed by the peer under whose name they are stored, and expired within minutes.

The signature covers the expiry, so nobody can prolong a record or replace it by an older one. Everything read from
the DHT is a hint.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import legal_maddrs
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import Digest, PeerId, RunId, digest
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.run.run_spec import RunSpec, open_run

RECORD_VERSION = 1
MAX_TTL_S = 900
CLOCK_SKEW_S = 30
VALUE_MAX_BYTES = 3072
RECORD_MAX_BYTES = VALUE_MAX_BYTES + 512
RECORDS_PER_KEY = 256
_DOMAIN = "dht/1"
RUNS_KEY = digest(b"atoll/dht/runs/1")
"""DHT key of the list of runs, whose records are `.run` bytes."""


def run_key(run: RunId) -> Digest:
    """DHT key of the members of a run, whose records are Addresses."""
    return digest(b"atoll/dht/run/1\0", run)


class DhtRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One author's value under one key."""

    version: int
    key: Digest
    author: PeerId
    expires_s: int
    """Expiry, Unix seconds: the DHT is the one place that needs a common clock, to about a minute."""
    value: Annotated[bytes, Meta(max_length=VALUE_MAX_BYTES)]
    signature: Signature


def unsigned(record: DhtRecord) -> bytes:
    """The bytes that the signature covers."""
    return codec.encode((record.version, record.key, record.author, record.expires_s, record.value))


def sign_record(author: Identity, key: Digest, value: bytes, expires_s: int) -> bytes:
    """Bytes of a record, signed by its author."""
    draft = DhtRecord(RECORD_VERSION, key, author.peer_id, expires_s, value, b"")
    return codec.encode(msgspec.structs.replace(draft, signature=author.sign(_DOMAIN, unsigned(draft))))


def decode_record(data: bytes, now_s: float) -> DhtRecord:
    """A legal, signed record that has not expired. Raises DecodeError or SignatureFault."""
    record = codec.decode(data, DhtRecord, max_bytes=RECORD_MAX_BYTES)
    if record.version != RECORD_VERSION:
        raise DecodeError("DHT record of another version")
    if not now_s - CLOCK_SKEW_S <= record.expires_s <= now_s + MAX_TTL_S + CLOCK_SKEW_S:
        raise DecodeError("DHT record: dead, or made to live too long")
    verify(record.author, _DOMAIN, unsigned(record), record.signature)
    return record


def read_addresses(records: Iterable[bytes], run: RunId, now_s: float) -> list[PeerAddress]:
    """Addresses of members from DHT records; records that do not verify are left out."""
    found: dict[PeerId, PeerAddress] = {}
    for record in _legal(records, run_key(run), now_s):
        try:
            maddrs = legal_maddrs(codec.decode(record.value, Addresses, max_bytes=VALUE_MAX_BYTES).maddrs)
        except DecodeError:
            continue
        if maddrs:
            found[record.author] = PeerAddress(record.author, maddrs)
    return list(found.values())


def read_runs(records: Iterable[bytes], now_s: float) -> dict[RunId, RunSpec]:
    """Runs from DHT records, by run id; records that do not verify are left out."""
    found: dict[RunId, RunSpec] = {}
    for record in _legal(records, RUNS_KEY, now_s):
        try:
            spec = open_run(record.value)
        except PeerFault:
            continue
        found[spec.id] = spec
    return found


def _legal(records: Iterable[bytes], key: Digest, now_s: float) -> Iterable[DhtRecord]:
    for data in records:
        try:
            record = decode_record(data, now_s)
        except PeerFault:
            continue
        if record.key == key:
            yield record
