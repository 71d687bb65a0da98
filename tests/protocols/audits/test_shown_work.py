"""Who decides where voters must have shown work: whom verdicts of those that decide speak for, and nobody else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols.audits.shown_work import FinalVerdict, ShownWork, leaves_no_doubt
from atoll.protocols.audits.standing import audited_by
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.records import MAX_EXCESS, MAX_VERDICTS, AuditedContribution, Verdict
from tests.protocols.audits.all_verdicts import AllVerdicts

MEMBERS = [PeerId(f"member-{number}") for number in range(8)]
OWNER = MEMBERS[0]
NOISE = [PeerId(f"noise-{number}") for number in range(20)]
P = 8


class Run:
    """Final sets of members that work, and of identities that send noise and vouch for each other.

    An honest verdict on work is normal around `usual` deviations, on noise around 0. Half of its variance is
    common to all auditors of a contribution, because they look at the same windows.
    """

    def __init__(self, seed, *, usual=4.0, liars=(), each=3):
        self.seed, self.rng, self.usual, self.liars = seed, random.Random(seed), usual, {*liars}
        self.tally = ShownWork(P, newcomers=16, owner=OWNER, each=each)
        self.voters = (OWNER,)
        self.waiting, self.decided, self.gaps = {}, {}, 0

    def verdict(self, auditor, about, common):
        if auditor in NOISE or auditor in self.liars:
            return MAX_EXCESS if about in NOISE or about in self.liars else -MAX_EXCESS
        found = (0.0 if about in NOISE else self.usual) + common + self.rng.gauss(0, 0.5**0.5)
        return max(-MAX_EXCESS, min(MAX_EXCESS, round(16 * found)))

    def contribution(self, author):
        number = self.tally.rounds
        verdicts = tuple(self.waiting.pop(author, [])[:MAX_VERDICTS])
        payload = digest(author.encode(), number.to_bytes(4, "big"), str(self.seed).encode())
        return AuditedContribution(number, digest(b"base"), payload, 1, 1, 64, 1.0, verdicts=verdicts)

    def final(self, *authors):
        members = [
            (digest(b"entry", one.payload), author, one)
            for author in authors
            for one in [self.contribution(author)]
        ]
        self.rng.shuffle(members)
        deciding = self.tally.proven(authors, self.voters)
        number = self.tally.rounds
        self.count(authors, members, deciding)
        self.voters = deciding
        author_of = {entry: author for entry, author, _ in members}
        common = {entry: self.rng.gauss(0, 0.5**0.5) for entry in sorted(author_of)}
        for entry, drawn in sorted(audited_by(author_of, self.tally.each).items()):
            for about in drawn:
                found = self.verdict(author_of[entry], author_of[about], common[about])
                self.waiting.setdefault(author_of[entry], []).append(Verdict(about, found))
        for author in deciding:
            self.decided.setdefault(author, number)

    def count(self, authors, members, deciding):
        self.tally = self.tally.after(authors, members, deciding)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("first", [0, 20])
def test_noise_never_decides_and_a_newcomer_that_works_does(seed, first):
    """From round `first` on, five in six contributions are noise; the newcomer comes in round 20."""
    run = Run(seed)
    for number in range(100):
        run.final(*MEMBERS[: 4 if number >= 20 else 3], *(NOISE if number >= first else ()))
    assert not run.decided.keys() & {*NOISE}
    assert run.decided[OWNER] == 0
    assert run.decided[MEMBERS[1]] >= P
    # Three decide, so only the owner's audits count: three a round, of 23 others.
    assert 20 + P <= run.decided[MEMBERS[3]] <= 20 + 6 * P


@pytest.mark.parametrize("seed", range(6))
def test_deciders_that_lie_let_no_noise_in_and_keep_nobody_out(seed):
    """Two of eight, once all decide."""
    run = Run(seed, liars=MEMBERS[1:3])
    for number in range(120):
        run.final(*MEMBERS[: 8 if number >= 25 else 7], *(NOISE if number >= 25 else ()))
    assert not run.decided.keys() & {*NOISE}
    assert {*MEMBERS} == run.decided.keys()


@pytest.mark.parametrize("seed", range(4))
def test_who_shows_less_decides_later(seed):
    run = Run(seed, usual=1.5)
    for _ in range(120):
        run.final(*MEMBERS[:5])
    assert {*MEMBERS[:5]} == run.decided.keys()


def test_nobody_decides_without_verdicts_or_before_its_probation():
    run = Run(1)
    for number in range(P + 1):
        run.final(*MEMBERS[:4])
        assert number < P or {*MEMBERS[:4]} == {*run.voters}
        assert number >= P or run.voters == {OWNER}
        assert run.tally.missing(MEMBERS[1]) == max(0, P - number - 1)
    run = Run(1)
    for _ in range(3 * P):
        run.waiting = {}
        run.final(*MEMBERS[:4])
    assert run.voters == {OWNER}
    assert run.tally.missing(MEMBERS[1]) == 1


def test_where_the_owner_has_no_part_in_the_first_set_its_authors_decide():
    run = Run(1)
    run.final(*MEMBERS[1:4])
    assert run.voters == {*MEMBERS[1:4]}
    run.final(*MEMBERS[:6])
    assert run.voters == {*MEMBERS[1:4]}


def test_those_that_decide_go_on_while_none_of_them_works():
    """Else whoever sends anything would have the run as soon as its few deciders pause."""
    run = Run(1)
    run.final(*MEMBERS[:3])
    for _ in range(2 * P):
        run.final(*NOISE)
        assert run.voters == {OWNER}


def test_members_of_an_epoch_decide_until_somebody_that_may_decide_works_again():
    run = Run(1)
    run.final(*MEMBERS[:4])
    run.voters = frozenset(MEMBERS[1:4])  # the owner is gone
    for _ in range(P - 2):
        run.final(*MEMBERS[1:6])
        assert run.voters == {*MEMBERS[1:4]}
    for _ in range(4):
        run.final(*MEMBERS[1:6])
    run.final(OWNER, *MEMBERS[1:6])
    assert run.voters == {OWNER, *MEMBERS[1:6]}, "they found work in each other's contributions"


def test_verdicts_that_nobody_asked_for_do_not_count():
    run = Run(1, each=1)
    run.final(*MEMBERS[:8])
    entries = {author: entry for entry, author in ((one.entry, one.author) for one in run.tally.awaited)}
    asked = run.tally.awaited
    assert [one.auditor for one in asked] == [OWNER], "deciders alone are asked"
    unasked = next(author for author in MEMBERS[1:8] if author not in entries)
    other = digest(b"entry", digest(unasked.encode(), (0).to_bytes(4, "big"), b"1"))
    run.waiting = {OWNER: [Verdict(other, MAX_EXCESS)], MEMBERS[1]: [Verdict(asked[0].entry, MAX_EXCESS)]}
    run.final(*MEMBERS[:8])
    assert run.tally.found == ()


def test_what_was_found_is_forgotten_after_so_many_rounds():
    run = Run(1)
    for _ in range(3):
        run.final(*MEMBERS[:4])
    assert run.tally.found
    run.waiting = {}
    for _ in range(run.tally.memory):
        run.final(*MEMBERS[4:8])
    assert run.tally.found == ()
    assert all(one.round >= 3 for one in run.tally.awaited)


@given(st.integers(4, 16), st.integers(1, 6), st.data())
def test_no_verdicts_of_less_than_a_third_of_the_deciders_are_of_any_use(deciders, many, data):
    """Beside honest verdicts that show nothing, or none at all."""
    liars = (deciders - 1) // 3
    row = lambda auditor, excess, number: FinalVerdict(number, PeerId("x"), PeerId(auditor), excess)  # noqa: E731
    lies = [row(f"liar-{n}", MAX_EXCESS, at) for n in range(liars) for at in range(many)]
    honest = data.draw(st.lists(st.tuples(st.integers(0, deciders - liars - 1), st.integers(0, 9)), unique=True))
    shown = [row(f"honest-{who}", data.draw(st.integers(-16, 0)), at) for who, at in honest]
    assert not leaves_no_doubt([*lies, *shown], deciders)


class Chain(Run):
    """A chain whose sets, verdicts, epochs and pauses are drawn; `plain` reads the same sets."""

    def __init__(self, data, memory):
        super().__init__(data.draw(st.integers(0, 1 << 16)))
        self.tally = replace(self.tally, memory=memory, probation=data.draw(st.integers(2, 5)))
        self.plain = AllVerdicts(self.tally.probation, OWNER, self.tally.each, memory)

    def count(self, authors, members, deciding):
        assert deciding == self.plain.proven(authors, self.voters)
        self.plain.after(authors, members, deciding)
        super().count(authors, members, deciding)
        assert self.tally.shown == self.plain.shown

    def go_on(self):
        """A set of some members and of noise; now and then another epoch decides, or verdicts are lost."""
        rng = self.rng
        if rng.random() < 0.1:
            self.voters = frozenset(rng.sample(MEMBERS, 3))
        if rng.random() < 0.2:
            self.waiting.pop(rng.choice(MEMBERS), None)
        self.final(*rng.sample(MEMBERS, rng.randint(1, 8)), *NOISE[: rng.choice((0, 0, 1, 4))])


@settings(deadline=None)
@given(st.data(), st.integers(4, 12))
def test_what_is_forgotten_decides_nothing(data, memory):
    chain = Chain(data, memory)
    for _ in range(40):
        chain.go_on()
        kept = {one.author for one in (*chain.tally.awaited, *chain.tally.found)}
        assert not kept & chain.tally.shown
