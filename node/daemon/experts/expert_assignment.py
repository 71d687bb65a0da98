"""Which experts of a mixture this node trains, and what it announces about them.

The assignment is a function of the members' announcements; its rule is in protocols/ledger/ownership.py.
"""

from collections.abc import Mapping
from typing import Protocol

from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ownership import Announced, assigned, nothing, shortage, splits
from atoll.protocols.ledger.registers import Holding
from atoll.protocols.run.experts import ALL, bitmap_of, check_bitmap, experts_in
from atoll.protocols.run.run_spec import RunSpec


class HoldingRegisters(Protocol):
    """The registers in which members announce the experts that they train."""

    def put_holding(self, holding: Holding, ttl_s: float) -> None:
        """Announce the experts that this node trains."""

    def holdings(self) -> dict[PeerId, Holding]:
        """Return the live announcements of other members."""


def announced(spec: RunSpec, holding: Holding | None) -> Announced:
    """Return what a register announces; without a legal one: room for all experts, and none trained."""
    count = splits(spec)
    try:
        check_bitmap(holding.experts if holding else ALL, count)
    except DecodeError:
        holding = None
    if holding is None:
        return Announced(frozenset(), count)
    return Announced(experts_in(holding.experts, count), min(count, holding.room))


class ExpertAssignment:
    """The experts that this node trains, announced to the others. Does nothing where all members train all."""

    def __init__(self, spec: RunSpec, me: PeerId, net: HoldingRegisters, room: int | None) -> None:
        """`room`: experts of each layer that this node may train; None: any number."""
        self._spec = spec
        self._me = me
        self._net = net
        self._count = splits(spec)
        self._room = self._count if room is None else min(room, self._count)
        self.experts = nothing(spec)
        """Bitmap of the experts that this node trains."""
        self.offered_moments: tuple[tuple[int, Digest], ...] = ()
        """Expert and blob of the moments that this node gave up (moment_transfer.py)."""

    @property
    def trained(self) -> tuple[int, ...] | None:
        """The experts that are trained here, rising; None where all members train all."""
        return tuple(sorted(experts_in(self.experts, self._count))) if self._count else None

    def publish(self, experts: bytes | None = None) -> None:
        """Announce what this node trains; `experts`: from now on this bitmap."""
        self.experts = self.experts if experts is None else experts
        if self._count:
            holding = Holding(self.experts, self._room, self.offered_moments)
            self._net.put_holding(holding, self._spec.pace.lease_s)

    def assign(self, members: Mapping[PeerId, MemberView]) -> bytes:
        """Return the bitmap of experts to train in the next round beside these members, and announce it."""
        if self._count:
            everyone = self._announcements(members)
            sliced = bool(self._spec.model.ffn_slices)
            found = assigned(self._spec.id, self._count, self._spec.outer.holders, everyone, cover_first=sliced)
            self.publish(bitmap_of(found[self._me], self._count))
        return self.experts

    def shortage(self, members: Mapping[PeerId, MemberView]) -> str:
        """Return one line if the training members and this node have no room for all experts, else nothing."""
        if not self._count:
            return ""
        holdings = self._net.holdings()
        rooms = [holdings[peer].room if peer in holdings else self._count for peer in _training(members)]
        # One holder each will do: `outer.holders` is how many may train one where there is room. So a member with
        # little room, or a stranger that says so, never keeps a run from beginning that would begin without it.
        return shortage(self._count, 1, [self._room, *rooms])

    def _announcements(self, members: Mapping[PeerId, MemberView]) -> dict[PeerId, Announced]:
        holdings = self._net.holdings()
        views = {peer: announced(self._spec, holdings.get(peer)) for peer in _training(members)}
        return {**views, self._me: Announced(experts_in(self.experts, self._count), self._room)}


def _training(members: Mapping[PeerId, MemberView]) -> list[PeerId]:
    return [peer for peer, view in members.items() if view.activity == "training"]
