"""What a member counts for: its vote, its weight, its Reductions, each in words, and nothing where it counts."""

from dataclasses import replace
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.member_standing import MOST, MemberStandings
from atoll.protocols.audits.shown_work import ShownWork
from atoll.protocols.audits.standing import judge
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.local.standing import Standing
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.daemon.audits.test_newcomer_weights import PROBATION, Rig
from tests.protocols.audits.test_standing import IDLE, history

OLD = ("a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7")


def standings(
    me="a1", sharers=None, distrusted=None, rounds=24, voters=OLD, tally=None, audits=True, share=256, liars=()
):
    judgement = judge(AuditSpec(), history(), rounds)
    return MemberStandings(
        me=me,
        finality=lambda: SimpleNamespace(voters=voters, tally=tally or Tally(), equivocators=liars),
        auditor=SimpleNamespace(
            judgement=judgement,
            sharers=sharers or {},
            parts_16={peer: 16 // many for peer, many in (sharers or {}).items()},
            made=5,
            adopted=7,
        )
        if audits
        else None,
        distrusted=lambda: distrusted or {},
        share_of=lambda peer: share if tally and tally.missing(peer) else 256,
    )


def test_who_does_no_work_has_no_weight_and_is_told_why():
    (idle, works) = standings().of(IDLE, "a3")
    assert (idle.weight_16, works.weight_16) == (0, 16)
    assert idle.shown < 3 < 8 < idle.usual
    assert works.shown > 3
    assert idle.why == (
        f"no weight: {idle.verdicts} verdicts of 7 members show {idle.shown:.1f} deviations of work,"
        f" {idle.usual:.1f} are usual, 3.0 would do"
    )
    assert works.why == ""
    assert standings(me=IDLE).trouble().startswith("this node's work has no weight: ")
    assert "; see what `atoll doctor` says" in standings(me=IDLE).trouble()
    assert standings(me="a3").trouble() == ""


def test_before_verdicts_say_anything_all_count():
    assert standings(rounds=3).of(IDLE)[0].weight_16 == 16
    assert standings(rounds=0).of("nobody") == [Standing(peer="nobody", verdicts=0, shown=0.0, usual=0.0)]


def test_of_two_histories_nothing_new_counts_and_all_read_why():
    known = standings(audits=False, liars=("a3",))
    (liar,) = known.of("a3")
    assert (liar.weight_16, liar.why.startswith("signed two histories (a copied home, ")) == (0, True)
    assert known.diminished(("a2", "a3")) == (liar,)


def test_a_run_without_audits_says_nothing_of_verdicts():
    assert standings(audits=False).of(IDLE) == [Standing(peer=IDLE)]


def test_copies_share_a_weight_and_are_no_trouble():
    shared = standings(me="a3", sharers={"a3": 2, "a4": 2})
    (copied,) = shared.of("a3")
    assert (copied.weight_16, copied.why) == (8, "a share of a weight: 2 members sent one payload")
    assert shared.trouble() == ""
    assert standings(sharers={IDLE: 2}).of(IDLE)[0].weight_16 == 0


def test_who_is_on_probation_or_distrusted_is_told_until_when():
    tally = Tally(8, 30, {"a1": 30, "a3": 5})
    (voter, young, silent) = standings(
        voters=("a1", "a2"), tally=tally, distrusted={"a2": 70}, audits=False
    ).of("a1", "a3", "a2")  # fmt: skip
    assert voter == Standing(peer="a1")
    assert (young.votes_in, young.why) == (3, "votes after 3 more final rounds with its work (probation)")
    assert silent.distrusted_until == 70
    assert silent.why == "no Reduction of it counts up to round 70"


def test_a_crowd_on_probation_hides_nobody_without_weight():
    crowd = {f"A{number}" for number in range(2 * MOST)}
    found = standings(tally=Tally(8, 30, {})).diminished({*crowd, IDLE})
    assert len(found) == MOST
    assert found[0].peer == IDLE
    assert standings().diminished({"a3", "a4"}) == ()


def test_who_votes_though_it_is_on_probation_is_told_what_its_work_weighs():
    """Where all that worked long are gone, those that worked most decide, and a share of their weight counts."""
    tally = Tally(8, 30, {"a1": 30, "a3": 5})
    (early,) = standings(voters=("a3",), tally=tally, audits=False, share=64).of("a3")
    assert (early.votes_in, early.weight_16) == (0, 4)
    assert early.why == "has 64/256 of its weight for 3 more final rounds with its work (probation)"


def test_many_copies_have_little_weight_and_not_none():
    assert standings(me="a3", sharers={"a3": 20}).of("a3")[0].weight_16 == 1
    assert standings(me="a3", sharers={"a3": 20}).trouble() == ""


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), max_size=24))
def test_what_is_said_of_a_weight_is_what_the_fold_gives(sets):
    """In the next round, if those work in it that worked in the newest final one."""
    rig = Rig(claimed=lambda entry: 16)
    tally, voters = Tally(PROBATION), ()
    for number, authors in enumerate(sets):
        rig.set(number, *sorted(authors))
        voters, tally = sorted(tally.proven(authors)), tally.after(authors)
        found = MemberStandings(
            me="a",
            finality=lambda now=(voters, tally): SimpleNamespace(voters=now[0], tally=now[1], equivocators=()),
            auditor=None,
            distrusted=dict,
            share_of=rig.weights.share_of,
        ).of(*sorted(authors))
        assert [each.weight_16 for each in found] == rig.weigh(number + 1, *sorted(authors))
        assert all(("of its weight" in each.why) == (each.weight_16 < 16) for each in found)


def test_who_has_a_share_of_its_weight_until_it_votes_is_told_so():
    tally = Tally(8, 30, {"a1": 30, "a3": 5})
    less = standings(me="a3", voters=("a1", "a2"), tally=tally, audits=False, share=4)
    (voter, young) = less.of("a1", "a3")
    assert (voter.weight_16, voter.why) == (16, "")
    assert (young.weight_16, young.votes_in) == (1, 3)
    assert young.why == (
        "votes after 3 more final rounds with its work, and has 4/256 of its weight until then (probation)"
    )
    assert less.trouble() == ""


def test_in_a_guarded_run_weight_and_vote_have_words_of_their_own():
    """Weight follows from the number of sets, the vote from verdicts as well."""
    tally = ShownWork(8, 30, {"a1": 30, "a2": 2, "a3": 5, IDLE: 30, "a4": 7}, shown=frozenset({"a1", "a2"}))
    rig = standings(me=IDLE, voters=("a1", "a2"), tally=tally)
    rig = replace(rig, share_of=lambda peer: 64 if peer in ("a2", "a3", "a4") else 256)
    (owner, young, last, idle) = rig.of("a2", "a3", "a4", IDLE)
    assert owner.why == "has 64/256 of its weight for 6 more final rounds with its work (probation)"
    assert young.why == (
        "votes after 3 more final rounds with its work, once verdicts of voters show it,"
        " and has 64/256 of its weight for 3 more final rounds with its work (probation)"
    )
    assert last.why.startswith("votes after 1 more final round with its work, once")
    assert idle.why.startswith("votes once verdicts of voters show enough of its work (probation); no weight: ")
    assert rig.trouble().startswith("this node's work has no weight: ")
