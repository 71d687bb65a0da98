"""What a member that lies costs two or three, and that a slow one stays in: machines on a virtual clock.

No round has a quorum without all, so each member can hold up the others. The world is small: entries, leases
and payloads that were not withheld are everywhere at once, folds take no time, and rounds become final late.
"""

from collections.abc import Callable
from itertools import pairwise
from math import log2

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import absence
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.queries import AGAIN_ROUNDS, attendance, closes_at, idle_at, reason, stalls_until
from atoll.node.daemon.rounds.state import FREE_STALLS, LOST_LEAST_S, STALL_ROUNDS, Absence, Phase, RoundConfig
from atoll.node.daemon.rounds.types import (
    Announce,
    ContributionSeen,
    FoldDone,
    FoldRound,
    LeasesChanged,
    PayloadHeld,
    PublishLease,
    RoundFinal,
    RoundTick,
    StartTraining,
    TrainingDone,
    TrainingSaved,
    WorkApart,
    WorkerReady,
)
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.local.worker_messages import Pending
from tests.node.daemon.rounds.test_round import LEASE_S, ME, TRAIN_S, A, B, Node, entry_of

T_S, LEASE, TICK_S = 2.0, 20.0, 0.25
STALL_S = STALL_ROUNDS * T_S + LEASE
FINAL_AFTER = 24
"""So many rounds later one is final."""


class Member:
    """An honest member: its machine, and a worker that needs so long for a round."""

    def __init__(self, world: "World", peer: PeerId, train_s: float) -> None:
        self.world, self.peer, self.train_s = world, peer, train_s
        self.began: dict[int, float] = {}
        self.in_time: dict[PeerId, list[int]] = {}
        self.boot()

    def boot(self) -> None:
        config = RoundConfig(self.peer, 1000, 171, 128, LEASE, len(self.world.peers))
        self.state, self.work = round_machine.begin(config), None
        self.views: dict[PeerId, MemberView] = {}
        self.known: set[Digest] = set()
        self.held: set[Digest] = set()
        self.feed(WorkerReady(self.world.final, (), self.world.now))

    def feed(self, event: object) -> None:
        closed, at = self.state.closed, self.state.collecting
        self.state, actions = round_machine.step(self.state, event)
        if self.state.closed > closed and self.state.closed == at:
            for peer in self.state.books[at].there if at in self.state.books else ():
                self.in_time.setdefault(peer, []).append(at)
        now = self.world.now
        for action in actions:
            match action:
                case StartTraining(number):
                    self.began[number] = now
                    self.work = (number, now + self.train_s)
                case Announce(pending):
                    self.world.announce(self.peer, pending.round)
                    self.world.release(self.peer, pending.round)
                case FoldRound(number, names):
                    self.feed(FoldDone(number, digest(*names), now))
                case PublishLease():
                    # A fold within this event may have led on.
                    self.world.leases[self.peer] = self.state.leased

    def step(self) -> None:
        world, now = self.world, self.world.now
        if world.final > self.state.final:
            self.feed(RoundFinal(Round(world.final), now))
        views = world.views_of(self.peer)
        if {peer: replace(view, heard=0.0) for peer, view in views.items()} != self.views:
            self.views = {peer: replace(view, heard=0.0) for peer, view in views.items()}
            self.feed(LeasesChanged(views, now))
        for (author, number), entry in [*world.entries.items()]:
            if entry not in self.known and number > self.state.final:
                self.known.add(entry)
                body = Contribution(Round(number), digest(b"base"), digest(entry), 1, 1, 64, 1.0)
                self.feed(ContributionSeen(entry, author, body, False, now))
            if entry in world.released and entry not in self.held:
                self.held.add(entry)
                self.feed(PayloadHeld(entry, Round(number), now))
        if self.work and now >= self.work[1]:
            (number, _), self.work = self.work, None
            pending = Pending(Round(number), digest(b"base"), digest(b"payload"), "", 1, 1, 64, 1.0)
            self.feed(TrainingDone(Round(number), pending, self.train_s, now))
            self.feed(TrainingSaved(pending, now))
        self.feed(RoundTick(now))


class World:
    def __init__(self, honest: dict[PeerId, float], *others: PeerId) -> None:
        self.now, self.final = 0.0, -1
        self.peers = [*honest, *others]
        self.leases: dict[PeerId, tuple[str, int]] = {}
        self.lost: dict[PeerId, float] = {}
        self.entries: dict[tuple[PeerId, int], Digest] = {}
        self.released: set[Digest] = set()
        self.up: dict[PeerId, Member] = {}
        self.leases |= dict.fromkeys(others, ("training", 0))
        for peer, train_s in honest.items():
            self.up[peer] = Member(self, peer, train_s)

    def announce(self, peer: PeerId, number: int) -> None:
        self.entries.setdefault((peer, number), entry_of(peer, number))

    def views_of(self, me: PeerId) -> dict[PeerId, MemberView]:
        """The leases that a member reads."""
        return {
            peer: MemberView(*self.leases[peer], self.now, 1.0, self.lost.get(peer))
            for peer in self.peers
            if peer != me and peer in self.leases
        }

    def release(self, peer: PeerId, number: int) -> None:
        if (peer, number) in self.entries:
            self.released.add(self.entries[peer, number])

    def run(self, rounds: int, liar: "Callable[[World, Member], None] | None" = None) -> Member:
        """Until the first member begins this round. What it waited in each round is what the lie cost."""
        first = next(iter(self.up.values()))
        while max(first.began, default=-1) < rounds:
            assert self.now < 40.0 * T_S * rounds, "it stands"
            self.now += TICK_S
            if liar:
                liar(self, first)
            for member in self.up.values():
                member.step()
            self.final = max(self.final, first.state.closed - FINAL_AFTER)
            self.entries = {key: entry for key, entry in self.entries.items() if key[1] > self.final}
        return first


def waits_of(member: Member, since: int = 0) -> list[float]:
    """What each round took beyond the member's own training."""
    began = [member.began[number] for number in sorted(member.began) if number >= since]
    return [after - before - member.train_s for before, after in pairwise(began)]


def stalls_of(waits: list[float]) -> list[int]:
    """The rounds that waited longer than for one that is absent."""
    return [number for number, wait in enumerate(waits) if wait > absence.STALLED * T_S + 2 * TICK_S]


def at_the_same(world: World, first: Member) -> int:
    """The liar says that it trains the others' round, and announces work on it."""
    number = max(0, first.state.round)
    world.leases[A] = ("training", number)
    world.lost.pop(A, None)
    world.announce(A, number)
    return number


def nears_the_bound(world: World, first: Member) -> bool:
    state = first.state
    return state.phase is Phase.COLLECT and world.now > stalls_until(state) - 4 * TICK_S


def withholds(world: World, first: Member) -> None:
    at_the_same(world, first)


def pauses(world: World, first: Member) -> None:
    """It says that it trains, announces nothing, and is paused just before the round would close without it."""
    world.leases[A] = ("paused" if nears_the_bound(world, first) else "training", first.state.round)


def expires(world: World, first: Member) -> None:
    at_the_same(world, first)
    if nears_the_bound(world, first):
        del world.leases[A]


def cuts(world: World, first: Member) -> None:
    """It cuts its connection at the last moment, so that the round waits for one round time more."""
    at_the_same(world, first)
    if nears_the_bound(world, first) or A in first.world.lost:
        world.lost[A] = world.now


def delivers_old(world: World, first: Member) -> None:
    """Payloads of rounds that nobody waits for any more."""
    number = at_the_same(world, first)
    world.release(A, number - FINAL_AFTER // 2)


def drips(world: World, first: Member) -> None:
    """While it is absent it delivers, a little late; once it is waited for again it withholds."""
    number = at_the_same(world, first)
    if A in first.state.absent:
        world.release(A, number - 1)


def drips_in_time(world: World, first: Member) -> None:
    number = at_the_same(world, first)
    if A in first.state.absent:
        world.release(A, number)


@pytest.mark.parametrize("honest", [{ME: T_S}, {ME: T_S, B: T_S}])
@pytest.mark.parametrize("liar", [withholds, pauses, expires, cuts, delivers_old])
def test_who_never_delivers_in_time_holds_up_fewer_and_fewer_rounds(honest, liar):
    """One may be slow, and never have shown that it works: so it is waited for again, after ever more rounds."""
    waits = waits_of(World(honest, A).run(40, liar))
    stalls = stalls_of(waits)
    assert len(stalls) == 3
    assert [after - before for before, after in pairwise(stalls)] >= [2 * AGAIN_ROUNDS, 4 * AGAIN_ROUNDS]
    assert max(waits) <= STALL_S + T_S + 2 * TICK_S


def test_keys_that_worked_once_hold_up_few_rounds_together():
    """Any stranger can deliver legal noise once, withhold in the next round, and be followed by fresh keys."""
    keys = [PeerId(f"key{number:03}") for number in range(168)]
    world = World({ME: T_S, B: T_S, PeerId("c"): T_S}, *keys)
    world.final = 0  # the run is under way

    def withhold_once(world: World, first: Member) -> None:
        number = max(1, first.state.round)
        for key in keys:
            world.leases.pop(key, None)
        fresh = keys[4 * number - 4 : 4 * number + 4]
        world.leases |= dict.fromkeys(fresh, ("training", number))
        for key in fresh[4:]:
            world.announce(key, number)
            world.release(key, number)

    waits = waits_of(world.run(40, withhold_once))
    assert max(stalls_of(waits)) < 8, "two are free, and of the first rounds one is a quarter"


@pytest.mark.parametrize("honest", [{ME: T_S}, {ME: T_S, B: T_S}])
@pytest.mark.parametrize("liar", [drips, drips_in_time])
def test_who_delivers_now_and_then_holds_up_fewer_and_fewer_rounds(honest, liar):
    rounds = 120
    waits = waits_of(World(honest, A).run(rounds, liar))
    stalls = stalls_of(waits)
    assert 2 <= len(stalls) <= 2 + log2(rounds)
    gaps = [after - before for before, after in pairwise(stalls)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 16


def drags(world: World, first: Member) -> None:
    """It delivers each payload just before the round would close without it."""
    number, state = at_the_same(world, first), first.state
    awaited, there = attendance(state)
    waits = state.phase is Phase.COLLECT and state.collecting == number and awaited - there
    if waits and world.now + 2 * TICK_S > closes_at(state, awaited - there):
        world.release(A, number)


def drags_when_it_owes_nothing(world: World, first: Member) -> None:
    drags(world, first)
    if A in first.state.owed_s and first.state.phase is Phase.TRAIN:
        world.release(A, first.state.round)


def drags_and_withholds(world: World, first: Member) -> None:
    """In time only while it is waited for no longer than for an absent one."""
    if A in first.state.absent | first.state.owing:
        drips_in_time(world, first)
        world.release(A, first.state.round)
    elif not first.state.owed_s:
        drags(world, first)
    else:
        at_the_same(world, first)


def drags_and_goes(world: World, first: Member) -> None:
    """Between two rounds that it holds up, it is away for two, without a lease."""
    if first.state.round % 3:
        world.leases.pop(A, None)
    else:
        drags(world, first)


@pytest.mark.parametrize("honest", [{ME: T_S}, {ME: T_S, B: T_S}])
@pytest.mark.parametrize("liar", [drags, drags_when_it_owes_nothing, drags_and_withholds, drags_and_goes])
def test_who_delivers_just_before_the_bound_takes_its_share_in_the_mean(honest, liar):
    """It takes all of two rounds once, and of each round no more than one may that is nine times slower."""
    rounds = 60
    waits = waits_of(World(honest, A).run(rounds, liar))
    assert sum(waits) <= 2 * STALL_S + rounds * STALL_ROUNDS * T_S
    assert max(waits) <= STALL_S + T_S + 2 * TICK_S


@pytest.mark.parametrize(("slower", "share"), [(9, 1.0), (10, 0.9), (15, 0.7), (18, 0.6)])
@pytest.mark.parametrize("more", [{}, {B: T_S}])
def test_a_slow_member_is_in_most_rounds_that_it_trains(slower, share, more, monkeypatch):
    """Up to nine times slower in each. Its late work is of no use, and no sign: rounds are final by then."""
    monkeypatch.setitem(globals(), "FINAL_AFTER", 1)
    world = World({ME: T_S, **more, A: slower * T_S})
    first = world.run(60)
    trained = [number for number in world.up[A].began if number < first.state.closed]
    assert len(first.in_time[A]) >= share * len(trained)
    assert first.in_time[A][-1] > 45


@pytest.mark.parametrize("more", [{}, {B: T_S}])
def test_a_member_that_is_five_times_slower_stays_in(more):
    """Also once it was killed, while the others waited for it, and once it came later than they can wait."""
    world = World({ME: T_S, **more, A: 5 * T_S})
    first = world.run(6)
    assert first.in_time[A] == [*range(6)]
    slow = world.up.pop(A)
    world.now += 2 * T_S
    world.lost[A] = world.now
    world.run(9)
    assert A not in first.in_time or first.in_time[A][-1] < 8
    del world.lost[A]
    world.up[A] = slow
    slow.boot()
    world.run(20)
    assert first.in_time[A][-6:] == [*range(14, 20)], "it is waited for again"
    slow.train_s = STALL_S + 4 * T_S
    world.run(22)
    assert A in first.state.absent
    slow.train_s = 5 * T_S
    world.run(40)
    assert first.in_time[A][-10:] == [*range(30, 40)]


def test_each_stall_doubles_the_rounds_of_which_work_must_come():
    assert [absence.needed(Absence(stalls)) for stalls in (0, 1, 2, 3, 6, 7, 8, 40)] == [
        1,
        1,
        2,
        4,
        32,
        64,
        64,
        64,
    ]


def stalled() -> Node:
    node = Node(rounds=20).ready().leases(a=0).train(0)
    return node.tick(STALL_ROUNDS * TRAIN_S + LEASE_S).fold()


def test_a_round_that_closes_by_its_grace_was_not_held_up():
    """Those that were awaited were a quorum, though all that ever were are none."""
    state = Node(rounds=20, quorum_256=128).ready().leases(a=0, b=0).train(0).state
    began = idle_at(state)
    late = replace(state, now=began + 2 * TRAIN_S, awaited=frozenset({A, B}))
    for quorum_at, stalls in [(began, 0), (began + 1.5 * TRAIN_S, 1), (None, 1)]:
        closed = absence.after_close(replace(late, quorum_at=quorum_at), {ME, A})
        assert closed.missed[A].stalls == stalls


def collecting(number: int, node: Node, train_s: float = 1.0) -> Node:
    return node.leases(a=number).seen(A, number, held=False).trained(number, train_s).seen(ME, number)


def delivered(number: int, node: Node) -> Node:
    return node.feed(PayloadHeld(entry_of(A, number), Round(number), node.now)).fold()


def test_one_long_wait_is_forgiven_and_two_in_a_row_are_made_up():
    """One may be a start, or a machine that slept while it waited."""
    once_s = STALL_ROUNDS + LEASE_S
    node = collecting(0, Node(rounds=30).ready())
    node.now += 10 * once_s
    node = delivered(0, node)
    assert node.state.owed_s == {A: LEASE_S}, "no more than one may wait"
    assert node.state.owing == frozenset()
    node = delivered(1, collecting(1, node).tick(once_s - 0.5))
    rounds = 0
    while node.state.owed_s:
        rounds += 1
        assert node.state.owing == {A}, "until it owes nothing"
        node = collecting(1 + rounds, node)
        assert node.tick(0.9).state.phase is Phase.COLLECT
        assert node.tick(0.1).fold().state.closed == 1 + rounds, "as for an absent one"
    assert rounds == 5, "39.5 s, of which each round takes 8 s"
    assert node.state.owing == frozenset()
    node = collecting(2 + rounds, node)
    assert node.tick(2.0).state.phase is Phase.COLLECT


def test_what_comes_before_the_wait_costs_anything_is_not_owed():
    node = Node(rounds=30).ready().leases(a=0).trained(0).seen(ME, 0).seen(A, 0)
    assert node.state.owed_s == {}


def test_a_member_of_short_rounds_has_seconds_for_its_payload():
    """It may come over a relay: rounds shorter than its way are no reason to leave it out."""
    node = Node(rounds=30).ready()
    node = delivered(0, collecting(0, node, 0.01).tick(STALL_ROUNDS * LOST_LEAST_S))
    assert node.state.owed_s == {}


@pytest.mark.parametrize(
    ("is_regular", "stalls", "waits"), [(True, FREE_STALLS, True), (False, FREE_STALLS, False), (False, 1.0, True)]
)
def test_who_comes_in_time_regularly_is_waited_for_in_full_whatever_keys_cost(is_regular, stalls, waits):
    """And one that was away for long is, too: it misses its first round, which is no reason to leave it out."""
    node = delivered(0, collecting(0, Node(rounds=30).ready()))
    assert node.state.attended == {ME: 1, A: 1}
    stalled_s = stalls * STALL_ROUNDS * TRAIN_S + 1.0
    node.state = replace(node.state, stalled_s=stalled_s, attended=node.state.attended if is_regular else {})
    node = collecting(1, node, TRAIN_S)
    assert node.tick(TRAIN_S + 1.0).fold().state.closed == (0 if waits else 1)


def test_work_that_is_late_and_within_the_longer_bound_counts_as_regular():
    node = stalled().leases(a=1).train(1).tick(TRAIN_S).fold()
    assert A not in node.state.attended
    assert node.leases(a=2).seen(A, 1).state.attended[A] == 1


def test_an_absence_lasts_while_the_member_is_away():
    node = stalled().leases().train(1).fold().leases(a=2).train(2)
    assert node.state.absent == {A}
    assert node.tick(TRAIN_S).state.phase is Phase.FOLD


def test_who_was_late_and_no_more_is_forgotten_with_its_lease():
    """As many leases as somebody likes cost no memory."""
    node = Node(quorum_256=128).ready().leases(a=0, b=0).train(0).seen(B, 0).tick(TRAIN_S).fold()
    assert (node.state.absent, [*node.state.missed]) == ({A}, [A])
    node.leases(b=1).train(1).seen(B, 1)
    assert (node.state.absent, node.state.missed) == (frozenset(), {})


def test_few_members_that_held_up_rounds_are_remembered(monkeypatch):
    monkeypatch.setattr(absence, "REMEMBERED", 1)
    node = Node().ready().leases(a=0, b=0).train(0).tick(STALL_ROUNDS * TRAIN_S + LEASE_S)
    assert len(node.state.missed) == len(node.state.absent) == 1


def test_a_payload_of_a_round_that_waits_no_more_ends_no_absence():
    node = stalled().seen(A, 0)
    assert node.state.absent == {A}, "its own stall"
    for number in range(1, 8):
        node.leases(a=number).train(number).tick(TRAIN_S).fold()
    assert node.seen(A, 1).state.absent == {A}, "one would not have waited for so long"
    assert node.seen(A, 4).state.absent == frozenset(), "but for this one"


def test_a_member_that_is_back_from_a_loss_is_waited_for_as_before():
    node = Node().ready().leases(a=0).train(0).lost(A).tick(TRAIN_S).fold()
    assert node.state.absent == frozenset()
    node.leases(a=1).train(1).tick(2 * TRAIN_S)
    assert node.state.phase is Phase.COLLECT


def test_who_is_absent_and_then_cuts_its_connection_gains_no_time():
    node = stalled().leases(a=1).train(1).tick(TRAIN_S - 0.1).lost(A)
    assert node.tick(0.1).state.phase is Phase.FOLD


def test_own_work_that_was_announced_and_is_lost_costs_one_round_time():
    node = Node().ready().leases(a=0).seen(A, 0).trained(0).tick(2 * TRAIN_S)
    assert node.state.phase is Phase.COLLECT, "it is on its way to the feed"
    node.seen(ME, 0, held=False)
    assert node.state.phase is Phase.FOLD
    node = Node().ready().leases(a=0).seen(A, 0).trained(0).seen(ME, 0, held=False).tick(TRAIN_S - 0.1)
    assert node.state.phase is Phase.COLLECT
    assert node.tick(0.1).state.phase is Phase.FOLD
    assert node.state.absent == frozenset()


def test_work_of_another_chain_whose_payload_is_lost_is_not_waited_for():
    node = Node().ready().leases(a=0, b=0).feed(WorkApart(frozenset([entry_of(A, 0)]), 0.0))
    node.seen(A, 0, held=False).seen(B, 0).train(0)
    assert node.state.phase is Phase.FOLD
    assert A not in node.state.absent


@pytest.mark.parametrize(("others", "late"), [("abc", 0.0), ("ab", 0.0), ("a", 6.0)])
def test_an_early_lease_of_one_makes_nobody_late(others, late):
    """Of three members or more one needs most of the others for it; of two each has only the other's word."""
    node = Node(least_256=64).at_work(TRAIN_S, **dict.fromkeys(others, 0)).ready()
    node.at_work(TRAIN_S, **dict.fromkeys(others, 0) | {"a": 1})
    node.trained(0, 6.0).seen(ME, 0)
    for who, name in ((A, "a"), (B, "b"), (PeerId("peer-c"), "c")):
        if name in others:
            node.seen(who, 0)
    node.fold()
    assert (node.state.phase, node.state.round) == (Phase.TRAIN, 1)
    starts = [action.late_s for action in node.log if isinstance(action, StartTraining)]
    assert starts[-1] == pytest.approx(late)


def test_a_start_waits_for_payloads_while_they_come_and_not_for_one_that_is_withheld():
    node = (
        Node().at_work(4.0, a=2, b=2).seen(A, 0, held=False).seen(B, 0, held=False).seen(A, 1, held=False).ready()
    )
    node.tick(7.0).feed(PayloadHeld(entry_of(B, 0), Round(0), node.now))
    node.tick(7.0).feed(PayloadHeld(entry_of(A, 0), Round(0), node.now))
    assert node.state.phase is Phase.CATCH_UP
    assert node.tick(5.0).state.phase is Phase.CATCH_UP
    assert node.tick(1.0).state.phase is not Phase.CATCH_UP, "no longer than a lease"
    node = Node().at_work(1.0, a=2).seen(A, 1, held=False).ready()
    told = "fetching 1 payload of open rounds; goes on without them in 2 s if none comes, in 20 s at the latest"
    assert reason(node.state) == told
    assert node.tick(2.0 - 0.1).state.phase is Phase.CATCH_UP
    assert node.tick(0.1).state.phase is not Phase.CATCH_UP
