"""Events, actions and state of the finality machine. Rules: node/daemon/consensus/machine.py.

Times `now` are seconds of one monotonic clock, as floats.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from atoll.node.daemon.consensus.chains.early_ballots import Waiting
from atoll.node.daemon.consensus.chains.epochs import ROOT, Electorate, EpochBook, EpochId, Segment, exempt_of
from atoll.node.daemon.consensus.standstill import Standstill
from atoll.protocols.ids import Digest, PeerId, Round, RunId
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.choices import Choice
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Body, Epoch, Excised, Follow, Prepare, Promise, Proposal, Vote
from atoll.protocols.ledger.set_limit import NewcomerOrder, Seniority
from atoll.protocols.ledger.turns import OwnerTurns
from atoll.protocols.remembered import remembered

PATIENCE_S = 10.0
"""Default patience in seconds; the driver sets about two round times."""
LEASE_S = 60.0
"""Default life of a lease in seconds; the run's pace sets it."""
RECENT_ROUNDS = 16
"""A recent member is an author of one of so many newest final sets."""
_NO_ENTRIES = Book()
Wanted: TypeAlias = tuple[tuple[Digest, ...], tuple[Digest, ...]]
"""Entries, and proposals whose votes are wanted, of a FetchOrphans."""


class Excision(NamedTuple):
    """A member's work was taken out of the final rounds from `since` on, by the state of `round`."""

    round: int
    since: int


class Correction(msgspec.Struct, frozen=True):
    """A final round whose set becomes smaller: a later round adds U(after) − U(before)."""

    round: Round
    before: tuple[Digest, ...]
    """Entry ids of the contributions that counted in it so far, sorted."""
    after: tuple[Digest, ...]
    """Those that count from now on, sorted."""


# --- events ---------------------------------------------------------------------------------------


class EntrySeen(msgspec.Struct, frozen=True):
    """An entry entered the ledger; ours too. Entries of one author must come in the order of its feed.

    Bodies of every kind may be sent; contributions, Reductions, acks and the four kinds of ballots are used.
    """

    entry: Digest
    author: PeerId
    body: Body
    is_orphan: bool = False
    """Of an equivocator's other history: it was fetched by name, and has no place in a feed here."""


class EntryPayloadHeld(msgspec.Struct, frozen=True):
    """The payload of a contribution is on disk and verified, or is not needed as a whole (CheckRound).

    Send it after the EntrySeen of the contribution.
    """

    entry: Digest


class AuthorPruned(msgspec.Struct, frozen=True):
    """The ledger let go of an author that showed no work: its contributions without a payload are forgotten."""

    author: PeerId


class OtherChainsSeen(msgspec.Struct, frozen=True):
    """All contributions to open rounds that were made in another chain (apart.py)."""

    entries: frozenset[Digest]


class RoundClosed(msgspec.Struct, frozen=True):
    """Our round machine closed `round`, or folded it again: our own set of the round (PublishAck)."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""


class CheckDone(msgspec.Struct, frozen=True):
    """The worker's answer to CheckRound: the state digest of Θ_final with this set."""

    round: Round
    contributions: tuple[Digest, ...]
    state: Digest
    excised: tuple[Excised, ...] = ()


class FinalApplied(msgspec.Struct, frozen=True):
    """The worker's Θ_final is now that of `round`: it finalized the round, or adopted a snapshot."""

    round: Round


class ReductionRefuted(msgspec.Struct, frozen=True):
    """A Reduction is not believed: no set with it is proposed, or voted for in the first free ballots."""

    entry: Digest
    is_proven: bool = False


class ReductionCleared(msgspec.Struct, frozen=True):
    """A Reduction refuted for its reducer's silence counts again: a final set holds it, or it was opened."""

    entry: Digest


class CorrectionsHeld(msgspec.Struct, frozen=True):
    """The members whose work this node could take out now, because it holds all payloads for that.

    Send it when they change.
    """

    peers: frozenset[PeerId]


class SummaryMade(msgspec.Struct, frozen=True):
    """The answer to Summarize: the blob id of this node's summary of the rounds up to `round`."""

    round: int
    summary: Digest


class AppendRefused(msgspec.Struct, frozen=True):
    """The disk refused our last Append: the machine asks again at the next event."""


class ReplayDone(msgspec.Struct, frozen=True):
    """Our own feed is complete as far as any peer can tell: from now on promises and votes may be written.

    Until then entries are only replayed. A node that voted before it knew its own promises would break them.
    """

    down_s: float = math.inf  # for how long this node was down before it came up; infinite: not known
    worked: int = -1  # newest round that it contributed to; -1: none


class MembersSeen(msgspec.Struct, frozen=True):
    """The peers with a live lease on the run. Send it whenever that may have changed."""

    peers: frozenset[PeerId]
    lost: frozenset[PeerId] = frozenset()
    """Those of them to which the connection is lost and that were not heard of since."""


class EquivocatorsSeen(msgspec.Struct, frozen=True):
    """The authors that are proven to have signed two histories. Send it whenever there are more."""

    peers: frozenset[PeerId]


class Idle(msgspec.Struct, frozen=True):
    """Whether this node trains no further rounds (done, paused), and so does not wait to close another one."""

    idle: bool
    now: float


class FinalityTick(msgspec.Struct, frozen=True):
    """Time passed. The driver sends it a few times a second; harmless at any time."""

    now: float


Event: TypeAlias = (
    EntrySeen
    | EntryPayloadHeld
    | AuthorPruned
    | OtherChainsSeen
    | RoundClosed
    | CheckDone
    | FinalApplied
    | ReductionRefuted
    | ReductionCleared
    | CorrectionsHeld
    | SummaryMade
    | AppendRefused
    | ReplayDone
    | MembersSeen
    | EquivocatorsSeen
    | Idle
    | FinalityTick
)


# --- actions --------------------------------------------------------------------------------------


class Append(msgspec.Struct, frozen=True):
    """Append to our feed, durably, then send EntrySeen. One at a time: the next waits for the echo."""

    body: Proposal | Vote | Prepare | Promise | Epoch | Follow


class CheckRound(msgspec.Struct, frozen=True):
    """Ask the worker for the state with this set (Θ_final is at round - 1); answer with CheckDone.

    All payloads are held, or the round is reduced: then what the set needs is fetched first. So are those of the
    corrections.
    """

    round: Round
    contributions: tuple[Digest, ...]
    excised: tuple[Excised, ...] = ()
    corrections: tuple[Correction, ...] = ()
    """What `excised` means here."""


class FetchMissing(msgspec.Struct, frozen=True):
    """Fetch what a proposal or a final set names and this node lacks. Repeated only when the list changes."""

    round: Round
    entries: tuple[Digest, ...]
    """Entries that are not in our ledger yet."""
    payloads: tuple[Digest, ...]
    """Contributions that are, but without their payload."""
    proposer: PeerId | None
    """Who alone names the entries; None: a quorum voted for what does, so honest nodes have them."""


class FetchOrphans(msgspec.Struct, frozen=True):
    """Ask others again and again for entries of a round that no feed here will bring; empty lists end that.

    They come as EntrySeen with `is_orphan`, each with a valid signature of an equivocator.
    """

    round: Round
    entries: tuple[Digest, ...]
    """Contributions, Reductions and proposals, by entry id; at most MAX_ASKED."""
    proposals: tuple[Digest, ...]
    """Proposals whose votes are wanted too, the most important first; at most MAX_ASKED."""


class FinalizeRound(msgspec.Struct, frozen=True):
    """The set of `round` is final: ask the worker to finalize it, in the order of the rounds.

    All payloads must be held, or a snapshot of a later round adopted. Then send FinalApplied and RoundFinal.
    """

    round: Round
    contributions: tuple[Digest, ...]
    state: Digest
    corrections: tuple[Correction, ...] = ()
    """Rounds before whose sets become smaller with this one."""
    deciders: frozenset[PeerId] = frozenset()
    """Who decides the next round."""


class ReportDivergence(msgspec.Struct, frozen=True):
    """Our fold of a proposed set gave another state than the proposal names. It never gets our vote."""

    round: Round
    proposal: Digest
    proposer: PeerId
    ours: Digest
    """State digest of our fold; `theirs` is that of the proposal."""
    theirs: Digest


class ReportOtherSummary(msgspec.Struct, frozen=True):
    """A proposal names another summary than this node's. It never gets our vote; later attempts name none."""

    round: Round
    proposal: Digest
    proposer: PeerId
    ours: Digest
    """Blob id of our summary; `theirs` is that of the proposal."""
    theirs: Digest


class ReportNarrow(msgspec.Struct, frozen=True):
    """A proposed set lacks half of what this node has, or more: it gets our vote only if we are bound to it."""

    round: Round
    proposal: Digest
    proposer: PeerId
    named: int
    """How many of our contributions the set names."""
    ours: int
    """How many contributions our own set of the round has."""


class ReportEquivocation(msgspec.Struct, frozen=True):
    """An author signed two entries that exclude each other."""

    round: Round
    author: PeerId
    entry: Digest
    """The entry that does not count."""
    reason: str


class EnterEpoch(msgspec.Struct, frozen=True):
    """The chain goes on with this epoch: its members, not the authors of the last final set, decide `first`."""

    epoch: EpochId
    first: Round
    voters: tuple[PeerId, ...]


class SwitchEpoch(msgspec.Struct, frozen=True):
    """Another chain outranks ours from round `first` on. Begin again with `begin(chosen=epoch)` and a replay."""

    epoch: EpochId
    first: Round
    """First round that the two chains decide differently: our own final sets from it on do not count."""


class Summarize(msgspec.Struct, frozen=True):
    """Make the summary of all rounds that are final in `state`, before any later action; answer with SummaryMade.

    Without an answer this node names no summary, and votes for no proposal that names one.
    """

    state: "FinalityState"
    """The state right after its newest final round."""


Action: TypeAlias = (
    EnterEpoch
    | SwitchEpoch
    | Append
    | CheckRound
    | FetchMissing
    | FetchOrphans
    | FinalizeRound
    | Summarize
    | ReportDivergence
    | ReportOtherSummary
    | ReportNarrow
    | ReportEquivocation
)


# --- state ----------------------------------------------------------------------------------------


class FinalityState(msgspec.Struct, frozen=True, dict=True):
    """Everything the finality machine knows. Make the first one with `begin`."""

    run: RunId
    me: PeerId
    """PeerID of this node."""
    rounds: int
    """Rounds of the whole run."""
    last_final: int
    """Newest round whose set is final; -1: none."""
    voters: tuple[PeerId, ...]
    """Voters of the next round: the proven authors of the last final set, in the order of their ballots."""
    turns: OwnerTurns = OwnerTurns()  # for whose ballots nobody waits
    tally: Tally = Tally()
    """Accepted work of each author, by the rounds that are final."""
    accepted: frozenset[PeerId] = frozenset()
    """Authors of all final sets, and members of epochs: they are no newcomers."""
    lease_s: float = LEASE_S
    """How long the run's leases live, in seconds: a node that came up knows after that time who is there."""
    chain: tuple[Segment, ...] = (Segment(ROOT, 0, Electorate(()), Tally()),)
    """The epochs that decided so far; the last one decides now."""
    planned: tuple[Epoch, ...] = ()
    """Epochs that this node chose before it restarted, to be entered in order."""
    decided: Mapping[int, tuple[tuple[PeerId, ...], frozenset[PeerId]]] = msgspec.field(default_factory=dict)
    """Voters of the newest rounds that are final, and proven authors of their sets, by round."""
    members: frozenset[PeerId] = frozenset()
    """Peers with a live lease (`MembersSeen`)."""
    lost: frozenset[PeerId] = frozenset()
    """Of these, those to which the connection is lost: at first nobody waits for their ballots."""
    equivocators: frozenset[PeerId] = frozenset()
    """Proven to have signed two histories: each node may hold another one (orphans.py)."""
    orphans_asked: Mapping[int, Wanted] = msgspec.field(default_factory=dict)
    """Entries and proposals of the last FetchOrphans of each round that is asked about."""
    live_since: float = 0.0
    """When the replay of our own feed was over."""
    away_since: int | None = None  # newest round that it worked in before it was down for long; None: it was not
    short_since: float | None = None
    """Since when those present are no quorum; None: they are."""
    quorum_since: float = 0.0
    """Since when those present are a quorum, or since the round or epoch began."""
    took_part: tuple[frozenset[PeerId], ...] = ()
    """Who took part in the newest ballots of the round, the newest first (presence.py)."""
    still: Standstill = Standstill()  # ballots that decided nothing
    suspects: frozenset[PeerId] = frozenset()  # left out for votes or signatures kept back, in no ballot since
    asked_since: float | None = None
    """Since when this node signs epochs and none begins; None: it does not."""
    signed_at: float = 0.0  # when this node signed its newest epoch
    patience_s: float = PATIENCE_S
    """Seconds before another owner opens a ballot. May be replaced at any time (msgspec.structs.replace)."""
    applied: int = -1  # newest round that the worker folded into Θ_final
    closed: int = -1  # newest round that our round machine closed
    live: bool = False  # the replay of our own feed is over (`ReplayDone`)
    idle: bool = False  # this node trains no further rounds (`Idle`)
    stable_since: float | None = None
    """Since when the set of the next round is not expected to grow; None: it is."""
    since: float = 0.0
    """When the newest ballot of the round, or its proposal, began to count, or the round came up."""
    attempt: int = 0
    """Highest attempt of this round that was due."""
    views: Mapping[int, tuple[Digest, ...]] = msgspec.field(default_factory=dict)
    """Our own set of each closed round."""
    apart: frozenset[Digest] = frozenset()
    """Contributions that were made in another chain."""
    checked: Mapping[Choice, Digest] = msgspec.field(default_factory=dict)
    """State digest of each choice that the worker checked, for this round; without exclusions (`folded`)."""
    checking: frozenset[Choice] = frozenset()
    """Sets that the worker was asked for and has not answered."""
    appending: Body | None = None  # the entry that is on its way into our feed
    refuted: frozenset[Digest] = frozenset()  # Reductions that are not believed
    proven: frozenset[Digest] = frozenset()  # of these, what a proof shows to be wrong
    reported: frozenset[Digest] = frozenset()
    """Proposals that were reported as narrow or divergent."""
    missing: Mapping[PeerId | None, FetchMissing] = msgspec.field(default_factory=dict)
    """The last FetchMissing of this round, for each proposer."""
    summary_every: int = 0
    """Rounds between two certified summaries (RunSpec); 0: none is certified."""
    summary: tuple[int, Digest] | None = None
    """The newest summary of this node: its newest round, and its blob id."""
    excise_rounds: int = 0
    """Newest final rounds that work can be taken out of (RunSpec)."""
    window: Mapping[int, Mapping[Digest, PeerId]] = msgspec.field(default_factory=dict)
    """The contributions that count in each of these rounds, with their authors."""
    excised: Mapping[PeerId, Excision] = msgspec.field(default_factory=dict)
    """Members whose work the state of a final round of our chain took out."""
    retrievable: frozenset[PeerId] = frozenset()
    """Members whose work this node could take out now (`CorrectionsHeld`)."""
    # From here on what machine.py looks at in part. It compares all of the above.
    now: float = 0.0
    """Time of the newest event that has one; never runs backwards."""
    epochs: EpochBook = msgspec.field(default_factory=EpochBook)
    books: Mapping[int, Book] = msgspec.field(default_factory=dict)
    """The ledger's entries about each round that is not final."""
    waiting: Waiting = msgspec.field(default_factory=dict)  # ballots that may count later
    held: frozenset[Digest] = frozenset()  # contributions whose payload is held
    unrivalled: tuple[object, ...] = ()
    """What the newest search for a better chain looked at, if it found none (forks.py). Changes no action."""
    settled: tuple[tuple[object, ...], list[object]] | tuple[()] = ()
    """What the newest step looked at, if it moved nothing (machine.py). Changes no action."""

    @property
    def deciding(self) -> Round:
        """The round that is decided next: the oldest one that is not final."""
        return Round(self.last_final + 1)

    def electorate(self, number: int) -> Electorate:
        """Who may take part in what happens to a round: the one that is decided next, or a decided one."""
        voters = self.voters if number == self.deciding else self.decided[number][0]
        before = (self.decided[at][1] for at in range(number - RECENT_ROUNDS, number) if at in self.decided)
        return Electorate(voters, frozenset[PeerId]().union(*before))

    @property
    def seniority(self) -> Seniority:
        """Whose work comes first, where the round that is decided next has more than its set may name."""
        before = range(self.deciding - RECENT_ROUNDS, self.deciding)
        newest = (self.decided[at][1] for at in before if at in self.decided)
        return Seniority((frozenset(self.voters), *newest), self.accepted)

    def newcomer_order(self, seed: bytes) -> NewcomerOrder:
        """Which newcomers come first in the sets of later rounds; `seed`: digest of the newest final set."""
        return NewcomerOrder(self.tally, frozenset(self.voters), seed) if self.tally.newcomers else NewcomerOrder()

    @property
    def own_summary(self) -> Digest | None:
        """The summary that proposals of the round that is decided may name; None where none is known here."""
        return self.summary[1] if self.summary is not None and self.summary[0] == self.last_final else None

    @property
    def epoch(self) -> EpochId:
        """The epoch whose voters decide."""
        return self.chain[-1].epoch

    @property
    def exempt(self) -> frozenset[PeerId]:
        """Who is no newcomer in the round that is decided next, whatever the final sets say."""
        return exempt_of(self.chain, self.deciding, self.voters)

    @remembered
    def book(self) -> Book:
        """The entries about the round that is decided next, with the ballots of its epoch."""
        book = self.books.get(self.deciding, _NO_ENTRIES).within(self.epoch)
        return book.bounded(self.tally, self.exempt) if self.tally.newcomers else book
