"""What counts is a function of a set of records: order, repeats and lateness leave no trace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.reduction.effective_set import effective_slices, entries_of, one_per_author, tainted
from atoll.node.learning.reduction.reducing import slice_update
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.reduction import Claim, Offer
from atoll.protocols.run.slices import all_gather
from tests.plain.mean import PLAIN, outer_update
from tests.plain.sparse2 import decode

torch.set_num_threads(1)
CACHE = {}


def by_id(*claims):
    return {claim.entry: claim for claim in claims}


def parts_of(world, offers, claims=(), wrong=(), absent=(), number=0):
    return effective_slices(Round(number), world.plan, offers, by_id(*claims), wrong, absent)


def update_of(world, parts, alpha_256=256):
    """U of a whole round."""
    updates = []
    for part in parts:
        raw = [(offer.weight, world.rows(offer.entry, part.span)) for offer in part.raw]
        reduced = [(part.weight, world.payloads[part.reduced.entry])] if part.reduced else []
        updates.append(slice_update(part.span.chunks, raw, reduced, world.rules, alpha_256, PLAIN))
    return torch.cat(updates)


def mean_update(world, offers, floor_256=64):
    """The first topology's."""
    members = [(o.weight, *decode(world.payloads[o.entry], world.rules.chunks, world.rules.k)) for o in offers]
    return outer_update(members, world.rules.chunks, 256, floor_256)


def test_without_reductions_it_is_the_first_topology(small):
    world, offers = small.world, small.offers
    whole = effective_slices(Round(0), all_gather(world.rules.chunks), offers, {})
    assert torch.equal(update_of(world, whole), mean_update(world, offers))
    assert torch.equal(update_of(world, parts_of(world, offers)), mean_update(world, offers))


def test_a_reduction_stands_for_what_it_covers(small):
    world, offers = small.world, small.offers
    claim = world.reduce(2, offers[:4])
    part = next(part for part in parts_of(world, offers, [claim]) if part.reduced)
    assert part.span == claim.body.span == world.plan.span_of(world.peers[2])
    assert part.weight == sum(offer.weight for offer in offers[:4])
    assert part.raw == (offers[4],)
    others = [part for part in parts_of(world, offers, [claim]) if not part.reduced]
    assert len(others) == len(world.plan.spans) - 1
    assert all(part.raw == tuple(sorted(offers)) for part in others)


def test_only_the_designated_reducer_of_the_slice_and_the_round_counts(small):
    world, offers = small.world, small.offers
    claim = world.reduce(2, offers)
    thief = Claim(digest(b"1"), world.peers[3], claim.body)
    shifted = Claim(digest(b"2"), world.peers[2], replace(claim.body, span=world.plan.span_of(world.peers[3])))
    late = Claim(digest(b"3"), world.peers[2], replace(claim.body, round=Round(1)))
    assert parts_of(world, offers, [thief, shifted, late]) == parts_of(world, offers)
    assert parts_of(world, offers, [thief, shifted, late, claim]) == parts_of(world, offers, [claim])


@pytest.mark.parametrize(
    "change",
    [
        {"covered": b"\x0f"}, {"covered": b"\x3f"}, {"covered": b"\x1f\x00"},
        {"more": (digest(b"?"),)}, {"members": digest(b"?")},
    ],
)  # fmt: skip
def test_who_covers_something_else_than_it_says_does_not_count(small, change):
    world, offers = small.world, small.offers
    claim = world.reduce(2, offers, body_of=lambda body: replace(body, **change))
    assert parts_of(world, offers, [claim]) == parts_of(world, offers)


def test_a_covered_contribution_that_is_not_known_yet_makes_it_wait(small):
    world, offers = small.world, small.offers
    claim = world.reduce(2, offers)
    assert all(part.reduced is None for part in parts_of(world, offers[:4], [claim]))
    assert any(part.reduced for part in parts_of(world, offers, [claim]))


def test_a_newcomer_is_covered_by_name(world_of, small):
    world = small.world
    stranger = world_of(1, seed=9)
    offer = stranger.offer(0)
    world.trees.update(stranger.trees)
    claim = world.reduce(2, [*small.offers, offer])
    assert claim.body.more == (offer.entry,)
    part = next(part for part in parts_of(world, [*small.offers, offer], [claim]) if part.reduced)
    assert not part.raw


def test_who_died_early_still_counts_where_a_reducer_got_it(small):
    world, offers = small.world, small.offers
    claim = world.reduce(2, offers)
    parts = parts_of(world, offers, [claim], absent=[offers[0].entry])
    assert [len(part.raw) for part in parts] == [0 if part.reduced else 4 for part in parts]
    assert next(part.weight for part in parts if part.reduced) == sum(offer.weight for offer in offers)
    assert entries_of(parts, offers, [offers[0].entry]) == tuple(
        sorted([claim.entry, *(o.entry for o in offers[1:])])
    )


def test_a_wrong_one_never_counts(small):
    claim = small.world.reduce(2, small.offers)
    assert {part.reduced for part in parts_of(small.world, small.offers, [claim])} == {None, claim}
    assert {part.reduced for part in parts_of(small.world, small.offers, [claim], [claim.entry])} == {None}


def test_what_continues_a_wrong_one_is_wrong(small):
    world = small.world
    claims = [world.reduce(2, [world.offer(who, number) for who in range(5)], number) for number in range(3)]
    assert tainted(by_id(*claims), [claims[0].entry]) == {claim.entry for claim in claims}
    assert tainted(by_id(*claims), [claims[2].entry]) == {claims[2].entry}
    other = world.reduce(3, [world.offer(who, 3) for who in range(5)], 3)
    stolen = Claim(digest(b"1"), other.author, replace(other.body, previous=claims[2].entry))
    same_round = Claim(digest(b"2"), claims[2].author, replace(claims[2].body, previous=claims[2].entry))
    assert tainted(by_id(*claims, stolen, same_round), []) == {stolen.entry, same_round.entry}


def test_who_contributes_twice_counts_once_with_the_first():
    first, second = Offer(Digest(b"b" * 32), "peer", 64, 3), Offer(Digest(b"a" * 32), "peer", 9, 4)
    assert one_per_author([second, first, second]) == (first,)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_model_does_not_depend_on_how_the_records_came(world_of, data):
    """Any order, any grouping, any repeats; and what came late is as if it had been there."""
    if "world" not in CACHE:
        world = CACHE["world"] = world_of(5, chunks=5)
        CACHE["offers"] = [world.offer(number) for number in range(5)]
        CACHE["claims"] = [world.reduce(number, CACHE["offers"][: 3 + number % 3]) for number in range(4)]
        CACHE["updates"] = {}
    world, offers, claims = CACHE["world"], CACHE["offers"], CACHE["claims"]
    records = [*offers, *claims]
    held = data.draw(st.lists(st.sampled_from(records), max_size=12))
    rest = data.draw(st.permutations(records))
    wrong = frozenset(data.draw(st.lists(st.sampled_from([claim.entry for claim in claims]), max_size=2)))
    early = state_of(world, held, wrong)
    late = state_of(world, [*held, *rest, *held], wrong)
    assert late == state_of(world, records, wrong)
    assert early == state_of(world, sorted(set(held)), wrong)


def state_of(world, records, wrong):
    offers = [record for record in records if isinstance(record, Offer)]
    claims = [record for record in records if isinstance(record, Claim)]
    parts = parts_of(world, offers, claims, wrong)
    if parts not in CACHE["updates"]:
        update = update_of(world, parts)
        CACHE["updates"][parts] = digest(update.numpy().tobytes())
    return CACHE["updates"][parts]
