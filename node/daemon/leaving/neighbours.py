"""A leaving node's neighbours: which of them stay, what they have, and how they get this node's ledger."""

from collections.abc import Collection
from dataclasses import dataclass

from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Leave
from atoll.protocols.ledger.registers import Lease


@dataclass(frozen=True, slots=True)
class SwarmNeighbours:
    """Implements `Neighbours` (hand_over.py) after the driver has ended."""

    swarm: Swarm
    net: SwarmNetwork

    def staying(self, without: Collection[PeerId]) -> dict[PeerId, Lease]:
        """Leases of the neighbours that did not leave: `without` did, and others since the driver ended."""
        left = dict.fromkeys(without, True)
        for _, entry in self.swarm.ledger.since(self.net.read_to):
            left[entry.author] = isinstance(entry.body, Leave)
        connected = set(self.neighbours())
        leases = {peer: lease for peer, (lease, _) in self.net.leases().items() if peer in connected}
        # A seeder that leaves says it by its lease alone. A member that waits for long says it there too, since a
        # lease that is newer than its Leave would count as a return.
        staying = (peer for peer, lease in leases.items() if not left.get(peer) and lease.activity != "leaving")
        return {peer: leases[peer] for peer in staying}

    def neighbours(self) -> list[PeerId]:
        """Return the connected peers."""
        return self.swarm.neighbours()

    async def tell(self, peer: PeerId) -> bool:
        """See Swarm.tell."""
        return await self.swarm.tell(peer)

    async def offers_whole(self, peer: PeerId, blob: Digest) -> bool:
        """Whether a neighbour offers all of a blob that is here; False where it does not answer lawfully."""
        try:
            return await self.swarm.blobs.offers_whole(peer, blob)
        except PeerFault as fault:
            self.swarm.blame(peer, fault)
        except (Unreachable, LocalFault):
            return False  # asked again while this node waits
        return False

    def blob_bytes_up(self) -> int:
        """Return the bytes of blobs that were served since the start."""
        return self.swarm.blobs.statistics().bytes_up
