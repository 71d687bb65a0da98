"""A replay that begins with a summary ends as one that begins with round 0, whatever happened meanwhile.

Worlds of nodes that cut their ledgers, with members that leave, vanish, return, exclude each other and are cut
off. At each start the state is compared with that of a replay of everything.
"""

import random
from collections import Counter
from itertools import pairwise

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.certificates.history import KEPT_ROUNDS
from atoll.node.daemon.certificates.summary import (
    decode_summary,
    encode_summary,
    resumed,
    summarize,
)
from atoll.node.daemon.consensus import machine
from atoll.node.daemon.consensus.chains import epochs
from atoll.node.daemon.consensus.types import RECENT_ROUNDS, FinalizeRound
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault
from atoll.protocols.ledger.records import Admit, EpochBody, Exclude
from tests.node.daemon.consensus.epoch_world import FAULTS, Node, ShownNode, World, final

KEPT, STEP = 20, 4
LOOKED_AT = machine.DECIDED_KEPT
MORE = pytest.mark.slow(slice="test_a_replay_from_a_summary_ends_as_one_from_round_0")
SEEN: Counter[str] = Counter()


def read_in(state):
    """The books, of decided rounds only with what is looked at: ballots of the epoch before (early_ballots)."""
    epochs = {(part.first, before.epoch) for before, part in pairwise(state.chain)}
    return {at: book if at >= state.deciding else of_epochs(book, at, epochs) for at, book in state.books.items()}


def of_epochs(book, at, epochs):
    def kept(found, epoch_of):
        return {key: value for key, value in found.items() if (at, epoch_of(key, value)) in epochs}

    return replace(
        book,
        prepares=kept(book.prepares, lambda ballot, _: ballot.epoch),
        promises=kept(book.promises, lambda ballot, _: ballot.epoch),
        highest=kept(book.highest, lambda key, _: key[1]),
        proposals=kept(book.proposals, lambda _, proposal: proposal.ballot.epoch),
        votes=kept(book.votes, lambda ballot, _: ballot.epoch),
        other_votes=kept(book.other_votes, lambda key, _: key[1].epoch),
        written=kept(book.written, lambda key, _: key[1]),
        epochs=frozenset(),
    )


class CutNode(Node):
    """A node that keeps the newest rounds only. What it serves to others is all of it, as an archive's."""

    def __init__(self, number, probation=1, excise_rounds=0):
        self.cut_at, self.data, self.whole, self.old_finals, self.made = -1, None, [], {}, []
        super().__init__(number, probation, excise_rounds)

    def begin(self, chosen):
        state = super().begin(chosen)
        return state if self.data is None else resumed(state, decode_summary(self.data), chosen)

    def hear(self, entry):
        self.whole.append(entry)
        super().hear(entry)

    def boot(self, now):
        if not hasattr(self, "feeds"):
            super().boot(now)
            return
        finals = {at: names for at, names in {**self.old_finals, **self.finals}.items() if at <= self.cut_at}
        self.made = []
        try:
            super().boot(now)
        except LocalFault:
            SEEN["whole again"] += 1  # what the hint says: the whole ledger comes back
            self.ledger, self.data, self.cut_at = list(self.whole), None, -1
            super().boot(now)
            finals = {}
        self.old_finals, self.finals = finals, {**finals, **self.finals}
        # No run that is cut takes work out of its rounds (history.needs_all_records).
        self.counted = {**finals, **self.counted}
        self.corrections = {**dict.fromkeys(finals, ()), **self.corrections}
        if self.data is not None:
            SEEN["start"] += 1
            self.compare()

    def compare(self):
        """With the replay of all records, in the order of arrival."""
        other = Node.__new__(Node)
        other.__dict__.update(self.__dict__)
        other.ledger, other.finals, other.heard = self.whole, {}, {}
        Node.boot(other, self.now)
        ours, theirs = self.state, other.state
        names = ("last_final", "voters", "tally", "chain", "planned", "views", "held", "attempt")
        for name in names:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert replace(ours.epochs, voted={}) == replace(theirs.epochs, voted={})
        assert {a: v for a, v in ours.epochs.voted.items() if v > self.cut_at} == {
            a: v for a, v in theirs.epochs.voted.items() if v > self.cut_at
        }
        assert read_in(ours) == read_in(theirs)
        newest = range(ours.last_final - KEPT + 1, ours.last_final + 1)
        for at in newest:
            assert ours.decided.get(at) == theirs.decided.get(at)
            if at in ours.decided:
                assert ours.electorate(at) == theirs.electorate(at)

    def do(self, action):
        super().do(action)
        if isinstance(action, FinalizeRound) and action.round == self.state.last_final:
            newest = self.made[-1].round if self.made else self.cut_at
            if action.round >= newest + STEP:
                made = summarize(self.state)
                self.made += [made] if made else []
        if self.state.live and self.made and self.made[0].round + KEPT <= self.state.last_final:
            self.cut(self.made.pop(0))

    def cut(self, summary):
        """As p2p/ledger/history.py does."""
        heads = {feed[-1][0] for feed in self.feeds.values()}

        def stays(entry):
            name, _, body = entry
            is_new = body.round > summary.round or body.round in summary.forks
            return is_new or name in heads or isinstance(body, EpochBody | Admit)

        self.ledger = [entry for entry in self.ledger if stays(entry)]
        self.data, self.cut_at = encode_summary(summary), summary.round
        SEEN["cut"] += 1


class ShownCutNode(ShownNode, CutNode):
    """Of a run whose voters must have shown work."""


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", KEPT)
    SEEN.clear()


def shaken(seed, probation, excludes, node=CutNode):
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    world = World(seed, count, probation, node=node)
    world.run(rng.randint(120, 200))
    for _ in range(rng.randint(3, 7)):
        kind, node = rng.choice((*FAULTS, "restart")), rng.choice(world.nodes)
        if excludes and count > 2:
            for voter in world.nodes[1:]:
                if voter is not world.nodes[1] and voter.is_up and voter.state.live and rng.random() < 0.3:
                    voter.write(Exclude(voter.state.deciding, world.nodes[1].peer, ""))
        world.strike(kind, node, rng)
        world.run(rng.randint(20, 160))
    for peer in world.side:
        world.side[peer] = 0
    for node in world.nodes:
        node.is_up = True
        node.boot(world.now)
    return world


@pytest.mark.parametrize(
    ("probation", "excludes", "kind"),
    [
        (1, False, CutNode),
        pytest.param(4, False, CutNode, marks=MORE),
        pytest.param(1, True, CutNode, marks=MORE),
        (8, True, CutNode),
        (4, False, ShownCutNode),
        pytest.param(8, True, ShownCutNode, marks=MORE),
    ],
)
@pytest.mark.parametrize("block", [0, pytest.param(1, marks=MORE), pytest.param(2, marks=MORE)])
def test_a_replay_from_a_summary_ends_as_one_from_round_0(block, probation, excludes, kind):
    for seed in range(block * 2, block * 2 + 2):
        world = shaken(seed, probation, excludes, kind)
        left = [node for node in world.nodes if not (excludes and node is world.nodes[1])]
        if excludes and len(world.nodes) > 2:
            world.nodes[1].is_up = False
        before, steps = max(map(final, world.up())), 0
        while (
            len({tuple(s.epoch for s in node.state.chain) for node in world.up()}) > 1
            or min(map(final, world.up())) <= before + 3
        ):
            world.step()
            steps += 1
            assert steps < 300, f"seed {seed}: stuck"
        world.agree()
        assert left
    assert SEEN["start"] > 2, SEEN
    assert SEEN["cut"] > 10, SEEN


def test_a_ledger_keeps_the_rounds_in_which_forks_are_looked_at():
    assert KEPT_ROUNDS >= LOOKED_AT


def test_a_state_begins_again_from_its_summary():
    """With a member that left, another that voters excluded, and an epoch of those that stayed."""
    world = World(7, 6, 4, node=Node)
    world.run(160)
    gone = world.nodes[5].peer
    for node in world.nodes[1:5]:
        node.write(Exclude(node.state.deciding, gone, ""))
    world.run(60)
    for node in world.nodes[:3]:
        node.is_up = False
    world.run(200)
    node = world.nodes[3]
    state, authors = node.state, [each.peer for each in world.nodes]
    assert len(state.chain) > 1
    assert state.epochs.voted_out.keys() == {gone}
    summary = decode_summary(encode_summary(summarize(state)))
    chosen = chosen_path([(author, body) for _, author, body in node.ledger], node.peer)
    again = resumed(Node.begin(node, chosen), summary, chosen)
    for name in ("last_final", "voters", "tally", "chain", "seniority"):
        assert getattr(again, name) == getattr(state, name), name
    newest = sorted(state.decided)[-RECENT_ROUNDS:]
    assert again.decided == {at: state.decided[at] for at in newest}
    assert again.electorate(state.deciding) == state.electorate(state.deciding)
    assert (again.epochs.voted_out, again.planned) == (state.epochs.voted_out, ())
    assert summary.authors == tuple(sorted(authors))
    assert summary.forks == tuple(segment.first for segment in state.chain[1:])


def test_an_exclusion_by_the_newest_set_is_in_the_summary():
    """The proposal that excludes goes with the round, and no later one repeats it."""
    world = World(1, 3, 1, node=CutNode)
    world.run(60)
    node = world.nodes[0]
    voted_out = {world.nodes[2].peer: int(node.state.deciding)}
    state = replace(node.state, epochs=replace(node.state.epochs, voted_out=voted_out))
    summary = decode_summary(encode_summary(summarize(state)))
    assert resumed(Node.begin(node, ()), summary, ()).epochs.voted_out == voted_out


def test_all_nodes_of_a_chain_write_the_same_bytes():
    world = World(5, 5, 4, node=CutNode)
    world.run(300)
    states = [node.state for node in world.nodes]
    newest = min(state.last_final for state in states)
    for _ in range(40):
        found = {encode_summary(summarize(node.state)) for node in world.nodes if final(node) == newest}
        assert len(found) <= 1
        if len([node for node in world.nodes if final(node) == newest]) == 5:
            break
        newest = min(map(final, world.nodes)) + 1
        world.step()
    assert found
    (data,) = found
    assert encode_summary(decode_summary(data)) == data
    assert len(data) < 12_000


def test_another_version_and_bytes_that_are_none_are_refused():
    world = World(1, 2, 1, node=CutNode)
    world.run(120)
    summary = summarize(world.nodes[0].state)
    with pytest.raises(LocalFault, match="version 9"):
        decode_summary(codec.encode(replace(summary, version=9)))
    for data in (b"", encode_summary(summary)[:-1], encode_summary(summary) + b"\0"):
        with pytest.raises(DecodeError):
            decode_summary(data)


def test_a_chain_that_parts_before_the_summary_is_not_followed_with_records_that_are_gone():
    world = World(3, 3, 1, node=CutNode)
    world.run(200)
    summary, state = summarize(world.nodes[0].state), Node.begin(world.nodes[0], ())
    other = epochs.Epoch(summary.round - 1, b"", (world.nodes[0].peer,))
    with pytest.raises(LocalFault, match="ledger_history"):
        resumed(state, summary, (other,))
    later = replace(other, round=summary.round + 1)
    assert resumed(state, summary, (later,)).planned == (later,)
