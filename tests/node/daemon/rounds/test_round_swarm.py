"""Both machines of 20 nodes on one virtual clock: different speeds, loss, two crashes, newcomers, a partition.

A small world of its own: a heap of timed calls, feeds that are gossiped entry by entry and compared now and
then, payloads that any holder serves, leases that expire, and a worker whose state is a hash over the sets and
that takes a given share of a round's steps at most before the round in flight is folded.
A crash forgets both machines and the worker's view; ledger, payloads, Θ_final and saved work stay.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count, pairwise

import pytest

from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.types import (
    Append,
    CheckDone,
    CheckRound,
    EntryPayloadHeld,
    EntrySeen,
    FetchMissing,
    FinalApplied,
    FinalityTick,
    FinalizeRound,
    Idle,
    MembersSeen,
    ReplayDone,
    ReportDivergence,
    ReportEquivocation,
    RoundClosed,
    SwitchEpoch,
)
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import RoundConfig
from atoll.node.daemon.rounds.types import (
    Announce,
    ContributionSeen,
    FetchPayload,
    Finish,
    FoldDone,
    FoldRound,
    LeasesChanged,
    PayloadHeld,
    PublishAck,
    PublishLease,
    RoundFinal,
    RoundTick,
    StartTraining,
    TrainingDone,
    TrainingSaved,
    WorkerReady,
)
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import Ack, Contribution, Prepare
from atoll.protocols.local.worker_messages import Pending

RUN = RunId(digest(b"round swarm"))
LEASE_S = 15.0
SLOWEST_S = 12.0
ROUNDS = 12
STEPS = 12
BLOCKING, SOME, ALL = 0, 5, 2 * STEPS
"""Steps of overlap: none, less than a round, more than a round."""
MORE = pytest.mark.slow(slice="test_twenty_nodes_with_crashes_newcomers_and_a_partition")


class Clock:
    """Timed calls in order; equal times in the order of their making."""

    def __init__(self) -> None:
        self.now, self._heap, self._ticket = 0.0, [], count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._ticket), call))

    def run_until(self, done: Callable[[], bool], limit_s: float) -> None:
        while not done():
            assert self._heap, "nothing will ever happen again"
            self.now, _, call = heapq.heappop(self._heap)
            assert self.now < limit_s, "too slow, or stuck"
            call()


class Node:
    def __init__(self, world: "World", peer: PeerId, train_s: float) -> None:
        self.world, self.peer, self.train_s = world, peer, train_s
        self.feeds: dict[PeerId, list[tuple[Digest, PeerId, object]]] = {}
        self.known: dict[Digest, tuple[PeerId, Contribution]] = {}
        self.payloads: set[Digest] = set()
        self.saved: dict[int, Pending] = {}
        self.finals: dict[int, FinalizeRound] = {}
        self.applied = -1
        self.life = 0
        self.up = False
        self.finished = False

    # --- life -------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.up, self.life = True, self.life + 1
        self.view: set[int] = set()
        self.stalled: tuple[int, Callable[[], None]] | None = None
        self.leases: dict[PeerId, tuple[tuple[str, int], float]] = {}
        self.lease: tuple[str, int] = ("syncing", 0)
        self.fetching: set[Digest] = set()
        self.applying = self.told = self.synced = False
        more = {"min_members": self.world.gather, "overlap_steps": self.world.overlap}
        config = RoundConfig(self.peer, ROUNDS, 171, 128, LEASE_S, **more)
        self.round = round_machine.begin(config)
        chosen = chosen_path(((who, body) for feed in self.feeds.values() for _, who, body in feed), self.peer)
        self.finality = finality.begin(RUN, self.peer, ROUNDS, self.world.owner, lease_s=LEASE_S, chosen=chosen)
        self.feed_finality(FinalityTick(self.world.clock.now))
        self.feed_finality(FinalApplied(Round(self.applied)))
        for feed in list(self.feeds.values()):
            for entry in list(feed):
                self.replay(entry)
        self.later(0.0, self.tick)
        self.later(3.0, self.go_live)

    def crash(self) -> None:
        self.up, self.life = False, self.life + 1

    def go_live(self) -> None:
        self.compare(force=True)
        self.synced = True
        self.feed_finality(ReplayDone())
        self.apply_finals()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Only if this life still lasts."""
        life = self.life
        self.world.clock.after(seconds, lambda: call() if self.up and self.life == life else None)

    def tick(self) -> None:
        now = self.world.clock.now
        self.leases = {p: (what, at) for p, (what, at) in self.leases.items() if now - at < LEASE_S}
        self.tell_leases()
        self.feed_finality(MembersSeen(frozenset(self.leases)))
        self.feed_round(RoundTick(now))
        self.feed_finality(FinalityTick(now))
        self.compare()
        self.world.spread_lease(self)
        self.apply_finals()
        self.later(1.0, self.tick)

    def tell_leases(self) -> None:
        views = {
            peer: MemberView(what[0], Round(what[1]), at, tokens_per_s=1.0)
            for peer, (what, at) in self.leases.items()
        }
        if views != self.round.members:
            self.feed_round(LeasesChanged(views, self.world.clock.now))

    # --- ledger and payloads ----------------------------------------------------------------------

    def write(self, body: object) -> None:
        feed = self.feeds.setdefault(self.peer, [])
        seq = len(feed)
        entry = (digest(self.peer.encode(), seq.to_bytes(4, "big"), repr(body).encode()), self.peer, body)
        feed.append(entry)
        self.later(0.0, lambda: self.replay(entry))
        self.world.spread_entry(self, seq, entry)

    def hear(self, seq: int, entry: tuple[Digest, PeerId, object]) -> None:
        feed = self.feeds.setdefault(entry[1], [])
        if seq == len(feed):
            feed.append(entry)
            self.replay(entry)

    def replay(self, entry: tuple[Digest, PeerId, object]) -> None:
        name, author, body = entry
        if isinstance(body, Contribution):
            self.known[name] = (author, body)
            held = body.payload in self.payloads
            if held:
                self.feed_finality(EntryPayloadHeld(name))
            self.feed_round(ContributionSeen(name, author, body, held, self.world.clock.now))
        self.feed_finality(EntrySeen(name, author, body))

    def compare(self, *, force: bool = False) -> None:
        """Take what one reachable peer has and we lack."""
        others = self.world.reachable(self)
        if not others or (not force and self.world.rng.random() < 0.5):
            return
        other = self.world.rng.choice(others)
        for author, feed in list(other.feeds.items()):
            for seq in range(len(self.feeds.get(author, [])), len(feed)):
                self.hear(seq, feed[seq])

    def fetch(self, payload: Digest) -> None:
        if payload in self.fetching or payload in self.payloads:
            return
        self.fetching.add(payload)
        self.later(self.world.rng.uniform(0.1, 0.6), lambda: self.try_fetch(payload))

    def try_fetch(self, payload: Digest) -> None:
        if any(payload in other.payloads for other in self.world.reachable(self)):
            self.payloads.add(payload)
            self.fetching.discard(payload)
            for entry, number in [(e, b.round) for e, (_, b) in self.known.items() if b.payload == payload]:
                self.feed_round(PayloadHeld(entry, number, self.world.clock.now))
                self.feed_finality(EntryPayloadHeld(entry))
        else:
            self.later(1.0, lambda: self.try_fetch(payload))

    # --- the machines and their actions -----------------------------------------------------------

    def feed_round(self, event: object) -> None:
        self.round, actions = round_machine.step(self.round, event)
        for action in actions:
            self.do_round(action)

    def feed_finality(self, event: object) -> None:
        self.finality, actions = finality.step(self.finality, event)
        for action in actions:
            self.do_finality(action)

    def do_round(self, action: object) -> None:
        now = self.world.clock.now
        match action:
            case StartTraining(number, slot, slots, after):
                assert 0 <= slot < slots
                self.world.started.setdefault(number, now)
                self.train(number, after)
            case Announce(pending):
                p = pending
                mine = [b.round for _, _, b in self.feeds.get(self.peer, []) if isinstance(b, Contribution)]
                if p.round not in mine:
                    self.write(Contribution(p.round, p.base, p.payload, p.steps, p.tokens, p.weight, p.loss))
            case FetchPayload(entry):
                self.fetch(self.known[entry][1].payload)
            case FoldRound(number, names):
                view = digest(*names)
                self.later(0.05, lambda: self.folded(number, view))
            case PublishAck(number, members, name, view):
                self.write(Ack(number, name, view))
                self.feed_finality(RoundClosed(number, members))
            case PublishLease(activity, number):
                self.lease = (activity, number)
                self.world.spread_lease(self)
                self.feed_finality(Idle(activity != "training", now))
            case Finish():
                self.finished = True

    def train(self, number: Round, after: int) -> None:
        """All steps; with a round in flight at most `overlap` of them before it is folded."""
        assert after in (-1, number - 1)
        assert self.world.overlap or after == -1
        ahead_s = self.train_s * min(self.world.overlap, STEPS) / STEPS if after >= 0 else self.train_s

        def rest() -> None:
            self.stalled = None
            self.later(self.train_s - ahead_s, lambda: self.trained(number))

        def halt() -> None:
            self.stalled = (after, rest)
            self.go_on()

        self.later(ahead_s, halt)

    def go_on(self) -> None:
        if self.stalled and (self.stalled[0] in self.view or self.stalled[0] <= self.applied):
            self.stalled[1]()

    def folded(self, number: Round, view: Digest) -> None:
        self.view.add(number)
        self.go_on()
        self.feed_round(FoldDone(number, view, self.world.clock.now))

    def trained(self, number: Round) -> None:
        self.world.busy_s += self.train_s
        payload = digest(b"payload", self.peer.encode(), number.to_bytes(2, "big"), bytes([self.life]))
        pending = Pending(number, digest(b"base"), payload, "", STEPS, 1, 64, 1.0)
        self.feed_round(TrainingDone(number, pending, self.train_s, self.world.clock.now))
        self.later(0.05, lambda: self.kept(pending))

    def kept(self, pending: Pending) -> None:
        self.saved[pending.round] = pending
        self.payloads.add(pending.payload)
        self.feed_round(TrainingSaved(pending, self.world.clock.now))

    def do_finality(self, action: object) -> None:
        match action:
            case Append(body):
                self.write(body)
            case CheckRound(number, names):
                state = digest(b"state", *names)
                self.later(0.05, lambda: self.feed_finality(CheckDone(number, names, state)))
            case FetchMissing(_, _, payloads):
                for entry in payloads:
                    self.fetch(self.known[entry][1].payload)
            case FinalizeRound(number, names, state):
                assert state == digest(b"state", *names)
                before = self.finals.setdefault(number, action)
                assert before == action, "a final set changed"
                self.apply_finals()
            case SwitchEpoch():
                self.crash()
                self.applied, self.finals, self.finished = -1, {}, False
                self.world.clock.after(1.0, self.boot)
            case ReportDivergence() | ReportEquivocation():
                raise AssertionError(f"among honest nodes: {action}")

    def apply_finals(self) -> None:
        action = self.finals.get(self.applied + 1)
        if not self.synced or self.applying:
            return
        if action is None:
            if not self.told:
                self.told = True
                self.feed_round(WorkerReady(self.applied, tuple(self.saved.values()), self.world.clock.now))
            return
        wanted = [self.known[name][1].payload for name in action.contributions]
        for payload in wanted:
            self.fetch(payload)
        if all(payload in self.payloads for payload in wanted):
            self.applying = True
            self.later(0.05, lambda: self.applied_final(action.round))

    def applied_final(self, number: Round) -> None:
        self.applied, self.applying = number, False
        self.go_on()
        self.feed_round(RoundFinal(number, self.world.clock.now))
        self.feed_finality(FinalApplied(number))
        self.apply_finals()


class World:
    def __init__(self, seed: int, count: int, gather: int, overlap: int = BLOCKING) -> None:
        self.rng, self.clock, self.gather, self.overlap = random.Random(seed), Clock(), gather, overlap
        self.busy_s = 0.0
        """Training of all nodes together."""
        self.cut: set[PeerId] = set()
        self.started: dict[int, float] = {}
        self.nodes = [Node(self, PeerId(f"peer-{n:02}"), self.rng.uniform(5.0, SLOWEST_S)) for n in range(count)]
        self.owner = self.nodes[0].peer

    def reachable(self, node: Node) -> list[Node]:
        side = node.peer in self.cut
        return [n for n in self.nodes if n is not node and n.up and (n.peer in self.cut) is side]

    def spread_entry(self, node: Node, seq: int, entry: tuple[Digest, PeerId, object]) -> None:
        for other in self.reachable(node):
            if self.rng.random() < 0.95:
                other.later(self.rng.uniform(0.02, 0.4), lambda other=other: other.hear(seq, entry))

    def spread_lease(self, node: Node) -> None:
        for other in self.reachable(node):
            if self.rng.random() < 0.95:
                other.later(0.05, lambda other=other, what=node.lease: self.hear_lease(other, node.peer, what))

    def hear_lease(self, node: Node, peer: PeerId, what: tuple[str, int]) -> None:
        node.leases[peer] = (what, self.clock.now)
        node.tell_leases()

    def newest(self) -> int:
        return max(self.started, default=-1)

    def until(self, done: Callable[[], bool], limit_s: float = 900.0) -> None:
        self.clock.run_until(done, self.clock.now + limit_s)

    def check(self, nodes: list[Node]) -> None:
        for number in range(ROUNDS):
            sets = {node.finals[number].contributions for node in nodes}
            assert len(sets) == 1, f"round {number} has {len(sets)} final sets"
        for node in nodes:
            rounds = [b.round for _, _, b in node.feeds.get(node.peer, []) if isinstance(b, Contribution)]
            assert len(rounds) == len(set(rounds)), f"{node.peer} contributed twice"

    def longest_gap_s(self) -> float:
        times = [self.started[number] for number in sorted(self.started)]
        return max(after - before for before, after in pairwise(times))


@pytest.mark.parametrize(
    ("seed", "overlap"),
    [
        (0, BLOCKING),
        (2, ALL),
        *(pytest.param(*case, marks=MORE) for case in [(1, BLOCKING), (2, BLOCKING), (0, SOME), (1, SOME)]),
    ],
)
def test_twenty_nodes_with_crashes_newcomers_and_a_partition(seed, overlap):
    world = World(seed, 20, 18, overlap)
    for node in world.nodes[:18]:
        node.boot()
    world.until(lambda: world.newest() >= 2)
    for node in world.nodes[3:5]:
        node.crash()
    world.nodes[18].boot()
    world.until(lambda: world.newest() >= 4)
    for node in world.nodes[3:5]:
        node.boot()
    world.nodes[19].boot()
    world.until(lambda: world.newest() >= 6)
    world.cut = {node.peer for node in world.rng.sample(world.nodes, 7)}
    healed_at = world.clock.now + 40.0
    world.until(lambda: world.clock.now >= healed_at)
    world.cut = set()
    world.until(lambda: all(node.finished for node in world.nodes))
    world.check(world.nodes)
    assert world.longest_gap_s() < 3 * SLOWEST_S
    authors = {world.nodes[0].known[name][0] for name in world.nodes[0].finals[ROUNDS - 1].contributions}
    assert len(authors) >= 14, "all are back in step"


@pytest.mark.parametrize("overlap", [BLOCKING, SOME, ALL])
@pytest.mark.parametrize("seed", range(10))
def test_four_nodes_through_random_deaths(seed, overlap):
    """One node at a time dies at a random moment and returns; the owner is no exception."""
    world = World(100 + seed, 4, 4, overlap)
    for node in world.nodes:
        node.boot()
    while not all(node.finished for node in world.nodes):
        quiet_until = world.clock.now + world.rng.uniform(1.0, 25.0)
        world.until(lambda at=quiet_until: world.clock.now >= at)
        assert world.clock.now < 1500.0, "stuck"
        victim = world.rng.choice(world.nodes)
        if not victim.finished:
            victim.crash()
            back_at = world.clock.now + world.rng.uniform(0.5, 30.0)
            world.until(lambda at=back_at: world.clock.now >= at)
            victim.boot()
    world.check(world.nodes)


@pytest.mark.parametrize("overlap", [BLOCKING, SOME, ALL])
@pytest.mark.parametrize("count", [2, 4])
def test_where_nobody_dies_or_lies_every_round_is_final_in_its_first_ballot(count, overlap):
    """Members differ in what they hold when a round closes, but not for long, and no vote is withheld for ever."""
    world = World(200 + count, count, count, overlap)
    for node in world.nodes:
        node.boot()
    world.until(lambda: all(node.finished for node in world.nodes))
    world.check(world.nodes)
    said = [body for feed in world.nodes[0].feeds.values() for _, _, body in feed]
    assert not [body for body in said if isinstance(body, Prepare)]


@pytest.mark.parametrize("overlap", [BLOCKING, SOME, ALL])
def test_one_node_alone_never_waits(overlap):
    world = World(7, 1, 1, overlap)
    node = world.nodes[0]
    node.boot()
    world.until(lambda: node.finished)
    assert world.longest_gap_s() < node.train_s + 0.5


@pytest.mark.parametrize(("slow_s", "many"), [(7.0, 2), (12.0, 0)])
def test_who_needs_longer_than_the_grace_is_late_where_the_faster_ones_are_a_quorum(slow_s, many):
    """Five of seven are one with 171 of 256. A real member takes as many steps as fit; those here take all."""
    world = World(9, 7, 7)
    for place, node in enumerate(world.nodes):
        node.train_s = 5.0 if place < 5 else slow_s
        node.boot()
    first, slow = world.nodes[0], {node.peer for node in world.nodes[5:]}
    world.until(lambda: len(first.finals) > 6)
    sets = [{first.known[name][0] for name in final.contributions} for final in first.finals.values()]
    assert [len(slow & authors) for authors in sets] == [many] * len(sets)
