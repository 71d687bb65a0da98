"""A member with two histories of its feed: ledgers are cut again once all have the proof.

Worlds as in test_full_summary.py, in which one member signs two contributions for one place of its feed. Some
nodes get the one, some the other, and the proof comes to each at another time.
"""

import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.certificates.full_summary import decode_full, encode_full
from atoll.node.daemon.certificates.summary import resumed
from atoll.node.daemon.consensus import machine
from atoll.node.daemon.consensus.orphans import ORPHAN_BODIES
from atoll.node.daemon.consensus.types import (
    EntryPayloadHeld,
    EntrySeen,
    EquivocatorsSeen,
    FetchOrphans,
    ReportOtherSummary,
)
from atoll.protocols.ids import digest
from atoll.protocols.ledger.records import Contribution, Vote
from tests.node.daemon.certificates import test_full_summary as whole
from tests.node.daemon.certificates.test_full_summary import EVERY, KEPT, MADE, SEEN, CertNode
from tests.node.daemon.consensus.epoch_world import LEASE, OWNER, PEERS, ROUNDS, RUN, World, final

window = whole.window
MORE = pytest.mark.slow(slice="test_ledgers_are_cut_again_and_all_write_the_same_bytes")


class ForkedNode(CertNode):
    """Holds one history of the liar's feed, and what it fetched by name of the other."""

    def __init__(self, number, probation=1, excise_rounds=0):
        self.proven, self.orphans = frozenset(), {}
        super().__init__(number, probation, excise_rounds)

    def boot(self, now):
        self.wanted = {}
        super().boot(now)
        self.feed(EquivocatorsSeen(self.proven))
        for entry in list(self.orphans.values()):
            self.feed_orphan(entry)

    def do(self, action):
        match action:
            case FetchOrphans(number, entries, proposals):
                self.wanted[number] = entries, proposals
            case ReportOtherSummary():
                SEEN["other summary"] += 1
            case _:
                super().do(action)

    def authors_in(self, number):
        return super().authors_in(number) | {name: author for name, author, _ in self.orphans.values()}

    def on_none(self):
        SEEN["none"] += 1
        assert not self.proven, "who has the proof needs no floor"

    def prove(self, author):
        if author not in self.proven:
            self.proven |= {author}
            self.feed(EquivocatorsSeen(self.proven))

    def hear_orphan(self, entry):
        name, author, _ = entry
        if author in self.proven and name not in self.places and name not in self.orphans:
            self.orphans[name] = entry
            SEEN["orphan"] += 1
            self.feed_orphan(entry)

    def feed_orphan(self, entry):
        if isinstance(entry[2], Contribution):
            self.feed(EntryPayloadHeld(entry[0]))
        self.feed(EntrySeen(*entry, True))

    def answer(self, other):
        """What the other asks for by name, of both histories (p2p/exchange/orphans.py)."""
        for number, wanted in list(other.wanted.items()):
            self.answer_of(other, number, *wanted)

    def answer_of(self, other, number, entries, proposals):
        for entry in [*self.ledger, *self.orphans.values()]:
            name, author, body = entry
            is_vote = isinstance(body, Vote) and body.proposal in proposals
            if not isinstance(body, ORPHAN_BODIES) or not (name in entries or (is_vote and body.round == number)):
                continue
            at, feed = self.places.get(name), other.feeds.get(author, [])
            if at is not None and at < len(feed) and feed[at][0] != name:
                other.prove(author)
            other.hear_orphan(entry)


class ForkedWorld(World):
    """Entries spread along one history only; who meets the other one has the proof, and passes it on."""

    def spread(self, chance=0.8):
        for node in self.nodes:
            for other in self.nodes:
                if not self.linked(node, other) or self.rng.random() > chance:
                    continue
                if self.rng.random() < 0.3:
                    for author in other.proven:
                        node.prove(author)
                for peer in PEERS[: len(self.nodes)]:
                    self.pass_on(node, other, peer)
                if any(map(any, node.wanted.values())):
                    other.answer(node)
                node.heard[other.peer] = self.now

    def pass_on(self, node, other, author):
        have, feed = node.counts.get(author, 0), other.feeds.get(author, [])
        if author in node.proven or len(feed) <= have:
            return
        if have and feed[have - 1][0] != node.feeds[author][-1][0]:
            node.prove(author)
            return
        most = self.rng.randint(1, 30) if node.state.live else len(feed)
        for entry in feed[have : have + most]:
            node.hear(entry)


def fork(world, liar):
    """The next contribution of the liar has a twin, which some of the others have instead."""
    world.rng.shuffle(others := [node for node in world.nodes if node is not liar])
    seq, number = liar.counts[liar.peer], max(liar.rounds) + 1
    made = [Contribution(number, digest(b"base"), digest(b"%d" % one), 1, 1, 64 + one, 1.0) for one in (0, 1)]
    for node, body in [(liar, made[0]), *((node, made[at % 2]) for at, node in enumerate(others))]:
        for entry in liar.feeds[liar.peer][node.counts.get(liar.peer, 0) : seq]:
            node.hear(entry)
        node.hear((digest(liar.peer.encode(), seq.to_bytes(4, "big"), repr(body).encode()), liar.peer, body))
    return number


def forked(seed):
    """A world some rounds after the fork, when all that are honest have the proof; and the round of the fork."""
    rng = random.Random(seed)
    world = ForkedWorld(seed, rng.randint(4, 6), node=ForkedNode)
    world.run(rng.randint(120, 160))
    liar = world.nodes[rng.randint(1, len(world.nodes) - 1)]
    number = fork(world, liar)
    world.run(rng.randint(0, 12))
    liar.is_up = False
    for _ in range(rng.randint(1, 3)):
        node = rng.choice([node for node in world.nodes if node is not liar])
        if rng.random() < 0.5:
            node.boot(world.now)
        else:
            world.side[node.peer] = 1
            world.run(rng.randint(1, 15))
            world.side[node.peer] = 0
        world.run(rng.randint(5, 30))
    return world, liar, number


def newcomer(node, liar):
    """With the summary of `node`, the records that it names, feeds from their floors, and the liar's by name."""
    full, places = node.full, node.places
    named = {name for floor in full.floors for name in floor.records}
    floors = {author: places[entry] for author, entry in full.places.items()}
    assert liar.peer not in floors
    kept = [e for e in node.whole if e[1] != liar.peer and (e[0] in named or places[e[0]] >= floors.get(e[1], 0))]
    assert {entry[0] for entry in kept} <= {entry[0] for entry in node.ledger}
    made = ForkedNode.__new__(ForkedNode)
    made.__dict__.update(node.__dict__)
    made.peer, made.ledger, made.finals, made.heard = PEERS[7], kept, {}, {}
    made.cut_at, made.old_finals, made.views = -1, {}, {}
    of_liar = [entry for entry in node.whole if entry[1] == liar.peer and isinstance(entry[2], ORPHAN_BODIES)]
    made.orphans = {entry[0]: entry for entry in [*of_liar, *node.orphans.values()]}
    made.rounds = {at: {a: n for a, n in each.items() if a != liar.peer} for at, each in node.rounds.items()}
    chosen = chosen_path([(author, body) for _, author, body in kept], node.peer)
    state = machine.begin(RUN, made.peer, ROUNDS, OWNER, lease_s=LEASE, chosen=chosen, summary_every=EVERY)
    made.begin = lambda _: resumed(state, full.summary, chosen)
    made.cut = lambda full: None
    made.boot(node.now)
    return made


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=MORE)])
def test_ledgers_are_cut_again_and_all_write_the_same_bytes(block):
    for seed in range(block * 4, block * 4 + 4):
        MADE.clear()
        world, liar, number = forked(seed)
        honest = [node for node in world.nodes if node is not liar]
        world.run(4 * (KEPT + 4 * EVERY))
        assert all(node.proven == {liar.peer} for node in honest)
        last = min(map(final, honest))
        assert last > number + KEPT + 2 * EVERY, f"seed {seed}: rounds stopped at {last}"
        for node in honest:
            assert node.cut_at > number, f"seed {seed}: the ledger is cut no more"
            assert {*node.full.places} == {each.peer for each in honest}, "the honest ones have floors"
            assert decode_full(encode_full(node.full)) == node.full
            late = newcomer(node, liar)
            assert (late.state.last_final, late.state.voters) == (node.state.last_final, node.state.voters)
            assert (late.state.tally, late.state.chain) == (node.state.tally, node.state.chain)
            assert late.fulls == [full for full in node.fulls if full.summary.round > node.full.summary.round]
            SEEN["its summaries"] += len(late.fulls)
        newest = [{full.summary.round: full.blob for full in [node.full, *node.fulls]} for node in honest]
        for at in set.intersection(*map(set, newest)):
            assert len({each[at] for each in newest}) == 1, f"seed {seed}: two summaries of round {at}"
            SEEN["the same"] += 1
    assert SEEN["orphan"] > 2, SEEN
    assert SEEN["the same"] > 4, SEEN
    assert SEEN["its summaries"] > 10, SEEN


def test_what_the_proof_of_one_says_of_others_is_nothing():
    """Of three authors one is proven: its floor goes, and the others' stay what they are without the proof."""
    state = replace(machine.begin(RUN, OWNER, ROUNDS, OWNER), last_final=9)
    names = [(author, digest(author.encode())) for author in PEERS[:3]]

    class Places:
        def place_of(self, entry):
            return 5 if entry in [name for _, name in names] else None

        def below(self, author, first, end, last, forks):
            return []

    def floors(*proven, orphan=False):
        maker = whole.SummaryMaker(Places())
        maker.on_counted(names)
        if orphan:
            maker.on_counted([(PEERS[1], digest(b"of the other history"))])
        made = [maker.make(state, whole.ReducerHistory(), proven) for _ in range(2)]
        assert made[0] == made[1], "it stays proven"
        return None if made[0] is None else made[0].places

    assert floors() == dict(names)
    assert floors(PEERS[1]) == floors(PEERS[1], orphan=True) == {a: n for a, n in names if a != PEERS[1]}
    assert floors(PEERS[6]) == dict(names), "who contributed nothing has no floor anyway"
    assert floors(orphan=True) is None, "before the proof this node cannot know where the feed stands"
    assert floors(PEERS[0], orphan=True) is None, "the proof against another one does not help"
