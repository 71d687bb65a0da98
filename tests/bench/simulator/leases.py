"""The leases that one virtual node knows: who is there, what it does, and to whom the connection is lost."""

from typing import TYPE_CHECKING, NamedTuple

from atoll.node.daemon.rounds.participants import MemberView, lost_of
from atoll.node.daemon.rounds.types import LeasesChanged
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.registers import Activity

if TYPE_CHECKING:
    from atoll_bench.simulator.member import Member

SAME_S = 45.0


class VirtualLease(NamedTuple):
    """What a member announces, and when."""

    began: float
    """Virtual second at which it was published."""
    activity: Activity
    round: Round
    has_speed: bool = False
    """Whether the member trained a round since its start, and so announces a speed."""


class Leases:
    """Leases by peer, as registers bring them: the newest one counts, also through others."""

    def __init__(self, member: "Member") -> None:
        self._member = member
        self._world = member.world
        self._lease_s = member.world.setting.lease_s

    def begin(self) -> None:
        """Forget everything: a node starts without leases."""
        self._known: dict[PeerId, VirtualLease] = {}
        self._lost: dict[PeerId, float] = {}
        """Since when no connection to a peer carries anything, in virtual seconds."""
        self._views: dict[PeerId, MemberView] = {}
        self._own = VirtualLease(-1e9, "syncing", Round(0))
        self._changed = set[PeerId]()
        """Whose lease is newer than its view."""
        self._ends = 0.0
        """When the first lease ends, in virtual seconds."""
        self._topology = -1
        self.live: frozenset[PeerId] = frozenset()
        """Peers with a live lease."""
        self.lost: frozenset[PeerId] = frozenset()
        """Those of them to which the connection is lost."""

    def announce(self, activity: Activity, number: Round) -> None:
        """Publish the own lease with this activity."""
        self._own = VirtualLease(self._world.clock.now, activity, number, self._member.worker.has_trained)
        self._publish()

    def _publish(self) -> None:
        self._world.push_lease(self._member, self._own)

    def hear(self, peer: PeerId, lease: VirtualLease) -> None:
        """A lease came."""
        known = self._known.get(peer)
        if known is None or known.began < lease.began:
            self._known[peer] = lease
            self._changed.add(peer)

    def merge(self, other: "Leases") -> None:
        """Take the newer leases of another node, and its own."""
        mine, me = self._known, self._member.peer
        for peer, lease in other._known.items():
            if peer != me:
                before = mine.get(peer)
                if before is None or before.began < lease.began:
                    self.hear(peer, lease)
        self.hear(other._member.peer, other._own)

    def refresh(self) -> None:
        """Tell the round machine if the live leases changed; publish the own one again before it ends."""
        world, member = self._world, self._member
        now, local = world.clock.now, member.now()
        if now - self._own.began > self._lease_s / 3 and self._own.began > 0:
            self._own = self._own._replace(began=now)
            self._publish()
        changed = self._changed
        if world.topology != self._topology or now >= self._ends:
            self._topology = world.topology
            self._known = {peer: lease for peer, lease in self._known.items() if now - lease.began < self._lease_s}
            self._lost = {peer: at for peer, at in self._lost.items() if peer in self._known}
            known = self._known.items()
            changed = {peer for peer, one in known if peer in changed or self._may_differ(peer, one, now)}
        self._changed = set()
        if not changed and len(self._views) == len(self._known):
            return
        self._ends = min([lease.began for lease in self._known.values()], default=now) + self._lease_s
        new = {peer: self._view(peer, self._known[peer], now, local) for peer in sorted(changed)}
        new = {peer: view for peer, view in new.items() if view is not self._views.get(peer)}
        views = self._views | new
        if len(views) != len(self._known):
            views = {peer: view for peer, view in views.items() if peer in self._known}
        if new or len(views) != len(self._views):
            if views.keys() != self._views.keys():
                self.live = frozenset(views)
            self._views = views
            if self.lost or any(view.lost_at is not None for view in new.values()):
                self.lost = lost_of(views)
            if member.removals.has_any:
                gone = member.removals.excluded_from(self._own.round)
                views = {peer: view for peer, view in views.items() if peer not in gone}
            member.post_round(LeasesChanged(views, local))

    def _may_differ(self, peer: PeerId, lease: VirtualLease, now: float) -> bool:
        """Whether the view of an old lease may be another one now: for most peers it is not."""
        if peer in self._lost or not self._world.is_connected(self._member, peer):
            return True
        # Until then clocks of other pace shift it by less than a second, which `_view` passes over.
        return peer not in self._views or now - lease.began > SAME_S

    def _view(self, peer: PeerId, lease: VirtualLease, now: float, local: float) -> MemberView:
        lost = None
        if not self._world.is_connected(self._member, peer):
            lost = self._lost.setdefault(peer, now)
        elif self._lost:
            self._lost.pop(peer, None)
        if lost is not None and lease.began > lost + 1.0:
            lost = None
        before = self._views.get(peer)
        heard = local - (now - lease.began)
        if before is not None and abs(before.heard - heard) < 1.0:
            heard = before.heard  # clocks of other pace must not make it look new
        lost_at = None if lost is None else local - (now - lost)
        if before is not None and lost_at is not None and before.lost_at is not None:
            lost_at = before.lost_at
        if (
            before is not None
            and (lost_at, heard) == (before.lost_at, before.heard)
            and self._is_as(before, lease)
        ):
            return before
        # Dials to a peer that is cut off fail at once, and every member says how long a round takes it.
        return MemberView(
            lease.activity,
            lease.round,
            heard,
            lost_at=lost_at,
            is_unreachable=lost_at is not None,
            tokens_per_s=float(lease.has_speed),
            round_s=self._world.by_peer[peer].worker.train_s,
        )

    def _is_as(self, before: MemberView, lease: VirtualLease) -> bool:
        was = before.round, before.activity, before.tokens_per_s
        return was == (lease.round, lease.activity, float(lease.has_speed))
