"""Ledger records: the entries that an author may append to its feed, and the checks that they must pass.

Every body is an array-like msgpack struct with a tag. A feed entry names the run, the author, its place in the
feed and the hash of the entry before it; the signature covers all of that.
"""

from typing import ClassVar, TypeAlias

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, SignatureFault
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import DIGEST_BYTES, Digest, PeerId, Round, RunId, digest, public_key_of
from atoll.protocols.run.admission import Permit, check_permit
from atoll.protocols.run.arena import Span
from atoll.protocols.run.model_spec import MAX_EXPERTS
from atoll.protocols.wires import FEED

FEED_VERSION = FEED.newest
MAX_SET = 1024
"""Most contributions that one round's set may hold."""
MAX_WEIGHT = 255
"""Largest weight of a contribution, in 64ths of the round's nominal tokens."""
ENTRY_MAX_BYTES = codec.MESSAGE_MAX_BYTES
_DOMAIN = "feed/1"


class Contribution(msgspec.Struct, frozen=True, array_like=True, tag="contribution", forbid_unknown_fields=True):
    """`author` trained in this round and offers its compressed pseudo-gradient, the payload."""

    round: Round
    base: Digest
    """State digest of the weights that the steps started from."""
    payload: Digest
    """BLAKE3 of the payload."""
    steps: int
    """Inner steps that were taken."""
    tokens: int
    """Tokens that the steps trained on."""
    weight: int
    """Share of the round's nominal tokens, in 64ths: 1 … 255. The mean is weighted by it."""
    loss: float
    """Mean training loss of the steps, nats per token. A claim, not a proof."""


class PartContribution(Contribution, frozen=True, array_like=True, tag="part", forbid_unknown_fields=True):
    """A Contribution that covers some of the experts only: those that its author trained (`outer.holders`)."""

    experts: bytes
    """Bitmap of the covered experts (protocols/run/experts.py), never empty."""


class SlicedContribution(Contribution, frozen=True, array_like=True, tag="sliced", forbid_unknown_fields=True):
    """A Contribution whose payload can be verified row by row; written in runs whose rounds may be reduced."""

    rows: Digest
    """Merkle root over the payload's rows (protocols/ledger/rows.py)."""


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack", forbid_unknown_fields=True):
    """`author` folded this set of contributions and holds this state."""

    round: Round
    members: Digest
    """Digest of the set of contributions."""
    state: Digest
    """Digest of Θ after the round."""


class Ballot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A ballot number of one round. Ballots are ordered by `attempt`, then by proposer, their owner."""

    attempt: int
    proposer: PeerId


class Proposal(msgspec.Struct, frozen=True, array_like=True, tag="proposal", forbid_unknown_fields=True):
    """The owner of `ballot` proposes the final set of a round and the state that results."""

    round: Round
    ballot: Ballot
    contributions: tuple[Digest, ...]
    """Entry ids of the set's contributions, sorted."""
    state: Digest
    """Digest of Θ after the round."""


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="vote", forbid_unknown_fields=True):
    """`author` votes for a proposal: it computed the same state and has promised no higher ballot."""

    round: Round
    ballot: Ballot
    proposal: Digest
    """Entry id of the Proposal."""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare", forbid_unknown_fields=True):
    """The owner of `ballot` asks the voters to vote in no lower ballot of this round."""

    round: Round
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise", forbid_unknown_fields=True):
    """`author` promises to vote in no ballot of this round below `ballot`, and names its highest vote so far."""

    round: Round
    ballot: Ballot
    voted: tuple[Digest, ...]
    """Entry id of the author's own highest Vote in this round; empty if there is none."""


class Reduction(msgspec.Struct, frozen=True, array_like=True, tag="reduction", forbid_unknown_fields=True):
    """`author` reduced its slice of these contributions to one payload; see docs/wires/reduction.md."""

    round: Round
    span: Span
    """Chunks of the slice, encoded as `[start, stop]`."""
    covered: bytes
    """Bitmap over the sorted authors of the set that named the reducers; bit 0 of byte 0 is the first."""
    more: tuple[Digest, ...]
    """Entry ids of covered contributions of other authors, sorted."""
    members: Digest
    """Digest of the set of covered contributions."""
    payload: Digest
    """BLAKE3 of the reduced payload, a blob."""
    rows: Digest
    """Merkle root over the rows of the reduced payload."""
    kept: Digest
    """Merkle root over the error feedback that remains, chunk by chunk."""
    previous: bytes
    """Entry id of the author's Reduction whose error feedback this one began with; empty: it began with zeros."""


class ReductionFault(msgspec.Struct, frozen=True, array_like=True, tag="fault", forbid_unknown_fields=True):
    """`author` holds a proof that a Reduction is wrong. The proof can be checked without other records."""

    round: Round
    """Round of the Reduction."""
    reduction: Digest
    """Entry id of the Reduction."""
    proof: Digest
    """Blob id of the FaultProof."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave", forbid_unknown_fields=True):
    """`author` leaves the run in good order after `round`."""

    round: Round


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit", forbid_unknown_fields=True):
    """`author` joins with a permit. Legal only as the first entry of a feed (seq 0)."""

    round: ClassVar[Round] = Round(-1)
    """Before the first round, so that no round's records contain it."""
    permit: Permit
    proof: bytes
    """Signature of the permit's key over (run, author)."""


FinalityBody: TypeAlias = Ack | Proposal | Vote | Prepare | Promise
Body: TypeAlias = (
    Contribution
    | PartContribution
    | SlicedContribution
    | FinalityBody
    | Leave
    | Admit
    | Reduction
    | ReductionFault
)


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One signed, hash-linked entry of an author's feed."""

    version: int
    run: RunId
    author: PeerId
    seq: int
    """Place in the feed, from 0, without gaps."""
    previous: bytes
    """Id of the entry before; empty at seq 0."""
    body: Body
    signature: bytes

    @property
    def id(self) -> Digest:
        """BLAKE3 of the signed part: the signature is not part of the id."""
        return digest(unsigned(self))


def unsigned(entry: Entry) -> bytes:
    """The bytes that the signature covers."""
    return codec.encode((entry.version, entry.run, entry.author, entry.seq, entry.previous, entry.body))


def sign_entry(run: RunId, author: Identity, seq: int, previous: bytes, body: Body) -> Entry:
    """The author's next entry, signed. Raises DecodeError for an illegal body."""
    draft = Entry(
        version=FEED_VERSION,
        run=run,
        author=author.peer_id,
        seq=seq,
        previous=previous,
        body=body,
        signature=b"",
    )
    check_body(body)
    return msgspec.structs.replace(draft, signature=author.sign(_DOMAIN, unsigned(draft)))


def encode_entry(entry: Entry) -> bytes:
    """Canonical bytes of an entry, on the wire and on disk."""
    return codec.encode(entry)


def decode_entry(data: bytes, run: RunId) -> Entry:
    """A legal, signed entry of this run. Raises DecodeError or SignatureFault. The store checks its link."""
    entry = codec.decode(data, Entry, max_bytes=ENTRY_MAX_BYTES)
    if entry.version != FEED_VERSION:
        raise DecodeError(f"feed version {entry.version}; this node speaks {FEED_VERSION}")
    if entry.run != run:
        raise SignatureFault("the entry belongs to another run")
    if len(entry.signature) != SIGNATURE_BYTES or not 0 <= entry.seq < 1 << 40:
        raise DecodeError("entry: illegal signature length or sequence number")
    if len(entry.previous) != (DIGEST_BYTES if entry.seq else 0):
        raise DecodeError("entry: illegal link to the entry before")
    if isinstance(entry.body, Admit) and entry.seq:
        raise DecodeError("entry: a permit opens a feed or does not count")
    check_body(entry.body)
    verify(entry.author, _DOMAIN, unsigned(entry), entry.signature)
    return entry


def check_body(body: Body) -> None:
    """Raise DecodeError for numbers and lengths that no honest node writes."""
    if isinstance(body, Admit):
        check_permit(body.permit)
        if len(body.proof) != SIGNATURE_BYTES:
            raise DecodeError("admit: a proof has 64 bytes")
        return
    if not 0 <= body.round < 1 << 24:
        raise DecodeError(f"round {body.round} is outside its range")
    match body:
        case Contribution():
            _digests(body.base, body.payload)
            if not (1 <= body.weight <= MAX_WEIGHT and 1 <= body.steps < 1 << 20 and 1 <= body.tokens < 1 << 48):
                raise DecodeError("contribution: weight, steps or tokens outside their range")
            if isinstance(body, SlicedContribution):
                _digests(body.rows)
            if isinstance(body, PartContribution) and not 1 <= len(body.experts) <= MAX_EXPERTS // 8:
                raise DecodeError("contribution: a bitmap of experts that no model has")
            if not 0 <= body.loss < 1e6:
                raise DecodeError("contribution: loss outside its range")
        case Ack():
            _digests(body.members, body.state)
        case Proposal():
            _digests(body.state, *body.contributions)
            names = list(body.contributions)
            if not 1 <= len(names) <= MAX_SET or names != sorted(set(names)):
                raise DecodeError("proposal: contributions must be sorted, unique and not too many")
        case Vote():
            _digests(body.proposal)
        case Promise():
            _digests(*body.voted)
            if len(body.voted) > 1:
                raise DecodeError("promise: at most one vote")
        case Reduction():
            _check_reduction(body)
        case ReductionFault():
            _digests(body.reduction, body.proof)
        case Prepare() | Leave():
            pass
    if isinstance(body, Proposal | Vote | Prepare | Promise):
        public_key_of(body.ballot.proposer)
        if not 0 <= body.ballot.attempt < 1 << 20:
            raise DecodeError("ballot attempt outside its range")


def _check_reduction(body: Reduction) -> None:
    _digests(body.members, body.payload, body.rows, body.kept, *body.more)
    if not 0 <= body.span.start < body.span.stop < 1 << 32:
        raise DecodeError("reduction: chunks outside their range")
    if list(body.more) != sorted(set(body.more)) or len(body.previous) not in (0, DIGEST_BYTES):
        raise DecodeError("reduction: contributions must be sorted and unique, a link has 32 bytes")
    many = int.from_bytes(body.covered, "little").bit_count() + len(body.more)
    if not 1 <= many <= MAX_SET or len(body.covered) > MAX_SET // 8:
        raise DecodeError("reduction: covers nothing, or too much")


def _digests(*values: bytes) -> None:
    if any(len(value) != DIGEST_BYTES for value in values):
        raise DecodeError("a digest has 32 bytes")


def experts_of(body: Contribution) -> bytes:
    """Bitmap of the experts that a contribution covers; empty: all experts."""
    return body.experts if isinstance(body, PartContribution) else b""


def set_digest(entries: list[Digest]) -> Digest:
    """Digest of a set of contributions, from their entry ids; order and duplicates do not matter."""
    return digest(*sorted(set(entries)))
