"""Worlds of epoch_world.py in which one member signs two histories.

Its home is copied to a second machine. From then on each of the two goes on by itself, as an honest node would,
and reaches one half of the others, whatever is cut. A node that gets the proof takes no more of the member's feed,
and gets by name what it asks for.
"""

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus.types import EntryPayloadHeld, EntrySeen, EquivocatorsSeen, FetchOrphans
from atoll.protocols.ids import digest
from atoll.protocols.ledger.records import Contribution, Epoch, Vote, epoch_id
from tests.node.daemon.consensus.epoch_world import PEERS, Node, World, final


class Member(Node):
    """May know that the twin signed two histories: then it takes no more of its feed, and gets entries by name."""

    def boot(self, now):
        if not hasattr(self, "orphans"):
            self.proven, self.orphans = frozenset(), []
        self.wants: dict[int, tuple] = {}
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
            self.wants[action.round] = action.entries, action.proposals
        else:
            super().do(action)

    def take(self, orphan):
        if isinstance(orphan[2], Contribution):
            self.feed(EntryPayloadHeld(orphan[0]))
        self.feed(EntrySeen(*orphan, is_orphan=True))

    def answered_by(self, entries):
        """Those of some entries that it asks for, as p2p/exchange/orphans.py answers."""
        wants = {number: wanted for number, wanted in self.wants.items() if any(wanted)}
        return [entry for entry in entries if is_wanted(entry, wants)] if wants else []


def is_wanted(entry, wants):
    """By round, but for signatures under epochs."""
    name, _, body = entry
    if isinstance(body, Epoch) and any(epoch_id(body) in entries for entries, _ in wants.values()):
        return True
    entries, proposals = wants.get(body.round, ((), ()))
    return name in entries or (isinstance(body, Vote) and body.proposal in proposals)


class Twin(Member):
    """One of two machines with the same key. What they write has different names."""

    def __init__(self, number, which, excise_rounds):
        self.which = which
        super().__init__(number, 1, excise_rounds)

    def name_of(self, seq, body):
        return digest(bytes([self.which]), super().name_of(seq, body))


class TwinWorld(World):
    """The last member is the twin. The honest ones pass its history on to others of their half only, if it forked.

    So the proof spreads as `proves` says, or where somebody asks for an entry of the other history.
    """

    def __init__(self, seed, count, excise_rounds=0):
        super().__init__(seed, count - 1, excise_rounds=excise_rounds, node=Member)
        self.honest = [*self.nodes]
        self.twins = [Twin(count - 1, which, excise_rounds) for which in (0, 1)]
        self.nodes.append(self.twins[0])
        self.twin, self.is_forked = self.twins[0].peer, False
        self.proves = 0.02
        """Chance of each node at each step to learn of the fork."""

    def fork(self):
        """Start the second machine with a copy of the first one's home."""
        first, second = self.twins
        for entry in first.ledger:
            second.hear(entry)
        second.views, second.round = {**first.views}, first.round
        second.boot(self.now)
        self.nodes.append(second)
        self.is_forked = True

    def half(self, node):
        return node.which if node in self.twins else PEERS.index(node.peer) % 2

    def linked(self, one, other):
        if one in self.honest and other in self.honest:
            return super().linked(one, other)
        is_reached = not self.is_forked or (one.peer != other.peer and self.half(one) == self.half(other))
        return one is not other and one.is_up and other.is_up and is_reached

    def spread(self, chance=0.8):
        for node in self.nodes:
            for other in self.nodes:
                if not self.linked(node, other) or self.rng.random() > chance:
                    continue
                for each in self.honest:
                    self.give(node, other.feeds.get(each.peer, []))
                if not self.is_forked or self.half(node) == self.half(other):
                    self.give_twin(node, other.feeds.get(self.twin, []))
                if node in self.honest and other in self.honest:
                    self.prove(node, other)
                node.heard[other.peer] = self.now

    def give(self, node, feed):
        have = node.counts.get(feed[0][1], 0) if feed else 0
        most = self.rng.randint(1, 30) if node.state.live else len(feed)
        for entry in [] if feed and feed[0][1] in node.proven else feed[have : have + most]:
            node.hear(entry)

    def give_twin(self, node, history):
        """A feed takes no entry that does not follow its last one."""
        ours = node.feeds.get(self.twin, [])
        if len(history) > len(ours) and (not ours or history[len(ours) - 1] == ours[-1]):
            self.give(node, history)

    def prove(self, node, other):
        """The proof passes from one to another; who has it gets by name what the other one has."""
        ours, theirs = (each.feeds.get(self.twin, []) for each in (node, other))
        answer = node.answered_by([*theirs, *other.orphans])
        at = min(len(ours), len(theirs)) - 1
        is_fork = at >= 0 and ours[at][0] != theirs[at][0]
        # An entry that was asked for is the proof, where another one has its place.
        has_proof = other.proven or any(entry in theirs[: at + 1] and entry not in ours for entry in answer)
        if not node.proven and (has_proof or (is_fork and self.rng.random() < self.proves)):
            node.proven = frozenset({self.twin})
            node.feed(EquivocatorsSeen(node.proven))
        here = {name for name, _, _ in [*ours, *node.orphans]} if node.proven and answer else set()
        for entry in answer if node.proven else []:
            if entry[0] not in here:
                node.orphans.append(entry)
                node.take(entry)


def goes_on(world, most):
    """Until all honest ones that are up decide in one chain."""
    up = [node for node in world.honest if node.is_up]
    before, steps = max(map(final, up)), 0
    while (
        len({tuple(part.epoch for part in node.state.chain) for node in up}) > 1
        or min(map(final, up)) <= before + 3
    ):
        world.step()
        steps += 1
        assert steps < most, f"stuck: {[(final(node), len(node.state.chain)) for node in up]}"
    first = up[0]
    for node in up[1:]:
        assert node.state.epochs.voted_out == first.state.epochs.voted_out, "they differ about who is excluded"
        assert node.state.excised == first.state.excised
        for number in node.finals.keys() & first.finals.keys():
            assert node.finals[number] == first.finals[number]
            assert node.corrections[number] == first.corrections[number]
    return first.state.epochs.voted_out
