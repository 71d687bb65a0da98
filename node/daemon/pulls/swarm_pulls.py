"""Pulls over the swarm: connects them to a driver, and questions to the wire."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.pulls.neighbour_pulls import NeighbourPulls
from atoll.p2p.host.interface import Host
from atoll.p2p.rpc.single_request import SingleRequests
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.errors import PeerFault
from atoll.protocols.ids import PeerId
from atoll.protocols.local.worker_messages import TrainProgress
from atoll.protocols.pulls.question import QUESTION_MAX_BYTES
from atoll.protocols.wires import PULL

OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True, slots=True)
class SwarmPulls:
    """Questions over one swarm; implements `PullWire`."""

    swarm: Swarm
    requests: SingleRequests

    async def ask(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """Ask a peer, dialling it if it is not connected."""
        await self.swarm.connect(peer)
        return await self.requests.ask(peer, question, max_bytes)

    def blame(self, peer: PeerId, error: PeerFault) -> None:
        """See Swarm.blame."""
        self.swarm.blame(peer, error)


def begin_pulls(driver: Driver, swarm: Swarm, host: Host, folder: Path) -> OnProgress:
    """Return what is to learn of each step: the driver, and in a run with gossip the pulls, which answer from now.

    Raises DiskFault.
    """
    context = driver.context
    gossip = context.spec.outer.gossip
    if not gossip:
        return driver.on_progress
    requests = SingleRequests(host, PULL.protocol(), QUESTION_MAX_BYTES)
    pulls = NeighbourPulls(
        spec=context.spec,
        gossip=gossip,
        me=context.me,
        log=context.log,
        neighbours=SwarmPulls(swarm, requests),
        worker=driver.worker,
        voters=lambda: driver.finality.voters,
        is_excluded=driver.removals.is_excluded,
        start_task=driver.queue.start_task,
        folder=folder,
    )
    requests.set_handler(pulls.answer)

    def on_progress(progress: TrainProgress) -> None:
        driver.on_progress(progress)
        pulls.on_progress(progress)

    return on_progress
