"""What each contribution of a set weighs where several name one payload: a pure function, in whole numbers."""

from collections.abc import Sequence
from fractions import Fraction

from atoll.protocols.audits.standing import Named
from atoll.protocols.ids import Digest, PeerId


def weights(members: Sequence[Named], gone: frozenset[PeerId], *, by_payload: bool = False) -> dict[Digest, int]:
    """The weight of each contribution of a set, by entry id, where these authors have none. Copies share one.

    Each has its own divided by their number, or, in runs with `audit.by_payload`, a share of the largest.
    """
    groups: dict[Digest, list[Named]] = {}
    for each in members:
        if each.author not in gone:
            groups.setdefault(each.payload, []).append(each)
    found: dict[Digest, int] = {}
    for group in groups.values():
        found |= _shares(group) if by_payload else {each.entry: each.weight // len(group) for each in group}
    return {each.entry: found.get(each.entry, 0) for each in members}


def _shares(group: Sequence[Named]) -> dict[Digest, int]:
    """What each of those that name one payload has of its weight, the largest that one of them claims.

    Each unit of it is shared by those that claim it (Shapley's value of an airport's runway, Littlechild and Owen
    1973). So copies take nothing from the payload, however many there are, and add nothing: the fold counts it
    as if the one with the largest claim had sent it alone. Units that remain go to the largest claims.
    """
    ranked = sorted(group, key=lambda each: (-each.weight, each.entry))
    found, share, below = dict[Digest, int](), Fraction(0), 0
    for many in range(len(ranked), 0, -1):
        each = ranked[many - 1]
        share, below = share + Fraction(each.weight - below, many), each.weight
        found[each.entry] = int(share)
    for each in ranked[: below - sum(found.values())]:
        found[each.entry] += 1
    return found
