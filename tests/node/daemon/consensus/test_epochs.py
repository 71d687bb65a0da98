"""The rules of epochs, one by one: who may open one, who enters it, and which of two chains all nodes follow."""

from itertools import count
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.chains.epochs import (
    ROOT,
    Electorate,
    EpochBook,
    Segment,
    add_entry,
    epoch_id,
    exempt_of,
)
from atoll.node.daemon.consensus.forks import decided_before, look_for_better_chain
from atoll.node.daemon.consensus.presence import here_of
from atoll.node.daemon.consensus.proposer import MIN_PATIENCE_S, patience_of
from atoll.node.daemon.consensus.succession import AWAY_ROUNDS, LISTEN_S
from atoll.node.daemon.consensus.types import (
    Append,
    EnterEpoch,
    EntryPayloadHeld,
    EntrySeen,
    FinalityState,
    FinalityTick,
    Idle,
    MembersSeen,
    ReplayDone,
    RoundClosed,
    SwitchEpoch,
)
from atoll.node.daemon.consensus.voter import may_append
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.standing_still.absent_members import absence, lost_work, missing
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.ballots import Book
from atoll.protocols.ledger.ballots import add_entry as add_to_book
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import (
    ENTRY_MAX_BYTES,
    MAX_SET,
    Ballot,
    Contribution,
    Epoch,
    Exclude,
    Follow,
    Leave,
    Prepare,
    Promise,
    Proposal,
    Reduction,
    Vote,
)
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.ledger.set_limit import first_authors
from tests.node.daemon.consensus.before_round import before_round

RUN = RunId(digest(b"epochs"))
A, B, C, D = (PeerId(f"peer-{name}") for name in "abcd")
STRANGER = PeerId("peer-x")
LEASE, PATIENCE = 20.0, 8.0
NAMES = count()
_LONG_AWAY = ReplayDone()
"""It does not know for how long it was down."""


def entry_of(author, body):
    return EntrySeen(digest(next(NAMES).to_bytes(4, "big")), author, body)


class Node:
    """A machine before round 5, whose voters are `voters`; all of them were members before."""

    def __init__(self, me=A, voters=(A, B, C), here=None, now=1000.0, came_up=_LONG_AWAY, gone=(D,)):
        start = before_round(5, RUN, me, PeerId("owner"), voters=voters, gone=gone, lease_s=LEASE)
        self.state = replace(start, patience_s=PATIENCE)
        self.log, self.now = [], now
        self.feed(FinalityTick(now), MembersSeen(frozenset(voters if here is None else here)), came_up)

    def feed(self, *events):
        for event in events:
            self.state, actions = finality.step(self.state, event)
            self.log += actions
            for action in actions:
                if isinstance(action, Append):
                    self.feed(entry_of(self.state.me, action.body))
        return self

    def say(self, author, *bodies):
        return self.feed(*(entry_of(author, body) for body in bodies))

    def wait(self, seconds):
        for _ in range(int(seconds)):
            self.now += 1.0
            self.feed(FinalityTick(self.now))
        return self

    def signed(self):
        return [a.body for a in self.log if isinstance(a, Append) and isinstance(a.body, Epoch)]

    def followed(self):
        return [a.body.epoch for a in self.log if isinstance(a, Append) and isinstance(a.body, Follow)]

    def entered(self):
        return [a.epoch for a in self.log if isinstance(a, EnterEpoch)]


def epoch(*members, at=5, parent=b""):
    return Epoch(Round(at), parent, tuple(sorted(members)))


def work(author, at):
    return Contribution(Round(at), digest(b"base"), digest(author.encode()), 1, 1, 64, 1.0)


def votes(epoch_name, *rounds):
    return [Vote(Round(at), Ballot(0, A, epoch_name), digest(b"p")) for at in rounds]


# --- opening ------------------------------------------------------------------------------------


def test_no_epoch_is_opened_while_a_quorum_is_here():
    assert not Node(here=(A, B)).wait(200).signed()


def test_an_epoch_has_no_more_members_than_a_set_may_name():
    """No round has more voters: these are authors of a set. Its recent members may be sixteen times as many."""
    many = [PeerId(f"12D3KooW{number:044}") for number in range(MAX_SET * 5 // 2)]
    voters, recent = many[:MAX_SET], many[MAX_SET:]
    before = before_round(5, RUN, A, PeerId("owner"), voters=voters, gone=recent)
    chosen = sorted(first_authors(RUN, 5, recent, before.seniority))
    node = Node(chosen[0], voters, recent, gone=recent).wait(LEASE + 1)
    assert node.signed() == [epoch(*chosen)]
    assert len(msgspec.msgpack.encode(node.signed()[0])) < ENTRY_MAX_BYTES - 1024
    for peer in chosen[1:]:
        node.say(peer, epoch(*chosen))
    assert node.entered() == [epoch_id(epoch(*chosen))]
    assert {*node.state.voters} == {*chosen}
    other = Node(({*recent} - {*chosen}).pop(), voters, recent, gone=recent).wait(LEASE + 1)
    assert not other.signed(), "it follows"


def test_who_vanished_is_waited_for():
    node = Node(here=(A,))
    assert not node.wait(LEASE - 1).signed(), (
        "a node that came up does not know who is there before a lease is over"
    )
    assert node.wait(2).signed() == [epoch(A)]
    node = Node().wait(100).feed(MembersSeen(frozenset({A})))
    assert not node.wait(PATIENCE / 4 - 1).signed()
    assert node.wait(2).signed() == [epoch(A)]


def test_who_an_epoch_left_out_is_not_waited_for_again():
    """Its work of before its end makes it a voter of the next round."""
    node = Node().wait(100)
    entries = [entry_of(author, work(author, 5)) for author in (A, B, C)]
    node.feed(*entries, MembersSeen(frozenset({A}))).wait(PATIENCE / 4 + 1)
    name = epoch_id(epoch(A))
    assert node.entered() == [name]
    names = tuple(sorted(entry.entry for entry in entries))
    proposal = entry_of(A, Proposal(Round(5), Ballot(0, A, name), names, digest(b"state")))
    vote = Vote(Round(5), Ballot(0, A, name), proposal.entry)
    node.feed(proposal, entry_of(A, vote))
    assert node.state.decided[5][1] == {A, B, C}
    assert node.entered()[1:] == [epoch_id(epoch(A, at=6, parent=name))], "at once"


def test_work_on_a_later_round_is_looked_at_where_voters_are_gone():
    node = Node(me=STRANGER, here=(STRANGER,)).wait(100)
    assert not node.signed(), "it worked on nothing"
    assert node.say(STRANGER, work(STRANGER, 7)).signed() == [epoch(STRANGER)], "and not only with the next tick"


def test_who_left_in_good_order_is_not_waited_for():
    node = Node().wait(100)
    node.say(B, Leave(Round(5))).say(C, Leave(Round(5)))
    assert node.wait(1).signed() == [epoch(A)]
    assert node.entered() == [epoch_id(epoch(A))]


def test_after_voters_that_left_the_candidates_decide_at_once_if_all_are_here():
    leaves = [(peer, Leave(Round(5))) for peer in (A, B, C)]
    node = Node(me=D, here=(A, B, C, D))
    assert [node.say(*leave) for leave in leaves][-1].signed() == [epoch(D)], "also who just came up"
    node = Node(me=STRANGER, here=(A, B, C, STRANGER)).say(STRANGER, work(STRANGER, 5))
    for leave in leaves:
        node.say(*leave)
    assert not node.wait(1).signed(), "a member that did not leave may be on its way"
    assert not node.say(D, Leave(Round(5))).signed(), "another may have the same work done in a moment"
    assert node.say(STRANGER, work(STRANGER, 6)).signed() == [epoch(STRANGER)]


def test_members_that_are_known_by_their_work_alone_go_on_together():
    """In a guarded run the owner may decide alone. All end the round at one time: each would go on by itself."""
    left = [(peer, Leave(Round(5))) for peer in (A, B, C, D)]
    one, other = PeerId("peer-y"), PeerId("peer-z")
    nodes = [Node(me=me, here=(one, other)) for me in (one, other)]
    said = [*left, (one, work(one, 5)), (other, work(other, 5)), (one, work(one, 6)), (other, work(other, 6))]
    for node, own_first in zip(nodes, (said, [*left, said[5], said[4], said[7], said[6]]), strict=True):
        for author, body in own_first:
            node.say(author, body)
        assert node.signed() == [epoch(one, other)]


def test_who_left_votes_again_only_after_the_rounds_that_it_left_behind():
    node = (
        Node()
        .wait(100)
        .say(B, Leave(Round(6)), Promise(Round(7), Ballot(1, A), ()), Promise(Round(8), Ballot(1, A), ()))
    )
    assert {at: [*early] for at, early in node.state.waiting.items()} == {8: [B]}


def test_an_epoch_begins_when_all_its_members_signed_it():
    node = Node(voters=(A, B, C, D), here=(A, B)).wait(LEASE + 1)
    assert node.signed() == [epoch(A, B)]
    assert not node.entered()
    node.say(STRANGER, epoch(A, B))
    assert not node.wait(PATIENCE).entered(), "nobody signs for another"
    assert node.say(B, epoch(A, B)).entered() == [epoch_id(epoch(A, B))]


def test_who_signed_an_epoch_votes_nowhere_else():
    node = Node(voters=(A, B, C, D), here=(A, B)).wait(LEASE + 1)
    node.feed(MembersSeen(frozenset({A, B, C, D})))
    assert not may_append(node.state)
    # It goes back when the epoch does not begin, and a quorum is here again.
    assert node.wait(PATIENCE + 1).followed() == [b""]


def test_members_that_are_no_voters_are_not_signed_for():
    """One liar among those that are here could bring in any number of its own names."""
    node = Node(voters=(A, B, C, D), here=(A, B))
    node.say(B, epoch(A, B, STRANGER)).say(STRANGER, epoch(A, B, STRANGER))
    assert node.wait(LEASE + 1).signed() == [epoch(A, B)]


def test_an_epoch_of_another_that_leaves_none_of_us_out_is_signed():
    node = Node(voters=(A, B, C, D), here=(A, B)).say(B, epoch(A, B, C))
    assert node.wait(LEASE + 1).signed() == [epoch(A, B, C)]


def test_an_epoch_that_leaves_out_one_of_us_is_not_signed():
    node = Node(voters=(A, B, C, D, PeerId("peer-e")), here=(A, B, C)).say(B, epoch(B, C))
    assert node.wait(LEASE + 1).signed() == [epoch(A, B, C)]


def test_where_all_voters_are_gone_recent_members_take_their_place():
    node = Node(me=D, voters=(A,), here=(D, STRANGER)).say(STRANGER, work(STRANGER, 6))
    assert node.wait(LEASE + PATIENCE).signed() == [epoch(D)]


# --- entering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("voters", [(A, B, C), (A, B, C, D)])
def test_an_epoch_of_fewer_than_the_others_that_are_here_is_not_entered(voters):
    node = Node(voters=voters).wait(100).say(voters[-1], epoch(voters[-1]))
    assert not node.wait(LEASE).entered()


@pytest.mark.parametrize("voted", [False, True])
def test_where_all_that_are_here_came_without_a_model_they_go_to_the_voter_that_has_it(voted):
    """Sides that met each found that the epoch before had decided; its last member had left it with the model."""
    node = Node(here=(A, B, C)).wait(LEASE + 1)
    node.say(A, Follow(Round(5), b"")).say(B, Follow(Round(5), b""), *(votes(b"", 5) if voted else []))
    node.say(C, epoch(C))
    assert node.entered() == ([] if voted else [epoch_id(epoch(C))])
    stranger = Node(here=(A, B)).say(A, Follow(Round(5), b"")).say(B, Follow(Round(5), b""))
    assert stranger.say(STRANGER, epoch(STRANGER)).wait(LEASE).entered() == []


def test_who_just_came_up_without_a_model_listens_before_it_goes_to_one_voter():
    """Those that vote here, and have the model, may not be known to it yet."""
    node = Node(here=(A, C)).say(A, Follow(Round(5), b"")).say(C, epoch(C))
    assert not node.wait(PATIENCE / 2).entered()
    assert node.wait(PATIENCE).entered() == [epoch_id(epoch(C))]


def test_an_epoch_of_strangers_is_not_entered():
    node = Node().wait(100).say(STRANGER, epoch(STRANGER))
    assert not node.wait(100).entered()
    assert not look_for_better_chain(node.state)[1]


def test_a_voter_that_was_away_enters_the_epoch_of_the_others_and_writes_it_down():
    name = epoch_id(epoch(B, C))
    node = Node(voters=(A, B, C), here=(A, B, C), now=5000.0)
    node.say(B, epoch(B, C)).say(C, epoch(B, C))
    assert node.entered() == [name]
    assert node.followed() == [name], "a restart must not bring it back to a round that it could decide"


def test_voters_that_were_all_away_go_on_where_the_one_that_stayed_is():
    name, far = epoch_id(epoch(C)), 5 + 3 * AWAY_ROUNDS
    node = Node(here=(A, B))
    node.say(C, epoch(C), *(work(C, at) for at in range(5, far)), *votes(name, *range(5, far)))
    assert node.entered() == [name]
    # Who was here all the time knows better: a liar may write far rounds.
    node = Node(here=(A, B)).wait(100)
    node.say(C, epoch(C), *(work(C, at) for at in range(5, far)), *votes(name, *range(5, far)))
    assert not node.wait(100).entered()


def test_a_liar_that_writes_far_rounds_misleads_nobody_while_the_others_train():
    far = 5 + 3 * AWAY_ROUNDS
    node = Node(voters=(A, B, C, D), here=(A, B, C, D))
    for peer in (B, C):
        node.say(peer, *(work(peer, at) for at in range(5, far)))
    node.say(D, epoch(D), *(work(D, at) for at in range(5, far)))
    assert not node.wait(PATIENCE).entered()


def test_who_was_down_for_less_than_a_lease_believes_no_far_rounds():
    """Of four members a liar and one that it misled were as many as the two others, and these followed."""
    far = 5 + 3 * AWAY_ROUNDS
    enough_s = LEASE + 2 * MIN_PATIENCE_S  # it knows no round time, so its own patience says nothing
    for down_s, believes in ((2.0, False), (LEASE, False), (enough_s - 1.0, False), (enough_s, True)):
        node = Node(here=(A, B), came_up=ReplayDone(down_s, 4))
        node.say(C, epoch(C), *(work(C, at) for at in range(5, far)))
        assert bool(node.wait(PATIENCE).followed()) is believes, down_s


def test_a_liar_cannot_hide_by_far_rounds_that_the_others_trained_on():
    far = 5 + 3 * AWAY_ROUNDS
    for newest, believes in ((6, True), (5 + AWAY_ROUNDS // 2, False)):
        node = Node(voters=(A, B, C, D), here=(A, B, C, D), came_up=ReplayDone(1000.0, 5))
        for peer in (B, C):
            node.say(peer, *(work(peer, at) for at in range(5, newest + 1)))
        node.say(D, epoch(D), *(work(D, at) for at in range(5, far)))
        assert bool(node.wait(PATIENCE / 2).followed()) is believes, newest


def test_a_newcomer_waits_no_lease_for_members_that_died_in_the_round_of_the_fork():
    """They had worked in it, so they seemed to have trained on; it waited a lease beside the one that was left."""
    far = 5 + 3 * AWAY_ROUNDS
    for here, newest, follows in (((A, D), 5, True), ((A, B, C, D), 5, False), ((A, D), 9, False)):
        node = Node(voters=(B, C, D), here=here)
        node.state = replace(node.state, patience_s=LEASE)
        for peer in (B, C):
            node.say(peer, *(work(peer, at) for at in range(5, newest + 1)))
        node.say(D, epoch(D), *(work(D, at) for at in range(5, far)))
        assert not node.wait(LISTEN_S - 1).followed(), "leases may yet come"
        assert bool(node.wait(LEASE - LISTEN_S - 1).followed()) is follows, (here, newest)


def test_who_enters_an_epoch_of_long_ago_as_it_comes_up_suspects_nobody():
    """They may have been down then. With today's leases they were left out again, after one missed ballot."""
    node = Node(here=(A, B)).say(C, epoch(C), *(work(C, at) for at in range(5, 5 + 3 * AWAY_ROUNDS)))
    assert node.entered() == [epoch_id(epoch(C))]
    assert not node.state.suspects


def test_a_follow_of_what_nobody_knows_changes_nothing():
    node = Node().wait(100).say(B, epoch(B), Follow(Round(5), digest(b"unknown")), work(B, 6))
    assert node.wait(10).state.deciding == 5
    assert node.state.epochs.branch(b"", digest(b"unknown")) is None


# --- ballots ------------------------------------------------------------------------------------


def test_ballots_of_another_epoch_do_not_count():
    node = Node(voters=(A, B), here=(A, B)).wait(100)
    made = entry_of(A, work(A, 5))
    node.feed(made)
    for name, decided in ((digest(b"another"), 4), (b"", 5)):
        ballot = Ballot(0, A, name)
        proposed = entry_of(A, Proposal(Round(5), ballot, (made.entry,), digest(b"s")))
        vote = Vote(Round(5), ballot, proposed.entry)
        assert node.feed(proposed).say(A, vote).say(B, vote).state.last_final == decided


# --- which chain --------------------------------------------------------------------------------


def outranked(*epochs, me=A, voters=(A, B, C, D), lengths=()):
    """Whether the node in the first of these epochs must leave it."""
    node = Node(me=me, voters=voters, here=epochs[0].members).wait(LEASE + 1)
    for body in epochs:
        for member in body.members:
            node.say(member, body)
        for peer, far in lengths:
            if peer in body.members:
                node.say(peer, *votes(epoch_id(body), far))
    assert node.wait(2).entered()[0] == epoch_id(epochs[0])
    return any(isinstance(action, SwitchEpoch) for action in node.log)


def test_the_epoch_with_more_voters_wins():
    assert outranked(epoch(A), epoch(B, C))
    assert not outranked(epoch(A, B), epoch(C))


def test_at_a_tie_the_one_that_went_on_for_long_wins_then_the_first_in_ballot_order():
    voters = (A, B)
    assert not outranked(epoch(A), epoch(B), voters=voters)
    assert outranked(epoch(B), epoch(A), me=B, voters=voters)
    assert outranked(epoch(A), epoch(B), voters=voters, lengths=[(B, 60)])
    assert not outranked(epoch(B), epoch(A), me=B, voters=voters, lengths=[(B, 60)])


def test_as_many_as_may_lie_make_no_side_longer():
    """One of four may vote in any round. Who votes in one saw that others voted in the round before."""
    honest, lied = EpochBook(voted={A: 37, B: 36}), EpochBook(voted={A: 400, B: 36})
    assert honest.length({A, B}, 6, 4) == lied.length({A, B}, 6, 4) == 2, "32 rounds, as A knows"
    assert lied.length({A, B}, 6, 3) == 5, "of three nobody may lie"
    assert lied.length({A}, 6, 4) == 5, "nobody else knows"
    assert lied.length(set(), 6, 4) == lied.length({C}, 6, 4) == 0


@pytest.mark.parametrize("newest", [5, 20, 37, 400])
def test_what_a_vote_tells_of_two_chains_is_known_at_once(newest):
    """Chains are compared again where `progress` changes."""
    for other in range(5, 140):
        book = EpochBook(voted={A: newest, B: other}, places={(b"", 5): (b"one", b"two")})
        after = book.with_vote(B, other + 1)
        lengths = [[each.length({A, B}, 5, many) for many in (2, 4)] for each in (book, after)]
        assert lengths[0] == lengths[1] or book.progress != after.progress
        assert after.progress == replace(after).progress


def after_round_5(here=(A, B, C, D)):
    """All decided round 5 together just now, and nobody voted in round 6."""
    node = Node(voters=(A, B, C, D), here=here).wait(LEASE + 1)
    decided = {**node.state.decided, 5: ((A, B, C, D), frozenset({A, B, C, D}))}
    node.state = replace(node.state, last_final=5, applied=5, decided=decided)
    return node


def test_one_voter_undoes_no_round_that_the_others_just_decided():
    """A liar in the simulator's seed 218: all left the round, and the run stood still for ever."""
    node = after_round_5().say(D, epoch(D))
    assert not look_for_better_chain(node.state)[1]
    assert not any(isinstance(action, SwitchEpoch) for action in node.log)
    node.say(B, epoch(B, C)).say(C, epoch(B, C))
    assert node.followed() == [epoch_id(epoch(B, C))], "two went, one is left"


def test_a_decision_that_nobody_lives_to_go_on_from_counts_for_nothing():
    node = after_round_5(here=(A, B, C, D)).feed(MembersSeen(frozenset()))
    node.say(B, epoch(B, C)).say(C, epoch(B, C))
    assert node.followed() == [epoch_id(epoch(B, C))]
    fresh = after_round_5()
    fresh.state = replace(fresh.state, live_since=fresh.now, unrivalled=())
    assert fresh.say(D, epoch(D)).followed() == [epoch_id(epoch(D))], "who just came up may have been away"


def test_whoever_decided_a_round_with_us_weighs_as_long_as_its_lease():
    node = after_round_5().say(C, epoch(C, D)).say(D, epoch(C, D))
    assert node.followed() == [], "B lives, and may go on"
    assert node.feed(MembersSeen(frozenset({C, D}))).followed() == [epoch_id(epoch(C, D))]


def test_strangers_outrank_nobody():
    voters = (A, B)
    fake = epoch(STRANGER, PeerId("peer-y"), PeerId("peer-z"))
    assert not outranked(epoch(A), fake, voters=voters, lengths=[(STRANGER, 4000)])
    crowd = epoch(D, STRANGER, PeerId("peer-y"), PeerId("peer-z"))
    assert not outranked(epoch(A, B), crowd, lengths=[(STRANGER, 4000)]), "one voter among strangers is one"


def test_who_leaves_its_chain_writes_that_down_first_and_votes_no_more():
    node = Node(voters=(A, B, C, D), here=(A,)).wait(LEASE + 1)
    node.say(B, epoch(B, C)).say(C, epoch(B, C)).wait(1)
    kinds = [type(a.body if isinstance(a, Append) else a) for a in node.log]
    assert kinds.index(Follow) < kinds.index(SwitchEpoch)
    assert node.followed()[-1] == epoch_id(epoch(B, C))


def test_a_restart_goes_back_to_the_chain_that_was_chosen():
    second = epoch(A, at=9, parent=epoch_id(epoch(A, B)))
    feed = [(B, epoch(A, B)), (A, epoch(A, B)), (A, second)]
    assert chosen_path(feed, A) == (epoch(A, B), second)
    assert chosen_path([*feed, (A, Follow(Round(5), b""))], A) == ()
    assert chosen_path(feed[1:], A) == (), "what not all members signed did not begin"


def test_a_replay_enters_an_epoch_that_was_chosen_once_all_signed_it():
    node = Node()
    node.state = replace(node.state, live=False, planned=(epoch(A, B),))
    assert node.say(A, epoch(A, B)).entered() == []
    assert node.say(B, epoch(A, B)).entered() == [epoch_id(epoch(A, B))]


def test_a_book_of_epochs_ignores_what_others_say_about_a_member():
    book = add_entry(EpochBook(), STRANGER, epoch(A))
    assert not book.bodies
    assert book.choice(A) == b""


# --- what the user reads ------------------------------------------------------------------------


def test_the_user_reads_who_is_missing_since_when_and_when_the_others_go_on():
    node = Node().wait(30).feed(MembersSeen(frozenset({A}))).wait(1)
    assert missing(node.state) == (
        "round 5 lacks 2 of 3 voters: …peer-b silent for 21 s, …peer-c silent for 21 s; "
        "those that are here go on without them in 1 s"
    )
    assert "…peer-b left" in missing(node.say(B, Leave(Round(5))).state)
    back = Node(voters=(A, B), here=(A, B)).say(A, Leave(Round(5))).wait(LISTEN_S)
    assert "lacks 1 of 2 voters: this node left; " in missing(back.state), "it came back"
    node = Node(voters=(A, B, C, D), here=(A, B)).wait(LEASE + 1)
    assert missing(node.state).endswith("those that are here go on as soon as …peer-b signed too")
    assert missing(Node().wait(5).state) == ""


def test_a_node_that_may_not_go_on_says_who_may_and_when_others_do():
    """It stopped, and came back beside a member that died: for the rest of that one's lease nothing goes on."""
    node = Node(voters=(A, B), here=(A, B)).say(A, Leave(Round(5))).wait(LISTEN_S)
    leases = {B: (Lease("training", Round(5), Round(4), b"", Round(-1), 10.0), 13.0)}
    line = missing(node.state, lambda: leases)
    assert line.endswith("; …peer-b may go on without them now, others in 13 s if that does not happen")
    leases = {B: (leases[B][0], 4.0)}
    assert "others in 10 s" in missing(node.state, lambda: leases), "nor before it listened for a lease"
    assert not node.signed()
    node.feed(MembersSeen(frozenset({A}))).wait(LEASE - LISTEN_S)
    assert node.signed() == [epoch(A)]


def test_nobody_goes_on_now_where_nobody_that_is_here_has_worked():
    node = Node(me=STRANGER, voters=(A,), here=(STRANGER,)).wait(LEASE + 1)
    told = "nobody that is here may sign for going on; a member that works in a round may"
    assert missing(node.state).endswith(f"; {told}")
    node.say(STRANGER, work(STRANGER, 6))
    assert node.signed() == [epoch(STRANGER)]


def test_a_node_that_came_up_just_now_does_not_say_for_how_long_others_are_silent():
    node = Node(here=(A,)).wait(LISTEN_S)
    assert "…peer-b not heard yet in 10 s, …peer-c not heard yet in 10 s; " in missing(node.state)


def test_a_node_that_came_up_just_now_complains_of_nobody():
    assert missing(Node(here=(A,)).wait(LISTEN_S - 1).state) == ""


@pytest.mark.parametrize(
    ("is_told", "here", "activity", "is_late"),
    [
        (False, B, "training", False),  # it worked on the round, and may send that yet
        (False, B, "observing", False),
        (True, B, "training", True),  # it lost that, too: it would have sent it
        (False, STRANGER, "training", True),  # it may train the round
        (False, STRANGER, "paused", True),
        (True, STRANGER, "observing", False),
    ],
)
def test_work_that_is_lost_is_told_where_nobody_is_here_that_could_go_on(is_told, here, activity, is_late):
    node = Node(here=(A,)).say(A, work(A, 5)).say(B, work(B, 5)).wait(LISTEN_S - 1)

    def told(*peers, lost=5, held=()) -> str:
        members = {peer: MemberView(activity, 5, 0.0) for peer in (A, *peers)}
        return lost_work(node.state, {lost}, members, lambda name: name in held, is_late=is_late)

    assert not told(), "leases come with the first exchanges"
    node.wait(1)
    assert told().startswith("round 5 waits for others")
    assert not told(lost=6)
    assert bool(told(here)) == is_told
    assert ("and none came from …peer-b; " in told(here)) == (is_told and here == B)
    assert not told(held=node.state.book.contributions)


def test_lost_work_of_a_reduced_round_is_told_unless_it_has_a_reduction():
    """All work of such a round counts as held: rows come in slices, and payloads are not looked at."""
    node = Node(here=(A,)).say(A, work(A, 5)).wait(LISTEN_S)
    (name,) = node.state.book.contributions
    node.feed(EntryPayloadHeld(name))
    assert lost_work(node.state, {5}, {}, lambda name: False, is_late=False).startswith("round 5 waits for others")
    row = Reduction(Round(5), (0, 9), b"\x01", (), digest(b"set"), digest(b"sum"), digest(b"a"), digest(b"b"), b"")
    node.say(B, row)
    assert not lost_work(node.state, {5}, {}, lambda name: False, is_late=False)


def test_nobody_is_missing_in_a_round_that_is_final_elsewhere():
    """A node that came back, or a newcomer, reads a round's records before those of the epoch that went on."""
    node = Node(here=(A,)).wait(LISTEN_S)
    for final, is_told in ((4, True), (5, False), (6, False)):
        leases = {B: (Lease("training", Round(final + 2), Round(final), b"", Round(-1), 10.0), 30.0)}
        assert bool(missing(node.state, lambda leases=leases: leases)) == is_told


def test_a_lease_of_a_stranger_says_of_no_round_that_it_is_final():
    """One made-up lease hid the line of all members, and they were told to stop and start."""
    node = Node(here=(A,)).wait(LISTEN_S)
    lease = Lease("training", Round(99_999), Round(99_999), b"", Round(-1), 10.0)
    assert missing(node.state, lambda: {STRANGER: (lease, 30.0)}) == missing(node.state) != ""
    assert not missing(node.state, lambda: {STRANGER: (lease, 30.0), B: (lease, 30.0)})


def test_an_author_that_is_no_member_now_has_a_reason():
    """Also long after it left: who left and came back is gone once it is lost."""
    book = SimpleNamespace(left={A: 3, B: 3, C: 3}, voted={B: 5, C: 4}, back={})
    state = SimpleNamespace(equivocators={D}, epochs=book, epoch=b"", accepted={A, B, C, D, "peer-e"})
    peers = (A, B, C, D, "peer-e", "stranger")
    assert [absence(state, peer) for peer in peers] == ["left", "gone", "left", "two histories", "gone", ""]


# --- what the simulator found -------------------------------------------------------------------


def test_where_all_left_and_came_back_they_go_on():
    node = Node(here=(A,))
    node.say(A, Leave(Round(5))).say(B, Leave(Round(5))).say(C, Leave(Round(5)))
    assert not node.wait(LEASE - 1).signed(), "the others may be on their way back"
    assert node.wait(2).signed() == [epoch(A)]
    name = epoch_id(epoch(A))
    assert node.entered() == [name]
    assert may_append(node.state), "it votes in the epoch that it signed since"
    assert node.state.epochs.has_left(A, 6, b""), "and nowhere else"
    vote = Vote(Round(6), Ballot(0, A, name), digest(b"proposal"))
    assert [*node.say(A, vote).state.waiting[6][A].values()] == [(vote, False)]
    assert node.say(A, Leave(Round(6))).state.epochs.has_left(A, 6, name), "it left again"


def test_who_left_and_came_back_decides_nothing_while_others_are_here():
    node = Node(here=(A, B), voters=(A, B, C, D)).say(A, Leave(Round(5)))
    assert not node.wait(3 * LEASE).signed()


def test_who_enters_another_epoch_than_it_signed_writes_that_down():
    node = Node(voters=(A, B, C, D), here=(A, B)).wait(LEASE + 1)
    assert node.signed() == [epoch(A, B)]
    node.say(B, epoch(B, C)).say(C, epoch(B, C))
    assert node.entered() == [epoch_id(epoch(B, C))]
    assert node.followed() == [epoch_id(epoch(B, C))]


def test_a_restart_finds_its_chain_also_while_its_newest_epoch_waits():
    waiting = epoch(A, B, at=9, parent=epoch_id(epoch(A)))
    assert chosen_path([(A, epoch(A)), (A, waiting)], A) == (epoch(A),)


def test_who_waits_for_an_epoch_in_another_chain_is_not_here():
    there = epoch_id(epoch(C))
    node = Node(voters=(A, B, C), here=(A, B, C)).say(C, epoch(C), epoch(A, C, at=6, parent=there))
    assert here_of(node.state, (A, B, C)) == {A, B}
    waits_here = Node(voters=(A, B, C), here=(A, B, C)).say(C, epoch(B, C))
    assert here_of(waits_here.state, (A, B, C)) == {A, B, C}


def test_an_epoch_that_did_not_begin_is_not_signed_again():
    """Signing two epochs of others that are gone, in turns, went on for ever."""
    node = Node(voters=(A, B, C, D), here=(A, B)).say(B, epoch(A, B, C)).wait(LEASE + 1)
    node.feed(MembersSeen(frozenset({A, D}))).say(D, epoch(A, C, D)).wait(PATIENCE + 1)
    assert node.signed() == [epoch(A, B, C), epoch(A, C, D)]
    node.feed(MembersSeen(frozenset({A}))).wait(4 * PATIENCE)
    assert node.signed() == [epoch(A, B, C), epoch(A, C, D), epoch(A)]
    assert node.entered() == [epoch_id(epoch(A))]


def test_no_ballot_is_opened_while_no_quorum_is_here():
    node = Node(here=(A,), voters=(B, A, C))
    node.feed(Idle(idle=True, now=node.now), RoundClosed(Round(5), (digest(b"mine"),)))
    node.say(A, work(A, 5)).wait(LEASE - 1)
    assert not [a for a in node.log if isinstance(a, Append) and isinstance(a.body, Prepare)]


def test_who_just_came_up_is_patient_for_a_lease():
    assert patience_of(0.0, 60.0) == 60.0
    assert patience_of(5.0, 60.0) == 10.0
    assert patience_of(0.1, 60.0) == 3.0


VOTES = st.builds(lambda number: Vote(Round(number), Ballot(0, A), digest(b"set")), st.integers(0, 80))
MOVES = st.builds(
    lambda number, name: Follow(Round(number), name), st.integers(0, 40), st.sampled_from([b"", b"1" * 32])
)
AGAINST = st.builds(lambda peer: Exclude(Round(1), peer, ""), st.sampled_from([B, C]))
SIGNED = st.builds(lambda number: Epoch(Round(number), b"", (A,)), st.integers(0, 40))


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.one_of(VOTES, VOTES, AGAINST, MOVES, SIGNED))))
def test_what_a_book_found_before_a_vote_is_what_it_would_find_after_it(entries):
    book = EpochBook()
    for author, body in entries:
        book = add_entry(book, author, body)
        fresh = replace(book)
        unvoted = replace(fresh, voted={}, votes_against={}, excise_votes={})
        assert (book.progress, book.unvoted) == (fresh.progress, unvoted)


@pytest.mark.parametrize(("bound", "crowd"), [(0, 4), (1, 3), (1, 4)])
def test_a_chain_whose_set_names_too_many_newcomers_outranks_nobody(bound, crowd):
    """The others decide round 5 after all, with a set of their three works and of strangers."""
    node = Node(voters=(A, B, C, D), here=(A,))
    known = Tally(8, 5, dict.fromkeys((A, B, C, D), 8), newcomers=bound)
    node.state = replace(node.state, tally=known)
    node.wait(LEASE + 1).say(A, epoch(A)).wait(1)
    assert node.entered() == [epoch_id(epoch(A))]
    strangers = [PeerId(f"stranger-{at}") for at in range(crowd)]
    made = [entry_of(peer, work(peer, 5)) for peer in (B, C, D, *strangers)]
    ballot = Ballot(1, B, b"")
    proposed = entry_of(B, Proposal(Round(5), ballot, tuple(sorted(one.entry for one in made)), digest(b"s")))
    node.feed(*made, proposed)
    for peer in (B, C, D):
        node.say(peer, Vote(Round(5), ballot, proposed.entry))
        node.say(peer, *votes(b"", 6))
    node.wait(1)
    assert bool(node.followed()) == (bound == 0 or crowd == 3)


def test_voters_of_an_epoch_before_are_no_newcomers_in_a_fork():
    """Round 5 of an epoch of A, B and C names these three; the root's voters were A and D."""
    root, *epochs = [Electorate(voters, frozenset()) for voters in ((A, D), (A, B), (A, C))]
    chain = [Segment(b"", 0, root, Tally()), *(Segment(b"epoch", 5, each, Tally()) for each in epochs)]
    assert exempt_of(chain, 5, (D,)) == {A, B, C, D}
    assert exempt_of(chain, 6, (D,)) == {D}
    assert exempt_of(chain[:2], 5, (D,)) == {A, B, D}


def test_of_the_round_at_which_an_epoch_begins_only_ballots_before_it_are_looked_at():
    segments = (Segment(ROOT, 0, Electorate(()), Tally()), Segment(b"ours", 5, Electorate(()), Tally()))
    state = FinalityState(run=RUN, me=A, rounds=9, last_final=6, voters=(), chain=segments)

    def seen(epoch):
        vote = Vote(Round(5), Ballot(0, A, epoch), digest(b"proposal"))
        book, _ = add_to_book(Book(), digest(b"vote"), A, vote)
        return decided_before(replace(state, books={5: book}))

    assert seen(b"ours") == decided_before(state)
    assert seen(ROOT) != decided_before(state)
