"""What the ledger says about reduced rounds, as one node keeps it."""

from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols.run.slices import ReduceSpec

SPEC = ReduceSpec(above=1, gap=2, k=16)


def sets_of(world, rounds=1):
    """All that the members of a world wrote, as its first member took it; the first round named the reducers."""
    sets = ReductionLedger(world.peers[0], world.rules, SPEC)
    for feed in world.feeds.values():
        for entry in feed:
            sets.add(entry)
    for number in range(rounds):
        sets.decide(number, [offer.entry for offer in sets.offers(number)])
    return sets


def offers_of(world, rounds):
    return [[world.offer(who, number) for who in range(len(world.peers))] for number in range(rounds)]


def test_of_several_reductions_of_one_reducer_the_first_in_its_feed_counts(world_of):
    """Whatever comes later changes no set, and so costs no fold; no name of it is ever legal."""
    world = world_of(5)
    *_, offers = offers_of(world, 3)
    claims = [world.reduce(2, offers[: 5 - n], 2) for n in range(3)]
    sets = sets_of(world)
    assert set(sets.claims) == {claims[0].entry}
    assert sets.add(world.entries[claims[1].entry]) is None
    names = {offer.entry for offer in offers}
    assert sets.parts(2, tuple(sorted({*names, claims[0].entry})))
    assert sets.parts(2, tuple(sorted({*names, claims[1].entry}))) is None


def test_the_first_of_each_round_counts_and_still_does_when_old_rounds_are_forgotten(world_of):
    world = world_of(5)
    rounds = offers_of(world, 4)
    claims = [world.reduce(2, rounds[number], number) for number in (2, 3)]
    sets = sets_of(world, 2)
    sets.forget(4)
    again = world.reduce(2, rounds[3], 3)
    assert sets.add(world.entries[again.entry]) is None
    assert set(sets.claims) == {claim.entry for claim in claims}
