"""Votes to exclude in worlds with loss, restarts and a member that signs two histories: all exclude alike.

Worlds as in test_epoch_worlds.py. The twin gives one half of the others another history than the other half, with
other entries of contributions and ballots, and with other votes to exclude. After some time each node gets the
proof, takes no more of its feed, and gets by name what it asks for. What the twin writes about epochs stands in
both histories, and no honest member vanishes or is cut off meanwhile: docs/epochs.md says what does not hold then,
with exclusions or without.
"""

import random

import pytest

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus.types import EntryPayloadHeld, EntrySeen, EquivocatorsSeen, FetchOrphans
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import Contribution, Epoch, Excise, Exclude, Follow, Vote, epoch_id
from tests.node.daemon.consensus.epoch_world import PEERS, Node, World, final


class Member(Node):
    """May know that the twin signed two histories: then it takes no more of its feed, and gets entries by name."""

    def boot(self, now):
        if not hasattr(self, "orphans"):
            self.proven, self.orphans = frozenset(), []
        self.wants = ((), ())
        super().boot(now)
        if self.proven:
            self.feed(EquivocatorsSeen(self.proven))
        for entry in self.orphans:
            self.take(entry)

    def begin(self, chosen):
        said = [[(author, body) for _, author, body in some] for some in (self.ledger, self.orphans)]
        return super().begin(chosen_path(said[0], self.peer, said[1]))

    def do(self, action):
        if isinstance(action, FetchOrphans):
            self.wants = action.entries, action.proposals
        else:
            super().do(action)

    def take(self, orphan):
        if isinstance(orphan[2], Contribution):
            self.feed(EntryPayloadHeld(orphan[0]))
        self.feed(EntrySeen(*orphan, is_orphan=True))


class Twin(Member):
    """Acts by its first history; the second one is for the others of every second number."""

    def boot(self, now):
        if not hasattr(self, "second"):
            self.second, self.rng = [], random.Random(0)
        super().boot(now)

    def write(self, body):
        super().write(body)
        if isinstance(body, Epoch | Follow) or self.rng.random() < 0.8:
            self.lie(body)

    def lie(self, body):
        name = digest(b"second", self.peer.encode(), len(self.second).to_bytes(4, "big"), repr(body).encode())
        self.second.append((name, self.peer, body))


class TwinWorld(World):
    """The last member is the twin."""

    def __init__(self, seed, count, excise_rounds=0):
        super().__init__(seed, count, excise_rounds=excise_rounds, node=Member)
        self.twin = self.nodes[-1] = Twin(count - 1, 1, excise_rounds)
        self.honest = self.nodes[:-1]
        self.proves = 0.02
        """Chance of each node at each step to learn of the fork."""

    def spread(self, chance=0.8):
        peers = [peer for peer in PEERS[: len(self.nodes)] if peer != self.twin.peer]
        for node in self.nodes:
            for other in self.nodes:
                if not self.linked(node, other) or self.rng.random() > chance:
                    continue
                for peer in peers:
                    self.give(node, other.feeds.get(peer, []))
                if other is self.twin:
                    half = PEERS.index(node.peer) % 2
                    self.give(node, self.twin.second if half else self.twin.feeds.get(self.twin.peer, []))
                elif node is not self.twin:
                    self.prove(node, other)
                node.heard[other.peer] = self.now

    def give(self, node, feed):
        have = node.counts.get(feed[0][1], 0) if feed else 0
        most = self.rng.randint(1, 30) if node.state.live else len(feed)
        for entry in [] if feed and feed[0][1] in node.proven else feed[have : have + most]:
            node.hear(entry)

    def prove(self, node, other):
        """The proof passes from one to another; who has it gets by name what the other one has."""
        ours, theirs = (each.feeds.get(self.twin.peer, []) for each in (node, other))
        at = min(len(ours), len(theirs)) - 1
        is_fork = at >= 0 and ours[at][0] != theirs[at][0] and self.rng.random() < self.proves
        if not node.proven and (is_fork or other.proven):
            node.proven = frozenset({self.twin.peer})
            node.feed(EquivocatorsSeen(node.proven))
        if node.proven:
            entries, proposals = node.wants
            here = {name for name, _, _ in [*ours, *node.orphans]}
            for entry in [*theirs, *other.orphans]:
                name, body = entry[0], entry[2]
                is_vote = isinstance(body, Vote) and body.proposal in proposals
                is_named = name in entries or (isinstance(body, Epoch) and epoch_id(body) in entries)
                if name not in here and (is_vote or is_named):
                    node.orphans.append(entry)
                    node.take(entry)


def goes_on(world, most):
    """Until all honest ones that are up decide in one chain."""
    up = [node for node in world.honest if node.is_up]
    before, steps = max(map(final, up)), 0
    while len({node.state.epoch for node in up}) > 1 or min(map(final, up)) <= before + 3:
        world.step()
        steps += 1
        assert steps < most, f"stuck: {[(final(node), node.state.epoch[:2]) for node in up]}"
    first = up[0]
    for node in up[1:]:
        assert node.state.epochs.voted_out == first.state.epochs.voted_out, "they differ about who is excluded"
        assert node.state.excised == first.state.excised
        for number in node.finals.keys() & first.finals.keys():
            assert node.finals[number] == first.finals[number]
            assert node.corrections[number] == first.corrections[number]
    return first.state.epochs.voted_out


def shaken(seed, excise_rounds):
    """Who was excluded in the end. The run's owner has no vote, so the twin's is needed."""
    rng = random.Random(seed)
    world = TwinWorld(seed, rng.choice((6, 6, 7)), excise_rounds)
    world.proves = rng.choice((0.01, 0.03, 0.1))
    bad = rng.choice(world.nodes[1:])

    def removal(number):
        return Excise(number, bad.peer, "", Round(0)) if excise_rounds else Exclude(number, bad.peer, "")

    world.run(rng.randint(8, 20))
    for _ in range(rng.randint(3, 7)):
        for node in world.honest[1:]:
            if node is not bad and node.is_up and node.state.live and rng.random() < 0.9:
                node.write(removal(node.state.deciding))
        if bad is not world.twin and rng.random() < 0.8:
            rng.choice((world.twin.lie, super(Twin, world.twin).write))(removal(world.twin.state.deciding))
        if rng.random() < 0.5:
            rng.choice(world.honest).boot(world.now)
        world.run(rng.randint(5, 60))
    bad.is_up = False
    world.proves = 0.2
    world.run(20)
    return goes_on(world, 300)


@pytest.mark.parametrize("excise_rounds", [0, 12])
@pytest.mark.parametrize("block", range(2))
def test_a_twin_and_votes_to_exclude_split_nobody_and_stop_nobody(block, excise_rounds):
    found = [bool(shaken(seed, excise_rounds)) for seed in range(block * 8, block * 8 + 8)]
    print(found)
    assert any(found)
