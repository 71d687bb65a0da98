"""Who trains which experts in which round of a trial: all members all the time, or one that dies."""

from collections.abc import Collection, Mapping

from atoll.protocols.ledger.ownership import Announced, assigned, splits
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.experts.experts_members import MEMBERS, identity_of
from atoll_bench.experts.experts_trial import Plan

DEAD = MEMBERS - 1
"""The last member."""
DEAD_ROUNDS = 5


def plan_of(spec: RunSpec, arm: str) -> Plan:
    """`killed`: the last member is dead for five rounds from a third of the run on; `lost`: from then on."""
    rounds = spec.outer.rounds
    first = rounds // 3
    last = {"killed": first + DEAD_ROUNDS, "lost": rounds}.get(arm, first)
    everybody = range(MEMBERS)
    if last == first:
        (share,) = _shares(spec, [everybody])
        return lambda _: share
    before, without, after = _shares(spec, [everybody, range(DEAD), everybody])
    return lambda number: before if number < first else without if number < last else after


def _shares(spec: RunSpec, stages: Collection[Collection[int]]) -> list[Mapping[int, bytes]]:
    """Bitmaps of those who live, stage by stage; who comes back announces what it had."""
    count = splits(spec)
    if not count:
        return [dict.fromkeys(alive, ALL) for alive in stages]
    held: dict[int, frozenset[int]] = {}
    found: list[Mapping[int, bytes]] = []
    for alive in stages:
        said = {identity_of(slot).peer_id: Announced(held.get(slot, frozenset()), count) for slot in alive}
        given = assigned(spec.id, count, 1, said)
        held |= {slot: given[identity_of(slot).peer_id] for slot in alive}
        found.append({slot: bitmap_of(held[slot], count) for slot in alive})
    return found
