"""Weights where voters must have shown work: verdicts of members that decide, and of nobody else."""

from dataclasses import replace

import pytest

from atoll.protocols.audits import standing
from atoll.protocols.audits.standing import Findings, Named, audited_by, judge, verdicts_in, without_weight
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.records import MAX_EXCESS, Verdict
from atoll.protocols.run.sections.audits import AuditSpec
from tests.protocols.audits.test_shown_work import MEMBERS, NOISE, OWNER, Run

SPEC = AuditSpec(each=3, voters=True)


class Weighed(Run):
    """What a run's final sets give as weights."""

    def __init__(self, seed, **how):
        super().__init__(seed, **how)
        self.sets, self.deciders, self.gone, self.first_heard, self.fallen = {}, {}, [], {}, {}

    def count(self, authors, members, deciding):
        number = self.tally.rounds
        self.sets[number] = [Named(entry, peer, 64, one.payload, one.verdicts) for entry, peer, one in members]
        self.deciders[number] = frozenset(deciding)
        super().count(authors, members, deciding)
        found = judge(SPEC, self.sets, number + 1, self.deciders, owner=OWNER)
        self.gone.append(found.gone)
        for author in found.heard:
            self.first_heard.setdefault(author, number)
        for author in found.gone:
            self.fallen.setdefault(author, number)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("members", [3, 4])
@pytest.mark.parametrize("first", [0, 20])
def test_noise_that_is_most_of_a_set_falls_and_no_member_does(seed, members, first):
    """Five in six contributions are noise from round `first` on, and vouch for each other and against members."""
    run = Weighed(seed)
    for number in range(60):
        run.final(*MEMBERS[:members], *(NOISE if number >= first else ()))
    assert not frozenset().union(*run.gone) & {*MEMBERS}
    after = sorted(run.fallen.get(peer, 60) - run.first_heard[peer] for peer in NOISE)
    # A set of 23 has three verdicts of a decider for 22 others: it is a question of how often each is audited.
    assert after[10] <= (10 if first else 24)
    assert sum(len({*NOISE} - gone) for gone in run.gone[45:]) <= 4 * 15


def test_made_up_identities_would_take_the_weight_of_members_if_all_verdicts_counted():
    run = Weighed(1)
    for number in range(40):
        run.final(*MEMBERS[:4], *(NOISE if number >= 20 else ()))
    assert without_weight(SPEC, run.sets, 40) == {*MEMBERS[:4]}


def fallen(idle, *, deciders, members=4, rounds=12, lies=lambda auditor, about: None, each=3):
    """Who has no weight in each round of a run in which these members decide, and everybody does as it is told."""
    spec, sets, waiting, found = AuditSpec(each=each, voters=True), {}, {}, []
    for number in range(rounds):
        sets[number] = [
            Named(digest(f"{number} {peer}".encode()), peer, 64, digest(b"payload"), tuple(waiting.pop(peer, ())))
            for peer in MEMBERS[:members]
        ]
        author_of = {one.entry: one.author for one in sets[number]}
        for entry, drawn in audited_by(author_of, each).items():
            for about in drawn:
                lie = lies(author_of[entry], author_of[about])
                excess = lie if lie is not None else 0 if author_of[about] in idle else 48
                waiting.setdefault(author_of[entry], []).append(Verdict(about, excess))
        found.append(without_weight(spec, sets, number + 1, {at: frozenset(deciders) for at in sets}))
    return found


def test_an_owner_that_decides_alone_needs_no_second_auditor():
    found = fallen({MEMBERS[3]}, deciders={OWNER})
    assert found[8] == {MEMBERS[3]}
    assert frozenset().union(*found) == {MEMBERS[3]}
    assert not any(fallen({OWNER}, deciders={OWNER})), "nobody that decides audits it"


def test_of_several_deciders_one_that_lies_takes_nobodys_weight():
    """Here the only other one audits nobody, so the liar's are the only verdicts."""
    for number in (2, 3):
        lies = lambda auditor, about: -MAX_EXCESS if about == MEMBERS[3] else None  # noqa: E731
        deciders = {PeerId("silent"), *MEMBERS[:1]} if number == 2 else {*MEMBERS[:1], PeerId("a"), PeerId("b")}
        assert not any(fallen(set(), deciders=deciders, lies=lies))
    one_of_two = lambda auditor, about: -MAX_EXCESS if auditor == MEMBERS[1] else None  # noqa: E731
    assert not any(fallen(set(), deciders=MEMBERS[:2], lies=one_of_two))


def test_deciders_that_do_not_work_fall_too():
    found = fallen({MEMBERS[1]}, deciders=MEMBERS[:4])
    assert found[-1] == {MEMBERS[1]}


def test_weights_need_nothing_older_than_the_rounds_that_are_looked_back_at():
    run = Weighed(2)
    for number in range(60):
        run.final(*MEMBERS[:4], *(NOISE if number >= 20 else ()))
    for number in (45, 52, 60):
        first, last = number - SPEC.lag - SPEC.memory + 1, number - SPEC.lag
        recent = {at: run.sets[at] for at in range(first, last + 1)}
        whole = judge(SPEC, run.sets, number, run.deciders)
        assert whole.gone
        assert judge(SPEC, recent, number, {at: run.deciders[at] for at in recent}) == whole
        crowd = dict.fromkeys(range(first), frozenset(NOISE))
        assert judge(SPEC, run.sets, number, {**run.deciders, **crowd}) == whole


def test_a_verdict_counts_of_who_decided_after_the_set_that_it_is_about():
    run = Weighed(3)
    for _ in range(12):
        run.final(*MEMBERS[:4])
    nobody = dict.fromkeys(run.sets, frozenset())
    assert verdicts_in(run.sets, 0, 11, 3, nobody) == {}
    one = {**nobody, 5: frozenset({OWNER})}
    found = verdicts_in(run.sets, 0, 11, 3, one)
    assert {peer: each.count for peer, each in found.items()} == dict.fromkeys(MEMBERS[1:4], 1)
    assert all(each.by_auditor.keys() == {OWNER} for each in found.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("usual", [4.0, 2.9])
def test_two_liars_of_seven_take_nobodys_weight_and_let_no_noise_decide(seed, usual):
    """They begin with the run, find work in noise and in each other, and none in all others."""
    run = Weighed(seed, usual=usual, liars=MEMBERS[1:3])
    for _ in range(32):
        run.final(*MEMBERS[:7], NOISE[0])
    assert not frozenset().union(*run.gone) & {OWNER, *MEMBERS[3:7]}
    assert NOISE[0] not in run.decided
    assert NOISE[0] in run.fallen
    assert {*MEMBERS[3:7]} <= run.decided.keys()


@pytest.mark.parametrize("seed", [17, 19, 52, 87, 100, 136])
def test_two_liars_of_seven_take_nobodys_weight_where_verdicts_say_little(seed):
    """Seeds in which they did: the owner's, a member's by what is usual among liars, that of one poor auditor."""
    run = Weighed(seed, usual=2.0, liars=MEMBERS[1:3])
    for _ in range(34):
        run.final(*MEMBERS[:7], NOISE[0])
    assert not frozenset().union(*run.gone) & {OWNER, *MEMBERS[3:7]}


def test_one_poor_honest_auditor_beside_two_that_lie_takes_nobodys_weight():
    lies = {MEMBERS[1]: [(-90, 64)] * 4, MEMBERS[2]: [(-90, 64)] * 4}
    poor = Findings({**lies, MEMBERS[3]: [(-2, 64)], MEMBERS[4]: [(60, 64)] * 3}, by_count=True)
    usual = 45 * 256
    assert poor.speaks_against_work(usual)
    everybody = frozenset(MEMBERS[:7])
    assert not standing._falls(poor, usual, everybody)
    assert poor.between(usual, 2).by_auditor == {MEMBERS[3]: [(-2, 64)]}
    seldom = Findings({**lies, MEMBERS[3]: [(-2, 64)] * 4, MEMBERS[4]: [(0, 64)] * 4}, by_count=True)
    assert standing._falls(seldom, usual, everybody), "it looked often enough"
    vouched = {MEMBERS[1]: [(90, 64)] * 4, MEMBERS[2]: [(90, 64)] * 4}
    noise = Findings({**vouched, **{peer: [(0, 64)] * 4 for peer in MEMBERS[3:7]}}, by_count=True)
    assert standing._falls(noise, usual, everybody)


def test_while_few_decide_the_owners_verdicts_say_what_is_usual():
    verdicts = {MEMBERS[2]: [(96, 64)] * 4, OWNER: [(32, 64), (30, 64)]}
    liar = Findings(verdicts, by_count=True, trusted=OWNER)
    assert liar.score > liar.measured == 31 * 256
    assert replace(liar, trusted=None).measured == liar.score
    assert replace(liar, by_auditor={MEMBERS[2]: [(96, 64)]}).measured is None
    assert Findings().measured is None


def test_many_verdicts_of_one_auditor_outweigh_one_each_of_two():
    author, found = MEMBERS[3], {OWNER: [(80, 64)] * 6, MEMBERS[1]: [(-90, 64)], MEMBERS[2]: [(-80, 64)]}
    assert Findings(found, by_count=True).score > 0 > Findings(found).score
    few = {OWNER: [(-80, 64)] * 6, MEMBERS[1]: [(60, 64)], MEMBERS[2]: [(70, 64)]}
    assert Findings(few, by_count=True).score == Findings(few).score > 0, "nor does one alone take its weight"
    assert Findings(found, by_count=True).without(frozenset({author})).by_count


def test_while_few_decide_nobody_falls_against_the_owners_verdicts():
    lies = {MEMBERS[1]: [(-90, 64)] * 9, MEMBERS[2]: [(-80, 64)] * 9}
    trusting = Findings({**lies, OWNER: [(60, 64)]}, by_count=True, trusted=OWNER)
    assert trusting.may_fall(2)
    assert trusting.score > 0 > replace(trusting, trusted=None).score
    assert not replace(trusting, by_auditor=lies).may_fall(2), "the owner did not audit it"
    assert trusting.without(frozenset({MEMBERS[1]})).trusted == OWNER
    run = Weighed(1)
    for _ in range(12):
        run.final(*MEMBERS[:4])
    heard = lambda rounds, **how: judge(SPEC, run.sets, rounds, run.deciders, **how).heard.values()  # noqa: E731
    assert {each.trusted for each in heard(12, owner=OWNER)} == {OWNER}
    assert {each.trusted for each in heard(12, owner=MEMBERS[6])} == {None}
    assert {each.trusted for each in heard(18, owner=OWNER)} == {None}, "it was in no set for so long"


@pytest.mark.parametrize(
    ("deciders", "of_one", "of_another"),
    [(1, 2, 1), (2, 2, 2), (3, 2, 2), (5, 2, 2), (6, 4, 4), (7, 4, 4), (9, 6, 6), (30, 8, 8)],
)
def test_a_third_of_the_deciders_are_no_more_than_half_of_those_that_must_have_audited(
    deciders, of_one, of_another
):
    names = [PeerId(f"decider-{at}") for at in range(deciders)]
    least = [standing._least(who, {}, frozenset(names)) for who in (names[0], PeerId("another"))]
    assert least == [of_one, of_another]
