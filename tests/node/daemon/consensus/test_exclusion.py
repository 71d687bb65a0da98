"""A member that the owner or the voters excluded: sets with its work get no vote, unless they may be final."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.chains.epochs import MAX_VOTES, EpochBook, add_entry, epoch_id
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.forks import look_for_better_chain
from atoll.node.daemon.consensus.inherited import inherited
from atoll.node.daemon.consensus.succession import AWAY_ROUNDS
from atoll.node.daemon.consensus.types import (
    RECENT_ROUNDS,
    AuthorPruned,
    EntrySeen,
    EquivocatorsSeen,
    FinalityTick,
    FinalizeRound,
    MembersSeen,
    ReplayDone,
    RoundClosed,
)
from atoll.node.daemon.removal.traffic import works_with_us
from atoll.node.daemon.standing_still.absent_members import missing
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import (
    Ballot,
    Contribution,
    Epoch,
    Exclude,
    ExcludingProposal,
    Follow,
    Prepare,
    Promise,
    Proposal,
    Vote,
)
from tests.node.daemon.consensus.test_epochs import PATIENCE, A, B, C, Node, entry_of, epoch, votes, work
from tests.node.daemon.consensus.test_vote_rule import RUN, Voter, named, peers, propose

OWNER = PeerId("owner")


def exclude(peer, first=1):
    body = Exclude(Round(first), peer, "noise")
    return EntrySeen(digest(b"exclude", peer.encode(), bytes([first])), OWNER, body)


# --- what gets votes --------------------------------------------------------------------------------


def test_a_set_with_the_work_of_an_excluded_author_gets_no_vote():
    a, b, _, d = deciders = peers(4)
    node = Voter(deciders, b).feed(exclude(d)).close(*deciders)
    node.hear(a, propose(named(*deciders), a))
    assert node.votes() == []
    node = Voter(deciders, b).feed(exclude(d)).close(*deciders)
    node.hear(a, propose(named(*deciders[:3]), a))
    assert len(node.votes()) == 1, "more than half of what counts is named"


def test_an_exclusion_from_a_later_round_changes_nothing_in_this_one():
    a, b, _, d = deciders = peers(4)
    node = Voter(deciders, b).feed(exclude(d, first=2)).close(*deciders)
    node.hear(a, propose(named(*deciders), a))
    assert len(node.votes()) == 1


def test_who_proposes_waits_until_its_own_set_was_folded_without_the_excluded():
    a, _, _, d = deciders = peers(4)
    node = Voter(deciders, a).close(*deciders, ripe=False).feed(exclude(d))
    node.feed(RoundClosed(Round(2), ()))
    assert not [x for x in node.log if isinstance(getattr(x, "body", None), Proposal)]
    node.feed(RoundClosed(Round(1), named(*deciders[:3])))
    (proposal,) = [x.body for x in node.log if isinstance(getattr(x, "body", None), Proposal)]
    assert proposal.contributions == named(*deciders[:3])


def test_a_set_that_may_be_final_is_voted_for_whatever_is_known_of_its_authors():
    """Two of four voted for it, and two have not promised: a quorum may have made it final."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).feed(exclude(c))
    name = node.hear(a, propose(named(*deciders), a))
    for voter in (a, b):
        node.hear(voter, Vote(Round(1), Ballot(0, a), name))
    node.close(*deciders)
    assert node.votes() == []
    node.feed(FinalityTick(8.0))
    again = Ballot(1, b)
    node.hear(b, Prepare(Round(1), again))
    for voter in (a, b):
        node.hear(voter, Promise(Round(1), again, ()))
    repeated = propose(named(*deciders), b, 1)
    node.hear(b, repeated)
    node.feed(FinalityTick(14.0))
    assert [vote.ballot for vote in node.votes()] == [again]


def test_a_certificate_stays_valid_whatever_one_knows():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).feed(exclude(c)).close(*deciders)
    name = node.hear(a, propose(named(*deciders), a))
    for voter in (a, b, c):
        node.hear(voter, Vote(Round(1), Ballot(0, a), name))
    (final,) = node.find(FinalizeRound)
    assert final.contributions == named(*deciders)
    assert set(node.state.voters) == set(deciders), "the excluded one too: others may not know of it"


def test_a_round_in_which_only_the_excluded_worked_can_become_final():
    a, b, _, d = deciders = peers(4)
    node = Voter(deciders, b).feed(exclude(d)).close(d)
    node.hear(a, propose(named(d), a))
    assert len(node.votes()) == 1


@given(count=st.integers(2, 8), data=st.data())
@settings(max_examples=150, deadline=None)
def test_votes_are_as_if_the_excluded_had_not_worked(count, data):
    all_of_them = peers(count)
    gone = data.draw(st.sets(st.sampled_from(all_of_them), max_size=count - 1))
    ours = data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1))
    theirs = data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1))
    node = Voter(all_of_them, all_of_them[-1]).feed(*map(exclude, sorted(gone))).close(*ours)
    node.hear(all_of_them[0], propose(named(*theirs), all_of_them[0]))
    counted = set(ours) - gone or set(ours)
    is_clean = not set(theirs) & gone or set(theirs) <= gone
    assert len(node.votes()) == (is_clean and 2 * len(counted & set(theirs)) > len(counted))


# --- who decides ------------------------------------------------------------------------------------


def test_the_excluded_is_no_voter_that_is_here():
    node = Node(voters=(A, B), here=(A, B)).wait(100)
    assert not node.signed()
    node.feed(exclude(B, first=5))
    node.wait(PATIENCE)
    assert node.signed() == [epoch(A)]
    assert "…peer-b is excluded" in missing(Node(voters=(A, B)).feed(exclude(B, first=5)).state)


def test_an_epoch_of_the_excluded_alone_outranks_nothing():
    other = epoch(B)
    node = Node(voters=(A, B), here=(A,)).wait(100)
    ours = epoch_id(epoch(A))
    assert node.entered() == [ours]
    node.say(B, other, *votes(epoch_id(other), *range(5, 200)))
    assert look_for_better_chain(node.state)[1], "it went on for longer"
    assert not look_for_better_chain(node.feed(exclude(B, first=5)).state)[1]


def test_an_epoch_of_those_that_the_owner_excluded_from_a_later_round_outranks_nothing():
    """They weigh at the fork. But who follows them is alone there, and nobody gives it their model."""
    other = epoch_id(epoch(B))
    node = Node(voters=(A, B), here=(A,)).wait(100)
    node.say(B, epoch(B), *votes(other, *range(5, 200)))
    assert node.followed() == [other], "it went on for longer"
    node = Node(voters=(A, B), here=(A,)).wait(100).feed(exclude(B, first=9))
    node.say(B, epoch(B), *votes(other, *range(5, 200)))
    assert node.followed() == []
    assert node.say(OWNER, Follow(Round(5), other)).followed() == [other], "somebody else works there"


def decided_without_a(*events):
    """A is in an epoch of its own from round 5 on; B and C decide that round after all, and vote in the next."""
    node = Node(voters=(A, B, C), here=(A,)).wait(100).feed(*events)
    assert node.entered() == [epoch_id(epoch(A))]
    made = [entry_of(peer, work(peer, 5)) for peer in (B, C)]
    ballot, names = Ballot(1, B, b""), tuple(sorted(one.entry for one in made))
    proposed = entry_of(B, Proposal(Round(5), ballot, names, digest(b"state")))
    node.feed(*made, proposed)
    for peer in (B, C):
        node.say(peer, Vote(Round(5), ballot, proposed.entry), *votes(b"", 6))
    return node.wait(1)


def test_rounds_that_only_those_decided_whom_the_owner_excluded_later_undo_no_epoch():
    assert decided_without_a().followed() == [b""], "two weigh more than one"
    assert decided_without_a(exclude(B, first=9)).followed() == [b""], "and C goes on there"
    excluded = exclude(B, first=9), exclude(C, first=9)
    assert decided_without_a(*excluded).followed() == []
    # The owner came to them before: it goes on there.
    assert decided_without_a(
        *excluded, entry_of(OWNER, Vote(Round(6), Ballot(1, B), digest(b"p")))
    ).followed() == [b""]


def test_who_comes_back_does_not_go_where_only_the_excluded_went_on():
    far = 5 + 3 * AWAY_ROUNDS
    for first, follows in ((None, True), (9, False)):
        node = Node(voters=(A, B), here=(A, B), came_up=ReplayDone(1000.0, 5))
        node.feed(*(exclude(B, first) for _ in range(first is not None))).wait(1)
        node.say(A, epoch(A)).say(B, epoch(B), *(work(B, at) for at in range(5, far)))
        assert (epoch_id(epoch(B)) in node.wait(PATIENCE).followed()) is follows, first


@given(st.permutations([(B, 7), (B, 5), (C, 9), (B, 6)]))
def test_the_order_in_which_exclusions_arrive_leaves_no_trace(order):
    book = EpochBook(owner=A)
    for peer, first in order:
        book = add_entry(book, A, Exclude(Round(first), peer, ""))
    assert dict(book.excluded) == {B: 5, C: 9}
    assert [book.excluded_from(at) for at in (4, 5, 9)] == [frozenset(), {B}, {B, C}]


def test_members_seen_does_not_bring_the_excluded_back():
    node = Node(voters=(A, B, C), here=(A, B, C)).feed(exclude(B, first=5), exclude(C, first=5))
    node.feed(MembersSeen(frozenset({A, B, C}))).wait(100)
    assert node.signed() == [epoch(A)]


def test_a_later_attempt_that_binds_to_none_brings_no_excluded_work_back():
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).feed(exclude(c)).close(*deciders).feed(FinalityTick(8.0))
    again = Ballot(1, b)
    node.hear(b, Prepare(Round(1), again))
    for voter in (a, b, c):
        node.hear(voter, Promise(Round(1), again, ()))
    node.hear(b, propose(named(*deciders), b, 1))
    assert node.votes() == []
    clean = Voter(deciders, d).feed(exclude(c)).close(*deciders).feed(FinalityTick(8.0))
    clean.hear(b, Prepare(Round(1), again))
    for voter in (a, b, c):
        clean.hear(voter, Promise(Round(1), again, ()))
    clean.hear(b, propose(named(a, b, d), b, 1))
    assert [vote.ballot for vote in clean.votes()] == [again]


def test_an_epoch_begins_with_what_may_be_final_whoever_is_excluded():
    """Somebody that is gone may have seen a quorum for that set."""
    a, _, c, d = deciders = peers(4)
    node = Voter(deciders, d)
    name = node.hear(a, propose(named(*deciders), a))
    node.hear(a, Vote(Round(1), Ballot(0, a), name))
    body = Epoch(Round(1), b"", (d,))
    node.feed(exclude(c), EntrySeen(digest(b"epoch"), d, body), FinalityTick(1.0)).close(*deciders)
    assert node.state.epoch == epoch_id(body)
    (final,) = node.find(FinalizeRound)
    assert final.contributions == named(*deciders)


@pytest.mark.parametrize(("against", "voted", "excludes"), [(0, 1, 0), (4, 1, 0), (5, 1, 1), (0, 2, 0), (0, 3, 1)])
def test_an_epoch_excludes_only_whom_an_honest_voter_may_have_excluded(against, voted, excludes):
    """A liar votes for a proposal of its own, which excludes whom it likes. Most others are away."""
    liar, me, *_, bad = deciders = peers(7)
    members = tuple(sorted((liar, me)))
    node = Voter(deciders, me)
    excluding = ExcludingProposal(Round(1), Ballot(0, liar), named(*deciders), digest(b"state"), (bad,))
    name = node.hear(liar, excluding)
    for voter in deciders[:voted]:
        node.hear(voter, Vote(Round(1), Ballot(0, liar), name))
    for peer in deciders[:against]:
        node.hear(peer, Exclude(Round(1), bad, ""))
    body = Epoch(Round(1), b"", members)
    node.feed(*(EntrySeen(digest(peer.encode()), peer, body) for peer in members)).close(*deciders)
    assert node.state.epoch == epoch_id(body)
    found = inherited(node.state)
    assert (found is not None and found.excluded == (bad,)) == bool(excludes)


def test_an_epoch_counts_as_the_epoch_before_though_a_voter_is_proven_to_have_two_histories_since():
    liar, me, *_, bad = deciders = peers(7)
    members = tuple(sorted((liar, me)))
    node = Voter(deciders, me)
    excluding = ExcludingProposal(Round(1), Ballot(0, liar), named(*deciders), digest(b"state"), (bad,))
    node.hear(liar, Vote(Round(1), Ballot(0, liar), node.hear(liar, excluding)))
    for peer in deciders[:5]:
        node.hear(peer, Exclude(Round(1), bad, ""))
    body = Epoch(Round(1), b"", members)
    node.feed(*(EntrySeen(digest(peer.encode()), peer, body) for peer in members)).close(*deciders)
    node.feed(EquivocatorsSeen(frozenset({deciders[2]})))
    found = inherited(node.state)
    assert found is not None
    assert found.excluded == (bad,)


# --- without the owner ------------------------------------------------------------------------------


class Deciders:
    """The machine of one of them, before round 1. Sets are final by the votes of all voters."""

    def __init__(self, count: int, me: int = 0) -> None:
        self.peers = peers(count)
        self.me, self.number = self.peers[me], 1
        start = finality.begin(RUN, self.me, 500, OWNER)
        self.state = replace(start, last_final=0, applied=0, voters=self.peers)

    def hear(self, author, body):
        name = digest(author.encode(), repr(body).encode())
        self.state, _ = finality.step(self.state, EntrySeen(name, author, body))
        return name

    def exclude(self, peer, *by, first=0):
        for author in by:
            self.hear(author, Exclude(Round(first), peer, ""))
        return self

    def decide(self, *authors):
        """All of the authors contribute to the round, and the set of these contributions becomes final.

        Its proposal excludes all whom the votes that are here exclude.
        """
        number, voters = Round(self.number), self.state.voters
        base = Contribution(number, digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
        names = tuple(sorted(self.hear(author, base) for author in authors or self.peers))
        fields, excluded = (number, Ballot(0, voters[0]), names, digest(b"state")), outvoted(self.state, names)
        name = self.hear(voters[0], ExcludingProposal(*fields, excluded) if excluded else Proposal(*fields))
        for voter in voters:
            self.hear(voter, Vote(number, fields[1], name))
        self.number += 1
        assert self.state.deciding == self.number
        return self

    @property
    def out(self):
        return dict(self.state.epochs.voted_out)


def test_two_thirds_of_the_voters_exclude_and_fewer_do_not():
    node = Deciders(4)
    a, b, c, d = node.peers
    assert node.exclude(d, a, b).decide().out == {}
    assert node.exclude(d, c).decide().out == {d: 3}
    assert node.state.epochs.excluded_from(3) == {d}
    assert not node.state.epochs.excluded_from(2)
    assert node.exclude(d, d).decide().out == {d: 3}, "more votes change nothing"


def test_votes_count_once_their_author_is_a_voter_and_from_their_round_on():
    node = Deciders(4)
    a, b, c, d = node.peers
    node.exclude(d, a, b).exclude(d, c, first=4)
    assert node.decide().out == node.decide().out == {}
    assert node.decide().out == {d: 4}
    node = Deciders(4).exclude(d, a, b, c)
    assert node.out == {}
    assert node.decide(a, d).out == {}, "b and c are no voters of round 2"
    assert node.decide().out == {d: 3}


def test_who_is_no_voter_has_no_vote():
    strangers = [PeerId(f"made-up-{number}") for number in range(20)]
    node = Deciders(4)
    node.state = replace(node.state, tally=Tally(8, 40, dict.fromkeys(node.peers, 30)))
    a, b, c, d = node.peers
    node.exclude(d, a, b, *strangers)
    assert node.decide(*node.peers, *strangers).out == {}
    assert {*node.state.voters} == {*node.peers}
    assert node.exclude(d, c).decide(*node.peers, *strangers).out == {d: 3}


def test_who_decides_alone_excludes_nobody_that_is_away_or_comes_back():
    """The others sleep; its votes stand when they are back, one after the other."""
    node = Deciders(4)
    a, b, c, d = node.peers
    node.decide()
    node.exclude(c, b).exclude(d, b)
    for _ in range(RECENT_ROUNDS + 2):
        node.decide(b)
    assert [*node.state.voters] == [b]
    assert node.out == {}
    for there in ((b, c), (b, c), (b, c, d), (a, b, c, d)):
        assert node.decide(*there).out == {}


def test_a_few_that_are_left_exclude_nobody_while_others_worked_lately():
    node = Deciders(6)
    a, b, c, *_ = node.peers
    node.decide()
    node.exclude(c, a, b)
    for _ in range(RECENT_ROUNDS):
        assert node.decide(a, b, c).out == {}
    assert node.decide(a, b, c).out, "for so many rounds nobody else worked"


def test_the_votes_of_a_pruned_author_are_gone():
    node = Deciders(4)
    a, b, _, d = node.peers
    node.exclude(d, a, b)
    node.state, _ = finality.step(node.state, AuthorPruned(b))
    assert {*node.state.epochs.votes_against} == {a}


def test_nobody_votes_for_the_time_when_it_was_one_of_few():
    """Two were the run's voters once. Together they exclude nobody afterwards, whatever round they write."""
    node = Deciders(7)
    a, b, c, *_ = node.peers
    node.decide(a, b).decide(a, b).decide()
    assert node.exclude(c, a, b, first=0).decide().out == {}


@given(count=st.integers(3, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_fewer_than_a_third_exclude_nobody_whatever_they_vote_and_whomever_a_set_leaves_out(count, data):
    node = Deciders(count)
    liars = node.peers[: (count - 1) // 3]
    for liar in liars:
        for peer in data.draw(st.lists(st.sampled_from(node.peers), max_size=6)):
            node.exclude(peer, liar, first=data.draw(st.integers(0, 3)))
    for _ in range(3):
        left_out = data.draw(st.sets(st.sampled_from(node.peers[len(liars) :]), max_size=(count - 1) // 2))
        assert node.decide(*sorted({*node.peers} - left_out)).out == {}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_who_learns_of_the_rounds_later_excludes_alike(data):
    """What is decided is the same after a restart, and for a newcomer that has each feed as a whole."""
    node = Deciders(4)
    entries: list[tuple] = []
    hear = node.hear
    node.hear = lambda author, body: entries.append((author, body)) or hear(author, body)
    for _ in range(4):
        for author in data.draw(st.sets(st.sampled_from(node.peers))):
            node.exclude(data.draw(st.sampled_from(node.peers)), author, first=data.draw(st.integers(0, 4)))
        node.decide()
    late = Deciders(4)
    for author in data.draw(st.permutations(node.peers)):
        for who, body in entries:
            if who == author:
                late.hear(author, body)
    assert late.state.deciding == node.state.deciding
    assert late.out == node.out


def test_only_the_first_votes_of_an_author_count():
    """All nodes read a feed in one order, so all count the same votes of who excludes everybody."""
    book = EpochBook(owner=A)
    for number in range(MAX_VOTES + 5):
        book = add_entry(book, B, Exclude(Round(1), PeerId(f"made-up-{number}"), ""))
    book = add_entry(book, B, Exclude(Round(0), PeerId("made-up-0"), ""))
    assert [*book.votes_against[B]] == [PeerId(f"made-up-{number}") for number in range(MAX_VOTES)]
    assert book.votes_against[B]["made-up-0"] == 0


def test_a_member_of_another_chain_is_not_cut_off():
    """Who cut it off would never learn that its chain is the one to follow."""
    node = Node(me=A, voters=(A, B), here=(A,)).wait(100)
    ours = epoch_id(epoch(A))
    assert node.entered() == [ours]
    node.state = replace(node.state, epochs=replace(node.state.epochs, voted_out={B: 6, C: 5}))
    assert not works_with_us(node.state, B)
    assert works_with_us(node.state, C), "excluded in round 4, which all chains have"
    node.say(B, Follow(Round(5), ours))
    assert works_with_us(node.state, B)
