"""Whole nodes on virtual time: the real driver, swarm, ledger and blobs; only torch is replaced.

The fake worker obeys protocols/local/worker_messages.py: it answers the same asks with the same meanings,
takes virtual
time for each step, takes no more steps ahead of a fold than the run allows, and its "state" is a hash chain over
the final sets, so that equal states mean equal sets.
"""

import asyncio
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec.structs import replace

from atoll.node.config.roles import TRAINS, Work
from atoll.node.daemon.assets.summary_fetch import begin_with_summary, fetcher_of
from atoll.node.daemon.certificates.history import LedgerHistory
from atoll.node.daemon.consensus.chains.chain_exit import StateMark
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.driver_factory import build_driver
from atoll.node.daemon.leaving.hand_over import begin_hand_over
from atoll.node.daemon.leaving.neighbours import SwarmNeighbours
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.ipc.worker_process import WorkerDied
from atoll.node.runs.capacity.open_rounds import ANY_DISK
from atoll.node.runs.invites import opening_entry
from atoll.node.runs.presets import preset
from atoll.node.worker.folding.reduction_work import SliceWork, encode
from atoll.node.worker.round_trainer import Budget, weight_of
from atoll.p2p.blobs import pushed
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.protocols import identity
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import AtollError, CorruptFault, DecodeError, Divergence, OtherChain, Superseded
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.ledger.ownership import nothing
from atoll.protocols.ledger.records import Ack, Contribution, Proposal, Reduction, Vote
from atoll.protocols.ledger.reduction import rules_of
from atoll.protocols.ledger.rows import RowTree, check_root
from atoll.protocols.local.worker_messages import (
    NOTHING_YET,
    AdoptReply,
    AdoptRequest,
    Answer,
    Ask,
    CheckReply,
    CheckRequest,
    EvaluateReply,
    EvaluateRequest,
    FinalizeReply,
    FinalizeRequest,
    FoldReply,
    FoldRequest,
    JudgeRequest,
    OpenRequest,
    Pending,
    ReduceRequest,
    SaveReply,
    SaveRequest,
    Slice,
    SnapshotReply,
    SnapshotRequest,
    StartReply,
    TrainReply,
    TrainRequest,
    VerifyReply,
    VerifyRequest,
)
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.invite import Invite
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import (
    SPEC_VERSION,
    CompressSpec,
    DataSpec,
    InnerSpec,
    OuterSpec,
    RunSpec,
    Stage,
)
from atoll.protocols.run.slices import ReduceSpec
from atoll_bench.topology.topology_peer import twisted

PRESETS_PACE = preset("tiny", Identity(bytes(32)).peer_id, 1).pace
"""When rounds close as in the presets. Where none is reduced, members take all steps: how few a slow one takes
is for tests of that."""
HALF = {"quorum_256": 128, "grace_256": 256, "lease_s": 20.0}
"""For tests in which some of few nodes go on at once: three quarters of three nodes are all three."""
EXPERTS = 8
STEPS, CONTEXT = 20, 16
FIXED = 0.02
"""Share of the time of a whole step that a step of no sequences would take."""
DEADLINE_S = 4000.0


def run_spec(
    owner: PeerId, rounds: int, members: int, overlap_steps: int = 0, holders: int = 0,
    reduce: ReduceSpec | None = None, vocab: int = 256, **pace: int,
) -> RunSpec:  # fmt: skip
    """`holders` > 0: a mixture of EXPERTS experts, each trained by so many members. 64 of `vocab` are a chunk.

    `pace`: what is not as in the presets; a test that needs it says why.
    """
    least_256 = PRESETS_PACE.least_256 if reduce else 256
    return RunSpec(
        version=SPEC_VERSION,
        name="virtual",
        owner=owner,
        seed=1,
        model=ModelSpec(
            dim=64, layers=1, heads=2, kv_heads=1, ffn=64, vocab=vocab,
            context=CONTEXT, tied=True, rope_theta=1e4, norm_eps=1e-5,
            experts=ExpertsSpec(count=EXPERTS, per_token=1, ffn=64) if holders else None,
        ),
        data=DataSpec(source="synthetic:markov", tokenizer="bytes", digest=b""),
        inner=InnerSpec(
            lr=1e-3, lr_min=0.1, warmup_steps=1, total_steps=100, beta1=0.9, beta2=0.95, eps=1e-8,
            weight_decay=0.0, clip=1.0, batch=1,
        ),
        outer=OuterSpec(
            rounds=rounds, stages=(Stage(0, STEPS),), alpha_256=256, floor_256=0, overlap_steps=overlap_steps,
            holders=holders,
        ),
        compress=CompressSpec(codec="sparse2", k=64, feedback=0.95),
        pace=replace(PRESETS_PACE, **{"min_members": members, "least_256": least_256, **pace}),
        reduce=reduce,
    )  # fmt: skip


def set_state(base: bytes, ask: FoldRequest | CheckRequest | FinalizeRequest) -> Digest:
    """Of slices every byte counts: who holds other rows has another state.

    A set without Reductions gives the same state in slices as whole, as the real arithmetic does.
    """
    whole = ask.members
    if not any(each.reduced for each in ask.slices):
        assert len({tuple(member.entry for member in each.raw) for each in ask.slices}) <= 1
        whole += tuple(member for each in ask.slices[:1] for member in each.raw)
    parts = sorted(member.entry for member in whole)
    for each in ask.slices if whole is ask.members else ():
        parts += [repr(each.span).encode()]
        for member in sorted((*each.reduced, *each.raw), key=lambda member: member.entry):
            parts += [member.entry, bytes([member.weight % 256]), Path(member.path).read_bytes()]
    for one in [] if isinstance(ask, FoldRequest) else ask.excised:
        parts += [one.round.to_bytes(4, "big"), *sorted(m.entry for m in one.members), b"-", *sorted(one.gone)]
    return digest(base, ask.round.to_bytes(4, "big"), *parts)


def files_of(ask: FoldRequest | CheckRequest | FinalizeRequest) -> list[Path]:
    sliced = [m for each in ask.slices for m in (*each.reduced, *each.raw)]
    past = [] if isinstance(ask, FoldRequest) else [m for one in ask.excised for m in one.members]
    return [Path(member.path) for member in (*ask.members, *sliced, *past)]


def bpb_of(state: bytes) -> float:
    """The validation loss of a state."""
    return 1.0 + state[0] / 256


def snapshot_file(number: int, state: bytes) -> bytes:
    return number.to_bytes(4, "big", signed=True) + state


class FakeWorker:
    """One worker's disk and its answers. `train_s`: virtual seconds of a round's nominal steps."""

    def __init__(self, folder: Path, me: PeerId, train_s: float, spec: RunSpec) -> None:
        self.folder, self.me, self.train_s, self.spec = folder, me, train_s, spec
        self.arrived_s: dict[int, float] = {}
        """When each round was first folded in this life, or became final."""
        self.experts = nothing(spec)
        self.overflows: frozenset[PeerId] = frozenset()
        """Members without whose work a weight would leave its range."""
        self.owned: dict[int, bytes] = {}
        """Bitmap of the experts that were trained, by round."""
        self.lies = False
        """Its Reductions say the opposite of what was contributed."""
        self.residual = torch.zeros((arena_of(spec.model).chunks, 4096))
        self.slices: SliceWork | None = None
        self.renew_slices()
        self.busy_s = 0.0
        """Time of all steps."""
        self._trains = 0
        self._step_ends_s: list[float] = []
        """When each step of the round at hand ends."""
        self._moved = asyncio.Event()
        self.final, self.state = -1, digest(b"genesis")
        self.open: dict[int, FoldRequest] = {}
        self.pending: tuple[Pending, ...] = ()
        self.unsafe: tuple[Pending, ...] = ()
        """Trained, and lost with the worker until Keep was answered."""
        self.saved_late: set[int] = set()
        """Rounds that the disk refused at first: they close without this work, and the next ones begin."""
        self.trained: list[int] = []
        self.said: dict[int, tuple[int, ...]] = {}
        """What each round's Train named as said already."""
        self.lives = 0
        self.start_moves = 0
        """Signs of progress of its starts."""
        self.lies_about: int | None = None
        """Chunks of its slice that it lies about; None: all."""
        self.evaluated = 0
        """Validations since the test began."""
        self.evaluate_s = 0.0
        self.fixed = FIXED
        self.val_share = 1.0
        """By what it multiplies what it found: other than 1 is a lie."""
        self.mute = False
        self.opens = True
        """Whether it answers those who audit its Reductions."""
        self.judged: list[str] = []
        """Names of the files that were looked at as proofs."""
        self.sliced: dict[int, tuple[Slice, ...]] = {}
        """What final rounds were made of."""
        self.refuses: AtollError | None = None
        """Raised instead of every answer that needs the disk."""
        folder.mkdir(parents=True, exist_ok=True)

    def renew_slices(self) -> None:
        """What a worker's start does: the end of the chain is kept, as in a generation."""
        if self.spec.reduce is None:
            return
        old, rules = self.slices, rules_of(self.spec)
        load = lambda path: memoryview(Path(path).read_bytes())  # noqa: E731
        self.slices = SliceWork(rules, self.spec.outer.alpha_256, load, self.folder)
        if old is not None:
            self.slices.load(old.words(), old.tensors(), self.final)

    @property
    def layout(self) -> Layout:
        return Layout("sparse2", arena_of(self.spec.model).chunks, self.spec.compress.k)

    def started(self) -> StartReply:
        self.open, self.unsafe, self.arrived_s = {}, (), {}
        self.renew_slices()
        return StartReply(self.final, self.state, self.pending, 1, "cpu", self.experts)

    async def start(self) -> StartReply:
        """Its answer to Start, which takes no time."""
        self.start_moves += 1
        return self.started()

    def wake(self) -> None:
        """Whoever waits for a fold looks again."""
        self._moved.set()

    def arrived(self, number: int) -> None:
        self.arrived_s.setdefault(number, asyncio.get_running_loop().time())
        self.wake()

    def view(self) -> Digest:
        """As the real one's digest: that of the final state, once these sets are final."""
        state = self.state
        for number in sorted(self.open):
            state = set_state(state, self.open[number])
        return state

    def leave_chain(self, first: int) -> None:
        """Its state is of a chain that the node left. It has no error feedback that work could return to."""
        self.final, self.state = -1, digest(b"genesis")
        self.open, self.pending, self.unsafe = {}, (), ()
        self.lives += 1

    async def ask(self, ask: Ask, kind: type[Any]) -> Any:
        life = self.lives
        answer = await self._answer(ask)
        if life != self.lives:
            raise WorkerDied("the worker process ended")
        assert isinstance(answer, kind), answer
        return answer

    async def _answer(self, ask: Ask) -> Answer:
        life = self.lives
        await asyncio.sleep(0.01)
        if life != self.lives:
            raise WorkerDied("the worker process ended")
        if self.refuses is not None and not isinstance(ask, EvaluateRequest):
            if isinstance(ask, SaveRequest):
                self.saved_late.add(ask.round)
            raise self.refuses
        assert self.final > NOTHING_YET or isinstance(ask, VerifyRequest | JudgeRequest | AdoptRequest), ask
        match ask:
            case TrainRequest():
                return await self._train(ask)
            case SaveRequest():
                self.pending, self.unsafe = (*self.pending, *self.unsafe), ()
                return SaveReply()
            case ReduceRequest() | OpenRequest() | JudgeRequest():
                if not isinstance(ask, OpenRequest):
                    await self._end_of_step()
                return self._on_slices(ask)
            case VerifyRequest(path, _, _, rows, (span,)):
                self.slices.check(memoryview(Path(path).read_bytes()), rows, span)
                return VerifyReply()
            case VerifyRequest(path, number, experts, rows):
                if Path(path).stat().st_size != payload_size(self.spec, number, experts):
                    raise DecodeError("not a payload")
                if rows:
                    check_root(Path(path).read_bytes(), self.layout, rows)
                return VerifyReply()
            case FoldRequest() | CheckRequest() | FinalizeRequest() if not all(
                path.exists() for path in files_of(ask)
            ):
                raise CorruptFault("a payload is gone")
            case (
                FoldRequest(number, members) | CheckRequest(number, members) | FinalizeRequest(number, members)
            ) if any(
                Path(member.path).stat().st_size != payload_size(self.spec, number, member.experts)
                for member in members
            ):
                raise DecodeError("not a payload")
            case FoldRequest(number):
                if number > self.final:
                    self.open[number] = ask
                    self.arrived(number)
                return FoldReply(number, self.view())
            case CheckRequest(number, _) if number <= self.final:
                raise Superseded(f"round {number} is final already")
            case CheckRequest(number):
                assert number == self.final + 1
                gone = {m.author for one in ask.excised for m in one.members if m.entry in one.gone}
                if gone & self.overflows:
                    raise Divergence("a weight left its range")
                return CheckReply(number, set_state(self.state, ask))
            case FinalizeRequest(number):
                assert number == self.final + 1
                self.state, self.final = set_state(self.state, ask), number
                self.sliced[number] = ask.slices
                self.open.pop(number, None)
                if self.slices is not None:
                    counted = {m.payload for each in ask.slices for m in each.reduced}
                    self.slices.close_rounds(number, counted, self.residual)
                self.pending = tuple(p for p in self.pending if p.round > number)
                self.arrived(number)
                return FinalizeReply(number, self.state)
            case SnapshotRequest(path):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(snapshot_file(self.final, self.state))
                return SnapshotReply(self.final, self.state, path, 36)
            case AdoptRequest(number, path, state):
                data = Path(path).read_bytes()
                if data != snapshot_file(number, state):
                    is_lie = data[:4] != snapshot_file(number, state)[:4]
                    raise (DecodeError if is_lie else OtherChain)("another snapshot")
                self.final, self.state, self.open = number, state, {}
                self.arrived(number)
                return AdoptReply(number, state)
            case EvaluateRequest():
                self.evaluated += 1
                await asyncio.sleep(self.evaluate_s)
                return EvaluateReply(self.view(), bpb_of(self.view()) * self.val_share, 1.0, self.evaluate_s)
        raise AssertionError(ask)

    async def _train(self, ask: TrainRequest) -> TrainReply:
        base = self.view()
        self._check_flight(ask)
        self._trains += 1
        self.wake()
        ahead = min(ask.steps, ask.ahead) if ask.after >= 0 else ask.steps
        now, began_s = (self.lives, self._trains), asyncio.get_running_loop().time()
        budget = Budget(ask, ask.steps, ask.sequences or self.spec.inner.batch)
        done, trained_s = await self._steps(ahead, budget, now)
        while ask.after > self.final and ask.after not in self.open:
            self._moved.clear()
            await self._moved.wait()
            self._check_life(now)
        done, trained_s = await self._steps(ask.steps, budget, now, done, trained_s)
        self.experts = self.owned[ask.round] = ask.experts
        stale, number = self.spec.pace.stale, ask.round
        if stale:
            number = min(stale.counts_in(ask.round, self.final), self.spec.outer.rounds - 1)
        data = self._payload(ask)
        path = self.folder / f"{ask.round}.payload"
        path.write_bytes(data)
        tokens = CONTEXT * budget.taken
        weight = weight_of(tokens, CONTEXT * STEPS * self.spec.inner.batch)
        blob = manifest_of_bytes(data).id
        age = bytes([number - ask.round] if number > ask.round else [])
        form = age if self.slices is None else RowTree(data, self.layout).root
        words = (number, base, blob, str(path), done, tokens, weight, 1.0, ask.experts, form)
        pending = Pending(*words)
        self.unsafe = (*self.unsafe, pending)
        self.trained.append(ask.round)
        self.said[ask.round] = ask.said
        late_s = max(0.0, self.arrived_s.get(ask.after, began_s) - began_s)
        step_s = trained_s / done
        overlapped = min(ahead, math.ceil(late_s / step_s))
        return TrainReply(pending, len(data), trained_s, overlapped, max(0.0, late_s - ahead * step_s))

    def _payload(self, ask: TrainRequest) -> bytes:
        luck = random.Random(f"{self.me} {ask.round}")
        if self.slices is None:
            return luck.randbytes(payload_size(self.spec, ask.round, ask.experts))
        seed = torch.Generator().manual_seed(luck.getrandbits(32))
        return encode(torch.randn((self.layout.chunks, 4096), generator=seed) * 1e-3, self.layout.k)

    async def _end_of_step(self) -> None:
        """The real worker reduces and judges between two steps, however long a step is."""
        life, now_s = self.lives, asyncio.get_running_loop().time()
        await asyncio.sleep(min((end for end in self._step_ends_s if end > now_s), default=now_s) - now_s)
        if life != self.lives:
            raise WorkerDied("the worker process ended")

    def _on_slices(self, ask: ReduceRequest | OpenRequest | JudgeRequest) -> Answer:
        assert self.slices is not None
        match ask:
            case OpenRequest() if not self.opens:
                raise AtollError("this reducer opens nothing")
            case OpenRequest():
                return self.slices.open(ask)
            case JudgeRequest():
                self.judged.append(Path(ask.path).stem)
                return self.slices.judge(ask)
        if self.mute:
            raise AtollError("this reducer never answers")
        made = self.slices._reducer.reduce
        if self.lies:
            self.slices._reducer.reduce = lambda span, rows: (
                twisted(made(span, rows)[0], self.spec.reduce.k, self.lies_about),
                None,
            )
        try:
            return self.slices.reduce(ask, self.residual)
        finally:
            self.slices._reducer.reduce = made

    async def _steps(
        self, count: int, budget: Budget, now: tuple[int, int], done: int = 0, trained_s: float = 0.0
    ) -> tuple[int, float]:
        """Steps up to the `count`-th, or to the end; returns how many are done, and their time.

        Fractions of a second would cost more than they show: all steps in one sleep.
        """
        before_s, began_s = trained_s, asyncio.get_running_loop().time()
        self._step_ends_s = []
        while done < min(count, budget.steps):
            # What does not depend on the number of sequences: the optimizer, above all.
            share = self.fixed + (1 - self.fixed) * budget.sequences / self.spec.inner.batch
            trained_s, done = trained_s + share * self.train_s / STEPS, done + 1
            budget.took_step(done, trained_s)
            self._step_ends_s.append(began_s + trained_s - before_s)
        await asyncio.sleep(trained_s - before_s)
        self._check_life(now)
        self.busy_s += trained_s - before_s
        return done, trained_s

    def _check_life(self, now: tuple[int, int]) -> None:
        if now[0] != self.lives:
            raise WorkerDied("the worker process ended")
        if now[1] != self._trains:
            raise Superseded("another round took the place of this one")

    def _check_flight(self, ask: TrainRequest) -> None:
        """One round at most may be in flight; all before it with work of ours that was saved are in the view."""
        assert ask.after == -1 or (self.spec.outer.overlap_steps > 0 and ask.after == ask.round - 1)
        ours = {
            pending.round for pending in (*self.pending, *self.unsafe) if self.final < pending.round < ask.round
        }
        assert ours - {ask.after} - self.saved_late <= set(self.open), (ask, ours, set(self.open))


class MarkOf(StateMark):
    """A mark that is put by a function."""

    def __init__(self, put: Callable[[int], None]) -> None:
        self.put = put


class Node:
    """A node of the virtual swarm; its worker's disk survives `kill`."""

    def __init__(self, number: int, world: "World", train_s: float) -> None:
        self.number, self.world = number, world
        self.identity = Identity(bytes([number + 1]) * 32)
        self.peer = self.identity.peer_id
        self.home = world.root / f"n{number}"
        self.home.mkdir(exist_ok=True)
        self.worker = world.worker(self.home / "spool", self.peer, train_s, world.spec)
        if world.spec.start:
            self.worker.final, self.worker.state = NOTHING_YET, digest(b"nothing")
        self.driver: Driver | None = None
        self.swarm: Swarm | None = None
        self.task: asyncio.Task[None] | None = None
        self.works: tuple[asyncio.Task[None], ...] = ()
        """What belongs to a chain, and ends before the network does when the node stops."""
        self.outranked = asyncio.Event()
        self.left: list[int] = []
        """Where the chain that it leaves ends; None: it begins with a summary, on the same chain."""
        self.work = TRAINS
        self.recent: tuple[int, int] | None = None
        """Rounds whose records its ledger keeps, and rounds between two cuts; None: it keeps all."""
        self.open_rounds = ANY_DISK
        """How many rounds it lets be open."""

    async def crash_worker(self, down_s: float) -> None:
        """The worker dies now and is back after a while, as after an out-of-memory kill."""
        assert self.driver is not None
        self.worker.lives += 1
        self.worker.wake()
        self.driver.on_worker_gone("the worker died")
        await asyncio.sleep(down_s)
        await self.driver.on_started(self.worker.started())

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        host = self.world.network.host(self.peer)
        seeds = [PeerAddress(h.peer_id, (h.maddr,)) for n, h in self.world.hosts.items() if n != self.number][:3]
        self.world.hosts[self.number] = host
        spec = self.world.spec
        swarm = Swarm(
            host=host, identity=self.identity, run=self.world.spec.id, home=self.home, seeds=seeds,
            target=self.world.target, now=loop.time, wall_s=loop.time, rng=random.Random(self.number),
            gate=AdmissionGate(spec, self.peer, loop.time) if spec.admission != AdmissionSpec() else None,
        )  # fmt: skip
        log = RoundLog(self.home, self.peer, loop.time)
        opening = opening_entry(spec, self.peer, self.world.invite, 0)
        net = SwarmNetwork(swarm, host, self.peer, loop.time, opening, folder=self.home)
        context = RunContext(spec, self.peer, log, loop.time, name=self.world.name)
        if spec.history:
            fetcher = fetcher_of(spec, swarm, lambda: self.driver.finality.last_final if self.driver else -1)
            net.bring_summary = lambda: begin_with_summary(fetcher, lambda: self._leave_chain(None))
        self._mark_states()  # it was killed before it could change its chain
        self.swarm, self.driver = swarm, self._build(context, swarm, net)
        try:
            async with asyncio.TaskGroup() as group:
                up = asyncio.Event()
                group.create_task(swarm.serve(up.set))
                await up.wait()
                while True:
                    await self._live_in_chain(group, net)
                    await self._change_chain(context, swarm, net)
        finally:
            log.close()

    def _build(self, context: RunContext, swarm: Swarm, net: SwarmNetwork) -> Driver:
        """The driver of a chain, as `CurrentChain` builds it."""
        spec = self.world.spec
        driver = build_driver(
            context,
            net,
            self.worker,
            self.home / "spool",
            work=self.work,
            room=self.world.room,
            rng=random.Random(f"samples {self.number}"),
            history=LedgerHistory(
                swarm.ledger, self.recent is None, *(self.recent or ()), spec=spec if spec.history else None
            ),
            open_rounds=self.open_rounds,
        )
        driver.chain_exit.mark, driver.chain_exit.begin_again = MarkOf(self._mark), self._leave_chain
        net.listen(driver)
        return driver

    async def _live_in_chain(self, group: asyncio.TaskGroup, net: SwarmNetwork) -> None:
        """Until the node must leave its chain."""
        assert self.driver is not None
        driver, replayed = self.driver, asyncio.Event()
        self.works = (group.create_task(driver.serve(replayed.set)),)
        await replayed.wait()
        self.works += (group.create_task(net.carry(driver, self.world.spec.pace.lease_s)),)
        if self.work.has_model:
            self.works += (group.create_task(self._start_worker(driver)),)
        await self.outranked.wait()

    async def _start_worker(self, driver: Driver) -> None:
        await driver.on_started(await self.worker.start())

    def _leave_chain(self, first: int | None) -> None:
        """As `Daemon.leave_chain`."""
        if first is not None:
            self.world.changes.append((self.number, first))
        self.outranked.set()

    def _mark(self, first: int) -> None:
        """As `ChainMark`: the next session of the worker reads it."""
        self.left = [min(first, *self.left)] if self.left else [first]

    async def _change_chain(self, context: RunContext, swarm: Swarm, net: SwarmNetwork) -> None:
        """As `Daemon` does: over the same network, with what the worker makes of the state of the other chain."""
        for task in self.works:
            task.cancel()
        await asyncio.wait(self.works)
        leaves = any(first is not None for first in self.left)
        self._mark_states()
        net.forget_chain()
        self.driver = self._build(context, swarm, net)
        self.driver.finalizer.left_with = Round(-1) if leaves else None

    def _mark_states(self) -> None:
        for first in self.left:
            self.worker.leave_chain(first)
        self.left.clear()
        self.outranked.clear()


class World:
    """The network, the nodes, and what must hold between them."""

    def __init__(
        self, root: Path, rounds: int, members: int, latency_s: float = 0.02, loss: float = 0.0,
        room: int | None = None, target: int = 8,
        worker: Callable[[Path, PeerId, float, RunSpec], Any] = FakeWorker,
        adjust: Callable[[RunSpec], RunSpec] = lambda spec: spec, name: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """`room`: experts that a node may train; `target`: connections that a node wants to have; `name`: of all.

        `more`: overlap_steps, holders, reduce, vocab, and keys of PaceSpec. `adjust`: the rest of the RunSpec.
        `worker`: what stands for the worker process.
        """
        self.worker = worker
        self.room, self.target, self.name = room, target, name
        self.root = root
        self.network = MemoryNetwork(seed=1, latency_s=latency_s, loss=loss)
        self.spec = adjust(run_spec(Identity(bytes([1]) * 32).peer_id, rounds, members, **more))
        self.invite: Invite | None = None
        """What the nodes joined with."""
        self.nodes: dict[int, Node] = {}
        self.hosts: dict[int, MemoryHost] = {}
        self._group = asyncio.TaskGroup()
        self.changes: list[tuple[int, int]] = []
        """Nodes that joined another chain, with the first round that it decides."""

    async def __aenter__(self) -> "World":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for number in list(self.nodes):
            await self.kill(number)
        await self._group.__aexit__(*error)

    def start(
        self, number: int, train_s: float = 10.0, work: Work = TRAINS, recent: tuple[int, int] | None = None
    ) -> Node:
        node = self.nodes.get(number) or Node(number, self, train_s)
        node.work, node.recent = work, recent or node.recent
        if number in self.nodes:
            self.network.revive(node.peer)
        self.nodes[number] = node
        node.task = self._group.create_task(node.live())
        return node

    async def kill(self, number: int) -> None:
        """As kill -9: nothing is said, the disk stays as it is."""
        node = self.nodes[number]
        if node.task is not None:
            self.network.kill(node.peer)
            node.task.cancel()
            await asyncio.wait([node.task])
            node.task = None

    async def stop(self, number: int) -> None:
        """As `atoll stop`: the node leaves in good order."""
        node = self.nodes[number]
        assert node.driver is not None
        assert node.swarm is not None
        for task in node.works:
            task.cancel()
        await asyncio.wait(node.works)
        if node.driver.leave():
            net = node.driver.net
            assert isinstance(net, SwarmNetwork)
            neighbours = SwarmNeighbours(node.swarm, net)
            await begin_hand_over(node.driver, neighbours).run()
        await self.kill(number)

    async def until(self, done: Callable[[], bool], limit_s: float = DEADLINE_S, look_s: float = 0.5) -> float:
        """Wait for `done`, looking every `look_s`; virtual seconds that took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not done():
            assert loop.time() - began < limit_s, self.describe()
            await asyncio.sleep(look_s)
        return loop.time() - began

    def all_final(self, number: int | None = None) -> bool:
        last = self.spec.outer.rounds - 1 if number is None else number
        return all(node.worker.final >= last for node in self.nodes.values() if node.task is not None)

    def newest(self) -> int:
        return max((n.driver.round.round for n in self.nodes.values() if n.driver is not None), default=-1)

    def describe(self) -> str:
        """Where everybody is, for a test that waited in vain."""
        return "\n".join(
            f"{n.number}: final {n.worker.final}, known final {n.driver.finality.last_final}, "
            f"{n.driver.round.phase} {n.driver.round.round}, attempt {n.driver.finality.attempt}"
            for n in self.nodes.values()
            if n.driver is not None
        )

    def check_agreement(self) -> None:
        """One final state per round on all nodes, and nobody contributes, votes or proposes twice."""
        states: dict[int, set[str]] = {}
        for node in self.nodes.values():
            assert node.driver is not None
            for row in node.driver.context.log.rows.values():
                if row.final:
                    states.setdefault(row.round, set()).add(row.digest)
            if node.swarm is not None:
                counted = node.swarm.newcomers.shares._rounds.values()
                assert max(counted, default=0) <= node.driver.finality.last_final + 1, "an epoch is no work"
        assert {number: len(found) for number, found in states.items() if len(found) > 1} == {}

    async def check_feeds(self) -> None:
        """One contribution per author and round; one vote per author, round and ballot."""
        swarm = next(node.swarm for node in self.nodes.values() if node.task is not None)
        assert swarm is not None
        seen: set[tuple[object, ...]] = set()
        for _, entry in swarm.ledger.since(0, 1 << 20):
            key: tuple[object, ...]
            match entry.body:
                case Reduction(number):
                    key = ("reduction", entry.author, number)
                case Contribution(number):
                    key = ("contribution", entry.author, number)
                case Vote(number, ballot):
                    key = ("vote", entry.author, number, ballot)
                case Proposal(number, ballot):
                    key = ("proposal", entry.author, number, ballot)
                case Ack():
                    continue
                case _:
                    continue
            assert key not in seen, key
            seen.add(key)


class OnceChecked:
    """A public key that remembers what it found to be signed by its owner; what is not, it checks each time."""

    def __init__(self, key: bytes) -> None:
        self._key = Ed25519PublicKey.from_public_bytes(key)
        self._signed: set[tuple[bytes, bytes]] = set()

    def verify(self, signature: bytes, message: bytes) -> None:
        if (signature, message) not in self._signed:
            self._key.verify(signature, message)
            self._signed.add((signature, message))


@pytest.fixture(autouse=True)
def signatures_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a world are in one process, and each checks every signature: 2 to 9 % of the CPU."""
    monkeypatch.setattr(identity, "Ed25519PublicKey", SimpleNamespace(from_public_bytes=cache(OnceChecked)))


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads are asked for, as those of all but the smallest models are: none comes along with its record."""
    monkeypatch.setattr(pushed, "PUSHED_MAX_BYTES", 0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Homes in memory where there is a tmpfs: twenty nodes write and fsync a lot."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as folder:
        yield lambda rounds, members, **more: World(Path(tempfile.mkdtemp(dir=folder)), rounds, members, **more)
