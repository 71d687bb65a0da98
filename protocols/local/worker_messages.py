"""Daemon <-> worker: typed messages on a pipe. Tensors travel as files, never as messages.

A frame is `u32 length (little endian)` + canonical msgpack of RequestEnvelope or ReplyEnvelope. The worker answers
requests in any order, by id; while it trains, between two inner steps. The words below are the tags on the wire;
the classes are named StartRequest, StartReply and so on.

    daemon                                   worker (torch, no sockets)
    start(spec, home, …)             ->      starting(phase)* … started(what it has on disk)
    train(round, …)                  ->      progress* … trained(payload, moments of experts given up)
    keep(round)                      ->      kept()               the trained round is safe on the disk
    verify(path, round)              ->      verified()           the payload decodes
    reduce(round, slice, rows)       ->      reduced(payload)     our slice of a reduced round
    open(round, chunk)               ->      opened(opening)      how we reduced one chunk
    judge(proof)                     ->      judged(wrong)        does the proof show a wrong Reduction?
    fold(round, set)                 ->      folded(state)        replaces S_round in the view
    check(round, set)                ->      checked(state)       digest of Θ_final(round), nothing kept
    finalize(round, set)             ->      finalized(state)     view and final state move on
    adopt(path, round)               ->      adopted(state)       a verified snapshot of another member
    snapshot()                       ->      snapshotted(path)    Θ_final as a safetensors file
    inherit(expert, path)            ->      inherited()          optimizer moments from the previous holder
    evaluate()                       ->      evaluated(val_bpb)
    audit(round, contributions)      ->      audited(excess)      is a contribution work on its own windows?
    report()                         ->      reported()
    stop()                           ->      stopped()

Any request may be answered by `failed`; the worker goes on. Every reply carries the worker's time account. "The
view" is Θ_final plus all open rounds.
"""

from typing import TypeAlias

import msgspec

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.local.progress import StartProgress as StartProgress
from atoll.protocols.local.round_sets import Counted as Counted
from atoll.protocols.local.round_sets import ExcisedRound as ExcisedRound
from atoll.protocols.local.round_sets import Member as Member
from atoll.protocols.local.round_sets import Slice as Slice
from atoll.protocols.local.time_spent import TimeSpent
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run.arena import Span

FRAME_MAX_BYTES = 4 * 1024 * 1024
"""Largest frame, in bytes, without its length."""
NOTHING_YET = -2
"""In the place of a round: Θ₀ is given by the run and is not on this disk yet. Round −1 is Θ₀."""


class StartRequest(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """First message. Paths are the daemon's; the worker writes below `home` only."""

    spec: bytes
    """Canonical bytes of the RunSpec."""
    peer: PeerId
    home: str
    """Folder of the run; the worker writes nowhere else."""
    data: str
    """Path of the run's text for `file:` sources; empty otherwise."""
    threads: int
    device: str
    """`cpu`, `cuda` or `cuda:1`; a list such as `cuda:0,cuda:1` takes each step on several devices together."""
    frozen: str = "float32"
    """Storage type of experts that are not trained here: `float32`, `bfloat16`, `int8`."""
    frozen_on_host: bool = False  # in the host's memory
    tokenizer: str = ""
    """Path of the run's `tokenizer.json`; empty if the run has none."""
    moments: tuple[str, ...] = ()
    """Paths of the moments files that the run begins with, in their order; each file may be absent."""
    shard: bool = False  # each of several devices holds a part of what is trained, not a copy
    exchange_on: str = "auto"
    """Memory that holds encoder, error feedback and anchor: `auto`, `host`, `device`."""
    micro_batch: int = 0
    """Sequences of a step that pass through the model of each device at once; 0: all."""
    recompute: bool = False  # layers, in the backward pass
    trains: bool = True  # else what only training needs takes no memory
    reads_text: bool = True  # to train on, or to validate with
    quantized: bool = False  # moments of the optimizer, in eight bits
    base: str = ""
    """Path of the frozen base of a LoRA run; empty in other runs."""
    average_rounds: int = 0
    """Final rounds over which states are averaged for exports; 0: no average is kept."""
    gpu_memory: int = 0
    """Most of each GPU's memory that a process of the worker may take, in percent, 1 … 100; 0: all."""


class TrainRequest(msgspec.Struct, frozen=True, array_like=True, tag="train"):
    """Take the round's inner steps from the local weights, then encode what the round covers.

    Without overlap and fragments, the local weights equal the view when a round begins. Until `after` is folded in
    this worker, at most `ahead` steps are taken; then the worker waits for that round's fold or finalize request,
    and the round does not end before it. A request whose `after` is not the round sent last gives that round up.
    The next train request supersedes one that is still at work, which is answered with failed(Superseded).
    """

    round: Round
    slot: int
    """Our place among the members of this round, from 0: data is disjoint between slots."""
    slots: int
    """Number of members that share the round's data."""
    steps: int
    """Inner steps to take: those that the RunSpec names for the round, or our share of them."""
    after: int
    """Round that is not folded yet while this one begins (overlap); -1: none."""
    experts: bytes = b""
    """Bitmap of the experts to train; empty: all."""
    said: tuple[Round, ...] = ()
    """Rounds after the worker's final one to which our own feed has published a contribution."""
    ahead: int = 0
    """Most inner steps that may be taken before the round `after` is folded."""
    sequences: int = 0
    """Sequences of each step, of those that the RunSpec names; 0: all."""
    limit_s: float = 0.0
    """Seconds of training after which the rest of the round is cut short; 0: it never is."""
    least_steps: int = 1
    """Inner steps of a round that is cut short, if it has not taken more."""
    least_sequences: int = 1
    """Sequences of the steps that are left of such a round."""


class SaveRequest(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Answer once this trained round is safe on the disk, so that it may be published. Other requests go on.

    Answered with failed(DiskFault) if the disk refused it; the next request of this kind tries again.
    """

    round: Round


class VerifyRequest(msgspec.Struct, frozen=True, array_like=True, tag="verify"):
    """Check that a file is a legal payload of this round. Answered with failed(DecodeError) if it is not."""

    path: str
    round: Round
    experts: bytes = b""
    """Bitmap of the experts that the payload's contribution names; empty: all."""
    rows: bytes = b""
    """Merkle root that the payload's rows must have; empty if its record names none."""
    reduced: tuple[Span, ...] = ()
    """The reduced slice, if the file is the payload of a Reduction; else empty."""


class ReduceRequest(msgspec.Struct, frozen=True, array_like=True, tag="reduce"):
    """Reduce our slice of the round to one payload."""

    round: Round
    span: Span
    """Chunks of our slice."""
    raw: tuple[Member, ...]
    """Contributions to reduce, by rising entry id; each path holds a RowsAnswer for the slice."""
    roots: tuple[Digest, ...]
    """Merkle root of each contribution's rows, in the order of `raw`."""
    previous: int
    """Round of our newest published Reduction; -1: none."""


class Published(msgspec.Struct, frozen=True, array_like=True):
    """One of our Reductions, and what it is made again from."""

    ask: ReduceRequest
    path: str
    """File that holds its payload."""
    kept: Digest
    began: bytes  # `kept` of the one before; empty: it began with zeros


class OpenRequest(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Return the Opening of one chunk: how our Reduction of this round computed it."""

    round: Round
    chunk: int
    """Index of the chunk in the arena."""
    again: tuple[Published, ...] = ()  # newest first: what a worker of an earlier life reduced


class JudgeRequest(msgspec.Struct, frozen=True, array_like=True, tag="judge"):
    """Judge whether a FaultProof shows that a Reduction is wrong. Answered with failed if it is not legal."""

    path: str
    """File that holds the FaultProof."""
    reduction: Digest
    """Entry id of the Reduction."""


class _RoundSet(msgspec.Struct, frozen=True, array_like=True):
    """The set S_round of contributions."""

    round: Round
    members: tuple[Member, ...]
    """All contributions of the round's set; empty if slices are given."""
    slices: tuple[Slice, ...] = ()
    """In a reduced round, the contributions that count, slice by slice; else empty."""


class FoldRequest(_RoundSet, frozen=True, array_like=True, tag="fold"):
    """Replace S_round in the view by exactly this set."""


class CheckRequest(_RoundSet, frozen=True, array_like=True, tag="check"):
    """Compute the state digest of Θ_final(round) for this set, and keep nothing. `round` is the last final + 1."""

    excised: tuple[ExcisedRound, ...] = ()
    """What the round's state takes out of the rounds before."""


class FinalizeRequest(_RoundSet, frozen=True, array_like=True, tag="finalize"):
    """Make this set final. The part of our own payloads that it does not hold returns to the error feedback."""

    excised: tuple[ExcisedRound, ...] = ()
    """What the round's state takes out of the rounds before."""


class AdoptRequest(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Replace final state and view by a snapshot of Θ_final(round)."""

    round: Round
    path: str
    """File that holds the snapshot."""
    state: Digest
    """State digest that the snapshot must have."""
    included: tuple[Counted, ...]
    """Our payloads that final sets up to `round` hold; all others return to the error feedback."""


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Write Θ_final as a safetensors file."""

    path: str
    """Path of the file to write."""


class InheritRequest(msgspec.Struct, frozen=True, array_like=True, tag="inherit"):
    """Take an expert's optimizer moments over from its previous holder. DecodeError if the file holds none."""

    expert: int
    path: str
    """File that holds the moments."""


class EvaluateRequest(msgspec.Struct, frozen=True, array_like=True, tag="evaluate"):
    """Compute the validation loss of the current view."""


class AuditRequest(msgspec.Struct, frozen=True, array_like=True, tag="audit"):
    """Find how much more a contribution improves the windows assigned to it than random ones do."""

    round: Round
    tokens: int  # that the audited author says it trained on
    seed: int  # of the windows that are looked at
    audited: Member
    others: tuple[Member, ...]
    """The others of the set, as drawn, with their weights in its fold: what the first improve is left out."""
    sent: tuple[Member, ...]
    """All contributions of the set whose payloads are here: those of later rounds must not be like them."""
    before: Round  # rounds below it were final here when the audited contribution came
    measures: bool = True  # false: only whether its payload was sent before


class ReportRequest(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Return nothing but the time account, which every reply carries."""


class StopRequest(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Save everything and exit."""


FoldAsk: TypeAlias = VerifyRequest | FoldRequest | CheckRequest | FinalizeRequest
"""Requests that need the fold; the worker may serve them beside the inner steps."""
RoundAsk: TypeAlias = TrainRequest | SaveRequest | EvaluateRequest | AuditRequest | DifferenceRequest | MixRequest
ReductionAsk: TypeAlias = ReduceRequest | OpenRequest | JudgeRequest
StateAsk: TypeAlias = StartRequest | AdoptRequest | SnapshotRequest | InheritRequest | ReportRequest | StopRequest
Ask: TypeAlias = FoldAsk | RoundAsk | ReductionAsk | StateAsk


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A payload that was encoded and saved; its contribution may or may not have been published."""

    round: Round
    base: Digest
    """State digest of the weights that the steps started from."""
    payload: Digest
    """BLAKE3 of the payload."""
    path: str
    """File that holds the payload."""
    steps: int
    """Inner steps that were taken."""
    tokens: int
    """Tokens that the steps trained on."""
    weight: int
    """Weight in the mean, in 64ths of the round's nominal tokens."""
    loss: float
    """Mean training loss of the steps, nats per token."""
    experts: bytes = b""
    """Bitmap of the experts that the payload covers; empty: all."""
    form: bytes = b""
    """Merkle root over the payload's rows in runs whose rounds may be reduced; with `pace.stale` the age of its
    base in one byte, if not 0 (`contribution_forms.age_of`); else empty."""


class StartReply(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The state that the worker found on disk.

    Without weights (`final` is NOTHING_YET) it serves only verify and judge requests until an adopt request brings
    Θ₀ or a later state.
    """

    final: int
    """Newest final round on disk; -1: Θ₀; NOTHING_YET: no weights."""
    state: Digest
    """State digest of Θ_final."""
    pending: tuple[Pending, ...]
    """Saved payloads of rounds that are not final yet."""
    parameters: int
    """Number of parameters of the model."""
    device: str
    """Device in use, by its full name."""
    experts: bytes = b""
    """Bitmap of the experts that the worker trained last; empty: all."""
    settled: int = -1
    """Our work up to this round is accounted for; above `final` where the node left its chain after it."""
    uses: int = 0
    """See TrainReply."""


class TrainProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Progress after an inner step; sent at most a few times per second."""

    round: Round
    step: int
    """Inner steps taken so far, of `steps`."""
    steps: int
    loss: float
    """Training loss of this step, nats per token."""
    tokens_per_s: float
    uses: int = 0
    """As in TrainReply, this step included."""


class ReleasedMoments(msgspec.Struct, frozen=True, array_like=True):
    """Optimizer moments of an expert that is not trained here any more; the file lasts one round."""

    expert: int
    path: str


class TrainReply(msgspec.Struct, frozen=True, array_like=True, tag="trained"):
    """The round's payload, encoded and written; a keep request tells when it is safe on the disk."""

    pending: Pending
    payload_bytes: int
    train_s: float
    """Seconds from the first inner step to the last, without `held_s`."""
    overlapped: int = 0
    """Steps that were taken before the round `after` was folded into the local weights."""
    held_s: float = 0.0
    """Seconds spent waiting for the fold of `after`, because no more steps were allowed before it."""
    parted: tuple[ReleasedMoments, ...] = ()
    """Moments of the experts that are not trained here any more."""
    uses: int = 0
    """Most steps of this node that used one sequence, in a run with privacy (node/worker/privacy/uses.py)."""
    pulls: int = 0
    """Differences of neighbours that were mixed in, in a run with gossip."""


class SaveReply(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The round's payload and the state after it, or a later state, are fsynced."""


class VerifyReply(msgspec.Struct, frozen=True, array_like=True, tag="verified"):
    """Answer to verify: the payload is legal."""


class ReduceReply(msgspec.Struct, frozen=True, array_like=True, tag="reduced"):
    """Our reduced slice: the payload on disk, and the fields of its Reduction record."""

    round: Round
    payload: Digest
    """BLAKE3 of the reduced payload."""
    path: str
    """File that holds the payload."""
    rows: Digest
    """Merkle root over the payload's rows."""
    kept: Digest
    """Merkle root over the error feedback that remains, chunk by chunk."""
    previous: int
    """Round of our Reduction whose error feedback this one began with; -1: it began with zeros."""


class OpenReply(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """How one chunk of our Reduction was computed."""

    opening: bytes
    """An encoded Opening (protocols/ledger/reduction.py)."""


class JudgeReply(msgspec.Struct, frozen=True, array_like=True, tag="judged"):
    """Answer to judge: the verdict on a FaultProof."""

    wrong: bool
    """Whether the proof shows that the Reduction is wrong."""


class _RoundState(msgspec.Struct, frozen=True, array_like=True):
    """A round and the state digest that results from its set."""

    round: Round
    state: Digest


class FoldReply(_RoundState, frozen=True, array_like=True, tag="folded"):
    """State digest of the view after the fold."""


class CheckReply(_RoundState, frozen=True, array_like=True, tag="checked"):
    """State digest that Θ_final(round) would have."""


class FinalizeReply(_RoundState, frozen=True, array_like=True, tag="finalized"):
    """State digest of Θ_final(round), which is saved."""


class AdoptReply(_RoundState, frozen=True, array_like=True, tag="adopted"):
    """State digest of the snapshot, which was verified and is now Θ_final."""


class SnapshotReply(msgspec.Struct, frozen=True, array_like=True, tag="snapshotted"):
    """A snapshot file, complete and fsynced. Equal states give equal bytes."""

    round: Round
    """Newest final round in the snapshot."""
    state: Digest
    """State digest of the snapshot."""
    path: str
    size_bytes: int


class EvaluateReply(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """Validation loss of the view."""

    state: Digest
    """State digest of the view that was evaluated: folds may have happened since the request."""
    val_bpb: float  # validation bits per byte
    val_loss: float  # nats per token
    took_s: float


class AuditReply(msgspec.Struct, frozen=True, array_like=True, tag="audited"):
    """What an audit found in `took_s` seconds, at Θ_final after the round `at`."""

    excess: int
    """See `Verdict` (protocols/ledger/records.py)."""
    took_s: float
    at: int = -1
    was_sent_before: bool = False


class InheritReply(msgspec.Struct, frozen=True, array_like=True, tag="inherited"):
    """Whether the moments were taken over."""

    used: bool  # false if the expert is not trained here, or not yet


class ReportReply(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    """The worker is alive."""


class StopReply(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """Answer to stop: the worker's last message."""


class FailureReply(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Answer to a request that failed."""

    fault: str
    """Class name of the error in protocols/errors.py."""
    message: str
    hint: str
    """What the user does next; may be empty."""


FoldAnswer: TypeAlias = VerifyReply | FoldReply | CheckReply | FinalizeReply
RoundAnswer: TypeAlias = TrainReply | SaveReply | EvaluateReply | AuditReply | DifferenceReply | MixReply
ReductionAnswer: TypeAlias = ReduceReply | OpenReply | JudgeReply
StateAnswer: TypeAlias = StartReply | AdoptReply | SnapshotReply | InheritReply | ReportReply | StopReply
Answer: TypeAlias = FoldAnswer | RoundAnswer | ReductionAnswer | StateAnswer | FailureReply


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One frame from the daemon to the worker. The answer repeats the id."""

    id: int
    ask: Ask


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One frame from the worker to the daemon. Progress carries its request's id and is not the answer."""

    id: int
    answer: Answer | TrainProgress | StartProgress
    spent: TimeSpent
