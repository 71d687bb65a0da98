"""What the driver needs of the network, as an interface that `SwarmNetwork` meets; and what follows from it."""

import math
from pathlib import Path
from typing import Protocol

from atoll.node.daemon.coordinator.expert_assignment import HoldingRegisters
from atoll.node.daemon.coordinator.payload_fetcher import BlobSource
from atoll.p2p.rpc.single_request import RequestHandler
from atoll.protocols.errors import AtollError
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Body, Entry
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.model_spec import atoms
from atoll.protocols.run.moments import file_of
from atoll.protocols.run.run_spec import RunSpec


class Network(BlobSource, HoldingRegisters, Protocol):
    """What the driver needs of the swarm."""

    def publish(self, body: Body) -> Entry:
        """Append to our feed, durably, and spread. The entry also arrives as any other. Raises DiskFault."""

    def entries(self) -> list[Entry]:
        """All entries on disk, each author's in order."""

    def put_lease(self, lease: Lease, ttl_s: float) -> None:
        """Say what we do."""

    def leases(self) -> dict[PeerId, tuple[Lease, float]]:
        """Live leases of others, with their remaining life in seconds."""

    def add_blob(self, path: Path, *, move: bool = False) -> Digest:
        """Take a file into the store; with `move` it may be gone afterwards. Raises DiskFault."""

    def blobs_above(self, size_bytes: int) -> list[Digest]:
        """All whole blobs that are larger."""

    async def is_whole(self, blob: Digest) -> bool:
        """Whether a held blob's bytes still have its hash. Raises DiskFault."""

    def sync_soon(self) -> None:
        """Ask a peer for missing entries now."""

    def blame(self, peer: PeerId, error: AtollError) -> None:
        """What `peer` offered broke the protocol."""

    async def ask_peer(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """An answer on wire `reduction`; empty where the peer lacks it. Raises Unreachable, DecodeError."""

    def answer_by(self, answer: RequestHandler) -> None:
        """Answer the questions of others on wire `reduction`."""

    def bytes_moved(self) -> tuple[int, int, int, int]:
        """Totals since the start: up, down, blobs up as sent, blob contents up."""


def whom_to_ask(first: PeerId, net: BlobSource) -> list[PeerId]:
    """A peer that should have it, then all that are connected."""
    return list(dict.fromkeys((first, *net.neighbours())))


def round_half_s(seconds: float) -> float:
    """To half seconds: the time a lease was heard must not look new at each look."""
    return float(int(seconds * 2.0 + 0.5)) / 2.0


def moments_max_bytes(spec: RunSpec, number: int) -> int:
    """More than this moments file of the run needs: 12 bytes a value and four header entries per atom."""
    mine = [atom for atom in atoms(spec.model) if file_of(spec.model, atom.name) == number]
    return 12 * sum(math.prod(atom.shape) for atom in mine) + 4 * 512 * len(mine) + 4096


def snapshot_max_bytes(spec: RunSpec) -> int:
    """More than any snapshot of this run needs: 4 bytes a value and a header entry per atom."""
    return 4 * spec.model.parameters + 512 * len(atoms(spec.model)) + 4096
