"""The work of an excluded member is taken out of final rounds: by whom, in which round, and exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus import excision
from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.types import (
    Append,
    CheckDone,
    CheckRound,
    CorrectionsHeld,
    EntrySeen,
    Excision,
    FinalityTick,
    FinalizeRound,
    RoundClosed,
)
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.ballots import quorum
from atoll.protocols.ledger.choices import Choice, choice_of
from atoll.protocols.ledger.records import (
    Ballot,
    Contribution,
    Epoch,
    Excise,
    Excised,
    ExcisingProposal,
    Exclude,
    ExcludingProposal,
    Proposal,
    Vote,
)
from tests.node.daemon.consensus.test_exclusion import OWNER, Deciders
from tests.node.daemon.consensus.test_vote_rule import (
    Voter,
    named,
    peers,
    prepared_again,
    propose,
    state_of,
    votes_in_turn,
)

WINDOW = 4


def update(number, names):
    """U of a round: any function of its set, and no sum over its members."""
    return int.from_bytes(digest(bytes([number]), *sorted(names))[:6], "little") if names else 0


class Run(Deciders):
    """Deciders of a run whose work can be taken out; what they make final, and the fold of it."""

    def __init__(self, count, me=0, window=WINDOW):
        super().__init__(count, me)
        self.state = replace(self.state, excise_rounds=window)
        self.finals: list[FinalizeRound] = []
        self.heard: list[tuple] = []
        self.authors: dict[bytes, PeerId] = {}

    def hear(self, author, body):
        name = digest(author.encode(), repr(body).encode())
        self.heard.append((author, body))
        if isinstance(body, Contribution):
            self.authors[name] = author
        self.state, actions = finality.step(self.state, EntrySeen(name, author, body))
        self.finals += [action for action in actions if isinstance(action, FinalizeRound)]
        return name

    def excise(self, peer, *by, since=0):
        for author in by:
            self.hear(author, Excise(self.state.deciding, peer, "", Round(since)))
        return self

    def decide(self, *authors, excised=()):
        """As `Deciders.decide`; the final proposal takes out what `excised` names, and then excludes nobody."""
        number, voters = Round(self.number), self.state.voters
        base = Contribution(number, digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
        names = tuple(sorted(self.hear(author, base) for author in authors or self.peers))
        fields = (number, Ballot(0, voters[0]), names, digest(b"state"))
        excluded = () if excised else outvoted(self.state, names)
        plain = ExcludingProposal(*fields, excluded) if excluded else Proposal(*fields)
        name = self.hear(voters[0], ExcisingProposal(*fields, excised) if excised else plain)
        for voter in voters:
            self.hear(voter, Vote(number, Ballot(0, voters[0]), name))
        self.number += 1
        assert self.state.deciding == self.number
        return self

    def theta(self):
        total = 0
        for final in self.finals:
            total += update(final.round, final.contributions)
            for one in final.corrections:
                total += update(one.round, one.after) - update(one.round, one.before)
        return total


def without(run, gone):
    """The fold of the run's final sets, without the work of these authors in these rounds."""
    total = 0
    for final in run.finals:
        names = [name for name in final.contributions if final.round not in gone.get(run.authors[name], ())]
        total += update(final.round, names)
    return total


# --- the law ----------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_excising_gives_the_fold_of_the_sets_without_that_author_on_every_node(data):
    """Whoever is excised, one by one or together: also in rounds that were corrected before."""
    run = Run(data.draw(st.integers(2, 6)))
    gone: dict[PeerId, range] = {}
    for _ in range(data.draw(st.integers(1, 9))):
        wanted = data.draw(st.sets(st.sampled_from(run.peers[1:]), max_size=2)) - gone.keys()
        number = run.number
        for peer in sorted(wanted):
            run.excise(peer, OWNER, since=data.draw(st.integers(0, number)))
        due = excision.due(run.state)
        chosen = tuple(one for one in due if data.draw(st.booleans()))
        there = [peer for peer in run.peers[1:] if data.draw(st.booleans())]
        run.decide(run.peers[0], *there, excised=chosen)
        gone |= {one.peer: range(one.since, number) for one in chosen}
        assert all(one.since >= number - WINDOW for one in chosen)
    assert run.theta() == without(run, gone)
    # A restart, or a newcomer, has each feed as a whole: another order, and no record that came in between.
    late = Run(len(run.peers))
    for author in data.draw(st.permutations([OWNER, *run.peers])):
        for who, body in run.heard:
            if who == author:
                late.hear(author, body)
    assert late.finals == run.finals
    assert late.state.window == run.state.window
    assert late.state.excised == run.state.excised
    # Nobody needs the records to follow what is final: the proposals say it.
    blind = Run(len(run.peers))
    for who, body in run.heard:
        if not isinstance(body, Excise):
            blind.hear(who, body)
    assert blind.finals == run.finals


def test_work_before_the_window_stays_and_what_others_did_is_folded_as_if_it_had_been_alone():
    run = Run(3)
    a, b, c = run.peers
    for _ in range(6):
        run.decide()
    run.excise(c, OWNER)
    (one,) = excision.due(run.state)
    assert one == Excised(c, Round(7 - WINDOW))
    run.decide(a, b, excised=(one,))
    assert run.theta() == without(run, {c: range(3, 7)})
    assert [(each.round, len(each.before), len(each.after)) for each in run.finals[-1].corrections] == [
        (number, 3, 2) for number in (3, 4, 5, 6)
    ]


def test_who_worked_in_none_of_these_rounds_needs_no_correction_and_nobody_is_excised_twice():
    run = Run(3)
    a, b, c = run.peers
    run.decide(a, b).excise(c, OWNER)
    assert excision.due(run.state) == ()
    run.decide()  # it may be that a quorum lacked the record
    (one,) = excision.due(run.state)
    run.decide(a, b, excised=(one,))
    assert excision.due(run.state) == ()
    assert run.state.excised == {c: Excision(3, 1)}


def test_the_window_is_bounded_by_what_one_request_to_a_worker_can_name(monkeypatch):
    monkeypatch.setattr(excision, "MAX_CORRECTED", 7)
    run = Run(3, window=100)
    for _ in range(6):
        run.decide()
    assert {*run.state.window} == {4, 5, 6}, "two rounds of three, and the newest"
    run.excise(run.peers[2], OWNER)
    assert excision.due(run.state) == (Excised(run.peers[2], Round(4)),)


def test_a_run_without_the_setting_keeps_nothing_and_excises_nobody():
    run = Run(3, window=0)
    run.decide().excise(run.peers[2], OWNER)
    assert excision.due(run.state) == ()
    assert run.state.window == {}


# --- who wants it -----------------------------------------------------------------------------------


def test_two_thirds_of_the_voters_want_it_and_fewer_do_not():
    run = Run(4)
    a, b, c, d = run.peers
    run.excise(d, a, b).decide()
    assert run.out == {}
    run.hear(c, Exclude(Round(1), d, ""))
    assert run.decide().out == {d: 3}
    assert excision.wanted(run.state) == {}, "the third only wants no more of its work"
    run.excise(d, c)
    run.decide(a, b, c)
    assert excision.wanted(run.state) == {d: 0}
    assert [one.peer for one in excision.due(run.state)] == [d]


def test_the_votes_excise_from_the_first_round_on_that_enough_of_them_want():
    run = Run(4)
    a, b, c, d = run.peers
    run.decide().decide().decide()
    run.excise(d, a, since=0).excise(d, b, since=2).excise(d, c, since=3).decide()
    assert excision.wanted(run.state) == {d: 3}


def test_the_votes_of_a_proven_equivocator_take_nobodys_work_out():
    """Nodes hold other votes of it, and would want other corrections for as long as it is a voter."""
    run = Run(4)
    a, b, c, d = run.peers
    run.excise(d, a, b, c).decide().decide(a, b, c)
    assert excision.wanted(run.state) == {d: 0}
    run.state = replace(run.state, equivocators=frozenset({c}))
    assert excision.wanted(run.state) == {}


def test_the_round_that_a_correction_began_with_is_known_when_the_votes_no_longer_count():
    run = Run(4)
    a, b, c, d = run.peers
    run.excise(d, a, b, c).decide()
    (one,) = excision.due(run.state)
    run.decide(a, b, c, excised=(one,)).decide(a)
    assert excision.wanted(run.state) == {}
    assert run.state.excised == {d: Excision(2, 1)}


@given(count=st.integers(3, 9), data=st.data())
@settings(max_examples=40, deadline=None)
def test_fewer_than_a_third_excise_nobody(count, data):
    run = Run(count)
    liars = run.peers[: (count - 1) // 3]
    for liar in liars:
        for peer in data.draw(st.lists(st.sampled_from(run.peers), max_size=6)):
            run.excise(peer, liar)
    for _ in range(3):
        left_out = data.draw(st.sets(st.sampled_from(run.peers[len(liars) :]), max_size=(count - 1) // 2))
        run.decide(*sorted({*run.peers} - left_out))
        assert excision.due(run.state) == ()


# --- what gets votes --------------------------------------------------------------------------------


class Judge(Voter):
    """A voter of round 1 that knows what counted in round 0, and computes what it is asked to."""

    def __init__(self, deciders, me):
        super().__init__(deciders, me)
        before = {digest(b"before", peer.encode()): peer for peer in deciders}
        self.state = replace(self.state, excise_rounds=WINDOW, window={0: before})

    def feed(self, *events):
        for event in events:
            self.state, actions = finality.step(self.state, event)
            self.log += actions
            for action in actions:
                if isinstance(action, CheckRound):
                    found = corrected(action.contributions, action.excised)
                    self.feed(CheckDone(action.round, action.contributions, found, action.excised))
                elif isinstance(action, Append):
                    self.hear(self.me, action.body)
        return self

    def wants(self, peer):
        body = Excise(Round(1), peer, "noise", Round(0))
        return self.feed(EntrySeen(digest(b"excise", peer.encode()), OWNER, body))

    def proposed(self):
        return [x.body for x in self.log if isinstance(x, Append) and isinstance(x.body, Proposal)]


def corrected(names, excised):
    return digest(*names, *(one.peer.encode() for one in excised)) if excised else state_of(names)


def excising(names, owner, *gone, attempt=0):
    excised = tuple(Excised(peer, Round(0)) for peer in sorted(gone))
    return ExcisingProposal(Round(1), Ballot(attempt, owner), names, corrected(names, excised), excised)


def test_a_correction_without_a_reason_gets_no_vote_and_one_with_a_reason_does():
    a, b, c, d = deciders = peers(4)
    node = Judge(deciders, b).close(*deciders)
    node.hear(a, excising(named(*deciders), a, d))
    assert node.votes() == []
    node.wants(d)
    assert node.votes() == [], "the set still has its work"
    node = Judge(deciders, b).wants(d).close(a, b, c)
    node.hear(a, excising(named(a, b, c), a, c, d))
    assert node.votes() == [], "one of the two is not wanted"
    node = Judge(deciders, b).wants(d).close(a, b, c)
    node.hear(a, excising(named(a, b, c), a, d))
    (check,) = node.find(CheckRound)
    assert [(one.round, len(one.before), len(one.after)) for one in check.corrections] == [(0, 4, 3)]
    assert len(node.votes()) == 1


def test_a_set_without_the_correction_gets_votes_too():
    """Its proposer may lack the record, or a payload: that stops nothing."""
    a, b, c, d = deciders = peers(4)
    node = Judge(deciders, b).wants(d).close(a, b, c)
    node.hear(a, propose(named(a, b, c), a))
    assert len(node.votes()) == 1


def test_another_state_than_the_own_correction_gives_gets_no_vote():
    a, b, c, d = deciders = peers(4)
    node = Judge(deciders, b).wants(d).close(a, b, c)
    node.hear(a, replace(excising(named(a, b, c), a, d), state=state_of(named(a, b, c))))
    assert node.votes() == []


def test_who_has_all_payloads_proposes_the_correction_and_who_lacks_one_proposes_without():
    a, b, c, d = deciders = peers(4)
    node = Judge(deciders, a).wants(d)
    node.feed(CorrectionsHeld(frozenset({d}))).close(a, b, c)
    assert node.proposed() == [excising(named(a, b, c), a, d)]
    node = Judge(deciders, a).wants(d).close(a, b, c)
    assert node.proposed() == [propose(named(a, b, c), a)]


def test_a_correction_that_may_be_final_is_repeated_and_voted_for_without_a_reason():
    """Two of four voted for it, and two have not promised: a quorum may have made it final."""
    a, b, c, d = deciders = peers(4)
    first, again = excising(named(*deciders), a, c), excising(named(*deciders), b, c, attempt=1)
    # The same contributions with another correction are another state: that would be a second final one.
    assert votes_in_turn(Judge(deciders, d), first, propose(named(*deciders), b, 1), *deciders) == []
    assert votes_in_turn(Judge(deciders, d), first, again, *deciders) == [Ballot(1, b)]


def test_who_is_bound_to_a_correction_proposes_it_again():
    a, b, c, d = deciders = peers(4)
    node = Judge(deciders, b)
    ballot = prepared_again(node, excising(named(*deciders), a, d), a, c, *deciders)
    assert node.proposed() == [excising(named(*deciders), b, d, attempt=ballot.attempt)]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_an_epoch_takes_out_only_what_the_epoch_before_had_a_reason_for(is_wanted):
    """One voter of the epoch before proposed it and voted for that: it may be a liar."""
    a, _, c, d = deciders = peers(4)
    node = Judge(deciders, d)
    name = node.hear(a, excising(named(a, d), a, c))
    node.hear(a, Vote(Round(1), Ballot(0, a), name))
    node = node.wants(c) if is_wanted else node
    node.feed(EntrySeen(digest(b"epoch"), d, Epoch(Round(1), b"", (d,))), FinalityTick(1.0)).close(a, d)
    (final,) = node.find(FinalizeRound)
    assert [one.round for one in final.corrections] == ([0] if is_wanted else [])


def test_a_quorum_is_needed_for_one_choice_not_for_one_set():
    assert quorum(4) == 3
    a, b, c, d = deciders = peers(4)
    one, other = excising(named(a, b, c), a, d), propose(named(a, b, c), a)
    assert choice_of(one) != choice_of(other) == Choice(named(a, b, c))
    node = Judge(deciders, b)
    node.hear(a, one)
    node.feed(RoundClosed(Round(1), named(a, b, c)), CheckDone(Round(1), named(a, b, c), other.state))
    assert node.state.checked == {Choice(named(a, b, c)): other.state}
