"""How many newcomers one final set names, and that a flood neither grows it nor keeps a worker out."""

import random

import pytest
from msgspec.structs import replace

from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.ballots import Book, add_entry, decided_proposal
from atoll.protocols.ledger.records import Ballot, Proposal, Vote
from atoll.protocols.ledger.set_limit import Arrival, NewcomerOrder
from tests.protocols.audits import test_shown_work
from tests.protocols.audits.test_shown_work import MEMBERS, NOISE, OWNER, P, Run

PLACES = 6
FLOOD = [PeerId(f"noise-of-a-flood-{number}") for number in range(400)]


@pytest.fixture
def run(monkeypatch):
    """Four members decide."""
    monkeypatch.setattr(test_shown_work, "NOISE", [*NOISE, *FLOOD])
    made = Run(1)
    made.tally = replace(made.tally, newcomers=PLACES)
    for _ in range(2 * P):
        made.final(*MEMBERS[:4])
    assert made.voters == {*MEMBERS[:4]}
    return made


def test_a_set_names_as_many_newcomers_as_others_and_the_runs_number_at_least(run):
    members, tally = MEMBERS[:4], run.tally
    assert not tally.is_over([*members, *FLOOD[:PLACES]], members)
    assert tally.is_over([*members, *FLOOD[: PLACES + 1]], members)
    assert tally.is_over(FLOOD[: PLACES + 1], members)
    wide = replace(tally, newcomers=3)
    assert not wide.is_over([*members, *FLOOD[:4]], members)
    assert wide.is_over([*members, *FLOOD[:5]], members)
    assert not replace(tally, newcomers=0).is_over([*members, *FLOOD], members)


def test_voters_on_probation_are_no_newcomers(run):
    """Members of an epoch decide, however few sets name them."""
    assert not run.tally.is_over(FLOOD[:50], FLOOD[:50])
    assert run.tally.is_over(FLOOD[:50], FLOOD[:20])


def book_of(run, authors, voters):
    """A book with a contribution of each author, and all voters' votes for the set of them."""
    names, book = [], Book()
    for author in authors:
        entry = digest(author.encode())
        names.append(entry)
        book, _ = add_entry(book, entry, author, run.contribution(author))
    number, ballot = run.tally.rounds, Ballot(0, voters[0])
    proposal = Proposal(number, ballot, tuple(sorted(names)), digest(b"state"))
    book, _ = add_entry(book, digest(b"proposal"), voters[0], proposal)
    for peer in voters:
        book, _ = add_entry(book, digest(b"vote", peer.encode()), peer, Vote(number, ballot, digest(b"proposal")))
    return book, proposal


def test_a_set_over_the_bound_is_never_final_whoever_votes_for_it(run):
    voters = tuple(MEMBERS[:4])
    for many in (PLACES, PLACES + 1):
        book, proposal = book_of(run, [*voters, *FLOOD[:many]], voters)
        assert decided_proposal(book, voters)
        bounded = book.bounded(run.tally, voters)
        assert bool(decided_proposal(bounded, voters)) == (many == PLACES)
        assert bounded.is_void(proposal) == (many > PLACES)
        assert not book.bounded(replace(run.tally, newcomers=0), voters).is_void(proposal)


def test_a_set_is_judged_once_all_of_its_entries_are_here(run):
    voters = tuple(MEMBERS[:4])
    book, proposal = book_of(run, [*voters, *FLOOD[: PLACES + 1]], voters)
    partial = replace(book, contributions={n: c for n, c in book.contributions.items() if c[0] != OWNER})
    assert not partial.bounded(run.tally, voters).is_void(proposal)


def order_of(run, number=0):
    return NewcomerOrder(run.tally, frozenset(run.voters), digest(b"set", number.to_bytes(4, "big")))


def test_members_are_always_named_and_no_more_newcomers_than_there_are_places(run):
    for number in range(20):
        named = order_of(run, number).named([*MEMBERS[:4], *FLOOD], {})
        assert {*MEMBERS[:4]} < named
        assert len(named) == 4 + PLACES
        assert not run.tally.is_over(named, run.voters)


def test_one_of_each_line_comes_before_a_second_one(run):
    """300 identities of two address blocks, and one that comes by itself."""
    arrivals = {peer: Arrival(0, f"block {at % 2}") for at, peer in enumerate(FLOOD)}
    newcomer = MEMBERS[5]
    arrivals[newcomer] = Arrival(0, newcomer)
    for number in range(50):
        assert newcomer in order_of(run, number).named([*MEMBERS[:4], *FLOOD, newcomer], arrivals)


def test_identities_ground_to_fit_the_draw_wait_for_the_next_one(run):
    """They were made once the digest of the final set was known; all are of one line."""
    order, newcomer = order_of(run), MEMBERS[5]
    arrivals = {newcomer: Arrival(run.tally.rounds - 1, "block")}
    arrivals.update((peer, Arrival(run.tally.rounds, "block")) for peer in FLOOD)
    assert newcomer in order.named([*MEMBERS[:4], *FLOOD, newcomer], arrivals)


def test_whose_work_verdicts_show_has_a_place_beside_a_flood_of_its_own_block(run):
    newcomer = MEMBERS[5]
    for _ in range(3):
        run.final(*MEMBERS[:4], newcomer)
    assert run.tally.trial(newcomer)[0] >= 3
    arrivals = {peer: Arrival(0, "block") for peer in [newcomer, *FLOOD]}
    assert newcomer in order_of(run).named([*MEMBERS[:4], newcomer, *FLOOD], arrivals)


def test_who_was_audited_least_comes_first(run):
    run.final(*MEMBERS[:4], *FLOOD[:20])
    run.final(*MEMBERS[:4])
    audited = {peer for peer in FLOOD[:20] if run.tally.trial(peer) > (-1, 0) and run.tally.trial(peer)[1]}
    assert audited
    idle = {peer for peer in audited if not run.tally.trial(peer)[0]}
    fresh = FLOOD[100 : 100 + PLACES]
    arrivals = {peer: Arrival(0, "block") for peer in [*idle, *fresh]}
    assert {*fresh} <= order_of(run).named([*MEMBERS[:4], *idle, *fresh], arrivals)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("each_round", [10, 40])
def test_a_newcomer_beside_a_flood_is_in_at_once_and_decides(monkeypatch, seed, each_round):
    """The flood goes on, in two address blocks, and identities that were left out come again each round."""
    monkeypatch.setattr(test_shown_work, "NOISE", [*NOISE, *FLOOD])
    run, rng, newcomer = Run(seed), random.Random(seed), MEMBERS[5]
    run.tally = replace(run.tally, newcomers=PLACES)
    crowd, arrivals, first = [], {}, None
    for number in range(80):
        authors = [*MEMBERS[:4]]
        if number >= 20:
            fresh = FLOOD[len(crowd) : len(crowd) + each_round]
            arrivals.update((peer, Arrival(run.tally.rounds, f"block {rng.randrange(2)}")) for peer in fresh)
            crowd += fresh
            authors += crowd
        if number >= 30:
            arrivals.setdefault(newcomer, Arrival(run.tally.rounds, newcomer))
            authors.append(newcomer)
        named = order_of(run, number).named(authors, arrivals)
        assert {*MEMBERS[:4]} <= named
        assert not run.tally.is_over(named, run.voters)
        if number >= 30 and newcomer in named:
            first = number if first is None else first
        run.final(*sorted(named))
    assert first <= 31
    assert run.decided[newcomer] <= 30 + 3 * P
    assert not run.decided.keys() & {*FLOOD}
