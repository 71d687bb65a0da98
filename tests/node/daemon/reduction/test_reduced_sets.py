"""What the ledger says about reduced rounds, as one node keeps it."""

from msgspec.structs import replace

from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols.ledger.records import sign_entry
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


def test_a_set_counts_alike_whichever_history_of_an_author_stands_in_the_feeds_here(world_of):
    """Else who has the other one could never fold it, and would know other reducers from then on."""
    world = world_of(5)
    *_, offers = offers_of(world, 3)
    liars = [offers[number].entry for number in (3, 4)]
    claims = [world.reduce(number, offers, 2) for number in (1, 2, 3)]
    names = tuple(sorted({offer.entry for offer in offers} | {claim.entry for claim in claims}))
    here, there = sets_of(world, 2), ReductionLedger(world.peers[0], world.rules, SPEC)
    hidden = {*liars, claims[2].entry}
    for entry in [entry for feed in world.feeds.values() for entry in feed if entry.id not in hidden]:
        there.add(entry)
    for name in liars:  # what the feeds here have of both liars instead
        entry = world.entries[name]
        twin = replace(entry.body, tokens=entry.body.tokens + 1)
        author = world.names[world.peers.index(entry.author)]
        there.add(sign_entry(world.rules.run, author, entry.seq, entry.previous, twin))
    for number in range(2):
        there.decide(number, [offer.entry for offer in there.offers(number)])
    assert there.parts(2, names) is None
    for name in hidden:
        there.add_orphan(world.entries[name])
    assert there.parts(2, names) == here.parts(2, names)
    assert sum(part.reduced is not None for part in there.parts(2, names)) == 3
    assert [there.covered(claim) for claim in claims] == [here.covered(claim) for claim in claims]
    assert all(there.contribution(name) == here.contribution(name) for name in liars)
    assert there.reduced_payloads() == here.reduced_payloads()
    assert {offer.entry for offer in there.offers(2)}.isdisjoint(liars), "no set of our own names them"
    assert here.decide(2, names) == there.decide(2, names) == 4
    assert there.history() == here.history()
    there.forget(3)
    assert not there.orphans
