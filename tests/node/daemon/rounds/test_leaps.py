"""Over which rounds a node leaps, and when one that is ahead waits: both machines of a few nodes."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.node.daemon.rounds import machine
from atoll.node.daemon.rounds.leaps import (
    ahead_s,
    came_late,
    holders_at_work,
    is_ahead,
    members_at_work,
    newest_left,
    why_ahead,
)
from atoll.node.daemon.rounds.participants import MemberView, SetRules
from atoll.node.daemon.rounds.queries import comes_too_late, reason, waits_s
from atoll.node.daemon.rounds.state import STALL_ROUNDS, Phase, RoundConfig, RoundState
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.ledger.set_limit import NewcomerOrder
from tests.node.daemon.rounds.test_participants import book
from tests.node.daemon.rounds.test_round_swarm import ALL, BLOCKING, LEASE_S, ROUNDS, SOME, Node, World


class RunsAhead(Node):
    """Trains nothing: it contributes to all rounds at once, and says that it trained them."""

    def go_live(self) -> None:
        super().go_live()
        self.lease = ("done", ROUNDS)
        for number in range(ROUNDS):
            payload = digest(b"nothing", self.peer.encode(), bytes([number]))
            self.payloads.add(payload)
            self.write(Contribution(Round(number), digest(b"base"), payload, 1, 64, 64, 1.0))

    def feed_round(self, event: object) -> None:
        """It has no rounds of its own."""


def world_of(count: int, liars: int, overlap: int = BLOCKING) -> World:
    world = World(40 + count, count, count, overlap)
    for place in range(count - liars, count):
        honest = world.nodes[place]
        world.nodes[place] = RunsAhead(world, honest.peer, honest.train_s)
    return world


def authors_of(world: World, number: int) -> set:
    node = world.nodes[0]
    return {node.known[name][0] for name in node.finals[number].contributions}


@pytest.mark.parametrize("overlap", [BLOCKING, SOME, ALL])
@pytest.mark.parametrize(("count", "liars"), [(3, 1), (5, 2)])
def test_members_that_run_ahead_and_are_fewer_than_half_pull_nobody_over_rounds(count, liars, overlap):
    world = world_of(count, liars, overlap)
    honest = world.nodes[: count - liars]
    for node in world.nodes:
        node.boot()
    world.until(lambda: all(node.finished for node in honest))
    world.check(honest)
    for number in range(1, ROUNDS):  # the first one may begin before all have synchronised
        assert {node.peer for node in honest} <= authors_of(world, number), (
            f"round {number} is decided without them"
        )


@pytest.mark.parametrize("overlap", [BLOCKING, SOME])
def test_a_fast_member_that_was_cut_off_waits_for_the_two_others(overlap):
    """It was rounds ahead when it met them again: it rests until they are there, and all train the last rounds."""
    world = World(50, 3, 3, overlap)
    for node, train_s in zip(world.nodes, (8.0, 8.0, 1.6), strict=True):
        node.train_s = train_s
        node.boot()
    world.until(lambda: world.newest() >= 2)
    fast = world.nodes[2]
    world.cut = {fast.peer}
    world.until(lambda: fast.round.round >= ROUNDS - 3)
    others = world.nodes[:2]
    assert max(node.round.round for node in others) < fast.round.round - 3
    world.cut = set()
    world.until(lambda: fast.round.phase is Phase.JOIN)
    assert fast.round.round >= max(node.round.round for node in others) + 2
    world.until(lambda: all(node.finished for node in world.nodes))
    world.check(world.nodes)
    for number in range(ROUNDS):
        assert {node.peer for node in others} <= authors_of(world, number), f"round {number} was skipped"
    assert len(authors_of(world, ROUNDS - 1)) == 3


LEASE_OF_STATE_S = 60.0


def state_of(now: float = 0.0, most_age: int = 0, **members: MemberView) -> RoundState:
    config = RoundConfig(PeerId("me"), 99, 192, 128, LEASE_OF_STATE_S, most_age=most_age)
    views = {PeerId(name): view for name, view in members.items()}
    return replace(machine.begin(config), members=views, entered=dict.fromkeys(views, 0.0), now=now, train_s=2.0)


def at(number: int, activity: Activity = "training", **more: Any) -> MemberView:
    return MemberView(activity, Round(number), 0.0, **more)


@pytest.mark.parametrize(
    ("waits", "members"),
    [
        (True, {"a": at(7), "b": at(7)}),
        (False, {"a": at(8), "b": at(7)}),
        (True, {"a": at(8), "b": at(7), "c": at(7), "d": at(3)}),
        (False, {"a": at(7)}),  # half: that one leaps
        (False, {"a": at(7), "b": at(7, lost_at=1.0)}),  # it may be killed
        (False, {"a": at(7), "b": at(7, untried=True)}),
        (False, {"a": at(7), "b": at(7, "syncing")}),
        (False, {"a": at(7), "b": at(7), "c": at(7, "syncing"), "d": at(9)}),
        (False, {"a": at(7), "b": at(7), "c": at(9, "done"), "d": at(9)}),
        (False, {}),
    ],
)
def test_a_node_is_ahead_of_more_than_half_of_all(waits, members):
    state = state_of(**members)
    assert is_ahead(state, 9) is waits
    assert bool(why_ahead(replace(state, round=9))) is waits
    assert waits or ahead_s(replace(state, round=9)) is None
    assert not is_ahead(state_of(most_age=1, **members), 9), "its work counts in a later round"


def test_members_that_begin_no_round_are_waited_for_no_longer_than_in_a_round():
    """Each by its own pace; and none where no work comes, so that leases alone hold nobody up."""
    slow = {"a": at(3, round_s=6.0), "b": at(3, round_s=6.0)}
    patience_s = STALL_ROUNDS * 2.0 + 60.0
    works = replace(state_of(patience_s + 0.1, **slow), payload_at=1.0)
    assert is_ahead(works, 9)
    assert not is_ahead(replace(works, payload_at=0.0), 9), "nothing came"
    assert not is_ahead(replace(works, members=works.members | {PeerId("b"): at(3, round_s=1.0)}), 9), "b hangs"
    late = replace(works, now=STALL_ROUNDS * 6.0 + 60.1, payload_at=99.0)
    assert not is_ahead(late, 9)
    assert is_ahead(replace(late, entered=dict.fromkeys(late.members, 1.0)), 9), "they began another round"


def test_a_wait_for_members_behind_says_for_whom_and_for_how_long():
    """The estimate is by the pace that they say, the bound by their patience: no round of this node is named."""
    both = {"a": at(5, round_s=6.0), "b": at(7, round_s=4.0)}
    state = replace(state_of(1.0, **both), phase=Phase.JOIN, round=9)
    bound_s = STALL_ROUNDS * 4.0 + LEASE_OF_STATE_S - 1.0
    assert reason(state) == (
        "waiting for 2 members behind: …a (training round 5, heard 1 s ago), "
        "…b (training round 7, heard 1 s ago); "
        f"at most {bound_s:.0f} s if they begin no round"
    )
    assert waits_s(state) == 1 * 4.0 - 1.0, "one of both is enough, and b is there first"
    three = replace(state, members=state.members | {PeerId("c"): at(6, round_s=4.0)})
    assert waits_s(replace(three, entered=three.entered | {PeerId("c"): 0.0})) == 1 * 4.0 - 1.0
    assert not is_ahead(replace(state, now=1.0 + bound_s, payload_at=99.0), 9), "then it goes on"
    unknown = replace(state, members={peer: at(view.round) for peer, view in state.members.items()})
    assert waits_s(unknown) is None
    assert waits_s(replace(state, now=20.0)) is None, "they are late by their own pace"


def test_who_waits_or_starts_is_counted_by_those_that_are_ahead():
    """Two of five may be anywhere: the others see each other, though all of them wait."""
    few = {"a": at(3), "b": at(3)}
    assert is_ahead(state_of(**few), 9)
    assert not is_ahead(state_of(**few, c=at(9, "syncing"), d=at(9, "syncing")), 9)


def test_a_node_that_trained_is_not_pulled_by_one_while_the_others_start_again():
    members = {"a": at(9, "done"), "b": at(4, "syncing")}
    state = replace(state_of(**members), closed=3, books={n: book(PeerId("a")) for n in range(4, 9)})
    assert newest_left(state, 4) == 3
    assert newest_left(replace(state, train_s=0.0), 4) == 8, "after a start it goes to those that train"


def test_who_waits_for_the_next_round_begins_none_that_the_others_just_left():
    """Leases of the next round come before records of this one: it would be final at once, as each next one."""
    state = replace(state_of(9.5, a=at(5, round_s=10.0), b=at(5, round_s=10.0)), train_s=10.0)
    assert comes_too_late(state, 5)
    first = replace(state, now=10.2, members=state.members | {PeerId("a"): at(6, round_s=10.0)})
    first = replace(first, entered=first.entered | {PeerId("a"): 10.1})
    assert comes_too_late(first, 5), "the first of the two went on"
    both = replace(first, members=dict.fromkeys(first.members, at(6, round_s=10.0)))
    both = replace(both, entered=dict.fromkeys(both.members, 10.1))
    assert comes_too_late(both, 5)
    assert not comes_too_late(replace(both, now=15.2), 5), "no records came within the grace"
    assert not comes_too_late(both, 6)


def test_where_few_decide_the_others_lead_nobody():
    """In a run with probation, legal noise that contributes to all rounds is no reason to leap."""
    members = {name: at(9) for name in "xyz"} | {"a": at(3), "b": at(3)}
    books = {number: book(*map(PeerId, "xyz")) for number in range(4, 9)}
    state = replace(state_of(**members), books=books, closed=3)
    assert newest_left(state, 4) == 8
    order = NewcomerOrder(voters=frozenset(map(PeerId, ("a", "b", "me"))))
    assert newest_left(replace(state, set_rules=SetRules(order=order)), 4) == 3
    gone = NewcomerOrder(voters=frozenset(map(PeerId, ("c", "me"))))
    assert newest_left(replace(state, set_rules=SetRules(order=gone)), 4) == 8, "none of those is here"


def test_pace_and_experts_follow_from_those_that_showed_work():
    """A lease costs nothing: keys without work would set the pace of all, and hold experts that nobody trains."""
    keys = {name: at(9, untried=True, tokens_per_s=9e11) for name in "wxyz"}
    begun = state_of(**keys, a=at(9), b=at(9, "syncing"))
    assert members_at_work(begun).keys() == set("awxyz"), "nobody could show any yet"
    state = replace(begun, final=3)
    assert members_at_work(state).keys() == {"a"}
    assert holders_at_work(replace(state, round=10)).keys() == set("awxyz"), "on trial: they may be newcomers"
    assert holders_at_work(replace(state, round=11)).keys() == {"a"}, "their leases stand still"
    noise = replace(state, members={peer: replace(view, untried=False) for peer, view in state.members.items()})
    assert members_at_work(noise).keys() == set("awxyz")
    order = NewcomerOrder(voters=frozenset(map(PeerId, ("a", "me"))))
    assert members_at_work(replace(noise, set_rules=SetRules(order=order))).keys() == {"a"}, (
        "noise decides nothing"
    )


def test_who_comes_late_folds_before_it_trains_on():
    """Half of all tell it: one of three that says it is far ahead ends nobody's overlap."""
    both = {8: book(PeerId("a"), PeerId("b"))}
    far = overlapped(replace(state_of(a=at(9), b=at(9)), books=both))
    assert came_late(far, 7)
    assert not came_late(far, 8), "they may still collect it"
    assert not came_late(replace(far, books={8: book(PeerId("a"))}), 7)
    assert not came_late(overlapped(replace(state_of(a=at(9), b=at(7)), books=both)), 7)
    assert not came_late(overlapped(state_of()), 7)
    assert not came_late(replace(far, config=state_of().config), 7)


@pytest.mark.parametrize(
    ("skips", "since_s", "authors", "ahead"),
    [
        (True, 6.0, "a", 6),
        (False, 4.0, "a", 6),  # it began when we did: who is equally fast is not skipped, whatever a third says
        (False, 6.0, "a", 5),  # none has left it
        (False, 6.0, "", 6),  # an empty round would never be final
    ],
)
def test_with_overlap_who_is_slow_skips_the_round_that_half_will_have_left(skips, since_s, authors, ahead):
    """Of three: one has left it with its work, and one did most of it."""
    members = {"a": at(ahead), "b": at(5, round_s=10.0)}
    found = replace(overlapped(state_of(since_s, **members)), closed=4, books={5: book(*map(PeerId, authors))})
    assert newest_left(found, 5) == (5 if skips else 4)
    assert newest_left(replace(found, config=state_of().config), 5) == 4


def overlapped(state: RoundState) -> RoundState:
    return replace(state, config=dataclasses.replace(state.config, overlap_steps=4))


class StaysBehind(RunsAhead):
    """Contributes to the first round, and says for ever that it trains it."""

    def go_live(self) -> None:
        Node.go_live(self)
        self.lease = ("training", 0)


@pytest.mark.parametrize(("overlap", "stalls"), [(BLOCKING, 1), (SOME, 2)])
def test_members_that_stay_behind_for_ever_are_waited_for_once(overlap, stalls):
    """Two of three that live and deliver nothing: in the first round, and then as members that are behind.

    With overlap both waits come before round 2 begins.
    """
    world = World(60, 3, 3, overlap)
    for place in (1, 2):
        world.nodes[place] = StaysBehind(world, world.nodes[place].peer, world.nodes[place].train_s)
    for node in world.nodes:
        node.boot()
    honest = world.nodes[0]
    world.until(lambda: world.newest() == ROUNDS - 1)
    begun = [world.started[number] for number in sorted(world.started)]
    waits = sorted(after - before for before, after in pairwise(begun))
    assert waits[-1] < stalls * ((STALL_ROUNDS + 5) * honest.train_s + LEASE_S)
    assert waits[-3] < 3 * honest.train_s, "the others cost about a round time each"
