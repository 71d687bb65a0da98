"""Whom a trainer believes about its audits, and what it adopts."""

import pytest

from atoll.node.daemon.audits.adoption import (
    AGREED,
    LEAST_VERDICTS,
    REMEMBERED,
    TOLERANCE,
    Adoption,
    shows_work,
    vouches,
)
from atoll.protocols.audits.standing import Findings, Judgement
from atoll.protocols.ids import digest
from atoll.protocols.ledger.audit_claims import AuditFindings, audit_key, audit_seed
from atoll.protocols.ledger.records import MAX_EXCESS

ONE, TWO = "evaluator one", "evaluator two"
KEYS = [bytes([number]) * 8 for number in range(40)]


def found(*pairs):
    return AuditFindings(tuple(pairs))


def agreed(adoption, count, peer=ONE, first=0, live=()):
    """The peer was right so many times; its newest register. Others are live, and found nothing more."""
    said = found(*((key, 40) for key in KEYS[first : first + count]))
    for key in KEYS[first : first + count]:
        adoption.call([key])
        adoption.hear({**dict.fromkeys(live, found()), peer: said})
        adoption.measured(key, 40)
    return said


def test_an_evaluator_is_believed_after_three_equal_findings():
    adoption = Adoption()
    agreed(adoption, AGREED - 1)
    assert not adoption.believed
    assert not adoption.relieves
    said = agreed(adoption, 1, first=AGREED - 1)
    assert adoption.believed == [ONE]
    assert adoption.relieves
    adoption.call([KEYS[20]])
    assert adoption.find(KEYS[20]) is None
    adoption.hear({ONE: found(*said.found, (KEYS[20], 33))})
    assert adoption.find(KEYS[20]) == (ONE, 33)


def test_who_was_wrong_once_is_never_believed_again_and_others_begin_anew():
    adoption = Adoption()
    both = found(*((key, 40) for key in KEYS[:AGREED]))
    adoption.call(KEYS[: AGREED + 1])
    adoption.hear({ONE: both, TWO: both})
    for key in KEYS[:AGREED]:
        adoption.measured(key, 40 - TOLERANCE)
    assert adoption.believed == [ONE, TWO]
    lie = found(*both.found, (KEYS[AGREED], 40 + TOLERANCE + 1))
    adoption.hear({ONE: lie, TWO: both})
    adoption.measured(KEYS[AGREED], 40)
    assert list(adoption.liars) == [ONE]
    assert not adoption.believed, "another name of the liar could be as old"
    agreed(adoption, 2 * AGREED, ONE, first=20, live=(TWO,))
    assert not adoption.believed
    agreed(adoption, AGREED, TWO, first=10)
    assert not adoption.believed, "twice as many"
    agreed(adoption, AGREED, TWO, first=30)
    assert adoption.believed == [TWO]


def test_who_lies_before_it_is_believed_makes_nobody_begin_anew():
    adoption = Adoption()
    said = agreed(adoption, AGREED)
    adoption.call([KEYS[20]])
    adoption.hear({ONE: said, TWO: found((KEYS[20], 0))})
    adoption.measured(KEYS[20], 40)
    assert list(adoption.liars) == [TWO]
    assert adoption.believed == [ONE]


def test_a_finding_that_comes_after_the_verdict_was_published_shows_nothing():
    adoption = Adoption()
    adoption.call(KEYS[:AGREED])
    for key in KEYS[:AGREED]:
        adoption.measured(key, 40)
    adoption.publish()
    adoption.hear({ONE: found(*((key, 40) for key in KEYS[:AGREED]))})
    assert not adoption.believed


def test_a_liar_may_be_found_out_in_the_middle_of_its_register():
    adoption = Adoption()
    adoption.call(KEYS[:3])
    adoption.measured(KEYS[0], 40)
    adoption.measured(KEYS[1], 40)
    adoption.hear({ONE: found((KEYS[0], 0), (KEYS[1], 40), (KEYS[2], 40))})
    assert list(adoption.liars) == [ONE]
    assert not adoption.is_called_for


def test_a_finding_is_not_changed_later():
    adoption = Adoption()
    adoption.call([KEYS[0]])
    adoption.hear({ONE: found((KEYS[0], 0))})
    adoption.hear({ONE: found((KEYS[0], 40))})
    adoption.measured(KEYS[0], 40)
    assert list(adoption.liars) == [ONE]


def test_a_finding_about_what_nobody_called_for_is_none():
    adoption = Adoption()
    adoption.hear({ONE: found((KEYS[0], 40))})
    adoption.measured(KEYS[0], 40)
    assert adoption.is_called_for
    assert not adoption._agreed
    for number in range(REMEMBERED + 9):
        adoption.call([digest(bytes([number]))[:8]])
    assert len(adoption._called) == REMEMBERED


def test_where_two_that_are_believed_differ_the_trainer_measures():
    adoption = Adoption()
    adoption.call(KEYS)
    both = found(*((key, 40) for key in KEYS[:AGREED]))
    adoption.hear({ONE: both, TWO: both})
    for key in KEYS[:AGREED]:
        adoption.measured(key, 40)
    adoption.hear({ONE: found((KEYS[9], 40)), TWO: found((KEYS[9], 40 + TOLERANCE + 1))})
    assert adoption.find(KEYS[9]) == (ONE, -MAX_EXCESS)


def test_who_let_a_trainer_wait_in_vain_is_not_waited_for_until_it_finds_something():
    adoption = Adoption()
    said = agreed(adoption, AGREED)
    adoption.call(KEYS[20:22])
    adoption.miss([])
    assert adoption.relieves, "it was not waited for"
    adoption.miss([KEYS[20]])
    assert not adoption.relieves
    adoption.hear({ONE: found(*said.found, (KEYS[21], 40))})
    assert adoption.relieves
    adoption.hear({})
    assert not adoption.relieves
    assert not adoption.is_called_for


def judgement(*excesses, usual=64):
    """A member's verdicts, one of each auditor."""
    by_auditor = {f"a{number}": [(excess, 64)] for number, excess in enumerate(excesses)}
    return Judgement(frozenset(), {"member": Findings(by_auditor)}, usual * 256)


def test_findings_are_adopted_about_members_whose_verdicts_show_work():
    enough = [40] * LEAST_VERDICTS
    assert shows_work(judgement(*enough), "member")
    assert not shows_work(judgement(*enough), "a newcomer")
    assert not shows_work(judgement(*enough[1:]), "member")
    assert not shows_work(judgement(*[31] * LEAST_VERDICTS), "member"), "less than half of what is usual"
    assert not shows_work(judgement(*enough, usual=15), "member"), "where verdicts say nothing"


@pytest.mark.parametrize("usual", [16, 40, 64])
def test_the_lowest_findings_that_are_adopted_take_nobodys_weight(usual):
    told = Judgement(frozenset(), {}, usual * 256)
    least = min(excess for excess in range(-MAX_EXCESS, MAX_EXCESS + 1) if vouches(told, excess))
    for auditors in range(2, 12):
        for each in range(1, 40):
            lowest = Findings({f"a{number}": [(least, 64)] * each for number in range(auditors)})
            assert not lowest.speaks_against_work(usual * 256)


def test_names_and_seeds_of_audits():
    seed, entry = digest(b"seed"), digest(b"entry")
    assert audit_key(seed, entry) != audit_key(entry, seed)
    assert len(audit_key(seed, entry)) == 8
    assert 0 <= audit_seed(seed, entry) < 1 << 64
    assert audit_seed(seed, entry) != int.from_bytes(audit_key(seed, entry), "big")
