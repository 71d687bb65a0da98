"""Words of the second topology: which contributions a Reduction covers, parts of payloads, openings and proofs.

See docs/wires/reduction.md. Sizes that are legal follow from `ReductionRules`, never from the wire.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, RunId
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, MAX_SET, Reduction, set_digest
from atoll.protocols.ledger.rows import row_bytes
from atoll.protocols.run.arena import CHUNK, Span, arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.slices import SlicePlan

KEPT_BYTES = 4 * CHUNK
"""Error feedback of one chunk: int32, little endian, units of 2⁻²⁶."""
PROOF_VERSION = 1
ASK_MAX_BYTES = 256


class ReductionRules(msgspec.Struct, frozen=True):
    """What of the RunSpec decides whether a Reduction is right."""

    run: RunId
    chunks: int
    k: int
    """Values per chunk of a contribution."""
    reduced_k: int
    """Values per chunk of a reduction."""
    floor_256: int


def rules_of(spec: RunSpec) -> ReductionRules:
    """Of a run whose rounds may be reduced."""
    assert spec.reduce is not None, "the run never reduces"
    chunks = arena_of(spec.model).chunks
    return ReductionRules(spec.id, chunks, spec.compress.k, spec.reduce.k, spec.outer.floor_256)


class Offer(NamedTuple):
    """A contribution to a round: one element of its set."""

    entry: Digest
    author: PeerId
    weight: int
    seq: int
    """Place in the author's feed."""


class Claim(NamedTuple):
    """A Reduction and who wrote it."""

    entry: Digest
    author: PeerId
    body: Reduction


class RowsAsk(msgspec.Struct, frozen=True, array_like=True, tag="rows", forbid_unknown_fields=True):
    """Which rows of the payload of a Contribution."""

    contribution: Digest
    span: Span


class RowsAnswer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows, end to end, and their path to the root in the Contribution."""

    rows: bytes
    path: bytes


class OpeningAsk(msgspec.Struct, frozen=True, array_like=True, tag="opening", forbid_unknown_fields=True):
    """Show how this chunk was reduced."""

    reduction: Digest
    chunk: int
    """Of the arena."""


Ask: TypeAlias = RowsAsk | OpeningAsk


class Opening(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that went into one chunk of a reduction, and what came out, with paths to the signed roots."""

    chunk: int
    row: bytes
    """What the reduction says about the chunk."""
    row_path: bytes
    before: bytes
    """The error feedback that it began with; empty where it began with zeros."""
    before_path: bytes
    """To `kept` of the previous Reduction."""
    after: Digest
    """Leaf of the error feedback that remained."""
    after_path: bytes
    raw: tuple[tuple[bytes, bytes], ...]
    """Row and path of each covered contribution, by rising entry id."""


class FaultProof(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An opening with the signed entries that it belongs to: complete, so that it can be checked alone."""

    version: int
    reduction: bytes
    previous: bytes
    """The entry that `Reduction.previous` names; empty if it names none."""
    contributions: tuple[bytes, ...]
    """By rising entry id."""
    opening: Opening


def path_max_bytes(chunks: int) -> int:
    """Longest path of neighbouring leaves: two digests per level."""
    return 2 * DIGEST_BYTES * chunks.bit_length()


def rows_max_bytes(span: Span, chunks: int, k: int) -> int:
    """Cap of a RowsAnswer."""
    return span.chunks * row_bytes(k) + path_max_bytes(chunks) + 64


def opening_max_bytes(rules: ReductionRules, members: int) -> int:
    """Cap of an Opening of so many contributions: what a sampler plans with, too."""
    path = path_max_bytes(rules.chunks)
    return KEPT_BYTES + row_bytes(rules.reduced_k) + 3 * path + 128 + members * (row_bytes(rules.k) + path + 16)


def proof_max_bytes(rules: ReductionRules, members: int) -> int:
    """Cap of a FaultProof of so many contributions."""
    return opening_max_bytes(rules, members) + (members + 2) * (ENTRY_MAX_BYTES + 8)


def decode_ask(data: bytes) -> Ask:
    """A question on the wire. Raises DecodeError; whether span and chunk exist is the answerer's to see."""
    ask: Ask = codec.decode(data, cast(type[RowsAsk], Ask), max_bytes=ASK_MAX_BYTES)
    return ask


def decode_proof(data: bytes | memoryview, rules: ReductionRules) -> FaultProof:
    """A well-formed proof; whether it proves anything is `node/learning/reduction/judging.py`'s to say.
    Raises DecodeError."""
    proof = codec.decode(data, FaultProof, max_bytes=proof_max_bytes(rules, MAX_SET))
    if proof.version != PROOF_VERSION:
        raise DecodeError(f"fault proof of version {proof.version}; this node reads {PROOF_VERSION}")
    return proof


def cover(offers: Iterable[Offer], plan: SlicePlan) -> tuple[bytes, tuple[Digest, ...], Digest]:
    """`covered`, `more` and `members` of a Reduction of these contributions, one per author."""
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
    """The covered contributions by rising entry id; None unless all are among `offers` (one per author)."""
    bits = int.from_bytes(body.covered, "little")
    if len(body.covered) != -(-len(plan.authors) // 8) or bits >> len(plan.authors):
        return None
    wanted = {author for place, author in enumerate(plan.authors) if bits >> place & 1}
    more = set(body.more)
    found = [offer for offer in offers if offer.author in wanted or offer.entry in more]
    if len(found) != len(wanted) + len(more) or set_digest([offer.entry for offer in found]) != body.members:
        return None
    return tuple(sorted(found))
