"""An author with two histories stops nobody: what stands in the other one is asked for by name, and binds nobody.

Round 1 has four voters, FOURTH is the equivocator.
"""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus.chains.epochs import Segment
from atoll.node.daemon.consensus.orphans import MAX_EPOCHS, MAX_FORKS
from atoll.node.daemon.consensus.presence import here_of
from atoll.node.daemon.consensus.types import (
    EntryPayloadHeld,
    EntrySeen,
    EquivocatorsSeen,
    FetchOrphans,
    FinalizeRound,
    MembersSeen,
    RoundClosed,
)
from atoll.node.daemon.consensus.voter import share_of_ours
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.ballots import Book, add_entry, add_orphan, bound_proposals, decided_proposal
from atoll.protocols.ledger.records import Ballot, Contribution, Follow, Leave, Promise, Proposal, Vote, epoch_id
from tests.node.daemon.consensus.test_epochs import LEASE, STRANGER, A, B, C, D, Node, epoch
from tests.node.daemon.consensus.test_finality import (
    ALL,
    FIRST,
    FOURTH,
    ORDER,
    SECOND,
    THIRD,
    contribution,
    names,
    proposal,
    vote_for,
    voter,
)

OTHER = digest(b"the other history")
"""Entry of FOURTH's contribution that this node's feeds do not hold."""
WORK = Contribution(Round(1), digest(b"base"), digest(b"other payload"), 1, 1, 64, 1.0)
SET = tuple(sorted((*names(FIRST, SECOND, THIRD), OTHER)))
"""What the nodes with the other history propose."""


def victim(me=SECOND):
    """A node with the first history, that knows of the fork."""
    return voter(me).feed(EquivocatorsSeen(frozenset({FOURTH})))


def asked(node):
    """The newest FetchOrphans."""
    return [action for action in node.log if isinstance(action, FetchOrphans)][-1]


def test_a_set_with_the_other_contribution_is_asked_for_folded_and_voted_for():
    node = victim()
    entry = node.hear(FIRST, proposal(contributions=SET))
    assert asked(node) == FetchOrphans(Round(1), (OTHER,), (entry,))
    node.feed(EntrySeen(OTHER, FOURTH, WORK, is_orphan=True))
    assert asked(node).entries == ()
    node.feed(EntryPayloadHeld(OTHER))
    # It is broad, once our own set will not grow: three of the four that this node has are in it.
    node.feed(RoundClosed(Round(2), (digest(b"next"),)))
    assert node.check(SET).appends() == [vote_for(entry, Ballot(0, FIRST))]


def test_a_final_set_with_it_is_followed():
    node = victim()
    entry = node.hear(FIRST, proposal(contributions=SET))
    for peer in (FIRST, SECOND, THIRD):
        node.hear(peer, vote_for(entry, Ballot(0, FIRST)))
    assert not any(isinstance(action, FinalizeRound) for action in node.log)
    node.feed(EntrySeen(OTHER, FOURTH, WORK, is_orphan=True))
    assert any(isinstance(action, FinalizeRound) and action.contributions == SET for action in node.log)


def test_the_vote_that_made_a_set_final_may_stand_in_the_other_history():
    node = victim()
    entry = node.hear(FIRST, proposal())
    for peer in (FIRST, THIRD):
        node.hear(peer, vote_for(entry, Ballot(0, FIRST)))
    assert asked(node).proposals == (entry,)
    node.feed(EntrySeen(digest(b"vote"), FOURTH, vote_for(entry, Ballot(0, FIRST)), is_orphan=True))
    assert any(isinstance(action, FinalizeRound) for action in node.log)


def test_a_proposal_of_the_other_history_that_got_votes_is_asked_for():
    node = victim()
    unknown = digest(b"a proposal of the other history")
    node.hear(FIRST, Vote(Round(1), Ballot(3, FOURTH), unknown))
    assert asked(node).entries == (unknown,)
    body = proposal(owner=FOURTH, attempt=3)
    node.feed(EntrySeen(unknown, FOURTH, body, is_orphan=True))
    assert node.state.book.proposals[unknown] == body


def test_nothing_is_asked_for_without_a_proof():
    node = voter(SECOND)
    node.hear(FIRST, proposal(contributions=SET))
    assert not any(isinstance(action, FetchOrphans) for action in node.log)


def test_what_most_voted_for_is_asked_for_first():
    """A liar may propose sets of names that nobody has."""
    node = victim()
    fakes = tuple(sorted(digest(b"fake", bytes([n // 256, n % 256])) for n in range(300)))
    node.hear(SECOND, proposal(owner=SECOND, attempt=1, contributions=fakes))
    entry = node.hear(FIRST, proposal(contributions=SET))
    node.hear(THIRD, vote_for(entry, Ballot(0, FIRST)))
    assert OTHER in asked(node).entries


def test_an_orphan_is_in_no_set_of_our_own():
    node = victim()
    node.feed(EntrySeen(OTHER, FOURTH, WORK, is_orphan=True)).feed(EntryPayloadHeld(OTHER))
    assert share_of_ours(node.state, ALL) == (4, 4)
    idle = replace(node.state, views={}, idle=True, stable_since=0.0, now=1e6)
    assert share_of_ours(idle, ALL) == (4, 4)


def book_of(*said):
    book = Book()
    for author, body in said:
        entry = digest(author.encode(), repr(body).encode())
        book, _ = add_entry(book, entry, author, body)
    return book


def test_the_promise_of_an_equivocator_shows_nothing():
    """Its votes may stand in the history that is not here, and may have made a set final there."""
    first, later = Ballot(0, FIRST), Ballot(1, SECOND)
    said = proposal()
    name = digest(FIRST.encode(), repr(said).encode())
    # SECOND voted, and promised then. FOURTH voted for the same set elsewhere, and hides it here: with THIRD,
    # which is silent, they may be a quorum.
    votes = [(FIRST, said), (SECOND, Vote(Round(1), first, name))]
    promises = [(peer, Promise(Round(1), later, ())) for peer in (FIRST, SECOND, FOURTH)]
    book = book_of(*votes, *promises)
    assert bound_proposals(book, ORDER, later) == ()
    assert bound_proposals(book, ORDER, later, frozenset({FOURTH})) is None
    book, _ = add_entry(book, digest(b"third"), THIRD, Vote(Round(1), first, name))
    book, _ = add_entry(book, digest(b"third promise"), THIRD, Promise(Round(1), later, ()))
    assert bound_proposals(book, ORDER, later, frozenset({FOURTH})) == (name,)


def test_one_vote_of_an_author_counts_once_for_a_proposal():
    said = proposal()
    name = digest(FIRST.encode(), repr(said).encode())
    vote = vote_for(name, Ballot(0, FIRST))
    book = book_of((FIRST, said), (SECOND, vote), (FOURTH, vote))
    book = add_orphan(book, digest(b"again"), FOURTH, vote)
    assert decided_proposal(book, ORDER, frozenset({FOURTH})) is None


def test_an_orphan_vote_is_for_the_proposal_that_it_names():
    said = proposal()
    name = digest(FIRST.encode(), repr(said).encode())
    vote = vote_for(name, Ballot(0, FIRST))
    book = book_of((FIRST, said), (SECOND, vote), (THIRD, vote))
    book = add_orphan(book, digest(b"other"), FOURTH, vote_for(digest(b"another"), Ballot(0, FIRST)))
    assert decided_proposal(book, ORDER, frozenset({FOURTH})) is None


@pytest.mark.parametrize("before", ["a promise", "another vote", "a leave"])
def test_a_vote_that_one_history_forbids_counts_for_all_nodes(before):
    """Nodes with the other history count it, and go on: this one must follow."""
    node = victim()
    entry = node.hear(FIRST, proposal())
    first = {
        "a promise": Promise(Round(1), Ballot(2, THIRD), ()),
        "another vote": vote_for(digest(b"another"), Ballot(0, FIRST)),
        "a leave": Leave(Round(0)),
    }[before]
    for author, body in ((FOURTH, first), *((peer, vote_for(entry, Ballot(0, FIRST))) for peer in (FIRST, THIRD))):
        node.hear(author, body)
    node.hear(FOURTH, vote_for(entry, Ballot(0, FIRST)))
    assert any(isinstance(action, FinalizeRound) for action in node.log)
    innocent = voter(SECOND)
    innocent.hear(FIRST, proposal())
    for author, body in ((FOURTH, first), *((peer, vote_for(entry, Ballot(0, FIRST))) for peer in (FIRST, THIRD))):
        innocent.hear(author, body)
    innocent.hear(FOURTH, vote_for(entry, Ballot(0, FIRST)))
    assert not any(isinstance(action, FinalizeRound) for action in innocent.log), (
        "without a proof the feed's rule holds"
    )


def test_no_epoch_waits_for_an_equivocator():
    node = victim(me=FIRST)
    assert FOURTH in node.state.members
    assert here_of(node.state, ORDER) == {FIRST, SECOND, THIRD}


def test_orphans_of_rounds_that_are_final_are_ignored():
    node = victim()
    before = node.state.books
    node.feed(EntrySeen(OTHER, FOURTH, replace(WORK, round=Round(0)), is_orphan=True))
    assert node.state.books == before
    assert contribution(FOURTH)[0] in node.state.book.contributions


# --- signatures under epochs --------------------------------------------------------------------


def in_an_epoch_with_a_liar():
    """B and D are in an epoch; D signed it in the history that this node does not have."""
    node = Node(voters=(A, B, C, D)).feed(EquivocatorsSeen(frozenset({D})))
    return node.say(B, epoch(B, D))


def test_the_signature_of_the_other_history_completes_an_epoch_that_others_are_in():
    node, name = in_an_epoch_with_a_liar(), epoch_id(epoch(B, D))
    assert asked(node).entries == (name,)
    node.feed(EntrySeen(digest(b"signature"), D, epoch(B, D), is_orphan=True))
    assert node.state.epochs.is_complete(name)
    assert node.state.epochs.choice(D) == b"", "what it chose since stands in a feed, or nowhere"
    assert asked(node).entries == ()


def test_an_orphan_signs_for_its_author_only():
    node, other = in_an_epoch_with_a_liar(), epoch(A, B)
    node.feed(EntrySeen(digest(b"signature"), D, other, is_orphan=True))
    assert epoch_id(other) not in node.state.epochs.bodies


def test_how_a_chain_began_is_asked_for():
    """A newcomer that cannot see the first epoch of a chain could never join it (the simulator's seed 77)."""
    first = epoch(D)
    later = epoch(B, C, parent=epoch_id(first))
    node = Node(voters=(A, B, C, D), here=(B, C)).feed(EquivocatorsSeen(frozenset({D})))
    node.say(B, later).say(C, later)
    assert asked(node).entries == (epoch_id(first),)
    assert not node.state.epochs.path(epoch_id(later))
    node.feed(EntrySeen(digest(b"signature"), D, first, is_orphan=True))
    assert node.state.epochs.path(epoch_id(later)) == (epoch_id(first), epoch_id(later))


def test_few_of_the_epochs_that_nobody_knows_are_asked_for_the_most_chosen_first():
    node = in_an_epoch_with_a_liar().say(C, epoch(B, D, C)).say(B, epoch(B, D, C))
    for number in range(3 * MAX_EPOCHS):
        node.say(PeerId(f"stranger {number}"), Follow(Round(5), digest(bytes([number]))))
    assert len(asked(node).entries) == MAX_EPOCHS
    assert asked(node).entries[0] == epoch_id(epoch(B, C, D)), "two chose it"
    assert not any(isinstance(a, FetchOrphans) for a in Node().say(B, Follow(Round(5), digest(b"unknown"))).log), (
        "without a proof of two histories all that anybody has comes in feeds"
    )


def test_made_up_epochs_of_strangers_hide_none_that_a_decider_is_in():
    """Two strangers chose each of them, one decider is in the true one."""
    node, true = in_an_epoch_with_a_liar(), epoch_id(epoch(B, D))
    for number in range(4 * MAX_EPOCHS):
        node.say(PeerId(f"stranger {number}"), Follow(Round(5), digest(bytes([number // 2]))))
    assert asked(node).entries[0] == true
    assert len(asked(node).entries) == MAX_EPOCHS == len({*asked(node).entries}), "the other places are for them"
    # The liar votes, too; of what it chose nothing comes before the others.
    node.say(D, Follow(Round(5), digest(b"of the liar")))
    assert digest(b"of the liar") not in asked(node).entries


def test_a_decider_asks_for_one_epoch_of_a_chain_that_it_made_up():
    node, true, name = in_an_epoch_with_a_liar(), epoch_id(epoch(B, D)), b""
    for number in range(3 * MAX_EPOCHS):
        node.say(C, epoch(C, D, at=5 + number, parent=name))
        name = epoch_id(epoch(C, D, at=5 + number, parent=name))
    assert asked(node).entries == tuple(sorted((true, epoch_id(epoch(C, D)))))


def test_a_restart_finds_a_chain_that_an_orphan_signed():
    feed = [(B, epoch(B, D)), (A, Follow(Round(5), epoch_id(epoch(B, D))))]
    assert chosen_path(feed, A) == ()
    assert chosen_path(feed, A, [(D, epoch(B, D)), (D, WORK)]) == (epoch(B, D),)


# --- old rounds at which chains part ------------------------------------------------------------


def gone_on_alone(*others, rounds=3):
    """A was cut off from the others, opened an epoch at each of some rounds, and decided these alone."""
    deciders = (A, B, C, D, *others)
    node = Node(voters=deciders, here=()).wait(LEASE + 1)
    assert node.entered() == [epoch_id(epoch(A))]
    electorate = node.state.chain[1].electorate
    name, chain = b"", [node.state.chain[0]]
    for number in range(5, 5 + rounds):
        body = epoch(A, at=number, parent=name)
        node.say(A, body)
        name = epoch_id(body)
        chain.append(Segment(name, number, electorate, node.state.tally))
    done = {number: ((A,), frozenset({A})) for number in range(5, 5 + rounds)}
    last, decided = 4 + rounds, {**node.state.decided, **done}
    node.state = replace(node.state, chain=tuple(chain), last_final=last, applied=last, decided=decided, books={})
    return node.feed(MembersSeen(frozenset({B, C, *others}))).feed(EquivocatorsSeen(frozenset({D})))


def decide_without_it(node, *went_on):
    """B and C decided round 5 with the liar's vote. The proposal's name, and that vote."""
    work = [(author, digest(b"5", author.encode())) for author in (B, C)]
    body = Contribution(Round(5), digest(b"base"), digest(b"payload"), 1, 1, 64, 1.0)
    for author, name in work:
        node.feed(EntrySeen(name, author, body))
    ballot, said = Ballot(1, B), digest(b"said")
    names = tuple(sorted((OTHER, *(name for _, name in work))))
    node.feed(EntrySeen(said, B, Proposal(Round(5), ballot, names, digest(b"state"))))
    for author in (B, C):
        node.say(author, Vote(Round(5), ballot, said))
    for author in went_on:
        node.say(author, Vote(Round(6), Ballot(0, C), digest(b"next")))
    return said, Vote(Round(5), ballot, said)


def test_what_decided_an_old_round_in_the_chain_of_others_is_asked_for_and_weighs():
    """Two chains never met: one of them did not see why the other one went on (worlds of test_twin_worlds.py)."""
    node = gone_on_alone()
    said, vote = decide_without_it(node, B, C)
    assert asked(node) == FetchOrphans(Round(5), (OTHER,), (said,))
    assert b"" not in node.followed()
    node.feed(EntrySeen(OTHER, D, replace(WORK, round=Round(5)), is_orphan=True))
    assert asked(node) == FetchOrphans(Round(5), (), (said,))
    node.feed(EntrySeen(digest(b"vote of the other history"), D, vote, is_orphan=True))
    assert node.followed()[-1] == b"", "two stayed where the round was decided, and one went"


def test_nothing_is_asked_about_old_rounds_once_all_that_live_are_in_one_chain():
    node = gone_on_alone()
    decide_without_it(node, B, C)
    assert node.state.orphans_asked
    for author in (B, C):
        node.say(author, Follow(Round(7), node.state.epoch))
    assert not node.state.orphans_asked
    assert asked(node) == FetchOrphans(Round(5), (), ())


def test_who_decides_nothing_makes_nobody_ask_about_old_rounds():
    node = gone_on_alone()
    for author in (B, C):
        node.say(author, Follow(Round(7), node.state.epoch))
    decide_without_it(node, B, C)
    node.feed(MembersSeen(frozenset({B, C, D, STRANGER}))).say(STRANGER, Follow(Round(5), b""))
    assert not node.state.orphans_asked


def test_few_old_rounds_are_asked_about_at_a_time_the_oldest_first():
    others = [PeerId(f"peer-{number}") for number in range(2 * MAX_FORKS)]
    node = gone_on_alone(*others, rounds=2 * MAX_FORKS)
    for peer, before, segment in zip(others, node.state.chain, node.state.chain[1:], strict=False):
        node.say(peer, Follow(Round(5), before.epoch))
        node.say(peer, Vote(Round(segment.first), Ballot(1, B, before.epoch), digest(b"unknown")))
    assert [*node.state.orphans_asked] == [*range(5, 5 + MAX_FORKS)]


def test_an_equivocator_weighs_nothing_where_chains_part():
    """Each node reads another choice of it in the history that it holds."""

    def leaves(*liars):
        node = Node(voters=(A, B, D), here=()).wait(LEASE + 1).feed(EquivocatorsSeen(frozenset(liars)))
        return bool(node.say(B, epoch(B, D)).say(D, epoch(B, D)).followed())

    assert leaves()
    assert not leaves(D)


def test_an_equivocator_that_went_on_weighs_nothing():
    """Only the history that this node holds says so."""
    node = gone_on_alone()
    _, vote = decide_without_it(node, D)
    node.feed(EntrySeen(OTHER, D, replace(WORK, round=Round(5)), is_orphan=True))
    node.feed(EntrySeen(digest(b"vote of the other history"), D, vote, is_orphan=True))
    assert b"" not in node.followed(), "of the others nobody went on"
