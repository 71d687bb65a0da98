"""Θ_final moves only to states that the certificates name, and no snapshot above its legal size is fetched."""

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.daemon.consensus.types import Correction, FinalApplied, FinalizeRound
from atoll.node.daemon.coordinator import finalizer
from atoll.node.daemon.coordinator.finalizer import PATIENCE_S, Finalizer
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.core.runtime import FaultGuard, WorkerClient
from atoll.node.daemon.rounds.types import RoundFinal
from atoll.node.daemon.snapshots.offers import LEFT_LATE, SnapshotOffer
from atoll.node.daemon.snapshots.search import PARTS_MOST
from atoll.node.daemon.snapshots.turns import ALONE_S, AT_ONCE, FIRST_S, STAGGER_S
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.p2p.blobs.fetch import STALL_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError, Divergence, OtherChain, Unreachable
from atoll.protocols.identity import Identity
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

    def is_tried(self, peer):
        return peer == OTHER

    def fetched_bytes(self, blob):
        return 0

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
        self.worker, self.is_held, self.dropped = worker, is_held, []
        self.seen, self.fetched = {}, set()
        self.index = SimpleNamespace(authors=lambda names: [])

    def is_available(self, number, names):
        return self.is_held

    def are_correctable(self, corrections, until):
        self.lacks = bool(corrections)
        return not corrections

    def fetch(self, number, names):
        assert not self.is_held or self.lacks
        self.fetched.add(number)

    def counted(self, number, names):
        return (number,)

    def counted_before(self, first, newest):
        return [each for at in range(newest + 1, first) for each in self.seen[at]]

    def set_applied(self, number, names):
        self.seen[number] = self.counted(number, names)
        return [OTHER]

    def drop(self, before, needed):
        self.dropped.append(before)

    async def ask(self, number, names, request_of, kind, corrections=()):
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

    def __init__(self, folder, *, states=STATES, size_bytes=0, is_held=True, spec=SPEC, net=None, process=None):
        self.net, self.process = net or Net(folder, size_bytes), process or Worker(states)
        self.log = log = RoundLog(folder, ME, lambda: 0.0)
        guard = FaultGuard(self.net, log, lambda: 0.0)
        worker = WorkerClient(self.process, guard)
        worker.on_started()
        self.told = []
        machines = SimpleNamespace(feed_round=self.told.append, feed_finality=self.told.append)
        self.finalizer = Finalizer(
            context=RunContext(spec, ME, log, lambda: asyncio.get_running_loop().time()),
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


@pytest.mark.parametrize(("rounds", "fetched"), [((2, 1, 0), {0, 1, 2}), ((3, 2, 1, 0), {0})])
def test_payloads_of_few_rounds_are_fetched_together(tmp_path, monkeypatch, rounds, fetched):
    monkeypatch.setattr(finalizer, "SNAPSHOT_EVERY", 4)
    rig = Rig(tmp_path, is_held=False)
    play(rig, rounds)
    assert rig.finalizer.sets.fetched == fetched


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


@pytest.mark.parametrize("is_of_a_chain", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_state_that_a_start_found_is_looked_at_when_its_round_is_final(tmp_path, is_known, is_of_a_chain):
    """It was ahead of all that the ledger knew: its chain is left, or its fold went wrong."""
    rig, left = Rig(tmp_path), []

    def leave(number, state) -> bool:
        left.append((number, state))
        return is_of_a_chain

    rig.finalizer.leave_unmarked = leave
    of_another = StartReply(1, digest(b"another state"), (), 1, "cpu", b"")

    async def main():
        async with asyncio.TaskGroup() as rig.group:
            rounds = [final_round(number) for number in (0, 1)]
            rig.finalizer.is_synced = False
            for done in rounds if is_known else ():
                rig.finalizer.add(done)
            rig.finalizer.on_worker_started(of_another)
            for done in rounds if not is_known else ():
                rig.finalizer.add(done)

    with contextlib.closing(rig.log):
        if is_of_a_chain:
            run_virtual(main())
        else:
            with pytest.raises(BaseExceptionGroup) as found:
                run_virtual(main())
            assert isinstance(found.value.exceptions[0], Divergence)
    assert left == [(1, of_another.state)]
    assert all(event.round != 1 for event in rig.told if isinstance(event, RoundFinal))


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


@pytest.mark.parametrize(("more", "before"), [({}, 10), ({"excise_rounds": 8}, 2), ({"excise_rounds": 12}, -1)])
def test_payloads_are_kept_as_far_back_as_work_is_taken_out_by_who_begins_with_the_older_snapshot(
    tmp_path, more, before
):
    rig = Rig(tmp_path, spec=replace(SPEC, pace=replace(SPEC.pace, **more)))
    with contextlib.closing(rig.log):
        for number in (10, 15):
            blob = digest(bytes([number]))
            rig.finalizer._offer_snapshot(SnapshotOffer(ME, blob, Round(number)))
    assert rig.finalizer.sets.dropped == [before]


def test_a_round_whose_correction_lacks_a_payload_waits_and_then_a_snapshot_does(tmp_path):
    rig = Rig(tmp_path, size_bytes=snapshot_max_bytes(SPEC))
    correction = Correction(Round(0), (digest(b"a"), digest(b"b")), (digest(b"a"),))

    async def main():
        async with asyncio.TaskGroup() as rig.group:
            rig.finalizer.on_worker_started(StartReply(-1, digest(b"start"), (), 1, "cpu", b""))
            for action in (final_round(0), replace(final_round(1), corrections=(correction,)), final_round(2)):
                rig.finalizer.add(action)
            await asyncio.sleep(1.0)
            assert rig.finalizer.applied == 0
            for _ in range(int(PATIENCE_S) + 5):
                await asyncio.sleep(1.0)
                rig.finalizer.step()

    with contextlib.closing(rig.log):
        run_virtual(main())
    assert rig.process.adopted == [(2, STATES[2])]


class Liars(Net):
    """Beside a true offer false ones of a newer round: silent, of few bytes, or legal bytes that are no state."""

    def __init__(self, folder, liars, lie):
        super().__init__(folder, snapshot_max_bytes(SPEC))
        self.lie, self.begun, self.deleted, self.came = lie, set(), set(), Counter()
        self.liars = [Identity(bytes([50 + n]) * 32).peer_id for n in range(liars)]

    def is_tried(self, peer):
        return True

    def leases(self):
        true = SNAPSHOT if self.lie == "another round" else None
        blobs = {peer: true or digest(b"false", peer.encode()) for peer in self.liars}
        lies = {peer: (Lease("training", Round(4), Round(3), blob, 3, 10.0), 9.0) for peer, blob in blobs.items()}
        return lies | super().leases()

    def fetched_bytes(self, blob):
        return self.came[blob]

    def delete_blob(self, blob):
        self.deleted.add(blob)
        super().delete_blob(blob)

    async def fetch_blob(self, blob, holders, max_bytes):
        self.begun.add(blob)
        if blob != SNAPSHOT and self.lie == "silent":
            await asyncio.sleep(STALL_S)
            raise Unreachable("stalled")
        while blob != SNAPSHOT and self.lie == "slow":
            await asyncio.sleep(1.0)
            self.came[blob] += 1
        self.here.add(blob)
        return self.folder / blob.hex()


class Former(Liars):
    """A member of the chain that was left still offers its model, of a newer round than the true one."""

    def is_tried(self, peer):
        return peer == OTHER


@pytest.mark.parametrize("left", [-1, 1, None])
def test_a_node_that_left_its_chain_fetches_a_snapshot_while_its_worker_starts(tmp_path, monkeypatch, left):
    """One, the best: of others there are legal bytes that are the state of another chain."""
    monkeypatch.setattr(finalizer, "SNAPSHOT_EVERY", 1)
    rig = Rig(tmp_path, is_held=False, net=Former(tmp_path, 1, "another chain"))
    rig.finalizer.left_with = left

    async def main():
        async with asyncio.TaskGroup() as rig.group:
            rig.finalizer.worker.on_gone()
            for number in range(4):
                rig.finalizer.add(final_round(number))
            for _ in range(10):
                await asyncio.sleep(1.0)
                rig.finalizer.step()
            assert rig.net.begun == ({SNAPSHOT} if left == -1 else set()), "round 2 follows the model of round 1"
            assert rig.process.adopted == []
            rig.finalizer.worker.on_started()
            rig.finalizer.on_worker_started(StartReply(-1, digest(b"start"), (), 1, "cpu", b""))
            await asyncio.sleep(0.01)

    with contextlib.closing(rig.log):
        run_virtual(main())
    assert rig.process.adopted[0] == (2, STATES[2])


class Leaving(Net):
    """A member offers a new snapshot of another chain every five seconds, until it leaves that chain."""

    def __init__(self, folder, until_s):
        super().__init__(folder, snapshot_max_bytes(SPEC))
        self.until_s = until_s

    def leases(self):
        now = asyncio.get_running_loop().time()
        blob = SNAPSHOT if now >= self.until_s else digest(b"of another chain", bytes([int(now) // 5 % 256]))
        return {OTHER: (Lease("training", Round(3), Round(2), blob, 2, 10.0), 9.0)}

    async def fetch_blob(self, blob, holders, max_bytes):
        self.asked += 1
        return self.folder / blob.hex()


class OfAnotherChain(Worker):
    """It was given a snapshot of the right round."""

    async def ask(self, ask, kind):
        if isinstance(ask, AdoptRequest) and not ask.path.endswith(SNAPSHOT.hex()):
            raise OtherChain("the snapshot is of round 2; asked was another")
        return await super().ask(ask, kind)


@pytest.mark.parametrize("left_after_s", [1.0, SPEC.pace.lease_s, 60.0])
def test_who_offers_the_model_of_a_chain_that_it_is_about_to_leave_is_not_to_blame(tmp_path, left_after_s):
    rig = Rig(
        tmp_path, is_held=False, net=Leaving(tmp_path, PATIENCE_S + left_after_s), process=OfAnotherChain(STATES)
    )
    play(rig, (0, 1, 2), PATIENCE_S + left_after_s + 90.0)
    assert rig.net.asked > 1, "what it offered was fetched"
    assert rig.process.adopted == [(2, STATES[2])]
    assert rig.net.blamed == []


def test_who_offers_models_of_another_chain_for_ever_is_to_blame_and_costs_few_downloads(tmp_path):
    rig = Rig(tmp_path, is_held=False, net=Leaving(tmp_path, 1e9), process=OfAnotherChain(STATES))
    play(rig, (0, 1, 2), 1000.0)
    assert rig.process.adopted == []
    assert LEFT_LATE < rig.net.asked <= LEFT_LATE + 6
    assert rig.net.blamed == [(OTHER, OtherChain)] * (rig.net.asked - LEFT_LATE)


class Checking(Worker):
    """It adopts the true file as the true round only."""

    async def ask(self, ask, kind):
        if isinstance(ask, AdoptRequest) and (ask.path.endswith(SNAPSHOT.hex()), ask.round) != (True, 2):
            raise DecodeError("another state")
        return await super().ask(ask, kind)


async def seconds_to_adopt(rig, limit_s):
    async with asyncio.TaskGroup() as rig.group:
        loop = asyncio.get_running_loop()
        rig.finalizer.on_worker_started(StartReply(-1, digest(b"start"), (), 1, "cpu", b""))
        for number in range(4):
            rig.finalizer.add(final_round(number))
        while rig.finalizer.applied < 2 and loop.time() < limit_s:
            await asyncio.sleep(0.25)
            rig.finalizer.step()
        took_s, rig.finalizer.is_synced = loop.time(), False
        rig.finalizer.search.step((), lambda offer: False)
    return took_s


def adopting(folder, liars, lie):
    rig = Rig(folder, is_held=False, net=Liars(folder, liars, lie), process=Checking(STATES))
    with contextlib.closing(rig.log):
        return rig, run_virtual(seconds_to_adopt(rig, 3000.0)) - PATIENCE_S


@pytest.mark.parametrize(
    ("liars", "lie"),
    [(n, lie) for lie in ("silent", "no state") for n in (0, 1, 2, 10, 100)]
    + [(n, "slow") for n in (1, 2, 10, 30)],
)
def test_false_offers_of_members_cost_a_bounded_time(tmp_path, liars, lie):
    """At worst all of them come before the true one: they worked, and name a newer round."""
    rig, took_s = adopting(tmp_path, liars, lie)
    # One from which little comes is compared with AT_ONCE − 1 others now and then.
    compared_s = (liars / (AT_ONCE - 1) + 1) * (FIRST_S + ALONE_S)
    assert took_s <= (compared_s if lie == "slow" else liars * STAGGER_S + FIRST_S)
    assert rig.process.adopted == [(2, STATES[2])]
    if lie == "no state":
        assert rig.net.deleted >= rig.net.begun - {SNAPSHOT}


def test_a_true_snapshot_that_a_liar_offers_as_a_newer_rounds_is_adopted(tmp_path):
    rig, took_s = adopting(tmp_path, 1, "another round")
    assert took_s <= 1.0
    assert rig.process.adopted == [(2, STATES[2])]
    assert SNAPSHOT not in rig.net.deleted


def test_what_liars_sent_does_not_stay(tmp_path):
    rig, _ = adopting(tmp_path, 10, "slow")
    assert len(rig.net.begun - rig.net.deleted - {SNAPSHOT}) <= PARTS_MOST + AT_ONCE


def test_legal_sizes_are_just_above_what_is_written(tmp_path):
    arena = arena_of(SPEC.model)
    theta = torch.zeros((arena.chunks, 4096), dtype=torch.int32)
    written = write_snapshot(tmp_path / "snapshot", Snapshot(theta, 2, STATES[2]), arena)
    assert written <= snapshot_max_bytes(SPEC) < 1.2 * written
    assert moments_max_bytes(SPEC, 0) < 3.5 * snapshot_max_bytes(SPEC)
