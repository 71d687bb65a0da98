"""Operator <-> daemon: one JSON object a line over the unix socket in the node's home.

    operator                              daemon
    {"v":1,"ask":{"type":"status"}}  ->   {"v":1,"answer":{"type":"status",…}}
    watch, logs with follow          ->   answers until the operator hangs up
    anything that cannot be done     ->   {"v":1,"answer":{"type":"refused",…}}

A connection carries any number of requests, one at a time. Fields are only ever added; a reader skips
fields that it does not know. `docs/json.md` prints every answer as the CLI's `--json` shows it.
"""

from typing import TypeAlias

import msgspec

MAX_LINES = 10_000
"""Log lines that one request may ask for."""
MAX_ROUNDS = 10_000


# --- asks -----------------------------------------------------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag="status"):
    """What does the node do now?"""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """A Status every `interval_s`, until the operator hangs up."""

    interval_s: float = 1.0


class GetPeers(msgspec.Struct, frozen=True, tag="peers"):
    """Whom does the node know, and over which path?"""


class GetRounds(msgspec.Struct, frozen=True, tag="rounds"):
    """The newest `last` rounds, oldest first."""

    last: int = MAX_ROUNDS


class GetLogs(msgspec.Struct, frozen=True, tag="logs"):
    """The newest `tail` lines of the log, then new ones for as long as `follow` holds."""

    tail: int = 50
    follow: bool = False


class StopNode(msgspec.Struct, frozen=True, tag="stop"):
    """End the daemon; with `finish`, after the round at hand is announced."""

    finish: bool = False


class PauseNode(msgspec.Struct, frozen=True, tag="pause"):
    """Finish the round at hand and start no other. Rounds of others are still folded."""

    reason: str = "paused by the operator"


class ResumeNode(msgspec.Struct, frozen=True, tag="resume"):
    """Go on after a pause."""


class EvaluateModel(msgspec.Struct, frozen=True, tag="eval"):
    """Validation loss of the weights as they are now."""


Ask: TypeAlias = (
    GetStatus | Watch | GetPeers | GetRounds | GetLogs | StopNode | PauseNode | ResumeNode | EvaluateModel
)


# --- answers --------------------------------------------------------------------------------------


class RelayUse(msgspec.Struct, frozen=True, kw_only=True):
    """What this node relays for others."""

    circuits: int
    """Open now."""
    circuits_served: int
    bytes_relayed: int
    """Since the start of the daemon."""
    bytes_today: int
    bytes_per_day: int
    """The cap of `bytes_today`."""
    refused: int
    """Circuits that a cap or an absent target refused."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How many experts of each layer a node offers to train."""

    experts: int
    of: int
    free_bytes: int | None = None
    """Of the memory that it was counted from, once, when the node started; null: the user said it."""
    place: str = ""
    """Which memory that is: `memory`, `cuda:0`, …; empty: the user said it."""


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the user's `[limits]` say now, and what the month has used. Null: no limit."""

    up_bytes_s: float | None
    down_bytes_s: float | None
    month_up_bytes: int
    month_down_bytes: int
    month_quota_bytes: int | None
    month_ends: str
    """ISO date on which the next month begins."""
    stopped: str
    """Why large transfers stand still; empty: they do not."""


class TimeShares(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by what the worker did. They add up to the time that they cover."""

    steps_s: float
    """Inner steps that count."""
    wait_s: float
    """Idle: for members who still train, for a quorum, for finality, in a pause."""
    transfer_s: float
    """Idle while payloads were on their way, ours to the first of the others or theirs to us."""
    encode_s: float
    fold_s: float
    """Folding, and checking payloads and other members' states."""
    checkpoint_s: float
    evaluate_s: float
    recompute_s: float
    """Inner steps that were thrown away: by a newer round, or by the end of the worker."""
    start_s: float
    """Loading the worker: its program, model, data and checkpoint."""
    down_s: float
    """There was no worker."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time goes."""

    window_s: float
    """What `window` covers: about the last 10 minutes, or less after the start."""
    window: TimeShares
    total: TimeShares
    """Since the start of the daemon."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """One node now. Unknown numbers are null, never zero."""

    version: str
    """Of the atoll package."""
    pid: int
    uptime_s: float
    peer: str
    name: str
    addresses: tuple[str, ...]
    """Listen multiaddrs without `/p2p/…`; empty until the network is up."""
    run: str
    """Run id, hex."""
    run_name: str
    activity: str
    """`starting`, `syncing`, `training`, `collecting`, … one word for what it does."""
    reason: str
    """Why it does not train; empty while it does."""
    eta_s: float | None
    """Seconds until the activity is expected to end."""
    round: int
    rounds: int
    """Rounds of the whole run."""
    step: int
    """Inner step of the round at hand, of `steps`."""
    steps: int
    final: int
    """Newest final round; -1 before the first."""
    digest: str
    """State digest after the newest round that closed here, hex."""
    contributors: tuple[str, ...]
    """Authors of the newest closed round's set."""
    experts: tuple[int, ...] | None
    """Those that this node trains; null in runs whose members train all."""
    members: int
    """Live leases, our own included."""
    peers: int
    """Live connections."""
    paths: dict[str, int]
    """Connections by path: direct, punched, relayed."""
    train_loss: float | None
    """Nats per token."""
    val_bpb: float | None
    """Validation bits per byte."""
    tokens_per_s: float | None
    payload_bytes: int | None
    """Of our newest contribution."""
    bytes_up: int
    bytes_down: int
    """Totals since the start of the daemon."""
    train_s: float | None
    """From the first inner step to the last."""
    wait_s: float | None
    """Of the newest round of ours."""
    overlap_allowed: int = 0
    """Inner steps that may be taken now before the fold of the round before is in; 0: rounds do not overlap."""
    overlapped: int | None = None
    """Steps that were, and how long the worker then waited for that fold: in the newest round of ours."""
    held_s: float | None = None
    device: str
    worker_pid: int
    worker_restarts: int
    host_restarts: int
    """Times that the network's own process died and came back."""
    trouble: str = ""
    """A fault that waits for the operator, with what to do; empty when all is well."""
    reachability: str = "unknown"
    """`public`, `punchable`, `relay-only`, `unknown`."""
    reachability_why: str = ""
    observed: tuple[str, ...] = ()
    """Where peers see our connections come from."""
    relaying: bool = False
    """This node relays for others."""
    relay: RelayUse | None = None
    limits: LimitUse | None = None
    clock_ahead_s: float | None = None
    """Median of how far peers' clocks are ahead of ours."""
    seeds: dict[str, str] = {}
    """Each seed, and the DHT, with its state."""
    goodput: Goodput | None = None
    room: Room | None = None
    """How many experts this node could train; null in runs whose members train all."""
    shortage: str = ""
    """Why the members together cannot train all experts; empty where they can."""
    tokens: int = 0
    """That this node trained on since the start of the daemon."""
    blob_bytes_up: int = 0
    """Contents of payloads and other files, since the start of the daemon; part of `bytes_up`."""
    blob_bytes_down: int = 0
    web: str = ""
    """Address of the node's web page; empty while there is none."""
    web_trouble: str = ""
    """Why there is none although there should be."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer as this node sees it."""

    peer: str
    path: str
    """`direct`, `punched`, `relayed`; empty while it is not connected."""
    maddr: str
    rtt_s: float | None
    member: bool
    """Holds a live lease on the run."""
    activity: str
    round: int | None
    final: int | None
    tokens_per_s: float | None
    heard_s: float | None
    """Seconds since its lease was last heard."""
    faults: int
    """Times that it broke the protocol."""


class PeerList(msgspec.Struct, frozen=True, tag="peers"):
    """All known peers."""

    peers: tuple[PeerStatus, ...]


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One round as this node saw it. Losses in nats per token, bpb in bits per byte."""

    round: int
    peer: str
    digest: str
    """State digest, hex: of Θ_final once final, of the view at closing before."""
    set: str
    """Digest of the set of contributions, hex."""
    final: bool
    contributors: tuple[str, ...]
    train_loss: float | None
    val_bpb: float | None
    steps: int
    tokens: int
    payload_bytes: int
    bytes_up: int
    bytes_down: int
    blob_bytes_up: int
    blob_payload_up: int
    train_s: float
    """From the first of our inner steps to the last, folds between them included."""
    encode_s: float
    """This and all that follow: shares of the time from the start of this round's training to the next one's."""
    wait_s: float
    transfer_s: float = 0.0
    steps_s: float = 0.0
    fold_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluate_s: float = 0.0
    recompute_s: float = 0.0
    start_s: float = 0.0
    down_s: float = 0.0
    overlap_allowed: int = 0
    """Inner steps that might be taken before the fold of the round before was in (τ of this node)."""
    overlapped: int = 0
    """Those that were."""
    held_s: float = 0.0
    """How long the worker then waited for that fold; a part of `wait_s` and `transfer_s`."""


class RoundList(msgspec.Struct, frozen=True, tag="rounds"):
    """Rows by round, oldest first."""

    rounds: tuple[RoundStatus, ...]


class LogLine(msgspec.Struct, frozen=True):
    """One line of the node's log."""

    time: str
    """UTC, ISO 8601 with milliseconds."""
    level: str
    logger: str
    message: str


class LogLines(msgspec.Struct, frozen=True, tag="logs"):
    """Lines, oldest first."""

    lines: tuple[LogLine, ...]


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """The order was taken; `message` says what happens next."""

    message: str


class EvaluationResult(msgspec.Struct, frozen=True, tag="eval"):
    """Validation loss of the view."""

    round: int
    """Newest closed round in the view; -1 for the genesis weights."""
    val_bpb: float
    val_loss: float
    """Nats per token."""


class CommandRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The request could not be done. `fault` is the error's class name in protocols.errors."""

    fault: str
    message: str
    hint: str


Answer: TypeAlias = Status | PeerList | RoundList | LogLines | CommandDone | EvaluationResult | CommandRefused


class ControlRequest(msgspec.Struct, frozen=True):
    """Operator to daemon."""

    v: int
    ask: Ask


class ControlReply(msgspec.Struct, frozen=True):
    """Daemon to operator."""

    v: int
    answer: Answer
