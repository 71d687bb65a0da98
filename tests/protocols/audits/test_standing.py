"""Weights from verdicts: who audits whom, what counts, who falls, who does not, and who returns."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.audits.copies import weights
from atoll.protocols.audits.standing import (
    DOUBT,
    ENOUGH,
    Findings,
    Named,
    audited_by,
    judge,
    verdicts_in,
    without_weight,
)
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.records import MAX_EXCESS, Verdict
from atoll.protocols.run.sections.audits import AuditSpec

SPEC = AuditSpec()
IDLE = PeerId("a0")


def names(count):
    return [digest(b"entry", bytes([number])) for number in range(count)]


def history(
    members=8, rounds=24, usual=4.0, idle=frozenset({IDLE}), seed=1, lies=lambda auditor, author: None,
    weight=lambda author: 64, works=lambda author, number: False, each=1,
):  # fmt: skip
    """Sets of rounds in which everybody audits what it drew, one round later.

    Excesses are `usual` standard deviations above nothing in the mean, nothing for idlers. `lies`: what an auditor
    says instead; `works`: rounds in which an idler works.
    """
    rng, sets, waiting = random.Random(seed), {}, {}
    for number in range(rounds):
        sets[number] = [
            Named(
                digest(f"{seed} {number} {member}".encode()),
                PeerId(f"a{member}"),
                weight(f"a{member}"),
                digest(f"payload {number} {member}".encode()),
                tuple(waiting.pop(f"a{member}", ())),
            )
            for member in range(members)
        ]
        by_entry = {each.entry: each for each in sets[number]}
        for one, other in ((one, other) for one, drawn in audited_by(by_entry, each).items() for other in drawn):
            auditor, about = by_entry[one].author, by_entry[other].author
            is_idle = about in idle and not works(about, number)
            share = weight(about) / 64
            found = lies(auditor, about)
            if found is None:
                found = round(16 * rng.gauss(0.0 if is_idle else usual * share, 1.0))
            waiting.setdefault(auditor, []).append(Verdict(other, max(-MAX_EXCESS, min(MAX_EXCESS, found))))
    return sets


def fallen(sets, spec=SPEC, rounds=range(24)):
    return {number: without_weight(spec, sets, number) for number in rounds}


@given(st.integers(0, 40), st.integers(1, 4), st.randoms())
def test_everybody_audits_as_many_others_as_it_is_audited_by(count, each, rng):
    entries = names(count)
    found = audited_by(entries, each)
    often = Counter(audited for drawn in found.values() for audited in drawn)
    fewer = min(each, count - 1)
    assert often == (dict.fromkeys(entries, fewer) if count > 1 else {})
    assert all(one not in drawn and len(set(drawn)) == fewer for one, drawn in found.items())
    rng.shuffle(entries)
    assert audited_by([*entries, *entries], each) == found, "neither order nor repetition matters"


def test_three_audits_a_round_tell_sooner_who_does_no_work():
    def first(each):
        spec = AuditSpec(each=each)
        found = [fallen(history(seed=seed, usual=2.9, each=each), spec) for seed in range(6)]
        assert all(set().union(*one.values()) <= {IDLE} for one in found), "nobody else at any time"
        return [next((number for number, gone in one.items() if gone), 24) for one in found]

    assert max(first(3)) <= 8
    assert sum(first(3)) < sum(first(1)) - 6 * 4


def test_a_verdict_beyond_the_audits_of_the_run_counts_nothing():
    sets = history(each=3)
    assert verdicts_in(sets, 0, 23, 1)["a3"].count * 2 < verdicts_in(sets, 0, 23, 3)["a3"].count


def test_one_more_contribution_changes_who_audits_whom():
    before, after = audited_by(names(20)), audited_by(names(21))
    assert sum(before[entry] == after[entry] for entry in before) < 10


def test_who_does_no_work_has_no_weight_within_ten_rounds():
    stays = soon = 0
    for seed in range(8):
        found = fallen(history(seed=seed))
        soon += {IDLE} in [found[number] for number in range(11)]
        assert set().union(*found.values()) == {IDLE}, "nobody else at any time"
        stays += sum(IDLE in found[number] for number in range(10, 24))
    # Chance may give nothing the look of work for a while: in one of these runs it does until round 23.
    assert soon >= 7
    assert stays > 0.75 * 8 * 14


@pytest.mark.parametrize("members", [3, 4, 5, 16])
def test_in_runs_of_all_sizes_the_idle_one_falls_and_nobody_else(members):
    found = fallen(history(members=members))
    assert {IDLE} in found.values()
    assert set().union(*found.values()) == {IDLE}


def test_of_two_members_none_falls():
    assert not any(fallen(history(members=2)).values())


def test_one_auditor_alone_takes_nobodys_weight():
    """It sees the victim in every round, and nobody else says anything of it."""
    sets = history(members=3, idle=frozenset())
    victim, liar = PeerId("a1"), PeerId("a2")
    entries = {each.entry: each.author for members in sets.values() for each in members}

    def said(each):
        about = [verdict for verdict in each.verdicts if entries[verdict.contribution] == victim]
        if about and each.author != liar:
            return replace_verdicts(each, [v for v in each.verdicts if v not in about])
        worst = {verdict: Verdict(verdict.contribution, -MAX_EXCESS) for verdict in about}
        return replace_verdicts(each, [worst.get(verdict, verdict) for verdict in each.verdicts])

    sets = {number: [said(each) for each in members] for number, members in sets.items()}
    assert verdicts_in(sets, 0, 23)[victim].by_auditor.keys() == {liar}
    assert not any(fallen(sets).values())


def replace_verdicts(each, verdicts):
    return each._replace(verdicts=tuple(verdicts))


def test_nobody_falls_where_audits_tell_nothing():
    """All score alike: a small model, or a text that everybody knows."""
    assert not any(fallen(history(usual=0.5)).values())
    assert not any(fallen(history(idle=frozenset(PeerId(f"a{n}") for n in range(5)))).values()), "idlers are most"


def unlike(usual, seed):
    """Sets of honest members whose verdicts are up to a third more or less than usual, in all rounds."""
    rng = random.Random(seed)
    share = {f"a{number}": rng.uniform(0.7, 1.3) for number in range(12)}

    def lies(auditor, author):
        return max(-MAX_EXCESS, min(MAX_EXCESS, round(16 * rng.gauss(usual * share[author], 1.0))))

    return history(members=12, usual=usual, each=3, seed=seed, idle=frozenset(), lies=lies)


@pytest.mark.parametrize("usual", [1.3, 2.0, 4.0])
def test_members_that_show_less_than_others_keep_their_weight(usual):
    for seed in range(8):
        assert not any(fallen(unlike(usual, seed), AuditSpec(each=3)).values())


def test_few_verdicts_are_enough_where_they_speak_clearly_against_work():
    """Those of a contribution that was sent before, for instance: each is the lowest there is."""
    sets = history(members=12, each=3, lies=lambda auditor, author: -MAX_EXCESS if author == IDLE else None)
    found = fallen(sets, AuditSpec(each=3))
    assert min(number for number, gone in found.items() if IDLE in gone) <= 5
    assert set().union(*found.values()) == {IDLE}


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-96, 96), st.integers(1, 64)), min_size=1, max_size=30)
)
def test_the_rule_is_the_sequential_test_of_the_usual_score_against_none(said):
    found = Findings()
    for auditor, excess, weight in said:
        found.by_auditor.setdefault(PeerId(auditor), []).append((excess, weight))
    for usual in (-500, 0, 900, 8000, 20000):
        shown = found.score * len(said) ** 0.5 / 4096
        expected = 0.75 * usual * sum(weight * weight for _, _, weight in said) ** 0.5 / (64 * 4096)
        assert found.shown / 4096 == pytest.approx(shown, abs=1e-2)
        evidence = expected * shown - expected**2 / 2
        if expected > 0 and abs(evidence + DOUBT) > 0.5 and abs(shown - ENOUGH) > 0.1:
            assert found.speaks_against_work(usual) == (shown < ENOUGH and evidence < -DOUBT)
        elif expected <= 0:
            assert not found.speaks_against_work(usual)


def test_who_works_again_gets_its_weight_back():
    returned = history(rounds=60, works=lambda author, number: number >= 20)
    found = fallen(returned, rounds=range(60))
    assert found[20] == {IDLE}
    assert not found[59]


def test_who_stops_working_loses_its_weight_though_it_worked_for_long():
    sets = history(rounds=60, works=lambda author, number: number < 40)
    found = fallen(sets, AuditSpec(memory=8), rounds=range(60))
    assert not any(found[number] for number in range(41))
    assert {IDLE} in [found[number] for number in range(45, 56)]


def test_who_claims_little_work_is_not_expected_to_show_as_much():
    slow = PeerId("a3")
    for seed in range(5):
        sets = history(rounds=60, weight=lambda author: 16 if author == slow else 64, seed=seed)
        assert set().union(*fallen(sets, rounds=range(60)).values()) == {IDLE}


def test_liars_below_a_third_take_nobodys_weight_and_keep_none():
    liars = {PeerId("a0"), PeerId("a1"), PeerId("a2")}

    def lies(auditor, author):
        if auditor in liars:
            return MAX_EXCESS if author in liars else -MAX_EXCESS
        return None

    for seed in range(5):
        sets = history(members=10, rounds=40, idle=frozenset(liars), lies=lies, seed=seed)
        found = fallen(sets, rounds=range(40))
        assert set().union(*found.values()) <= liars
        assert found[39] == liars


def test_a_verdict_counts_only_where_it_was_drawn_and_once():
    sets = history(members=4, rounds=3, idle=frozenset())
    mine = sets[1][0]
    (drawn,) = mine.verdicts
    others = [each.entry for each in sets[0] if each.entry not in (drawn.contribution, mine.entry)]
    more = [Verdict(entry, 50) for entry in others] + [Verdict(drawn.contribution, 90), Verdict(b"?" * 32, 7)]
    sets[1][0] = replace_verdicts(mine, (*mine.verdicts, *more))
    said = [
        excess for each in verdicts_in(sets, 0, 2).values() for excess, _ in each.by_auditor.get(mine.author, ())
    ]
    later = [verdict.excess for each in sets[2] if each.author == mine.author for verdict in each.verdicts]
    assert sorted(said) == sorted([drawn.excess, *later])


def test_weights_follow_from_sets_that_are_old_enough_and_not_too_old():
    sets = history(rounds=60)
    for number in (12, 30, 50):
        last = number - SPEC.lag
        used = {at: members for at, members in sets.items() if last - SPEC.memory < at <= last}
        assert without_weight(SPEC, sets, number) == without_weight(SPEC, used, number)
        del used[last]
        assert verdicts_in(sets, 0, last) != verdicts_in(used, 0, last)


def test_a_longer_lag_gives_the_same_weights_later():
    sets = history(rounds=30)
    soon, late = AuditSpec(lag=1), AuditSpec(lag=4)
    found = [without_weight(soon, sets, number) for number in range(27)]
    assert [without_weight(late, sets, number + 3) for number in range(27)] == found
    assert len(set(found)) > 1


@given(st.randoms(), st.integers(4, 20))
def test_the_order_of_members_changes_nothing(rng, number):
    sets = history(rounds=20)
    mixed = {at: rng.sample(members, len(members)) for at, members in sets.items()}
    assert without_weight(SPEC, mixed, number) == without_weight(SPEC, sets, number)


def test_copies_share_one_weight():
    members = history(rounds=1)[0]
    members[3] = members[3]._replace(payload=members[5].payload)
    members[4] = members[4]._replace(payload=members[5].payload, weight=255)
    found = weights(members, frozenset({PeerId("a1")}))
    assert [found[each.entry] for each in members] == [64, 0, 64, 21, 85, 21, 64, 64]
    alone = weights(members, frozenset({PeerId("a3"), PeerId("a4")}))
    assert alone[members[5].entry] == 64, "a copy without weight takes nothing from the original"


def group(claims):
    """Contributions with one payload."""
    entries = (digest(b"copy", number.to_bytes(2, "big")) for number in range(len(claims)))
    return [
        Named(entry, PeerId(f"c{number}"), claim, digest(b"payload"), ())
        for number, (entry, claim) in enumerate(zip(entries, claims, strict=True))
    ]


@pytest.mark.parametrize(("claim", "left"), [(1, 64), (16, 49)])
@pytest.mark.parametrize("copies", [16, 64, 200])
def test_made_up_copies_take_nothing_from_a_payload(copies, claim, left):
    """64 of them left nothing of an honest one, each for a record of 250 bytes."""
    members = group([64] + [claim] * copies)
    found = weights(members, frozenset(), by_payload=True)
    assert sum(found.values()) == 64
    assert found[members[0].entry] >= left - 1
    assert sum(weights(members, frozenset()).values()) < 32, "the rule of runs without the key"


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.sets(st.integers(0, 39)), st.randoms())
def test_a_payload_has_the_largest_weight_of_those_that_name_it(claims, fallen, rng):
    members, gone = group(claims), frozenset(PeerId(f"c{number}") for number in fallen)
    found = weights(members, gone, by_payload=True)
    counted = [each for each in members if each.author not in gone]
    assert sum(found.values()) == max((each.weight for each in counted), default=0)
    for each in counted:
        assert each.weight // len(counted) <= found[each.entry] <= each.weight, "no less than by the old rule"
    assert all(found[each.entry] == 0 for each in members if each.author in gone)
    assert weights(rng.sample(members, len(members)), gone, by_payload=True) == found


def test_equal_copies_have_equal_parts_and_others_are_untouched():
    members = [*group([64, 64, 64, 64]), *history(rounds=1)[0]]
    found = weights(members, frozenset({IDLE}), by_payload=True)
    assert [found[each.entry] for each in members] == [16] * 4 + [0] + [64] * 7
    alone = history(rounds=1)[0]
    assert weights(alone, frozenset({IDLE}), by_payload=True) == weights(alone, frozenset({IDLE}))


def test_the_rule_counts_no_more_audits_than_the_run_has():
    sets = history(each=3)
    for each in (1, 3):
        (last, memory) = (23 - SPEC.lag, SPEC.memory)
        found = judge(AuditSpec(each=each), sets, 23).heard["a3"].count
        heard = verdicts_in(sets, last - memory + 1, last, each)["a3"]
        assert found <= heard.count
        assert found >= heard.without(frozenset({IDLE})).count
