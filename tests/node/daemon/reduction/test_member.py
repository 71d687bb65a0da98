"""The round machine: what it asks for, when it folds, and that the order of what it hears does not matter."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.reduction import machine as reduction_machine
from atoll.node.daemon.reduction.effective_set import effective_slices
from atoll.node.daemon.reduction.machine import (
    ClaimSeen,
    Collected,
    Excluded,
    FetchReduction,
    FetchRows,
    FoldSlices,
    Gone,
    OfferSeen,
    PatienceOver,
    Ranked,
    ReduceSlice,
    ReductionHeld,
    RowsHeld,
    State,
    Wrong,
    missing_payloads,
    missing_slices,
    step,
)
from atoll.protocols.ids import Round
from atoll.protocols.ledger import reduction
from atoll.protocols.ledger.reduction import covered_by
from atoll.protocols.ledger.set_limit import Seniority
from atoll.protocols.run.slices import all_gather

torch.set_num_threads(1)
CACHE = {}


class Play:
    """One member's machine, and everything that it asked for."""

    def __init__(self, world, number=0, plan=None):
        self.world, self.me = world, world.peers[number]
        self.state = State(self.me, Round(0), plan or world.plan)
        self.log = []

    def hear(self, *events):
        """The actions of these events."""
        fresh = []
        for event in events:
            self.state, actions = step(self.state, event)
            fresh += actions
        self.log += fresh
        return fresh

    def of(self, kind):
        return [action for action in self.log if isinstance(action, kind)]

    def serve(self, gone=()):
        """Everything that was asked for arrives, until nothing more is asked."""
        done = set()
        while todo := [action for action in self.log if action not in done]:
            for action in todo:
                done.add(action)
                match action:
                    case FetchRows(offer, _) if offer.entry in gone:
                        self.hear(Gone(offer.entry))
                    case FetchRows(offer, span):
                        self.hear(RowsHeld(offer.entry, span))
                    case FetchReduction(claim):
                        self.hear(ReductionHeld(claim.entry))


@pytest.fixture
def scene(small):
    small.claims = [small.world.reduce(number, small.offers) for number in range(5)]
    small.play = Play(small.world)
    small.span = small.world.plan.span_of(small.play.me)
    return small


def test_a_round_without_faults(scene):
    play, others = scene.play, scene.offers[1:]
    asked = play.hear(*map(OfferSeen, scene.offers))
    assert asked == [FetchRows(offer, scene.span) for offer in asked_order(asked)]
    assert {action.offer for action in asked} == set(others)
    assert play.hear(*(RowsHeld(offer.entry, scene.span) for offer in others)) == []
    assert play.hear(Collected()) == [ReduceSlice(scene.span, tuple(sorted(scene.offers)))]
    assert missing_slices(play.state) == scene.world.plan.spans
    mine, theirs = scene.claims[0], scene.claims[1:]
    assert play.hear(ReductionHeld(mine.entry), ClaimSeen(mine)) == []
    assert play.hear(*map(ClaimSeen, theirs)) == [FetchReduction(claim) for claim in theirs]
    assert missing_slices(play.state) == ()
    *early, last = (ReductionHeld(claim.entry) for claim in theirs)
    assert play.hear(*early) == []
    (fold,) = play.hear(last)
    assert isinstance(fold, FoldSlices)
    assert [part.reduced for part in fold.parts] == [
        next(c for c in scene.claims if c.body.span == span) for span in scene.world.plan.spans
    ]
    assert len(fold.entries) == 10
    assert play.hear(Collected(), PatienceOver(), last, *map(OfferSeen, scene.offers)) == []


def asked_order(actions):
    return [action.offer for action in actions]


def test_a_set_keeps_a_place_for_each_reduction(scene, monkeypatch):
    """Those that come last are not named, and count where a Reduction covers them."""
    monkeypatch.setattr(reduction_machine, "MAX_SET", 8)
    play, members = scene.play, scene.offers[:2]
    play.hear(*map(OfferSeen, scene.offers), Ranked(Seniority((frozenset(o.author for o in members),))))
    play.serve()
    (reduce,) = play.hear(Collected())
    assert len(reduce.offers) == 3
    assert {*members} < {*reduce.offers}
    play.hear(*map(ClaimSeen, scene.claims), ReductionHeld(scene.claims[0].entry))
    play.serve()
    (fold,) = play.of(FoldSlices)
    named = {offer.entry for offer in reduce.offers} | {claim.entry for claim in scene.claims}
    assert fold.entries == tuple(sorted(named))
    assert all(part.reduced is not None for part in fold.parts)


def test_a_reduction_covers_no_more_than_a_proof_can_hold(scene, monkeypatch):
    body, plan, offers = scene.claims[0].body, scene.world.plan, tuple(sorted(scene.offers))
    monkeypatch.setattr(reduction, "MAX_SET", 5)
    assert covered_by(body, plan, offers) == offers
    monkeypatch.setattr(reduction, "MAX_SET", 4)
    assert covered_by(body, plan, offers) is None


def test_a_missing_reducer_costs_its_slice_in_raw_rows(scene):
    play = scene.play
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims[:4]), ReductionHeld(scene.claims[0].entry))
    play.serve()
    lost = scene.claims[4].body.span
    assert missing_slices(play.state) == (lost,)
    assert play.of(FoldSlices) == []
    asked = play.hear(PatienceOver())
    assert {(action.offer, action.span) for action in asked} == {(offer, lost) for offer in scene.offers[1:]}
    play.serve()
    (fold,) = play.of(FoldSlices)
    assert [part.span for part in fold.parts if part.reduced is None] == [lost]


def test_the_missing_reducers_own_rows_may_be_gone_with_it(scene):
    """Nobody else ever needed them; the rest of its work counts where the other reducers got it."""
    play, dead = scene.play, scene.offers[4]
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims[:4]), ReductionHeld(scene.claims[0].entry), PatienceOver())
    play.serve(gone=[dead.entry])
    (fold,) = play.of(FoldSlices)
    assert dead.entry not in fold.entries
    assert [dead in part.raw for part in fold.parts] == [False] * 5
    assert sum(part.weight for part in fold.parts) == 4 * sum(offer.weight for offer in scene.offers)
    assert play.hear(RowsHeld(dead.entry, scene.claims[4].body.span))[0].entries == tuple(
        sorted([*fold.entries, dead.entry])
    )


def test_a_proven_fault_falls_back_to_raw_rows_at_once(scene):
    play = scene.play
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims), ReductionHeld(scene.claims[0].entry))
    play.serve()
    assert len(play.of(FoldSlices)) == 1
    asked = play.hear(Wrong(scene.claims[2].entry))
    span = scene.claims[2].body.span
    assert asked == [FetchRows(offer, span) for offer in sorted(scene.offers) if offer.author != play.me]
    play.serve()
    first, second = play.of(FoldSlices)
    assert [part.reduced is None for part in second.parts] == [part.span == span for part in second.parts]
    assert set(first.entries) - set(second.entries) == {scene.claims[2].entry}


def test_a_reduction_whose_payload_nobody_has_is_done_without_until_it_comes(scene):
    """Its reducer died after it published: what continues it still counts, for it is not wrong."""
    play, lost = scene.play, scene.claims[2]
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims), PatienceOver())
    play.hear(*(ReductionHeld(claim.entry) for claim in scene.claims if claim != lost))
    assert missing_payloads(play.state) == (lost.entry,)
    assert not play.of(FoldSlices)
    asked = play.hear(Gone(lost.entry))
    assert {action.span for action in asked} == {lost.body.span}
    assert missing_payloads(play.state) == ()
    play.hear(*(RowsHeld(action.offer.entry, action.span) for action in asked))
    (first,) = play.of(FoldSlices)
    assert [part.span for part in first.parts if part.reduced is None] == [lost.body.span]
    assert lost.entry not in first.entries
    play.hear(ReductionHeld(lost.entry))
    assert play.of(FoldSlices)[-1].entries == tuple(sorted({*first.entries, lost.entry}))


def test_a_late_reduction_takes_the_place_of_raw_rows(scene):
    play = scene.play
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims[:4]), ReductionHeld(scene.claims[0].entry), PatienceOver())
    play.serve()
    assert play.hear(ClaimSeen(scene.claims[4])) == [FetchReduction(scene.claims[4])]
    (fold,) = play.hear(ReductionHeld(scene.claims[4].entry))
    assert all(part.reduced for part in fold.parts)


def test_a_late_contribution_is_added_raw(scene):
    world, play = scene.world, scene.play
    late = scene.offers[4]
    claims = [world.reduce(number, scene.offers[:4]) for number in range(5)]
    play.hear(*map(OfferSeen, scene.offers[:4]))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, claims), ReductionHeld(claims[0].entry))
    play.serve()
    assert len(play.of(FoldSlices)) == 1
    asked = play.hear(OfferSeen(late))
    assert asked == [FetchRows(late, span) for span in world.plan.spans]
    play.serve()
    assert [part.raw for part in play.of(FoldSlices)[1].parts] == [(late,)] * 5


def test_who_reduces_nothing_waits_for_reductions_alone(scene):
    usual = scene.world.plan
    at = usual.reducers.index(scene.play.me)
    reducers = (*usual.reducers[:at], "somebody else", *usual.reducers[at + 1 :])
    play = Play(scene.world, plan=replace(usual, reducers=reducers))
    assert play.hear(*map(OfferSeen, scene.offers), Collected()) == []


def test_a_reducer_that_got_nothing_publishes_what_it_has(scene):
    play = scene.play
    actions = play.hear(*map(OfferSeen, scene.offers), Collected())
    assert ReduceSlice(scene.span, (scene.offers[0],)) in actions


def test_the_first_topology_asks_everybody_at_once(small):
    play = Play(small.world, plan=all_gather(small.world.rules.chunks))
    (whole,) = play.state.plan.spans
    asked = play.hear(*map(OfferSeen, small.offers))
    assert {(action.offer, action.span) for action in asked} == {(offer, whole) for offer in small.offers[1:]}
    play.serve()
    assert play.of(FoldSlices) == []
    (fold,) = play.hear(Collected())
    assert fold.parts[0].raw == tuple(sorted(small.offers))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.data())
def test_any_order_and_any_repeats_end_in_the_same_fold(world_of, luck: random.Random, data):
    if "world" not in CACHE:
        world = CACHE["world"] = world_of(5, chunks=5)
        CACHE["offers"] = [world.offer(number) for number in range(5)]
        CACHE["claims"] = [world.reduce(number, CACHE["offers"][: 3 + number % 3]) for number in range(4)]
    world, offers, claims = (CACHE[name] for name in ("world", "offers", "claims"))
    wrong = data.draw(st.lists(st.sampled_from([claim.entry for claim in claims]), max_size=2))
    events = [*map(OfferSeen, offers), *map(ClaimSeen, claims), *map(Wrong, wrong), Collected(), PatienceOver()]
    events += [ReductionHeld(claims[0].entry)]
    events += data.draw(st.lists(st.sampled_from(events), max_size=6))
    luck.shuffle(events)
    play = Play(world)
    for event in events:
        play.hear(event)
        if luck.random() < 0.3:
            play.serve()
    play.serve()
    wanted = effective_slices(Round(0), world.plan, offers, {claim.entry: claim for claim in claims}, wrong)
    assert play.of(FoldSlices)[-1].parts == wanted
    fetches = [action for action in play.log if not isinstance(action, FoldSlices)]
    assert len(fetches) == len(set(fetches))
    assert len(play.of(ReduceSlice)) <= 1


def test_a_set_without_an_excluded_author_has_none_of_its_work_nor_what_covers_it(scene):
    play, bad = scene.play, scene.offers[4]
    play.hear(*map(OfferSeen, scene.offers))
    play.serve()
    play.hear(Collected(), *map(ClaimSeen, scene.claims), ReductionHeld(scene.claims[0].entry))
    play.serve()
    play.hear(Excluded(bad.author))
    play.serve()
    _, fold = play.of(FoldSlices)
    assert bad.entry not in fold.entries
    assert fold.entries == tuple(sorted(offer.entry for offer in scene.offers if offer != bad))
    assert not any(part.reduced for part in fold.parts), "all of them cover it"
    assert not any(bad in part.raw for part in fold.parts)


def test_a_reducer_reduces_nothing_of_an_excluded_author(scene):
    play, bad = scene.play, scene.offers[4]
    asked = play.hear(Excluded(bad.author), *map(OfferSeen, scene.offers))
    assert bad not in asked_order(asked)
    play.serve()
    play.hear(Collected())
    (reduce,) = play.of(ReduceSlice)
    assert set(reduce.offers) == set(scene.offers) - {bad}


def test_the_only_author_of_a_round_counts_though_it_is_excluded(scene):
    play, only = scene.play, scene.offers[4]
    play.hear(Excluded(only.author), OfferSeen(only), Collected(), PatienceOver())
    play.serve()
    assert play.of(FoldSlices)[-1].entries == (only.entry,)
