"""A member that the run's owner excluded: a set with its work gets no vote, unless it may be final already."""

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.daemon.consensus.epochs import EpochBook, add_entry, epoch_id
from atoll.node.daemon.consensus.forks import is_outranked
from atoll.node.daemon.consensus.missing import missing
from atoll.node.daemon.consensus.types import EntrySeen, FinalityTick, FinalizeRound, MembersSeen, RoundClosed
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Ballot, Epoch, Exclude, Prepare, Promise, Proposal, Vote
from tests.node.daemon.consensus.test_epochs import PATIENCE, A, B, C, Node, epoch, votes
from tests.node.daemon.consensus.test_vote_rule import Voter, named, peers, propose


def exclude(peer, first=1):
    body = Exclude(Round(first), peer, "noise")
    return EntrySeen(digest(b"exclude", peer.encode(), bytes([first])), PeerId("owner"), body)


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
    assert is_outranked(node.state), "it went on for longer"
    assert not is_outranked(node.feed(exclude(B, first=5)).state)


@given(st.permutations([(B, 7), (B, 5), (C, 9), (B, 6)]))
def test_the_order_in_which_exclusions_arrive_leaves_no_trace(order):
    book = EpochBook()
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
