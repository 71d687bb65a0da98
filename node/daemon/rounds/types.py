"""Events that the round machine receives and actions that it returns. Rules: node/daemon/rounds/machine.py.

Times `now` are seconds of one monotonic clock, as floats. Nothing here reads a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from atoll.node.daemon.rounds.overlap_depth import lag_of
from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.local.worker_messages import Pending, TrainReply

# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker runs and holds Θ_final(`final`); the ledger is synced as far as it can be now.

    Send all contributions that the ledger knows, own ones included, as ContributionSeen before the first
    WorkerReady. Send it again whenever the worker was restarted or adopted a snapshot: requests to the old worker
    are forgotten, what is known of the rounds stays.
    """

    final: int
    """Newest round folded into Θ_final; -1 for genesis."""
    pending: tuple[Pending, ...]
    """`StartReply.pending`: work that was saved, announced or not."""
    now: float


@dataclass(frozen=True, slots=True)
class ContributionSeen:
    """A contribution entered the ledger; ours too, as soon as it is appended. Repeats change nothing."""

    entry: Digest
    author: PeerId
    contribution: Contribution
    held: bool
    """The payload is on disk and decodes (ours always)."""
    now: float


@dataclass(frozen=True, slots=True)
class PayloadHeld:
    """The payload of a contribution to this round is on disk and verified by the worker."""

    entry: Digest
    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class AuthorPruned:
    """The ledger let go of an author that showed no work: its contributions without a payload are forgotten."""

    author: PeerId
    now: float


@dataclass(frozen=True, slots=True)
class AuthorExcluded:
    """Another author is excluded from `round` on: no own set of these rounds has its work."""

    author: PeerId
    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class ReductionPlanned:
    """The round is reduced: no node needs its payloads as a whole. Ignored where the round is closed already.

    PayloadHeld then means that the rows this node needs of a contribution before the round closes are here.
    """

    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class SetResolved:
    """Answer to ResolveSet, sent again when it changes: the set of a reduced round, whose payloads are here."""

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
    """The worker's answer to StartTraining. TrainingSaved follows when the work is safe on the disk."""

    round: Round
    pending: Pending
    train_s: float
    """Seconds, without the time that the worker waited for the fold of the round before."""
    now: float
    lag: float | None = None
    """Steps that the fold before was late (node/daemon/rounds/overlap_depth.py); None: no fold was awaited."""
    left_out: int = 0
    """Steps that the node would have taken, had it begun with the others."""


def trained_of(done: TrainReply, after: int, now: float, left_out: int) -> TrainingDone:
    """The event for the worker's answer; `after`: round that was in flight meanwhile, -1: none."""
    steps = done.pending.steps
    lag = lag_of(done.overlapped, done.held_s, done.train_s, steps) if after >= 0 else None
    return TrainingDone(done.pending.round, done.pending, done.train_s, now, lag, left_out)


@dataclass(frozen=True, slots=True)
class TrainingSaved:
    """Trained work is safe on the disk: it may be announced."""

    pending: Pending
    now: float


@dataclass(frozen=True, slots=True)
class FoldDone:
    """The worker's answer to FoldRound. `state`: digest of the view after the fold."""

    round: Round
    state: Digest
    now: float


@dataclass(frozen=True, slots=True)
class RoundFinal:
    """The worker folded `round` into Θ_final: its contributions are forgotten here."""

    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class RoundTick:
    """Time passed. The driver sends it a few times a second; harmless at any time."""

    now: float


@dataclass(frozen=True, slots=True)
class Reweighed:
    """Contributions to an open round have other weights than it was folded with: it is folded again."""

    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class Pause:
    """The user pauses: the round at hand is finished, no other is started, rounds of others are still folded."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Resume:
    """The user ends a pause: the node goes on at the round where the others are."""

    now: float


@dataclass(frozen=True, slots=True)
class Refused:
    """No peer stores what this node writes, for this reason; empty: one does. Until then its work is in vain."""

    reason: str
    now: float


@dataclass(frozen=True, slots=True)
class Behind:
    """The node must sync (fetch a snapshot, replace its worker) before it goes on. WorkerReady ends it."""

    reason: str
    now: float


Event: TypeAlias = (
    WorkerReady
    | ContributionSeen
    | PayloadHeld
    | AuthorPruned
    | AuthorExcluded
    | ReductionPlanned
    | SetResolved
    | LeasesChanged
    | TrainingDone
    | TrainingSaved
    | FoldDone
    | Reweighed
    | RoundFinal
    | RoundTick
    | Pause
    | Resume
    | Refused
    | Behind
)


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Ask the worker to train a round; answer with TrainingDone, then with TrainingSaved."""

    round: Round
    slot: int
    """The node's place among the members that train the round: it selects the data."""
    slots: int
    """How many members train the round."""
    after: int
    """Round that is collected meanwhile: its FoldRound comes while this one is trained; -1: none."""
    late_s: float = 0.0
    """Seconds since most others began the round: the steps that fit into them are left out. 0: not long."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Append this contribution to our feed, unless it is there already, then send ContributionSeen."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class Discard:
    """The round became final before its work was announced: return the work to the error feedback."""

    pending: Pending


@dataclass(frozen=True, slots=True)
class FetchPayload:
    """Get the payload of a contribution, from its author or any holder, until it is held or its round is final."""

    entry: Digest


@dataclass(frozen=True, slots=True)
class FoldRound:
    """Ask the worker to fold exactly this set; answer with FoldDone."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids of contributions, and of Reductions in a reduced round, sorted."""


@dataclass(frozen=True, slots=True)
class ResolveSet:
    """A reduced round is closed: resolve its set and fetch what the set needs; answer with SetResolved."""

    round: Round


@dataclass(frozen=True, slots=True)
class PublishAck:
    """Append Ack(round, set digest, state) to our feed and send RoundClosed(round, members) to finality.

    Comes again for a round whose set grew later.
    """

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""
    set_digest: Digest
    state: Digest
    """State digest of the view with this set."""


@dataclass(frozen=True, slots=True)
class PublishLease:
    """Announce this activity and round in our lease."""

    activity: Activity
    round: Round


@dataclass(frozen=True, slots=True)
class Finish:
    """All rounds are final: nothing is left to do. Sent once."""


Action: TypeAlias = (
    StartTraining | Announce | Discard | FetchPayload | FoldRound | ResolveSet | PublishAck | PublishLease | Finish
)
