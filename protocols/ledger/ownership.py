"""Assigns experts to members: each expert of a mixture has `outer.holders` holders among the members.

The assignment is a pure function of what the members announce (registers.Holding). If two members see different
announcements, an expert has one holder more or less for a round; no round waits for it.

- No member has more experts than it has room for; where there is room, shares differ by at most one. - Members
keep the experts that they train. With one holder each, only the experts of a member that leaves move, and
  experts move to a new member only.
- Free experts, and experts that two members claim, go to the highest BLAKE3(run, expert, peer) (rendezvous
hashing:
  D. Thaler, C. Ravishankar, 1998). Rendezvous hashing alone, weighted or not, gives shares that vary at random, so
  neither memory nor traffic would have a bound.

The function is a fixed point of itself: announcing its result changes nothing.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from atoll.protocols.ids import PeerId, RunId, digest, peer_bytes
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.run_spec import RunSpec

Held = dict[PeerId, set[int]]


def splits(spec: RunSpec) -> int:
    """Number of experts of each layer in runs whose members train some of them only; 0 in all other runs."""
    return spec.model.expert_count if spec.outer.holders else 0


def nothing(spec: RunSpec) -> bytes:
    """The bitmap of a node that does not train any expert yet."""
    return bitmap_of((), splits(spec)) if splits(spec) else ALL


class Announced(msgspec.Struct, frozen=True):
    """A member's announcement of its experts."""

    experts: frozenset[int]
    """Experts that it trains now."""
    room: int
    """Number of experts that it could train."""


def assigned(
    run: RunId,
    count: int,
    holders: int,
    members: Mapping[PeerId, Announced],
    *,
    cover_first: bool = False,
) -> dict[PeerId, frozenset[int]]:
    """The experts of each member: `holders` members for each of `count` experts, or all members if there are
    fewer.

    If the members have less room together, every expert gets one holder before any gets two. What members train
    already they keep, even so; but with `cover_first` not where another expert has no holder then. Pure.
    """
    wanted = min(holders, len(members))
    ranks = _Ranks(run, members)
    order = sorted(ranks[count], key=lambda peer: -len(members[peer].experts))
    caps = shares(count * wanted, {peer: min(count, one.room) for peer, one in members.items()}, order)
    held: Held = {peer: set() for peer in members}
    many = [0] * count
    claims = _claims(run, count, members)
    # With `cover_first` a second claim must not take the place that an expert without a holder needs.
    for most in (1, wanted) if cover_first else (wanted,):
        for expert, peer in claims:
            spare = sum(caps.values()) - sum(many) > many.count(0)
            is_free = many[expert] < most and len(held[peer]) < caps[peer] and expert not in held[peer]
            if is_free and (spare or not (cover_first and many[expert])):
                held[peer].add(expert)
                many[expert] += 1
    left = sum(caps.values()) - sum(many)
    for level in range(wanted):
        for expert in (expert for expert in range(count) if many[expert] <= level):
            if left and _place(expert, ranks[expert], held, caps, set()):
                many[expert] += 1
                left -= 1
    return {peer: frozenset(experts) for peer, experts in held.items()}


def shares(total: int, rooms: Mapping[PeerId, int], first: Iterable[PeerId]) -> dict[PeerId, int]:
    """Number of experts for each member: equal where room allows, `total` together if they fit.

    The remainder of the division goes one by one to the `first` of the members with room."""
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
    """One line if members with these rooms cannot train all experts together; empty if they can."""
    room = sum(min(count, one) for one in rooms)
    each = min(holders, len(rooms))
    if room >= count * each:
        return ""
    return f"they have room for {room} experts; {count} with {each} holders each need {count * each}"


def _place(expert: int, order: list[PeerId], held: Held, caps: Mapping[PeerId, int], seen: set[PeerId]) -> bool:
    """Give an expert one more holder: the best with room, else one where a move of another expert makes room."""
    for peer in order:
        if len(held[peer]) < caps[peer] and expert not in held[peer] and peer not in seen:
            held[peer].add(expert)
            return True
    for peer in [peer for peer in order if expert not in held[peer] and peer not in seen]:
        seen.add(peer)
        for other in sorted(held[peer]):
            if _place(other, order, held, caps, seen):
                held[peer].remove(other)
                held[peer].add(expert)
                return True
    return False


def _claims(run: RunId, count: int, members: Mapping[PeerId, Announced]) -> list[tuple[int, PeerId]]:
    """Pairs of expert and member that trains it, highest hash first."""
    pairs = [(expert, peer) for peer, one in members.items() for expert in one.experts if expert < count]
    return sorted(pairs, key=lambda pair: digest(_prefix(run, pair[0]), peer_bytes(pair[1])), reverse=True)


class _Ranks(dict[int, list[PeerId]]):
    """Members for an expert, highest hash first; made when first asked for, once."""

    def __init__(self, run: RunId, members: Iterable[PeerId]) -> None:
        super().__init__()
        self._run, self._raw = run, {peer: peer_bytes(peer) for peer in members}

    def __missing__(self, expert: int) -> list[PeerId]:
        start = _prefix(self._run, expert)
        scores = {peer: digest(start + raw) for peer, raw in self._raw.items()}
        self[expert] = sorted(scores, key=scores.__getitem__, reverse=True)
        return self[expert]


def _prefix(run: RunId, expert: int) -> bytes:
    return b"atoll expert\0" + run + expert.to_bytes(4, "big")
