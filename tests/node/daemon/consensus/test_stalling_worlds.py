"""Liars below a third of the voters that stop finality as long as they like, where just a quorum is here."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus.standstill import Standstill
from atoll.node.daemon.consensus.types import Append, AppendRefused
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.ballots import owner_of
from atoll.protocols.ledger.records import (
    Ballot,
    BallotBody,
    Epoch,
    Follow,
    Prepare,
    Promise,
    Proposal,
    Vote,
)
from tests.node.daemon.consensus.epoch_world import LEASE, PATIENCE, Node, World, final

SIGNATURES = (Epoch, Follow)


class Plotter(Node):
    """A liar that knows its place among the liars, and keeps back what its plan says."""

    plan = ""
    place = 0
    liars: tuple[Node, ...] = ()

    def do(self, action):
        if self.plan and isinstance(action, Append) and self.keeps(action.body):
            self.feed(AppendRefused())
        else:
            super().do(action)

    def keeps(self, body):
        if isinstance(body, SIGNATURES):
            return "unsigned" in self.plan
        if not isinstance(body, BallotBody):
            return False
        if "mute" in self.plan:
            return self.place == 0 or not isinstance(body, Promise | Vote)
        # They answer in turn, and open no ballots.
        numbers = sorted({at.attempt for at in self.state.book.prepares} | {0, body.ballot.attempt})
        turn = numbers.index(body.ballot.attempt)
        if "turns" in self.plan:
            return not isinstance(body, Promise | Vote) or turn % len(self.liars) != self.place
        if "votes" in self.plan:
            return isinstance(body, Vote) and turn % len(self.liars) == self.place
        if "own" in self.plan:
            owner = owner_of(self.state.voters, body.ballot.attempt)
            return owner not in [one.peer for one in self.liars] or not isinstance(body, Promise)
        if "late" in self.plan:
            return body.ballot.attempt >= self.newest()
        return False

    def newest(self):
        return max(at.attempt for at in self.state.book.prepares) if self.state.book.prepares else 1


class PlotWorld(World):
    """`flaps`: seconds that the liars' leases live, and that they are over."""

    flaps: tuple[float, float] | None = None
    plotters: tuple[Node, ...] = ()

    def spread(self, chance=0.8):
        super().spread(chance)
        if self.flaps is None:
            return
        here_s, gone_s = self.flaps
        if self.now % (here_s + gone_s) >= here_s:
            for node in self.nodes:
                node.heard.pop(self.plotters[0].peer, None)


PLANS = ("turns", "turns unsigned", "votes", "votes unsigned", "own", "own unsigned", "mute unsigned", "late")
MOST = 13 * LEASE
"""Seconds until one more round is final; without tries, half of the plans stopped it for ever."""
FLAPS = {"short": (LEASE - 3, 2), "long": (PATIENCE, PATIENCE / 2)}
EIGHT = pytest.mark.slow(slice="test_no_plan_of_two_liars_stops_the_others")
MORE_FLAPS = pytest.mark.slow(slice="test_leases_that_end_and_begin_again_stop_nobody")


def plotted(seed, count, liars, plan):
    world = PlotWorld(seed, count, node=Plotter)
    world.run(60)
    gone = count - -(-2 * count // 3)
    places = world.rng.sample(world.nodes, gone + liars)
    for node in places[:gone]:
        node.is_up = False
    world.plotters = tuple(places[gone:])
    for place, node in enumerate(world.plotters):
        node.plan, node.place, node.liars = plan, place, world.plotters
    honest = [node for node in world.nodes if node not in places]
    return world, honest


def steps_of(world, honest, most):
    """The most steps without a new final round, in all honest nodes, until five more are."""
    first = newest = min(map(final, honest))
    waited = longest = 0
    while newest <= first + 5:
        world.step()
        waited = 0 if min(map(final, honest)) > newest else waited + 1
        newest, longest = min(map(final, honest)), max(longest, waited)
        assert waited < most, f"stuck at {[final(node) - first for node in honest]}"
    return longest


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("count", "seed"), [(7, 3), pytest.param(8, 1, marks=EIGHT)])
def test_no_plan_of_two_liars_stops_the_others(plan, count, seed):
    world, honest = plotted(seed, count, 2, plan)
    steps_of(world, honest, MOST)


@pytest.mark.parametrize(
    ("flaps", "plan"),
    [
        ("short", "mute unsigned"),
        ("long", "turns unsigned"),
        pytest.param("short", "turns unsigned", marks=MORE_FLAPS),
        pytest.param("long", "mute unsigned", marks=MORE_FLAPS),
    ],
)
def test_leases_that_end_and_begin_again_stop_nobody(flaps, plan):
    world, honest = plotted(0, 7, 2, plan)
    world.flaps = FLAPS[flaps]
    steps_of(world, honest, MOST)


@pytest.mark.parametrize("seed", [0, 1])
def test_votes_for_far_rounds_win_no_tie(seed):
    """A cut in halves, and one liar of four: its side would win by its votes, and cannot do without it."""
    world = World(seed, 4)
    world.run(40)
    liar = world.nodes[1]
    for number, node in enumerate(world.nodes):
        world.side[node.peer] = number // 2
    world.run(LEASE + 20)
    for number in range(liar.state.deciding, liar.state.deciding + 60):
        liar.write(Vote(Round(number), Ballot(0, liar.peer, liar.state.epoch), digest(b"far")))
    world.run(60)
    liar.keeps_back = (Prepare, Promise, Proposal, Vote, Epoch, Follow)
    world.side = dict.fromkeys(world.side, 0)
    steps_of(world, [node for node in world.nodes if node is not liar], MOST)


def test_the_next_round_begins_without_a_try():
    world = World(0, 3)
    world.run(30)
    for node in world.nodes:
        node.state = replace(node.state, still=Standstill(tries=3, since=node.state.now))
    world.run(3 * PATIENCE)
    assert [node.state.still.tries for node in world.nodes] == [0] * 3
