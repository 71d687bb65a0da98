"""What this node trains of a mixture, by what the members announce; and what it says about itself.

Everything here is a function of what was heard. Who holds what: protocols/ledger/ownership.py.
"""

from collections.abc import Mapping
from typing import Protocol

from atoll.node.daemon.rounds.participants import MemberView
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.ownership import Announced, assigned, nothing, shortage, splits
from atoll.protocols.ledger.registers import Holding
from atoll.protocols.run.experts import ALL, bitmap_of, check_bitmap, experts_in
from atoll.protocols.run.run_spec import RunSpec


class HoldingRegisters(Protocol):
    """What is needed of the network."""

    def put_holding(self, holding: Holding, ttl_s: float) -> None:
        """Say which experts we train."""

    def holdings(self) -> dict[PeerId, Holding]:
        """What live members say that they train."""


def announced(spec: RunSpec, holding: Holding | None) -> Announced:
    """What a register says; without one, or with one of another model: there is room, nothing is trained."""
    count = splits(spec)
    try:
        check_bitmap(holding.experts if holding else ALL, count)
    except DecodeError:
        holding = None
    if holding is None:
        return Announced(frozenset(), count)
    return Announced(experts_in(holding.experts, count), min(count, holding.room))


class ExpertShare:
    """This node's part: what it says that it trains, and what it should train. Nothing, where all train all."""

    def __init__(self, spec: RunSpec, me: PeerId, net: HoldingRegisters, room: int | None) -> None:
        """`room`: experts of each layer that this node may train; None: any number."""
        self._spec, self._me, self._net, self._count = spec, me, net, splits(spec)
        self._room = self._count if room is None else min(room, self._count)
        self.experts = nothing(spec)
        self.moments: tuple[tuple[int, bytes], ...] = ()
        """What is offered of experts that were given up (node/daemon/coordinator/moment_transfer.py)."""

    @property
    def trained(self) -> tuple[int, ...] | None:
        """The experts that are trained here, rising; None where all train all."""
        return tuple(sorted(experts_in(self.experts, self._count))) if self._count else None

    def say(self, experts: bytes | None = None) -> None:
        """Announce what we train; `experts`: from now on this."""
        self.experts = self.experts if experts is None else experts
        if self._count:
            self._net.put_holding(Holding(self.experts, self._room, self.moments), self._spec.pace.lease_s)

    def take(self, members: Mapping[PeerId, MemberView]) -> bytes:
        """Bitmap of the experts to train in the next round, among the members that train now; announced."""
        if self._count:
            found = assigned(self._spec.id, self._count, self._spec.outer.holders, self._all(members))
            self.say(bitmap_of(found[self._me], self._count))
        return self.experts

    def shortage(self, members: Mapping[PeerId, MemberView]) -> str:
        """One line where the members that train now, and this node, have no room for all experts; else empty."""
        if not self._count:
            return ""
        said = self._net.holdings()
        rooms = [said[peer].room if peer in said else self._count for peer in _training(members)]
        return shortage(self._count, self._spec.outer.holders, [self._room, *rooms])

    def _all(self, members: Mapping[PeerId, MemberView]) -> dict[PeerId, Announced]:
        said, training = self._net.holdings(), _training(members)
        views = {peer: announced(self._spec, said.get(peer)) for peer in training}
        return {**views, self._me: Announced(experts_in(self.experts, self._count), self._room)}


def _training(members: Mapping[PeerId, MemberView]) -> list[PeerId]:
    return [peer for peer, view in members.items() if view.activity == "training"]
