"""A swarm of trial members over the simulated network: rounds in virtual time, bytes counted by the hosts."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from atoll.node.daemon.reduction import machine as rounds
from atoll.node.learning.reduction.reducing import ReducerErrorFeedback
from atoll.p2p.discovery.discovery import TARGET
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import Leave
from atoll.protocols.ledger.reduction import OPENED_CHUNKS, ReductionRules
from atoll.protocols.run.slices import ReduceSpec, SlicePlan, all_gather, plan_of
from atoll_bench.topology.reduction_trial import WEIGHT, Landscape, States, TrialMember
from atoll_bench.topology.topology_peer import Behaviour, TrialPeer

T = TypeVar("T")

LATENCY_S, BANDWIDTH_BPS = 0.03, 100e6
COLLECT_S, PATIENCE_S, POLL_S = 600.0, 300.0, 0.5
REST_S = 3.0
"""Nothing is under way when nothing was done for so long: ids are announced by then."""
EARLIER = 3
"""Records that each member published before the first round: the trees of gossip grow with the first ones."""
"""Openings may cost this share of the payload bytes that a member gets in a reduced round, on average."""
FEEDBACK = 0.95


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried."""

    members: int
    reduced: bool
    rules: ReductionRules
    rounds: int = 1
    behaviour: Mapping[int, Behaviour] | None = None
    until_caught: bool = False
    always_sample: bool = False
    """Everybody opens a chunk in every round, whatever that costs."""
    seed: int = 1
    payloads: Sequence[bytes] = ()
    """Of round 0, by member, made before; else they are made when they are needed."""


class RoundResult(NamedTuple):
    """One round of all living members."""

    up: tuple[int, ...]
    """Bytes that each member sent; all that the host's streams carried."""
    down: tuple[int, ...]
    records: int
    """Bytes that one member's gossip sent, mean: records as often as they were sent, ids, requests."""
    digests: frozenset[Digest]
    """Of the states after the round: one if all agree."""
    first_digests: frozenset[Digest]
    """The same before anything was sampled."""
    openings: int
    caught: int
    """Members that hold a checked proof."""
    raw_slices: int
    """Slices that were folded from raw payloads alone, at one member."""
    seconds: float
    """Virtual, until the last member folded."""


def first_payloads(members: int, rules: ReductionRules, seed: int) -> list[bytes]:
    """Payloads of round 0: nothing is carried over yet, so that trials of one round can share them."""
    landscape = Landscape(seed, rules.chunks)
    return [TrialMember(rules, FEEDBACK).payload(landscape.delta_C4096(0, slot)) for slot in range(members)]


def run_trial(trial: Trial) -> list[RoundResult]:
    """All rounds of a trial; deterministic."""
    return run_virtual(_Swarm(trial).run(), trial.seed)


class _Swarm:
    """The world of the trial's members."""

    def __init__(self, trial: Trial) -> None:
        self.rules, self._trial = trial.rules, trial
        self._network = MemoryNetwork(trial.seed, latency_s=LATENCY_S, bandwidth_bps=BANDWIDTH_BPS)
        self._luck = random.Random(trial.seed)
        self._memory: dict[Hashable, Any] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._dead: set[PeerId] = set()
        self._near: dict[PeerId, set[PeerId]] = defaultdict(set)
        self._tensors: dict[PeerId, TrialMember] = {}
        self._states = States(trial.rules)
        self._state_of: dict[PeerId, Digest] = {}

    async def run(self) -> list[RoundResult]:
        """Start everybody, go through the rounds, end everybody."""
        async with asyncio.TaskGroup() as self._group:
            self._start()
            serving = [self._group.create_task(host.serve(lambda: None)) for host in self._hosts]
            serving += [self._group.create_task(peer.calls.serve()) for peer in self._peers]
            await asyncio.sleep(0)
            await self._connect()
            for _ in range(EARLIER):
                for peer in self._peers:
                    await peer.publish(Leave(Round(0)))
                await asyncio.sleep(REST_S)
            results = [await self._round(Round(0))]
            while len(results) < self._trial.rounds and not (self._trial.until_caught and results[-1].caught):
                results.append(await self._round(Round(len(results))))
            for task in serving:
                task.cancel()
        return results

    def neighbours(self, peer: PeerId) -> list[PeerId]:
        """See World."""
        return [name for name in sorted(self._near[peer]) if name not in self._dead]

    def spawn(self, work: Awaitable[None]) -> None:
        """See World."""

        async def run() -> None:
            await work

        task = self._group.create_task(run())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """See World."""
        if key not in self._memory:
            self._memory[key] = make()
        found: T = self._memory[key]
        return found

    def take_back(self, peer: PeerId, rest: ReducerErrorFeedback) -> None:
        """See World."""
        self._tensors[peer].take_back(rest)

    def kill(self, peer: PeerId) -> None:
        """See World."""
        self._dead.add(peer)
        self._network.kill(peer)
        for each in self._peers:
            each.gossip.forget(peer)

    def _start(self) -> None:
        names = [Identity(digest(b"trial", number.to_bytes(4, "little"))) for number in range(self._trial.members)]
        self._hosts = [self._network.host(name.peer_id) for name in names]
        behaviour = self._trial.behaviour or {}
        self._peers = [
            TrialPeer(name, host, self, behaviour.get(number, "honest"))
            for number, (name, host) in enumerate(zip(names, self._hosts, strict=True))
        ]
        self._state_of = {peer.me: self._states.first for peer in self._peers}

    async def _connect(self) -> None:
        """Connect all, for what is fetched; each gossips with TARGET random ones, and with those that chose it."""
        for at, host in enumerate(self._hosts):
            for other in self._hosts[at + 1 :]:
                await host.connect(PeerAddress(other.peer_id, await other.addresses()))
            others = [other.peer_id for other in self._hosts if other is not host]
            for chosen in self._luck.sample(others, min(TARGET, len(others))):
                self._near[host.peer_id].add(chosen)
                self._near[chosen].add(host.peer_id)

    def _plan(self) -> SlicePlan:
        """As if the final set of the deciding round had all members."""
        if not self._trial.reduced:
            return all_gather(self.rules.chunks)
        spec = ReduceSpec(above=1, k=self.rules.reduced_k)
        authors = frozenset(peer.me for peer in self._peers)
        return plan_of(self.rules.run, authors, frozenset(), self.rules.chunks, spec)

    async def _round(self, number: Round) -> RoundResult:
        before, began_s = self._traffic(), asyncio.get_running_loop().time()
        records = sum(peer.calls.notice_bytes for peer in self._peers)
        living, plan = self._living(), self._plan()
        for peer in living:
            peer.begin(number, plan)
        for slot, peer in enumerate(self._peers):
            if peer in living:
                self.spawn(peer.contribute(self._payload(number, slot), WEIGHT))
                self.spawn(self._close(peer, len(living)))
        await self._settle()
        seconds = asyncio.get_running_loop().time() - began_s
        first = self._digests()
        for peer in self._living():
            for _ in range(self._openings()):
                self.spawn(peer.sample(self._luck))
        await self._settle()
        last, after = self._digests(), self._traffic()
        self._state_of = last
        self._states.keep(last.values())
        self._memory.clear()
        return RoundResult(
            up=tuple(after[peer.me][0] - before[peer.me][0] for peer in self._living()),
            down=tuple(after[peer.me][1] - before[peer.me][1] for peer in self._living()),
            records=(sum(peer.calls.notice_bytes for peer in self._peers) - records) // len(living),
            digests=frozenset(last.values()),
            first_digests=frozenset(first.values()),
            openings=sum(peer.openings for peer in self._peers),
            caught=sum(peer.faults > 0 for peer in self._living()),
            raw_slices=self._raw_slices(),
            seconds=seconds,
        )

    @cached_property
    def _landscape(self) -> Landscape:
        return Landscape(self._trial.seed, self.rules.chunks)

    def _living(self) -> list[TrialPeer]:
        return [peer for peer in self._peers if peer.me not in self._dead]

    def _traffic(self) -> dict[PeerId, tuple[int, int]]:
        counted = {host.peer_id: host.statistics() for host in self._hosts}
        return {peer: (each.bytes_up, each.bytes_down) for peer, each in counted.items()}

    def _openings(self) -> int:
        """How many openings a member asks for in this round: the shipped share, whose fraction is drawn."""
        if self._trial.always_sample:
            return 1
        share = self.rules.chunks / OPENED_CHUNKS * ReduceSpec().sample_256 / 256 / (self._trial.members - 1)
        return int(share) + (self._luck.random() < share % 1.0)

    def _payload(self, number: Round, slot: int) -> bytes:
        if self._trial.payloads:
            return self._trial.payloads[slot]
        tensors = self._tensors.setdefault(self._peers[slot].me, TrialMember(self.rules, FEEDBACK))
        return tensors.payload(self._landscape.delta_C4096(number, slot))

    async def _close(self, peer: TrialPeer, expected: int) -> None:
        """The round machine around the member: everybody was heard, or the time is over."""
        await self._until(lambda: peer.is_complete(expected), COLLECT_S)
        peer.tell(rounds.Collected())
        await self._until(lambda: peer.me in self._dead or not peer.missing(), PATIENCE_S)
        peer.tell(rounds.PatienceOver())

    async def _until(self, condition: Callable[[], bool], most_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + most_s
        while not condition() and loop.time() < end_s:  # noqa: ASYNC110 the clock is virtual: a poll costs nothing
            await asyncio.sleep(POLL_S)

    async def _settle(self) -> None:
        """Until nothing is under way, gossip too."""
        while self._work:
            await asyncio.wait(tuple(self._work))
            await asyncio.sleep(REST_S)

    def _digests(self) -> dict[PeerId, Digest]:
        """Digest of every living member's state, from the bytes that it holds."""
        return {peer.me: self._digest(peer) for peer in self._living()}

    def _digest(self, peer: TrialPeer) -> Digest:
        if peer.fold is None:
            raise LocalFault("a member of the trial did not fold its round")
        parts = peer.fold.parts
        raw = {(offer.entry, part.span): peer.raw(offer, part.span) for part in parts for offer in part.raw}
        return self._states.after(self._state_of[peer.me], parts, raw, peer.payloads)

    def _raw_slices(self) -> int:
        fold = self._living()[0].fold
        return 0 if fold is None else sum(part.reduced is None for part in fold.parts)
