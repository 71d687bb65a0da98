"""Ledger records: the entries that an author may append to its feed, and the checks that they must pass.

Every body is an array-like msgpack struct with a tag. A feed entry names the run, the author, its place in the
feed and the hash of the entry before it; the signature covers all of that.
"""

from itertools import pairwise
from typing import Annotated, AnyStr, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, SignatureFault
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import (
    DIGEST_BYTES,
    Digest,
    Link,
    PeerId,
    RecordRound,
    Round,
    RunId,
    digest,
    public_key_of,
)
from atoll.protocols.run.admission import Permit, check_name
from atoll.protocols.run.arena import ChunkIndex, Span
from atoll.protocols.run.experts import MAX_EXPERTS
from atoll.protocols.run.sections.variants.staleness import MAX_STALE
from atoll.protocols.wires import FEED

FEED_VERSION = FEED.newest
MAX_SET = 1024
"""Most contributions that one round's set may hold."""
MAX_EXCISED = 16
"""Most members whose work one round's state takes out of the rounds before."""
MAX_EXCLUDED = 16
"""Most members that one round's voters exclude."""
MAX_REASON = 100
"""Longest reason of an exclusion, in characters."""
MAX_WEIGHT = 255
"""Largest weight of a contribution, in 64ths of the round's nominal tokens."""
MAX_EXCESS = 96
"""Largest excess of a verdict, in 16ths of a standard deviation."""
MAX_VERDICTS = 4
"""Most verdicts in a contribution: a node audits one contribution a round, and may be late with some."""
ENTRY_MAX_BYTES = codec.MESSAGE_MAX_BYTES
_DOMAIN = "feed/4"


class Contribution(msgspec.Struct, frozen=True, array_like=True, tag="contribution", forbid_unknown_fields=True):
    """`author` trained in this round and offers its compressed pseudo-gradient, the payload."""

    round: RecordRound
    base: Digest
    """State digest of the weights that the steps started from."""
    payload: Digest
    """BLAKE3 of the payload."""
    steps: Annotated[int, Meta(ge=1, lt=1 << 20)]
    """Inner steps that were taken."""
    tokens: Annotated[int, Meta(ge=1, lt=1 << 48)]
    """Tokens that the steps trained on."""
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)]
    """Share of the round's nominal tokens, in 64ths: 1 … 255. The mean is weighted by it."""
    loss: Annotated[float, Meta(ge=0, lt=1e6)]
    """Mean training loss of the steps, nats per token. A claim, not a proof."""


class PartContribution(Contribution, frozen=True, array_like=True, tag="part", forbid_unknown_fields=True):
    """A Contribution that covers some of the experts only: those that its author trained (`outer.holders`)."""

    experts: Annotated[bytes, Meta(min_length=1, max_length=MAX_EXPERTS // 8)]
    """Bitmap of the covered experts (protocols/run/experts.py), never empty."""


class StaleContribution(Contribution, frozen=True, array_like=True, tag="stale", forbid_unknown_fields=True):
    """A Contribution whose base is older than its round; legal in runs with `pace.stale`."""

    age: Annotated[int, Meta(ge=1, le=MAX_STALE)]
    """Rounds by which it is older: its steps began in round `round - age`. A claim, not a proof."""


class SlicedContribution(Contribution, frozen=True, array_like=True, tag="sliced", forbid_unknown_fields=True):
    """A Contribution whose payload can be verified row by row; written in runs whose rounds may be reduced."""

    rows: Digest
    """Merkle root over the payload's rows (protocols/ledger/rows.py)."""


class PlannedContribution(
    SlicedContribution, frozen=True, array_like=True, tag="planned", forbid_unknown_fields=True
):
    """A SlicedContribution whose author knew the round's reducers when it wrote it."""


class Verdict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What its author found in the audit of another's contribution. One machine's statement, not a proof."""

    contribution: Digest
    """Entry id of the contribution that was audited."""
    excess: Annotated[int, Meta(ge=-MAX_EXCESS, le=MAX_EXCESS)]
    """How much more it improved the windows assigned to it than random ones, in 16ths of the standard deviation
    that this has for work on other windows."""


class AuditedContribution(Contribution, frozen=True, array_like=True, tag="audited", forbid_unknown_fields=True):
    """A Contribution with its author's verdicts on earlier ones; written in runs with audits."""

    verdicts: Annotated[tuple[Verdict, ...], Meta(max_length=MAX_VERDICTS)]


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack", forbid_unknown_fields=True):
    """`author` folded this set of contributions and holds this state."""

    round: RecordRound
    members: Digest
    """Digest of the set of contributions."""
    state: Digest
    """Digest of Θ after the round."""


class Ballot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A ballot number of one round and epoch. Ballots are ordered by `attempt`, then by proposer, their owner."""

    attempt: Annotated[int, Meta(ge=0, lt=1 << 20)]
    proposer: PeerId
    epoch: Link = b""
    """Id of the epoch whose voters decide; empty: the run's first."""


class Proposal(msgspec.Struct, frozen=True, array_like=True, tag="proposal", forbid_unknown_fields=True):
    """The owner of `ballot` proposes the final set of a round and the state that results."""

    round: RecordRound
    ballot: Ballot
    contributions: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=MAX_SET)]
    """Entry ids of the set's contributions, sorted."""
    state: Digest
    """Digest of Θ after the round."""


class Excised(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of `peer` in the final rounds from `since` on."""

    peer: PeerId
    since: RecordRound


class ExcisingProposal(Proposal, frozen=True, array_like=True, tag="excising", forbid_unknown_fields=True):
    """A Proposal whose state also takes the work of excluded members out of earlier final rounds.

    Legal in runs with `pace.excise_rounds` (docs/removal.md).
    """

    excised: Annotated[tuple[Excised, ...], Meta(min_length=1, max_length=MAX_EXCISED)]
    """Sorted by peer, each once."""


class ExcludingProposal(Proposal, frozen=True, array_like=True, tag="excluding", forbid_unknown_fields=True):
    """A Proposal that also excludes members from the next round on, because the set's authors voted for that.

    Final, it excludes them on all nodes, whatever votes these have (docs/removal.md).
    """

    excluded: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=MAX_EXCLUDED)]
    """Sorted, each once."""


class SummaryProposal(Proposal, frozen=True, array_like=True, tag="summary", forbid_unknown_fields=True):
    """A Proposal whose voters also certify the summary of all rounds before this one.

    Legal in runs with `history`, in the first attempt of every `history.every`-th round (docs/history.md). Later
    attempts propose the set without it, so that a summary that some compute otherwise stops no round.
    """

    summary: Digest
    """Blob id of the summary."""


class Vote(msgspec.Struct, frozen=True, array_like=True, tag="vote", forbid_unknown_fields=True):
    """`author` votes for a proposal: it computed the same state and has promised no higher ballot."""

    round: RecordRound
    ballot: Ballot
    proposal: Digest
    """Entry id of the Proposal."""


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare", forbid_unknown_fields=True):
    """The owner of `ballot` asks the voters to vote in no lower ballot of this round."""

    round: RecordRound
    ballot: Ballot


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise", forbid_unknown_fields=True):
    """`author` promises to vote in no ballot of this round below `ballot`, and names its highest vote so far."""

    round: RecordRound
    ballot: Ballot
    voted: Annotated[tuple[Digest, ...], Meta(max_length=1)]
    """Entry id of the author's own highest Vote in this round; empty if there is none."""


class Reduction(msgspec.Struct, frozen=True, array_like=True, tag="reduction", forbid_unknown_fields=True):
    """`author` reduced its slice of these contributions to one payload; see docs/wires/reduction.md."""

    round: RecordRound
    span: Span
    """Chunks of the slice, encoded as `[start, stop]`."""
    covered: Annotated[bytes, Meta(max_length=MAX_SET // 8)]
    """Bitmap over the sorted authors of the set that named the reducers; bit 0 of byte 0 is the first."""
    more: Annotated[tuple[Digest, ...], Meta(max_length=MAX_SET)]
    """Entry ids of covered contributions of other authors, sorted."""
    members: Digest
    """Digest of the set of covered contributions."""
    payload: Digest
    """BLAKE3 of the reduced payload, a blob."""
    rows: Digest
    """Merkle root over the rows of the reduced payload."""
    kept: Digest
    """Merkle root over the error feedback that remains, chunk by chunk."""
    previous: Link
    """Entry id of the author's Reduction whose error feedback this one began with; empty: it began with zeros."""


class ReductionFault(msgspec.Struct, frozen=True, array_like=True, tag="fault", forbid_unknown_fields=True):
    """`author` holds a proof that a Reduction is wrong. The proof can be checked without other records."""

    round: RecordRound
    """Round of the Reduction."""
    reduction: Digest
    """Entry id of the Reduction."""
    proof: Digest
    """Blob id of the FaultProof."""


class Unanswered(msgspec.Struct, frozen=True, array_like=True, tag="unanswered", forbid_unknown_fields=True):
    """`author` asked for this opening of a Reduction, and its reducer gave no legal answer within its patience.

    It proves nothing. Who reads it asks for the same opening, and believes what it finds itself.
    """

    round: RecordRound
    """Round of the Reduction."""
    reduction: Digest
    """Entry id of the Reduction."""
    chunk: ChunkIndex
    """Index of the chunk in the arena."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave", forbid_unknown_fields=True):
    """`author` leaves the run in good order after `round`.

    Its feed is complete with this entry, so all that it ever voted is known. If it returns, its ballots count
    again in the rounds after `round` + 1.
    """

    round: RecordRound
    """The newest round that it contributed to."""


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch", forbid_unknown_fields=True):
    """These members decide alone from `round` on, because the voters of `round` are no quorum any more.

    An epoch begins when each of its members has this body in its feed. From then on they vote in it only.
    """

    round: RecordRound
    """First round that the epoch decides: all rounds before it are final in the parent."""
    parent: Link
    """Id of the epoch that it continues; empty: the run's first."""
    members: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=MAX_SET)]
    """Its first voters, sorted."""


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow", forbid_unknown_fields=True):
    """`author` works in this epoch from here on, and is not one of its members."""

    round: RecordRound
    """First round of the epoch."""
    epoch: Link
    """Id of the epoch; empty: the run's first."""


class Exclude(msgspec.Struct, frozen=True, array_like=True, tag="exclude", forbid_unknown_fields=True):
    """`peer` is excluded: its work counts in no set of `round` or a later one, unless that is final.

    The run's owner decides it alone. In another feed it is a vote of its author, and an ExcludingProposal says
    what enough of them decide (docs/removal.md). Of several of one author about one peer the lowest round counts.
    """

    round: RecordRound
    """First round without the peer."""
    peer: PeerId
    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    """What the peer and all members read; printable, may be empty."""


class Excise(Exclude, frozen=True, array_like=True, tag="excise", forbid_unknown_fields=True):
    """An Exclude whose author also wants the peer's work taken out of the final rounds from `since` on.

    Legal in runs with `pace.excise_rounds`. It says what is wanted; an ExcisingProposal says what is done.
    """

    since: RecordRound


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit", forbid_unknown_fields=True):
    """`author` joins with a permit. Legal only as the first entry of a feed (seq 0)."""

    round: ClassVar[Round] = Round(-1)
    """Before the first round, so that no round's records contain it."""
    permit: Permit
    proof: Signature
    """Signature of the permit's key over (run, author)."""


class Solved(msgspec.Struct, frozen=True, array_like=True, tag="solved", forbid_unknown_fields=True):
    """`author` solved the puzzle of an open run. Legal only as the first entry of a feed (seq 0)."""

    round: ClassVar[Round] = Round(-1)
    """Before the first round, so that no round's records contain it."""
    nonce: Annotated[int, Meta(ge=0, lt=1 << 62)]
    """The solution (protocols/run/admission.py)."""


BallotBody: TypeAlias = (
    Proposal | ExcisingProposal | ExcludingProposal | SummaryProposal | Vote | Prepare | Promise
)
FinalityBody: TypeAlias = Ack | BallotBody
EpochBody: TypeAlias = Leave | Epoch | Follow | Exclude | Excise
"""What changes who decides, besides the sets themselves."""
Body: TypeAlias = (
    Contribution
    | PartContribution
    | StaleContribution
    | SlicedContribution
    | PlannedContribution
    | AuditedContribution
    | FinalityBody
    | EpochBody
    | Admit
    | Solved
    | Reduction
    | ReductionFault
    | Unanswered
)


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One signed, hash-linked entry of an author's feed."""

    version: int
    run: RunId
    author: PeerId
    seq: Annotated[int, Meta(ge=0, lt=1 << 40)]
    """Place in the feed, from 0, without gaps."""
    previous: Link
    """Id of the entry before; empty at seq 0."""
    body: Body
    signature: Signature

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
    signed = msgspec.structs.replace(draft, signature=author.sign(_DOMAIN, unsigned(draft)))
    return _check(codec.decode(encode_entry(signed), Entry, max_bytes=ENTRY_MAX_BYTES))


def encode_entry(entry: Entry) -> bytes:
    """Canonical bytes of an entry, on the wire and on disk."""
    return codec.encode(entry)


def decode_entry(data: bytes, run: RunId) -> Entry:
    """A legal, signed entry of this run. Raises DecodeError or SignatureFault. The store checks its link."""
    entry = decode_unverified(data, run)
    verify(entry.author, _DOMAIN, unsigned(entry), entry.signature)
    return entry


def decode_unverified(data: bytes, run: RunId) -> Entry:
    """A legal entry of this run that anybody may have written. Raises DecodeError, SignatureFault."""
    entry = codec.decode(data, Entry, max_bytes=ENTRY_MAX_BYTES)
    if entry.version != FEED_VERSION:
        raise DecodeError(f"feed version {entry.version}; this node speaks {FEED_VERSION}")
    if entry.run != run:
        raise SignatureFault("the entry belongs to another run")
    return _check(entry)


def _check(entry: Entry) -> Entry:
    """The entry, if its values go together. Raises DecodeError. Each value alone is legal by its type."""
    body = entry.body
    if len(entry.previous) != (DIGEST_BYTES if entry.seq else 0):
        raise DecodeError("entry: illegal link to the entry before")
    match body:
        case Admit():
            check_name(body.permit)
            if entry.seq:
                raise DecodeError("entry: a permit opens a feed or does not count")
        case Solved() if entry.seq:
            raise DecodeError("entry: a solution opens a feed or does not count")
        case Proposal():
            _check_sorted(body.contributions)
            if isinstance(body, ExcisingProposal):
                _check_excised(body)
            if isinstance(body, ExcludingProposal):
                _check_sorted(body.excluded)
                for peer in body.excluded:
                    public_key_of(peer)
        case Reduction():
            _check_reduction(body)
        case Epoch():
            _check_link(body.parent)
            _check_sorted(body.members)
            for member in body.members:
                public_key_of(member)
        case Follow():
            _check_link(body.epoch)
        case Exclude():
            public_key_of(body.peer)
            if not body.reason.isprintable():
                raise DecodeError("exclude: a reason is printable")
            if isinstance(body, Excise) and body.since > body.round:
                raise DecodeError("excise: the rounds to correct are those before the exclusion")
    if isinstance(body, BallotBody):
        public_key_of(body.ballot.proposer)
        _check_link(body.ballot.epoch)
    return entry


def _check_excised(body: ExcisingProposal) -> None:
    _check_sorted(tuple(one.peer for one in body.excised))
    for one in body.excised:
        public_key_of(one.peer)
        if one.since >= body.round:
            raise DecodeError("excising: only rounds before this one can be corrected")


def _check_reduction(body: Reduction) -> None:
    _check_sorted(body.more)
    if not body.span.start < body.span.stop:
        raise DecodeError("reduction: chunks outside their range")
    _check_link(body.previous)
    many = int.from_bytes(body.covered, "little").bit_count() + len(body.more)
    if not 1 <= many <= MAX_SET:
        raise DecodeError("reduction: covers nothing, or too much")


def _check_sorted(names: tuple[AnyStr, ...]) -> None:
    if any(one >= other for one, other in pairwise(names)):
        raise DecodeError("contributions and members must be sorted, each once")


def _check_link(value: Link) -> None:
    if len(value) not in (0, DIGEST_BYTES):
        raise DecodeError("a link has 32 bytes, or none")


def epoch_id(body: Epoch) -> Digest:
    """Id of an epoch: BLAKE3 of its body, the same in the feeds of all its members."""
    return digest(b"atoll/epoch/1\0", codec.encode(body))


def experts_of(body: Contribution) -> bytes:
    """Bitmap of the experts that a contribution covers; empty: all experts."""
    return body.experts if isinstance(body, PartContribution) else b""


def age_of(body: Contribution) -> int:
    """Rounds by which a contribution's base is older than its round, as it claims."""
    return body.age if isinstance(body, StaleContribution) else 0


def set_digest(entries: list[Digest]) -> Digest:
    """Digest of a set of contributions, from their entry ids; order and duplicates do not matter."""
    return digest(*sorted(set(entries)))
