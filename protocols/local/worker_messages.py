"""Daemon <-> worker: typed messages on a pipe. Tensors travel as files, never as messages.

Each frame is `u32 length (little endian)` + canonical msgpack of Request or Reply. The worker answers
requests in any order, by id; while it trains it serves requests between two inner steps.

    daemon                                   worker (torch, no sockets)
    Start(spec, home, …)             ->      Started(what it has on disk)
    Train(round, …)                  ->      Progress* … Trained(payload, moments of experts given up)
    Keep(round)                      ->      Kept()               the trained round is safe on the disk
    Verify(path, round)              ->      Verified()           the payload decodes
    Reduce(round, slice, rows)       ->      Reduced(payload)     our slice of a reduced round
    Open(round, chunk)               ->      Opened(opening)      how we reduced one chunk
    Judge(proof)                     ->      Judged(wrong)        is somebody's Reduction proven wrong?
    Fold(round, set)                 ->      Folded(state)        replaces S_round in the view
    Check(round, set)                ->      Checked(state)       Θ_final(round), nothing kept
    Finalize(round, set)             ->      Finalized(state)     view and final state move on
    Adopt(path, round)               ->      Adopted(state)       a verified snapshot of somebody else's
    Snapshot()                       ->      Snapshotted(path)    Θ_final as a safetensors file
    Inherit(expert, path)            ->      Inherited()          moments of who trained it before
    Evaluate()                       ->      Evaluated(val_bpb)
    Report()                         ->      Reported()
    Stop()                           ->      Stopped()

Any request may be answered by Failed; the worker goes on. Every reply carries the worker's books of time.
"""

from typing import TypeAlias

import msgspec

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.run.arena import Span

FRAME_MAX_BYTES = 4 * 1024 * 1024
NOTHING_YET = -2
"""In the place of a round: Θ₀ is given by the run and is not here. Round −1 is Θ₀."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One contribution of a round's set, with its payload on disk."""

    entry: Digest
    author: PeerId
    weight: int
    payload: Digest
    path: str
    experts: bytes = b""
    """Bitmap of the experts that it covers; empty: all."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """What counts in one slice of a reduced round."""

    span: Span
    reduced: tuple[Member, ...]
    """The Reduction, if there is one: its weight is that of all that it covers; its payload is the slice's."""
    raw: tuple[Member, ...]
    """Contributions that it does not cover; the paths are of RowsAnswers of this span."""
    ours: bool
    """Our own contribution counts here, raw or covered."""


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload of ours counts in a final set."""

    payload: Digest
    """Of a contribution, or of a Reduction."""
    spans: tuple[Span, ...]
    """Chunks of the round's cover; of a Reduction none are named."""
    round: Round


class StartRequest(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """First message. Paths are the daemon's; the worker writes below `home` only."""

    spec: bytes
    """Canonical RunSpec."""
    peer: PeerId
    home: str
    data: str
    """Path of the run's text for `file:` sources; empty otherwise."""
    threads: int
    device: str
    """`cpu`, `cuda`, `cuda:1`; several that take each step together: `cuda:0,cuda:1`."""
    frozen: str = "float32"
    """How experts are stored that are not trained here: `float32`, `bfloat16`, `int8`."""
    frozen_on_host: bool = False
    """They stay in the host's memory."""
    tokenizer: str = ""
    """Path of the run's `tokenizer.json`; empty where it has none."""
    moments: tuple[str, ...] = ()
    """Paths of the moments files that the run begins with, in their order; each may be absent."""
    shard: bool = False
    """Each of several devices holds a part of what is trained, not a copy."""
    exchange_on: str = "auto"
    """Where contributions are encoded, and error feedback and anchor lie: `auto`, `host`, `device`."""


class TrainRequest(msgspec.Struct, frozen=True, array_like=True, tag="train"):
    """Take the round's inner steps from the local weights, then encode what the round covers.

    Without overlap and fragments the local weights are the view when a round begins. While `after` is not folded
    in this worker, at most `ahead` are taken; then the worker waits for its Fold or Finalize, and the
    round does not end before it. A Train that names another `after` than the round sent last gives that one up.
    A Train that is still at work is given up for the next one, and answered with Failed(Superseded).
    """

    round: Round
    slot: int
    """Our place among the members of this round: data is disjoint between slots."""
    slots: int
    steps: int
    """Inner steps to take: what the RunSpec names for the round, or our share of it."""
    after: int
    """Round whose Fold may come while this one is trained, up to `ahead` steps later; -1: none is due."""
    experts: bytes = b""
    """Bitmap of the experts to train; empty: all."""
    said: tuple[Round, ...] = ()
    """Rounds above the worker's final one that our own feed has a contribution to."""
    ahead: int = 0
    """Steps that may be taken before that Fold is in."""


class SaveRequest(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Say when this trained round is safe on the disk: then it may be announced. Other asks are served meanwhile.

    Failed with DiskFault when the disk refused it; the next Keep tries again.
    """

    round: Round


class VerifyRequest(msgspec.Struct, frozen=True, array_like=True, tag="verify"):
    """Is the file a legal payload of this round? Failed with DecodeError if not."""

    path: str
    round: Round
    experts: bytes = b""
    """Bitmap of the experts that its contribution names."""
    rows: bytes = b""
    """Merkle root that its rows must have, where the record that names it has one."""
    reduced: tuple[Span, ...] = ()
    """The slice, where the file is the payload of a Reduction."""


class ReduceRequest(msgspec.Struct, frozen=True, array_like=True, tag="reduce"):
    """Reduce our slice of the round; the raw rows are as in a Slice, by rising entry id."""

    round: Round
    span: Span
    raw: tuple[Member, ...]
    roots: tuple[Digest, ...]
    """Merkle root of each contribution's rows."""
    previous: int
    """Round of our newest published Reduction; -1: none."""


class OpenRequest(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """How did we reduce this chunk of the arena?"""

    round: Round
    chunk: int


class JudgeRequest(msgspec.Struct, frozen=True, array_like=True, tag="judge"):
    """Does the FaultProof in this file show that this Reduction is wrong? Failed if it does not fit at all."""

    path: str
    reduction: Digest


class FoldRequest(msgspec.Struct, frozen=True, array_like=True, tag="fold"):
    """The set S_round is now exactly `members`; or, where slices are given, what counts in them."""

    round: Round
    members: tuple[Member, ...]
    slices: tuple[Slice, ...] = ()


class CheckRequest(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """What would Θ_final(round) be, if S_round were exactly this (see Fold)? `round` = last final + 1."""

    round: Round
    members: tuple[Member, ...]
    slices: tuple[Slice, ...] = ()


class FinalizeRequest(msgspec.Struct, frozen=True, array_like=True, tag="finalize"):
    """S_round is final. Of our own payloads up to it, what does not count goes back into the error feedback."""

    round: Round
    members: tuple[Member, ...]
    slices: tuple[Slice, ...] = ()


class AdoptRequest(msgspec.Struct, frozen=True, array_like=True, tag="adopt"):
    """Replace everything by a snapshot: Θ_final(round) with this state digest."""

    round: Round
    path: str
    state: Digest
    included: tuple[Counted, ...]
    """What of ours the final sets up to `round` hold; the rest goes back into the error feedback."""


class SnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Write Θ_final to `path`."""

    path: str


class InheritRequest(msgspec.Struct, frozen=True, array_like=True, tag="inherit"):
    """The moments that an expert had where it was trained before. DecodeError if the file holds none."""

    expert: int
    path: str


class EvaluateRequest(msgspec.Struct, frozen=True, array_like=True, tag="evaluate"):
    """Validation loss of the current view."""


class ReportRequest(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Nothing but the books of time, which every reply carries."""


class StopRequest(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Save and exit."""


FoldAsk: TypeAlias = VerifyRequest | FoldRequest | CheckRequest | FinalizeRequest
"""What needs the fold, and may be worked on beside the inner steps."""

Ask: TypeAlias = (
    StartRequest
    | TrainRequest
    | SaveRequest
    | VerifyRequest
    | ReduceRequest
    | OpenRequest
    | JudgeRequest
    | FoldRequest
    | CheckRequest
    | FinalizeRequest
    | AdoptRequest
    | SnapshotRequest
    | InheritRequest
    | EvaluateRequest
    | ReportRequest
    | StopRequest
)


class Pending(msgspec.Struct, frozen=True, array_like=True):
    """A payload that was encoded and saved; its contribution may or may not have been announced."""

    round: Round
    base: Digest
    payload: Digest
    path: str
    steps: int
    tokens: int
    weight: int
    loss: float
    experts: bytes = b""
    """Bitmap of the experts that it covers."""
    rows: bytes = b""
    """Merkle root over the payload's rows, in runs whose rounds may be reduced."""


class StartReply(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """What the worker found on disk. `final` = -1: genesis; NOTHING_YET: no weights.

    Then it does nothing but Verify and Judge until it is given Θ₀, or a later state, to Adopt.
    """

    final: int
    state: Digest
    """State digest of Θ_final."""
    pending: tuple[Pending, ...]
    parameters: int
    device: str
    experts: bytes = b""
    """Bitmap of the experts that it trained last; empty: all."""


class TrainProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """After an inner step; at most a few per second."""

    round: Round
    step: int
    steps: int
    loss: float
    tokens_per_s: float


class ReleasedMoments(msgspec.Struct, frozen=True, array_like=True):
    """Moments of an expert that is not trained here any more: a file that lies until the next round ends."""

    expert: int
    path: str


class TrainReply(msgspec.Struct, frozen=True, array_like=True, tag="trained"):
    """The round's work, encoded and written; `SaveRequest` says when it is safe."""

    pending: Pending
    payload_bytes: int
    train_s: float
    """Without `held_s`."""
    overlapped: int = 0
    """Steps that were taken before the fold of `after` was in the local weights."""
    held_s: float = 0.0
    """Time spent waiting for that fold, because no more steps may be taken before it."""
    parted: tuple[ReleasedMoments, ...] = ()


class SaveReply(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The round's payload and the state after it are fsynced, or a later state is."""


class VerifyReply(msgspec.Struct, frozen=True, array_like=True, tag="verified"):
    """The payload decodes."""


class ReduceReply(msgspec.Struct, frozen=True, array_like=True, tag="reduced"):
    """What the record of the Reduction says; the payload is on disk."""

    round: Round
    payload: Digest
    path: str
    rows: Digest
    kept: Digest
    previous: int
    """Round of our Reduction that this one goes on from; -1: it began with zeros."""


class OpenReply(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """An encoded Opening (protocols/ledger/reduction.py)."""

    opening: bytes


class JudgeReply(msgspec.Struct, frozen=True, array_like=True, tag="judged"):
    """Whether the Reduction is proven wrong."""

    wrong: bool


class FoldReply(msgspec.Struct, frozen=True, array_like=True, tag="folded"):
    """State digest of the view: Θ_final + all open rounds."""

    round: Round
    state: Digest


class CheckReply(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """State digest that Θ_final(round) would have."""

    round: Round
    state: Digest


class FinalizeReply(msgspec.Struct, frozen=True, array_like=True, tag="finalized"):
    """State digest of Θ_final(round); saved."""

    round: Round
    state: Digest


class AdoptReply(msgspec.Struct, frozen=True, array_like=True, tag="adopted"):
    """The snapshot verified and is now Θ_final."""

    round: Round
    state: Digest


class SnapshotReply(msgspec.Struct, frozen=True, array_like=True, tag="snapshotted"):
    """The file is complete and fsynced. Equal states give equal bytes."""

    round: Round
    state: Digest
    path: str
    size_bytes: int


class EvaluateReply(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """Validation bits per byte of the view."""

    state: Digest
    """State digest of the view that was evaluated: folds may have happened since it was asked for."""
    val_bpb: float
    val_loss: float
    """Nats per token."""
    took_s: float


class InheritReply(msgspec.Struct, frozen=True, array_like=True, tag="inherited"):
    """`used` is false where the expert is not trained here, or not yet."""

    used: bool


class ReportReply(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    """The worker is there."""


class StopReply(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """Last message."""


class FailureReply(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request could not be done. `fault` is the error's class name in protocols.errors."""

    fault: str
    message: str
    hint: str


Answer: TypeAlias = (
    StartReply
    | TrainReply
    | SaveReply
    | VerifyReply
    | ReduceReply
    | OpenReply
    | JudgeReply
    | FoldReply
    | CheckReply
    | FinalizeReply
    | AdoptReply
    | SnapshotReply
    | InheritReply
    | EvaluateReply
    | ReportReply
    | StopReply
    | FailureReply
)


class RequestEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """Daemon to worker."""

    id: int
    ask: Ask


class TimeSpent(msgspec.Struct, frozen=True, array_like=True):
    """The worker's life so far by what it did, each moment once. All entries but the last add up to its age."""

    start_ns: int = 0
    """Loading."""
    steps_ns: int = 0
    """Inner steps."""
    encode_ns: int = 0
    fold_ns: int = 0
    """Fold, Check, Verify, Finalize, Adopt."""
    checkpoint_ns: int = 0
    """Saving: generations and snapshots; without what a thread waits for the disk beside the steps."""
    evaluate_ns: int = 0
    recompute_ns: int = 0
    """Inner steps that were thrown away."""
    wait_ns: int = 0
    """Nothing was asked."""
    unsaved_ns: int = 0
    """Of `steps_ns`: not saved yet."""

    @property
    def age_ns(self) -> int:
        """Time since the books were opened."""
        entries_ns: tuple[int, ...] = msgspec.structs.astuple(self)
        return sum(entries_ns) - self.unsaved_ns


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """Worker to daemon. Progress carries the id of its Train request and is not the answer."""

    id: int
    answer: Answer | TrainProgress
    spent: TimeSpent
