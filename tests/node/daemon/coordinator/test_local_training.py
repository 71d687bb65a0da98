"""Trained work is announced when it is safe on the disk, once, and only if the disk still has it as it was."""

import asyncio
import contextlib
import json
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.coordinator.local_training import LocalTraining
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.core.runtime import FaultGuard, WorkerClient, unless_needless
from atoll.node.daemon.rounds.machine import begin
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import Phase, RoundConfig
from atoll.node.daemon.rounds.types import StartTraining, TrainingDone, TrainingRefused, TrainingSaved
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.ipc.worker_process import WorkerDied
from atoll.p2p.system.atomic_files import disk
from atoll.p2p.system.disk_reports import DISK_RETRY_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DiskFault, PrivacySpent
from atoll.protocols.ids import PeerId, Round, digest
from atoll.protocols.ledger.records import Contribution, sign_entry
from atoll.protocols.local.contribution_forms import contribution_of
from atoll.protocols.local.worker_messages import (
    Pending,
    SaveReply,
    SaveRequest,
    StartReply,
    TrainProgress,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.privacy import PrivacySpec
from tests.node.worker.session_home import ME, SPEC, Identity

ROUND = Round(3)
DATA = b"payload of round 3"


class Process:
    """A worker that trains in a second, saves when `saves` is set, and dies at a request of class `dies_at`."""

    def __init__(self, pending, dies_at=None):
        self.pending, self.dies_at = pending, dies_at
        self.saves = asyncio.Event()
        self.steps: list[int] = []
        self.is_spent = False

    async def ask(self, ask, kind):
        if self.dies_at is type(ask):
            raise WorkerDied("the worker process ended")
        await asyncio.sleep(1.0)
        if isinstance(ask, TrainRequest):
            if self.is_spent:
                raise PrivacySpent("the next round would take ε to 9", hint="this node trains no more")
            self.steps.append(ask.steps)
            return TrainReply(self.pending, len(DATA), 1.0, uses=5)
        assert isinstance(ask, SaveRequest)
        await self.saves.wait()
        return SaveReply()


class Net:
    """The own feed and the blob store."""

    def __init__(self):
        self.feed, self.blobs = [], set()

    def has_blob(self, blob):
        return blob in self.blobs

    def add_blob(self, path, *, move=False, is_synced=False):
        assert is_synced, "the worker made it durable"
        with disk(path):
            self.blobs.add(blob := manifest_of_bytes(path.read_bytes()).id)
        return blob

    def publish(self, body):
        self.feed.append(sign_entry(SPEC.id, Identity(bytes([1]) * 32), len(self.feed), b"", body))
        return self.feed[-1]


class Rig:
    """One node's training of one round."""

    def __init__(self, folder, dies_at=None, spec=SPEC):
        path = folder / "payload"
        path.write_bytes(DATA)
        self.pending = Pending(ROUND, digest(b"base"), manifest_of_bytes(DATA).id, str(path), 2, 64, 64, 1.0)
        self.net, self.process, self.log = Net(), Process(self.pending, dies_at), RoundLog(folder, ME, lambda: 0.0)
        guard, self.told = FaultGuard(self.net, self.log, lambda: 0.0), []
        worker = WorkerClient(self.process, guard)
        worker.on_started()
        state = replace(
            begin(RoundConfig(ME, 99, 192, 128, 60.0)), phase=Phase.TRAIN, round=ROUND, final=ROUND - 1
        )
        self.trained: list[TrainingDone] = []
        self.beside: list[set[PeerId]] = []
        self.lacks_text = False

        def feed(event):
            self.told.append(type(event))
            self.trained += [event] if isinstance(event, TrainingDone) else []

        self.machines = SimpleNamespace(round=state, feed_round=feed)

        self.training = LocalTraining(
            context=RunContext(spec, ME, self.log, lambda: 0.0),
            net=self.net,
            machines=self.machines,
            worker=worker,
            guard=guard,
            contributions=ContributionIndex(ME, SimpleNamespace(trust=lambda record: None)),
            assignment=SimpleNamespace(experts=b"", trained=None, assign=self.assign),
            moments=SimpleNamespace(on_assigned=lambda before, now: None, offer=lambda released: None),
            leases=SimpleNamespace(members={}),
            assets=SimpleNamespace(prepare=self.prepare),
            verdicts=lambda: None,
            applied=lambda: Round(-1),
            is_reduced=lambda number: False,
        )

    def assign(self, members):
        self.beside.append(set(members))
        return b""

    async def prepare(self, turn, experts, report):
        """Half a minute, if the round waits for its text."""
        self.turn = turn
        if self.lacks_text:
            report("fetching shard 1 of 1 of the round's text")
            await asyncio.sleep(30.0)
        return self.lacks_text

    async def train(self, late_s=0.0):
        await self.training.train(StartTraining(ROUND, 0, 1, -1, late_s))


@pytest.fixture
def rig(tmp_path):
    rigs = []

    def made(**options):
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield made
    for each in rigs:
        each.log.close()


def test_work_is_saved_before_it_may_be_announced(rig):
    async def story():
        one = rig()
        async with asyncio.TaskGroup() as group:
            group.create_task(one.train())
            await asyncio.sleep(60.0)
            assert one.told == [TrainingDone], "the node goes on while the disk is slow"
            one.process.saves.set()
        assert one.told == [TrainingDone, TrainingSaved]

    run_virtual(story())


def test_a_round_that_is_begun_late_has_fewer_steps(rig):
    outer, pace = replace(SPEC.outer, stages=(Stage(0, 40),)), replace(SPEC.pace, least_256=64)
    step_tokens = SPEC.inner.batch * SPEC.model.context

    async def story():
        one = rig(spec=replace(SPEC, outer=outer, pace=pace))
        one.process.saves.set()
        view = MemberView("training", ROUND, 0.0, tokens_per_s=float(step_tokens))
        key = replace(view, round=Round(ROUND - 2), tokens_per_s=9e11, untried=True)
        keys = dict.fromkeys(map(PeerId, "wxyz"), key)
        one.machines.round = replace(one.machines.round, members={PeerId("other"): view} | keys)
        await one.train(late_s=15.0)
        assert one.process.steps == [25], "a step takes the others a second"
        assert one.trained[0].left_out == 15
        assert one.training._tempo.chosen == 40, "of the next rounds it takes all"
        assert one.beside == [{PeerId("other")}], "and who shows no work has no experts for it"

    run_virtual(story())


PRIVATE = replace(SPEC, privacy=PrivacySpec(clip=1.0, noise=1.0))


@pytest.mark.parametrize(("spec", "loss"), [(SPEC, 1.0), (PRIVATE, 0.0)])
def test_others_are_told_no_loss_of_private_steps(rig, spec, loss):
    async def story():
        one = rig(spec=spec)
        one.process.saves.set()
        await one.train()
        one.training.announce(one.pending)
        assert one.training.loss == loss, "in leases"
        assert one.net.feed[0].body.loss == loss
        assert one.log.rows[ROUND].train_loss == 1.0, "the node's own user sees it"
        assert one.training.uses == 5

    run_virtual(story())


def test_a_node_whose_epsilon_is_spent_says_so_in_one_line_and_rests(rig, caplog):
    async def story():
        one = rig(spec=PRIVATE)
        one.process.is_spent = True
        await one.train()
        assert one.told == [TrainingRefused]
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == "the next round would take ε to 9; this node trains no more"

    run_virtual(story())


def test_a_fresh_worker_says_how_often_the_data_were_used(rig):
    one = rig(spec=PRIVATE)
    one.training.recover(StartReply(-1, digest(b"start"), (), 1, "cpu", uses=7))
    assert one.training.uses == 7


def test_each_step_says_how_often_the_data_were_used(rig):
    """The reply of its round may never come: the worker dies, or the round is given up."""
    one = rig(spec=PRIVATE)
    parts = SimpleNamespace(training=one.training, worker=SimpleNamespace())
    Driver.on_progress(parts, TrainProgress(ROUND, 1, 2, 1.0, 10.0, 3))
    assert one.training.uses == 3


@pytest.mark.parametrize("dies_at", [TrainRequest, SaveRequest])
def test_work_of_a_worker_that_dies_before_the_save_is_not_announced(rig, dies_at):
    async def story():
        one = rig(dies_at=dies_at)
        with contextlib.suppress(WorkerDied):
            await one.train()
        assert TrainingSaved not in one.told

    run_virtual(story())


def test_work_is_announced_once_however_often_the_machine_asks(rig):
    one = rig()
    for _ in range(3):
        one.training.announce(one.pending)
    assert [type(entry.body) for entry in one.net.feed] == [Contribution]
    assert one.net.feed[0].body.payload == one.pending.payload


def test_work_that_the_disk_changed_is_not_announced(rig, tmp_path):
    one = rig()
    (tmp_path / "payload").write_bytes(b"rot" + DATA[3:])
    one.training.announce(one.pending)
    assert one.net.feed == []


def test_work_of_rounds_that_are_open_again_can_be_fetched_again(rig, tmp_path):
    """Round 3 was final in another chain: its payload went from the store, and round 4's from everywhere."""
    one = rig()
    one.training.announce(one.pending)
    gone = replace(contribution_of(one.pending), round=Round(4))
    one.training.contributions.add(digest(b"4"), ME, gone)
    one.net.blobs.clear()
    one.training.recover(StartReply(-1, digest(b"start"), (one.pending,), 1, "cpu", settled=2))
    put_back(one, one.pending)
    assert one.net.has_blob(one.pending.payload)
    assert len(one.net.feed) == 1, "it is not announced again"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    found = [
        (event["round"], event["again"], event["lost"]) for event in events if event["event"] == "chain_changed"
    ]
    assert found == [(3, 1, 1)]


def put_back(one, *trained):
    """What is told of payloads that are put back."""
    told = []
    asyncio.run(one.training.payloads_again(told.append).put_back(trained))
    return told


def test_the_loop_goes_on_while_payloads_are_put_back(rig):
    """After a hundred rounds apart that is four hundred syncs, while the other chain's model could be adopted."""
    one, threads = rig(), []
    one.training.announce(one.pending)
    one.net.blobs.clear()
    add = one.net.add_blob

    def add_in(path, **given):
        threads.append(threading.get_ident())
        return add(path, **given)

    one.net.add_blob = add_in
    assert put_back(one, one.pending) == [one.pending.payload], "who took it for missing is told"
    assert one.net.has_blob(one.pending.payload)
    assert threads != [threading.get_ident()]


def test_one_that_a_thread_of_the_driver_before_put_back_is_told(rig):
    """The thread ended after this driver had read the ledger, and the one that it told has ended."""
    one = rig()
    one.training.announce(one.pending)
    assert one.net.has_blob(one.pending.payload)
    assert put_back(one, one.pending) == [one.pending.payload]
    one.training.applied = lambda: one.pending.round
    assert put_back(one, one.pending) == [], "its round is in the worker's model"


def test_a_payload_that_the_disk_refuses_is_put_back_once_it_takes_it(rig):
    async def story():
        one, told = rig(), []
        one.training.announce(one.pending)
        one.net.blobs.clear()
        add, refusals = one.net.add_blob, [DiskFault("the disk is full")] * 2

        def add_later(path, **given):
            if refusals:
                raise refusals.pop()
            return add(path, **given)

        one.net.add_blob = add_later
        await one.training.payloads_again(told.append).put_back((one.pending,))
        assert one.training.guard.trouble
        assert told == [one.pending.payload]
        assert asyncio.get_running_loop().time() >= 2 * DISK_RETRY_S

    run_virtual(story())


@pytest.mark.parametrize("why", ["swept", "of a round that the worker's model has", "not announced"])
def test_what_nobody_needs_is_not_put_back(rig, tmp_path, why):
    one = rig()
    if why != "not announced":
        one.training.announce(one.pending)
    one.net.blobs.clear()
    if why == "swept":
        (tmp_path / "payload").unlink()
    elif why != "not announced":
        one.training.applied = lambda: one.pending.round
    assert put_back(one, one.pending) == []
    assert not one.training.guard.trouble


def test_a_round_that_went_on_while_its_text_was_fetched_is_not_trained(rig):
    async def story():
        one = rig()
        one.lacks_text = True
        async with asyncio.TaskGroup() as group:
            group.create_task(one.train())
            await asyncio.sleep(10.0)
            assert one.training.waiting == "fetching shard 1 of 1 of the round's text"
            assert (one.turn.round, one.turn.author, one.turn.slot, one.turn.slots) == (ROUND, ME, 0, 1)
            one.process.saves.set()
        assert one.process.steps, "it is trained once its text is here"
        other = rig()
        other.lacks_text = True
        async with asyncio.TaskGroup() as group:
            training = group.create_task(unless_needless(other.train()))
            await asyncio.sleep(10.0)
            other.machines.round = replace(other.machines.round, round=Round(ROUND + 1))
            await training
        assert not other.process.steps

    run_virtual(story())
