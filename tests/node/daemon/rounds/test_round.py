"""The rules of a round, one by one. The node under test is ME; the others are leases and contributions."""

import dataclasses
from itertools import permutations

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds.facts import ANNOUNCE_AGAIN_S
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.queries import (
    REST_TICK_S,
    SOON_S,
    counted_book,
    next_tick_s,
    own_set,
    reason,
    waits_s,
)
from atoll.node.daemon.rounds.state import LOST_LEAST_S, STALL_ROUNDS, UNREACHABLE_ROUNDS, Phase, RoundConfig
from atoll.node.daemon.rounds.types import (
    Announce,
    AuthorExcluded,
    AuthorPruned,
    Behind,
    ContributionSeen,
    Discard,
    FetchPayload,
    Finish,
    FoldDone,
    FoldRound,
    Hold,
    LeasesChanged,
    Pause,
    PayloadHeld,
    PublishAck,
    PublishLease,
    ReductionPlanned,
    Refused,
    ResolveSet,
    Resume,
    Reweighed,
    RoundFinal,
    RoundTick,
    SenioritySeen,
    SetResolved,
    StartTraining,
    TrainingDone,
    TrainingRefused,
    TrainingSaved,
    WorkApart,
    WorkerReady,
)
from atoll.node.runs.capacity.open_rounds import OpenRounds
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import MAX_SET, Ballot, Contribution, Proposal, set_digest, sign_entry
from atoll.protocols.ledger.set_limit import Arrival, NewcomerOrder, Seniority
from atoll.protocols.local.worker_messages import Pending, TrainProgress

ME, A, B, C = (PeerId(name) for name in ("me", "peer-a", "peer-b", "peer-c"))
IDENTITY = Identity(bytes(32))
TRAIN_S = 10.0
STEPS = 10
LEASE_S = 20.0


def entry_of(author: PeerId, number: int) -> Digest:
    return digest(b"entry", author.encode(), bytes([number]))


def payload_of(author: PeerId, number: int) -> Digest:
    return digest(b"payload", author.encode(), bytes([number]))


def pending_of(number: int) -> Pending:
    return Pending(Round(number), digest(b"base"), payload_of(ME, number), "path", STEPS, 1, 64, 1.0)


class Node:
    """Drives one machine; every action of the newest event is in `said`, all of them in `log`."""

    def __init__(self, rounds: int = 8, quorum_256: int = 192, grace_256: int = 128, min_members: int = 1, **more):
        self.state = round_machine.begin(
            RoundConfig(ME, rounds, quorum_256, grace_256, LEASE_S, min_members, **more)
        )
        self.now = 0.0
        self.said: list[object] = []
        self.log: list[object] = []

    def feed(self, event) -> "Node":
        before = self.state
        self.state, self.said = round_machine.step(before, event)
        assert round_machine.step(before, event) == (self.state, self.said), "not a function"
        unsettled, said = round_machine.step(replace(before, settled={}), event)
        assert (replace(unsettled, settled={}), said) == (replace(self.state, settled={}), self.said)
        self.log += self.said
        return self

    def find(self, kind):
        return [action for action in self.said if isinstance(action, kind)]

    def ready(self, final: int = -1, *pending: Pending) -> "Node":
        return self.feed(WorkerReady(final, pending, self.now))

    def seen(self, author: PeerId, number: int, *, held: bool = True) -> "Node":
        body = Contribution(Round(number), digest(b"base"), payload_of(author, number), 1, 1, 64, 1.0)
        return self.feed(ContributionSeen(entry_of(author, number), author, body, held, self.now))

    def leases(self, speed: float = 1.0, **at) -> "Node":
        """`a=3` trains round 3; `b=("done", 8)` says more. `speed`: in tokens per second; 0: none yet."""
        peers = {"a": A, "b": B, "c": C}
        views = {
            peers[name]: MemberView(*(what if isinstance(what, tuple) else ("training", what)), self.now, speed)
            for name, what in at.items()
        }
        return self.feed(LeasesChanged(views, self.now))

    def lost(self, *peers: PeerId, unreachable: bool = False) -> "Node":
        """The connections to these members are lost now; `unreachable`: dials fail at once."""
        members = self.state.members
        views = {
            peer: replace(view, lost_at=self.now, is_unreachable=unreachable)
            if peer in peers
            else replace(view, lost_at=None, is_unreachable=False)
            for peer, view in members.items()
        }
        return self.feed(LeasesChanged(views, self.now))

    def at_work(self, round_s: float, **at: int) -> "Node":
        """These members train these rounds since now, and say how long a round takes them."""
        peers = {"a": A, "b": B, "c": C}
        views = {
            peers[name]: MemberView("training", number, self.now, round_s=round_s) for name, number in at.items()
        }
        return self.feed(LeasesChanged(views, self.now))

    def tick(self, seconds: float) -> "Node":
        self.now += seconds
        return self.feed(RoundTick(self.now))

    def trained(self, number: int, train_s: float = TRAIN_S) -> "Node":
        """Trained, and at once safe on the disk."""
        said = self.only_trained(number, train_s).said
        self.said = said + self.kept(number).said
        return self

    def only_trained(self, number: int, train_s: float = TRAIN_S) -> "Node":
        self.now += train_s
        return self.feed(TrainingDone(Round(number), pending_of(number), train_s, self.now))

    def kept(self, number: int) -> "Node":
        return self.feed(TrainingSaved(pending_of(number), self.now))

    def train(self, number: int) -> "Node":
        """Train, announce and see our own contribution in the ledger."""
        assert self.state.phase is Phase.TRAIN
        assert self.state.round == number
        return self.trained(number).seen(ME, number)

    def fold(self) -> "Node":
        """The worker answers every open fold."""
        while self.state.folding:
            number = min(self.state.folding)
            self.feed(FoldDone(Round(number), digest(b"view", *self.state.folding[number]), self.now))
        return self


def test_a_round_of_one_node_from_ready_to_the_next():
    node = Node().ready()
    assert node.find(StartTraining) == [StartTraining(Round(0), 0, 1, -1)]
    node.trained(0)
    assert node.find(Announce) == [Announce(pending_of(0))]
    node.seen(ME, 0)
    assert node.find(FoldRound) == [FoldRound(Round(0), (entry_of(ME, 0),))]
    node.fold()
    names = (entry_of(ME, 0),)
    assert node.find(PublishAck) == [PublishAck(Round(0), names, set_digest(list(names)), digest(b"view", *names))]
    assert node.find(StartTraining) == [StartTraining(Round(1), 0, 1, -1)]
    assert node.find(PublishLease) == [PublishLease("training", Round(1))]


def test_one_author_cannot_fill_the_disk_with_one_round():
    """A feed has one order, so that all nodes take the same one."""
    node = Node().ready()
    for number in range(40):
        body = Contribution(Round(0), digest(b"base"), digest(bytes([number])), 1, 1, 64, 1.0)
        node.feed(ContributionSeen(digest(b"entry", bytes([number])), A, body, False, node.now))
    fetched = [action for action in node.log if isinstance(action, FetchPayload)]
    assert fetched == [FetchPayload(digest(b"entry", bytes([0])))]
    assert len(node.state.books[0].authors) == 1
    node.seen(B, 0, held=False)
    assert node.find(FetchPayload) == [FetchPayload(entry_of(B, 0))]


def test_the_set_to_fold_does_not_depend_on_the_order_of_arrival():
    for order in permutations((A, B, C)):
        node = Node(min_members=4).ready().leases(a=0, b=0, c=0).train(0)
        node.seen(order[0], 0).seen(order[1], 0).seen(order[2], 0)
        assert node.find(FoldRound) == [FoldRound(Round(0), tuple(sorted(entry_of(p, 0) for p in (ME, A, B, C))))]


def test_a_set_names_no_more_than_a_proposal_can():
    """Members stay in whatever comes; who comes first is what finality says, and it may change."""
    node = Node(min_members=4).ready().leases(a=0, b=0, c=0)
    node.feed(SenioritySeen(Seniority((frozenset((ME, A, B, C)),)), NewcomerOrder(), node.now))
    for number in range(MAX_SET + 60):
        node.seen(PeerId(f"eve{number}"), 0)
    node.train(0).seen(A, 0).seen(B, 0).seen(C, 0)
    (fold,) = node.find(FoldRound)
    assert len(fold.members) == MAX_SET
    assert fold.members == tuple(sorted(fold.members))
    assert {entry_of(p, 0) for p in (ME, A, B, C)} < {*fold.members}
    ballot = Ballot(0, IDENTITY.peer_id)
    sign_entry(RunId(digest(b"run")), IDENTITY, 0, b"", Proposal(Round(0), ballot, fold.members, digest(b"s")))
    node.fold()
    (ack,) = node.find(PublishAck)
    assert ack.members == fold.members
    # A member that was unknown, and whose work is here, takes the place of a stranger.
    left_out = next(PeerId(f"eve{at}") for at in range(60) if entry_of(PeerId(f"eve{at}"), 0) not in fold.members)
    node.feed(SenioritySeen(Seniority((frozenset((ME, A, B, C, left_out)),)), NewcomerOrder(), node.now))
    changed = own_set(node.state, 0)
    assert entry_of(left_out, 0) in changed
    assert len({*changed} & {*fold.members}) == MAX_SET - 1
    node.leases().train(1)
    assert {done.round: done.members for done in node.find(FoldRound)}[0] == changed


def test_a_node_remembers_how_authors_came_and_what_audits_found_of_them():
    node = Node().ready().seen(A, 0, held=False)
    first = Tally(8, 20, newcomers=16)
    node.feed(SenioritySeen(Seniority(), NewcomerOrder(first), node.now))
    node.feed(PayloadHeld(entry_of(A, 0), Round(0), node.now, "10.0.0.0/24"))
    assert node.state.set_rules.arrivals.by_author == {A: Arrival(20, "10.0.0.0/24")}
    node.feed(SenioritySeen(Seniority(), NewcomerOrder(first.after([A])), node.now))
    assert node.state.set_rules.arrivals.turns == {"10.0.0.0/24": (0, 1), "10.0.0.0/16": (0, 1)}
    node.feed(SenioritySeen(Seniority(), NewcomerOrder(first.after([A]).after([])), node.now))
    assert node.state.set_rules.arrivals.turns == {"10.0.0.0/24": (0, 1), "10.0.0.0/16": (0, 1)}
    plain = Node().ready().seen(A, 0, held=False)
    plain.feed(PayloadHeld(entry_of(A, 0), Round(0), node.now, "10.0.0.0/24"))
    assert not plain.state.set_rules.arrivals.by_author


def test_nothing_starts_before_ready():
    node = Node().leases(a=0).seen(A, 0, held=False).tick(99.0)
    assert node.state.phase is Phase.SYNC
    assert not any(isinstance(action, StartTraining | FetchPayload) for action in node.log)


def test_round_zero_waits_for_its_members():
    node = Node(min_members=3).ready()
    assert node.state.phase is Phase.GATHER
    assert "1 of 3" in reason(node.state)
    node.leases(a=0, b=("syncing", 0))
    assert node.state.phase is Phase.GATHER
    node.leases(a=0, b=0)
    assert node.find(StartTraining) == [StartTraining(Round(0), 0, 3, -1)]


def test_nobody_gathers_once_the_run_has_begun():
    assert Node(min_members=3).seen(A, 0).ready().state.phase is Phase.TRAIN
    assert Node(min_members=3).ready(4).state.phase is Phase.TRAIN


def test_a_round_closes_when_everybody_expected_is_held():
    node = Node().ready().leases(a=0, b=0).train(0)
    assert node.state.phase is Phase.COLLECT
    node.seen(A, 0).seen(B, 0, held=False)
    assert node.find(FetchPayload) == [FetchPayload(entry_of(B, 0))]
    assert node.state.phase is Phase.COLLECT
    node.feed(PayloadHeld(entry_of(B, 0), Round(0), node.now))
    assert len(node.find(FoldRound)[0].members) == 3


def test_grace_counts_from_the_quorum_in_own_round_times():
    node = Node(quorum_256=128).ready().leases(a=0, b=0, c=0).train(0)
    node.tick(30.0).seen(A, 0)
    node.tick(TRAIN_S / 2 - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD


def test_grace_never_begins_before_own_training_is_done():
    node = Node(quorum_256=128).ready().leases(a=0, b=0, c=0).seen(A, 0).seen(B, 0)
    node.tick(100.0).train(0)
    assert node.state.phase is Phase.COLLECT
    node.tick(TRAIN_S / 2)
    assert node.state.phase is Phase.FOLD


def test_a_member_whose_lease_expired_is_not_waited_for():
    node = Node(quorum_256=256).ready().leases(a=0, b=0).train(0).seen(A, 0)
    assert node.state.phase is Phase.COLLECT
    node.leases(a=0)
    assert node.state.phase is Phase.FOLD


@pytest.mark.parametrize("others", [(A,), (A, B)])
def test_a_member_to_which_the_connection_is_lost_costs_one_round_time(others):
    """Two or three members have no quorum without each other, and a lease is many of their round times."""
    node = Node().ready().leases(**dict.fromkeys("ab"[: len(others)], 0)).train(0)
    for other in others[1:]:
        node.seen(other, 0)
    node.lost(A).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert "connection lost" in reason(node.state)
    assert "goes on in 0 s at the latest" in reason(node.state)
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD
    node.fold().train(1)
    for other in others[1:]:
        node.seen(other, 1)
    assert node.state.phase is Phase.FOLD, "nobody waits for it again"


def of_four() -> Node:
    """Two of four members have contributed to round 0, and this node: a quorum."""
    return Node().ready().leases(a=0, b=0, c=0).train(0).seen(A, 0).seen(B, 0)


def test_with_a_quorum_a_member_that_cannot_be_dialled_costs_a_quarter_of_a_round():
    node = of_four().lost(C, unreachable=True).tick(UNREACHABLE_ROUNDS * TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD
    # A loss from before the quorum counts from then.
    node = Node().ready().leases(a=0, b=0, c=0).lost(C, unreachable=True).train(0).seen(A, 0)
    assert node.state.phase is Phase.COLLECT
    assert node.seen(B, 0).state.phase is Phase.FOLD, "at once"


def test_however_short_rounds_are_a_member_that_cannot_be_dialled_costs_a_quarter_of_one():
    """The least wait for a lost member gives a dial its time; this one is over."""
    round_s = 0.8
    node = Node().ready().leases(a=0, b=0, c=0).trained(0, train_s=round_s).seen(ME, 0).seen(A, 0).seen(B, 0)
    node.lost(C, unreachable=True).tick(UNREACHABLE_ROUNDS * round_s - 0.02)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.03).state.phase is Phase.FOLD


def test_the_next_tick_comes_when_the_round_closes():
    node = of_four()
    assert next_tick_s(node.state, node.now, 0.25) == 0.25
    node.tick(TRAIN_S / 2 - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert next_tick_s(node.state, node.now, 0.25) == pytest.approx(0.1)
    assert next_tick_s(node.state, node.now + 0.06, 0.25) == pytest.approx(0.04), (
        "the clock is later than the event"
    )
    assert next_tick_s(node.state, node.now + 0.2, 0.25) == 0.25, "it is due: the event is on its way"
    assert next_tick_s(node.state, node.now + 0.1 - 1e-9, 0.25) == SOON_S, "a sleep that ends at once ends never"
    assert node.tick(0.1).state.phase is Phase.FOLD
    assert next_tick_s(node.state, node.now, 0.25) == 0.25
    node.state = replace(node.state, phase=Phase.PAUSED)
    assert next_tick_s(node.state, node.now, 0.25) == REST_TICK_S


def test_a_lost_connection_alone_ends_no_grace():
    """A relay may have dropped the circuit; whoever is back within the grace counts."""
    grace_s = TRAIN_S / 2
    node = of_four().lost(C).tick(grace_s - 0.1)
    assert node.state.phase is Phase.COLLECT
    node = of_four().lost(C, unreachable=True).tick(0.1).leases(a=0, b=0, c=0).tick(grace_s - 0.2)
    assert node.state.phase is Phase.COLLECT, "it is back"
    assert node.seen(C, 0).state.phase is Phase.FOLD


def test_without_a_quorum_an_unreachable_member_is_waited_for_as_a_lost_one():
    node = Node().ready().leases(a=0).train(0).lost(A, unreachable=True).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.1).state.phase is Phase.FOLD


def test_a_slow_member_beside_an_unreachable_one_has_all_of_its_grace():
    members = {"a": 0, "b": 0, "c": 0}
    node = Node(quorum_256=128).ready().leases(**members).train(0).seen(A, 0).lost(C, unreachable=True)
    assert node.tick(TRAIN_S / 2 - 0.1).state.phase is Phase.COLLECT, "B lives"
    assert node.tick(0.1).state.phase is Phase.FOLD


def begins(late_s: float, own_s: float = 0.0, **more) -> Phase:
    return begun(late_s, own_s, **more).state.phase


def begun(late_s: float, own_s: float = 0.0, **more) -> Node:
    """A node that may begin round 1 so long after three others did."""
    node = Node(**more)
    node.at_work(TRAIN_S, a=1, b=1, c=1)
    for number, who in ((0, A), (0, B), (0, C)):
        node.seen(who, number)
    node.now += late_s
    node.state = replace(node.state, train_s=own_s)
    node.ready().feed(RoundTick(node.now))
    return node.fold()


@pytest.mark.parametrize(
    ("late", "phase"), [(0.2, Phase.TRAIN), (0.3, Phase.JOIN), (1.4, Phase.JOIN), (1.6, Phase.TRAIN)]
)
def test_who_comes_up_in_the_middle_of_a_round_begins_with_the_next(late, phase):
    """Of four it begins where the three others lose less by waiting for it than it does by not working."""
    assert begins(late * TRAIN_S) is phase


@pytest.mark.parametrize(("late", "phase"), [(0.45, Phase.TRAIN), (0.55, Phase.JOIN), (1.6, Phase.TRAIN)])
def test_a_slow_member_begins_whenever_its_work_can_be_there_within_the_grace(late, phase):
    assert begins(late * TRAIN_S, own_s=TRAIN_S) is phase


@pytest.mark.parametrize(("late", "late_s"), [(0.05, 0.0), (0.3, 3.0), (0.7, 7.0), (0.8, None), (1.6, 0.0)])
def test_who_may_take_fewer_steps_leaves_out_those_of_the_time_that_is_gone(late, late_s):
    node = begun(late * TRAIN_S, least_256=64)
    assert node.state.phase is (Phase.JOIN if late_s is None else Phase.TRAIN)
    assert [start.late_s for start in node.find(StartTraining)] == pytest.approx([late_s] * (late_s is not None))
    assert begun(0.8 * TRAIN_S, least_256=64, overlap_steps=4).find(StartTraining)[0].late_s == pytest.approx(8.0)


def test_steps_that_were_left_out_count_in_the_time_that_a_round_takes():
    node = Node().ready().leases(a=0)
    node.now += 4.0
    node.feed(TrainingDone(Round(0), pending_of(0), 4.0, node.now, left_out=2 * STEPS))
    assert node.state.train_s == pytest.approx(12.0)
    assert node.state.step_s == pytest.approx(0.4)


def test_nobody_adjusts_its_round_to_members_that_show_no_work():
    node = Node(least_256=64)
    views = {peer: MemberView("training", 0, 0.0, round_s=TRAIN_S, untried=True) for peer in (A, B)}
    node.feed(LeasesChanged(views, 0.0)).tick(TRAIN_S / 2).ready()
    assert node.find(StartTraining)[0].late_s == 0.0
    node = Node(least_256=64).at_work(TRAIN_S, a=0, b=0)
    node.state = replace(node.state, absent=frozenset((A, B)))
    assert node.tick(TRAIN_S / 2).ready().find(StartTraining)[0].late_s == 0.0


def test_with_overlap_or_without_known_speeds_every_round_is_begun():
    assert begins(0.8 * TRAIN_S, overlap_steps=4) is Phase.TRAIN
    node = Node().leases(a=1, b=1).seen(A, 0).seen(B, 0)
    node.now += 0.8 * TRAIN_S
    assert node.ready().fold().state.phase is Phase.TRAIN


def joining() -> Node:
    node = Node().at_work(TRAIN_S, a=0, b=0, c=0)
    node.now += TRAIN_S / 2
    node.ready()
    assert node.state.phase is Phase.JOIN
    assert "the others are far in round 0" in reason(node.state)
    assert node.state.leased == ("syncing", 0), "nobody waits for it"
    return node


def test_who_waits_for_the_next_round_begins_with_the_others():
    node = joining().tick(TRAIN_S / 2)
    for who in (A, B, C):
        node.seen(who, 0)
    assert node.state.phase is Phase.JOIN, "they still collect"
    node.at_work(TRAIN_S, a=1, b=1, c=1)
    node.fold()
    assert (node.state.phase, node.state.round) == (Phase.TRAIN, 1)


def test_a_renewed_lease_begins_no_round():
    node = joining().tick(0.1)
    assert node.at_work(TRAIN_S, a=0, b=0, c=0).state.phase is Phase.JOIN


def test_when_the_others_go_the_wait_for_their_next_round_is_over():
    assert joining().leases().state.phase is Phase.TRAIN
    assert joining().tick(TRAIN_S).state.phase is Phase.TRAIN, "they are slower than they say"


def test_who_lies_about_its_speed_holds_up_nobody_for_more_than_a_lease():
    node = joining()
    end = node.now + LEASE_S
    while node.now < end - 1:
        node.tick(1.0)
        node.at_work(2 * (node.now + 1), a=0, b=0, c=0)
        assert node.state.phase is Phase.JOIN
    assert node.tick(1.1).state.phase is Phase.TRAIN
    node.train(0)
    for who in (A, B, C):
        node.seen(who, 0)
    node.at_work(2 * TRAIN_S, a=1, b=1, c=1).tick(1.2 * TRAIN_S)
    assert node.fold().state.phase is Phase.TRAIN, "and not again"


def test_quick_rounds_leave_time_to_dial_a_lost_member_again():
    node = Node().ready().leases(a=0).trained(0, train_s=0.01).seen(ME, 0).lost(A).tick(LOST_LEAST_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD


def test_a_lost_member_does_not_end_the_wait_for_another():
    node = Node(quorum_256=256).ready().leases(a=0, b=0).train(0).lost(A).tick(5 * TRAIN_S)
    assert node.state.phase is Phase.COLLECT
    node.seen(B, 0)
    assert node.state.phase is Phase.FOLD


def test_a_member_that_announces_and_never_delivers_costs_a_stall_once():
    node = Node().ready().leases(a=0).train(0).tick(STALL_ROUNDS * TRAIN_S + LEASE_S).fold()
    node.leases(a=1).train(1).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD
    node.fold().leases(a=2).seen(A, 1).train(2).tick(2 * TRAIN_S)
    assert node.state.phase is Phase.COLLECT, "late, but it delivers: it is waited for again"


def test_a_member_that_withholds_what_it_announces_costs_a_stall_once():
    node = Node().ready().leases(a=0).seen(A, 0, held=False).train(0)
    assert node.tick(TRAIN_S).state.phase is Phase.COLLECT
    node.tick(STALL_ROUNDS * TRAIN_S + LEASE_S).fold()
    node.leases(a=1).seen(A, 1, held=False).train(1).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.1).state.phase is Phase.FOLD, "another entry without its payload is no return"
    node.feed(PayloadHeld(entry_of(A, 1), Round(1), node.now)).fold()
    node.leases(a=2).seen(A, 2, held=False).train(2).tick(2 * TRAIN_S)
    assert node.state.phase is Phase.COLLECT, "its payload came: it is waited for again"


def test_a_member_without_any_work_is_waited_for_one_round_time():
    node = Node().ready().leases(a=0)
    views = {peer: replace(view, untried=True) for peer, view in node.state.members.items()}
    node.feed(LeasesChanged(views, node.now)).train(0).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD


def test_a_member_that_is_back_is_waited_for_again():
    node = Node().ready().leases(a=0).train(0).lost(A).tick(TRAIN_S / 2).leases(a=0).tick(TRAIN_S)
    assert node.state.phase is Phase.COLLECT
    node.seen(A, 0)
    assert node.state.phase is Phase.FOLD


def test_a_member_that_lives_but_is_stuck_is_not_waited_for_for_ever():
    node = Node(quorum_256=256).ready().leases(a=0).train(0)
    node.tick(STALL_ROUNDS * TRAIN_S + LEASE_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    node.tick(0.1)
    assert node.state.phase is Phase.FOLD


def test_waiting_explains_itself():
    node = Node(quorum_256=256).ready().leases(a=0, b=0).train(0).seen(B, 0).tick(4.0)
    text = reason(node.state)
    assert text.startswith("waiting for 1 of 3: …peer-a (training round 0, heard 14 s ago)")
    assert "goes on in 96 s at the latest" in text


def test_a_wait_has_an_estimate_by_the_pace_that_members_say():
    node = Node(quorum_256=256).ready().leases(a=0, b=0).train(0)
    assert waits_s(node.state) is None, "nobody says how long a round takes"
    node.at_work(30.0, a=0, b=0)
    began = {node.state.entered[peer] for peer in (A, B)}
    assert waits_s(node.state) == max(began) + 30.0 - node.now
    node.tick(5.0)
    assert waits_s(node.state) == max(began) + 30.0 - node.now
    node.tick(40.0)
    assert waits_s(node.state) is None, "it is late by its own pace"
    node.seen(A, 0).seen(B, 0)
    assert node.state.phase is Phase.FOLD
    assert waits_s(node.state) is None


def test_who_waits_for_the_others_next_round_says_how_long():
    node = joining()
    assert 0 < waits_s(node.state) < TRAIN_S


def test_a_late_contribution_is_folded_and_acknowledged_at_the_next_close():
    node = Node().ready().train(0).fold()
    node.seen(A, 0)
    assert node.said == []
    node.train(1).fold()
    acked = [action.round for action in node.log if isinstance(action, PublishAck)]
    assert acked == [0, 0, 1]


def test_a_round_whose_weights_change_is_folded_and_acknowledged_again():
    node = Node().ready().train(0).fold()
    node.feed(Reweighed(Round(0), node.now))
    assert not node.find(FoldRound), "not while it trains"
    node.train(1)
    assert {action.round for action in node.find(FoldRound)} == {0, 1}
    node.feed(Reweighed(Round(1), node.now))
    node.fold()
    folds = [action.round for action in node.log if isinstance(action, FoldRound)]
    assert folds == [0, 0, 1, 1], "the fold that was under way had the older weights"
    acked = [action.round for action in node.log if isinstance(action, PublishAck)]
    assert acked == [0, 0, 1]
    before = node.state
    node.feed(Reweighed(Round(7), node.now))
    assert (node.state.folded, node.state.folding, node.said) == (before.folded, before.folding, [])


def test_what_came_twice_changes_nothing():
    node = Node().ready().leases(a=0).train(0).seen(A, 0)
    state = node.fold().state
    for author in (A, ME):
        node.seen(author, 0)
        assert node.said == []
        node.feed(PayloadHeld(entry_of(author, 0), Round(0), node.now))
        assert node.said == []
    node.feed(FoldDone(Round(0), digest(b"old"), node.now))
    assert node.said == []
    assert node.state == state


def test_of_two_contributions_of_one_author_the_first_counts():
    node = Node().ready().leases(a=0).train(0).seen(A, 0, held=False)
    second = Contribution(Round(0), digest(b"base"), digest(b"another"), 1, 1, 255, 1.0)
    node.feed(ContributionSeen(digest(b"second"), A, second, True, node.now))
    assert node.said == []
    node.feed(PayloadHeld(entry_of(A, 0), Round(0), node.now))
    (fold,) = node.find(FoldRound)
    assert fold.members == tuple(sorted([entry_of(A, 0), entry_of(ME, 0)]))


def test_a_reduced_round_is_folded_when_its_set_is_known_and_again_when_it_changes():
    node = Node().ready().leases(a=0)
    node.feed(ReductionPlanned(Round(0), node.now)).train(0).seen(A, 0, held=False)
    assert node.find(FetchPayload) == []
    node.feed(PayloadHeld(entry_of(A, 0), Round(0), node.now))
    assert node.find(ResolveSet) == [ResolveSet(Round(0))]
    assert node.find(FoldRound) == []
    assert "reduced slices" in reason(node.state)
    names = tuple(sorted([entry_of(A, 0), entry_of(ME, 0), digest(b"reduction")]))
    node.feed(SetResolved(Round(0), names, node.now))
    assert node.said == [FoldRound(Round(0), names)]
    node.feed(FoldDone(Round(0), digest(b"view"), node.now))
    (ack,) = node.find(PublishAck)
    assert ack.members == names
    assert node.find(StartTraining)
    fewer = names[:2]
    node.feed(SetResolved(Round(0), fewer, node.now))
    assert node.find(FoldRound) == [], "not while it trains"
    node.train(1).seen(A, 1)
    assert FoldRound(Round(0), fewer) in node.find(FoldRound)


def test_a_plan_that_comes_after_the_round_closed_changes_nothing_here():
    node = Node().ready().leases(a=0).train(0).seen(A, 0)
    node.feed(ReductionPlanned(Round(0), node.now))
    assert node.said == []
    assert not node.state.reduced


def test_contributions_to_final_rounds_are_ignored():
    node = Node().ready(3)
    node.seen(A, 3, held=False)
    assert node.said == []
    assert 3 not in node.state.books


def test_who_is_behind_goes_where_the_others_are():
    """Half of the others contributed to rounds 0 … 4 and train round 5 by now."""
    node = Node().leases(a=5, b=5, c=1)
    for number in range(5):
        node.seen(A, number).seen(B, number)
    node.ready()
    assert sorted(action.round for action in node.find(FoldRound)) == list(range(5))
    node.fold()
    assert node.find(StartTraining) == [StartTraining(Round(5), 0, 3, -1)]


def test_who_is_a_little_late_still_takes_part():
    """The others contributed to round 1 but still collect it: it is not too late."""
    node = Node().leases(a=1, b=1)
    for number in range(2):
        node.seen(A, number).seen(B, number)
    node.ready().fold()
    assert node.find(StartTraining)[0].round == 1


def test_a_node_never_contributes_twice_to_a_round():
    node = Node().seen(ME, 0).seen(ME, 1).leases(a=1)
    node.ready()
    assert node.state.phase is Phase.COLLECT
    assert node.state.round == 1
    node.seen(A, 1).fold()
    assert [action.round for action in node.log if isinstance(action, StartTraining)] == [2]


def test_saved_work_is_announced_after_a_restart_once():
    node = Node().ready(-1, pending_of(0))
    assert node.find(Announce) == [Announce(pending_of(0))]
    node = Node().seen(ME, 0)
    assert not node.ready(-1, pending_of(0)).find(Announce)
    assert Node().ready(0, pending_of(0)).find(Discard) == [Discard(pending_of(0))]


def test_an_announcement_that_the_disk_refused_is_offered_again():
    node = Node().ready().leases(a=0).trained(0)
    node.tick(1.0)
    assert not node.find(Announce)
    node.tick(ANNOUNCE_AGAIN_S)
    assert node.find(Announce) == [Announce(pending_of(0))]
    node.seen(ME, 0).tick(ANNOUNCE_AGAIN_S)
    assert not node.find(Announce)


def test_work_for_a_round_that_became_final_is_discarded():
    node = Node().ready().leases(a=1).seen(A, 0).feed(RoundFinal(Round(0), 1.0))
    node.trained(0)
    assert node.find(Discard) == [Discard(pending_of(0))]
    assert not node.find(Announce)
    assert node.find(StartTraining)[0].round == 1


def test_collecting_a_round_that_became_final_ends():
    node = Node(quorum_256=256).ready().leases(a=0).train(0)
    node.feed(RoundFinal(Round(0), node.now))
    assert node.find(StartTraining)[0].round == 1


def test_open_payloads_are_waited_for_at_the_start_but_not_for_ever():
    node = Node().leases(a=1).seen(A, 0, held=False)
    node.ready()
    assert node.find(FetchPayload) == [FetchPayload(entry_of(A, 0))]
    assert node.state.phase is Phase.CATCH_UP
    assert reason(node.state).endswith(
        f"; goes on without them in 20 s if none comes, in {LEASE_S:.0f} s at the latest"
    )
    assert node.tick(LEASE_S).state.phase is Phase.TRAIN


def test_a_fresh_worker_folds_everything_again():
    node = Node().ready().train(0).fold()
    node.ready()
    assert [action.round for action in node.find(FoldRound)] == [0]
    node.fold()
    assert node.find(StartTraining)[0].round == 1
    assert not node.find(PublishAck), "the set is the acknowledged one"


def test_a_pause_ends_the_round_at_hand_first():
    node = Node().ready().leases(a=0).feed(Pause("by the user", 1.0))
    assert node.said == []
    node.train(0).seen(A, 0).fold()
    assert node.state.phase is Phase.PAUSED
    assert PublishLease("paused", Round(1)) in node.said
    assert "by the user" in reason(node.state)
    assert node.tick(50.0).said == []
    node.feed(Resume(node.now))
    assert node.find(StartTraining)[0].round == 1


def test_a_round_that_the_worker_refuses_is_left_and_those_of_others_are_folded():
    node = Node().ready().leases(a=0).train(0).seen(A, 0).fold()
    assert node.find(StartTraining)[0].round == 1
    node.feed(TrainingRefused(Round(1), "ε would be 9", node.now))
    assert (node.state.phase, reason(node.state)) == (Phase.PAUSED, "ε would be 9")
    assert node.state.is_spent
    assert PublishLease("paused", Round(1)) in node.said
    node.seen(B, 0)
    assert [fold.round for fold in node.find(FoldRound)] == [0]
    assert node.fold().find(StartTraining) == []
    assert node.feed(Resume(node.now)).find(StartTraining), "the worker is asked again"
    assert not node.state.is_spent


def test_a_pause_that_ends_is_no_refusal_any_more():
    node = Node().ready().leases(a=0).train(0).seen(A, 0).fold()
    node.feed(TrainingRefused(Round(1), "ε would be 9", node.now)).feed(Pause("by the user", node.now, 5.0))
    assert node.state.is_spent, "a pause on top of it gives no ε back"
    assert node.tick(6.0).find(StartTraining)
    assert not node.state.is_spent


def test_a_refusal_of_a_round_that_is_over_only_ends_training():
    node = Node().ready().leases(a=0)
    before = node.state.phase
    node.feed(TrainingRefused(Round(7), "ε would be 9", node.now))
    assert node.state.phase is before
    assert node.train(0).seen(A, 0).fold().state.phase is Phase.PAUSED


def test_who_is_not_admitted_trains_no_round_until_it_is():
    node = Node().ready().leases(a=0).feed(Refused("the permit is used up", 1.0))
    node.train(0).seen(A, 0).fold()
    assert node.state.phase is Phase.PAUSED
    assert PublishLease("paused", Round(1)) in node.said
    assert reason(node.state) == "waiting to be admitted: the permit is used up"
    assert node.tick(50.0).said == []
    node.feed(Pause("by the user", node.now)).feed(Refused("", node.now))
    assert reason(node.state) == "by the user", "a pause of the user's own does not end with it"
    node.feed(Refused("excluded", node.now)).feed(Resume(node.now))
    assert node.state.phase is Phase.PAUSED
    node.feed(Refused("", node.now))
    assert node.find(StartTraining)[0].round == 1


def test_with_overlap_who_is_not_admitted_does_not_train_ahead():
    node = overlapping().leases(a=0).feed(Refused("no", 0.0)).train(0)
    assert not node.find(StartTraining)
    assert node.feed(Refused("", node.now)).find(StartTraining) == [StartTraining(Round(1), 0, 2, 0)]


def test_a_guest_rests_and_the_users_own_pause_stays_beside_it():
    node = Node().ready().leases(a=0).feed(Hold("outside its hours", 1.0))
    node.train(0).seen(A, 0).fold()
    assert node.state.phase is Phase.PAUSED
    assert PublishLease("paused", Round(1)) in node.said
    assert reason(node.state) == "outside its hours"
    assert node.tick(50.0).said == []
    node.feed(Pause("by the user", node.now))
    assert reason(node.state) == "by the user", "the user's own word comes first"
    node.feed(Hold("", node.now))
    assert node.state.phase is Phase.PAUSED
    node.feed(Hold("on battery", node.now)).feed(Resume(node.now))
    assert (node.state.phase, reason(node.state)) == (Phase.PAUSED, "on battery")
    assert node.feed(Hold("", node.now)).find(StartTraining)[0].round == 1


def test_with_overlap_a_guest_that_must_rest_does_not_train_ahead():
    node = overlapping().leases(a=0).feed(Hold("hot", 0.0)).train(0)
    assert not node.find(StartTraining)
    assert node.feed(Hold("", node.now)).find(StartTraining) == [StartTraining(Round(1), 0, 2, 0)]


def test_a_guest_that_does_not_train_rests_too():
    node = observing().leases(a=0).ready().feed(Hold("hot", 1.0))
    assert (node.state.phase, reason(node.state)) == (Phase.PAUSED, "hot")
    assert node.feed(Hold("", node.now)).state.phase is Phase.OBSERVE


def test_late_contributions_are_folded_during_a_pause():
    node = Node().ready().feed(Pause("by the user", 1.0)).train(0).fold()
    node.seen(A, 0)
    assert [action.round for action in node.find(FoldRound)] == [0]
    assert [action.round for action in node.fold().find(PublishAck)] == [0]


def test_who_resumes_folds_the_rounds_of_the_others_before_it_trains():
    node = Node().ready().feed(Pause("by the user", 1.0)).train(0).fold().leases(a=4)
    for number in range(4):
        node.seen(A, number)
    node.fold().feed(Resume(node.now))
    node.fold()
    started = [action.round for action in node.log if isinstance(action, StartTraining)]
    assert started == [0, 4]
    assert sorted(node.state.folded) == [0, 1, 2, 3]


def test_behind_stops_everything_until_ready():
    node = Node().ready().train(0).fold().feed(Behind("fetching the model of round 5", node_now := 11.0))
    assert node.find(PublishLease) == [PublishLease("syncing", Round(1))]
    assert reason(node.state) == "fetching the model of round 5"
    assert node.tick(node_now + LEASE_S).said == []
    node.ready(5)
    assert node.find(StartTraining)[0].round == 6


def test_open_rounds_are_bounded_and_the_node_says_why_it_waits():
    node = Node(open_rounds=OpenRounds(3, 3)).ready()
    for number in range(3):
        node.train(number).fold()
    assert node.state.phase is Phase.FULL
    assert reason(node.state).startswith("waiting for finality: 3 rounds are open")
    assert PublishLease("paused", Round(3)) in node.log
    node.feed(RoundFinal(Round(0), node.now))
    assert node.find(StartTraining)[0].round == 3


@pytest.mark.parametrize("is_final_before", [False, True])
@pytest.mark.parametrize("overlap_steps", [0, 4])
def test_no_third_round_is_trained_while_the_work_of_two_waits_for_the_disk(overlap_steps, is_final_before):
    """The others decide these rounds without it; each would stay in memory until the disk has room."""
    node = Node(rounds=200, overlap_steps=overlap_steps).ready().only_trained(0)
    node.seen(A, 0).feed(RoundFinal(Round(0), node.now)).seen(A, 1)
    for is_final in (True, False) if is_final_before else (False, True):
        _ = node.feed(RoundFinal(Round(1), node.now)) if is_final else node.only_trained(1)
    assert (node.state.saving, node.state.phase) == ({0, 1}, Phase.FULL)
    assert reason(node.state) == "waiting for the disk: rounds 0 and 1 are trained, and not saved yet"
    assert not node.tick(1000.0).find(StartTraining)
    node.kept(0)
    assert node.find(StartTraining)[0].round == 2


def test_the_end_waits_for_finality_and_finishes_once():
    node = Node(rounds=1).ready().train(0).fold()
    assert node.state.phase is Phase.DONE
    assert PublishLease("done", Round(1)) in node.log
    node.seen(A, 0)
    assert [action.round for action in node.find(FoldRound)] == [0]
    node.fold().feed(RoundFinal(Round(0), node.now))
    assert node.find(Finish) == [Finish()]
    assert not node.tick(1.0).find(Finish)


def test_who_comes_when_all_is_final_finishes_at_once():
    assert Node(rounds=4).ready(3).find(Finish) == [Finish()]


def test_a_slow_node_goes_to_the_end_when_the_others_are_done():
    node = Node(rounds=4).leases(a=("done", 4))
    for number in range(4):
        node.seen(A, number)
    node.ready().fold()
    assert node.state.phase is Phase.DONE


def test_foreign_rounds_beyond_the_run_are_ignored():
    assert Node(rounds=4).ready().seen(A, 4, held=False).said == []


def test_payloads_beyond_the_open_window_are_not_fetched():
    node = Node(rounds=200, open_rounds=OpenRounds(3, 3)).ready()
    assert not node.seen(A, 100, held=False).find(FetchPayload)


def test_rounds_stay_open_while_there_is_room_for_their_payloads():
    node = Node(rounds=200, open_rounds=OpenRounds(least=2, most=5, payloads=4)).ready()
    for number in range(5):
        assert node.state.phase is Phase.TRAIN
        node.train(number).fold()
    assert (node.state.phase, reason(node.state)) == (Phase.FULL, "waiting for finality: 5 rounds are open")
    node.feed(RoundFinal(Round(0), node.now))
    assert node.find(StartTraining)[0].round == 5


def test_many_payloads_leave_room_for_the_least_open_rounds():
    node = Node(rounds=200, open_rounds=OpenRounds(least=2, most=5, payloads=4)).ready()
    for number in range(2):
        node.seen(A, number).seen(B, number).train(number).fold()
    assert node.state.phase is Phase.FULL
    text = "waiting for finality: 2 rounds are open, and their payloads take what open_rounds_bytes allows"
    assert reason(node.state) == text
    node.feed(RoundFinal(Round(0), node.now))
    assert node.find(StartTraining)[0].round == 2


def test_a_setting_is_named_only_where_it_helps():
    node = Node(rounds=200, open_rounds=OpenRounds(least=2, most=5, payloads=4)).ready()
    for number in range(2):
        node.seen(A, number).seen(B, number).train(number).fold()
    assert "open_rounds_bytes" in reason(node.state)
    most = dataclasses.replace(node.state.config, open_rounds=OpenRounds(least=2, most=5))
    text = "waiting for finality: 2 rounds are open, with as many contributions as a node remembers"
    assert reason(replace(node.state, config=most)) == text


def test_payloads_are_fetched_while_there_is_room_and_else_when_rounds_became_final():
    node = Node(rounds=200, open_rounds=OpenRounds(least=2, most=5, payloads=2)).ready()
    assert node.seen(A, 4, held=False).find(FetchPayload)
    assert not node.seen(A, 5, held=False).find(FetchPayload), "beyond the most rounds that may be open"
    assert node.seen(B, 3, held=False).find(FetchPayload)
    assert not node.seen(B, 4, held=False).find(FetchPayload), "there is no room"
    assert node.seen(B, 0, held=False).find(FetchPayload), "within the least rounds there always is"
    assert [done.entry for done in node.feed(RoundFinal(Round(0), node.now)).find(FetchPayload)] == []
    node.feed(RoundFinal(Round(2), node.now))
    wanted = [entry_of(A, 4), entry_of(B, 4)]
    assert sorted(done.entry for done in node.find(FetchPayload)) == sorted(wanted)


@pytest.mark.parametrize("gone", [AuthorPruned(A, 1.0), AuthorExcluded(A, Round(0), 1.0)])
def test_payloads_are_fetched_once_authors_that_took_their_room_are_gone(gone):
    """In a long cut, while no round becomes final."""
    node = Node(rounds=200, open_rounds=OpenRounds(least=2, most=5, payloads=2)).ready()
    assert not node.seen(A, 3, held=False).seen(A, 4, held=False).seen(B, 4, held=False).find(FetchPayload)
    assert node.feed(gone).find(FetchPayload) == [FetchPayload(entry_of(B, 4))]
    assert not node.feed(RoundFinal(Round(0), node.now)).find(FetchPayload), "it was asked for"


def test_payloads_of_open_rounds_are_fetched_once_however_many_become_final():
    node = Node(rounds=300).ready()
    for number in range(200):
        node.seen(A, number, held=False)
    for number in range(100):
        node.feed(RoundFinal(Round(number), node.now))
    wanted = [entry_of(A, number) for number in range(200)]
    assert [done.entry for done in node.log if isinstance(done, FetchPayload)] == wanted
    node.ready(99)
    assert [done.entry for done in node.find(FetchPayload)] == wanted[100:], "a new worker has verified none"


def test_saved_work_is_not_trained_again_while_its_entry_is_on_the_way():
    node = Node().ready(-1, pending_of(0))
    assert node.state.phase is Phase.COLLECT
    assert not node.find(StartTraining)
    node.seen(ME, 0).fold()
    assert node.find(StartTraining)[0].round == 1


def test_work_that_ends_after_the_node_fell_behind_is_announced_late():
    node = Node().ready().train(0).fold()
    node.feed(Behind("fetching the model of round 5", node.now))
    node.trained(1)
    assert node.said == [Announce(pending_of(1))]
    assert node.state.phase is Phase.CATCH_UP
    node.ready(0)
    assert (node.state.phase, node.state.round) == (Phase.COLLECT, 1), "it is not trained again"


# --- overlap: the next round is trained while this one is collected -----------------------------------


def overlapping(steps: int = STEPS, **more) -> Node:
    return Node(overlap_steps=steps, **more).ready()


def started(node: Node) -> list[tuple[int, int]]:
    """(round, after) of every StartTraining so far."""
    return [(action.round, action.after) for action in node.log if isinstance(action, StartTraining)]


def test_the_next_round_begins_while_ours_is_saved_and_is_folded_into_later():
    node = overlapping().leases(a=0).only_trained(0)
    assert node.said == [StartTraining(Round(1), 0, 2, 0), PublishLease("training", Round(1))]
    assert node.kept(0).said == [Announce(pending_of(0))], "not before the disk has it"
    node.seen(ME, 0).seen(A, 0)
    assert [(f.round, len(f.members)) for f in node.find(FoldRound)] == [(0, 2)]
    assert (node.state.phase, node.state.round) == (Phase.TRAIN, 1)
    node.fold()
    assert [action.round for action in node.find(PublishAck)] == [0]
    node.train(1)
    assert started(node) == [(0, -1), (1, 0), (2, 1)]


def test_one_round_at_most_is_in_flight():
    node = overlapping(quorum_256=256).leases(a=0).train(0).train(1)
    assert node.state.phase is Phase.COLLECT
    assert reason(node.state).startswith("round 0: waiting for 1 of 2: …peer-a (training round 0")
    assert PublishLease("training", Round(1)) in node.log, "the lease does not go back"
    node.seen(A, 0)
    assert started(node) == [(0, -1), (1, 0)]
    assert reason(node.state) == "round 0: folding contributions"
    node.fold()
    assert started(node) == [(0, -1), (1, 0), (2, 1)]


def test_a_round_that_is_closed_waits_for_nobody_before_its_fold_begins():
    """A real node said "waiting for 0 of 3: ; goes on in 1 s at the latest"."""
    node = overlapping(quorum_256=256).leases(a=0).train(0).train(1)
    for others_work in ({}, {A: 0}):
        for peer, number in others_work.items():
            node.seen(peer, number)
        unbegun = replace(node.state, closed=node.state.collecting, folding={})
        assert reason(unbegun) == "round 0: folding contributions"


def test_the_grace_begins_when_waiting_costs_time():
    """Five of ten steps may be ahead: then the worker waits for the fold, and from then on the grace runs."""
    node = overlapping(5, quorum_256=128).leases(a=0, b=0).train(0).seen(A, 0)
    assert reason(node.state) == ""
    node.tick(TRAIN_S / 2 + TRAIN_S / 2 - 0.1)
    assert not node.find(FoldRound)
    assert reason(node.state).startswith("round 0: waiting for 1 of 3: …peer-b")
    assert node.tick(0.1).find(FoldRound)


def test_the_grace_follows_what_the_link_was_seen_to_need():
    """Bounds of two and eight of ten steps: it begins with eight; with three after lags of two."""
    node = overlapping(2, overlap_most=8, quorum_256=128, rounds=20).leases(a=0, b=0)
    assert node.state.ahead.chosen == 8
    for number in range(8):
        node.now += TRAIN_S
        lag = 2.0 if number else None
        node.feed(TrainingDone(Round(number), pending_of(number), TRAIN_S, node.now, lag))
        node.kept(number).seen(ME, number).seen(A, number).seen(B, number)
        node.leases(a=number + 1, b=number + 1).fold()
    assert node.state.ahead.chosen == 3
    node.train(8).leases(a=9, b=8).seen(A, 8)
    node.tick(0.3 * TRAIN_S + TRAIN_S / 2 - 0.1)
    assert not [fold for fold in node.find(FoldRound) if fold.round == 8]
    assert [fold.round for fold in node.tick(0.1).find(FoldRound)] == [8]


def test_the_grace_of_a_long_overlap_begins_when_the_next_round_is_trained():
    node = overlapping(10 * STEPS, quorum_256=128).leases(a=0, b=0).train(0).seen(A, 0).train(1)
    node.tick(TRAIN_S / 2 - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.1).find(FoldRound)


def test_the_last_round_waits_for_members_that_are_a_round_behind():
    node = overlapping(rounds=1, quorum_256=128).leases(a=0, b=0).train(0).seen(A, 0)
    node.tick(TRAIN_S + TRAIN_S / 2 - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.1).find(FoldRound)


def test_a_stuck_member_stalls_an_overlapped_round_no_longer_than_another():
    node = overlapping(quorum_256=256).leases(a=0).train(0).train(1)
    node.tick((STALL_ROUNDS - 1) * TRAIN_S + LEASE_S - 0.1)
    assert not node.find(FoldRound)
    assert node.tick(0.1).find(FoldRound)


def test_late_contributions_are_folded_while_training():
    node = overlapping().train(0).fold()
    assert (node.state.phase, node.state.round, node.state.collecting) == (Phase.TRAIN, 1, -1)
    node.seen(A, 0)
    assert [action.round for action in node.find(FoldRound)] == [0]
    assert [action.round for action in node.fold().find(PublishAck)] == [0]


def test_no_round_begins_while_an_older_one_is_being_folded():
    node = overlapping().train(0).fold().seen(A, 0)
    assert node.state.folding
    node.trained(1).seen(ME, 1)
    assert started(node)[-1] == (1, 0)
    node.fold()
    assert started(node)[-1][0] == 2


def test_a_pause_and_the_end_close_the_round_in_flight_and_the_one_at_hand():
    for node in (overlapping().leases(a=0), overlapping(rounds=2).leases(a=0)):
        node.train(0)
        if node.state.config.rounds > 2:
            node.feed(Pause("by the user", node.now))
        node.train(1).seen(A, 0).seen(A, 1).fold()
        assert started(node) == [(0, -1), (1, 0)]
        assert node.state.phase in (Phase.PAUSED, Phase.DONE)
        assert sorted(node.state.acked) == [0, 1]


def test_of_a_refused_round_the_one_in_flight_is_collected_and_folded():
    node = overlapping().leases(a=0).train(0)
    assert started(node) == [(0, -1), (1, 0)]
    node.feed(TrainingRefused(Round(1), "ε would be 9", node.now))
    assert (node.state.phase, node.state.collecting) == (Phase.COLLECT, 0)
    node.seen(A, 0).fold()
    assert node.state.phase is Phase.PAUSED
    assert sorted(node.state.acked) == [0]
    assert started(node) == [(0, -1), (1, 0)]


def test_who_resumes_before_its_round_closed_trains_on_at_once():
    node = overlapping().leases(a=0).feed(Pause("by the user", 0.0)).train(0)
    assert node.state.phase is Phase.COLLECT
    assert node.feed(Resume(node.now)).find(StartTraining) == [StartTraining(Round(1), 0, 2, 0)]


def test_a_pause_of_a_length_of_time_ends_by_itself():
    node = Node().ready().feed(Pause("games", 1.0, for_s=499.0)).train(0).fold()
    assert node.state.phase is Phase.PAUSED
    node.tick(500.0 - node.now - 0.1)
    assert (node.state.phase, node.state.resting) == (Phase.PAUSED, "games")
    assert node.tick(0.2).find(StartTraining)[-1].round == 1
    assert (node.state.resting, node.state.rest_until) == ("", None)


def test_the_newest_pause_says_how_long():
    node = Node().ready().feed(Pause("games", 1.0, for_s=500.0)).feed(Pause("dinner", 1.0)).train(0).fold()
    node.tick(1000.0)
    assert node.state.resting == "dinner"
    node.feed(Pause("games", node.now, for_s=10.0)).feed(Resume(node.now))
    assert node.state.rest_until is None


def test_open_rounds_are_bounded_with_overlap_too():
    node = overlapping(open_rounds=OpenRounds(2, 2)).train(0).fold().train(1).fold()
    assert node.state.phase is Phase.FULL
    node.feed(RoundFinal(Round(0), node.now))
    assert node.find(StartTraining)[0].round == 2


def test_the_contribution_of_a_member_that_just_went_on_is_waited_for():
    """Of B, which leaped, and C, which was not seen before, nothing may be on the way."""
    node = overlapping().leases(a=0, b=0).leases(a=1, b=3, c=1).train(0)
    assert reason(node.tick(TRAIN_S).state).startswith("round 0: waiting for 1 of 2: …peer-a")
    assert node.seen(A, 0).find(FoldRound)


def test_nothing_is_on_the_way_of_a_member_that_was_killed_in_the_round_that_it_left():
    """It is back before the others close the round, and goes where they are: its lease announces no speed."""
    node = overlapping().leases(a=0, b=0).leases(a=1, b=1, speed=0.0).train(0)
    assert node.find(FoldRound), "the round closed"


def test_a_slow_node_skips_no_round_that_the_others_still_collect():
    """The others are a round ahead and wait; a moment after our contribution they are two ahead."""
    node = overlapping().leases(a=0, b=0).leases(a=1, b=1).seen(A, 0).seen(B, 0).seen(A, 1).seen(B, 1)
    node.train(0).leases(a=2, b=2).fold()
    assert started(node) == [(0, -1), (1, 0)]


def test_who_came_late_goes_where_the_others_are():
    node = overlapping()
    for number in range(3):
        node.seen(A, number).seen(B, number)
    node.leases(a=3, b=3).train(0)
    assert node.state.phase is Phase.FOLD
    node.fold()
    assert started(node) == [(0, -1), (3, -1)]


def test_a_round_in_flight_that_becomes_final_is_not_waited_for():
    node = overlapping(quorum_256=256).leases(a=0).train(0).feed(RoundFinal(Round(0), TRAIN_S))
    assert node.state.collecting == -1
    assert started(node.train(1))[-1] == (2, 1)
    node = overlapping(quorum_256=256).leases(a=0).train(0).train(1).feed(RoundFinal(Round(0), 2 * TRAIN_S))
    assert started(node)[-1] == (2, 1)
    node = overlapping(quorum_256=256).leases(a=0).train(0).train(1).feed(RoundFinal(Round(1), 2 * TRAIN_S))
    assert started(node)[-1] == (2, -1)


def test_after_a_restart_the_older_of_two_open_rounds_is_collected_first():
    node = Node(overlap_steps=STEPS, quorum_256=256).seen(ME, 0).seen(ME, 1).leases(a=1).seen(A, 0)
    node.ready()
    assert [action.round for action in node.find(FoldRound)] == [0]
    node.fold()
    assert started(node) == [(2, 1)]


def test_a_worker_that_dies_with_a_round_in_flight_begins_without_one():
    node = overlapping().leases(a=0).train(0).seen(A, 0).fold()
    node.feed(Behind("the worker died", node.now)).ready()
    assert [action.round for action in node.find(FoldRound)] == [0]
    assert node.fold().find(StartTraining) == [StartTraining(Round(1), 0, 2, -1)]


def test_a_fresh_worker_folds_what_is_closed_before_it_trains_over_the_newest_round():
    node = overlapping(quorum_256=256).leases(a=1).seen(A, 0).train(0).fold().train(1)
    assert (node.state.collecting, node.state.closed, node.state.round) == (1, 0, 2)
    node.feed(Behind("the worker died", node.now)).ready()
    assert [action.round for action in node.find(FoldRound)] == [0]
    assert not node.find(StartTraining)
    assert node.fold().find(StartTraining) == [StartTraining(Round(2), 0, 2, 1)]


def test_work_whose_announcement_is_refused_is_announced_again_and_with_the_next():
    node = overlapping(quorum_256=256).leases(a=0).trained(0).seen(A, 0).tick(ANNOUNCE_AGAIN_S)
    assert node.find(Announce) == [Announce(pending_of(0))]
    node.trained(1)
    assert node.find(Announce) == [Announce(pending_of(0)), Announce(pending_of(1))]
    assert started(node) == [(0, -1), (1, 0)], "the older one is not collected yet"


def test_a_first_round_that_is_held_says_so_by_the_steps_that_its_worker_took():
    """A node that came back said "step 1/1" for a minute, while its round before waited: it knew no pace yet."""
    state = replace(overlapping(quorum_256=256).leases(a=0).trained(0).state, step_s=0.0)
    assert (state.phase, state.collecting) == (Phase.TRAIN, 0)

    def told(step: int, steps: int = 2 * STEPS, number: int = 1) -> str:
        return reason(state, TrainProgress(Round(number), step, steps, 2.0, 1.0))

    assert told(STEPS).startswith("round 0: waiting for 2 of 2: …me ")
    assert told(1, 1), "all steps of a short round"
    assert not told(STEPS - 1)
    assert not told(STEPS, number=0), "of the round before"
    assert not reason(state)


def test_announcements_of_two_rounds_that_are_refused_are_both_offered_again():
    restarted = Node(overlap_steps=STEPS).ready(-1, pending_of(0), pending_of(1))
    refused = overlapping(quorum_256=256).leases(a=0).trained(0).seen(A, 0).tick(ANNOUNCE_AGAIN_S).trained(1)
    for node in (restarted, refused):
        both = [Announce(pending_of(0)), Announce(pending_of(1))]
        assert node.find(Announce) == both
        assert node.tick(ANNOUNCE_AGAIN_S).find(Announce) == both
        assert node.seen(ME, 1).tick(ANNOUNCE_AGAIN_S).find(Announce) == [Announce(pending_of(0))]
        node.feed(RoundFinal(Round(0), node.now)).tick(ANNOUNCE_AGAIN_S)
        assert node.find(Discard) == [Discard(pending_of(0))]
        assert not node.tick(ANNOUNCE_AGAIN_S).said


def test_without_overlap_nothing_is_trained_while_work_is_saved():
    node = Node().ready().leases(a=0).seen(A, 0).only_trained(0)
    assert not node.said
    assert (node.state.phase, node.state.collecting) == (Phase.COLLECT, 0)
    assert node.kept(0).said == [Announce(pending_of(0))]


def test_work_that_was_not_safe_when_the_worker_died_is_trained_again():
    node = overlapping().leases(a=0).only_trained(0)
    node.feed(Behind("the worker died", node.now)).ready()
    assert started(node) == [(0, -1), (1, 0), (0, -1)]
    assert not node.trained(0).find(StartTraining)[1:]
    assert node.find(Announce) == [Announce(pending_of(0))]


def test_closed_rounds_are_folded_again_without_an_excluded_author():
    node = Node().ready().leases(a=0, b=0).train(0).seen(A, 0).seen(B, 0).fold()
    assert node.state.round == 1
    node.train(1).seen(A, 1).feed(AuthorExcluded(A, Round(0), node.now))
    node.leases(b=1).seen(B, 1)
    folds = {action.round: action.members for action in node.log if isinstance(action, FoldRound)}
    assert folds == {at: tuple(sorted((entry_of(ME, at), entry_of(B, at)))) for at in (0, 1)}


def test_the_work_of_an_excluded_author_is_not_fetched_and_counts_before_its_round():
    node = Node().ready().leases(b=0).feed(AuthorExcluded(A, Round(2), 0.0))
    node.feed(AuthorExcluded(A, Round(1), 0.0)).feed(AuthorExcluded(A, Round(3), 0.0))
    assert node.seen(A, 1, held=False).find(FetchPayload) == []
    assert node.seen(A, 0, held=False).find(FetchPayload) == [FetchPayload(entry_of(A, 0))]
    late = Node().seen(A, 3, held=False).feed(AuthorExcluded(A, Round(1), 0.0)).ready()
    assert not any(isinstance(action, FetchPayload) for action in late.log)


def test_own_sets_leave_out_work_of_another_chain_and_wait_for_none_of_its_authors():
    node = Node().ready().leases(a=0, b=0).feed(WorkApart(frozenset([entry_of(A, 0), entry_of(A, 1)]), 0.0))
    node.train(0).seen(A, 0).seen(B, 0)
    assert own_set(node.state, 0) == tuple(sorted((entry_of(ME, 0), entry_of(B, 0))))
    assert node.find(FoldRound)[-1].members == own_set(node.state, 0), "it closes without that of A"
    node.fold().train(1).seen(A, 1)
    assert own_set(node.state, 1) == (entry_of(ME, 1),)


def test_closed_rounds_are_folded_again_without_work_that_turns_out_to_be_of_another_chain():
    node = Node().ready().leases(a=0, b=0).train(0).seen(A, 0).seen(B, 0).fold()
    whole = own_set(node.state, 0)
    node.train(1).seen(A, 1).feed(WorkApart(frozenset(entry_of(A, at) for at in (0, 1)), node.now))
    node.leases(b=1).seen(B, 1)
    folds = {action.round: action.members for action in node.log if isinstance(action, FoldRound)}
    assert folds == {at: tuple(sorted((entry_of(ME, at), entry_of(B, at)))) for at in (0, 1)}
    node.feed(WorkApart(frozenset(), node.now))
    assert own_set(node.state, 0) == whole


def test_a_round_with_work_of_another_chain_alone_keeps_it():
    node = Node().ready(-1).seen(A, 0).leases(a=5, b=5).feed(WorkApart(frozenset([entry_of(A, 0)]), 0.0))
    assert own_set(node.state, 0) == (entry_of(A, 0),)


def test_a_round_in_which_only_the_excluded_worked_keeps_its_work():
    node = Node().ready(-1).seen(A, 0).seen(A, 1).leases(a=5, b=5).seen(B, 1)
    node.feed(AuthorExcluded(A, Round(0), node.now))
    names = {at: counted_book(node.state, at).held for at in (0, 1)}
    assert names == {0: {entry_of(A, 0)}, 1: {entry_of(B, 1)}}


def observing(**more) -> Node:
    return Node(observes="validates", **more)


def test_a_node_that_does_not_train_rests_and_goes_where_the_others_are():
    node = observing().leases(a=0, b=0).ready()
    assert node.state.phase is Phase.OBSERVE
    assert PublishLease("observing", Round(0)) in node.log
    assert reason(node.state) == "validates"
    for number in range(3):
        node.leases(a=number + 1, b=number + 1).seen(A, number).seen(B, number)
        node.feed(RoundFinal(Round(number), node.now)).tick(1.0)
        assert (node.state.phase, node.state.round) == (Phase.OBSERVE, number + 1)
    for kind in (StartTraining, FoldRound, PublishAck):
        assert not [action for action in node.log if isinstance(action, kind)], (
            "its view is Θ_final, and it says nothing"
        )


def test_a_node_that_does_not_train_never_says_that_it_is_done():
    node = observing(rounds=2).leases(a=("done", 2)).ready()
    node.seen(A, 0).seen(A, 1)
    assert node.state.phase is Phase.DONE
    for number in (0, 1):
        node.feed(RoundFinal(Round(number), node.now))
    assert node.state.phase is Phase.FINISHED
    assert Finish() in node.log
    assert {action.activity for action in node.log if isinstance(action, PublishLease)} == {"observing"}


def test_a_node_that_does_not_train_can_be_paused():
    node = observing().leases(a=0).ready().feed(Pause("by the user", 1.0))
    assert node.state.phase is Phase.PAUSED
    assert reason(node.state) == "by the user"
    node.feed(Resume(node.now))
    assert node.state.phase is Phase.OBSERVE


def test_work_of_before_counts_when_a_trainer_comes_back_without_training():
    node = observing().leases(a=0).ready(-1, pending_of(0))
    assert Announce(pending_of(0)) in node.log
    node.seen(ME, 0).seen(A, 0)
    node.fold()
    assert [action.round for action in node.log if isinstance(action, PublishAck)] == [0]
    assert node.state.phase is Phase.OBSERVE


def test_a_node_without_a_worker_fetches_nothing_and_waits_for_none():
    node = observing(has_worker=False).leases(a=0).seen(A, 0, held=False)
    assert node.state.phase is Phase.OBSERVE
    node.feed(Behind("solving the puzzle", node.now))
    assert node.state.phase is Phase.CATCH_UP
    node.feed(Behind("", node.now))
    assert node.state.phase is Phase.OBSERVE
    node.feed(RoundFinal(Round(0), node.now)).tick(1.0)
    assert node.state.round == 1
    assert not [action for action in node.log if isinstance(action, FetchPayload)]
