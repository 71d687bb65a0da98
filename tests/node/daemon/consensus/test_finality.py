"""The rules of finality, one by one. Safety under faults is in test_finality_safety.py.

Round 1 of a run whose round 0 had four authors: four voters, three votes make it final.
"""

from itertools import permutations

import msgspec
import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.proposer import waits
from atoll.node.daemon.consensus.types import (
    LEASE_S,
    Append,
    AppendRefused,
    CheckDone,
    CheckRound,
    EntryPayloadHeld,
    EntrySeen,
    FetchMissing,
    FinalApplied,
    FinalityTick,
    FinalizeRound,
    Idle,
    MembersSeen,
    ReportDivergence,
    ReportEquivocation,
    RoundClosed,
)
from atoll.node.daemon.consensus.voter import fetch_missing
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.ballots import Book, add_entry, decided_proposal, owner_of, voter_order
from atoll.protocols.ledger.records import (
    Ack,
    Ballot,
    Contribution,
    PartContribution,
    Prepare,
    Promise,
    Proposal,
    Reduction,
    Vote,
    set_digest,
)
from atoll.protocols.run.arena import Span

RUN = RunId(digest(b"finality rules"))
PEERS = [PeerId(f"peer-{n}") for n in range(4)]
ORDER = voter_order(RUN, 1, PEERS)
FIRST, SECOND, THIRD, FOURTH = ORDER
PATIENCE_S = 10.0


def contribution(author: PeerId, number: int = 1) -> tuple[Digest, Contribution]:
    payload = digest(b"payload", author.encode(), bytes([number]))
    entry = digest(b"entry", author.encode(), bytes([number]))
    return entry, Contribution(Round(number), digest(b"base"), payload, 1, 1, 64, 1.0)


def names(*authors: PeerId) -> tuple[Digest, ...]:
    return tuple(sorted(contribution(author)[0] for author in authors))


def state_of(contributions: tuple[Digest, ...]) -> Digest:
    return digest(b"state", *contributions)


ALL = names(*PEERS)


class Node:
    """One machine before round 1; `said` are the actions of the newest event, `log` all of them."""

    def __init__(self, me: PeerId, *, knows: tuple[PeerId, ...] = ORDER, rounds: int = 8):
        start = finality.begin(RUN, me, rounds, PEERS[0])
        self.state = replace(
            start, last_final=0, applied=0, voters=ORDER, live=True, patience_s=PATIENCE_S, closed=0,
            members=frozenset(ORDER),
        )  # fmt: skip
        self.me, self.said, self.log = me, [], []
        for author in knows:
            self.learn(author)

    def feed(self, event) -> "Node":
        before = self.state
        self.state, self.said = finality.step(before, event)
        assert finality.step(before, event) == (self.state, self.said), "not a function"
        self.log += self.said
        return self

    def learn(self, author: PeerId, *, held: bool = True) -> "Node":
        entry, body = contribution(author)
        self.feed(EntrySeen(entry, author, body))
        return self.feed(EntryPayloadHeld(entry)) if held else self

    def hear(self, author: PeerId, body) -> Digest:
        entry = digest(b"heard", author.encode(), repr(body).encode())
        self.feed(EntrySeen(entry, author, body))
        return entry

    def check(self, contributions: tuple[Digest, ...]) -> "Node":
        assert CheckRound(Round(1), contributions) in self.log
        return self.feed(CheckDone(Round(1), contributions, state_of(contributions)))

    def echo(self) -> Digest:
        """Our newest Append reaches the ledger."""
        body = self.appends()[-1]
        return self.hear(self.me, body)

    def appends(self):
        return [action.body for action in self.log if isinstance(action, Append)]

    def find(self, kind):
        return [action for action in self.said if isinstance(action, kind)]


def voter(me: PeerId, *, knows: tuple[PeerId, ...] = ORDER, **more) -> Node:
    """A node that closed round 1 with all that it knows."""
    return Node(me, knows=knows, **more).feed(RoundClosed(Round(1), names(*knows)))


def proposal(owner: PeerId = FIRST, attempt: int = 0, contributions: tuple[Digest, ...] = ALL) -> Proposal:
    return Proposal(Round(1), Ballot(attempt, owner), contributions, state_of(contributions))


def vote_for(entry: Digest, ballot: Ballot) -> Vote:
    return Vote(Round(1), ballot, entry)


# --- ballot 0 -------------------------------------------------------------------------------------


def test_ballots_take_turns_in_an_order_that_nobody_chooses():
    assert set(ORDER) == set(PEERS)
    assert [owner_of(ORDER, attempt) for attempt in range(5)] == [*ORDER, FIRST]
    assert len({voter_order(RUN, number, PEERS) for number in range(40)}) > 5


def test_the_first_owner_proposes_when_a_quorum_acknowledged_its_set():
    node = Node(FIRST).feed(RoundClosed(Round(1), ALL))
    for author in (FIRST, SECOND):
        node.hear(author, Ack(Round(1), set_digest(list(ALL)), digest(b"view")))
    node.hear(THIRD, Ack(Round(1), set_digest(list(ALL[:3])), digest(b"view")))
    assert node.log == []
    node.hear(THIRD, Ack(Round(1), set_digest(list(ALL)), digest(b"view")))
    assert node.said == [CheckRound(Round(1), ALL)]
    assert node.check(ALL).appends() == [proposal()]


def test_the_first_owner_proposes_what_it_holds_when_it_closed_the_next_round():
    three = names(*ORDER[:3])
    node = Node(FIRST).feed(RoundClosed(Round(1), three))
    assert node.log == []
    node.feed(RoundClosed(Round(2), (digest(b"next"),)))
    assert node.check(three).appends() == [proposal(contributions=three)]


def test_an_idle_owner_proposes_after_its_patience():
    node = (
        Node(FIRST)
        .feed(RoundClosed(Round(1), ALL))
        .feed(Idle(True, 5.0))
        .feed(FinalityTick(5.0 + PATIENCE_S - 0.1))
    )
    assert node.log == []
    node.feed(FinalityTick(5.0 + PATIENCE_S))
    assert node.said == [CheckRound(Round(1), ALL)]


@pytest.mark.parametrize("me", [SECOND, THIRD, FOURTH, PeerId("stranger")])
def test_nobody_else_proposes_in_the_first_ballot(me):
    node = Node(me).feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))
    for author in ORDER:
        node.hear(author, Ack(Round(1), set_digest(list(ALL)), digest(b"view")))
    assert node.log == []


# --- votes ----------------------------------------------------------------------------------------


def test_an_acceptor_votes_for_what_it_checked():
    node = voter(SECOND)
    entry = node.hear(FIRST, proposal())
    assert node.said == [CheckRound(Round(1), ALL)]
    node.check(ALL)
    assert node.said == [Append(vote_for(entry, Ballot(0, FIRST)))]
    node.echo()
    assert node.said == []


def test_what_two_ballots_lack_is_asked_for_once_each():
    """One that is decided lacks names, another one payloads: each event looks at both."""
    state, asked = voter(SECOND).state, []
    wanted = [FetchMissing(Round(1), names(FOURTH), (), None), FetchMissing(Round(1), (), names(THIRD), FIRST)]
    for _ in range(5):
        for each in wanted:
            state, actions = fetch_missing(state, each)
            asked += actions
    assert asked == wanted
    more = FetchMissing(Round(1), (), names(THIRD, FOURTH), FIRST)
    assert fetch_missing(state, more)[1] == [more], "the list changed"


def test_missing_entries_and_payloads_are_fetched_before_the_check():
    node = voter(SECOND, knows=ORDER[:2]).learn(THIRD, held=False)
    node.hear(FIRST, proposal())
    lost, late = contribution(FOURTH)[0], contribution(THIRD)[0]
    assert node.said == [FetchMissing(Round(1), (lost,), (late,), FIRST)]
    node.learn(FOURTH).feed(EntryPayloadHeld(late))
    assert node.said == [CheckRound(Round(1), ALL)]


def test_a_payload_that_another_says_covers_other_experts_is_not_held_as_theirs():
    """A fold would refuse it, and what "the disk damaged" would be fetched again for ever."""
    node = voter(SECOND, knows=ORDER[:3])
    body = contribution(THIRD)[1]
    thief = PartContribution(*msgspec.structs.astuple(body), b"\x01")
    entry = digest(b"thief")
    node.feed(EntrySeen(entry, FOURTH, thief)).hear(
        FIRST, proposal(contributions=tuple(sorted((*names(*ORDER[:3]), entry))))
    )
    assert node.said == [FetchMissing(Round(1), (), (entry,), FIRST)]
    node.feed(EntryPayloadHeld(entry))
    assert node.find(CheckRound)


def test_another_state_is_reported_and_never_voted_for():
    node = voter(SECOND)
    entry = node.hear(FIRST, proposal())
    node.feed(CheckDone(Round(1), ALL, digest(b"ours")))
    assert node.said == [ReportDivergence(Round(1), entry, FIRST, digest(b"ours"), state_of(ALL))]
    node.feed(FinalityTick(1.0)).feed(FinalityTick(2.0))
    assert node.said == []
    assert node.appends() == []


def test_the_check_waits_until_the_worker_made_the_round_before_final():
    node = voter(SECOND)
    node.state = replace(node.state, applied=-1)
    node.hear(FIRST, proposal())
    assert node.said == []
    assert node.feed(FinalApplied(Round(0))).said == [CheckRound(Round(1), ALL)]
    assert node.feed(FinalApplied(Round(0))).said == [CheckRound(Round(1), ALL)], "a fresh worker forgot it"


@pytest.mark.parametrize(
    ("author", "body"),
    [
        (SECOND, proposal(SECOND, 0)),
        (THIRD, proposal(FIRST, 0)),
        (PeerId("stranger"), proposal(PeerId("stranger"), 0)),
    ],
    ids=["not its turn", "in the name of another", "not an acceptor"],
)
def test_only_the_owner_of_a_ballot_may_propose_in_it(author, body):
    node = Node(FOURTH)
    node.hear(author, body)
    assert not node.find(CheckRound)
    assert node.appends() == []


def test_two_contributions_of_one_author_are_never_voted_for():
    node = Node(SECOND)
    twin, body = digest(b"twin"), contribution(FIRST)[1]
    node.feed(EntrySeen(twin, FIRST, body))
    node.hear(FIRST, proposal(contributions=tuple(sorted((*ALL, twin)))))
    assert not node.find(CheckRound)


def test_a_contribution_to_another_round_is_never_voted_for():
    node = Node(SECOND)
    entry, body = contribution(FIRST, 2)
    node.feed(EntrySeen(entry, FIRST, body)).feed(EntryPayloadHeld(entry))
    node.hear(FIRST, proposal(contributions=tuple(sorted((*names(SECOND, THIRD), entry)))))
    assert not node.find(CheckRound)


def test_a_stranger_does_not_vote():
    node = Node(PeerId("stranger"))
    node.hear(FIRST, proposal())
    assert node.log == []


def test_one_append_at_a_time_and_again_when_the_disk_refused():
    node = voter(SECOND)
    entry = node.hear(FIRST, proposal())
    node.check(ALL).hear(THIRD, Prepare(Round(1), Ballot(2, THIRD)))
    assert len(node.appends()) == 1
    node.feed(AppendRefused()).feed(FinalityTick(1.0))
    assert len(node.appends()) == 2
    assert vote_for(entry, Ballot(0, FIRST)) in node.appends()


# --- final ----------------------------------------------------------------------------------------

FINAL = FinalizeRound(Round(1), ALL, state_of(ALL), deciders=frozenset(PEERS))


def finish(node: Node, voters: tuple[PeerId, ...]) -> Node:
    entry = node.hear(FIRST, proposal())
    for voter in voters:
        node.hear(voter, vote_for(entry, Ballot(0, FIRST)))
    return node


def test_a_quorum_of_votes_is_final_for_everybody():
    for me in (*ORDER, PeerId("stranger")):
        node = finish(Node(me), (FIRST, THIRD))
        assert not any(isinstance(action, FinalizeRound) for action in node.log)
        node = finish(Node(me), (FIRST, THIRD, FOURTH))
        assert node.find(FinalizeRound) == [FINAL]
        assert node.state.last_final == 1
        assert node.state.voters == voter_order(RUN, 2, PEERS)


def test_strangers_and_repeats_do_not_count():
    node = finish(Node(SECOND), (FIRST, FIRST, THIRD, PeerId("stranger")))
    assert node.state.last_final == 0


def test_the_authors_of_the_final_set_decide_the_next_round():
    node = Node(SECOND)
    three = names(*ORDER[:3])
    entry = node.hear(FIRST, proposal(contributions=three))
    for voter in ORDER[1:]:
        node.hear(voter, vote_for(entry, Ballot(0, FIRST)))
    assert node.state.voters == voter_order(RUN, 2, ORDER[:3])


def test_a_final_set_with_unknown_contributions_is_fetched_first():
    node = finish(Node(SECOND, knows=ORDER[:3]), (FIRST, THIRD, FOURTH))
    assert node.state.last_final == 0
    assert any(isinstance(a, FetchMissing) and a.entries == names(FOURTH) for a in node.log)


def test_in_a_replay_a_final_set_waits_for_the_contributions_that_it_names():
    node = Node(SECOND, knows=())
    node.state = replace(node.state, live=False)
    finish(node, (FIRST, THIRD, FOURTH))
    for author in ORDER:
        node.feed(FinalityTick(0.0))  # it moves nothing, and what is looked at afterwards is remembered
        assert node.state.last_final == 0
        node.learn(author, held=False)
    assert node.find(FinalizeRound) == [FINAL]


def test_what_a_quorum_voted_for_is_asked_for_as_that_once():
    node = voter(SECOND, knows=ORDER[:3])
    entry, lost = node.hear(FIRST, proposal()), names(FOURTH)
    assert node.said == [FetchMissing(Round(1), lost, (), FIRST)]
    for author in (FIRST, THIRD, FOURTH):
        node.hear(author, vote_for(entry, Ballot(0, FIRST)))
    assert node.said == [FetchMissing(Round(1), lost, (), None)]
    node.feed(FinalityTick(1.0))
    assert node.said == []
    node.learn(FOURTH, held=False)
    assert node.find(FinalizeRound) == [FINAL]


def test_votes_may_come_before_the_proposal_and_all_orders_agree():
    entry = digest(b"heard", FIRST.encode(), repr(proposal()).encode())
    node = Node(SECOND)
    for voter in (FIRST, THIRD, FOURTH):
        node.hear(voter, vote_for(entry, Ballot(0, FIRST)))
    assert node.state.last_final == 0
    node.hear(FIRST, proposal())
    assert node.state.last_final == 1


def test_entries_of_final_rounds_are_ignored():
    node = finish(Node(SECOND), (FIRST, THIRD, FOURTH))
    node.hear(FIRST, proposal())
    assert node.said == []
    assert 1 not in node.state.books


def test_what_is_remembered_of_final_rounds_is_shared():
    """Members come and go, and come again; each record brings its author's name anew."""
    state = Node(FIRST).state
    for number in range(1, 7):
        book = Book()
        for author in (PeerId(f"peer-{n}") for n in range(3 + number % 2)):
            entry, body = contribution(author, number)
            book, _ = add_entry(book, entry, author, body)
        state, _ = finality._next_round(state, book, proposal(contributions=tuple(book.contributions)))
    assert len({id(authors) for _, authors in state.decided.values()}) == 2
    remembered = [name for voters, authors in state.decided.values() for name in (*voters, *authors)]
    assert len({id(name) for name in remembered}) == len(PEERS)


def test_nothing_is_decided_after_the_last_round():
    node = finish(Node(SECOND, rounds=2), (FIRST, THIRD, FOURTH))
    assert node.state.last_final == 1
    assert node.feed(Idle(True, 1.0)).feed(FinalityTick(1e6)).said == []


def test_a_vote_that_becomes_final_before_its_echo_does_not_block_the_next_one():
    """Our vote is on its way to the ledger while the votes of the others decide."""
    node = voter(SECOND)
    entry = node.hear(FIRST, proposal())
    node.check(ALL)
    for peer in (FIRST, THIRD, FOURTH):
        node.hear(peer, vote_for(entry, Ballot(0, FIRST)))
    assert node.state.last_final == 1
    node.echo()
    assert node.state.appending is None


# --- higher ballots -------------------------------------------------------------------------------


def ripe(me: PeerId, **more) -> Node:
    """A node that closed rounds 1 and 2 at time 0."""
    return Node(me, **more).feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))


def test_the_next_owner_prepares_after_its_patience_and_the_others_later():
    for turn, me in enumerate(ORDER[1:], start=1):
        node = ripe(me).feed(FinalityTick(turn * PATIENCE_S - 0.1))
        assert node.appends() == []
        node.feed(FinalityTick(turn * PATIENCE_S))
        assert node.appends() == [Prepare(Round(1), Ballot(turn, me))]


def test_owners_that_are_gone_have_no_turn():
    """Of a run whose voters were killed by the dozen each would cost the others a patience."""
    fourth = ORDER[3]
    here = MembersSeen(frozenset({FIRST, THIRD, fourth}))
    node = Node(fourth).feed(FinalityTick(LEASE_S)).feed(here)
    node.feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))
    assert node.feed(FinalityTick(LEASE_S + 2 * PATIENCE_S - 0.1)).appends() == []
    assert node.feed(FinalityTick(LEASE_S + 2 * PATIENCE_S)).appends() == [Prepare(Round(1), Ballot(3, fourth))]
    hasty = Node(fourth).feed(FinalityTick(1.0)).feed(here)
    hasty.feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))
    assert hasty.feed(FinalityTick(1.0 + 2 * PATIENCE_S)).appends() == [], (
        "who just came up does not know who is there"
    )


def acknowledged(me: PeerId, *by: PeerId, lost: frozenset[PeerId] = frozenset()) -> Node:
    """A node whose set of round 1 these hold too, and that lost the connection to others."""
    node = Node(me).feed(MembersSeen(frozenset(ORDER), lost)).feed(RoundClosed(Round(1), ALL))
    for author in by:
        node.hear(author, Ack(Round(1), set_digest(list(ALL)), digest(b"view")))
    return node


def test_an_owner_that_is_lost_has_no_turn():
    """A member that was killed has a lease for many round times: each of its turns would cost the others two."""
    three = (SECOND, THIRD, FOURTH)
    lost = frozenset({FIRST})
    prepared = [Prepare(Round(1), Ballot(1, SECOND))]
    assert acknowledged(SECOND, *three, lost=lost).appends() == prepared, "as its owner would propose now"
    assert acknowledged(SECOND, *three).appends() == [], "its owner is here"
    waiting = acknowledged(SECOND, *three[:2], lost=lost)
    assert waiting.appends() == [], "the set may still grow"
    assert waiting.feed(RoundClosed(Round(2), ALL)).appends() == prepared
    third = acknowledged(THIRD, *three, lost=lost).feed(RoundClosed(Round(2), ALL))
    assert third.feed(FinalityTick(PATIENCE_S - 0.1)).appends() == [], "the second owner is here"
    assert third.feed(FinalityTick(PATIENCE_S)).appends() == [Prepare(Round(1), Ballot(2, THIRD))]
    both = acknowledged(THIRD, *three, lost=frozenset({FIRST, SECOND}))
    assert both.appends() == [Prepare(Round(1), Ballot(2, THIRD))]


def test_members_of_which_each_lost_the_others_open_few_ballots():
    """Else each would open the next one at once, for ever, and none of them would get its votes."""
    node = acknowledged(SECOND, SECOND, THIRD, FOURTH, lost=frozenset({FIRST, THIRD, FOURTH}))
    node.echo()
    node.echo()
    for peer in (THIRD, FOURTH):
        node.hear(peer, Promise(Round(1), Ballot(4, FIRST), ()))
    node.hear(FIRST, Prepare(Round(1), Ballot(4, FIRST)))
    promises = [Promise(Round(1), Ballot(1, SECOND), ()), Promise(Round(1), Ballot(4, FIRST), ())]
    assert node.appends() == [Prepare(Round(1), Ballot(1, SECOND)), *promises]
    node.echo()
    node.feed(RoundClosed(Round(2), ALL)).feed(FinalityTick(2 * PATIENCE_S - 0.1))
    assert len(node.appends()) == 3
    node.feed(FinalityTick(2 * PATIENCE_S))
    assert node.appends()[-1] == Prepare(Round(1), Ballot(5, SECOND))


def test_a_set_with_reductions_waits_for_the_next_round_where_its_owner_is_lost():
    node = Node(SECOND).feed(MembersSeen(frozenset(ORDER), frozenset({FIRST})))
    entry, body = reduction()
    node.feed(EntrySeen(entry, FIRST, body))
    view = tuple(sorted((*ALL, entry)))
    node.feed(RoundClosed(Round(1), view))
    for author in (SECOND, THIRD, FOURTH):
        node.hear(author, Ack(Round(1), set_digest(list(view)), digest(b"view")))
    assert node.appends() == [], "nobody had the time to open it"


def test_patience_grows_with_the_attempts():
    node = ripe(SECOND)
    for peer in (THIRD, FOURTH):
        node.hear(peer, Promise(Round(1), Ballot(4, FIRST), ()))
    node.hear(FIRST, Prepare(Round(1), Ballot(4, FIRST)))
    node.echo()
    node.feed(FinalityTick(2 * PATIENCE_S - 0.1))
    assert len(node.appends()) == 1
    node.feed(FinalityTick(2 * PATIENCE_S))
    assert node.appends()[-1] == Prepare(Round(1), Ballot(5, SECOND))


def test_the_first_turn_of_each_owner_is_one_patience():
    """Longer ones cost a minute each where many owners are liars or gone (seed 114 of the simulator)."""
    node = ripe(SECOND)
    for peer in (FIRST, THIRD, FOURTH):
        node.hear(peer, Promise(Round(1), Ballot(3, FOURTH), ()))
    node.hear(FOURTH, Prepare(Round(1), Ballot(3, FOURTH)))
    node.echo()
    before = len(node.appends())
    node.feed(FinalityTick(2 * PATIENCE_S - 0.1))
    assert len(node.appends()) == before
    node.feed(FinalityTick(2 * PATIENCE_S))
    assert node.appends()[-1] == Prepare(Round(1), Ballot(5, SECOND))


def test_who_still_waits_for_its_round_does_not_prepare():
    node = Node(SECOND).feed(RoundClosed(Round(1), ALL)).feed(FinalityTick(1e6))
    assert node.appends() == []


def test_an_acceptor_promises_and_names_its_vote():
    node = voter(FOURTH)
    entry = node.hear(FIRST, proposal())
    node.check(ALL)
    own_vote = node.echo()
    node.feed(FinalityTick(PATIENCE_S / 2))
    node.hear(SECOND, Prepare(Round(1), Ballot(1, SECOND)))
    assert node.said == [Append(Promise(Round(1), Ballot(1, SECOND), (own_vote,)))]
    assert vote_for(entry, Ballot(0, FIRST)) in node.appends()


def test_a_promise_is_kept():
    node = Node(FOURTH).feed(FinalityTick(1.5 * PATIENCE_S))
    node.hear(THIRD, Prepare(Round(1), Ballot(2, THIRD)))
    node.echo()
    node.hear(FIRST, proposal())
    node.hear(SECOND, proposal(SECOND, 1))
    node.hear(SECOND, Prepare(Round(1), Ballot(1, SECOND)))
    assert node.appends() == [Promise(Round(1), Ballot(2, THIRD), ())]


def promise_all(node: Node, ballot: Ballot, voted: dict[PeerId, Digest], but: tuple[PeerId, ...] = ()) -> None:
    for peer in ORDER:
        if peer != node.me and peer not in but:
            node.hear(peer, Promise(Round(1), ballot, (voted[peer],) if peer in voted else ()))


def test_without_votes_the_new_owner_proposes_its_own_view():
    node = ripe(SECOND).feed(FinalityTick(PATIENCE_S))
    node.echo()
    node.echo()
    promise_all(node, Ballot(1, SECOND), {})
    node.check(ALL)
    assert node.appends()[-1] == proposal(SECOND, 1)


def test_with_a_vote_the_new_owner_repeats_its_set():
    """FIRST, which is silent, may have been the third to vote for it."""
    three = names(*ORDER[:3])
    node = ripe(SECOND)
    entry = node.hear(FIRST, proposal(contributions=three))
    node.check(three)
    node.echo()
    voted = {FOURTH: node.hear(FOURTH, vote_for(entry, Ballot(0, FIRST)))}
    node.feed(FinalityTick(PATIENCE_S))
    node.echo()
    node.echo()
    promise_all(node, Ballot(1, SECOND), voted, but=(FIRST,))
    assert node.appends()[-1] == proposal(SECOND, 1, three)


def test_a_promise_with_an_unknown_proposal_behind_it_does_not_free_the_owner():
    """Two members voted for a set that this node has not heard of: it must not propose another one."""
    node = ripe(SECOND).feed(FinalityTick(PATIENCE_S))
    node.echo()
    node.echo()
    three = names(*ORDER[:3])
    unheard = digest(b"heard", FIRST.encode(), repr(proposal(contributions=three)).encode())
    voted = {peer: node.hear(peer, vote_for(unheard, Ballot(0, FIRST))) for peer in (THIRD, FOURTH)}
    promise_all(node, Ballot(1, SECOND), voted, but=(FIRST,))
    assert not any(isinstance(body, Proposal) for body in node.appends())
    node.hear(FIRST, proposal(contributions=three))
    node.check(three)
    assert node.appends()[-1] == proposal(SECOND, 1, three)


def test_less_than_a_quorum_of_promises_is_not_enough():
    node = ripe(SECOND).feed(FinalityTick(PATIENCE_S))
    node.echo()
    node.echo()
    node.hear(THIRD, Promise(Round(1), Ballot(1, SECOND), ()))
    node.hear(PeerId("stranger"), Promise(Round(1), Ballot(1, SECOND), ()))
    assert not any(isinstance(body, Proposal) for body in node.appends())


# --- bad entries ----------------------------------------------------------------------------------


def test_a_second_vote_in_a_ballot_is_reported_and_does_not_count():
    node = Node(SECOND)
    one, other = node.hear(FIRST, proposal()), digest(b"other")
    node.hear(THIRD, vote_for(other, Ballot(0, FIRST)))
    node.hear(THIRD, vote_for(one, Ballot(0, FIRST)))
    assert [report.author for report in node.find(ReportEquivocation)] == [THIRD]
    for voter in (FIRST, FOURTH):
        node.hear(voter, vote_for(one, Ballot(0, FIRST)))
    assert node.state.last_final == 0


def test_a_vote_below_its_authors_promise_is_reported_and_does_not_count():
    node = Node(SECOND)
    entry = node.hear(FIRST, proposal())
    node.hear(THIRD, Promise(Round(1), Ballot(1, SECOND), ()))
    node.hear(THIRD, vote_for(entry, Ballot(0, FIRST)))
    assert [report.author for report in node.find(ReportEquivocation)] == [THIRD]
    for voter in (FIRST, FOURTH):
        node.hear(voter, vote_for(entry, Ballot(0, FIRST)))
    assert node.state.last_final == 0


def test_two_proposals_in_a_ballot_are_reported_and_one_vote_is_cast():
    node = voter(SECOND).feed(RoundClosed(Round(2), ALL))
    node.hear(FIRST, proposal())
    node.hear(FIRST, proposal(contributions=names(*ORDER[:3])))
    assert [report.author for report in node.find(ReportEquivocation)] == [FIRST]
    for contributions in (ALL, names(*ORDER[:3])):
        node.feed(CheckDone(Round(1), contributions, state_of(contributions)))
    node.echo()
    node.feed(FinalityTick(1.0))
    assert len([body for body in node.appends() if isinstance(body, Vote)]) == 1


@pytest.mark.parametrize("author", [PeerId("stranger"), SECOND])
def test_a_far_ballot_of_somebody_who_does_not_own_it_delays_nothing(author):
    """SECOND owns the attempts 1, 5, 9, …; a stranger owns none."""
    node = Node(FIRST)
    node.hear(author, Prepare(Round(1), Ballot((1 << 20) - 2, author)))
    node.feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))
    node.check(ALL)
    assert node.appends()[-1:] == [proposal()]


# --- replay and certificates ----------------------------------------------------------------------


def test_nothing_is_written_before_the_own_feed_is_replayed():
    node = Node(SECOND)
    node.state = replace(node.state, live=False)
    finish(node, (FIRST, THIRD))
    node.hear(THIRD, Prepare(Round(1), Ballot(2, THIRD)))
    assert node.log == []
    node.hear(FOURTH, vote_for(digest(b"heard", FIRST.encode(), repr(proposal()).encode()), Ballot(0, FIRST)))
    assert node.state.last_final == 1, "what the ledger proves is seen all the same"


def test_a_newcomer_starts_at_round_zero_which_the_owner_decides():
    state = finality.begin(RUN, PeerId("stranger"), 8, PEERS[0])
    assert (state.last_final, state.voters) == (-1, (PEERS[0],))


def test_a_ballot_of_another_never_decides():
    book, entry = Book(), digest(b"stolen")
    stolen = Proposal(Round(1), Ballot(0, SECOND), ALL, state_of(ALL))
    book, _ = add_entry(book, entry, SECOND, stolen)
    for peer in ORDER:
        book, _ = add_entry(book, digest(peer.encode()), peer, vote_for(entry, Ballot(0, SECOND)))
    assert decided_proposal(book, ORDER) is None


@pytest.mark.parametrize("order_of_arrival", list(permutations(range(3))))
def test_a_ballot_that_more_than_a_third_answered_counts_at_once(order_of_arrival):
    """Feeds of different authors arrive in any order: a lagging member must promise in the end all the same."""
    far = Ballot(8, FIRST)
    said = [(FIRST, Prepare(Round(1), far)), *((peer, Promise(Round(1), far, ())) for peer in (FIRST, SECOND))]
    node = Node(THIRD)
    for place in order_of_arrival:
        assert node.appends() == []
        node.hear(*said[place])
    assert node.appends() == [Promise(Round(1), far, ())]


def test_an_owner_that_opens_all_its_ballots_at_once_cuts_nobody_off():
    """Each of them would put the others off for longer, and take their promises."""
    nodes = [Node(me).feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL)) for me in (SECOND, THIRD)]
    for second in range(int(PATIENCE_S)):
        for node in nodes:
            node.feed(FinalityTick(float(second))).hear(FIRST, Prepare(Round(1), Ballot(4 * (second + 1), FIRST)))
    second, third = (node.feed(FinalityTick(PATIENCE_S)) for node in nodes)
    assert second.appends() == [Prepare(Round(1), Ballot(1, SECOND))]
    third.hear(SECOND, second.appends()[0])
    assert third.appends() == [Promise(Round(1), Ballot(1, SECOND), ())]


def test_a_ballot_is_due_when_the_owner_before_had_half_a_turn():
    for turn, owner in enumerate(ORDER[1:], start=1):
        node = Node(FIRST)
        node.hear(owner, Prepare(Round(1), Ballot(turn, owner)))
        assert node.feed(FinalityTick((turn - 0.5) * PATIENCE_S - 0.1)).appends() == []
        assert node.feed(FinalityTick((turn - 0.5) * PATIENCE_S)).appends() == [
            Promise(Round(1), Ballot(turn, owner), ())
        ]


def test_in_a_replay_a_ballot_counts_as_soon_as_it_is_due():
    node = Node(FIRST)
    node.state = replace(node.state, live=False)
    node.hear(SECOND, Prepare(Round(1), Ballot(1, SECOND)))
    assert node.feed(FinalityTick(PATIENCE_S / 2 - 0.1)).state.attempt == 0
    assert node.feed(FinalityTick(PATIENCE_S / 2)).state.attempt == 1


def test_an_idle_voter_waits_for_its_own_rest_also_where_the_proposal_came_late():
    """The wait of a ballot begins anew with its proposal; that of a set that does not grow does not."""
    node = Node(THIRD).feed(Idle(True, 0.0)).feed(FinalityTick(0.7 * PATIENCE_S))
    node.hear(FIRST, proposal())
    assert node.feed(FinalityTick(PATIENCE_S - 0.1)).find(CheckRound) == []
    assert node.feed(FinalityTick(PATIENCE_S)).find(CheckRound) == [CheckRound(Round(1), ALL)]


def test_ticks_before_a_wait_is_over_are_passed_over():
    """A real node has a few of them a second, and most of a round is such a wait."""
    node = ripe(SECOND).feed(FinalityTick(1.0))
    settled = node.state.settled
    for at in range(2, int(PATIENCE_S / 2)):
        assert node.feed(FinalityTick(float(at))).state.settled is settled
    assert node.feed(FinalityTick(PATIENCE_S / 2)).state.settled is not settled


def test_a_ballot_is_due_early_where_no_lower_one_can_be_decided():
    """Who went ahead while others were gone answers no lower ballot: each of these would be a turn in vain."""
    half = LEASE_S + PATIENCE_S / 2

    def hears_of(attempt, *here, before=0):
        node = Node(FIRST).feed(FinalityTick(LEASE_S - 1.0)).feed(MembersSeen(frozenset(here)))
        node.state = replace(node.state, since=LEASE_S, attempt=before)
        node.hear(FOURTH, Prepare(Round(1), Ballot(attempt, FOURTH)))
        node.hear(FOURTH, Promise(Round(1), Ballot(attempt, FOURTH), ()))
        return node

    node = hears_of(3, FIRST, THIRD, FOURTH)
    assert node.feed(FinalityTick(half - 0.1)).appends() == []
    assert node.feed(FinalityTick(half)).appends() == [Promise(Round(1), Ballot(3, FOURTH), ())]
    assert hears_of(3, *ORDER).feed(FinalityTick(half)).appends() == [], "the three others can decide without it"
    further = hears_of(7, FIRST, THIRD, FOURTH, before=3)
    assert further.feed(FinalityTick(LEASE_S + PATIENCE_S)).appends() == [], (
        "a liar could go on with its further ballots, and make all turns longer"
    )


def test_nobody_prepares_while_the_set_that_others_are_bound_to_is_not_here():
    """Two of four voted: any quorum names their set, so a ballot without its payloads would be opened in vain."""
    node = Node(SECOND, knows=(FIRST, SECOND)).learn(THIRD, held=False)
    two, three = names(FIRST, SECOND), names(FIRST, SECOND, THIRD)
    node.feed(RoundClosed(Round(1), two)).feed(RoundClosed(Round(2), two))
    entry = node.hear(FIRST, proposal(contributions=three))
    assert node.find(FetchMissing)
    for voter in (FIRST, THIRD):
        node.hear(voter, vote_for(entry, Ballot(0, FIRST)))
    for turn in range(1, 8):
        node.feed(FinalityTick(turn * PATIENCE_S))
    assert node.appends() == []
    node.feed(EntryPayloadHeld(contribution(THIRD)[0])).check(three)
    assert node.appends() == [vote_for(entry, Ballot(0, FIRST))]


def test_an_owner_looks_again_once_a_payload_of_its_own_set_is_here():
    """As in a reduced round: its set is what a Reduction covers, and payloads are fetched for the check alone."""
    node = Node(FIRST, knows=ORDER[:3]).learn(FOURTH, held=False)
    node.feed(RoundClosed(Round(1), ALL)).feed(RoundClosed(Round(2), ALL))
    assert node.find(FetchMissing)
    node.feed(FinalityTick(0.0))  # it moves nothing, and what is looked at afterwards is remembered
    node.feed(EntryPayloadHeld(contribution(FOURTH)[0]))
    assert node.said == [CheckRound(Round(1), ALL)]


def test_one_vote_that_a_quorum_can_do_without_does_not_hold_the_next_owner_back():
    """The proposer died with the only copy of a payload that it had proposed: the others go on without it."""
    node = Node(SECOND, knows=(SECOND, THIRD, FOURTH)).learn(FIRST, held=False)
    rest = names(SECOND, THIRD, FOURTH)
    node.feed(RoundClosed(Round(1), rest)).feed(RoundClosed(Round(2), rest))
    entry = node.hear(FIRST, proposal())
    node.hear(FIRST, vote_for(entry, Ballot(0, FIRST)))
    node.feed(FinalityTick(PATIENCE_S))
    assert node.appends() == [Prepare(Round(1), Ballot(1, SECOND))]


# --- sets that nobody contributed to ----------------------------------------------------------------


def reduction() -> tuple[Digest, Reduction]:
    made = Reduction(Round(1), Span(0, 1), b"\1", (), *[digest(b"reduced")] * 4, b"")
    return digest(b"entry of a reduction"), made


def test_a_set_of_reductions_alone_is_neither_voted_for_nor_final():
    """Its authors decide the next round, and it has none."""
    entry, body = reduction()
    node = Node(SECOND)
    node.feed(EntrySeen(entry, FIRST, body)).feed(EntryPayloadHeld(entry))
    void = proposal(contributions=(entry,))
    name = node.hear(FIRST, void)
    assert node.log == []
    for author in (FIRST, THIRD, FOURTH):
        node.hear(author, vote_for(name, void.ballot))
    assert node.log == []
    assert node.state.last_final == 0


def test_votes_for_a_set_of_reductions_alone_bind_nobody():
    entry, body = reduction()
    node = Node(SECOND).feed(EntrySeen(entry, FIRST, body)).feed(RoundClosed(Round(1), ALL))
    void = proposal(contributions=(entry,))
    vote = node.hear(FIRST, vote_for(node.hear(FIRST, void), void.ballot))
    ballot = Ballot(1, SECOND)
    node.hear(SECOND, Prepare(Round(1), ballot))
    for author, voted in ((FIRST, (vote,)), (SECOND, ()), (THIRD, ())):
        node.hear(author, Promise(Round(1), ballot, voted))
    assert node.check(ALL).appends()[-1] == proposal(SECOND, 1)


@pytest.mark.parametrize("newest", range(9))
def test_a_ballot_waits_for_the_owners_between_the_newest_one_and_it(newest):
    lost = frozenset([ORDER[2]])
    state = replace(finality.begin(RUN, PEERS[0], 9, PEERS[0]), voters=ORDER, attempt=newest, lost=lost)
    for attempt in range(newest, newest + 9):
        owners = [owner_of(ORDER, at) for at in range(newest, attempt)]
        # A connection that is lost counts only the first time round.
        assert waits(state, attempt) == sum(newest >= len(ORDER) or owner not in lost for owner in owners)
