"""Reads the members' leases for the round machine, and publishes this node's own."""

from collections.abc import Callable

from atoll.node.daemon.coordinator.expert_assignment import ExpertAssignment
from atoll.node.daemon.coordinator.finalizer import SnapshotOffer
from atoll.node.daemon.coordinator.interfaces import LeaseRegisters, RunContext
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.types import LeasesChanged
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.registers import Activity, Lease


class MemberLeases:
    """The live members, as this node knows them, and what this node announces about itself."""

    def __init__(
        self,
        context: RunContext,
        net: LeaseRegisters,
        *,
        assignment: ExpertAssignment,
        feed_round: Callable[[LeasesChanged], None],
        offer: Callable[[], SnapshotOffer | None],
        applied: Callable[[], Round],
        tokens_per_s: Callable[[], float],
    ) -> None:
        """`offer`, `applied` and `tokens_per_s` return what the own lease says besides the activity."""
        self._context = context
        self._net = net
        self._assignment = assignment
        self._feed_round = feed_round
        self._offer = offer
        self._applied = applied
        self._tokens_per_s = tokens_per_s
        self.members: dict[PeerId, MemberView] = {}
        self._shortage = ""
        self._activity: Activity = "syncing"
        self._round = Round(0)
        self._published_at = -1e9
        self.read_at = -1e9
        """Monotonic seconds of the last `refresh`."""

    def refresh(self) -> None:
        """Read all leases; tell the round machine if they changed."""
        self.read_at = self._context.now()
        began_s = self.read_at - self._context.spec.pace.lease_s
        members = {
            peer: MemberView(lease.activity, lease.round, _rounded_s(began_s + left_s), lease.tokens_per_s)
            for peer, (lease, left_s) in self._net.leases().items()
        }
        shortage = self._assignment.shortage(members)
        if members != self.members or shortage != self._shortage:
            self.members = members
            self._shortage = shortage
            self._feed_round(LeasesChanged(members, self._context.now(), shortage))

    def announce(self, activity: Activity, number: Round) -> None:
        """Publish the own lease with this activity."""
        self._activity = activity
        self._round = number
        self.publish()

    def publish_if_due(self) -> None:
        """Publish the own lease again before it ends."""
        if self._context.now() - self._published_at > self._context.spec.pace.lease_s / 3:
            self.publish()

    def publish(self) -> None:
        """Publish the own lease, and the experts that this node trains."""
        offer = self._offer()
        self._published_at = self._context.now()
        lease = Lease(
            activity=self._activity,
            round=self._round,
            final=Round(max(-1, self._applied())),
            snapshot=offer.blob if offer else b"",
            snapshot_round=offer.round if offer else Round(-1),
            tokens_per_s=self._tokens_per_s(),
        )
        self._net.put_lease(lease, self._context.spec.pace.lease_s)
        self._assignment.publish()


def _rounded_s(seconds: float) -> float:
    """Round to half seconds: the time at which a lease began must not look new at each reading."""
    return float(int(seconds * 2.0 + 0.5)) / 2.0
