"""What the machine of finality remembers along its chain of epochs: what it would find anew, and no more work."""

import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus import forks
from atoll.node.daemon.consensus.chains import epochs, past_books
from atoll.node.daemon.consensus.chains.epochs import ROOT, Electorate, Segment
from atoll.node.daemon.consensus.chains.looks import ChainLook, places_at
from atoll.node.daemon.consensus.chains.past_books import PastBooks, parted
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.ballots import add_entry as add_to_book
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Ballot, Epoch, Follow, Leave, Proposal, Vote, epoch_id
from tests.node.daemon.consensus.epoch_world import Node, World

A, B, C = (PeerId(name) for name in "abc")


def anew(state):
    """The state without anything that it remembers."""
    return replace(state, books=dict(state.books), epochs=replace(state.epochs), unrivalled=(), settled=())


def all_forks(state):
    """Every place of the chain is looked at."""
    every = set(range(1, len(state.chain)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forks, "_disputable", lambda state: every)
        return forks._outranked(state)


class Comparing(Node):
    def check_looks(self, event):
        super().check_looks(event)
        state, fresh = self.state, anew(self.state)
        assert forks.decided_before(state) == forks.decided_before(fresh)
        assert forks._disputable(state) == forks._disputable(fresh)
        assert state.epochs.progress == fresh.epochs.progress
        assert forks._outranked(state) == all_forks(fresh)
        books, again = (parted(one.books, one.last_final) for one in (state, fresh))
        assert dict(books) == dict(again)
        assert books.names() == again.names()


@pytest.mark.parametrize(("count", "epochs_begun"), [(2, 8), (4, 1)])
def test_what_is_remembered_of_a_chain_is_what_is_found_anew(count, epochs_begun):
    """Members leave and come back, and are cut off, so epochs begin in places that others left as well."""
    world, rng = World(count, count, node=Comparing), random.Random(count)
    world.run(20)
    for _ in range(10):
        gone = rng.choice(world.up())
        gone.write(Leave(Round(gone.round)))
        world.run(8)
        world.strike(rng.choice(("cut", "restart")), gone, rng)
        world.run(15)
        world.strike("heal", gone, rng)
        world.run(10)
    assert max(len(node.state.chain) for node in world.nodes) > epochs_begun


def test_an_event_costs_the_same_in_a_longer_chain(monkeypatch):
    """Looks at places of the chain, for each event."""
    looks = []
    along = ChainLook.along

    def counted(self, chain, count, find):
        return along(self, chain, count, lambda at: looks.append(at) or find(at))

    class Plain(Node):
        events_seen = 0

        def check_looks(self, event):
            self.events_seen += 1

        def check_settled(self):
            pass

    monkeypatch.setattr(ChainLook, "along", counted)
    world = World(1, 2, node=Plain)
    world.run(30)
    node, other = world.nodes
    costs = {}
    for wanted in (5, 25):
        while len(node.state.chain) < wanted:
            other.write(Leave(Round(other.round)))
            world.run(6)
        looks.clear()
        before = node.events_seen + other.events_seen
        for _ in range(4):
            other.write(Leave(Round(other.round)))
            world.run(6)
        costs[wanted] = len(looks) / (node.events_seen + other.events_seen - before)
    assert costs[25] <= 1.5 * costs[5]


CHAIN = tuple(
    Segment(bytes([at]) if at else ROOT, first, Electorate((A, B, C)), Tally())
    for at, first in enumerate([0, 4, 7, 7, 12])
)


def voted_at(number, epoch, *voters):
    """A book of a round in which these voted for one proposal of an epoch."""
    ballot = Ballot(0, A, epoch)
    body = Proposal(Round(number), ballot, (digest(b"work"),), digest(b"state"))
    book, _ = add_to_book(Book(), digest(b"proposal"), A, body)
    for peer in voters:
        book, _ = add_to_book(book, digest(peer.encode()), peer, Vote(Round(number), ballot, digest(b"proposal")))
    return book


def test_a_late_vote_in_a_final_round_is_found():
    past = PastBooks().put(7, voted_at(7, CHAIN[2].epoch, A))
    assert set(past.voted(CHAIN, 4)) == set()
    assert set(past.ballots(CHAIN, 4)) == {3}
    later = past.put(7, voted_at(7, CHAIN[2].epoch, A, B))
    assert set(later.voted(CHAIN, 4)) == {3}
    assert later.ballots(CHAIN, 4) != past.ballots(CHAIN, 4)
    gone = later.put(7, Book())
    assert (set(gone.voted(CHAIN, 4)), set(gone.ballots(CHAIN, 4))) == (set(), set())


def test_a_place_that_came_to_the_chain_is_found():
    books = {4: voted_at(4, ROOT, A, B), 12: voted_at(12, CHAIN[3].epoch, A, B)}
    past = PastBooks(books)
    assert set(past.voted(CHAIN, 4)) == {1}
    assert set(past.voted(CHAIN, 5)) == {1, 4}


def test_what_was_found_in_another_chain_is_not_believed():
    past = PastBooks({4: voted_at(4, ROOT, A, B)})
    assert set(past.voted(CHAIN, 2)) == {1}
    other = (CHAIN[0], Segment(b"other", 5, CHAIN[1].electorate, Tally()), *CHAIN[2:])
    assert set(past.voted(other, 2)) == set()


def test_books_of_another_round_are_parted_anew():
    """A state of a summary begins in the middle of the run."""
    books = parted({}, -1).put(4, Book())
    assert set(parted(books, 3).past.books) == set()
    assert set(parted(books, 4).past.books) == {4}


def test_another_epoch_in_a_place_of_the_chain_is_found():
    bodies = [Epoch(Round(4), ROOT, (peer,)) for peer in (A, B)]
    book = epochs.add_entry(epochs.EpochBook(), A, bodies[0])
    chain = (CHAIN[0], Segment(epoch_id(bodies[0]), 4, CHAIN[1].electorate, Tally()))
    assert set(book.rivals(chain)) == set()
    voted = epochs.add_entry(book, A, Vote(Round(5), Ballot(0, A, chain[1].epoch), digest(b"proposal")))
    assert set(epochs.add_entry(voted, B, bodies[1]).rivals(chain)) == {1}
    assert set(epochs.without(book, A, ()).rivals(chain)) == {1}, "its own epoch is gone"


def test_how_far_authors_voted_is_told_as_if_it_was_counted_anew():
    """Of dense epochs, votes in any steps, and choices that begin the count again."""
    rng, book = random.Random(5), epochs.EpochBook()
    for number in range(1, 400):
        peer = rng.choice((A, B, C))
        kind = rng.random()
        if kind < 0.15:
            body = Epoch(Round(number), bytes([number % 256]), (peer,) if kind < 0.1 else (A, B))
            book = epochs.add_entry(book, peer if kind < 0.1 else A, body)
        elif kind < 0.2:
            book = epochs.add_entry(book, peer, Follow(Round(number), b"there"))
        elif kind < 0.25:
            book = epochs.add_entry(book, peer, Leave(Round(number)))
        else:
            at = Round(number + rng.choice((0, 0, 0, 20, 70)))
            book = epochs.add_entry(book, peer, Vote(at, Ballot(0, A, ROOT), digest(b"proposal")))
        assert book.progress == replace(book).progress
    assert len(book.progress) > 50


def test_places_of_a_round_are_found_by_their_order():
    assert [list(places_at(CHAIN, number)) for number in (0, 4, 5, 7, 12, 13)] == [[], [1], [], [2, 3], [4], []]
    assert past_books.parted({}, 3).final == 3


def test_where_the_epoch_before_decided_after_all_is_looked_at():
    """Votes in a round that became final long ago come late."""
    books = parted({7: voted_at(7, CHAIN[2].epoch, A)}, 12)
    places = {(CHAIN[at - 1].epoch, CHAIN[at].first): (CHAIN[at].epoch,) for at in range(1, 5)}
    fields = {"run": RunId("run"), "me": A, "rounds": 99, "last_final": 12, "voters": (A,)}
    state = FinalityState(**fields, chain=CHAIN, books=books, epochs=epochs.EpochBook(places=places))
    assert forks._disputable(state) == set()
    late = books.put(7, voted_at(7, CHAIN[2].epoch, A, B))
    assert forks._disputable(replace(state, books=late)) == {3}
