"""Members on trial: a slow one gets in, and keys that never work hold up few rounds. Worlds of test_absence.py."""

import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import absence
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.queries import closes_at
from atoll.node.daemon.rounds.state import STALL_ROUNDS, TRIAL_ROUNDS_EACH, Absence, absence_s
from atoll.node.daemon.rounds.trials import TRIAL_ROUNDS, Trials
from atoll.node.daemon.rounds.types import LeasesChanged
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease
from tests.node.daemon.rounds import test_absence
from tests.node.daemon.rounds.test_absence import T_S, TICK_S, Member, World, waits_of
from tests.node.daemon.rounds.test_round import ME, TRAIN_S, A, B, C, Node

LONGEST_S = STALL_ROUNDS * T_S
NEVER_S = 1000.0
"""Pace that a key says: no round would wait for so long."""


class Open(World):
    """An open run: whose payload nobody saw is on trial. Rounds are final before late work comes."""

    def __init__(self, honest: dict[PeerId, float], *others: PeerId, says_s: float = NEVER_S) -> None:
        self.worked, self.says_s = {*honest}, says_s
        super().__init__(honest, *others)
        self.trials = {peer: Trials(lambda peer: peer, random.Random(0)) for peer in self.peers}

    def join(self, peer: PeerId, train_s: float) -> Member:
        self.peers.append(peer)
        self.trials[peer] = Trials(lambda peer: peer)
        self.up[peer] = Member(self, peer, train_s)
        return self.up[peer]

    def release(self, peer: PeerId, number: int) -> None:
        super().release(peer, number)
        self.worked.add(peer)

    def views_of(self, me: PeerId) -> dict[PeerId, MemberView]:
        views = super().views_of(me)
        untried = {peer: view for peer, view in views.items() if peer not in self.worked}
        leases = {
            peer: Lease(view.activity, view.round, view.round, b"", view.round, 0.0, 0.0, 0.0, "")
            for peer, view in untried.items()
        }
        number = max(0, self.up[me].state.round)
        awaited = self.trials[me].choose(leases, len(views) - len(leases), [*leases], number)
        return {
            peer: replace(view, untried=peer in untried, round_s=self.pace_s(peer))
            for peer, view in views.items()
            if peer not in untried or peer in awaited
        }

    def pace_s(self, peer: PeerId) -> float:
        """What its lease says; nothing before its first round is trained."""
        member = self.up.get(peer)
        if member is None:
            return self.says_s
        return member.train_s if member.state.train_s else 0.0


@pytest.fixture(autouse=True)
def final_at_once(monkeypatch):
    monkeypatch.setattr(test_absence, "FINAL_AFTER", 1)


@pytest.mark.parametrize("fast", [{ME: T_S}, {ME: T_S, B: T_S}])
@pytest.mark.parametrize("slower", [5, 8])
def test_a_slow_newcomer_is_in_each_round_after_its_first(fast, slower):
    """Its late work is announced to nobody: all that it can show is work of a round that waited for it."""
    world = Open(fast)
    world.run(5)
    slow = world.join(A, slower * T_S)
    first = world.run(25)
    trained = [number for number in slow.began if number < first.state.closed]
    assert len(trained) > 12
    assert len(first.in_time[A]) >= len(trained) - 2


def works_never(world: World, first: Member) -> None:
    """Each key says that it trains the others' round."""
    for peer in world.peers:
        if peer not in world.up:
            world.leases[peer] = ("training", max(0, first.state.round))


def pauses(world: World, first: Member) -> None:
    """It is paused just before the round would close without it."""
    works_never(world, first)
    state = first.state
    lacking = [peer for peer, view in state.members.items() if view.untried]
    if lacking and state.collecting > state.closed and world.now + 2 * TICK_S > closes_at(state, lacking):
        world.leases |= dict.fromkeys(lacking, ("paused", state.round))


@pytest.mark.parametrize("fast", [{ME: T_S}, {ME: T_S, B: T_S}])
@pytest.mark.parametrize(("keys", "liar"), [(1, works_never), (40, works_never), (40, pauses)])
def test_keys_that_never_work_hold_up_few_rounds(fast, keys, liar):
    """One at most for eight round times, and an eighth of the rounds' time after that."""
    rounds = 120
    world = Open(fast, *[PeerId(f"key{number}") for number in range(keys)])
    world.final = 0
    waits = waits_of(world.run(rounds, liar))
    beyond_s = [wait - T_S - 2 * TICK_S for wait in waits if wait > absence.STALLED * T_S + 2 * TICK_S]
    assert max(waits) <= LONGEST_S + 2 * TICK_S
    assert sum(beyond_s) <= LONGEST_S + rounds * T_S / TRIAL_ROUNDS_EACH
    assert beyond_s, "the first key of all may be a slow member"


@pytest.mark.parametrize("fast", [{ME: T_S, B: T_S}, {ME: T_S, B: T_S, C: T_S}])
def test_fresh_keys_without_end_cost_a_quarter_of_each_round_and_keep_no_newcomer_out(fast):
    """A key whose trial is over dials anew under another name."""
    names = iter(PeerId(f"key{number:04}") for number in range(9999))
    world = Open(fast, *[next(names) for _ in range(60)])
    world.final = 0

    def anew(world: World, first: Member) -> None:
        works_never(world, first)
        seen = [world.trials[peer]._since for peer in fast]
        begun = {peer: min(since[peer] for since in seen if peer in since) for since in seen for peer in since}
        for peer, number in begun.items():
            if peer in world.leases and peer not in world.up and first.state.round >= number + TRIAL_ROUNDS:
                world.peers.remove(peer)
                del world.leases[peer]
                world.peers.append(next(names))

    world.run(5, anew)
    slow = world.join(A, 1.15 * T_S)
    first = world.run(65, anew)
    waits = waits_of(first, 10)
    assert sum(waits) / len(waits) < 0.6 * T_S
    trained = [number for number in slow.began if number < first.state.closed]
    assert len(first.in_time[A]) > 0.85 * len(trained)


def on_trial(**changes: object) -> Node:
    node = Node().ready().leases(a=0)
    views = {peer: replace(view, untried=True, round_s=NEVER_S) for peer, view in node.state.members.items()}
    node.feed(LeasesChanged({peer: replace(view, **changes) for peer, view in views.items()}, node.now))
    return node.train(0)


def waited_s(node: Node) -> float:
    return closes_at(node.state, {A}) - node.now


def test_a_member_on_trial_is_waited_for_while_its_lease_says_that_it_trains_this_round():
    assert waited_s(on_trial()) == pytest.approx(STALL_ROUNDS * TRAIN_S)
    assert waited_s(on_trial(round_s=5 * TRAIN_S)) == pytest.approx(5 * TRAIN_S)
    assert waited_s(on_trial(round_s=0.0)) == pytest.approx(TRAIN_S)
    ahead = on_trial()
    ahead.state = replace(ahead.state, members={A: replace(ahead.state.members[A], round=1)})
    assert waited_s(ahead) == pytest.approx(TRAIN_S)


def test_a_member_that_was_late_at_an_unknown_speed_is_waited_for_on_trial():
    node = on_trial()
    node.state = replace(node.state, absent=frozenset({A}), missed={A: Absence(1, newest=0)})
    assert waited_s(node) == pytest.approx(STALL_ROUNDS * TRAIN_S)


def test_what_was_lent_in_vain_is_made_up_by_an_eighth_of_each_round():
    node = on_trial().tick(STALL_ROUNDS * TRAIN_S).fold()
    lent_s = STALL_ROUNDS * TRAIN_S
    assert node.state.lent_s == pytest.approx(lent_s - TRAIN_S / TRIAL_ROUNDS_EACH)
    node = on_trial()
    node.state = replace(node.state, lent_s=1e-3)
    assert waited_s(node) == pytest.approx(TRAIN_S), "not again before that"
    assert node.tick(TRAIN_S).fold().state.lent_s == 0.0
    assert TRIAL_ROUNDS >= 2, "the first round of a member says no speed"


def waited(*came, lent_s=0.0):
    """A round that ended when all waits were over; C is a member that works, B on trial, and these came late."""
    node = Node().ready().leases(a=0, b=0, c=0)
    views = {peer: replace(view, untried=peer == B) for peer, view in node.state.members.items()}
    node.feed(LeasesChanged(views, node.now))
    node.state = replace(node.state, lent_s=lent_s)
    node.train(0).seen(A, 0).tick(4 * TRAIN_S)
    for peer in came:
        node.seen(peer, 0)
    return node.tick(40 * TRAIN_S).fold().state


def test_a_wait_for_members_that_came_is_not_lent():
    assert waited(B, C).lent_s == 0.0


def test_a_wait_in_vain_is_lent_whoever_else_is_late_or_missing():
    """One member that is late, or away, and many keys would else hold up each round for eight round times."""
    assert waited(C).lent_s > 0.0
    assert waited().lent_s > 0.0


def test_what_is_lent_is_no_more_than_the_longest_wait():
    """Else members that are slow for an hour would leave no newcomer a trial for eight."""
    state = waited(lent_s=1000.0 * TRAIN_S)
    assert 0.0 < state.lent_s <= STALL_ROUNDS * absence_s(state)
