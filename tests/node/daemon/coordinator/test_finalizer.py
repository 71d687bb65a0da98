"""Θ_final moves only to states that the certificates name, and no snapshot above its legal size is fetched."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import torch

from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.daemon.consensus.types import FinalApplied, FinalizeRound
from atoll.node.daemon.coordinator import finalizer
from atoll.node.daemon.coordinator.finalizer import PATIENCE_S, Finalizer
from atoll.node.daemon.coordinator.interfaces import RunContext
from atoll.node.daemon.coordinator.runtime import FaultGuard, WorkerClient
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.worker_messages import (
    AdoptReply,
    AdoptRequest,
    FinalizeReply,
    FinalizeRequest,
    SnapshotReply,
    StartReply,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.bounds import moments_max_bytes, snapshot_max_bytes
from tests.node.worker.session_home import ME, OTHER, SPEC

STATES = [digest(b"state", bytes([number])) for number in range(4)]
SNAPSHOT = digest(b"snapshot of round 2")
OWN = digest(b"snapshot of our own")


def final_round(number):
    return FinalizeRound(Round(number), (digest(b"contribution", bytes([number])),), STATES[number])


class Net:
    """A member that offers one snapshot of `size_bytes`. `fetch_blob` obeys its interface, the cap too."""

    def __init__(self, folder, size_bytes):
        self.folder, self.size_bytes = folder, size_bytes
        self.here, self.blamed, self.asked = set(), [], 0

    def leases(self):
        lease = Lease("training", Round(3), Round(2), SNAPSHOT, 2, 10.0)
        return {OTHER: (lease, 9.0)} if self.size_bytes else {}

    def neighbours(self):
        return [OTHER]

    def has_blob(self, blob):
        return blob in self.here

    def add_blob(self, path, *, move=False):
        return OWN

    def delete_blob(self, blob):
        self.here.discard(blob)

    def blame(self, peer, error):
        self.blamed.append((peer, type(error)))

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked += 1
        assert (blob, holders) == (SNAPSHOT, [OTHER])
        if self.size_bytes > max_bytes:
            raise DecodeError(f"blob has {self.size_bytes} bytes where at most {max_bytes} are legal")
        self.here.add(blob)
        return self.folder / "snapshot"


class Sets:
    """Payloads that are held or not; what the worker is asked goes straight to it."""

    def __init__(self, worker, is_held):
        self.worker, self.is_held = worker, is_held
        self.seen = {}

    def is_available(self, number, names):
        return self.is_held

    def fetch(self, number, names):
        assert not self.is_held

    def counted(self, number, names):
        return (number,)

    def counted_before(self, first, newest):
        return [each for at in range(newest + 1, first) for each in self.seen[at]]

    def set_applied(self, number, names):
        self.seen[number] = self.counted(number, names)
        return [OTHER]

    def drop(self, before, needed):
        return None

    async def ask(self, number, names, request_of, kind):
        return await self.worker.ask(request_of((), ()), kind)


class Worker:
    """Its fold gives `states`."""

    def __init__(self, states):
        self.states, self.adopted, self.ours = states, [], ()

    async def ask(self, ask, kind):
        match ask:
            case FinalizeRequest(number):
                return FinalizeReply(number, self.states[number])
            case AdoptRequest(number, _, state, ours):
                self.ours = ours
                self.adopted.append((number, state))
                return AdoptReply(number, state)
        return SnapshotReply(Round(0), STATES[0], "", 1)


class Rig:
    """A finalizer between fakes; `tell` lists what its machines were told."""

    def __init__(self, folder, *, states=STATES, size_bytes=0, is_held=True):
        self.net, self.process = Net(folder, size_bytes), Worker(states)
        self.log = log = RoundLog(folder, ME, lambda: 0.0)
        guard = FaultGuard(self.net, log)
        worker = WorkerClient(self.process, guard)
        worker.on_started()
        self.told = []
        machines = SimpleNamespace(feed_round=self.told.append, feed_finality=self.told.append)
        self.finalizer = Finalizer(
            context=RunContext(SPEC, ME, log, lambda: asyncio.get_running_loop().time()),
            net=self.net,
            spool=folder,
            queue=SimpleNamespace(start_task=self.start, post=lambda event: event()),
            machines=machines,
            worker=worker,
            guard=guard,
            sets=Sets(worker, is_held),
            is_synced=True,
        )

    def start(self, work, name):
        self.group.create_task(work, name=name)

    def applied(self):
        return [event.round for event in self.told if isinstance(event, FinalApplied)]


def play(rig, rounds, waits_s=0.0):
    """The rounds become final; then `waits_s` pass, with a look each second as in the driver."""

    async def main():
        async with asyncio.TaskGroup() as rig.group:
            rig.finalizer.on_worker_started(StartReply(-1, digest(b"start"), (), 1, "cpu", b""))
            for number in rounds:
                rig.finalizer.add(final_round(number))
            for _ in range(int(waits_s)):
                await asyncio.sleep(1.0)
                rig.finalizer.step()

    with contextlib.closing(rig.log):
        run_virtual(main())


def test_rounds_are_applied_in_order(tmp_path):
    rig = Rig(tmp_path)
    play(rig, (2, 0, 1))
    assert rig.finalizer.applied == 2
    assert rig.applied() == [-1, 0, 1, 2]


@pytest.mark.parametrize("number", [0, 1])
def test_a_fold_that_gives_another_state_than_the_certificate_ends_the_node(tmp_path, number):
    states = [*STATES]
    states[number] = digest(b"another state")
    rig = Rig(tmp_path, states=states)
    with pytest.raises(BaseExceptionGroup) as caught:
        play(rig, (0, 1))
    (fault,) = caught.value.exceptions
    assert isinstance(fault, Divergence)
    assert f"round {number}: our fold gives {states[number].hex()[:8]}" in str(fault)
    assert rig.finalizer.applied == number - 1
    assert number not in rig.applied()


def test_a_snapshot_that_is_needed_is_adopted(tmp_path):
    rig = Rig(tmp_path, size_bytes=snapshot_max_bytes(SPEC), is_held=False)
    play(rig, (0, 1, 2), PATIENCE_S + 5)
    assert rig.process.adopted == [(2, STATES[2])]
    assert rig.finalizer.applied == 2
    assert rig.net.blamed == []


def test_a_worker_that_lost_more_than_is_remembered_is_told_of_all_its_work_that_counted(tmp_path, monkeypatch):
    """Else it would give it once more."""
    monkeypatch.setattr(finalizer, "REMEMBERED", 1)
    rig = Rig(tmp_path)
    rig.net.size_bytes = 1
    play(rig, (0, 1, 2))
    rig.finalizer.sets.is_held = False

    async def again():
        async with asyncio.TaskGroup() as rig.group:
            rig.finalizer.on_worker_started(StartReply(-1, digest(b"start"), (), 1, "cpu", b""))
            for _ in range(int(PATIENCE_S + 5)):
                await asyncio.sleep(1.0)
                rig.finalizer.step()

    run_virtual(again())
    assert (rig.process.adopted, rig.process.ours) == ([(2, STATES[2])], (0, 1, 2))


def test_a_snapshot_above_its_legal_size_is_not_fetched(tmp_path):
    rig = Rig(tmp_path, size_bytes=snapshot_max_bytes(SPEC) + 1, is_held=False)
    play(rig, (0, 1, 2), PATIENCE_S + 5)
    assert rig.process.adopted == []
    assert rig.finalizer.applied == -1
    assert rig.net.asked == len(rig.net.blamed) >= 1
    assert set(rig.net.blamed) == {(OTHER, DecodeError)}


def test_legal_sizes_are_just_above_what_is_written(tmp_path):
    arena = arena_of(SPEC.model)
    theta = torch.zeros((arena.chunks, 4096), dtype=torch.int32)
    written = write_snapshot(tmp_path / "snapshot", Snapshot(theta, 2, STATES[2]), arena)
    assert written <= snapshot_max_bytes(SPEC) < 1.2 * written
    assert moments_max_bytes(SPEC, 0) < 3.5 * snapshot_max_bytes(SPEC)
