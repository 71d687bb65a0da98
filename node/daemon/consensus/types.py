"""What the finality machine hears (events), says (actions) and remembers (state). Rules:
node/daemon/consensus/machine.py.

Times `now` are seconds of one monotonic clock, as floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from atoll.node.daemon.consensus.ballots import Book
from atoll.protocols.ids import Digest, PeerId, Round, RunId
from atoll.protocols.ledger.records import Body, Prepare, Promise, Proposal, Vote

PATIENCE_S = 10.0
"""Default patience; the driver sets about two round times."""
_NO_ENTRIES = Book()


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EntrySeen:
    """An entry entered the ledger; ours too. Entries of one author must come in the order of its feed.

    Bodies of every kind may be sent; contributions, Reductions, acks and the four of the ballots are used.
    """

    entry: Digest
    author: PeerId
    body: Body


@dataclass(frozen=True, slots=True)
class EntryPayloadHeld:
    """The payload of a contribution is on disk and is what that says, or is not needed as a whole (CheckRound).

    Send it after the EntrySeen of the contribution.
    """

    entry: Digest


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Our round machine closed `round`, or refolded it: our view of its set (PublishAck)."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""


@dataclass(frozen=True, slots=True)
class CheckDone:
    """The worker's answer to CheckRound."""

    round: Round
    contributions: tuple[Digest, ...]
    state: Digest


@dataclass(frozen=True, slots=True)
class FinalApplied:
    """The worker's Θ_final is now that of `round`; so is Adopted(round)."""

    round: Round


@dataclass(frozen=True, slots=True)
class Doubted:
    """A Reduction is proven wrong: no set with it is proposed, or voted for in the first ballot."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class NotAppended:
    """Our last Append was refused (disk): ask again at the next event."""


@dataclass(frozen=True, slots=True)
class Live:
    """The own feed is complete as far as anybody can tell: from now on promises and votes may be written.

    Until then entries are only replayed. A node that voted before it knew its own promises would break them.
    """


@dataclass(frozen=True, slots=True)
class Idle:
    """`idle`: this node trains no further rounds (done, paused); it does not wait to close another one."""

    idle: bool
    now: float


@dataclass(frozen=True, slots=True)
class FinalityTick:
    """Time passed. The driver says so a few times a second; harmless at any time."""

    now: float


Event: TypeAlias = (
    EntrySeen
    | EntryPayloadHeld
    | RoundClosed
    | CheckDone
    | FinalApplied
    | Doubted
    | NotAppended
    | Live
    | Idle
    | FinalityTick
)


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Append to our feed, durably, then send EntrySeen. One at a time: the next waits for the echo."""

    body: Proposal | Vote | Prepare | Promise


@dataclass(frozen=True, slots=True)
class CheckRound:
    """Ask the worker to Check this set (Θ_final is at round - 1); answer with Checked.

    All payloads are held, or the round is reduced: then what the set needs is fetched first.
    """

    round: Round
    contributions: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class FetchMissing:
    """A proposal or a final set names these; we lack them. `entries`: contributions not in our ledger yet.

    `payloads`: contributions that are, but without their payload. Repeated only when the list changes.
    """

    round: Round
    entries: tuple[Digest, ...]
    payloads: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class FinalizeRound:
    """S_round is final. Ask the worker to Finalize once all payloads are held (or adopt a snapshot of a
    later round), in the order of the rounds; then send Finalized to both machines."""

    round: Round
    contributions: tuple[Digest, ...]
    state: Digest


@dataclass(frozen=True, slots=True)
class ReportDivergence:
    """Our fold of a proposed set gave another state. We never vote for it."""

    round: Round
    proposal: Digest
    proposer: PeerId
    ours: Digest
    theirs: Digest


@dataclass(frozen=True, slots=True)
class ReportNarrow:
    """A proposed set lacks half of what this node has, or more: it gets our vote only where we are bound to it."""

    round: Round
    proposal: Digest
    proposer: PeerId
    named: int
    ours: int
    """Contributions that we have, and how many of them it names."""


@dataclass(frozen=True, slots=True)
class ReportEquivocation:
    """`author` signed two entries that exclude each other."""

    round: Round
    author: PeerId
    entry: Digest
    """The entry that does not count."""
    reason: str


Action: TypeAlias = (
    Append | CheckRound | FetchMissing | FinalizeRound | ReportDivergence | ReportNarrow | ReportEquivocation
)


# --- state ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinalityState:
    """Everything the finality machine knows. Make the first one with `begin`."""

    run: RunId
    me: PeerId
    rounds: int
    last_final: int
    acceptors: tuple[PeerId, ...]
    """Who decides round last_final + 1, in the order of their ballots."""
    patience_s: float = PATIENCE_S
    """May be replaced at any time (dataclasses.replace)."""
    applied: int = -1
    """Newest round that the worker made final."""
    closed: int = -1
    live: bool = False
    idle: bool = False
    ripe_at: float | None = None
    """Since when the set of the next round is not expected to grow; None: it is."""
    now: float = 0.0
    since: float = 0.0
    """When the newest ballot of the round, or its proposal, first counted, or the round came up."""
    top: int = 0
    """Highest attempt of this round that was due."""
    books: Mapping[int, Book] = field(default_factory=dict)
    views: Mapping[int, tuple[Digest, ...]] = field(default_factory=dict)
    """Our own set of each closed round."""
    held: frozenset[Digest] = frozenset()
    """Contributions whose payload is."""
    checked: Mapping[tuple[Digest, ...], Digest] = field(default_factory=dict)
    """Set -> state, for this round."""
    checking: frozenset[tuple[Digest, ...]] = frozenset()
    appending: Body | None = None
    doubted: frozenset[Digest] = frozenset()
    """Reductions that are proven wrong."""
    told: frozenset[Digest] = frozenset()
    """Proposals that were reported."""
    missing: tuple[tuple[Digest, ...], tuple[Digest, ...]] = ((), ())
    """The last FetchMissing of this round."""

    @property
    def book(self) -> Book:
        """Of the round that is decided next."""
        return self.books.get(self.last_final + 1, _NO_ENTRIES)
