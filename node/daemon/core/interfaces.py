"""What the coordinator needs of the swarm, of the worker and of reduced rounds, as small interfaces."""

from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.experts.expert_assignment import HoldingRegisters
from atoll.node.daemon.member_standing import MemberStandings
from atoll.node.daemon.rounds.state import RoundState
from atoll.node.daemon.telemetry.round_log import RoundLog, TrafficTotals
from atoll.p2p.rpc.single_request import RequestHandler
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import AtollError
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Body, Entry
from atoll.protocols.ledger.registers import Claim, ClaimKind, Lease
from atoll.protocols.local.standing import Exclusion, VotesAgainst
from atoll.protocols.local.worker_messages import Ask, Counted, EvaluateReply, Member, Slice, TrainProgress
from atoll.protocols.run.run_spec import RunSpec

A = TypeVar("A")
RequestOf: TypeAlias = Callable[[tuple[Member, ...], tuple[Slice, ...]], Ask]
"""Makes a worker request from whole payloads (members) or from slices; one of the two is empty."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every part of the coordinator knows about its run."""

    spec: RunSpec
    me: PeerId
    log: RoundLog
    now: Callable[[], float]
    """Monotonic seconds."""
    devices: int = 1
    """Devices that share each of this node's steps."""
    kept: set[Digest] = field(default_factory=set)
    """Blobs that no part deletes: files that travel with the run."""
    name: str = ""
    """What the node announces itself as; empty: nothing."""

    def __post_init__(self) -> None:
        self.kept.update(self.spec.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What the node's status shows of the driver and its parts."""

    round: RoundState
    applied: int
    """The newest round in the worker's Θ_final."""
    experts: tuple[int, ...] | None
    """Experts that are trained here; None where all members train all."""
    progress: TrainProgress | None
    waiting: str
    """What a round that has begun waits for before its first step."""
    trouble: str
    """Why this node is excluded from the run, what the disk refused, or that work on a round is lost."""
    excluded: tuple[Exclusion, ...]
    votes_against: tuple[VotesAgainst, ...]
    """Members that some voters, or this node, voted to exclude."""
    validated: int
    """Rounds that this node validated since its start."""
    missing: str
    """Whose votes are missing, and what happens next; empty: nobody's."""
    frozen: str
    """For how long no round became final, or nothing moved, if that is far longer than usual; else empty."""
    still_s: float
    """Seconds since a step, a round or the phase changed."""
    standings: MemberStandings
    left: Set[PeerId]
    """Who left in good order and still has a lease."""
    is_worker_ready: bool
    uses: int | None
    """Most steps of this node that used one sequence of its data, in a run with privacy; None: not known yet."""
    records_from: int
    """The first round whose records the ledger holds; 0: all are here."""


class RoundAssets(Protocol):
    """Files that a round needs beside the model."""

    async def prepare(self, turn: Turn, experts: Iterable[int], report: Callable[[str], None]) -> bool:
        """Return when a member's turn can begin; whether it had to wait."""


class NodeControl(Protocol):
    """What the node's user can see and do; `Driver` implements it."""

    def view(self) -> NodeView:
        """Return what the node does now."""

    def pause(self, reason: str, for_s: float | None = None) -> None:
        """Finish the round at hand and rest, for so many seconds or until `resume`."""

    def resume(self) -> None:
        """Go on after a pause. Raises ConfigError if this node is excluded from the run."""

    def exclude(self, peer: PeerId, first: Round | None, reason: str, since: Round | None = None) -> str:
        """Exclude a member from a round on; None: the oldest that is not final. Raises ConfigError, LocalFault.

        `since`: also take its work out of the final rounds from this one on; None: out of none.
        """

    async def evaluate(self) -> EvaluateReply:
        """Return the validation loss of the view. Raises WorkerDied."""


class BlobSource(Protocol):
    """Blobs on disk, and peers that may have others."""

    def has_blob(self, blob: Digest) -> bool:
        """Return whether the blob is complete and on disk."""

    def blob_path(self, blob: Digest) -> Path:
        """Return the path of a blob that is on disk."""

    def delete_blob(self, blob: Digest) -> None:
        """Delete a blob. Raises DiskFault."""

    def neighbours(self) -> list[PeerId]:
        """Return the connected peers."""

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        """Download and verify a blob. Raises Unreachable, PeerFault or DiskFault."""


class BlobShelf(BlobSource, Protocol):
    """A `BlobSource` that also stores files of this node."""

    async def take_pushed(self, blob: Digest, max_bytes: int) -> Path | None:
        """Store a blob that a neighbour pushed; None if none did. Raises DecodeError, DiskFault."""

    def add_blob(self, path: Path, *, move: bool = False, is_synced: bool = False) -> Digest:
        """Store a file as a blob; with `move` it may be gone afterwards. See BlobStore. Raises DiskFault."""

    def blobs_above(self, size_bytes: int) -> list[Digest]:
        """Return all complete blobs that are larger than `size_bytes`."""

    async def is_whole(self, blob: Digest) -> bool:
        """Return whether the bytes of a blob on disk still have its hash. Raises DiskFault."""


class LeaseRegisters(Protocol):
    """The registers in which members announce their activity, and evaluators what they found."""

    def put_claim(self, claim: Claim, ttl_s: float) -> None:
        """Announce what this node found, or would have found."""

    def claims(self, kind: type[ClaimKind]) -> dict[PeerId, ClaimKind]:
        """Return the live ones of others."""

    def put_lease(self, lease: Lease, ttl_s: float) -> None:
        """Announce the activity of this node."""

    def leases(self) -> dict[PeerId, tuple[Lease, float]]:
        """Return the live leases of others with their remaining life in seconds."""

    def is_tried(self, peer: PeerId) -> bool:
        """Return whether the peer has shown work; true of all before the first round is final."""

    def block_of(self, peer: PeerId) -> str:
        """Return the address block of a connected peer."""

    def is_unreachable(self, peer: PeerId) -> bool:
        """Return whether a dial to the peer failed since the connection was lost."""

    def neighbours(self) -> Collection[PeerId]:
        """Return the peers to which this node is connected."""


class Feed(Protocol):
    """This node's own feed and the ledger."""

    def publish(self, body: Body) -> Entry:
        """Append to the own feed, durably, and spread. The entry also arrives as any other. Raises DiskFault."""

    def entries(self) -> list[Entry]:
        """Return all entries on disk, each author's in order."""

    def sync_soon(self) -> None:
        """Ask a peer for missing entries now."""

    def orphans(self) -> list[Entry]:
        """Return the entries of equivocators that no feed on disk holds, in the order in which they came."""

    def equivocators(self) -> frozenset[PeerId]:
        """Return the authors that are proven to have signed two histories."""

    def fetch_orphans(self, number: Round, *names: tuple[Digest, ...], covered: bool = False) -> None:
        """Want entries of a round, and votes for proposals, instead of others of it; see OrphanExchange.want."""


class NewcomerBudget(Protocol):
    """Authors that the ledger may let go, and those that it may not (p2p/ledger/newcomers.py)."""

    def accept(self, authors: Iterable[PeerId], *, by_work: bool = True) -> None:
        """Keep authors for ever: of the newest final set, or (not `by_work`) of an epoch or the RunSpec."""

    def keep(self, authors: Iterable[PeerId]) -> None:
        """Keep these authors until the next round is final: a proposal names them."""

    def vouch(self, author: PeerId) -> str:
        """A payload of this author was verified. Return which address block brought it; empty if it is old."""

    def require(self, entries: Iterable[Digest], proposer: PeerId | None) -> None:
        """Ask for entries that a proposer names and that are not here. None: a quorum voted for their set."""

    def end_replay(self) -> None:
        """All entries on disk were replayed, and those that the first exchange brought. Raises DiskFault."""

    def bringer(self, author: PeerId) -> PeerId | None:
        """Return the neighbour that brought an author without work while many do so; else None."""

    def is_accepted(self, author: PeerId) -> bool:
        """Return whether a final set, an epoch or the RunSpec names an author."""


class Network(BlobShelf, HoldingRegisters, LeaseRegisters, Feed, NewcomerBudget, Protocol):
    """The whole swarm as the coordinator sees it; `SwarmNetwork` implements it."""

    def blame(self, peer: PeerId, error: AtollError) -> None:
        """Count a protocol fault of a peer."""

    async def ask_peer(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """Return an answer on wire `reduction`; empty if the peer has none. Raises Unreachable, DecodeError."""

    def exclude(self, peer: PeerId, reason: str) -> None:
        """Fetch nothing of a peer and serve it nothing from now on; it is told the reason."""

    def refusal(self) -> str:
        """Return why no connected peer stores what this node writes; empty if one does, or none refuses it.

        Empty for a member that final sets name and that is not excluded.
        """

    def down_s(self, within_s: float) -> float:
        """Return for how long it was down before it began within these seconds, or silent; infinite: not known."""

    def must_compare(self) -> bool:
        """Return whether the own lease ended since ledgers were compared, and ask for it: it decides later."""

    def fetched_bytes(self, blob: Digest) -> int:
        """Return how many bytes of a blob that is being fetched are on disk."""

    def answer_by(self, answer: RequestHandler) -> None:
        """Register the function that answers questions on wire `reduction`."""

    def bytes_moved(self) -> TrafficTotals:
        """Return the traffic totals."""


class SwarmListener(Protocol):
    """Receives the swarm's news; `Driver` implements it."""

    def on_entry(self, entry: Entry) -> None:
        """An entry, ours included, is in the ledger."""

    def on_pruned(self, author: PeerId) -> None:
        """The feed of an author that showed no work had to go."""

    def on_orphans(self, entries: tuple[Entry, ...]) -> None:
        """Entries that were asked for by name are here."""

    def on_leases(self) -> None:
        """A register changed, perhaps a lease."""

    def on_synced(self) -> None:
        """The ledger was compared with a peer's, or there is nobody to ask."""

    def on_behind(self, reason: str) -> None:
        """The node cannot train yet, for this reason; empty: that one is over, and no other is known."""

    def on_alone(self, after_s: float) -> None:
        """No peer answered for so many seconds, so the node goes on alone."""


class WorkerProcess(Protocol):
    """The process that trains and folds; `Trainer` implements it."""

    @property
    def start_moves(self) -> int:
        """Signs of progress of its starts, which only grow; 0: it was not asked to start yet."""

    async def ask(self, ask: Ask, kind: type[A]) -> A:
        """Return the worker's reply. Raises WorkerDied, or the fault that the worker named."""


class SlicedSet(Protocol):
    """One set of contributions and Reductions that is folded slice by slice."""

    def is_available(self) -> bool:
        """Return whether everything that the set needs is on disk."""

    def fetch(self) -> None:
        """Start fetching whatever is missing."""

    def counted(self) -> tuple[Counted, ...] | None:
        """Return what of this node counts in the set; None if a Reduction covers what the ledger lacks."""

    async def ask(self, request_of: RequestOf, kind: type[A]) -> A:
        """Ask the worker for work on the set once all of it is here. Raises WorkerDied, Superseded."""


class SlicedSets(Protocol):
    """What `ContributionSets` needs of reduced rounds. The bodies are those of a run without any."""

    def find(self, number: Round, names: tuple[Digest, ...]) -> SlicedSet | None:
        """Return the set if it is folded slice by slice here; None if whole payloads give the same bits."""
        return None

    def forget(self, final: Round) -> None:
        """Stop fetching what is missing of rounds up to `final`."""
        return

    def payloads(self, first: Round) -> set[Digest]:
        """Return the blobs of Reductions and fault proofs from round `first` on."""
        return set()

    def forget_payloads(self, before: Round) -> set[Digest]:
        """Forget the rounds before `before`, which newer snapshots cover. Returns their blobs."""
        return set()


class RoundReducer(Protocol):
    """This node's part in reduced rounds, as the driver sees it. The bodies are those of a run without any."""

    def is_reduced(self, number: int) -> bool:
        """Return whether reducers are known for a round, so that nobody reads its payloads as a whole."""
        return False

    def add_entry(self, entry: Entry, *, is_orphan: bool = False) -> None:
        """Record a lawful entry of the ledger; an orphan stands in no feed here, but a set may name it."""
        return

    def close_round(self, number: Round) -> None:
        """The round machine closed a reduced round: find out what counts in it."""
        return

    def set_final(self, number: Round, names: tuple[Digest, ...]) -> None:
        """The final set of a round is known; it decides the reducers of a later round."""
        return

    def exclude(self, author: PeerId, first: Round) -> None:
        """Another author is excluded from a round on."""
        return

    def forget_author(self, author: PeerId) -> None:
        """The ledger let go of an author, and finality forgot it."""
        return

    def history(self) -> ReducerHistory | None:
        """Return what the sets that are final say about later reducers; None where this node does not know it."""
        return None

    def resume(self, history: ReducerHistory) -> None:
        """Go on after a summary, before the first entry."""
        return

    def step(self) -> None:
        """Perform what is due at this time."""
        return


class NoReduction(SlicedSets, RoundReducer):
    """Both, for a run whose rounds are never reduced."""
