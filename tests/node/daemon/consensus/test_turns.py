"""Liars that own the first ballots of rounds cost patiences twice; in the rounds after nobody waits for them."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.consensus import machine, proposer
from atoll.node.daemon.consensus.succession import enter_epoch
from atoll.node.daemon.consensus.types import Append, AppendRefused, FinalityTick
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import Ack, Ballot, Epoch, Prepare, Proposal, Vote, set_digest
from atoll.protocols.ledger.turns import OwnerTurns
from tests.node.daemon.consensus.epoch_world import PATIENCE, Node, World, final
from tests.node.daemon.consensus.test_vote_rule import PATIENCE_S, Voter, named, peers, propose

SEVEN = peers(7)


def standing(node, *without):
    """The node where these voters have no turn."""
    node.state = replace(node.state, turns=OwnerTurns((), frozenset(without)))
    return node


def opened(node):
    return [
        one.body.ballot.attempt for one in node.log if isinstance(one, Append) and isinstance(one.body, Prepare)
    ]


def test_nobody_waits_for_owners_whose_turns_passed_unused():
    node = standing(Voter(SEVEN, SEVEN[2]), SEVEN[0], SEVEN[1]).close(*SEVEN)
    assert opened(node) == [2]
    waiting = standing(Voter(SEVEN, SEVEN[2]), SEVEN[0]).close(*SEVEN)
    assert opened(waiting.feed(FinalityTick(PATIENCE_S - 0.1))) == []
    assert opened(waiting.feed(FinalityTick(PATIENCE_S))) == [2]


def test_late_acts_of_such_owners_win_them_no_time():
    node = standing(Voter(SEVEN, SEVEN[2]), SEVEN[0], SEVEN[1])
    node.hear(SEVEN[1], Prepare(Round(1), Ballot(1, SEVEN[1])))
    node.hear(SEVEN[1], propose(named(SEVEN[1]), SEVEN[1], 1))
    assert node.state.attempt == 1, "its ballot is due at once, as the one after it"
    assert opened(node.close(*SEVEN)) == [2]


def test_the_others_find_the_ballot_due_at_once():
    node = standing(Voter(SEVEN, SEVEN[5]), SEVEN[0], SEVEN[1]).close(*SEVEN)
    node.hear(SEVEN[2], Prepare(Round(1), Ballot(2, SEVEN[2])))
    assert node.state.attempt == 2
    node.hear(SEVEN[3], Prepare(Round(1), Ballot(3, SEVEN[3])))
    assert node.state.attempt == 2, "its owner has a turn"


def test_an_owner_without_a_turn_proposes_what_all_acknowledged_before_another_opens_a_ballot():
    """It may be honest again. A ballot opened at that moment would cut off its own."""
    for me, does in ((0, Proposal), (1, Prepare)):
        node = standing(Voter(SEVEN, SEVEN[me]), SEVEN[0])
        for peer in SEVEN:
            node.hear(peer, Ack(Round(1), set_digest([*named(*SEVEN)]), b""))
        node.close(*SEVEN, ripe=False)
        found = [one.body for one in node.log if isinstance(one, Append) and isinstance(one.body, does)]
        assert len(found) == (me == 0)


def test_only_the_first_time_round():
    node = standing(Voter(SEVEN, SEVEN[2]), SEVEN[0], SEVEN[1])
    assert proposer.waits(node.state, 2) == 0
    assert proposer.waits(replace(node.state, attempt=7), 9) == 2


def decided_in(attempt):
    """A node where all voted for the set that the owner of this attempt proposed, and so before."""
    node = Voter(SEVEN, SEVEN[6])
    node.state = replace(node.state, turns=OwnerTurns().after(0, SEVEN, attempt, SEVEN))
    body = propose(named(*SEVEN), SEVEN[attempt], attempt)
    name = node.hear(SEVEN[attempt], body)
    for peer in SEVEN[:5]:
        node.hear(peer, Vote(Round(1), body.ballot, name))
    assert node.state.last_final == 1
    return node


def test_a_final_round_says_whose_turns_passed():
    assert decided_in(0).state.turns == OwnerTurns()
    assert decided_in(2).state.turns.without == {*SEVEN[:2]}


def test_an_epoch_begins_with_turns_for_all():
    node = decided_in(2)
    members = tuple(sorted(SEVEN[:5]))
    for peer in members:
        node.hear(peer, Epoch(node.state.deciding, b"", members))
    state = replace(node.state, me=members[0])
    if state.chain[-1].epoch == b"":
        state, entered = enter_epoch(state)
        assert entered
    assert state.turns == OwnerTurns()


# --- liars first in each round --------------------------------------------------------------------


class Silent(Node):
    """A liar that opens no ballots and proposes nothing, and else does what others do."""

    lies = False

    def do(self, action):
        if self.lies and isinstance(action, Append) and isinstance(action.body, Prepare | Proposal):
            self.feed(AppendRefused())
        else:
            super().do(action)


class FirstWorld(World):
    """From a round on liars own the first ballots of each."""

    liars: frozenset[PeerId] = frozenset()
    since = 0

    def spread(self, chance=1.0):
        super().spread(chance)  # nobody waits for an owner to which the connection is lost

    def order(self, run, number, authors):
        found = voter_order(run, number, authors)
        return tuple(sorted(found, key=lambda peer: number < self.since or peer not in self.liars))

    def corrupt(self, count):
        chosen = self.rng.sample(self.nodes, count)
        self.liars, self.since = frozenset(node.peer for node in chosen), max(map(final, self.nodes)) + 2
        while min(map(final, self.nodes)) < self.since - 1:
            self.step()
        for node in chosen:
            node.lies = True

    def patiences_until(self, number):
        """How long it takes until a round is final everywhere."""
        began = self.now
        while min(map(final, self.nodes)) < number:
            self.step()
            assert self.now < began + 20 * PATIENCE * number
        return (self.now - began) / PATIENCE


@pytest.mark.parametrize(("count", "liars"), [(4, 1), (7, 2)])
def test_liars_with_the_first_ballots_of_each_round_hold_up_two_rounds(monkeypatch, count, liars):
    """Without the rule they hold up each for a patience each: seven rounds for 14 patiences, two of seven.

    One turn that passed is bad luck, so they hold up two rounds.
    """
    world = FirstWorld(1, count, node=Silent)
    monkeypatch.setattr(machine, "voter_order", world.order)
    world.run(40)
    world.corrupt(liars)
    assert world.patiences_until(world.since) >= liars
    assert world.patiences_until(world.since + 7) < 7.0
