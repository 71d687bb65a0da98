"""What the ledger says about a round: the same facts whatever the order of arrival, and who may decide."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.layered_map import LayeredMap
from atoll.protocols.ledger.ballots import (
    ANSWERS_KEPT,
    BALLOTS_KEPT,
    PREPARES_KEPT,
    PROPOSALS_KEPT,
    Book,
    add_entry,
    add_orphan,
    decided_proposal,
    owner_of,
    quorum,
    voter_order,
    without,
    without_orphans,
)
from atoll.protocols.ledger.records import Ack, Ballot, Contribution, Prepare, Promise, Proposal, Reduction, Vote
from atoll.protocols.run.arena import Span

RUN = RunId(digest(b"ballots"))
PEERS = [PeerId(f"p{n}") for n in range(5)]
ORDER = voter_order(RUN, 3, PEERS)
NUMBER = Round(3)


def ballot(attempt: int) -> Ballot:
    return Ballot(attempt, owner_of(ORDER, attempt))


def proposal(attempt: int, *names: bytes) -> Proposal:
    return Proposal(NUMBER, ballot(attempt), tuple(sorted(digest(n) for n in names)), digest(*names))


def entry(author: PeerId, body: object) -> tuple[Digest, PeerId, object]:
    return digest(author.encode(), repr(body).encode()), author, body


def book_of(*entries: tuple[Digest, PeerId, object]) -> tuple[Book, list[str]]:
    book, faults = Book(), []
    for one in entries:
        book, fault = add_entry(book, *one)
        faults += [fault] if fault else []
    return book, faults


PROPOSED = entry(ballot(0).proposer, proposal(0, b"a", b"b"))
VOTES = [entry(peer, Vote(NUMBER, ballot(0), PROPOSED[0])) for peer in ORDER]


def test_the_order_of_ballots_depends_on_run_and_round_only():
    assert voter_order(RUN, 3, reversed(PEERS)) == ORDER == voter_order(RUN, 3, PEERS * 2)
    assert len({voter_order(RUN, number, PEERS) for number in range(30)}) > 10
    assert voter_order(RunId(digest(b"other")), 3, PEERS) != ORDER


@given(st.integers(1, 60))
def test_two_quorums_share_more_than_a_third(count):
    assert 3 * (2 * quorum(count) - count) >= count
    assert quorum(count) <= count


@given(st.permutations([PROPOSED, *VOTES[:4], entry(ORDER[1], Ack(NUMBER, digest(b"s"), digest(b"v")))]))
def test_entries_of_different_authors_may_come_in_any_order(entries):
    assert book_of(*entries)[0] == book_of(*sorted(entries))[0]
    assert decided_proposal(book_of(*entries)[0], ORDER) == (PROPOSED[0], PROPOSED[2])


def test_every_vote_less_than_a_quorum_decides_nothing():
    for few in permutations(VOTES, quorum(len(ORDER)) - 1):
        assert decided_proposal(book_of(PROPOSED, *few, *few)[0], ORDER) is None


def test_what_a_book_found_decided_is_of_the_voters_and_equivocators_that_were_asked_for():
    """Forks ask again and again about rounds that are long over."""
    book = add_orphan(book_of(PROPOSED, *VOTES[:3])[0], *VOTES[3])
    for _ in range(2):
        assert decided_proposal(book, ORDER) is None, "a vote of another history counts for equivocators only"
        assert decided_proposal(book, ORDER, frozenset({ORDER[3]})) == (PROPOSED[0], PROPOSED[2])
    for peer in ORDER:
        decided_proposal(book, ORDER, frozenset({peer}))
        assert len(book.decided) <= ANSWERS_KEPT


def test_votes_of_two_ballots_do_not_add_up():
    again = entry(ballot(1).proposer, proposal(1, b"a", b"b"))
    mixed = [*VOTES[:2], *(entry(peer, Vote(NUMBER, ballot(1), again[0])) for peer in ORDER[2:])]
    assert decided_proposal(book_of(PROPOSED, again, *mixed)[0], ORDER) is None


@pytest.mark.parametrize("body", [Prepare(NUMBER, ballot(1)), proposal(1, b"a")])
def test_a_ballot_that_names_somebody_else_is_not_recorded(body):
    stranger = next(peer for peer in PEERS if peer != ballot(1).proposer)
    book, faults = book_of(entry(stranger, body))
    assert book == Book()
    assert faults == ["a ballot belongs to the peer that it names"]


def test_a_ballot_out_of_turn_never_decides():
    thief = PeerId(ORDER[1])
    stolen = entry(thief, Proposal(NUMBER, Ballot(0, thief), (digest(b"a"),), digest(b"x")))
    votes = [entry(peer, Vote(NUMBER, Ballot(0, thief), stolen[0])) for peer in ORDER]
    assert decided_proposal(book_of(stolen, *votes)[0], ORDER) is None


def test_a_second_vote_and_a_vote_below_a_promise_do_not_count():
    me = ORDER[3]
    other = Vote(NUMBER, ballot(0), digest(b"another proposal"))
    book, faults = book_of(VOTES[3], VOTES[3], entry(me, other))
    assert faults == ["two votes in one ballot"]
    assert book.votes[ballot(0)][me] == (VOTES[3][0], VOTES[3][2])
    book, faults = book_of(entry(me, Promise(NUMBER, ballot(2), ())), VOTES[3])
    assert faults == ["a vote below its author's promise"]
    assert book.votes == {}


def test_promises_and_votes_bind_their_author_to_the_highest_ballot():
    me = ORDER[0]
    book, _ = book_of(VOTES[0], entry(me, Promise(NUMBER, ballot(4), (VOTES[0][0],))))
    assert book.promised(me) == ballot(4)
    assert book.highest_vote(me) == (VOTES[0][0], VOTES[0][2])
    book, _ = add_entry(book, *entry(me, Vote(NUMBER, ballot(6), digest(b"p"))))
    assert book.promised(me) == ballot(6)
    assert book.promised(ORDER[1]) is None
    assert book.highest_vote(ORDER[1]) is None


def test_of_two_proposals_in_one_ballot_everybody_takes_the_same():
    first, second = PROPOSED, entry(ballot(0).proposer, proposal(0, b"c"))
    forward, faults = book_of(first, second)
    backward, _ = book_of(second, first)
    assert faults == ["two proposals in one ballot"]
    assert forward.first_proposals()[ballot(0)] == backward.first_proposals()[ballot(0)]
    assert ballot(1) not in forward.first_proposals()


def test_the_newest_acknowledgement_of_an_author_counts():
    acks = [entry(ORDER[0], Ack(NUMBER, digest(name), digest(b"v"))) for name in (b"old", b"new")]
    book, _ = book_of(*acks)
    assert book.acks == {ORDER[0]: digest(b"new")}


def test_of_contributions_and_reductions_of_one_author_the_first_counts():
    def both(name: bytes) -> list[tuple[Digest, PeerId, object]]:
        roots = (digest(name), digest(b"rows"), digest(b"kept"))
        reduction = Reduction(NUMBER, Span(0, 4), b"", (), digest(b"set"), *roots, b"")
        return [
            entry(ORDER[0], Contribution(NUMBER, digest(b"b"), digest(name), 1, 1, 64, 1.0)),
            entry(ORDER[0], reduction),
        ]

    first, second = both(b"first"), both(b"second")
    book, faults = book_of(*first, *second)
    assert book.unknown([one[0] for one in (*first, *second)]) == tuple(one[0] for one in second)
    assert not faults


def test_contributions_are_kept_by_entry():
    one = entry(ORDER[0], Contribution(NUMBER, digest(b"b"), digest(b"p"), 1, 1, 64, 1.0))
    book, _ = book_of(one, one)
    assert book.contributions == {one[0]: (ORDER[0], one[2])}


def test_an_author_whose_feed_was_dropped_contributes_when_it_comes_again():
    one, other = (
        entry(peer, Contribution(NUMBER, digest(b"b"), digest(b"p"), 1, 1, 64, 1.0)) for peer in ORDER[:2]
    )
    book, _ = book_of(one, other)
    dropped = without(book, ORDER[0], held=())
    assert [*dropped.contributions] == [other[0]]
    again, _ = add_entry(dropped, *one)
    assert again == book


def test_the_first_proposals_of_an_author_are_kept_and_the_highest_prepares():
    owned = [ballot(attempt) for attempt in range(0, 5 * 4 * PROPOSALS_KEPT, len(ORDER))]
    said = [entry(ORDER[0], Proposal(NUMBER, at, (digest(b"a"),), digest(b"s"))) for at in owned]
    said += [entry(ORDER[0], Prepare(NUMBER, at)) for at in owned]
    book, faults = book_of(*said)
    assert [*book.proposals] == [one[0] for one in said[:PROPOSALS_KEPT]]
    assert [*book.prepares] == owned[-PREPARES_KEPT:]
    assert not faults


def test_each_epoch_has_its_own_ballots_of_an_author():
    """Nodes enter an epoch at different places of its author's feed, and all must count the same there."""
    before = [ballot(attempt) for attempt in range(0, 5 * 2 * PREPARES_KEPT, len(ORDER))]
    newest = Ballot(0, ORDER[0], b"epoch")
    prepares = [entry(ORDER[0], Prepare(NUMBER, at)) for at in (*before, newest)]
    proposals = [
        entry(ORDER[0], Proposal(NUMBER, at, (digest(b"a"),), digest(b"s"))) for at in (*before * 8, newest)
    ]
    proposals = [(digest(bytes([at % 256, at // 256])), *one[1:]) for at, one in enumerate(proposals)]
    promises = [entry(ORDER[0], Promise(NUMBER, Ballot(at, ORDER[1]), ())) for at in range(BALLOTS_KEPT)]
    vote = entry(ORDER[0], Vote(NUMBER, newest, digest(b"p")))
    early, _ = book_of(vote, prepares[-1], proposals[-1], *prepares[:-1], *proposals[:-1], *promises)
    late, _ = book_of(*prepares[:-1], *proposals[:-1], *promises, vote, proposals[-1], prepares[-1])
    assert early == late
    found = late.within(b"epoch")
    assert (len(found.prepares), len(found.proposals), len(found.votes)) == (1, 1, 1)


def test_an_author_writes_only_so_many_ballots_about_a_round():
    """Votes and promises of any attempt are legal, so a liar may write as many as its feed takes."""
    liar = ORDER[0]
    book, _ = book_of(*(entry(liar, Promise(NUMBER, ballot(at), ())) for at in range(BALLOTS_KEPT)))
    full = book
    for body in (Promise(NUMBER, ballot(9999), ()), Vote(NUMBER, ballot(9999), digest(b"x"))):
        book, _ = add_entry(book, *entry(liar, body))
        book = add_orphan(book, *entry(liar, body))
    assert book is full
    after, _ = add_entry(book, *VOTES[1])
    assert after.votes, "and nobody else is kept from it"


class Unwalked(dict):
    """A mapping that may be asked for one key at a time."""

    def __iter__(self):
        raise AssertionError("all of it was walked")

    items = keys = values = __iter__


def test_a_vote_looks_at_no_promise_but_its_author_s_highest_of_its_epoch():
    """A liar's thousands of ballots may enter the book in one step: to walk all at each vote took their square."""
    promised = [*map(ballot, (7, 2, 4)), Ballot(9, ORDER[0], b"epoch")]
    said = [entry(ORDER[0], Promise(NUMBER, at, ())) for at in promised]
    book, _ = book_of(*said, entry(ORDER[1], Promise(NUMBER, ballot(8), ())))
    book = replace(book, promises=Unwalked(book.promises))
    faults = [add_entry(book, *entry(ORDER[0], Vote(NUMBER, ballot(at), digest(b"p"))))[1] for at in (6, 7, 8)]
    assert faults == ["a vote below its author's promise", "", ""]


def test_votes_that_do_not_count_take_no_copy_each():
    votes = [entry(ORDER[0], Vote(NUMBER, ballot(0), digest(bytes([at])))) for at in range(100)]
    book, _ = book_of(*votes)
    assert len(book.other_votes) == 99
    assert type(book.other_votes) is LayeredMap
    name, who, vote = votes[50]
    again, _ = add_entry(book, digest(b"twice"), who, vote)
    assert again.other_votes[who, ballot(0), vote.proposal] == name, "the first entry stays"


def said_by(peer: PeerId, epoch: bytes = b"") -> list[tuple[Digest, PeerId, object]]:
    at = Ballot(ORDER.index(peer), peer, epoch)
    name = digest(peer.encode(), epoch)
    bodies = [Prepare(NUMBER, at), Proposal(NUMBER, at, (name,), name), Promise(NUMBER, at, ())]
    bodies += [Vote(NUMBER, at, name), Vote(NUMBER, at, digest(b"two")), Ack(NUMBER, name, name)]
    return [entry(peer, body) for body in bodies]


def test_nothing_is_left_of_the_votes_of_one_author_that_decides_nothing():
    gone = [entry(ORDER[0], Vote(NUMBER, ballot(at), digest(b"name"))) for at in range(3)]
    others, _ = book_of(*(one for peer in ORDER[1:] for one in said_by(peer)))
    book, _ = add_entry(others, *entry(ORDER[0], Ack(NUMBER, digest(b"name"), digest(b"name"))))
    for one in gone:
        book = add_orphan(book, *one)
    left = without_orphans(book, ORDER[0])
    assert left == others
    for one in gone:
        left = add_orphan(left, *one)
    assert left.other_votes == book.other_votes, "and all of it may come again"
