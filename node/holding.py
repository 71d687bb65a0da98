"""What this node trains of a mixture, by what the members announce; and what it says about itself.

Everything here is a function of what was heard. Who holds what: protocols/ownership.py.
"""

from collections.abc import Mapping

from atoll.node.membership import MemberView
from atoll.protocols.errors import DecodeError
from atoll.protocols.experts import ALL, bitmap_of, check_bitmap, experts_in
from atoll.protocols.ids import PeerId
from atoll.protocols.ownership import Announced, assigned, shortage
from atoll.protocols.records import Contribution, PartContribution, experts_of
from atoll.protocols.registers import Holding
from atoll.protocols.run import RunSpec
from atoll.protocols.worker import Pending


def splits(spec: RunSpec) -> int:
    """The number of experts, in runs whose members train some of them only; else 0."""
    return spec.model.experts.count if spec.model.experts is not None and spec.outer.holders else 0


def nothing(spec: RunSpec) -> bytes:
    """The bitmap of a node that has not begun."""
    return bitmap_of((), splits(spec)) if splits(spec) else ALL


def room_of(spec: RunSpec, most: int) -> int:
    """Experts of each layer that this node may train; `most` = 0: any number."""
    return min(most, splits(spec)) if most else splits(spec)


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


def ours(
    spec: RunSpec, me: PeerId, mine: Holding, members: Mapping[PeerId, MemberView], said: Mapping[PeerId, Holding]
) -> bytes:
    """Bitmap of the experts to train in the next round: a share among the members that train now."""
    count = splits(spec)
    if not count:
        return ALL
    found = assigned(spec.id, count, spec.outer.holders, _all(spec, me, mine, members, said))
    return bitmap_of(found[me], count)


def lacking(
    spec: RunSpec, me: PeerId, mine: Holding, members: Mapping[PeerId, MemberView], said: Mapping[PeerId, Holding]
) -> str:
    """One line where the members that train now, and this node, have no room for all experts; else empty."""
    count = splits(spec)
    return shortage(count, spec.outer.holders, _all(spec, me, mine, members, said)) if count else ""


def _all(
    spec: RunSpec, me: PeerId, mine: Holding, members: Mapping[PeerId, MemberView], said: Mapping[PeerId, Holding]
) -> dict[PeerId, Announced]:
    training = {peer for peer, view in members.items() if view.activity == "training"}
    return {**{peer: announced(spec, said.get(peer)) for peer in training}, me: announced(spec, mine)}


def trained_here(spec: RunSpec, mine: Holding) -> tuple[int, ...] | None:
    """The experts that a node trains, rising; None in runs whose members train all."""
    return tuple(sorted(experts_in(mine.experts, splits(spec)))) if splits(spec) else None


def contribution_of(p: Pending) -> Contribution:
    """The record of a saved payload."""
    facts = (p.round, p.base, p.payload, p.steps, p.tokens, p.weight, p.loss)
    return PartContribution(*facts, p.experts) if p.experts else Contribution(*facts)


def is_lawful(spec: RunSpec, body: Contribution) -> bool:
    """Whether the run allows what a contribution says that it covers. Others are as if they were not written."""
    count = splits(spec)
    try:
        check_bitmap(experts_of(body), count)
    except DecodeError:
        return False
    return bool(count) or not experts_of(body)
