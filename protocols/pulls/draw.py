"""Who pulls from whom at a tick of a round: a pure function of run, round, tick and members.

At each tick the members are in an order that follows from hashes. The first and the second are a pair, then the
third and the fourth; the last of an odd number has no neighbour. A pair pulls with the chance of the tick, both
ways. So a member has one neighbour at most, and c·2⌊M/2⌋/M on average at a tick with the chance c.
"""

from collections.abc import Iterable

from atoll.protocols.ids import PeerId, digest
from atoll.protocols.run.sections.variants.gossip import GossipSpec

_ORDER, _PAIR = b"atoll/pull order/1\0", b"atoll/pull pair/1\0"
_BITS = 64


def pairs(
    gossip: GossipSpec, run: bytes, number: int, tick: int, *, ticks: int, members: Iterable[PeerId]
) -> list[tuple[PeerId, PeerId]]:
    """The pairs that pull at `tick` of round `number`, which has so many ticks."""
    named = run + number.to_bytes(8, "little") + tick.to_bytes(4, "little")
    order = sorted(members, key=lambda peer: digest(_ORDER, named, peer.encode()))
    part, whole = gossip.chance(tick, ticks)

    def is_drawn(first: PeerId, second: PeerId) -> bool:
        # The order says who is the first one, so both sides hash the same bytes. Whole numbers: no rounding.
        drawn = int.from_bytes(digest(_PAIR, named, first.encode(), second.encode())[: _BITS // 8], "little")
        return drawn * whole < part << _BITS

    return [pair for pair in zip(order[::2], order[1::2], strict=False) if is_drawn(*pair)]


def neighbour_of(me: PeerId, drawn: Iterable[tuple[PeerId, PeerId]]) -> PeerId | None:
    """From whom `me` pulls, and who pulls from `me`; None: nobody."""
    for first, second in drawn:
        if me in (first, second):
            return second if me == first else first
    return None
