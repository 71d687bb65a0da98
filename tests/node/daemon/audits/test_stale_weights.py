"""What work of an older base weighs: laws of both published weights, whole numbers and sets in any order."""

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.daemon.audits.stale_weights import RarityWeights, by_age, by_rarity, share_of_age
from atoll.node.daemon.rounds.types import Reweighed
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import MAX_WEIGHT, Contribution, StaleContribution
from atoll.protocols.run.sections.variants.staleness import MAX_STALE

ALWAYS, SELDOM, NEW = "always", "seldom", "new"
MOST, CLAIMED = 8, 64
WEIGHTS = st.integers(0, MAX_WEIGHT)


def record(age=0, weight=CLAIMED):
    fields = (Round(70), digest(b"base"), digest(b"payload"), 1, 1, weight, 1.0)
    return StaleContribution(*fields, age=age) if age else Contribution(*fields)


def claimed(number, found):
    return {entry: each.weight for entry, _, each in found}


# --- FedBuff ----------------------------------------------------------------------------------


def test_fedbuffs_table_is_one_over_the_root():
    assert [share_of_age(age) for age in range(9)] == [256, 181, 147, 128, 114, 104, 96, 90, 85]
    assert all(abs(share_of_age(age) - 256 / (1 + age) ** 0.5) < 1 for age in range(MAX_STALE + 1))


@given(weight=WEIGHTS, age=st.integers(0, MAX_STALE - 1))
def test_older_work_weighs_no_more_than_newer_and_never_more_than_it_claims(weight, age):
    newer, older = (by_age(claimed, Round(70), [("e", "a", record(at, weight))])["e"] for at in (age, age + 1))
    assert min(1, weight) <= older <= newer <= weight
    assert isinstance(older, int)
    assert by_age(claimed, Round(70), [("e", "a", record(0, weight))]) == {"e": weight}


# --- FedFix -----------------------------------------------------------------------------------


def sets_of(period, rounds):
    """Final sets with one member that is in all of them, and one in every `period`-th."""
    return [frozenset({ALWAYS, SELDOM} if at % period == 0 else {ALWAYS}) for at in range(rounds)]


def test_fedfix_makes_up_for_how_seldom_a_member_is_in_time():
    sets = sets_of(4, 36)
    assert [by_rarity(CLAIMED, sets, who, MOST) for who in (ALWAYS, SELDOM)] == [7, 28]
    assert by_rarity(CLAIMED, sets_of(9, 36), SELDOM, MOST) == CLAIMED
    assert by_rarity(CLAIMED, sets_of(30, 60), SELDOM, MOST) == CLAIMED, "no more than it claims"


def test_an_identity_without_work_weighs_as_one_that_is_always_in_time():
    assert by_rarity(CLAIMED, sets_of(4, 36), NEW, MOST) == by_rarity(CLAIMED, sets_of(4, 36), ALWAYS, MOST)
    assert by_rarity(CLAIMED, [], NEW, MOST) == 7


def test_a_member_is_counted_from_its_first_set_on():
    sets = [frozenset({ALWAYS})] * 30 + [frozenset({ALWAYS, NEW})] * 6
    assert by_rarity(CLAIMED, sets, NEW, MOST) == by_rarity(CLAIMED, sets, ALWAYS, MOST)


@given(weight=WEIGHTS, named=st.lists(st.booleans(), max_size=40), at=st.integers(0, 39), most=st.integers(1, 64))
def test_who_is_in_one_more_set_weighs_no_more(weight, named, at, most):
    more = [is_in or (index == at and any(named[:index])) for index, is_in in enumerate(named)]
    seldom, often = (
        by_rarity(weight, [frozenset({"a"} if is_in else {"b"}) for is_in in each], "a", most)
        for each in (named, more)
    )
    assert min(1, weight) <= often <= seldom <= weight


class Rig:
    """Entries are `AUTHOR@ROUND`; every contribution claims CLAIMED."""

    def __init__(self):
        self.fed = []
        self.weights = RarityWeights(
            most=MOST,
            context=SimpleNamespace(now=lambda: 1.0),
            contributions=SimpleNamespace(find=lambda names: [(n, n.partition("@")[0], None) for n in names]),
            queue=SimpleNamespace(post=lambda event: event()),
            machines=SimpleNamespace(feed_round=self.fed.append),
            claimed=lambda number, found: dict.fromkeys((entry for entry, _, _ in found), CLAIMED),
        )

    def set(self, number, *authors, is_final=True):
        self.weights.on_set(Round(number), tuple(f"{author}@{number}" for author in authors), is_final)

    def weigh(self, number, *authors):
        found = [(f"{author}@{number}", author, None) for author in authors]
        return list(self.weights.weigh(Round(number), found).values())


def test_open_rounds_are_folded_again_when_a_set_before_them_changes():
    rig = Rig()
    for number in range(8):
        rig.set(number, ALWAYS, *([SELDOM] if number % 4 == 0 else []))
    rig.set(8, ALWAYS, is_final=False)
    assert rig.weigh(9, ALWAYS, SELDOM) == [7, 32]
    rig.set(8, ALWAYS, is_final=False)
    assert not rig.fed
    rig.set(8, ALWAYS, SELDOM, is_final=False)
    assert rig.fed == [Reweighed(Round(9), 1.0)]
    assert rig.weigh(9, ALWAYS, SELDOM) == [7, 21]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_weights_depend_on_the_sets_before_the_round_and_on_nothing_else(data):
    """What the view had before, and what was already final, leave no trace; so a restart finds the same."""
    subset = st.sets(st.sampled_from([ALWAYS, SELDOM, NEW]), min_size=1).map(sorted)
    sets = data.draw(st.lists(subset, min_size=1, max_size=12))
    one, other = Rig(), Rig()
    early = []
    for number, authors in enumerate(sets):
        early.append(one.weigh(number, *authors))
        one.set(number, *authors)
    assert [one.weigh(number, *authors) for number, authors in enumerate(sets)] == early
    final = data.draw(st.integers(0, len(sets)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(sets) - 1))
        other.set(at, *data.draw(subset), is_final=False)
        other.weigh(at, ALWAYS, SELDOM)
    for number, authors in enumerate(sets):
        other.set(number, *authors, is_final=number < final)
    assert one.weigh(len(sets), ALWAYS, SELDOM, NEW) == other.weigh(len(sets), ALWAYS, SELDOM, NEW)
