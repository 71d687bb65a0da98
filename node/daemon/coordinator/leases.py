"""Reads the members' leases for the round machine, and publishes this node's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from atoll.node.daemon.core.interfaces import LeaseRegisters, RunContext
from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.node.daemon.rounds.participants import MemberView, rounded_s, shown_activity, without_newer_leases
from atoll.node.daemon.rounds.trials import Trials
from atoll.node.daemon.rounds.types import LeasesChanged
from atoll.node.daemon.snapshots.offers import SnapshotOffer
from atoll.node.daemon.steps.arrival import expected_seconds
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.registers import Activity, Lease


@dataclass(slots=True, kw_only=True)
class MemberLeases:
    """The live members, as this node knows them, and what this node announces about itself."""

    context: RunContext
    net: LeaseRegisters
    assignment: ExpertAssignment
    feed_round: Callable[[LeasesChanged], None]
    offer: Callable[[], SnapshotOffer | None]
    """This, `applied`, `tokens_per_s`, `loss` and `round_s` return what else the own lease holds."""
    applied: Callable[[], Round]
    tokens_per_s: Callable[[], float]
    loss: Callable[[], float]
    round_s: Callable[[], float]
    is_excluded: Callable[[PeerId, int], bool]
    refused: Callable[[], str]
    trials: Trials  # chooses whom this node waits for of those that have shown no work
    members: dict[PeerId, MemberView] = field(default_factory=dict)
    read_at: float = -1e9  # monotonic seconds of the last `refresh`
    _connected: set[PeerId] = field(default_factory=set)  # neighbours at the last `refresh`
    _lost_at: dict[PeerId, float] = field(default_factory=dict)
    left_at: dict[PeerId, float] = field(default_factory=dict)
    """When a member left, as read here: no lease began since but one with which it serves the others."""
    _shortage: str = ""
    _activity: Activity = "syncing"
    _announced: Activity = "syncing"
    _round: Round = field(default=Round(0))
    _published_at: float = -1e9
    _offered: SnapshotOffer | None = None  # what the newest lease offers

    def refresh(self) -> None:
        """Read all leases; tell the round machine if they changed."""
        self.read_at = self.context.now()
        began_s = self.read_at - self.context.spec.pace.lease_s
        leases = {p: at for p, at in self.net.leases().items() if not self.is_excluded(p, self._round)}
        # Who says that it only observes, or leaves, is never waited for, and takes nobody's place in a trial.
        fresh = {peer: lease for peer, (lease, _) in leases.items() if not self.net.is_tried(peer)}
        untried = {peer: lease for peer, lease in fresh.items() if lease.activity not in ("observing", "leaving")}
        near = self.net.neighbours() if untried else ()
        awaited = self.trials.choose(untried, len(leases) - len(untried), near, self._round)
        took_s = expected_seconds(self.context.spec, {peer: one for peer, (one, _) in leases.items()}, untried)
        members = {
            peer: MemberView(
                lease.activity,
                lease.round,
                rounded_s(began_s + left_s),
                lease.tokens_per_s,
                round_s=took_s[peer],
                untried=peer in untried,
            )
            for peer, (lease, left_s) in leases.items()
            if peer not in untried or peer in awaited
        }
        members = self._with_losses(self._without_leavers(members))
        shortage = self.assignment.shortage(members)
        if members != self.members or shortage != self._shortage:
            self.members, self._shortage = members, shortage
            self.feed_round(LeasesChanged(members, self.context.now(), shortage))

    def on_entry(self, author: PeerId, *, is_leave: bool) -> None:
        """No round waits for the lease of an author whose newest entry is a Leave."""
        if is_leave:
            self.left_at[author] = self.context.now()
            self.refresh()
        else:
            self.left_at.pop(author, None)

    def _without_leavers(self, members: Mapping[PeerId, MemberView]) -> dict[PeerId, MemberView]:
        leaving = {peer: view.heard for peer, view in members.items() if view.activity == "leaving"}
        self.left_at = leaving | without_newer_leases(self.left_at, members)
        return {peer: view for peer, view in members.items() if peer not in self.left_at}

    def _with_losses(self, members: Mapping[PeerId, MemberView]) -> dict[PeerId, MemberView]:
        """The members, each with the time at which its connection was lost."""
        connected = set(self.net.neighbours())
        self._lost_at |= dict.fromkeys(members.keys() & self._connected - connected, self.read_at)
        self._connected = connected
        # A lease that began since came through others: the member lives, and only this connection is lost.
        lost_at = without_newer_leases(self._lost_at, members)
        self._lost_at = {peer: at for peer, at in lost_at.items() if peer not in connected}
        gone = {peer for peer in self._lost_at if self.net.is_unreachable(peer)}
        return {
            peer: replace(view, lost_at=self._lost_at.get(peer), is_unreachable=peer in gone)
            for peer, view in members.items()
        }

    def announce(self, activity: Activity, number: Round) -> None:
        """Publish the own lease with this activity."""
        self._activity, self._round = activity, number
        self.publish()

    def leave(self) -> None:
        """The lease says from its next publication on that this node only serves what the others lack."""
        self._activity = "leaving"

    def publish_if_due(self, *, can_vote: bool = True) -> None:
        """Publish the own lease before it ends, unless this node can vote for nothing; at once if it changed."""
        is_due = self.context.now() - self._published_at > self.context.spec.pace.lease_s / 3
        # From the lease of a node that trains others read when it began the round, so that one waits.
        shown = shown_activity(self._activity, self.refused())
        is_new = shown != self._announced if self._activity == "training" else self.offer() != self._offered
        if is_new or (is_due and can_vote):
            self.publish()

    def publish(self) -> None:
        """Publish the own lease, and the experts that this node trains."""
        offer = self._offered = self.offer()
        self._published_at, self._announced = self.context.now(), shown_activity(self._activity, self.refused())
        lease = Lease(
            activity=self._announced,
            round=self._round,
            final=Round(max(-1, self.applied())),
            snapshot=offer.blob if offer else b"",
            snapshot_round=offer.round if offer else Round(-1),
            tokens_per_s=self.tokens_per_s(),
            loss=self.loss(),
            round_s=self.round_s(),
            name=self.context.name,
        )
        self.net.put_lease(lease, self.context.spec.pace.lease_s)
        self.assignment.publish()
