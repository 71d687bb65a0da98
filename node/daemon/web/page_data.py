"""What the page shows beside status, peers and rounds: structs of `/v1/data.json` and `/v1/invite.json`."""

from typing import Literal

import msgspec

from atoll.protocols.local.control_messages import LogLine, PeerStatus, RoundStatus, Status


class RoundWork(msgspec.Struct, frozen=True, kw_only=True):
    """Contributions to one round that the ledger of this node has, folded or not. The lists are parallel."""

    round: int
    peers: tuple[str, ...]
    """PeerIDs of the authors."""
    loss: tuple[float, ...]
    """Mean training loss that each author claims, nats per token."""
    tokens: tuple[int, ...]
    """Tokens that each author claims to have trained on."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Some rounds that follow each other, as one point of the page's curves."""

    round: int
    """The newest of them."""
    tokens: int
    """Tokens that this node trained on up to its end, in the rounds of its log."""
    train_loss: float | None
    """Mean of this node's training losses, nats per token."""
    val_bpb: float | None
    """The newest validation, bits per byte."""


class ResourceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What this node takes of its machine. Null: the system does not tell."""

    daemon_cores: float | None
    """Cores that the daemon used since the reading before; null at the first one."""
    daemon_bytes: int | None
    """Resident memory of the daemon."""
    worker_cores: float | None
    """Cores that the worker used; null while there is none."""
    worker_bytes: int | None
    """Resident memory of the worker."""
    cores: int
    """Cores of the machine."""
    memory_free_bytes: int
    """Memory of the machine that is available without swapping."""
    memory_bytes: int
    """Memory of the machine."""
    disk_free_bytes: int | None
    """Free space on the disk of the home."""
    disk_bytes: int | None
    """Size of that disk."""


class RunPace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast this node passes through the run."""

    round_s: float | None
    """Seconds from the start of one round to that of the next (`pace_s`); null before two rounds of its own."""
    left_s: float | None
    """Seconds to the end of the run at that pace; null while the node does not train."""
    still_s: float
    """Seconds since round, step, final round or activity changed."""


class Alarm(msgspec.Struct, frozen=True):
    """Something that a user should see at once."""

    level: Literal["bad", "warn"]
    word: str
    """`trouble` or `alone`."""
    text: str


class SampleText(msgspec.Struct, frozen=True, kw_only=True):
    """The newest text that the model of the run wrote on this node."""

    round: int | None = None
    """The final round whose weights wrote it; -1: those that the run began with. Null before the first text."""
    unix_s: float | None = None
    text: str = ""
    """At most 500 characters, printable but for line ends."""
    why: str = ""
    """Why there is none, or none that is newer; empty where nothing stood in the way."""


class LogNews(msgspec.Struct, frozen=True):
    """Lines of the node's log, oldest first."""

    next: int
    """Value of `log` for the next request."""
    lines: tuple[LogLine, ...]


class PageEvent(msgspec.Struct, frozen=True):
    """A line of the node's journal."""

    unix_s: float
    event: str
    text: str
    """Its facts, `name=value` with blanks between them."""


class EventNews(msgspec.Struct, frozen=True):
    """Events of the node, oldest first."""

    next: int
    """Value of `event` for the next request."""
    lines: tuple[PageEvent, ...]


class DashboardData(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/data.json`. Later versions only add fields."""

    v: int = 1
    status: Status
    peers: tuple[PeerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    """The requested rounds, oldest first, at most the newest ROUNDS_MAX."""
    next: int
    """Value of `since` for the next request: older rounds change only by rare corrections of their times."""
    older: tuple[CurvePoint, ...] | None
    """Rounds before the first of `rounds`, thinned out; null where not all rounds were asked for."""
    work: tuple[RoundWork, ...]
    """Contributions to the newest of `rounds`, at most WORK_ROUNDS."""
    pace: RunPace
    alarms: tuple[Alarm, ...]
    """The worst first."""
    resources: ResourceUse
    sample: SampleText
    """Like `log` and `events`, empty where the page is not served on loopback."""
    log: LogNews
    events: EventNews


class InviteView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/v1/invite.json`: a link that others join with, or why there is none."""

    link: str = ""
    qr: tuple[str, ...] = ()
    """Rows of the link's QR code with its quiet zone, `1` for a dark module."""
    why: str = ""
