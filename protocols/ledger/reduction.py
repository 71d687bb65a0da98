"""Messages of reduced rounds: which contributions a Reduction covers, parts of payloads, openings and fault
proofs.

Wire: docs/wires/reduction.md. Legal sizes follow from `ReductionRules`, never from the wire.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, TypeAlias, cast

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, RunId
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, MAX_SET, Reduction, set_digest
from atoll.protocols.ledger.rows import row_bytes
from atoll.protocols.run.arena import CHUNK, ChunkIndex, Span, arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.slices import SlicePlan

KEPT_BYTES = 4 * CHUNK
"""Size of the error feedback of one chunk: int32 values, little endian, in units of 2⁻²⁶."""
OPENED_CHUNKS = 8
"""Neighbouring chunks that are opened together: they share most of their Merkle paths."""
PROOF_VERSION = 2
ASK_MAX_BYTES = 256


class ReductionRules(msgspec.Struct, frozen=True):
    """The values of a RunSpec that decide whether a Reduction is right."""

    run: RunId
    chunks: int
    """Number of chunks in the arena."""
    k: int
    """Values per chunk in a contribution."""
    reduced_k: int
    """Values per chunk in a Reduction."""
    floor_256: int
    """`outer.floor_256` of the RunSpec."""


def rules_of(spec: RunSpec) -> ReductionRules:
    """The rules of a run whose rounds may be reduced."""
    assert spec.reduce is not None, "the run never reduces"
    chunks = arena_of(spec.model).chunks
    return ReductionRules(spec.id, chunks, spec.compress.k, spec.reduce.k, spec.outer.floor_256)


class Offer(NamedTuple):
    """A contribution to a round: one element of its set."""

    entry: Digest
    """Entry id."""
    author: PeerId
    weight: int
    seq: int
    """Place in the author's feed."""


class Claim(NamedTuple):
    """A Reduction with its entry id and author."""

    entry: Digest
    author: PeerId
    body: Reduction


PackedKept: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=KEPT_BYTES + 1)]
"""A width in bits (one byte), then 4096 values of that width: see `node/learning/reduction/packing.py`."""


class RowsAsk(msgspec.Struct, frozen=True, array_like=True, tag="rows", forbid_unknown_fields=True):
    """Request for rows of a Contribution's payload."""

    contribution: Digest
    span: Span


class RowsAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows, end to end, and their Merkle path to the root in the Contribution."""

    rows: bytes
    path: bytes


class OpeningAsk(msgspec.Struct, frozen=True, array_like=True, tag="opening", forbid_unknown_fields=True):
    """Request for the Opening of a chunk of a Reduction and its neighbours (`opened_span`)."""

    reduction: Digest
    """Entry id of the Reduction."""
    chunk: ChunkIndex
    """Index of the chunk in the arena."""


Ask: TypeAlias = RowsAsk | OpeningAsk


class Opening(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Inputs and outputs of neighbouring chunks of a Reduction, with Merkle paths to the signed roots."""

    span: Span
    """The chunks: an `opened_span` of the slice."""
    rows: bytes
    """Rows of the chunks in the reduced payload, end to end."""
    rows_path: bytes
    """Path from `rows` to `rows` of the Reduction."""
    before: Annotated[tuple[PackedKept, ...], Meta(max_length=OPENED_CHUNKS)]
    """Error feedback before the round, packed, of each chunk that the previous Reduction's slice has."""
    before_path: bytes
    """Path from `before` to `kept` of the previous Reduction."""
    after: Annotated[tuple[Digest, ...], Meta(max_length=OPENED_CHUNKS)]
    """Leaf of the error feedback after the round, of each chunk."""
    after_path: bytes
    """Path from `after` to `kept` of the Reduction."""
    raw: Annotated[tuple[tuple[bytes, bytes], ...], Meta(max_length=MAX_SET)]
    """Rows and path of each covered contribution, by rising entry id."""


class FaultProof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An Opening with the signed entries that it belongs to; it can be checked without any other record."""

    version: int
    reduction: Annotated[bytes, Meta(max_length=ENTRY_MAX_BYTES)]
    """Encoded entry of the Reduction."""
    previous: Annotated[bytes, Meta(max_length=ENTRY_MAX_BYTES)]
    """Encoded entry that `Reduction.previous` names; empty if it names none."""
    contributions: Annotated[tuple[bytes, ...], Meta(max_length=MAX_SET)]
    """Encoded entries of the covered contributions, by rising entry id."""
    opening: Opening


def path_max_bytes(chunks: int) -> int:
    """Size in bytes of the longest path of neighbouring leaves: two digests per level."""
    return 2 * DIGEST_BYTES * chunks.bit_length()


def rows_max_bytes(span: Span, chunks: int, k: int) -> int:
    """Largest legal RowsAnswer, in bytes."""
    return span.chunks * row_bytes(k) + path_max_bytes(chunks) + 64


def opened_span(span: Span, chunk: int) -> Span:
    """The chunks of a slice that are opened with one of them: the slice is cut into groups from its start."""
    start = chunk - (chunk - span.start) % OPENED_CHUNKS
    return Span(start, min(start + OPENED_CHUNKS, span.stop))


def opening_max_bytes(rules: ReductionRules, members: int) -> int:
    """Largest legal Opening that covers `members` contributions, in bytes."""
    path, chunks = path_max_bytes(rules.chunks), min(OPENED_CHUNKS, rules.chunks)
    reduced = chunks * (KEPT_BYTES + 4 + row_bytes(rules.reduced_k) + DIGEST_BYTES + 2)
    return reduced + 3 * path + 128 + members * (chunks * row_bytes(rules.k) + path + 16)


def proof_max_bytes(rules: ReductionRules, members: int) -> int:
    """Largest legal FaultProof that covers `members` contributions, in bytes."""
    return opening_max_bytes(rules, members) + (members + 2) * (ENTRY_MAX_BYTES + 8)


def decode_ask(data: bytes) -> Ask:
    """A request from the wire. Raises DecodeError; the caller checks that span and chunk exist."""
    ask: Ask = codec.decode(data, cast(type[RowsAsk], Ask), max_bytes=ASK_MAX_BYTES)
    return ask


def decode_proof(data: bytes | memoryview, rules: ReductionRules) -> FaultProof:
    """A well-formed proof; `node/learning/reduction/judging.py` checks what it proves. Raises DecodeError."""
    proof = codec.decode(data, FaultProof, max_bytes=proof_max_bytes(rules, MAX_SET))
    if proof.version != PROOF_VERSION:
        raise DecodeError(f"fault proof of version {proof.version}; this node reads {PROOF_VERSION}")
    return proof


def cover(offers: Iterable[Offer], plan: SlicePlan) -> tuple[bytes, tuple[Digest, ...], Digest]:
    """Values of `covered`, `more` and `members` in a Reduction of these contributions, one per author."""
    bits, more, entries = 0, [], []
    places = {author: place for place, author in enumerate(plan.authors)}
    for offer in offers:
        entries.append(offer.entry)
        if offer.author in places:
            bits |= 1 << places[offer.author]
        else:
            more.append(offer.entry)
    return bits.to_bytes(-(-len(plan.authors) // 8), "little"), tuple(sorted(more)), set_digest(entries)


def covered_by(body: Reduction, plan: SlicePlan, offers: Sequence[Offer]) -> tuple[Offer, ...] | None:
    """The covered contributions by rising entry id; None unless all are among `offers` (one per author).

    None for more than MAX_SET, too.
    """
    bits = int.from_bytes(body.covered, "little")
    if len(body.covered) != -(-len(plan.authors) // 8) or bits >> len(plan.authors):
        return None
    wanted = {author for place, author in enumerate(plan.authors) if bits >> place & 1}
    more = set(body.more)
    found = [offer for offer in offers if offer.author in wanted or offer.entry in more]
    # A FaultProof about more could not be made.
    if len(found) != len(wanted) + len(more) or len(found) > MAX_SET:
        return None
    if set_digest([offer.entry for offer in found]) != body.members:
        return None
    return tuple(sorted(found))
