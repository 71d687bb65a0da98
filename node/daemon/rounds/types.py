"""Events that the round machine (machine.py) receives, and actions that it returns.

Times `now` are seconds of one monotonic clock, as floats. Nothing here reads a clock.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from atoll.node.daemon.rounds.overlap_depth import lag_of
from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.ledger.set_limit import NewcomerOrder, Seniority
from atoll.protocols.local.contribution_forms import age_of
from atoll.protocols.local.worker_messages import Pending, TrainReply


class WorkerReady(msgspec.Struct, frozen=True):
    """The worker runs and holds Θ_final(`final`); the ledger is synced as far as it can be now.

    Send all contributions that the ledger knows, own ones included, as ContributionSeen before the first one. Send
    it again after a restart of the worker and an adopted snapshot: requests to the old worker are forgotten.
    """

    final: int
    """Newest round folded into Θ_final; -1 for genesis."""
    pending: tuple[Pending, ...]
    """`StartReply.pending`: work that was saved, announced or not."""
    now: float


class ContributionSeen(msgspec.Struct, frozen=True):
    """A contribution entered the ledger; ours too, as soon as it is appended. Repeats change nothing."""

    entry: Digest
    author: PeerId
    contribution: Contribution
    held: bool
    """The payload is on disk and decodes (ours always)."""
    now: float


class PayloadHeld(msgspec.Struct, frozen=True):
    """The payload of a contribution to this round is on disk and verified by the worker."""

    entry: Digest
    round: Round
    now: float
    line: str = ""
    """Address block of the neighbour that brought its author; empty: it is not known, or no newcomer."""


class AuthorPruned(msgspec.Struct, frozen=True):
    """The ledger let go of an author that showed no work: its contributions without a payload are forgotten."""

    author: PeerId
    now: float


class AuthorExcluded(msgspec.Struct, frozen=True):
    """Another author is excluded from `round` on: no own set of these rounds has its work."""

    author: PeerId
    round: Round
    now: float


class WorkApart(msgspec.Struct, frozen=True):
    """All contributions to open rounds that were made in another chain: own sets have them only alone."""

    entries: frozenset[Digest]
    now: float


class ReductionPlanned(msgspec.Struct, frozen=True):
    """The round is reduced: no node needs its payloads as a whole. Ignored where the round is closed already.

    PayloadHeld then means that the rows this node needs of a contribution before the round closes are here.
    """

    round: Round
    now: float


class SetResolved(msgspec.Struct, frozen=True):
    """Answer to ResolveSet, sent again when it changes: the set of a reduced round, whose payloads are here."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids of contributions and Reductions, sorted."""
    now: float


class SenioritySeen(msgspec.Struct, frozen=True):
    """Other authors come first now in the rounds with more contributions than a set may name."""

    seniority: Seniority
    order: NewcomerOrder
    now: float


class LeasesChanged(msgspec.Struct, frozen=True):
    """All live leases of others, replacing the ones known so far. Expired ones are left out."""

    members: Mapping[PeerId, MemberView]
    now: float
    shortage: str = ""
    """Why these members and this node cannot train the whole model; empty: they can."""


class TrainingDone(msgspec.Struct, frozen=True):
    """The worker's answer to StartTraining. TrainingSaved follows when the work is safe on the disk."""

    round: Round
    """As asked for. `pending` is of a later one where its base is older than its round."""
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
    lag = lag_of(done.overlapped, done.held_s, done.train_s, done.pending.steps) if after >= 0 else None
    began = Round(done.pending.round - age_of(done.pending))
    return TrainingDone(began, done.pending, done.train_s, now, lag, left_out)


class TrainingRefused(msgspec.Struct, frozen=True):
    """The worker begins this round not, nor any later one; the node rests as in a pause of the user's."""

    round: Round
    reason: str
    now: float


class TrainingSaved(msgspec.Struct, frozen=True):
    """Trained work is safe on the disk: it may be announced."""

    pending: Pending
    now: float


class FoldDone(msgspec.Struct, frozen=True):
    """The worker's answer to FoldRound. `state`: digest of the view after the fold."""

    round: Round
    state: Digest
    now: float


class RoundFinal(msgspec.Struct, frozen=True):
    """The worker folded `round` into Θ_final: its contributions are forgotten here."""

    round: Round
    now: float


class RoundTick(msgspec.Struct, frozen=True):
    """Time passed. The driver sends it a few times a second; harmless at any time."""

    now: float


class Reweighed(msgspec.Struct, frozen=True):
    """Contributions to an open round have other weights than it was folded with: it is folded again."""

    round: Round
    now: float


class Pause(msgspec.Struct, frozen=True):
    """The user pauses: the round at hand is finished, no other is started, rounds of others are still folded."""

    reason: str
    now: float
    for_s: float | None = None
    """After which the node goes on by itself; None: it waits for Resume."""


class Resume(msgspec.Struct, frozen=True):
    """The user ends a pause: the node goes on at the round where the others are."""

    now: float


class Hold(msgspec.Struct, frozen=True):
    """The node may not train now, for this reason, as its settings for a guest say; empty: it may.

    It rests as in a pause of the user's, which stays beside it: the node trains when neither is left.
    """

    reason: str
    now: float


class Refused(msgspec.Struct, frozen=True):
    """No peer stores what this node writes, for this reason; empty: one does. Until then its work is in vain."""

    reason: str
    now: float


class Behind(msgspec.Struct, frozen=True):
    """The node must sync (fetch a snapshot, replace its worker) before it goes on. WorkerReady ends it."""

    reason: str
    now: float


Event: TypeAlias = (
    WorkerReady
    | ContributionSeen
    | PayloadHeld
    | AuthorPruned
    | AuthorExcluded
    | WorkApart
    | ReductionPlanned
    | SetResolved
    | SenioritySeen
    | LeasesChanged
    | TrainingDone
    | TrainingRefused
    | TrainingSaved
    | FoldDone
    | Reweighed
    | RoundFinal
    | RoundTick
    | Pause
    | Resume
    | Hold
    | Refused
    | Behind
)


class StartTraining(msgspec.Struct, frozen=True):
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


class Announce(msgspec.Struct, frozen=True):
    """Append this contribution to our feed, unless it is there already, then send ContributionSeen."""

    pending: Pending


class Discard(msgspec.Struct, frozen=True):
    """The round became final before its work was announced: return the work to the error feedback."""

    pending: Pending


class FetchPayload(msgspec.Struct, frozen=True):
    """Get the payload of a contribution, from its author or any holder, until it is held or its round is final."""

    entry: Digest


class FoldRound(msgspec.Struct, frozen=True):
    """Ask the worker to fold exactly this set; answer with FoldDone."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids of contributions, and of Reductions in a reduced round, sorted."""


class ResolveSet(msgspec.Struct, frozen=True):
    """A reduced round is closed: resolve its set and fetch what the set needs; answer with SetResolved."""

    round: Round


class PublishAck(msgspec.Struct, frozen=True):
    """Append Ack(round, set digest, state), send RoundClosed(round, members) to finality; again if it grew."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""
    set_digest: Digest
    state: Digest
    """State digest of the view with this set."""


class LeaveRound(msgspec.Struct, frozen=True):
    """Send RoundClosed(round, members) to finality: the others left the round, and this node still trains."""

    round: Round
    members: tuple[Digest, ...]
    """Entry ids, sorted."""


class PublishLease(msgspec.Struct, frozen=True):
    """Announce this activity and round in our lease."""

    activity: Activity
    round: Round


class Finish(msgspec.Struct, frozen=True):
    """All rounds are final: nothing is left to do. Sent once."""


Action: TypeAlias = (
    StartTraining
    | Announce
    | Discard
    | FetchPayload
    | FoldRound
    | ResolveSet
    | PublishAck
    | LeaveRound
    | PublishLease
    | Finish
)
