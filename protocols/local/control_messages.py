"""Operator <-> daemon: one JSON object a line over the unix socket in the node's home.

    operator                              daemon
    {"v":1,"ask":{"type":"status"}}  ->   {"v":1,"answer":{"type":"status",…}}
    watch, logs with follow          ->   answers until the operator hangs up
    anything that cannot be done     ->   {"v":1,"answer":{"type":"refused",…}}

A connection carries requests one at a time. Fields are only ever added; a reader skips those that it does not
know. `docs/json.md` prints every answer as `--json` shows it.
"""

from typing import TypeAlias

import msgspec

from atoll.protocols.local.privacy_now import PrivacyNow as PrivacyNow
from atoll.protocols.local.progress import RateNow, WorkProgress
from atoll.protocols.local.standing import Exclusion, LedgerUse, Standing, VotesAgainst
from atoll.protocols.local.standing import LimitUse as LimitUse
from atoll.protocols.local.time_spent import Goodput as Goodput
from atoll.protocols.local.time_spent import TimeShares as TimeShares

MAX_LINES = MAX_ROUNDS = 10_000
"""Most log lines, or rounds, that one request may ask for."""
MAX_REASON = 100
"""Longest reason of an exclusion, in characters: as long as its record holds."""

# --- asks -----------------------------------------------------------------------------------------


class GetStatus(msgspec.Struct, frozen=True, tag="status"):
    """Ask for the node's Status once."""


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Ask for a Status again and again, until the operator hangs up."""

    interval_s: float = 1.0
    """Seconds between two answers."""


class GetPeers(msgspec.Struct, frozen=True, tag="peers"):
    """Ask for all peers that the node knows."""


class GetRounds(msgspec.Struct, frozen=True, tag="rounds"):
    """Ask for the newest rounds."""

    last: int = MAX_ROUNDS
    """Number of rounds in the answer, at most."""


class GetLogs(msgspec.Struct, frozen=True, tag="logs"):
    """Ask for lines of the log."""

    tail: int = 50
    """Number of newest lines to begin with."""
    follow: bool = False
    """Whether new lines follow until the operator hangs up."""


class StopNode(msgspec.Struct, frozen=True, tag="stop"):
    """Stop the daemon."""

    finish: bool = False
    """Whether it first finishes and publishes the current round."""


class PauseNode(msgspec.Struct, frozen=True, tag="pause"):
    """Finish the current round and start no other for so many seconds, or until ResumeNode. Others are folded."""

    reason: str = "by the operator"
    for_s: float | None = None


class ResumeNode(msgspec.Struct, frozen=True, tag="resume"):
    """End a pause."""


class SetLimits(msgspec.Struct, frozen=True, tag="limit"):
    """Replace rates of traffic until the node ends: those of its configuration and of the schedule in it."""

    up: str | None = None
    """`20mbit`, `2.5MB/s`; empty: no limit; `off`: no large transfers; null: as configured."""
    down: str | None = None


class GetPageToken(msgspec.Struct, frozen=True, tag="page"):
    """Ask for a token with which one browser on this machine may steer the node by its page."""


class ExcludePeer(msgspec.Struct, frozen=True, tag="exclude"):
    """Exclude a member from the run, on the owner's node; on another one: vote for it."""

    peer: str
    """PeerID, or the end of that of a known peer."""
    first: int | None = None
    """First round without the member; null: the oldest one that is not final."""
    reason: str = ""
    since: int | None = None
    """First final round to take its work out of; null: none."""


class EvaluateModel(msgspec.Struct, frozen=True, tag="eval"):
    """Compute the validation loss of the current weights."""


Ask: TypeAlias = (
    GetStatus
    | Watch
    | GetPeers
    | GetRounds
    | GetLogs
    | StopNode
    | PauseNode
    | ResumeNode
    | SetLimits
    | GetPageToken
    | ExcludePeer
    | EvaluateModel
)


# --- answers --------------------------------------------------------------------------------------


class RelayUse(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic that this node relays for other peers. Totals count from the start of the daemon."""

    circuits: int
    """Number of circuits that are open now."""
    circuits_served: int
    """Number of circuits opened in total."""
    bytes_relayed: int
    """Bytes relayed in total."""
    bytes_today: int
    """Bytes relayed in the current period of 24 hours."""
    bytes_per_day: int
    """Cap of `bytes_today`."""
    refused: int
    """Number of circuits refused because of a cap or an absent target."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Number of experts of each layer that a node offers to train."""

    experts: int
    """Experts of each layer that fit."""
    of: int
    """Experts of each layer in the model."""
    free_bytes: int | None = None
    """Free memory that `experts` was computed from when the node started; null: the user chose the number."""
    place: str = ""
    """Memory that was measured: `memory`, `cuda:0`, …; empty: the user chose the number."""


class SentPerRound(msgspec.Struct, frozen=True, kw_only=True):
    """What one node sends in one round on average, and what one copy of a payload costs."""

    bytes: float
    """Bytes sent in a round, all protocols; each payload goes to several peers."""
    payloads: float
    """The same in sizes of the node's own payload."""
    below_fp32: float
    """Size of the model's fp32 weights over the same."""
    per_copy: float
    """Bytes on the wire of one copy of a payload over its size; records and leases are not part of a copy."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State of one node now. Unknown numbers are null, never zero."""

    version: str
    """Version of the atoll package."""
    pid: int
    """Process id of the daemon."""
    uptime_s: float
    """Seconds since the start of the daemon."""
    peer: str
    """PeerID of this node."""
    name: str
    """What the node announces itself as; empty: nothing."""
    addresses: tuple[str, ...]
    """Listen multiaddrs without `/p2p/…`; empty until the network is up."""
    run: str
    """Run id, hex."""
    run_name: str
    """Name in the RunSpec."""
    activity: str
    """One word: `starting`, `syncing`, `training`, `collecting`, …"""
    reason: str
    """Why the node does not train; empty while it trains."""
    eta_s: float | None
    """Seconds until the activity is expected to end, by what was measured; null: unknown."""
    round: int
    """Number of the current round."""
    rounds: int
    """Number of rounds of the whole run."""
    step: int
    """Inner steps of the current round that are done, of `steps`."""
    steps: int
    """Inner steps of the current round."""
    final: int
    """Newest final round; -1 before the first."""
    digest: str
    """State digest after round `final`, hex; empty before the first."""
    contributors: tuple[str, ...]
    """Authors of the set of round `final`."""
    unsettled: str = ""
    """Whose vote the next round waits for though it is not heard, or which may be decided anew; empty: none."""
    experts: tuple[int, ...] | None
    """Experts that this node trains; null in runs whose members train all."""
    members: int
    """Number of live leases, our own included."""
    peers: int
    """Number of connected peers."""
    paths: dict[str, int]
    """Number of connections by path: direct, punched, relayed."""
    train_loss: float | None
    """Training loss, nats per token."""
    val_bpb: float | None
    """Newest validation, bits per byte."""
    val_round: int | None = None
    """Round whose state it is of."""
    val_by: str = ""
    """PeerID of the evaluator that found it; empty: this node did."""
    roles: tuple[str, ...] = ()
    """What this node does for the run: `train`, `evaluate`, `seed`, `relay`."""
    validated: int = 0
    """Rounds that this node validated since the start of the daemon."""
    tokens_per_s: float | None
    """Training throughput of this node in the round at hand, or in the newest one where none is trained."""
    learning_rate: RateNow | None = None
    """The rate at the round and step above, and where in its schedule that is."""
    payload_bytes: int | None
    """Size of our newest contribution's payload."""
    bytes_up: int
    """Bytes sent since the start of the daemon."""
    bytes_down: int
    """Bytes received since the start of the daemon."""
    sent: SentPerRound | None = None
    """Average over the newest 100 rounds; null before the first payload was sent."""
    train_s: float | None
    """Seconds from the first inner step to the last in our newest round."""
    wait_s: float | None
    """Seconds idle in our newest round."""
    overlap_allowed: int = 0
    """Inner steps that may be taken now before the previous round is folded; 0: rounds do not overlap."""
    overlapped: int | None = None
    """Inner steps of our newest round that were taken before the previous round was folded."""
    held_s: float | None = None
    """Seconds that the worker then waited for that fold."""
    device: str
    """Device that the worker trains on."""
    worker_pid: int
    """Process id of the worker."""
    worker_restarts: int
    """Number of worker restarts since the start of the daemon."""
    host_restarts: int
    """Number of restarts of the network's own process (p2pd)."""
    trouble: str = ""
    """A fault that needs the operator, with what to do; empty when there is none."""
    reachability: str = "unknown"
    """How others may reach this node: `public`, `punchable`, `relay-only`, `unknown`."""
    reachability_why: str = ""
    """Reason of that verdict."""
    observed: tuple[str, ...] = ()
    """Multiaddrs from which peers see our connections come."""
    port_map: dict[str, int] | None = None
    """Router's ports by transport that lead to this node; empty: none; null: the node asks no router."""
    relaying: bool = False
    """Whether this node relays for other peers."""
    relay: RelayUse | None = None
    """Relayed traffic; null while the node does not relay."""
    limits: LimitUse | None = None
    """Traffic limits in force; null before they are known."""
    clock_ahead_s: float | None = None
    """Median of peers' clocks minus our clock, in seconds."""
    seeds: dict[str, str] = {}
    """State of each seed, and of the DHT, as one line."""
    goodput: Goodput | None = None
    """The worker's time by activity."""
    room: Room | None = None
    """Number of experts that this node could train; null in runs whose members train all."""
    shortage: str = ""
    """Why the members together cannot train all experts; empty if they can."""
    tokens: int = 0
    """Tokens that this node trained on since the start of the daemon."""
    blob_bytes_up: int = 0
    """Bytes of blob contents sent since the start of the daemon; a part of `bytes_up`."""
    blob_bytes_down: int = 0
    """Bytes of blob contents received since the start of the daemon; a part of `bytes_down`."""
    web: str = ""
    """Address of the node's web page; empty while there is none."""
    web_trouble: str = ""
    """Why the configured web page is not served; empty otherwise."""
    loggers: dict[str, str] = {}
    """By name: what each logger wrote and lost, and why it does not work, as one line."""
    ledger: LedgerUse | None = None
    """Who is in the ledger; null from an older daemon."""
    excluded: tuple[Exclusion, ...] = ()
    """Members that the run's owner or its voters excluded."""
    votes_against: tuple[VotesAgainst, ...] = ()
    """Members that voters, or this node, voted to exclude, and that are not excluded."""
    standing: Standing | None = None
    """What this node counts for; null from an older daemon."""
    progress: WorkProgress | None = None
    """What keeps the node from training: a phase of the worker's start, a download; null: none is known."""
    diminished: tuple[Standing, ...] = ()
    """Other live members that count less than in full, 64 at most."""
    privacy: PrivacyNow | None = None
    """What our contributions say of our data; null without privacy or training, and before the worker said it."""
    names: dict[str, str] = {}
    """By PeerID: what members that this status mentions announce themselves as. Claims."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer as this node sees it."""

    peer: str
    """PeerID of the peer."""
    path: str
    """How it is connected: `direct`, `punched`, `relayed`; empty while it is not."""
    maddr: str
    """Multiaddr of the connection, else the best known address."""
    rtt_s: float | None
    """Round-trip time in seconds."""
    member: bool
    """Whether it holds a live lease on the run."""
    activity: str
    """Activity in its lease; `left`, `gone` or `two histories` of an author that is no member now, else empty."""
    round: int | None
    """Current round in its lease."""
    final: int | None
    """Newest final round in its lease."""
    tokens_per_s: float | None
    """Training throughput in its lease."""
    heard_s: float | None
    """Seconds since its lease was last received."""
    faults: int
    """Number of protocol violations that this node has seen."""
    excluded_from: int | None = None
    """First round without it, if it is excluded."""
    votes_against: int = 0
    """Votes to exclude it, by the voters of the round that is decided next."""
    standing: Standing | None = None
    """What it counts for; null from an older daemon, and for a peer that is no member."""
    name: str = ""
    """What it announces itself as, in its lease. A claim: others may announce the same."""


class PeerList(msgspec.Struct, frozen=True, tag="peers"):
    """Answer to GetPeers: all known peers."""

    peers: tuple[PeerStatus, ...]


class RoundStatus(TimeShares, kw_only=True):
    """One round as this node saw it. Losses in nats per token, bpb in bits per byte.

    Its shares of time are from the start of this round's training to that of the next one. The daemon's log of
    rounds consists of these.
    """

    round: int
    peer: str
    """PeerID of the node that saw it."""
    digest: str = ""
    """State digest, hex: the certified one once the round is final, before that of the view when it closed."""
    own_digest: str = ""
    """State digest, hex, that this node's worker computed from the final set; empty where a snapshot came."""
    set: str = ""
    """Digest of the set of contributions, hex."""
    final: bool = False
    contributors: tuple[str, ...] = ()
    """Authors of the set."""
    train_loss: float | None = None
    """Training loss of our steps."""
    val_bpb: float | None = None
    """Validation bits per byte."""
    val_by: str = ""
    """PeerID of the evaluator that found it; empty: this node did."""
    steps: int = 0
    """Inner steps that this node took."""
    tokens: int = 0
    """Tokens that this node trained on."""
    payload_bytes: int = 0
    """Size of our payload."""
    bytes_up: int = 0
    """Bytes sent during the round."""
    bytes_down: int = 0
    """Bytes received during the round."""
    blob_bytes_up: int = 0
    """Bytes sent by the blob protocol during the round, frames included."""
    blob_payload_up: int = 0
    """Bytes of blob contents sent during the round."""
    train_s: float = 0.0
    """Seconds from the first inner step to the last, folds between them included."""
    overlap_allowed: int = 0
    """Inner steps that could be taken before the previous round was folded (τ of this node)."""
    overlapped: int = 0
    """Inner steps that were taken before the previous round was folded."""
    held_s: float = 0.0
    """Seconds that the worker then waited for that fold; a part of `wait_s` and `transfer_s`."""
    pulls: int = 0
    """Differences of neighbours that this node mixed in, in a run with gossip."""


class RoundList(msgspec.Struct, frozen=True, tag="rounds"):
    """Answer to GetRounds: one row per round, oldest first."""

    rounds: tuple[RoundStatus, ...]


class LogLine(msgspec.Struct, frozen=True):
    """One line of the node's log."""

    time: str
    """UTC time, ISO 8601 with milliseconds."""
    level: str
    logger: str
    message: str


class LogLines(msgspec.Struct, frozen=True, tag="logs"):
    """Answer to GetLogs: lines of the log, oldest first."""

    lines: tuple[LogLine, ...]


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """Answer to a command that was accepted."""

    message: str
    """What happens next."""


class PageToken(msgspec.Struct, frozen=True, tag="page"):
    """Answer to GetPageToken."""

    token: str
    """It goes into the fragment of the page's address; empty: the page cannot be reached by loopback."""
    lasts_s: float
    """It dies at its first use, and after so many seconds."""


class EvaluationResult(msgspec.Struct, frozen=True, tag="eval"):
    """Answer to EvaluateModel: validation loss of the current weights."""

    round: int
    """Newest closed round in the weights; -1 for the genesis weights."""
    val_bpb: float
    """Validation bits per byte."""
    val_loss: float
    """Validation loss, nats per token."""


class CommandRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Answer to a request that failed."""

    fault: str
    """Class name of the error in protocols/errors.py."""
    message: str
    hint: str
    """What the user does next; may be empty."""


Answer: TypeAlias = (
    Status | PeerList | RoundList | LogLines | CommandDone | PageToken | EvaluationResult | CommandRefused
)


class ControlRequest(msgspec.Struct, frozen=True):
    """One line from the operator to the daemon."""

    v: int
    """Version of the control protocol."""
    ask: Ask


class ControlReply(msgspec.Struct, frozen=True):
    """One line from the daemon to the operator."""

    v: int
    """Version of the control protocol."""
    answer: Answer
