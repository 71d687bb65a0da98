"""DHT records: small, signed by the peer under whose name they are stored, and expired within minutes.

The signature covers the expiry, so nobody can prolong a record or replace it by an older one. Everything read from
the DHT is a hint. Under a run's key lie its members, under RUNS_KEY the public runs. Wire: docs/wires/dht.md.
"""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import MADDRS_PER_PEER, legal_maddrs
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import Digest, PeerId, RunId, digest, peer_bytes
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.run.run_spec import RunSpec, open_run

RECORD_VERSION = 1
MAX_TTL_S = 900
CLOCK_SKEW_S = 30
VALUE_MAX_BYTES = 3072
RECORD_MAX_BYTES = VALUE_MAX_BYTES + 512
RECORDS_PER_KEY = 256
NAMED = 20
"""Most contacts that one answer names."""
_DOMAIN = "dht/1"
Maddrs: TypeAlias = Annotated[tuple[str, ...], Meta(max_length=MADDRS_PER_PEER)]
RUNS_KEY = digest(b"atoll/dht/runs/2")
"""DHT key of the list of public runs, whose records are Listings."""


def run_key(run: RunId) -> Digest:
    """DHT key of the members of a run, whose records are Addresses."""
    return digest(b"atoll/dht/run/1\0", run)


def place(peer: PeerId) -> Digest:
    """Where a peer stands among the keys: a hash, so that no peer can choose what it is near to."""
    return digest(b"atoll/dht/peer/1\0", peer_bytes(peer))


def distance(key: bytes, peer: PeerId) -> int:
    """XOR of a key and a peer's place."""
    return int.from_bytes(key) ^ int.from_bytes(place(peer))


class Listing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run in the list of runs."""

    run_file: bytes
    """Signed RunSpec."""
    since_s: int
    """When the author got the run, Unix seconds; a claim."""


class PublicRun(NamedTuple):
    """A run of the list, verified by its id and its owner's signature."""

    spec: RunSpec
    run_file: bytes
    age_s: float
    """Age in seconds by the claim of the owner, else by the median claim of the members that list the run."""


class DhtRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One author's value under one key."""

    version: int
    key: Digest
    author: PeerId
    expires_s: int
    """Expiry, Unix seconds: the DHT is the one place that needs a common clock, to about a minute."""
    value: Annotated[bytes, Meta(max_length=VALUE_MAX_BYTES)]
    signature: Signature


class Contact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer that serves the DHT, and where it can be dialled."""

    peer: PeerId
    maddrs: Maddrs


class FindRecords(msgspec.Struct, frozen=True, array_like=True, tag="find", forbid_unknown_fields=True):
    """Request for the records under a key, and for contacts near it."""

    key: Digest
    maddrs: Maddrs
    """Where the requester serves the DHT; empty: it does not."""


class StoreRecord(msgspec.Struct, frozen=True, array_like=True, tag="store", forbid_unknown_fields=True):
    """Request to keep a record of the requester; the answer is one byte, or empty for a refusal."""

    record: bytes


DhtRequest: TypeAlias = FindRecords | StoreRecord


class Found(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer to FindRecords."""

    records: Annotated[tuple[bytes, ...], Meta(max_length=RECORDS_PER_KEY)]
    contacts: Annotated[tuple[Contact, ...], Meta(max_length=NAMED)]


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


def read_runs(records: Iterable[bytes], now_s: float) -> dict[RunId, PublicRun]:
    """Runs from DHT records, by run id; records that do not verify are left out."""
    specs: dict[bytes, RunSpec] = {}
    claims: dict[bytes, dict[PeerId, int]] = {}
    for record in _legal(records, RUNS_KEY, now_s):
        try:
            listing = codec.decode(record.value, Listing, max_bytes=VALUE_MAX_BYTES)
            if listing.run_file not in specs:
                specs[listing.run_file] = open_run(listing.run_file)
        except PeerFault:
            continue
        claims.setdefault(listing.run_file, {})[record.author] = listing.since_s
    since_s = {data: claims[data].get(spec.owner, median(claims[data].values())) for data, spec in specs.items()}
    return {spec.id: PublicRun(spec, data, max(0.0, now_s - since_s[data])) for data, spec in specs.items()}


def _legal(records: Iterable[bytes], key: Digest, now_s: float) -> Iterator[DhtRecord]:
    for data in records:
        try:
            record = decode_record(data, now_s)
        except PeerFault:
            continue
        if record.key == key:
            yield record
