"""Whole nodes with faults of their own machine: workers that die, disks that fill up, payloads that rot."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DiskFault, LocalFault
from atoll.protocols.ledger.records import Contribution
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    Answer,
    Ask,
    FinalizeReply,
    FinalizeRequest,
    SnapshotRequest,
)
from atoll.protocols.run.run_spec import RunSpec
from tests.node.virtual.conftest import HALF, FakeWorker

Worlds = Callable[[int, int], object]


MORE = pytest.mark.slow(slice="test_a_worker_may_die_at_any_point")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=MORE) for seed in (2, 3))])
def test_a_worker_may_die_at_any_point(world, seed):
    async def story() -> None:
        luck = random.Random(seed)
        async with world(10, 3) as w:
            for number in range(3):
                w.start(number)
            await asyncio.sleep(1.0)
            for _ in range(12):
                await asyncio.sleep(luck.uniform(0.0, 14.0))
                await w.nodes[luck.randrange(3)].crash_worker(luck.choice([0.0, 0.3, 3.0]))
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()
            for node in w.nodes.values():
                assert len(node.worker.trained) == len(set(node.worker.trained)), "no round is trained twice"
                assert len(node.worker.trained) >= 5

    run_virtual(story())


def test_a_disk_that_fills_up_is_told_and_waited_out(world):
    async def story() -> None:
        async with world(10, 3, **HALF) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            sick = w.nodes[1]
            sick.worker.refuses = DiskFault("no space left", hint="free some space")
            await asyncio.sleep(120.0)
            assert sick.task is not None
            assert not sick.task.done(), "a full disk does not end a node"
            assert sick.driver.guard.trouble == "no space left; free some space; the node goes on by itself"
            assert w.nodes[0].worker.final > sick.worker.final, "the others go on"
            sick.worker.refuses = None
            await w.until(lambda: not sick.driver.guard.trouble, 60.0)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def test_one_of_three_goes_on_while_the_disks_of_the_others_are_full(world):
    """Two homes on one disk: they live, and can write no vote."""

    async def story() -> None:
        async with world(60, 3) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            sick = [w.nodes[number] for number in (1, 2)]
            for node in sick:
                node.worker.refuses = DiskFault("no space left", hint="free some space")
            await w.until(lambda: all(node.driver.guard.trouble for node in sick))
            before = w.nodes[0].worker.final
            await w.until(lambda: w.nodes[0].worker.final >= before + 5, 200.0)
            for node in sick:
                node.worker.refuses = None
            await w.until(lambda: not any(node.driver.guard.trouble for node in sick), 60.0)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def decided_alone(spec: RunSpec) -> RunSpec:
    """Who came late decides nothing as long as the owner is here."""
    return replace(spec, pace=replace(spec.pace, probation=200))


@pytest.mark.parametrize("what", ["work", "entries"])
def test_an_owner_whose_disk_was_full_for_a_lease_goes_on_where_the_others_are(world, what):
    """It alone decides, and its own round waits for its vote: that would undo all that they decided meanwhile."""

    def full(*given: object) -> None:
        raise DiskFault("no space left", hint="free some space")

    async def story() -> None:
        async with world(60, 1, adjust=decided_alone) as w:
            owner = w.start(0)
            await w.until(lambda: w.all_final(10))
            for number in (1, 2):
                w.start(number)
            await w.until(lambda: w.all_final(12))
            assert {node.driver.finality.voters for node in w.nodes.values()} == {(owner.peer,)}
            if what == "work":
                owner.worker.refuses = DiskFault("no space left", hint="free some space")
            else:
                owner.swarm.ledger.append = owner.swarm.ledger.insert_all = full
            await asyncio.sleep(2 * w.spec.pace.lease_s)
            others = [w.nodes[number].driver for number in (1, 2)]
            went_on = min(driver.finality.last_final for driver in others)
            assert went_on >= owner.driver.finality.last_final + 8, "they went on without it"
            if what == "work":
                owner.worker.refuses = None
            else:
                del owner.swarm.ledger.append, owner.swarm.ledger.insert_all
            await w.until(lambda: w.all_final(went_on + 5), 120.0)
            assert not w.changes, "nobody leaves its chain"
            assert {len(node.driver.finality.chain) for node in w.nodes.values()} == {2}
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def test_an_owner_that_is_alone_goes_on_after_its_disk_was_full(world):
    async def story() -> None:
        async with world(60, 1) as w:
            owner = w.start(0)
            await w.until(lambda: w.all_final(3))
            owner.worker.refuses = DiskFault("no space left", hint="free some space")
            await asyncio.sleep(2 * w.spec.pace.lease_s)
            owner.worker.refuses = None
            await w.until(lambda: w.all_final(6), 60.0)

    run_virtual(story())


class NoSnapshots(FakeWorker):
    """Its disk takes all but snapshots."""

    async def _answer(self, ask):
        if isinstance(ask, SnapshotRequest):
            raise DiskFault("no space left", hint="free some space")
        return await super()._answer(ask)


def test_a_member_without_room_for_snapshots_keeps_its_lease(world):
    """Rounds are longer than its lease: it writes nothing for as long, and could."""

    async def story() -> None:
        async with world(60, 2, worker=NoSnapshots, lease_s=60.0) as w:
            for number in range(2):
                w.start(number, 300.0)
            seen = 0
            for _ in range(400):
                await asyncio.sleep(10.0)
                for node in w.nodes.values():
                    seen += bool(node.driver and node.driver.guard.trouble)
            assert seen > 20
            assert all(len(node.driver.finality.chain) == 1 for node in w.nodes.values()), "no epoch began"
            assert w.newest() > SNAPSHOT_EVERY

    run_virtual(story())


def test_a_payload_that_rots_is_fetched_again(world):
    async def story() -> None:
        async with world(8, 3) as w:
            for number in range(3):
                w.start(number)
            node = w.nodes[2]

            def held() -> list[Path]:
                """Payloads of others in a round that was not folded yet."""
                books = node.driver.round.books.values()
                others = [entry for book in books for entry in book.held if book.authors[entry] != node.peer]
                found = node.driver.contributions.find(others)
                return [node.swarm.blobs.store.path(record.payload) for _, _, record in found]

            await w.until(lambda: w.newest() >= 2)
            await w.until(held, look_s=0.001)  # a payload is held for a moment before its round is folded
            for path in held():
                path.write_bytes(b"rotten")
            await w.until(w.all_final)
            w.check_agreement()

    run_virtual(story())


def test_payloads_and_snapshots_on_disk_stay_bounded(world):
    async def story() -> None:
        async with world(6 * SNAPSHOT_EVERY, 3) as w:
            for number in range(3):
                w.start(number)
            await w.until(w.all_final)
            for node in w.nodes.values():
                store = node.swarm.blobs.store
                snapshots = [blob for blob in store.blobs() if store.size(blob) < 100]
                assert len(snapshots) == 2
                assert len(store.blobs()) <= 2 + 3 * (2 * SNAPSHOT_EVERY)

    run_virtual(story())


def test_a_node_that_restarts_offers_a_snapshot_at_once(world):
    """The run is over and everybody restarts: a newcomer must find the model."""

    async def story() -> None:
        async with world(2 * SNAPSHOT_EVERY + 2, 2) as w:
            for number in range(2):
                w.start(number)
            await w.until(w.all_final)
            for number in range(2):
                await w.kill(number)
                w.start(number)
            late = w.start(7)
            await w.until(w.all_final, 300.0)
            assert late.worker.final == 2 * SNAPSHOT_EVERY + 1
            w.check_agreement()

    run_virtual(story())


def ended_by(story: Callable[[], Coroutine[Any, Any, None]]) -> Exception:
    """The one fault that ended the world. What a story asserts after that never runs: assert outside of it."""
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(story())
    fault: Exception = caught.value
    while isinstance(fault, ExceptionGroup):
        (fault,) = fault.exceptions
    return fault


def test_a_state_that_is_not_the_final_one_ends_the_node_with_advice(world):
    async def story() -> None:
        async with world(4, 1) as w:
            node = w.start(0)
            await w.until(w.all_final)
            await w.kill(0)
            node.worker.state = bytes(32)
            w.start(0)
            await asyncio.wait([node.task])

    fault = ended_by(story)
    assert "our fold gives 00000000" in str(fault)
    assert "fetches a snapshot" in fault.hint
    assert not isinstance(fault, LocalFault)


def test_the_log_has_the_digest_that_the_worker_computed(world):
    """Not a copy of the certificate's: a fold that differs is on record, and ends the node."""
    logs: list[RoundLog] = []

    async def story() -> None:
        async with world(6, 3) as w:
            for number in range(3):
                w.start(number)
            await w.until(lambda: w.all_final(2))
            node = w.nodes[2]
            logs.append(node.driver.context.log)
            compute = node.worker.ask

            async def flipped(ask: Ask, kind: type[Answer]) -> Answer:
                done = await compute(ask, kind)
                return FinalizeReply(ask.round, bytes(32)) if isinstance(ask, FinalizeRequest) else done

            node.worker.ask = flipped
            await asyncio.wait([node.task])

    assert "our fold gives 00000000" in str(ended_by(story))
    (log,) = logs
    *agreed, differs = [log.rows[number] for number in sorted(log.rows) if log.rows[number].own_digest]
    assert len(agreed) >= 3
    assert all(row.final and row.own_digest == row.digest for row in agreed)
    assert not differs.final
    assert differs.own_digest == bytes(32).hex()


def test_a_snapshot_that_was_adopted_is_no_fold(world):
    async def story() -> None:
        async with world(4 * SNAPSHOT_EVERY, 2) as w:
            for number in range(2):
                w.start(number)
            await w.until(lambda: w.all_final(3 * SNAPSHOT_EVERY))
            late = w.start(2)
            await w.until(w.all_final)
            rows = late.driver.context.log.rows
            own = [rows[at].own_digest for at in sorted(rows) if rows[at].final]
            assert len(own) == 4 * SNAPSHOT_EVERY
            assert own[0] == "", "it came with a snapshot"
            assert own[-1] == rows[4 * SNAPSHOT_EVERY - 1].digest

    run_virtual(story())


def test_a_worker_that_lost_much_is_told_which_of_its_payloads_were_used(world):
    """Payloads of rounds that snapshots cover are forgotten; that ours were in their final sets is not."""

    async def story() -> None:
        async with world(3 * SNAPSHOT_EVERY + 3, 2) as w:
            for number in range(2):
                w.start(number)
            node = w.nodes[0]
            await w.until(lambda: node.worker.final == 0, look_s=0.1)
            old = node.worker.final, node.worker.state
            await w.until(lambda: node.worker.final >= 3 * SNAPSHOT_EVERY)
            told, answer = [], node.worker._answer

            async def listen(ask: Ask) -> Answer:
                told.extend([ask] if isinstance(ask, AdoptRequest) else [])
                return await answer(ask)

            node.worker._answer = listen
            used = {c.round: c.payload for a, c in ledger(node) if a == node.peer}
            node.worker.final, node.worker.state = old
            await node.crash_worker(0.3)
            await w.until(w.all_final)
            assert told, "it went back behind what payloads are kept for"
            assert {one.payload for one in told[0].included if one.spans} >= {
                used[number] for number in range(1, told[0].round)
            }

    run_virtual(story())


def ledger(node) -> list[tuple[str, Contribution]]:
    entries = [entry for _, entry in node.swarm.ledger.since(0, 1 << 20)]
    return [(entry.author, entry.body) for entry in entries if isinstance(entry.body, Contribution)]
