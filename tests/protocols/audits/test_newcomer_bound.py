"""How many newcomers one final set names, and that a flood neither grows it nor keeps a worker out."""

import pytest
from msgspec.structs import replace

from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger import set_limit
from atoll.protocols.ledger.ballots import Book, add_entry, decided_proposal
from atoll.protocols.ledger.records import Ballot, Proposal, Vote
from atoll.protocols.ledger.set_limit import VIA, Arrival, Arrivals, NewcomerOrder, wide_block
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
        named = order_of(run, number).named([*MEMBERS[:4], *FLOOD], Arrivals())
        assert {*MEMBERS[:4]} < named
        assert len(named) == 4 + PLACES
        assert not run.tally.is_over(named, run.voters)


def test_one_of_each_line_comes_before_a_second_one(run):
    """300 identities of two address blocks, and one that comes by itself."""
    newcomer = MEMBERS[5]
    flood = {peer: Arrival(0, f"block {at % 2}") for at, peer in enumerate(FLOOD)}
    arrivals = Arrivals({**flood, newcomer: Arrival(0, newcomer)})
    for number in range(50):
        assert newcomer in order_of(run, number).named([*MEMBERS[:4], *FLOOD, newcomer], arrivals)


def test_identities_ground_to_fit_the_draw_wait_for_the_next_one(run):
    """They were made once the digest of the final set was known; all are of one line."""
    order, newcomer = order_of(run), MEMBERS[5]
    flood = {peer: Arrival(run.tally.rounds, "block") for peer in FLOOD}
    arrivals = Arrivals({**flood, newcomer: Arrival(run.tally.rounds - 1, "block")})
    assert newcomer in order.named([*MEMBERS[:4], *FLOOD, newcomer], arrivals)


def test_whose_work_verdicts_show_has_a_place_beside_a_flood_of_its_own_block(run):
    newcomer = MEMBERS[5]
    for _ in range(3):
        run.final(*MEMBERS[:4], newcomer)
    assert run.tally.trial(newcomer)[0] >= 3
    arrivals = Arrivals({peer: Arrival(0, "block") for peer in [newcomer, *FLOOD]})
    assert newcomer in order_of(run).named([*MEMBERS[:4], newcomer, *FLOOD], arrivals)


def test_who_was_audited_least_comes_first(run):
    run.final(*MEMBERS[:4], *FLOOD[:20])
    run.final(*MEMBERS[:4])
    audited = {peer for peer in FLOOD[:20] if run.tally.trial(peer) > (-1, 0) and run.tally.trial(peer)[1]}
    assert audited
    idle = {peer for peer in audited if not run.tally.trial(peer)[0]}
    fresh = FLOOD[100 : 100 + PLACES]
    arrivals = Arrivals({peer: Arrival(0, "block") for peer in [*idle, *fresh]})
    assert {*fresh} <= order_of(run).named([*MEMBERS[:4], *idle, *fresh], arrivals)


class Flooded:
    """A run that some authors of more and more blocks flood, and a newcomer that comes in round 40."""

    def __init__(self, seed, each_round, line_of):
        self.run, self.each_round, self.line_of = Run(seed), each_round, line_of
        self.run.tally = replace(self.run.tally, newcomers=PLACES)
        self.crowd, self.arrivals, self.first = [], Arrivals(), None

    def final(self, newcomer=None):
        tally, authors = self.run.tally, [*MEMBERS[:4]]
        if tally.rounds >= 20:
            fresh = FLOOD[len(self.crowd) : len(self.crowd) + self.each_round]
            self.crowd += fresh
            for at, peer in enumerate(fresh):
                self.arrivals = self.arrivals.noted(peer, Arrival(tally.rounds, self.line_of(at)), list)
            authors += self.crowd
        if newcomer:
            self.arrivals = self.arrivals.noted(newcomer, Arrival(tally.rounds, newcomer), list)
            authors.append(newcomer)
        named = order_of(self.run, tally.rounds).named(authors, self.arrivals)
        assert {*MEMBERS[:4]} <= named
        assert not tally.is_over(named, self.run.voters)
        if self.first is None and newcomer in named:
            self.first = tally.rounds
        self.run.final(*sorted(named))
        self.arrivals = self.arrivals.after(tally, self.run.tally)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("each_round", "line_of"),
    [
        (10, lambda at: f"block {at % 2}"),
        (40, lambda at: f"block {at % 2}"),
        (40, lambda at: f"10.{at}.0.0/24"),
        (40, lambda at: f"2001:db8:{at:x}::/64"),
    ],
    ids=["10 of two blocks", "40 of two blocks", "40 blocks", "40 blocks of a wide one"],
)
def test_a_newcomer_beside_a_flood_is_in_at_once_and_decides(monkeypatch, seed, each_round, line_of):
    """The flood goes on, and identities that were left out come again each round."""
    monkeypatch.setattr(test_shown_work, "NOISE", [*NOISE, *FLOOD])
    flooded, newcomer = Flooded(seed, each_round, line_of), MEMBERS[5]
    for number in range(80):
        flooded.final(newcomer if number >= 40 else None)
    assert flooded.first <= 41
    assert flooded.run.decided[newcomer] <= 40 + 3 * P
    assert not flooded.run.decided.keys() & {*FLOOD}


def test_one_line_of_each_wide_block_comes_before_a_second_one(run):
    newcomer, flood = MEMBERS[5], {peer: Arrival(0, f"2001:db8:{at:x}::/64") for at, peer in enumerate(FLOOD)}
    arrivals = Arrivals({**flood, newcomer: Arrival(0, "2001:db9::/64")})
    for number in range(20):
        assert newcomer in order_of(run, number).named([*MEMBERS[:4], *FLOOD, newcomer], arrivals)


def test_a_line_of_which_audits_found_no_work_comes_after_others(run):
    lines = {peer: Arrival(0, f"10.{at}.0.0/24") for at, peer in enumerate([*FLOOD[:40], MEMBERS[5]])}
    arrivals = Arrivals(lines, {f"10.{at}.0.0/24": (1, 0) for at in range(40)} | {"10.40.0.0/24": (0, 9)})
    for number in range(20):
        assert MEMBERS[5] in order_of(run, number).named([*MEMBERS[:4], *FLOOD[:40], MEMBERS[5]], arrivals)


def test_audits_that_find_nothing_are_counted_by_line_and_work_is_not(run):
    crowd, newcomer = FLOOD[:4], MEMBERS[5]
    arrivals = Arrivals({peer: Arrival(0, "a line") for peer in [*crowd, newcomer]})
    for _ in range(6):
        before = run.tally
        run.final(*MEMBERS[:4], *crowd, newcomer)
        arrivals = arrivals.after(before, run.tally)
        assert arrivals.after(run.tally, run.tally) is arrivals
    found = sum(run.tally.trial(peer)[1] for peer in crowd)
    assert 6 <= arrivals.turns["a line"][0] <= found
    alone = Arrivals({newcomer: Arrival(0, "a line")})
    assert alone.after(before, run.tally).turns == {}, "verdicts show its work"


def test_a_line_that_had_a_turn_comes_after_those_that_had_none(run):
    """All lines have one after the other, however many came at once; audits are too few for that."""
    everybody, had = FLOOD[:40], set()
    arrivals = Arrivals({peer: Arrival(0, f"10.{at}.0.0/24") for at, peer in enumerate(everybody)})
    for number in range(-(-len(everybody) // PLACES)):
        before, named = run.tally, order_of(run, number).named([*MEMBERS[:4], *everybody], arrivals)
        assert not any(before.trial(peer)[0] for peer in everybody), "nobody is promising"
        assert len(had | named) - len(had) >= min(PLACES, len(everybody) + 4 - len(had))
        had |= named
        run.final(*MEMBERS[:4], *sorted(named - {*MEMBERS}))
        arrivals = arrivals.after(before, run.tally)
        assert arrivals.after(run.tally, run.tally) is arrivals
    assert had >= {*everybody}


def test_who_has_all_of_a_wide_block_has_one_turn(run):
    """Each set names one of another /24, which had none."""
    flood = {peer: Arrival(0, f"10.{at % PLACES}.{at}.0/24") for at, peer in enumerate(FLOOD[:60])}
    others = {peer: Arrival(0, f"20.{at}.0.0/24") for at, peer in enumerate(NOISE[:PLACES])}
    arrivals, before = Arrivals({**flood, **others}), run.tally
    run.final(*MEMBERS[:4], *FLOOD[:PLACES])
    arrivals = arrivals.after(before, run.tally)
    assert arrivals.turns["10.0.0.0/16"] >= (0, 1)
    assert not any(run.tally.trial(peer)[0] for peer in FLOOD[:PLACES]), "nobody is promising"
    assert {*others} <= order_of(run).named([*MEMBERS[:4], *flood, *others], arrivals)


def test_who_brings_others_has_no_second_turn_before_those_that_come_by_themselves(run):
    """Forty addresses, each with what it brings; half of what these bring had a turn, and so had two newcomers."""
    flood = {peer: Arrival(0, f"{VIA}10.{at}.0.0/24") for at, peer in enumerate(FLOOD[:40])}
    one, two, brought = MEMBERS[5], MEMBERS[6], MEMBERS[7]
    newcomers = {
        one: Arrival(0, "20.0.0.0/24"),
        two: Arrival(0, "20.1.0.0/24"),
        brought: Arrival(0, f"{VIA}friend"),
    }
    everybody, arrivals = [*MEMBERS[:4], *flood, one, two], Arrivals({**flood, **newcomers})
    for number in range(20):
        assert {one, two} <= order_of(run, number).named(everybody, arrivals)
    had = replace(arrivals, turns={"20.0.0.0/16": (0, 1)})
    assert not all(one in order_of(run, number).named(everybody, had) for number in range(20)), "it had its turn"
    assert two in order_of(run).named(everybody, had)
    had = replace(arrivals, turns={f"{VIA}10.{at}.0.0/16": (0, 1) for at in range(40)})
    assert {one, two, brought} <= order_of(run).named([*everybody, brought], had), "those that had one wait"


def test_a_newcomer_is_not_charged_for_what_it_passes_on(run):
    newcomer, crowd = MEMBERS[5], FLOOD[:PLACES]
    arrivals = Arrivals({peer: Arrival(0, f"{VIA}20.0.0.0/24") for peer in crowd}), run.tally
    run.final(*MEMBERS[:4], *crowd)
    arrivals = arrivals[0].after(arrivals[1], run.tally).noted(newcomer, Arrival(0, "20.0.0.0/24"), list)
    assert arrivals.turns.keys() == {f"{VIA}20.0.0.0/24", f"{VIA}20.0.0.0/16"}
    fresh = {peer: Arrival(0, f"10.{at}.0.0/24") for at, peer in enumerate(FLOOD[100 : 99 + PLACES])}
    arrivals = replace(arrivals, by_author={**arrivals.by_author, **fresh})
    assert newcomer in order_of(run).named([*MEMBERS[:4], *fresh, newcomer, *crowd], arrivals)


def test_wide_blocks_are_those_of_one_network():
    assert wide_block(f"{VIA}10.1.2.0/24") == wide_block(f"{VIA}10.1.9.0/24") == f"{VIA}10.1.0.0/16"
    assert wide_block(f"{VIA}a peer") == f"{VIA}a peer"
    assert wide_block("10.1.2.0/24") == wide_block("10.1.9.0/24") == "10.1.0.0/16"
    assert wide_block("2001:db8:1::/64") == "2001:db8::/32"
    assert wide_block("a peer") == "a peer"


def test_a_full_table_of_arrivals_forgets_the_oldest_that_nobody_needs(monkeypatch):
    """Else whoever fills it once makes each later identity a line of its own."""
    monkeypatch.setattr(set_limit, "ARRIVALS_KEPT", 8)
    arrivals = Arrivals()
    for peer in FLOOD[:30]:
        arrivals = arrivals.noted(peer, Arrival(0, "block"), lambda: FLOOD[:2])
        assert len(arrivals.by_author) <= 8
        assert arrivals.of(peer).line == "block"
    assert arrivals.by_author.keys() >= {*FLOOD[:2]}
    assert arrivals.noted(FLOOD[0], Arrival(9, "other"), list) is arrivals


def test_a_flood_of_lines_makes_nobody_forget_the_newest_of_them(run, monkeypatch):
    monkeypatch.setattr(set_limit, "LINES_KEPT", 4)
    arrivals = Arrivals({FLOOD[0]: Arrival(0, "at work")}, dict.fromkeys(["at work", *"abc"], (1, 1)))
    for _ in range(4):
        before = run.tally
        run.final(*MEMBERS[:4], FLOOD[0])
        arrivals = arrivals.after(before, run.tally)
    arrivals = replace(arrivals, turns={**arrivals.turns, "d": (1, 1), "e": (1, 1)})
    run.final(*MEMBERS[:4])
    kept = arrivals.after(before, run.tally).turns
    assert len(kept) == 4
    assert kept["at work"] > (1, 1)
