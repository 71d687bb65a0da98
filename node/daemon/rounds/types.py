"""What the round machine hears (events), says (actions) and remembers (state). Rules:
node/daemon/rounds/machine.py.

Times `now` are seconds of one monotonic clock, as floats. Nothing here reads a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from atoll.node.daemon.rounds.overlap_depth import Ahead, lag_of
from atoll.node.daemon.rounds.participants import Known, MemberView
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.local.worker_messages import Pending, TrainReply
from atoll.protocols.run.run_spec import RunSpec

MAX_OPEN_ROUNDS = 64
"""A node trains no further ahead of the newest final round than this; then it waits and says so."""
STALL_ROUNDS = 8
"""A round without a quorum closes after so many own round times (and a lease): a live but stuck member."""


NO_DIGEST = Digest(b"")

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker runs and holds Θ_final(`final`); the ledger is synced as far as it can be now.

    Send all contributions that the ledger knows, own ones included, as ContributionSeen before the
    first Ready. Send Ready again whenever the worker was restarted or adopted a snapshot: whatever
    was asked of the old worker is forgotten, what is known of the rounds stays.
    """

    final: int
    """Newest round folded into Θ_final; -1 for genesis."""
    pending: tuple[Pending, ...]
    """`Started.pending`: work that was saved, announced or not."""
    now: float


@dataclass(frozen=True, slots=True)
class ContributionSeen:
    """A contribution entered the ledger; ours too, as soon as it is appended. Repeats are harmless."""

    entry: Digest
    author: PeerId
    contribution: Contribution
    held: bool
    """The payload is on disk and decodes (ours always)."""
    now: float


@dataclass(frozen=True, slots=True)
class PayloadHeld:
    """The payload of a contribution to this round is on disk and is what that says (worker's Verified)."""

    entry: Digest
    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The round is reduced: nobody needs its payloads as a whole. Ignored where the round is closed already.

    PayloadHeld then says that what this node needs of a contribution before the round closes is here.
    """

    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class SetKnown:
    """Answer to Settle, and again whenever it changes: what is to be folded of a reduced round is here."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids of contributions and Reductions, sorted."""
    now: float


@dataclass(frozen=True, slots=True)
class LeasesChanged:
    """All live leases of others, replacing the ones known so far. Expired ones are left out."""

    members: Mapping[PeerId, MemberView]
    now: float
    shortage: str = ""
    """Why these members and this node cannot train the whole model; empty: they can."""


@dataclass(frozen=True, slots=True)
class TrainingDone:
    """The worker's answer to StartTraining. Kept follows when the work is safe on the disk."""

    round: Round
    pending: Pending
    train_s: float
    """Without the time that the worker waited for the fold of the round before."""
    now: float
    lag: float | None = None
    """Steps that this fold was late (node/daemon/rounds/overlap_depth.py); None: there was none to wait for."""


@dataclass(frozen=True, slots=True)
class TrainingSaved:
    """Trained work is safe on the disk: it may be announced."""

    pending: Pending
    now: float


@dataclass(frozen=True, slots=True)
class FoldDone:
    """The worker's answer to FoldRound. `state`: digest of the view."""

    round: Round
    state: Digest
    now: float


@dataclass(frozen=True, slots=True)
class RoundFinal:
    """The worker made `round` final: its contributions are forgotten here."""

    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class RoundTick:
    """Time passed. The driver says so a few times a second; harmless at any time."""

    now: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Finish the round at hand, then do not start another one. Rounds of others are still folded."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on, at the round where the others are."""

    now: float


@dataclass(frozen=True, slots=True)
class Behind:
    """The node must sync (fetch a snapshot, replace its worker) before it goes on. Ready ends it."""

    reason: str
    now: float


Event: TypeAlias = (
    WorkerReady
    | ContributionSeen
    | PayloadHeld
    | Planned
    | SetKnown
    | LeasesChanged
    | TrainingDone
    | TrainingSaved
    | FoldDone
    | RoundFinal
    | RoundTick
    | Pause
    | Resume
    | Behind
)


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Ask the worker to Train; answer with Trained, then with Kept."""

    round: Round
    slot: int
    slots: int
    after: int
    """Round that is collected meanwhile: its FoldRound comes while this one is trained; -1: none is due."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Append this contribution to our feed (once: look first), then send ContributionSeen."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class Discard:
    """The round became final before its work was announced: give it back to the error feedback."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class FetchPayload:
    """Get the payload of a contribution, from its author or any holder, until it is held or its round is final."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class FoldRound:
    """Ask the worker to Fold exactly this set; answer with Folded."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids of contributions, and of Reductions in a reduced round, sorted."""


@dataclass(frozen=True, slots=True)
class Settle:
    """A reduced round is over: find out what counts in it and get it; answer with SetKnown."""

    round: Round


@dataclass(frozen=True, slots=True)
class PublishAck:
    """Append Ack(round, set digest, state) to our feed and tell finality: RoundClosed(round, members).

    Comes again for a round whose set grew later.
    """

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""
    set_digest: Digest
    state: Digest


@dataclass(frozen=True, slots=True)
class PublishLease:
    """Our lease now says this."""

    activity: Activity
    round: Round


@dataclass(frozen=True, slots=True)
class Finish:
    """All rounds are final: nothing is left to do. Sent once."""


Action: TypeAlias = (
    StartTraining | Announce | Discard | FetchPayload | FoldRound | Settle | PublishAck | PublishLease | Finish
)


# --- state ----------------------------------------------------------------------------------------


class Phase(Enum):
    """What the node does. The value is the word that people see."""

    SYNC = "syncing"
    CATCH_UP = "catching up"
    GATHER = "gathering"
    TRAIN = "training"
    COLLECT = "collecting"
    FOLD = "folding"
    PAUSED = "paused"
    FULL = "waiting for finality"
    DONE = "done"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """Constants of the run and of this node."""

    me: PeerId
    rounds: int
    quorum_256: int
    grace_256: int
    lease_s: float
    min_members: int = 1
    max_open_rounds: int = MAX_OPEN_ROUNDS
    overlap_steps: int = 0
    """Steps of a round that may be trained before the round before it is folded; 0: none."""
    overlap_most: int = 0
    """Steps that may be where the node's link needs them; below `overlap_steps`: no more than these."""


def config_of(spec: RunSpec, me: PeerId) -> RoundConfig:
    """What the machine needs of a RunSpec."""
    pace, outer = spec.pace, spec.outer
    overlap_steps, overlap_most = outer.overlap_bounds
    return RoundConfig(
        me=me,
        rounds=outer.rounds,
        quorum_256=pace.quorum_256,
        grace_256=pace.grace_256,
        lease_s=pace.lease_s,
        min_members=pace.min_members,
        overlap_steps=overlap_steps,
        overlap_most=overlap_most,
    )


def trained_of(done: TrainReply, after: int, now: float) -> TrainingDone:
    """What the worker's answer says to the machine; `after`: round that was in flight, −1: none."""
    steps = done.pending.steps
    lag = lag_of(done.overlapped, done.held_s, done.train_s, steps) if after >= 0 else None
    return TrainingDone(done.pending.round, done.pending, done.train_s, now, lag)


Book: TypeAlias = Mapping[Digest, Known]
"""Contributions of one round, by entry id."""


@dataclass(frozen=True, slots=True)
class RoundState:
    """Everything the round machine knows. Make the first one with `begin`."""

    config: RoundConfig
    ahead: Ahead
    phase: Phase = Phase.SYNC
    round: int = 0
    """The round at hand (TRAIN, COLLECT, FOLD), else the round that would be next."""
    collecting: int = -1
    """The round that is waited for (TRAIN, COLLECT): the one at hand, or the one before it; -1: none."""
    collecting_since: float = 0.0
    final: int = -1
    closed: int = -1
    """Newest round that this node closed, or that it saw the others leave."""
    now: float = 0.0
    since: float = 0.0
    """When the phase began."""
    train_s: float = 0.0
    """Own time of the newest trained round, without waiting; 0 before the first."""
    step_s: float = 0.0
    """Own time of one of its steps."""
    late: bool = False
    """The others had closed our newest round before our work was done."""
    quorum_at: float | None = None
    """When the collected round reached its quorum."""
    resting: str = ""
    """Reason of a pause; empty when there is none."""
    books: Mapping[int, Book] = field(default_factory=dict)
    members: Mapping[PeerId, MemberView] = field(default_factory=dict)
    shortage: str = ""
    """Why the members cannot train the whole model; the first round waits for more of them."""
    walks: Mapping[PeerId, int] = field(default_factory=dict)
    """Rounds that members were seen to leave for the very next one (`membership.walked`); only with overlap."""
    folding: Mapping[int, tuple[Digest, ...]] = field(default_factory=dict)
    """Asked of the worker, not answered yet."""
    folded: Mapping[int, tuple[Digest, ...]] = field(default_factory=dict)
    """What the worker's view holds of each open round."""
    acked: Mapping[int, tuple[Digest, ...]] = field(default_factory=dict)
    reduced: Mapping[int, tuple[Digest, ...] | None] = field(default_factory=dict)
    """Rounds that are reduced, with the set that can be folded; None: it is not known yet."""
    settling: Mapping[int, bool] = field(default_factory=dict)
    """Reduced rounds whose set was asked for."""
    view: Digest = NO_DIGEST
    """State digest of the view after the newest fold."""
    ready: bool = False
    """The worker has been there at least once."""
    syncing: str = ""
    """Reason of Behind, until Ready."""
    saving: frozenset[int] = frozenset()
    """Rounds that are trained, and whose work is not safe on the disk yet."""
    unannounced: tuple[Pending, ...] = ()
    """Work that is safe, and not in our feed yet; with overlap of more than one round."""
    announced_at: float = 0.0
    leased: tuple[Activity, int] | None = None
    """What our lease says."""
