"""Which work of open rounds was made in another chain: a function of the ledger and of our chain."""

import random
from dataclasses import replace as with_fields
from itertools import pairwise
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus.chains.apart import parting
from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochBook, add_entry
from atoll.node.daemon.consensus.types import FinalityState, OtherChainsSeen
from atoll.node.daemon.consensus.voter import _own_set
from atoll.node.daemon.removal import other_chains
from atoll.node.daemon.removal.other_chains import CHOICES_KEPT, OtherChains
from atoll.node.daemon.rounds.types import WorkApart
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.records import Contribution, Epoch, Follow, epoch_id

A, B, C, D = sorted(Identity(bytes([n]) * 32).peer_id for n in range(4))
OURS, THEIRS = Epoch(Round(5), ROOT, (A, B)), Epoch(Round(7), ROOT, (C, D))
LATER = Epoch(Round(9), epoch_id(THEIRS), (C,))
BEFORE = FinalityState(run=digest(b"run"), me=A, rounds=50, last_final=4, voters=(A, B, C, D))


def known(*entries, last_final=4, chain=()):
    """A node that has these entries; its chain has these epochs after the run's first one."""
    book = EpochBook()
    for author, body in entries:
        book = add_entry(book, author, body)
    (first,) = BEFORE.chain
    segments = (first, *(with_fields(first, epoch=epoch_id(body), first=int(body.round)) for body in chain))
    return replace(BEFORE, epochs=book, chain=segments, last_final=last_final)


BOTH = [(A, OURS), (B, OURS), (C, THEIRS), (D, THEIRS), (C, LATER)]


def test_the_other_side_of_a_fork_is_apart_and_our_own_is_not():
    node = known(*BOTH, last_final=20, chain=[OURS])
    found = [parting(node, name) for name in (ROOT, *map(epoch_id, (OURS, THEIRS, LATER)))]
    assert found == [None, None, THEIRS, THEIRS]


def test_an_epoch_is_apart_once_our_chain_decided_its_first_round_without_it():
    results = [parting(known(*BOTH, last_final=at), epoch_id(THEIRS)) for at in (5, 6, 7, 8)]
    assert results == [None, None, THEIRS, THEIRS]
    results = [parting(known(*BOTH, last_final=at, chain=[THEIRS]), epoch_id(LATER)) for at in (8, 9)]
    assert results == [None, LATER], "it continues an epoch of our chain"


def test_what_never_began_and_what_is_unknown_is_not_apart():
    waits = known((A, OURS), (B, OURS), (C, THEIRS), last_final=20, chain=[OURS])
    assert not parting(waits, epoch_id(THEIRS)), "D has not signed it"
    assert not parting(waits, b"unknown" * 4)


def entry(author, body, name):
    return SimpleNamespace(id=name, author=author, body=body)


def work(number, base=b"of all"):
    return Contribution(Round(number), digest(base), digest(b"x"), steps=1, tokens=1, weight=64, loss=1.0)


class Listener:
    """Both machines; what they are told is applied."""

    def __init__(self, finality):
        self.finality, self.told = finality, []

    def feed_finality(self, event):
        assert isinstance(event, OtherChainsSeen)
        self.finality = replace(self.finality, apart=event.entries)

    def feed_round(self, event):
        assert isinstance(event, WorkApart)
        assert event.entries == self.finality.apart
        self.told.append(event.entries)


STORY = [
    entry(B, work(21), b"B's"),
    entry(C, work(6, b"C"), b"before"),
    entry(C, work(21), b"together"),
    entry(C, work(22, b"C"), b"waited"),
    entry(C, THEIRS, b"e1"),
    entry(C, work(23, b"C"), b"there"),
    entry(D, THEIRS, b"e2"),
    entry(D, work(23, b"D"), b"there too"),
    entry(D, Follow(Round(8), epoch_id(OURS)), b"f"),
    entry(D, work(24, b"D"), b"here"),
    entry(B, work(25), b"B's again"),
    entry(C, Follow(Round(8), epoch_id(OURS)), b"f2"),
    entry(C, work(25), b"together again"),
    entry(A, work(22, b"A"), b"A waited"),
    entry(A, OURS, b"e3"),
    entry(A, work(23, b"A"), b"ours"),
]


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_choice_before_the_work_counts_in_whatever_order_feeds_arrive(seed):
    """Each feed in order; feeds mixed at random; the ledger known before, during or after."""
    random_ = random.Random(seed)
    feeds = {author: [one for one in STORY if one.author == author] for author in (A, B, C, D)}
    machines = Listener(known(*BOTH, last_final=20, chain=[OURS]))
    found = OtherChains(machines, lambda: 1.0)
    while any(feeds.values()):
        found.on_entry(random_.choice([feed for feed in feeds.values() if feed]).pop(0))
    found.step()
    assert machines.finality.apart == {b"waited", b"there", b"there too"}
    assert all(before - {b"together"} <= after for before, after in pairwise(machines.told))


def test_what_is_apart_follows_the_chain_and_final_rounds_are_forgotten():
    machines = Listener(known(*BOTH))
    found = OtherChains(machines, lambda: 1.0)
    for one in STORY:
        found.on_entry(one)
    ours, theirs = {b"A waited", b"ours", b"here", b"together again"}, {b"waited", b"there", b"there too"}
    for last_final, apart in ((4, set()), (5, ours), (7, ours | theirs)):
        machines.finality = replace(machines.finality, last_final=last_final)
        found.step()
        assert machines.finality.apart == apart, "an epoch may still be ours until its first round is decided"
    machines.finality = known(*BOTH, last_final=7, chain=[THEIRS])
    machines.finality = replace(machines.finality, apart=machines.told[-1])
    found.step()
    assert machines.finality.apart == ours
    machines.finality = replace(machines.finality, last_final=25)
    found.step()
    assert machines.finality.apart == frozenset()
    assert not found._works


def test_an_author_that_the_ledger_let_go_is_forgotten_but_for_what_the_machine_keeps():
    machines = Listener(known(*BOTH, last_final=20, chain=[OURS]))
    found = OtherChains(machines, lambda: 1.0)
    for one in STORY:
        found.on_entry(one)
    found.forget(D)
    found.step()
    assert D not in found._choices
    assert machines.finality.apart == {b"waited", b"there"}
    held = Book(contributions={b"there": (C, work(23))})
    machines.finality = replace(machines.finality, books={23: held})
    found.forget(C)
    found.step()
    assert machines.finality.apart == {b"there"}, "it was made in another chain, as before"
    machines.finality = replace(machines.finality, last_final=23)
    found.step()
    assert {*found._choices} == {A}, "once that round is final"
    for one in STORY:
        found.on_entry(one)
    found.step()
    assert {*found._choices} == {A, C, D}, "and all of it may come again"


def test_what_comes_again_of_an_author_that_was_let_go_stays():
    machines = Listener(known(*BOTH, last_final=20, chain=[OURS]))
    machines.finality = replace(machines.finality, books={23: Book(contributions={b"there": (C, work(23))})})
    found = OtherChains(machines, lambda: 1.0)
    theirs = [one for one in STORY if one.author == C]
    for one in theirs:
        found.on_entry(one)
    found.forget(C)
    for one in theirs:
        found.on_entry(one)
    machines.finality = replace(machines.finality, last_final=23)
    found.step()
    assert C in found._choices


@pytest.fixture
def asked(monkeypatch):
    """The choices of which it was asked whether they left our chain."""
    found = []
    monkeypatch.setattr(
        other_chains, "parting", lambda state, choice: found.append(choice) or parting(state, choice)
    )
    return found


def test_what_strangers_write_in_turn_takes_no_whole_look_each(asked):
    """Of 60 newcomers with 200 epochs and contributions each, every contribution took a look at all of them."""
    machines = Listener(known(last_final=20, chain=[OURS]))
    found, many = OtherChains(machines, lambda: 1.0), 50
    for number in range(many):
        for author in (C, D):
            body = Epoch(Round(1 + number % 9), ROOT if number < 9 else digest(b"made up"), (author,))
            machines.finality = replace(
                machines.finality, epochs=add_entry(machines.finality.epochs, author, body)
            )
            found.on_entry(entry(author, body, b"e"))
            found.on_entry(entry(author, work(21 + number), b"%d of %s" % (number, author.encode())))
    assert len(asked) == 2 * many
    assert len(machines.finality.apart) == 2 * 9, "those of an epoch that left our chain are apart at once"
    before = machines.finality.apart
    found.step()
    assert machines.finality.apart >= before


def test_of_an_author_s_choices_the_newest_are_looked_at(asked):
    machines = Listener(known(*BOTH, last_final=20, chain=[OURS]))
    found = OtherChains(machines, lambda: 1.0)
    for number in range(3 * CHOICES_KEPT):
        found.on_entry(entry(C, Follow(Round(8), digest(number.to_bytes(2, "big"))), b"f"))
    for one in STORY:
        found.on_entry(one)
    found.step()
    assert machines.finality.apart == {b"waited", b"there", b"there too"}
    asked.clear()
    found._looked_at = None
    found.step()
    assert CHOICES_KEPT <= len({*asked}) <= CHOICES_KEPT + 4


def test_an_idle_voter_counts_the_same_set():
    held = frozenset([b"there", b"ours"])
    book = Book(contributions={b"there": (C, work(5)), b"ours": (A, work(5))})
    idle = replace(BEFORE, books={5: book}, held=held, idle=True, stable_since=0.0, now=1e6)
    assert _own_set(replace(idle, apart=frozenset([b"there"]))) == {b"ours"}
    assert _own_set(replace(idle, apart=held)) == held, "without other work a round could never be decided"
