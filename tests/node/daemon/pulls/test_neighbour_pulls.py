"""Pulls in the daemon: who is asked and answered, how often, and what slow, silent or hostile neighbours cost."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.daemon.pulls.neighbour_pulls import PULL_S, NeighbourPulls
from atoll.node.ipc.worker_process import WorkerDied
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, DiskFault, PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.local.worker_messages import TrainProgress
from atoll.protocols.pulls.draw import neighbour_of, pairs
from atoll.protocols.pulls.question import PullQuestion
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run.run_spec import CompressSpec, Stage
from atoll.protocols.run.sections.variants.gossip import GossipSpec
from tests.node.worker.session_home import SPEC

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
ME, OTHER, STRANGER = PEERS
STEPS = 9


def spec_of(**chances):
    gossip = GossipSpec(**{"steps": 2, "first_256": 256, "last_256": 256, **chances})
    outer = replace(SPEC.outer, stages=(Stage(0, STEPS),), gossip=gossip)
    return replace(SPEC, outer=outer, compress=CompressSpec(codec="int8", k=4096, feedback=0))


class Log:
    def __init__(self):
        self.events = []

    def event(self, name, **facts):
        self.events.append((name, facts))


class Node:
    """One member's pulls, with a worker, a wire and a log that note what happens."""

    def __init__(self, tmp_path, spec=None, voters=(ME, OTHER)):
        self.spec = spec or spec_of()
        self.log, self.tasks, self.asked, self.blamed = Log(), [], [], []
        self.mixed, self.excluded, self.differs = [], set(), True
        self.answer_s, self.payload = 0.0, bytes(payload_size(self.spec, 0))
        self.pulls = NeighbourPulls(
            spec=self.spec,
            gossip=self.spec.outer.gossip,
            me=ME,
            log=self.log,
            neighbours=self,
            worker=Worker(self),
            voters=lambda: voters,
            is_excluded=lambda peer, number: peer in self.excluded,
            start_task=lambda work, name: self.tasks.append(work),
            folder=tmp_path / "pulls",
        )

    async def ask(self, peer, question, max_bytes):
        assert max_bytes == payload_size(self.spec, 0)
        self.asked.append((peer, codec.decode(question, PullQuestion)))
        await asyncio.sleep(self.answer_s)
        if isinstance(self.payload, Exception):
            raise self.payload
        return self.payload

    def blame(self, peer, error):
        self.blamed.append((peer, error))

    async def step(self, step, number=0):
        self.pulls.on_progress(TrainProgress(Round(number), step, STEPS, 2.0, 1.0))
        await asyncio.sleep(0)

    async def end_pulls(self):
        """Run what was begun."""
        begun, self.tasks = self.tasks, []
        await asyncio.gather(*begun)

    async def round(self, number=0):
        for step in range(1, STEPS + 1):
            await self.step(step, number)
            await self.end_pulls()

    async def answers(self, peer, number=0, tick=1):
        return await self.pulls.answer(peer, codec.encode(PullQuestion(number, tick)))


class Worker:
    def __init__(self, node):
        self.node, self.fault, self.free = node, None, None

    async def ask(self, ask, kind):
        if self.fault is not None:
            raise self.fault
        if isinstance(ask, DifferenceRequest):
            Path(ask.path).write_bytes(b"difference")
            return DifferenceReply(self.node.differs)
        assert isinstance(ask, MixRequest)
        if self.free is not None:
            await self.free.wait()
        self.node.mixed.append((ask.round, Path(ask.path).read_bytes()))
        return MixReply(True)


def test_the_neighbour_of_each_tick_is_asked_once(tmp_path):
    async def main():
        node = Node(tmp_path)
        await node.round()
        await node.step(1, 1)
        assert node.asked == [(OTHER, PullQuestion(0, tick)) for tick in (1, 2, 3, 4)]
        assert node.mixed == [(0, node.payload)] * 4
        assert node.log.events == [("pulls", {"round": 0, "asked": 4, "pulled": 4, "given": 0})]

    run_virtual(main())


def test_the_last_step_is_no_tick_and_nobody_alone_asks(tmp_path):
    async def main():
        node = Node(tmp_path, spec_of(steps=STEPS - 1))
        await node.step(STEPS)
        alone = Node(tmp_path / "alone", voters=(ME,))
        stranger = Node(tmp_path / "stranger", voters=(OTHER, STRANGER))
        await alone.round(), await stranger.round()
        assert not node.asked + alone.asked + stranger.asked

    run_virtual(main())


def test_members_of_the_draw_are_those_of_when_the_round_began(tmp_path):
    async def main():
        voters = [ME, OTHER]
        node = Node(tmp_path, voters=voters)
        await node.step(1)
        voters.clear()
        await node.step(2)
        await node.end_pulls()
        assert len(node.asked) == 1

    run_virtual(main())


def test_a_slow_neighbour_costs_the_ticks_while_it_is_waited_for(tmp_path):
    async def main():
        node = Node(tmp_path)
        node.answer_s = 1e6
        await node.step(2)
        await node.step(4)
        assert len(node.tasks) == 1, "one pull at a time"
        began = asyncio.get_running_loop().time()
        await node.end_pulls()
        assert asyncio.get_running_loop().time() - began < 2 * PULL_S
        node.answer_s = 0
        await node.step(6)
        await node.end_pulls()
        assert len(node.asked) == 2
        assert len(node.mixed) == 1
        assert not node.blamed

    run_virtual(main())


@pytest.mark.parametrize("answer", [Unreachable("gone"), b""])
def test_a_neighbour_without_an_answer_costs_the_tick_alone(tmp_path, answer):
    async def main():
        node = Node(tmp_path)
        node.payload = answer
        await node.round()
        assert len(node.asked) == 4
        assert not node.mixed + node.blamed

    run_virtual(main())


@pytest.mark.parametrize("answer", [b"short", DecodeError("too long")])
def test_an_answer_of_another_size_is_blamed_and_never_reaches_the_worker(tmp_path, answer):
    async def main():
        node = Node(tmp_path)
        node.payload = answer
        await node.step(2)
        await node.end_pulls()
        assert [peer for peer, _ in node.blamed] == [OTHER]
        assert not node.mixed

    run_virtual(main())


@pytest.mark.parametrize(("fault", "blamed"), [(DecodeError("no payload"), 1), (DiskFault("full"), 0)])
def test_a_payload_that_the_worker_refuses_is_the_neighbours_fault(tmp_path, fault, blamed):
    async def main():
        node = Node(tmp_path)
        node.pulls.worker.fault = fault
        await node.round()
        assert len(node.blamed) == 4 * blamed

    run_virtual(main())


def test_a_neighbour_is_answered_once_a_tick_and_in_the_round_at_hand_alone(tmp_path):
    async def main():
        node = Node(tmp_path)
        assert await node.answers(OTHER) == b"", "no round has begun"
        await node.step(1, 3)
        assert await node.answers(OTHER, 3) == b"difference"
        assert await node.answers(OTHER, 3) == b"", "again"
        assert await node.answers(OTHER, 3, 2) == b"difference"
        assert await node.answers(OTHER, 2, 3) == await node.answers(OTHER, 4, 3) == b""
        assert await node.answers(STRANGER, 3, 3) == b""
        assert await node.answers(OTHER, 3, 5) == b"", "a tick that the round has not"
        node.excluded.add(OTHER)
        assert await node.answers(OTHER, 3, 3) == b""
        with pytest.raises(PeerFault):
            await node.pulls.answer(OTHER, b"\xc1")
        with pytest.raises(PeerFault):
            await node.pulls.answer(OTHER, codec.encode([1, 1, "x" * 100]))
        await node.step(1, 4)
        assert node.log.events[-1][1]["given"] == 2

    run_virtual(main())


def test_only_the_neighbour_of_a_tick_is_answered(tmp_path):
    async def main():
        gossip = spec_of().outer.gossip
        node = Node(tmp_path, voters=PEERS)
        await node.step(1, 3)
        for tick in (1, 2, 3, 4):
            drawn = pairs(gossip, node.spec.id, 3, tick, ticks=4, members=PEERS)
            for peer in (OTHER, STRANGER):
                is_neighbour = neighbour_of(peer, drawn) == ME
                assert bool(await node.answers(peer, 3, tick)) == is_neighbour

    run_virtual(main())


@pytest.mark.parametrize("fault", [WorkerDied("gone"), DiskFault("full")])
def test_what_fails_here_is_no_answer(tmp_path, fault):
    async def main():
        node = Node(tmp_path)
        await node.step(1)
        node.pulls.worker.fault = fault
        assert await node.answers(OTHER) == b""
        node.pulls.worker.fault, node.differs = None, False
        assert await node.answers(OTHER, tick=2) == b"", "another round is at hand in the worker"

    run_virtual(main())


def test_a_payload_that_the_worker_has_yet_to_mix_is_not_written_over(tmp_path):
    """The worker maps the file: a shorter one under it would end the process, another one be mixed twice."""

    async def main():
        node = Node(tmp_path)
        first = node.payload
        node.pulls.worker.free = free = asyncio.Event()
        await node.step(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(node.tasks.pop())
            await asyncio.sleep(100 * PULL_S)  # a validation, or one long step
            node.payload = bytes([1]) * len(first)
            await node.step(4)
            assert not node.tasks
            free.set()
        await node.step(6)
        await node.end_pulls()
        assert [payload for _, payload in node.mixed] == [first, node.payload]

    run_virtual(main())


def test_an_excluded_neighbour_is_not_asked(tmp_path):
    async def main():
        node = Node(tmp_path)
        node.excluded.add(OTHER)
        await node.round()
        assert not node.asked

    run_virtual(main())
