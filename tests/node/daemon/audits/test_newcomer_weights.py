"""The weight of work on probation: a function of the sets before a round, in whatever order they come."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.daemon.audits.newcomer_weights import KEPT, NewcomerWeights, on_probation
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.ids import Round
from atoll.protocols.ledger.probation import Tally, level, scaled

OLD, NEW = ("old-a", "old-b", "old-c"), ("new-a", "new-b")
PROBATION, SHARE, CLAIMED = 4, 64, 60


class Rig:
    """Entries are `AUTHOR@ROUND`; every contribution claims CLAIMED."""

    def __init__(self, claimed=lambda entry: CLAIMED, **bound):
        self.fed = []
        self.weights = NewcomerWeights(
            share_256=SHARE,
            tally=Tally(PROBATION),
            context=SimpleNamespace(now=lambda: 1.0),
            contributions=SimpleNamespace(find=lambda names: [(n, n.partition("@")[0], None) for n in names]),
            queue=SimpleNamespace(post=lambda event: event()),
            machines=SimpleNamespace(feed_round=self.fed.append),
            claimed=lambda number, found: {entry: claimed(entry) for entry, _, _ in found},
            **bound,
        )

    def set(self, number, *authors, is_final=True):
        self.weights.on_set(Round(number), tuple(f"{author}@{number}" for author in authors), is_final)

    def weigh(self, number, *authors):
        found = [(f"{author}@{number}", author, None) for author in authors]
        return [self.weights.weigh(Round(number), found)[entry] for entry, _, _ in found]


def test_a_newcomer_has_a_share_of_its_weight_until_enough_final_sets_name_it():
    rig = Rig()
    for number in range(10):
        rig.set(number, *OLD)
    seen = []
    for number in range(10, 16):
        seen.append(rig.weigh(number, *OLD, NEW[0]))
        rig.set(number, *OLD, NEW[0])
    assert [found[3] for found in seen] == [15, 15, 15, 15, 60, 60]
    assert all(found[:3] == [60, 60, 60] for found in seen)


def test_where_all_are_new_nothing_changes():
    """The first rounds of a run, and those in which only newcomers are left."""
    rig = Rig()
    assert rig.weigh(0, *OLD) == [60, 60, 60]
    for number in range(10):
        rig.set(number, *OLD)
    assert rig.weigh(10, *NEW) == [60, 60]
    assert rig.weigh(10, *NEW, OLD[0]) == [15, 15, 60]
    assert on_probation(Tally(PROBATION, 10), NEW) == frozenset()


def test_founders_are_never_on_probation():
    rig = Rig()
    for number in range(12):
        assert rig.weigh(number, *OLD) == [60, 60, 60]
        rig.set(number, *OLD)


@given(weight=st.integers(0, 255), share=st.integers(1, 256))
def test_a_share_is_a_legal_weight_and_only_nothing_stays_nothing(weight, share):
    assert min(1, weight) <= scaled(weight, share) <= weight
    assert scaled(weight, 256) == weight


@given(weights=st.lists(st.integers(0, 255), max_size=40), most=st.integers(0, 4000))
def test_the_level_is_the_highest_that_all_can_have(weights, most):
    found = level(weights, most)
    assert sum(min(weight, found) for weight in weights) <= most
    if sum(weights) > most:
        assert sum(min(weight, found + 1) for weight in weights) > most
    else:
        assert found == max(weights, default=0)


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ((60,), [60, 15]),
        ((60, 60), [60, 10, 10]),
        ((255, 60), [60, 10, 10]),
        ((255, 255, 8), [60, 9, 9, 2]),
        ((255,) * 16, [60, *[1] * 16]),
        ((255,) * 30, [60, *[0] * 30]),
    ],
)
def test_newcomers_are_a_quarter_of_the_weight_at_most_whatever_they_claim(claims, found):
    names = [f"new-{at}" for at in range(len(claims))]
    given_ = {f"{name}@10": claim for name, claim in zip(names, claims, strict=True)}
    rig = Rig(claimed=lambda entry: given_.get(entry, CLAIMED), is_bounded=True)
    for number in range(10):
        rig.set(number, OLD[0])
    assert rig.weigh(10, OLD[0], *names) == found


def test_a_newcomer_is_told_what_the_bound_leaves_it_and_not_what_it_would_have_alone():
    rig = Rig(is_bounded=True)
    for number in range(10):
        rig.set(number, OLD[0])
    assert rig.weights.share_of(NEW[0]) == SHARE, "nobody weighed is nobody cut"
    crowd = [f"new-{at}" for at in range(4)]
    assert rig.weigh(10, OLD[0], *crowd) == [60, 5, 5, 5, 5]
    assert rig.weights.share_of(crowd[0]) == 22, "5 of 60 are 21.3 of 256"
    assert rig.weights.share_of("new-later") == 22, "it will have no more than these"
    assert rig.weights.share_of(OLD[0]) == 256
    rig.weigh(9, OLD[0], crowd[0])
    assert rig.weights.share_of(crowd[0]) == 22, "an older round is weighed again by a worker that is behind"
    rig.weigh(11, OLD[0], crowd[0])
    assert rig.weights.share_of(crowd[0]) == SHARE, "the others are gone"


def test_newcomers_go_on_where_nobody_else_has_any_weight():
    rig = Rig(claimed=lambda entry: 0 if entry.startswith("old") else CLAIMED, is_bounded=True)
    for number in range(10):
        rig.set(number, *OLD)
    assert rig.weigh(10, *OLD, *NEW) == [0, 0, 0, 15, 15]


def test_audits_come_first():
    rig = Rig(claimed=lambda entry: 0 if entry.startswith(NEW[0]) else CLAIMED)
    for number in range(10):
        rig.set(number, *OLD)
    assert rig.weigh(10, *OLD, *NEW) == [60, 60, 60, 0, 15]


def test_open_rounds_follow_the_view_and_are_folded_again_when_a_set_before_them_changes():
    rig = Rig()
    for number in range(6):
        rig.set(number, *OLD)
    for number in range(6, 10):
        rig.set(number, *OLD, NEW[0], is_final=False)
    assert rig.weigh(10, *OLD, NEW[0]) == [60, 60, 60, 60], "proven, if these sets become final"
    rig.set(9, *OLD, NEW[0], is_final=False)
    assert not rig.fed
    rig.set(8, *OLD, is_final=False)
    assert rig.fed == [Reweighed(Round(10), 1.0)]
    assert rig.weigh(10, *OLD, NEW[0]) == [60, 60, 60, 15]
    rig.set(8, *OLD, NEW[0], is_final=False)
    assert len(rig.fed) == 2


def test_a_worker_that_is_far_behind_gets_the_weights_of_its_round():
    """After a start all final sets are known before the first of them is applied."""
    rig, early = Rig(), []
    for number in range(20):
        authors = OLD if number < 8 else (*OLD, NEW[0])
        early.append(rig.weigh(number, *authors))
        rig.set(number, *authors)
    assert [rig.weigh(at, *(OLD if at < 8 else (*OLD, NEW[0]))) for at in range(20)] == early
    assert 15 in early[8]
    for number in range(20, KEPT + 30):
        rig.set(number, *OLD)
    assert len(rig.weights._new) == KEPT


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_weights_depend_on_the_sets_before_the_round_and_on_nothing_else(data):
    """What the view had before, and what was already final, leave no trace."""
    everybody = (*OLD, *NEW)
    subset = st.sets(st.sampled_from(everybody), min_size=1).map(sorted)
    sets = data.draw(st.lists(subset, min_size=1, max_size=12))
    one, other = Rig(), Rig()
    for number, authors in enumerate(sets):
        one.set(number, *authors)
    final = data.draw(st.integers(0, len(sets)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(sets) - 1))
        other.set(at, *data.draw(subset), is_final=False)
        other.weigh(at, *everybody)
    for number, authors in enumerate(sets):
        other.set(number, *authors, is_final=number < final)
    asked = data.draw(subset)
    assert one.weigh(len(sets), *asked) == other.weigh(len(sets), *asked)
