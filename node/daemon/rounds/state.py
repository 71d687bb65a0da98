"""The state of the round machine (node/daemon/rounds/machine.py), with its phases and constants.

Times are seconds of one monotonic clock, as floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from atoll.node.daemon.rounds.overlap_depth import Ahead
from atoll.node.daemon.rounds.participants import MemberView, RoundBook, SetRules
from atoll.node.runs.capacity.open_rounds import ANY_DISK, OpenRounds
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.local.worker_messages import Pending
from atoll.protocols.run.run_spec import RunSpec

STALL_ROUNDS = 8
"""A round without a quorum closes after this many own round times and a lease: a member may live and be stuck."""
LOST_ROUNDS = 1.0
"""So many own round times are waited for a member to which the connection is lost, or that was absent before."""
UNREACHABLE_ROUNDS = 0.25
"""The same for a member that could not be dialled since, once a quorum is there."""
TRIAL_ROUNDS_EACH = 8
"""Members on trial hold up rounds in vain for one own round time in so many rounds, in the mean."""
FREE_ROUNDS = 3.0
"""So many own round times in vain, the trial of one, shorten no later wait."""
BRIEF_ROUNDS = 0.25
"""Beyond these one on trial is waited for so many own round times: who is as fast as the others is there."""
FREE_STALLS = 2.0
"""So many of the longest waits in vain for members whose work does not come regularly shorten no later one."""
LOST_LEAST_S = 1.0
"""The least such wait, in seconds: rounds may take less than a dial."""
CATCH_UP_ROUNDS = 2.0
"""A node that starts waits for payloads of open rounds while one comes within so many round times."""
LATE_ROUNDS = 0.1
"""Who begins a round later than the others by this share of it takes fewer steps, or waits for the next round."""
LATE_LEAST_S = 0.25
"""The least such delay, in seconds: times in leases are rounded, and as old as their way here is long."""
UNSAVED_ROUNDS = 2
"""So many trained rounds may wait for the disk, in memory: one is saved while the next one is trained."""
NO_DIGEST = Digest(b"")
NO_RUN = RunId(NO_DIGEST)


class Phase(Enum):
    """What the node does. The value is the word that people see."""

    __hash__ = object.__hash__  # each is one object, and each step looks its activity up
    SYNC = "syncing"
    CATCH_UP = "catching up"
    GATHER = "gathering"
    JOIN = "joining"
    TRAIN = "training"
    COLLECT = "collecting"
    FOLD = "folding"
    OBSERVE = "observing"
    PAUSED = "paused"
    FULL = "waiting for finality"
    DONE = "done"
    FINISHED = "finished"


WORKING = (Phase.TRAIN, Phase.COLLECT)
RESTING = (
    Phase.GATHER,
    Phase.JOIN,
    Phase.OBSERVE,
    Phase.PAUSED,
    Phase.FULL,
    Phase.DONE,
    Phase.FINISHED,
)


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """Constants of the run and of this node."""

    me: PeerId
    """PeerID of this node."""
    rounds: int
    """Rounds of the whole run."""
    quorum_256: int
    """Share of the expected contributions that lets a round close after its grace, in 256ths."""
    grace_256: int
    """Grace after the quorum as a share of the node's own round time, in 256ths."""
    lease_s: float
    """Seconds after which a silent member's lease expires."""
    min_members: int = 1
    """Members that round 0 waits for, this node included."""
    open_rounds: OpenRounds = ANY_DISK
    """How far this node may be ahead of the newest final round."""
    overlap_steps: int = 0
    """Steps of a round that may be trained before the round before it is folded; 0: rounds do not overlap."""
    overlap_most: int = 0
    """The most such steps where the node's link needs more; below `overlap_steps`: no more than these."""
    least_256: int = 256
    """The least share of a round's steps that a member may take, in 256ths."""
    most_age: int = 0
    """Rounds by which the base of work may be older than its round; 0: it counts where it began, or nowhere."""
    observes: str = ""
    """What this node does instead of training, in one line; empty: it trains."""
    run: RunId = NO_RUN
    """Id of the run."""
    has_worker: bool = True
    """Whether WorkerReady will ever come."""


def config_of(
    spec: RunSpec,
    me: PeerId,
    observes: str = "",
    *,
    has_worker: bool = True,
    open_rounds: OpenRounds = ANY_DISK,
) -> RoundConfig:
    """The machine's constants from a RunSpec, and from what the node does."""
    pace, outer = spec.pace, spec.outer
    overlap_steps, overlap_most = outer.overlap_bounds
    return RoundConfig(
        me=me,
        rounds=outer.rounds,
        quorum_256=pace.quorum_256,
        grace_256=pace.grace_256,
        lease_s=pace.lease_s,
        least_256=pace.least_256,
        most_age=pace.stale.most if pace.stale else 0,
        min_members=pace.min_members,
        overlap_steps=overlap_steps,
        overlap_most=overlap_most,
        observes=observes,
        open_rounds=open_rounds,
        run=spec.id,
        has_worker=has_worker,
    )


FoldSet: TypeAlias = tuple[Digest, ...]
"""Entry ids of the contributions (and of the Reductions, in a reduced round) that are folded together, sorted."""


class Absence(msgspec.Struct, frozen=True):
    """What is remembered of a member that a round closed without (node/daemon/rounds/absence.py)."""

    stalls: int = 0
    """Rounds that it held up in vain."""
    came: int = 0
    """Rounds after the last of these in which its work came."""
    newest: int = -1
    """The newest round of both kinds."""


class RoundState(msgspec.Struct, frozen=True):
    """Everything the round machine knows. `machine.begin` makes the first one."""

    config: RoundConfig
    ahead: Ahead
    """How far this node may train ahead of the fold that it waits for (τ)."""
    phase: Phase = Phase.SYNC
    """What the node does now."""
    round: int = 0
    """The round at hand (TRAIN, COLLECT, FOLD), else the round that would be next."""
    collecting: int = -1
    """The round whose contributions are awaited (TRAIN, COLLECT): that at hand or the one before; -1: none."""
    collecting_since: float = 0.0
    """When the node began to wait for the collected round."""
    final: int = -1
    """Newest round folded into Θ_final; -1: none."""
    closed: int = -1
    """Newest round that this node closed, or that it saw the others leave."""
    now: float = 0.0
    """Time of the newest event; never runs backwards."""
    since: float = 0.0
    """When the phase began."""
    train_s: float = 0.0
    """Own training time of the newest trained round, without waiting; 0 before the first. Steps that were left out
    because the node began late are counted."""
    step_s: float = 0.0
    """Own time of one inner step of that round."""
    late: bool = False
    """The others had closed our newest round before our work was done."""
    joins_at: float | None = None
    """When the node stops to wait for the others' next round (JOIN); None: it does not wait. A time that is past
    stays: the node waits no more."""
    quorum_at: float | None = None
    """When the collected round reached its quorum; None: it has not."""
    resting: str = ""
    """Reason of a pause; empty when there is none."""
    rest_until: float | None = None
    """When the pause ends by itself; None: it does not."""
    is_spent: bool = False
    """The worker refused a round during this pause: it would use up more ε than the run allows."""
    held: str = ""
    """Why the node may not train now by its user's settings for a guest; empty if it may."""
    refused: str = ""
    """Why no peer stores what this node writes: it rests until one does. Empty if one does."""
    books: Mapping[int, RoundBook] = msgspec.field(default_factory=dict)
    """Contributions to each round that is not final, by round."""
    members: Mapping[PeerId, MemberView] = msgspec.field(default_factory=dict)
    """Live leases of other members."""
    entered: Mapping[PeerId, float] = msgspec.field(default_factory=dict)
    """When each member was first seen in the round of its lease; it began the round then or before."""
    absent: frozenset[PeerId] = frozenset()
    """Members that a round closed without, and of whose payloads too few came since."""
    missed: Mapping[PeerId, Absence] = msgspec.field(default_factory=dict)
    """What is remembered of these, and of those that held up a round before."""
    owed_s: Mapping[PeerId, float] = msgspec.field(default_factory=dict)
    """Seconds by which members were later in rounds without a quorum than one may be in each."""
    owing: frozenset[PeerId] = frozenset()
    """Those that were later than once is allowed, until they owe nothing."""
    awaited: frozenset[PeerId] = frozenset()
    """All that were waited for in the collected round at any time."""
    on_trial: frozenset[PeerId] = frozenset()
    """Those of them that had shown no work when the round began to wait for them."""
    attended: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """In which of the newest closed rounds each author's work was in time: bits, the newest lowest."""
    rounds_seen: int = 0
    """Rounds that were closed here, of those that `attended` can hold."""
    lent_s: float = 0.0
    """Seconds for which rounds were held up in vain for members on trial, less what rounds made up for since."""
    in_vain_s: float = 0.0
    """The same of their short waits, one own round time each at most."""
    stalled_s: float = 0.0
    """The same of long waits for members that have shown work, and not regularly."""
    waits: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Until when a closed round that is not final would have waited for a member that is not absent."""
    payload_at: float = 0.0
    """When the newest payload of another member came."""
    excluded: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """The first round without an author that is excluded."""
    apart: frozenset[Digest] = frozenset()
    """Contributions that were made in another chain."""
    set_rules: SetRules = msgspec.field(default_factory=SetRules)
    """Who comes first in a round with more contributions than a set may name."""
    shortage: str = ""
    """Why the members cannot train the whole model; round 0 waits for more of them."""
    just_left: Mapping[PeerId, int] = msgspec.field(default_factory=dict)
    """Round that a member was seen to leave for the very next one (`rounds_just_left`); only with overlap."""
    fetched_to: int = -1
    """The payloads of all rounds up to this one were fetched for, since the worker is ready."""
    folding: Mapping[int, FoldSet] = msgspec.field(default_factory=dict)
    """Folds that the worker was asked for and has not answered."""
    folded: Mapping[int, FoldSet] = msgspec.field(default_factory=dict)
    """The set of each open round that the worker's view holds."""
    settled: Mapping[int, RoundBook] = msgspec.field(default_factory=dict)
    """The book of each open round whose set is the folded one. While a round has this very book, its set is not
    looked at again; without it the machine does the same, in a time that grows with the open rounds."""
    acked: Mapping[int, FoldSet] = msgspec.field(default_factory=dict)
    """The set of each open round that our feed acknowledged last."""
    left: Mapping[int, FoldSet] = msgspec.field(default_factory=dict)
    """The set of each open round that the others left while this node trains on, as finality was told."""
    reduced: Mapping[int, FoldSet | None] = msgspec.field(default_factory=dict)
    """Rounds that are reduced, with the set that can be folded; None: it is not known yet."""
    resolving: Mapping[int, bool] = msgspec.field(default_factory=dict)
    """Reduced rounds whose set was asked for."""
    view: Digest = NO_DIGEST
    """State digest of the view after the newest fold."""
    ready: bool = False
    """The worker has been there at least once."""
    syncing: str = ""
    """Reason of Behind, until WorkerReady."""
    saving: frozenset[int] = frozenset()
    """Rounds that are trained, and whose work is not safe on the disk yet."""
    unannounced: tuple[Pending, ...] = ()
    """Work that is safe, and not in our feed yet; with overlap of more than one round."""
    announced_at: float = 0.0
    """When announcements that the disk refused were tried last."""
    leased: tuple[Activity, int] | None = None
    """Activity and round that our lease announces; None before the first lease."""


def stall_s(state: RoundState, round_s: float) -> float:
    """Seconds for which a member that lives is waited for at most, where a round takes `round_s`."""
    return STALL_ROUNDS * round_s + state.config.lease_s


def absence_s(state: RoundState) -> float:
    """Seconds for which a round waits for a member that is lost or absent."""
    return max(LOST_LEAST_S, LOST_ROUNDS * state.train_s)
