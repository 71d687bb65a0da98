"""Whole nodes: one that stands still says so without anybody who looks; one that has a reason to wait does not."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.standing_still.stillness import LEAST_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import CheckRequest, TrainProgress, TrainRequest
from tests.node.virtual.conftest import HALF, FakeWorker

ROUND_S = 10.0


class StuckWorker(FakeWorker):
    """Answers nothing of a kind that is stuck: without checks its node votes for nothing, without any it hangs."""

    stuck: type | None = None

    def stick(self, kind: type) -> None:
        self.stuck, self.freed = kind, asyncio.Event()

    def free(self) -> None:
        self.stuck = None
        self.freed.set()

    async def _answer(self, ask):
        if self.stuck is not None and isinstance(ask, self.stuck):
            await self.freed.wait()
        return await super()._answer(ask)


class SlowlyStarted(FakeWorker):
    """Its start makes a sign of progress every `sign_s`, `signs` times, and then none until it is free."""

    signs, sign_s = 0, 40.0
    hangs = False

    async def start(self):
        self.freed = asyncio.Event()
        for _ in range(self.signs):
            self.start_moves += 1
            await asyncio.sleep(self.sign_s)
        if self.hangs:
            await self.freed.wait()
        return await super().start()


@asynccontextmanager
async def watched(w):
    """All nodes, looked at every few seconds: the lines of those that say that they are frozen."""
    found = []

    async def look() -> None:
        while True:
            up = [node for node in w.nodes.values() if node.task is not None and node.driver is not None]
            found.extend((node.number, node.driver.view().frozen) for node in up if node.driver.view().frozen)
            await asyncio.sleep(2.0)

    task = asyncio.get_running_loop().create_task(look())
    try:
        yield found
    finally:
        task.cancel()


def test_a_node_whose_rounds_do_not_become_final_says_so_until_they_do(world):
    async def story() -> None:
        async with world(400, 3, worker=StuckWorker) as w, watched(w) as found:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            assert not found
            for node in w.nodes.values():
                node.worker.stick(CheckRequest)
            began, first = asyncio.get_running_loop().time(), w.newest()
            await w.until(lambda: len({number for number, _ in found}) == 3, look_s=1.0)
            took_s = asyncio.get_running_loop().time() - began
            assert 5 * ROUND_S + w.spec.pace.lease_s <= took_s <= 9 * ROUND_S + w.spec.pace.lease_s
            assert w.newest() > first, "they train on meanwhile"
            assert found[0][1].startswith("frozen: no round became final for ")
            for node in w.nodes.values():
                node.worker.free()
            await w.until(lambda: not any(node.driver.view().frozen for node in w.nodes.values()), 60.0)
            w.check_agreement()

    run_virtual(story())


def test_a_node_whose_worker_hangs_says_so_and_the_others_do_not(world):
    """At the presets' pace the others would wait for it, and say so, too."""

    async def story() -> None:
        async with world(400, 3, worker=StuckWorker, **HALF) as w, watched(w) as found:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            w.nodes[2].worker.stick(object)
            await w.until(lambda: w.nodes[0].worker.final >= 25)
            assert {number for number, _ in found} == {2}
            hung = w.nodes[2].driver
            assert hung.round.phase is Phase.CATCH_UP, "the others went on, and their entries and payloads come"
            assert hung.view().frozen.endswith(
                "its worker does not answer; if it stays so, `atoll stop --wait` and `atoll start`"
            )

    run_virtual(story())


def test_one_of_three_goes_on_beside_two_workers_that_hang_for_good(world):
    """Their daemons live and renew leases, and can vote for nothing: no quorum, and nobody who is gone."""

    async def story() -> None:
        async with world(400, 3, worker=StuckWorker) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            for number in (1, 2):
                w.nodes[number].worker.stick(object)
            before = w.nodes[0].worker.final
            await w.until(lambda: w.nodes[0].worker.final >= before + 10, 900.0)
            w.check_agreement()

    run_virtual(story())


class SlowFirst(StuckWorker):
    """Answers nothing during the first step of each life but the first, which takes minutes."""

    first_s, warm = 200.0, 0

    async def _answer(self, ask):
        if self.warm < self.lives and isinstance(ask, TrainRequest):
            self.warm = self.lives
            self.stick(object)
            asyncio.get_running_loop().call_later(self.first_s, self.free)
        return await super()._answer(ask)


def test_a_first_step_of_minutes_after_a_worker_died_ends_no_lease(world):
    async def story() -> None:
        async with world(400, 3, worker=SlowFirst, **HALF) as w:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            sick, other = w.nodes[2], w.nodes[0]
            sick.driver.on_progress(TrainProgress(Round(5), 1, 20, 2.0, 1.0))
            await sick.crash_worker(25.0)  # the others are in another round by then
            ended_s = asyncio.get_running_loop().time() + SlowFirst.first_s
            while asyncio.get_running_loop().time() < ended_s:
                assert sick.peer in other.driver.net.leases()
                await asyncio.sleep(1.0)

    run_virtual(story())


STOP = pytest.param("stop", marks=pytest.mark.slow(slice="test_survivors_that_go_on_by_themselves_are_not_frozen"))


@pytest.mark.parametrize("way", [STOP, "kill"])
def test_survivors_that_go_on_by_themselves_are_not_frozen(world, way):
    async def story() -> None:
        async with world(60, 4) as w, watched(w) as found:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            for number in (1, 2, 3):
                await (w.stop(number) if way == "stop" else w.kill(number))
            await w.until(lambda: w.nodes[0].worker.final >= 25)
            assert not found

    run_virtual(story())


def test_a_long_pause_is_not_frozen_nor_what_follows(world):
    async def story() -> None:
        async with world(10, 2) as w, watched(w) as found:
            for number in range(2):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(4))
            for node in w.nodes.values():
                node.driver.pause("by the operator")
            await asyncio.sleep(600.0)
            assert all(node.driver.round.phase is Phase.PAUSED for node in w.nodes.values())
            for node in w.nodes.values():
                node.driver.resume()
            await w.until(w.all_final)
            assert w.nodes[0].driver.view().round.phase is Phase.FINISHED
            await asyncio.sleep(600.0)
            assert not found

    run_virtual(story())


def test_long_rounds_are_not_frozen_nor_is_who_joins_them(world):
    async def story() -> None:
        async with world(5, 2) as w, watched(w) as found:
            for number in range(2):
                w.start(number, 200.0)
            await w.until(lambda: w.all_final(1))
            w.start(2, 200.0)
            await w.until(w.all_final)
            assert not found

    run_virtual(story())


def test_a_node_alone_in_its_run_is_not_frozen(world):
    async def story() -> None:
        async with world(30, 1) as w, watched(w) as found:
            w.start(0, ROUND_S)
            await w.until(w.all_final)
            assert not found

    run_virtual(story())


def test_a_worker_that_starts_for_long_is_not_frozen_while_it_gets_on(world):
    """A first compile on a slow machine, of a node that nobody sends a byte, and of one that others send many."""

    async def story() -> None:
        async with world(60, 2, worker=SlowlyStarted) as w, watched(w) as found:
            w.start(0, ROUND_S).worker.signs = 12
            await w.until(lambda: w.nodes[0].worker.start_moves == 13, 600.0)
            w.start(1, ROUND_S)
            await w.until(lambda: w.all_final(5))
            w.start(2, ROUND_S).worker.signs = 12
            await w.until(w.all_final)
            assert w.nodes[2].worker.start_moves == 13
            assert w.nodes[2].worker.trained
            assert not found

    run_virtual(story())


def test_a_worker_that_hangs_while_it_starts_is_frozen_beside_all_bytes_of_others(world):
    async def story() -> None:
        async with world(400, 3, worker=SlowlyStarted, **HALF) as w, watched(w) as found:
            for number in range(3):
                w.start(number, ROUND_S)
            await w.until(lambda: w.all_final(5))
            await w.kill(2)
            w.nodes[2].worker.signs, w.nodes[2].worker.hangs = 2, True
            w.start(2)
            began = asyncio.get_running_loop().time()
            await w.until(lambda: found, 600.0, look_s=1.0)
            took_s = asyncio.get_running_loop().time() - began
            assert 2 * 40.0 + LEAST_S - 40.0 <= took_s <= 2 * 40.0 + LEAST_S + 5.0
            assert found[0][0] == 2
            assert found[0][1].startswith("frozen: the worker's start made no progress for ")
            await w.until(lambda: w.nodes[0].worker.final >= 30)
            assert {number for number, _ in found} == {2}, "the others go on"
            w.nodes[2].worker.freed.set()
            await w.until(lambda: not w.nodes[2].driver.view().frozen, 60.0)
            await w.until(lambda: w.nodes[2].worker.final >= 35)
            w.check_agreement()

    run_virtual(story())
