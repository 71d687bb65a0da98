"""A set gets our vote only if it names more than half of what we have, or if we are bound to it.

Node and helpers are those of test_finality.py: round 1, four deciders, three votes make it final.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.types import (
    Append,
    CheckDone,
    CheckRound,
    EntryPayloadHeld,
    EntrySeen,
    FinalityTick,
    FinalizeRound,
    Idle,
    ReductionRefuted,
    ReportNarrow,
    RoundClosed,
)
from atoll.node.daemon.consensus.voter import is_broad, share_of_ours
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.ballots import Book, add_entry, bound_proposals, owner_of, quorum, voter_order
from atoll.protocols.ledger.records import (
    MAX_SET,
    Ballot,
    Contribution,
    Prepare,
    Promise,
    Proposal,
    Reduction,
    Vote,
)
from atoll.protocols.ledger.set_limit import first_places
from atoll.protocols.run.arena import Span

RUN = RunId(digest(b"breadth"))
PATIENCE_S = 10.0


def peers(count: int) -> tuple[PeerId, ...]:
    return voter_order(RUN, 1, [PeerId(f"peer-{n}") for n in range(count)])


def named(*authors: PeerId) -> tuple[Digest, ...]:
    return tuple(sorted(digest(b"entry", author.encode()) for author in authors))


def state_of(names: tuple[Digest, ...]) -> Digest:
    return digest(b"state", *names)


class Voter:
    """A decider of round 1 that holds the contributions of all deciders; it checks what it is asked to."""

    def __init__(self, deciders: tuple[PeerId, ...], me: PeerId) -> None:
        start = finality.begin(RUN, me, 8, PeerId("owner"))
        self.state = replace(
            start, last_final=0, applied=0, closed=0, voters=deciders, live=True, patience_s=PATIENCE_S,
            members=frozenset(deciders),
        )  # fmt: skip
        self.me, self.log = me, []
        for author in deciders:
            (entry,) = named(author)
            body = Contribution(Round(1), digest(b"base"), digest(author.encode()), 1, 1, 64, 1.0)
            self.feed(EntrySeen(entry, author, body), EntryPayloadHeld(entry))

    def feed(self, *events) -> "Voter":
        for event in events:
            self.state, actions = finality.step(self.state, event)
            self.log += actions
            for action in actions:
                if isinstance(action, CheckRound):
                    names = action.contributions
                    self.feed(CheckDone(action.round, names, state_of(names)))
                elif isinstance(action, Append):
                    self.hear(self.me, action.body)
        return self

    def hear(self, author: PeerId, body) -> Digest:
        entry = digest(b"heard", author.encode(), repr(body).encode())
        self.feed(EntrySeen(entry, author, body))
        return entry

    def close(self, *authors: PeerId, ripe: bool = True) -> "Voter":
        """Close round 1 with these; and round 2 too: more is not expected to come."""
        self.feed(RoundClosed(Round(1), named(*authors)))
        return self.feed(RoundClosed(Round(2), ())) if ripe else self

    def votes(self) -> list[Vote]:
        return [a.body for a in self.log if isinstance(a, Append) and isinstance(a.body, Vote)]

    def find(self, kind) -> list:
        return [action for action in self.log if isinstance(action, kind)]


def propose(names: tuple[Digest, ...], owner: PeerId, attempt: int = 0) -> Proposal:
    return Proposal(Round(1), Ballot(attempt, owner), names, state_of(names))


def voted_for(node: Voter, body: Proposal, *by: PeerId) -> Digest:
    """Id of a proposal that the node heard, with the votes of these for it."""
    name = node.hear(body.ballot.proposer, body)
    for voter in by:
        node.hear(voter, Vote(body.round, body.ballot, name))
    return name


def prepared_again(node: Voter, body: Proposal, first: PeerId, third: PeerId, *deciders: PeerId) -> Ballot:
    """The ballot that the node opens when `body` got two votes only: the three promise it, the two are bound."""
    name = voted_for(node, body, first, third)
    node.close(*deciders)
    for at in (10.0, 20.0, 30.0):
        node.feed(FinalityTick(at))
    (prepared,) = [x.body for x in node.log if isinstance(x, Append) and isinstance(x.body, Prepare)]
    for voter in (first, node.me, third):
        node.hear(voter, Promise(Round(1), prepared.ballot, (name,) if voter != node.me else ()))
    for at in (40.0, 50.0):
        node.feed(FinalityTick(at))
    return prepared.ballot


def votes_in_turn(node: Voter, body: Proposal, again: Proposal, *deciders: PeerId) -> list[Ballot]:
    """The node's votes: none for `body`, which got two, and then for `again`, to which no promise binds."""
    owner = again.ballot.proposer
    voted_for(node, body, body.ballot.proposer, owner)
    node.close(*deciders).feed(FinalityTick(8.0))
    assert node.votes() == []
    node.hear(owner, Prepare(Round(1), again.ballot))
    for voter in (body.ballot.proposer, owner):
        node.hear(voter, Promise(Round(1), again.ballot, ()))
    node.hear(owner, again)
    node.feed(FinalityTick(14.0))
    return [vote.ballot for vote in node.votes()]


# --- the first ballot -------------------------------------------------------------------------------


@given(count=st.integers(2, 12), data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_vote_needs_more_than_half_of_what_the_voter_has(count, data):
    all_of_them = peers(count)
    ours = data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1))
    theirs = data.draw(st.lists(st.sampled_from(all_of_them), unique=True, min_size=1))
    node = Voter(all_of_them, all_of_them[-1]).close(*ours)
    node.hear(all_of_them[0], propose(named(*theirs), all_of_them[0]))
    common = len(set(ours) & set(theirs))
    assert len(node.votes()) == (2 * common > len(ours))
    reports = [(report.named, report.ours) for report in node.find(ReportNarrow)]
    assert reports == ([(common, len(ours))] if 2 * common <= len(ours) else [])


@given(members=st.integers(1, 500), data=st.data())
def test_a_third_never_gets_a_quorum_of_a_set_that_has_half(members, data):
    """So every final set had an honest vote, and the next one needs one again: sets cannot shrink step by step."""
    liars = data.draw(st.integers(0, members // 3))
    size = data.draw(st.integers(members // 2 + 1, members))
    assert min(liars, size) < quorum(size)


def test_before_it_closed_the_round_a_node_votes_for_nothing():
    """The proposer was first: its own contribution is all that there is."""
    a, b, *_ = deciders = peers(4)
    node = Voter(deciders, b)
    node.hear(a, propose(named(*deciders), a))
    assert node.votes() == []
    assert len(node.close(*deciders, ripe=False).votes()) == 1


def test_before_it_closed_the_next_round_a_node_votes_only_for_all_that_it_has():
    a, b, c, _ = deciders = peers(4)
    node = Voter(deciders, b).close(a, b, c, ripe=False)
    node.hear(a, propose(named(a, b), a))
    assert node.votes() == []
    assert len(node.feed(RoundClosed(Round(2), ())).votes()) == 1
    early = Voter(deciders, b).close(a, b, c, ripe=False)
    early.hear(a, propose(named(*deciders), a))
    assert len(early.votes()) == 1


def test_work_that_comes_late_counts_when_it_was_folded():
    a, b, c, _ = deciders = peers(4)
    node = Voter(deciders, b).close(b, ripe=False)
    node.hear(a, propose(named(a, b), a))
    assert len(node.votes()) == 1
    node = Voter(deciders, b).close(b, c, ripe=False).close(*deciders)
    node.hear(a, propose(named(a, b), a))
    assert node.votes() == []


def test_who_rests_and_never_closes_the_round_goes_by_what_it_holds_after_a_while():
    a, b, *_ = deciders = peers(4)
    for names, count in ((named(a, b), 0), (named(*deciders[:3]), 1)):
        node = Voter(deciders, b).feed(Idle(True, 100.0))
        node.hear(a, propose(names, a))
        assert node.feed(FinalityTick(100.0 + PATIENCE_S - 0.1)).votes() == []
        assert len(node.feed(FinalityTick(100.0 + PATIENCE_S)).votes()) == count


FLOOD = [PeerId(f"eve{number}") for number in range(2 * MAX_SET)]


def flooded(node: Voter, authors) -> Voter:
    for author in authors:
        (entry,) = named(author)
        body = Contribution(Round(1), digest(b"base"), digest(author.encode()), 1, 1, 64, 1.0)
        node.feed(EntrySeen(entry, author, body), EntryPayloadHeld(entry))
    return node


def test_a_full_set_is_broad_by_the_members_in_it():
    """Of a flood each node holds another part: full sets of the same members share few of the others."""
    a, b, c, _ = deciders = peers(4)
    known, others = FLOOD[: MAX_SET - 4], FLOOD[MAX_SET : 2 * MAX_SET - 4]
    state = flooded(Voter(deciders, b), known).close(*deciders, *known).state
    assert is_broad(state, named(a, b, c, *others))
    assert not is_broad(state, named(a, b, *others))
    assert not is_broad(state, named(a, *known)), "strangers alone decide nothing"


def test_who_rests_and_holds_more_than_a_set_may_name_votes_for_a_full_set():
    a, b, *_ = deciders = peers(4)
    node = flooded(Voter(deciders, b), FLOOD[: MAX_SET + 40]).feed(Idle(True, 100.0))
    node.feed(FinalityTick(100.0 + PATIENCE_S))
    assert share_of_ours(node.state, named(*deciders)) == (4, 4)
    authors = {named(who)[0]: who for who in (*deciders, *FLOOD[: MAX_SET + 40])}
    whole = first_places(RUN, 1, authors, node.state.seniority)
    assert len(whole) == MAX_SET
    assert {*named(*deciders)} < {*whole}
    node.hear(a, propose(whole, a))
    assert len(node.votes()) == 1


def test_one_node_alone_decides_with_what_it_has():
    (me,) = deciders = peers(1)
    assert Voter(deciders, me).close(me).find(FinalizeRound)


def test_the_next_owner_brings_a_broad_set_after_one_turn():
    """What a narrow proposal costs is what silence costs: the patience, once."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, b).close(*deciders)
    name = node.hear(a, propose(named(a), a))
    node.hear(a, Vote(Round(1), Ballot(0, a), name))
    node.feed(FinalityTick(PATIENCE_S))
    ballot = Ballot(1, b)
    assert Append(Prepare(Round(1), ballot)) in node.log
    for peer in (a, c):
        node.hear(peer, Promise(Round(1), ballot, ()))
    assert Append(propose(named(*deciders), b, 1)) in node.log
    assert [vote.ballot for vote in node.votes()] == [ballot]
    mine = digest(b"heard", b.encode(), repr(propose(named(*deciders), b, 1)).encode())
    for peer in (c, d):
        node.hear(peer, Vote(Round(1), ballot, mine))
    assert [final.contributions for final in node.find(FinalizeRound)] == [named(*deciders)]


def test_saying_the_same_ballot_again_does_not_put_the_next_owner_off():
    a, b, *_ = deciders = peers(4)
    node = Voter(deciders, b).close(*deciders)
    node.hear(a, propose(named(a), a))
    for second in range(1, 11):
        node.feed(FinalityTick(float(second)))
        node.hear(a, propose(named(a, deciders[second % 4]), a))
    assert Append(Prepare(Round(1), Ballot(1, b))) in node.log


# --- later ballots: bound or not ----------------------------------------------------------------------


def in_second_ballot(node: Voter, deciders, voted, promised, names) -> None:
    """`voted` for the first owner alone; `promised` the second owner's ballot, in which it proposes `names`."""
    a, b, *_ = deciders
    first = node.hear(a, propose(named(a), a))
    for peer in voted:
        node.hear(peer, Vote(Round(1), Ballot(0, a), first))
    node.hear(b, Prepare(Round(1), Ballot(1, b)))
    for peer in promised:
        node.hear(peer, Promise(Round(1), Ballot(1, b), ()))
    node.hear(b, propose(names, b, 1))


def test_a_narrow_set_that_all_may_be_bound_to_gets_votes():
    """Two voted for it, and one more may have: it may be final somewhere."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).close(*deciders)
    in_second_ballot(node, deciders, (a, c), (a, b, c, d), named(a))
    assert node.votes() == [], "two votes are not three, and nobody is silent"
    node = Voter(deciders, d).close(*deciders)
    in_second_ballot(node, deciders, (a, c), (a, c), named(a))
    node.feed(FinalityTick(PATIENCE_S / 2 - 0.1))
    assert node.votes() == [], "b may still show that it did not vote"
    node.feed(FinalityTick(PATIENCE_S / 2))
    assert [vote.ballot for vote in node.votes()] == [Ballot(1, b)]


def test_a_lone_vote_binds_nobody():
    a, b, _, d = deciders = peers(4)
    node = Voter(deciders, d).close(*deciders)
    in_second_ballot(node, deciders, (a,), (a, b), named(a))
    node.feed(FinalityTick(PATIENCE_S))
    assert node.votes() == []


def test_a_set_that_may_be_final_elsewhere_is_not_passed_over():
    """A proposer of a later ballot says what it likes; no vote unless nothing else can be final."""
    a, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).close(*deciders)
    in_second_ballot(node, deciders, (a, c), (a, c), named(*deciders))
    node.feed(FinalityTick(PATIENCE_S))
    assert node.votes() == []
    node.hear(b, Promise(Round(1), Ballot(1, b), ()))
    assert [vote.ballot for vote in node.votes()] == [Ballot(1, b)]


def test_a_later_ballot_that_is_free_gets_no_vote_for_a_reduction_that_is_not_believed():
    """A liar that opens the second ballot before the first owner proposed would have its lie made final."""
    a, b, c, d = deciders = peers(4)
    lie = Reduction(Round(1), Span(0, 1), b"\x0f", (), *[digest(b"of the lie")] * 4, b"")
    for attempt, owner in ((0, a), (1, b), (2, c), (4, a), (5, b)):
        node = Voter(deciders, d).close(*deciders)
        node.state = replace(node.state, attempt=attempt)
        named_too = node.hear(b, lie)
        node.feed(EntryPayloadHeld(named_too), ReductionRefuted(named_too))
        names = tuple(sorted((*named(*deciders), named_too)))
        ballot = Ballot(attempt, owner)
        node.hear(owner, Prepare(Round(1), ballot))
        for peer in (a, b, c):
            node.hear(peer, Promise(Round(1), ballot, ()))
        node.hear(owner, propose(names, owner, attempt))
        # From the second turn of an owner on: each voter may doubt another one, and the round must end.
        assert [vote.ballot for vote in node.votes()] == ([ballot] if attempt >= 4 else []), attempt


def test_two_reducers_that_are_silent_to_some_delay_a_round_by_few_attempts():
    """Each half of the honest voters doubts another Reduction, so every free ballot names one that is doubted."""
    *honest, first, second = deciders = peers(25)
    nodes = {peer: Voter(deciders, peer) for peer in honest}
    for at, node in enumerate(nodes.values()):
        made = [
            Reduction(Round(1), Span(0, 1), b"\x0f", (), *[digest(p.encode())] * 4, b"") for p in (first, second)
        ]
        silent, answering = node.hear(first, made[0]), node.hear(second, made[1])
        if at % 2:
            silent, answering = answering, silent
        node.feed(EntryPayloadHeld(answering), EntryPayloadHeld(silent), ReductionRefuted(silent))
        view = tuple(sorted((*named(*deciders), answering)))
        node.feed(RoundClosed(Round(1), view), RoundClosed(Round(2), ()))
    passed_on = dict.fromkeys(honest, 0)
    now = 0.0
    while not all(node.find(FinalizeRound) for node in nodes.values()):
        now += PATIENCE_S / 4
        assert now <= 12 * PATIENCE_S, "8 attempts, of which the liars own some, and a few patiences for the rest"
        for node in nodes.values():
            node.feed(FinalityTick(now))
        while any(passed_on[me] < len(node.find(Append)) for me, node in nodes.items()):
            for me, node in nodes.items():
                for action in node.find(Append)[passed_on[me] :]:
                    passed_on[me] += 1
                    for other in nodes.values():
                        if other is not node:
                            other.hear(me, action.body)
    votes = [vote for node in nodes.values() for vote in node.votes()]
    assert max(vote.ballot.attempt for vote in votes) == 8


@pytest.mark.parametrize("is_proven", [False, True], ids=["silent", "proven"])
def test_a_free_ballot_gets_no_vote_for_a_proven_lie_in_one_attempt_of_each_voter(is_proven):
    """Silence is an opinion, and stops a few; about a proof all honest voters agree."""
    deciders = peers(12)
    me, lie = deciders[-1], Reduction(Round(1), Span(0, 1), b"\x0f", (), *[digest(b"of the lie")] * 4, b"")
    refused = []
    for attempt in (6, 7, 8, 9, 10, 12, 13):
        node = Voter(deciders, me).close(*deciders)
        node.state = replace(node.state, attempt=attempt)
        owner, named_too = owner_of(deciders, attempt), node.hear(deciders[1], lie)
        node.feed(EntryPayloadHeld(named_too), ReductionRefuted(named_too, is_proven))
        ballot = Ballot(attempt, owner)
        node.hear(owner, Prepare(Round(1), ballot))
        for peer in deciders[:-1]:
            node.hear(peer, Promise(Round(1), ballot, ()))
        node.hear(owner, propose(tuple(sorted((*named(*deciders), named_too))), owner, attempt))
        refused += [] if ballot in [vote.ballot for vote in node.votes()] else [attempt]
    assert refused == ([6, 7, 8, 9, 10] if is_proven else [6, 7])


def test_a_later_ballot_that_is_bound_gets_a_vote_for_a_reduction_that_is_not_believed():
    a, b, c, d = deciders = peers(4)
    lie = Reduction(Round(1), Span(0, 1), b"\x0f", (), *[digest(b"of the lie")] * 4, b"")
    node = Voter(deciders, d).close(*deciders)
    named_too = node.hear(b, lie)
    node.feed(EntryPayloadHeld(named_too), ReductionRefuted(named_too))
    body = propose(tuple(sorted((*named(*deciders), named_too))), a)
    voted_for(node, body, a, c)
    node.hear(b, Prepare(Round(1), Ballot(1, b)))
    for peer in (a, c):
        node.hear(peer, Promise(Round(1), Ballot(1, b), ()))
    node.hear(b, replace(body, ballot=Ballot(1, b)))
    node.feed(FinalityTick(PATIENCE_S))
    assert [vote.ballot for vote in node.votes()] == [Ballot(1, b)], "b's vote may have made it final"


def test_a_proposal_without_a_quorum_of_promises_gets_no_vote():
    _, b, c, d = deciders = peers(4)
    node = Voter(deciders, d).close(*deciders)
    in_second_ballot(node, deciders, (), (b,), named(*deciders))
    assert node.votes() == []
    node.hear(c, Promise(Round(1), Ballot(1, b), ()))
    assert len(node.votes()) == 1


@given(count=st.integers(1, 10), data=st.data())
@settings(deadline=None)
def test_what_a_quorum_voted_for_binds_whoever_promised_and_votes_of_a_third_do_not(count, data):
    deciders = peers(count)
    ballot, later = Ballot(0, deciders[0]), Ballot(1, owner_of(deciders, 1))
    voters = data.draw(st.sets(st.sampled_from(deciders)))
    promised = data.draw(st.sets(st.sampled_from(deciders), min_size=quorum(count)))
    seen = {peer for peer in voters if peer in promised or data.draw(st.booleans())}
    book, entry = Book(), digest(b"proposal")
    book, _ = add_entry(book, entry, deciders[0], Proposal(Round(1), ballot, named(*deciders), digest(b"state")))
    for peer in seen:
        book, _ = add_entry(book, digest(b"vote", peer.encode()), peer, Vote(Round(1), ballot, entry))
    for peer in promised:
        book, _ = add_entry(book, digest(peer.encode()), peer, Promise(Round(1), later, ()))
    bound = bound_proposals(book, deciders, later)
    if len(voters) >= quorum(count):
        assert bound == (entry,)
    if 3 * len(voters) < count:
        assert bound == ()


def test_a_set_is_broad_or_narrow_by_what_is_ours_of_it():
    a, b, c, d = deciders = peers(4)
    state = Voter(deciders, d).close(a, b, d).state
    assert is_broad(state, named(a, b))
    assert is_broad(state, named(*deciders))
    assert not is_broad(state, named(a, c))
    assert not is_broad(state, ())
