"""Who trains which experts of a mixture: each expert has some holders among the members (`outer.holders`).

A pure function of what the members announce (registers.Holding), so nobody has to be asked. Where two members see
different announcements, an expert has one holder more or less for a round, and never is a round held up by it.

- Nobody has more experts than it has room for; where there is room, all have as many, or one more or less.
- Members keep what they train. With one holder each, when a member leaves only its experts move, and when one
  comes experts move to it alone.
- What is free, and what is kept where two claim it, goes by the highest BLAKE3(run, expert, peer) (rendezvous
  hashing: D. Thaler, C. Ravishankar, 1998). Plain rendezvous hashing, weighted or not, would give shares that vary
  as those of a lottery: neither a bound of memory nor one of bytes could be promised.

The function is a fixed point of itself: announced and applied again it changes nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from atoll.protocols.ids import PeerId, RunId, digest, peer_bytes

Held = dict[PeerId, set[int]]


class Announced(msgspec.Struct, frozen=True):
    """What a member says of itself."""

    experts: frozenset[int]
    """Those that it trains now."""
    room: int
    """How many it could."""


def assigned(
    run: RunId, count: int, holders: int, members: Mapping[PeerId, Announced]
) -> dict[PeerId, frozenset[int]]:
    """The experts of each member: `holders` members for each of `count` experts, or all where they are fewer.

    Where the members have not that much room, every expert gets one holder before any gets two. Pure.
    """
    wanted = min(holders, len(members))
    order = [peer for _, peer in _best_first(run, ((count, peer) for peer in members))]
    order.sort(key=lambda peer: -len(members[peer].experts))
    caps = shares(count * wanted, {peer: min(count, one.room) for peer, one in members.items()}, order)
    held: Held = {peer: set() for peer in members}
    many = [0] * count
    claims = ((expert, peer) for peer, one in members.items() for expert in one.experts if expert < count)
    for expert, peer in _best_first(run, claims):
        if many[expert] < wanted and len(held[peer]) < caps[peer]:
            held[peer].add(expert)
            many[expert] += 1
    room = sum(caps.values())
    for level in range(wanted):
        for expert in (expert for expert in range(count) if many[expert] <= level):
            if sum(many) == room:
                break
            order = [peer for _, peer in _best_first(run, ((expert, peer) for peer in members))]
            many[expert] += _place(expert, order, held, caps, set())
    return {peer: frozenset(experts) for peer, experts in held.items()}


def shares(total: int, rooms: Mapping[PeerId, int], first: Iterable[PeerId]) -> dict[PeerId, int]:
    """How many each has: the same where the room reaches, `total` together if it fits; the rest of the division
    goes one by one to the `first` of the members with room."""
    low, high = 0, max(rooms.values(), default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(min(room, middle) for room in rooms.values()) >= total:
            high = middle
        else:
            low = middle + 1
    found = {peer: min(room, max(0, low - 1)) for peer, room in rooms.items()}
    more = [peer for peer in first if rooms[peer] > found[peer]]
    for peer in more[: max(0, total - sum(found.values()))]:
        found[peer] += 1
    return found


def shortage(count: int, holders: int, rooms: Collection[int]) -> str:
    """One line where members with these rooms have none for all experts; empty where they have."""
    room = sum(min(count, one) for one in rooms)
    each = min(holders, len(rooms))
    if room >= count * each:
        return ""
    return f"they have room for {room} experts; {count} with {each} holders each need {count * each}"


def _place(expert: int, order: list[PeerId], held: Held, caps: Mapping[PeerId, int], seen: set[PeerId]) -> bool:
    """Give an expert one more holder: the best with room, else one where a move of another expert makes room."""
    free = [peer for peer in order if expert not in held[peer] and peer not in seen]
    for peer in free:
        if len(held[peer]) < caps[peer]:
            held[peer].add(expert)
            return True
    for peer in free:
        seen.add(peer)
        for other in sorted(held[peer]):
            if _place(other, order, held, caps, seen):
                held[peer].remove(other)
                held[peer].add(expert)
                return True
    return False


def _best_first(run: RunId, pairs: Iterable[tuple[int, PeerId]]) -> Iterator[tuple[int, PeerId]]:
    """Pairs of expert and member, highest hash first."""
    scored = [(_score(run, expert, peer), expert, peer) for expert, peer in pairs]
    return ((expert, peer) for _, expert, peer in sorted(scored, reverse=True))


def _score(run: RunId, expert: int, peer: PeerId) -> bytes:
    return digest(b"atoll expert\0", run, expert.to_bytes(4, "big"), peer_bytes(peer))
