"""A final proposal excludes, on all nodes alike: whatever votes they have, and whoever signed two histories.

Who proposes and who votes for it count the votes; who follows what is final counts none.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.types import (
    Append,
    CorrectionsHeld,
    EntrySeen,
    EquivocatorsSeen,
    FinalityTick,
    FinalizeRound,
    SummaryMade,
)
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.choices import Choice, choice_of
from atoll.protocols.ledger.records import (
    MAX_EXCLUDED,
    Ballot,
    Contribution,
    Epoch,
    ExcisingProposal,
    Exclude,
    ExcludingProposal,
    Prepare,
    Promise,
    Proposal,
    SummaryProposal,
    Vote,
    epoch_id,
)
from tests.node.daemon.consensus.test_excision import Judge
from tests.node.daemon.consensus.test_vote_rule import (
    RUN,
    Voter,
    named,
    peers,
    prepared_again,
    propose,
    state_of,
    voted_for,
    votes_in_turn,
)


def against(peer, *by, first=1):
    """The votes of these against a member."""
    body = Exclude(Round(first), peer, "")
    return [EntrySeen(digest(b"against", author.encode(), peer.encode()), author, body) for author in by]


def excluding(names, owner, *gone, attempt=0):
    gone = tuple(sorted(gone))
    return ExcludingProposal(Round(1), Ballot(attempt, owner), names, state_of(names), gone)


def proposed(node):
    return [x.body for x in node.log if isinstance(x, Append) and isinstance(x.body, Proposal)]


def make_final(node, body, *by):
    """The proposal, and the votes of these for it."""
    voted_for(node, body, *by)
    return node


# --- what is final excludes -------------------------------------------------------------------------


@pytest.mark.parametrize("knows", [0, 2, 3])
def test_what_is_final_excludes_whatever_votes_a_node_has(knows):
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).feed(*against(d, *deciders[:knows]))
    make_final(node, excluding(named(*deciders), a, d), a, b, c)
    assert len(node.find(FinalizeRound)) == 1
    assert node.state.epochs.voted_out == {d: 2}
    assert (node.state.epochs.excluded_from(1), node.state.epochs.excluded_from(2)) == (frozenset(), {d})
    assert {*node.state.voters} == {*deciders}, "its set counts with all of its authors"


def test_votes_alone_exclude_nobody_when_the_final_proposal_names_nobody():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).feed(*against(d, a, b, c))
    make_final(node, propose(named(*deciders), a), a, b, c)
    assert node.state.epochs.voted_out == {}


def test_the_first_final_proposal_counts():
    a, b, c, d = deciders = peers(4)
    node = make_final(Voter(deciders, d), excluding(named(*deciders), a, d), a, b, c)
    names = []
    for peer in deciders:
        names.append(digest(b"second", peer.encode()))
        body = Contribution(Round(2), digest(b"base"), digest(peer.encode()), 1, 1, 64, 1.0)
        node.feed(EntrySeen(names[-1], peer, body))
    owner = node.state.voters[0]
    again = ExcludingProposal(Round(2), Ballot(0, owner), tuple(sorted(names)), digest(b"state"), (d,))
    make_final(node, again, a, b, c)
    assert node.state.deciding == 3
    assert node.state.epochs.voted_out == {d: 2}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_all_nodes_exclude_alike_in_whatever_order_votes_twins_proofs_and_ballots_come(data):
    """C signed two histories. Each node holds one, and gets what the final set names of the other by its name.

    The audit's case (exclusion_votes.py) is one of these: A and B vote, and C does in one history only.
    """
    a, b, c, d = deciders = peers(4)
    for_d = {peer: data.draw(st.booleans()) for peer in (a, b, d)}
    twin_of_c = data.draw(st.sampled_from([0, 1]))
    gone = data.draw(st.sampled_from([(), (d,), (c,), tuple(sorted((c, d)))]))
    names = tuple(digest(b"work", peer.encode()) for peer in deciders)
    twin = digest(b"work of the other history")
    final = tuple(sorted(names))
    ballot = Ballot(0, a)
    fields = (Round(1), ballot, final, digest(b"state"))
    proposal = ExcludingProposal(*fields, gone) if gone else Proposal(*fields)
    found = []
    for holds in (0, 1):
        # Each feed in order; the proof closes C's, and what it misses comes by name.
        work = [Contribution(Round(1), digest(b"base"), digest(peer.encode()), 1, 1, 64, 1.0) for peer in deciders]
        feeds = {peer: [*(against(d, peer) if for_d.get(peer) and peer != d else [])] for peer in deciders}
        for peer, name, body in zip(deciders, names, work, strict=True):
            if peer != c or holds == 0:
                feeds[peer].append(EntrySeen(name, peer, body))
        if holds == twin_of_c:
            feeds[c][:0] = against(d, c)
        proof = EquivocatorsSeen(frozenset({c}))
        if holds:
            feeds[c] += [EntrySeen(twin, c, work[2]), proof, EntrySeen(names[2], c, work[2], is_orphan=True)]
        else:
            feeds[c].append(proof)
        feeds[a].append(EntrySeen(digest(b"proposal"), a, proposal))
        vote = Vote(Round(1), ballot, digest(b"proposal"))
        for voter in (a, b, d):
            feeds[voter].append(EntrySeen(digest(b"vote", voter.encode()), voter, vote))
        order = data.draw(st.permutations([peer for peer, feed in feeds.items() for _ in feed]))
        start = finality.begin(RUN, d, 8, a)
        state = replace(start, last_final=0, applied=0, voters=deciders)
        for peer in order:
            state, _ = finality.step(state, feeds[peer].pop(0))
        assert state.deciding == 2
        found.append((state.epochs.voted_out, state.epochs.excluded_from(2), state.voters))
    assert found[0] == found[1]
    assert found[0][0] == dict.fromkeys(gone, 2)


# --- what gets votes --------------------------------------------------------------------------------


def test_an_exclusion_gets_a_vote_only_where_the_votes_for_it_are_counted():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).feed(*against(d, a, b)).close(*deciders)
    node.hear(a, excluding(named(*deciders), a, d))
    assert node.votes() == []
    node.feed(*against(d, c))
    assert len(node.votes()) == 1, "the missing vote came"
    node = Voter(deciders, b).feed(*against(d, a, b, c)).close(*deciders)
    node.hear(a, excluding(named(*deciders), a, c, d))
    assert node.votes() == [], "nobody voted against c"


def test_a_set_that_excludes_nobody_gets_votes_too():
    """Its proposer may lack a vote: that stops nothing, and the next honest owner excludes."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).feed(*against(d, a, b, c)).close(*deciders)
    node.hear(a, propose(named(*deciders), a))
    assert len(node.votes()) == 1


def test_the_votes_of_a_proven_equivocator_count_on_no_node():
    """Nodes hold different votes of it: its sets would lose ballots for ever."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).feed(*against(d, a, b, c))
    assert outvoted(node.state, named(*deciders)) == (d,)
    node.feed(EquivocatorsSeen(frozenset({c}))).close(*deciders)
    assert outvoted(node.state, named(*deciders)) == ()
    node.hear(a, excluding(named(*deciders), a, d))
    assert node.votes() == []


def test_nobody_is_excluded_by_a_set_that_lacks_its_work():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).feed(*against(d, a, b, c)).close(a, b, c)
    node.hear(a, excluding(named(a, b, c), a, d))
    assert node.votes() == []


def test_the_votes_are_those_of_the_voters_that_the_set_makes():
    """One that decides alone would else exclude whoever comes back, by its own vote."""
    a, b, c, d = peers(4)
    node = Voter((a, b, c, d), a).feed(*against(b, a))
    node.state = replace(node.state, voters=(a,), decided={})
    assert outvoted(node.state, named(a, b)) == ()
    assert outvoted(node.state, named(a, b, c)) == ()
    node.feed(*against(b, c))
    assert outvoted(node.state, named(a, b, c)) == (b,)


# --- who proposes it --------------------------------------------------------------------------------


def test_an_owner_that_counts_the_votes_proposes_the_exclusion():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, a).feed(*against(d, a, b, c)).close(*deciders)
    assert proposed(node) == [excluding(named(*deciders), a, d)]
    node = Voter(deciders, a).feed(*against(d, a, b)).close(*deciders)
    assert proposed(node) == [propose(named(*deciders), a)]


def test_no_more_are_proposed_than_a_record_holds():
    deciders = peers(40)
    a, bad = deciders[0], deciders[20 : 20 + MAX_EXCLUDED + 1]
    node = Voter(deciders, a)
    for at, peer in enumerate(bad):  # 16 votes of an author count
        node.feed(*against(peer, *(one for place, one in enumerate(deciders) if place % len(bad) != at)))
    node.close(*deciders)
    assert outvoted(node.state, named(*deciders)) == tuple(sorted(bad))
    (body,) = proposed(node)
    assert body.excluded == tuple(sorted(bad))[:MAX_EXCLUDED]


def test_after_an_owner_that_excludes_nobody_the_next_one_does():
    """Liveness: an attempt that binds to nothing may exclude, and so may the next round."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).feed(*against(d, a, b, c)).close(*deciders)
    for at in (10.0, 20.0, 30.0):
        node.feed(FinalityTick(at))
    (prepared,) = [x.body for x in node.log if isinstance(x, Append) and isinstance(x.body, Prepare)]
    for voter in (a, c):
        node.hear(voter, Promise(Round(1), prepared.ballot, ()))
    node.feed(FinalityTick(40.0))
    assert proposed(node) == [excluding(named(*deciders), b, d, attempt=prepared.ballot.attempt)]


def test_an_exclusion_comes_before_a_correction_and_before_a_summary():
    a, b, c, d = deciders = peers(4)
    bad, worse = c, d
    votes = [*against(worse, a, b, c)]
    node = Judge(deciders, a).wants(bad).feed(CorrectionsHeld(frozenset({bad})), *votes)
    node.close(a, b, d)
    (body,) = node.proposed()
    assert body == excluding(named(a, b, d), a, worse)
    assert not isinstance(body, ExcisingProposal)
    node = Voter(deciders, a).feed(SummaryMade(0, digest(b"summary")), *votes).close(*deciders)
    assert proposed(node) == [excluding(named(*deciders), a, worse)]
    node = Voter(deciders, a).feed(SummaryMade(0, digest(b"summary"))).close(*deciders)
    assert [type(body) for body in proposed(node)] == [SummaryProposal]


# --- one choice -------------------------------------------------------------------------------------


def test_a_set_and_whom_it_excludes_are_one_choice_of_one_state():
    a, b, c, d = deciders = peers(4)
    one, other = excluding(named(*deciders), a, d), propose(named(*deciders), a)
    assert choice_of(one) != choice_of(other) == Choice(named(*deciders))
    assert choice_of(one).folded == choice_of(other)
    node = Voter(deciders, b).feed(*against(d, a, b, c)).close(*deciders)
    node.hear(a, one)
    assert node.state.checked == {choice_of(other): one.state}


def bound_voter(repeats):
    """D's votes after a and b voted for an exclusion that d knows no reason for, and b proposed something anew."""
    a, b, c, d = deciders = peers(4)
    again = excluding(named(*deciders), b, c, attempt=1) if repeats else propose(named(*deciders), b, 1)
    return votes_in_turn(Voter(deciders, d), excluding(named(*deciders), a, c), again, *deciders)


def test_an_exclusion_that_may_be_final_is_voted_for_without_a_reason_and_nothing_else_is():
    """Else two sets could be final, one of them with the exclusion: nodes would differ for good."""
    assert bound_voter(repeats=True) == [Ballot(1, peers(4)[1])]
    assert bound_voter(repeats=False) == []


def test_who_is_bound_to_an_exclusion_proposes_it_again():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b)
    ballot = prepared_again(node, excluding(named(*deciders), a, d), a, c, *deciders)
    assert proposed(node) == [excluding(named(*deciders), b, d, attempt=ballot.attempt)]


def test_an_epoch_repeats_the_exclusion_that_the_epoch_before_may_have_decided():
    a, b, c, d = deciders = peers(4)
    node = make_final(Voter(deciders, d).feed(*against(c, a, b, d)), excluding(named(*deciders), a, c), a)
    body = Epoch(Round(1), b"", (d,))
    node.feed(EntrySeen(digest(b"epoch"), d, body), FinalityTick(1.0)).close(*deciders)
    assert node.state.epoch == epoch_id(body)
    assert len(node.find(FinalizeRound)) == 1
    assert node.state.epochs.voted_out == {c: 2}
