"""What authors that decide nothing may cost the machine: little while they are here, nothing once pruned."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus import forks
from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.chains import epochs
from atoll.node.daemon.consensus.chains.early_ballots import admit, without_early
from atoll.node.daemon.consensus.chains.epochs import EpochBook, add_entry, epoch_id, without
from atoll.node.daemon.consensus.chains.past_books import parted
from atoll.node.daemon.consensus.types import AuthorPruned, EnterEpoch, EntrySeen, MembersSeen, RoundClosed
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.layered_map import LayeredMap
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import (
    Ballot,
    Contribution,
    Epoch,
    Follow,
    Leave,
    Prepare,
    Promise,
    Proposal,
    Vote,
)
from tests.node.daemon.consensus.before_round import before_round

RUN = RunId(digest(b"strangers"))
PEERS = tuple(PeerId(f"peer-{name}") for name in "abc")
A, B, C = PEERS
STRANGER = PeerId("peer-x")
NUMBER = Round(5)


def entry(author, body):
    return EntrySeen(digest(author.encode(), repr(body).encode()), author, body)


def work(author, number):
    return entry(author, Contribution(Round(number), digest(b"b"), digest(author.encode()), 1, 1, 64, 1.0))


def begin():
    """Before round 5, whose voters are all three members."""
    return replace(before_round(NUMBER, RUN, A, A, voters=voter_order(RUN, NUMBER, PEERS)), live=True)


def after(*events, state=None):
    for event in events:
        state, _ = finality.step(begin() if state is None else state, event)
    return state


def ballots(author, number, attempts=range(3), epoch=b""):
    for attempt in attempts:
        at = Ballot(attempt, author, epoch)
        yield entry(author, Prepare(Round(number), at))
        yield entry(author, Proposal(Round(number), at, (digest(b"name"),), digest(b"state")))
        yield entry(author, Promise(Round(number), at, ()))
        yield entry(author, Vote(Round(number), at, digest(b"proposal")))


def test_ballots_of_the_round_by_anybody_but_its_voters_are_not_kept():
    state = after(*ballots(STRANGER, NUMBER, range(50)))
    assert (state.books, state.waiting) == ({}, {})
    assert writers(after(*ballots(B, NUMBER)).books[NUMBER]) == {B}


def writers(book):
    return {author for author, _ in book.written}


def test_ballots_that_come_before_their_round_count_if_their_author_decides_it():
    """The feed of a voter may come whole before that of another, whose votes make the rounds between final."""
    early = [*ballots(B, NUMBER + 1), *ballots(STRANGER, NUMBER + 1)]
    state = after(*(work(peer, NUMBER) for peer in PEERS), *early)
    assert {*state.waiting[NUMBER + 1]} == {B, STRANGER}, "nobody knows the voters of the next round"
    assert NUMBER + 1 not in state.books
    owner = state.voters[0]
    names = tuple(sorted(work(peer, NUMBER).entry for peer in PEERS))
    chosen = entry(owner, Proposal(NUMBER, Ballot(0, owner), names, digest(b"state")))
    votes = [entry(peer, Vote(NUMBER, Ballot(0, owner), chosen.entry)) for peer in PEERS]
    state = after(chosen, *votes, state=state)
    assert state.last_final == NUMBER
    assert writers(state.book) == {B}
    assert state.book.highest_vote(B) is not None
    ordered = after(chosen, *votes, state=after(*(work(peer, NUMBER) for peer in PEERS)))
    assert state.book == after(*ballots(B, NUMBER + 1), state=ordered).book, "as if they came in time"


def test_ballots_that_come_before_their_epoch_count_if_their_author_is_a_member():
    body = Epoch(NUMBER, b"", (A,))
    early = [*ballots(A, NUMBER, epoch=epoch_id(body)), *ballots(STRANGER, NUMBER, epoch=epoch_id(body))]
    state, actions = finality.step(after(MembersSeen(frozenset({A})), *early), entry(A, body))
    assert any(isinstance(action, EnterEpoch) for action in actions)
    assert writers(state.book) == {A}
    ordered = after(MembersSeen(frozenset({A})), entry(A, body))
    assert state.book == after(*ballots(A, NUMBER, epoch=epoch_id(body)), state=ordered).book, "as if in time"


def test_a_vote_of_the_next_round_that_its_author_s_leave_forbids_counts_for_no_set():
    """It waits like others, and is kept for the case that its author has two histories."""
    late = Vote(Round(NUMBER + 1), Ballot(0, C), digest(b"proposal"))
    book, _ = admit(
        parted({}, NUMBER), after(entry(B, Leave(NUMBER)), entry(B, late)).waiting, NUMBER + 1, b"", PEERS
    )
    assert not book[NUMBER + 1].votes
    assert [*book[NUMBER + 1].other_votes] == [(B, late.ballot, late.proposal)]


def test_an_early_vote_counts_also_where_its_feed_comes_again_after_its_author_left():
    """The ledger drops a feed for a moment, and fetches it from the begin."""
    vote = entry(B, Vote(Round(NUMBER + 1), Ballot(0, C), digest(b"proposal")))
    state = after(vote, entry(B, Leave(NUMBER)), vote)
    books, _ = admit(parted({}, NUMBER), state.waiting, NUMBER + 1, b"", PEERS)
    assert sum(map(len, books[NUMBER + 1].votes.values())) == 1


def test_an_early_ballot_that_contradicts_another_is_reported_once_its_round_is_decided():
    twice = [entry(B, Vote(Round(NUMBER + 1), Ballot(0, C), digest(name))) for name in (b"one", b"two")]
    waiting = after(*twice, entry(STRANGER, twice[0].body), entry(STRANGER, twice[1].body)).waiting
    assert admit(parted({}, NUMBER), waiting, NUMBER + 1, b"", PEERS)[1] == [
        (B, twice[1].entry, "two votes in one ballot")
    ]


def test_ballots_of_epochs_that_are_not_ours_change_nothing_that_is_looked_at(monkeypatch):
    """A newcomer has room for hundreds of them, a flood for thousands: a look at all at each took its square."""
    state, _ = finality.step(begin(), RoundClosed(NUMBER, (digest(b"work"),)))
    moved = []
    monkeypatch.setattr(finality, "_move", lambda state: moved.append(state) or (state, []))
    before = state.books
    for made_up in range(100):
        at = Ballot(0, STRANGER, made_up.to_bytes(32, "big"))
        state, _ = finality.step(state, entry(STRANGER, Promise(NUMBER, at, ())))
        state, _ = finality.step(state, entry(STRANGER, Promise(Round(NUMBER + 9), at, ())))
    assert state.books is before
    assert len(moved) <= 1


def test_ballots_of_other_epochs_stay_where_they_are():
    waiting = after(*ballots(B, NUMBER + 1), *ballots(B, NUMBER + 1, epoch=b"made up")).waiting
    books, _ = admit(parted({}, NUMBER), waiting, NUMBER + 1, b"", PEERS)
    assert books[NUMBER + 1].epochs == {b""}


def test_what_waits_grows_with_the_ballots_not_with_their_square():
    """Maps are shared by the states (layered_map.py): a plain one is copied for each ballot of anybody."""
    state = begin()
    for author in range(200):
        for attempt in range(100):
            at = Promise(Round(NUMBER + 1), Ballot(attempt, B), ())
            state = after(entry(PeerId(f"stranger-{author}"), at), state=state)
    sizes = {len(given) for given in state.waiting[NUMBER + 1].values()}
    assert sizes == {100}
    assert type(state.waiting[NUMBER + 1]) is LayeredMap
    assert state.books == {}


def test_a_prune_copies_nothing_of_rounds_in_which_its_author_wrote_nothing():
    """A flood of authors comes and goes each minute, each with ballots of hundreds of rounds of its own."""
    state = begin()
    for number in range(200):
        author = STRANGER if number % 2 else PeerId("peer-y")
        state = after(entry(author, Promise(Round(NUMBER + 1 + number), Ballot(0, B), ())), state=state)
    state = after(entry(B, Promise(Round(NUMBER + 2), Ballot(0, B), ())), state=state)
    left = without_early(state.waiting, STRANGER)
    assert {*left} == {NUMBER + 2, *range(NUMBER + 1, NUMBER + 201, 2)}
    assert {*left[NUMBER + 2]} == {B}
    assert all(left[at] is state.waiting[at] for at in left if at != NUMBER + 2)
    assert {*state.waiting[NUMBER + 2]} == {STRANGER, B}, "the state before stays as it was"


def said_by(author):
    yield from ballots(author, NUMBER + 1)
    yield from ballots(author, NUMBER + 900, epoch=b"e" * 32)
    yield entry(author, Epoch(Round(900), b"", tuple(sorted((author, PeerId("peer-y"))))))
    yield entry(author, Epoch(NUMBER, b"", (author,)))
    yield entry(author, Leave(NUMBER))
    yield entry(author, Vote(NUMBER, Ballot(0, B), digest(b"late")))
    yield entry(author, Follow(NUMBER, b"f" * 32))


def facts_of(state):
    books = {at: book for at, book in state.books.items() if book.written or book.contributions}
    unnamed = {at: replace(book, epochs=frozenset()) for at, book in books.items()}
    return unnamed, state.epochs, state.waiting


def test_nothing_is_left_of_a_stranger_that_the_ledger_let_go():
    others = [*ballots(B, NUMBER), entry(B, Epoch(Round(900), b"", (B,)))]
    state = after(*others, *said_by(STRANGER), AuthorPruned(STRANGER))
    assert facts_of(state) == facts_of(after(*others))
    again = after(*said_by(STRANGER), state=state)
    assert facts_of(again) == facts_of(after(*others, *said_by(STRANGER))), "and all of it may come again"


def test_what_a_decider_wrote_is_not_forgotten():
    """The ledger hears later than the machine who is accepted."""
    body = Epoch(NUMBER, b"", tuple(sorted((B, C))))
    state = after(entry(B, body), *ballots(B, NUMBER + 1), AuthorPruned(B))
    assert state.epochs.signers[epoch_id(body)] == {B}
    assert state.epochs.choice(B) == epoch_id(body)
    assert {*state.waiting[NUMBER + 1]} == {B}


def test_a_signature_stays_under_an_epoch_that_a_decider_signed():
    """B works there, whoever the others are: without the signature it would never have begun."""
    body = Epoch(NUMBER, b"", tuple(sorted((B, STRANGER))))
    state = after(entry(STRANGER, body), entry(B, body), AuthorPruned(STRANGER))
    assert state.epochs.is_complete(epoch_id(body))
    alone = after(entry(STRANGER, body), AuthorPruned(STRANGER), entry(B, body))
    assert alone.epochs.signers[epoch_id(body)] == {B}


def test_all_epochs_of_a_stranger_go_at_once(monkeypatch):
    """A flood of authors comes and goes each minute, and the loop of the daemon waits for each of them."""
    together = tuple(sorted((STRANGER, PeerId("peer-y"))))
    alone = [Epoch(Round(at), b"", (STRANGER,)) for at in range(200)]
    both = [Epoch(Round(at), b"", together) for at in range(50)]
    book = EpochBook()
    for author, bodies in ((C, [Epoch(Round(0), b"", (C,))]), (together[0], both), (together[1], both)):
        for body in bodies:
            book = add_entry(book, author, body)
    for body in alone:
        book = add_entry(book, STRANGER, body)
    made = []
    monkeypatch.setattr(epochs, "replace", lambda *one, **more: made.append(one) or replace(*one, **more))
    after = without(book, STRANGER, {C})
    assert len(made) <= 3, "copies of the book"
    assert {name: {*who} for name, who in after.signers.items()} == {
        epoch_id(Epoch(Round(0), b"", (C,))): {C},
        **{epoch_id(body): {*together} - {STRANGER} for body in both},
    }
    assert after.bodies.keys() == after.signers.keys()
    assert after.places == {(b"", 0): (epoch_id(Epoch(Round(0), b"", (C,))),)}


def looks(monkeypatch, *bodies, author=C):
    """How many places one look weighs after these epochs of one author."""
    book = EpochBook()
    for body in bodies:
        book = add_entry(book, author, body)
    weighed = []
    monkeypatch.setattr(forks, "best_of", lambda book, electorate, names: weighed.append(frozenset(names)))
    forks.look_for_better_chain(replace(begin(), epochs=book))
    return len({*weighed})


def test_only_the_epoch_that_a_decider_chose_last_is_weighed(monkeypatch):
    """Any number of others cost nothing: nobody works in them."""
    left = [Epoch(Round(at), b"", (C,)) for at in range(5)]
    assert looks(monkeypatch, *left) == 1
    chain = [left[0]]
    for _ in range(20):
        chain.append(Epoch(Round(4), epoch_id(chain[-1]), (C,)))
    assert looks(monkeypatch, *chain) == 1
    strange = [Epoch(Round(at), b"", (STRANGER,)) for at in range(5)]
    assert looks(monkeypatch, *strange, author=STRANGER) == 0


def test_a_decider_s_long_chain_costs_each_of_its_epochs_the_same(monkeypatch):
    """An accepted author may write hundreds in each round: to walk all again at each is their square."""
    steps = [0]
    walk = EpochBook.ancestors

    def counted(book, name):
        for each in walk(book, name):
            steps[0] += 1
            yield each

    monkeypatch.setattr(EpochBook, "ancestors", counted)
    state, parent = begin(), b""
    for _ in range(300):
        body = Epoch(Round(4), parent, (C,))
        state, parent = after(entry(C, body), state=state), epoch_id(body)
    assert len(state.epochs.bodies) == 300
    assert steps[0] < 300 * 8


MADE = [Epoch(Round(1), b"", (C,)), Epoch(Round(2), b"", (B,))]
for at in range(12):
    MADE.append(Epoch(Round(2 + at // 4), epoch_id(MADE[at // 2]), (PEERS[at % 3],)))


TOLD = st.tuples(
    st.sampled_from(MADE[:6]), st.sampled_from(["signs", "signs", "signs", "follows", "left", "gone"])
)


@given(
    st.lists(TOLD, min_size=4),
    st.sets(st.sampled_from([b"", *map(epoch_id, MADE[:4])]), min_size=1).map(frozenset),
)
def test_where_ways_leave_a_chain_is_found_whatever_was_asked_before(told, chain):
    book = EpochBook()
    for body, what in told:
        author = body.members[0]
        match what:
            case "signs":
                book = add_entry(book, author, body)
            case "follows":
                book = add_entry(book, author, Follow(body.round, epoch_id(body)))
            case "left":
                book = add_entry(book, author, Leave(body.round))
            case "gone":
                book = without(book, author, frozenset())
        for choice in map(epoch_id, MADE):
            way = [*book.ancestors(choice)]
            after = [name for name in way if name in book.bodies and book.bodies[name].parent in chain]
            assert book.leaves(choice, chain) == (after[0] if after else None)
            for name in map(epoch_id, MADE[:4]):
                chosen = {
                    peer for peer in PEERS if peer in book.chosen and name in book.ancestors(book.chosen[peer])
                }
                assert book.on_side(name, PEERS) == chosen
