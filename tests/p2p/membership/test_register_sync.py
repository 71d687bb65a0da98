"""Register sync over calls: a newcomer learns all leases, and a liar's ages neither end nor extend a life."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.membership.register_sync import MESSAGE_BYTES, METHOD, KnownVersions, RegisterBatch, RegisterSync
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.registers import MAX_TTL_S, Lease, Register, sign_register

RUN = RunId(digest(b"run"))
ME, OTHER, THIRD = (Identity(bytes([number]) * 32) for number in range(1, 4))
TTL_S = 60.0
DATA = codec.encode(sign_register(RUN, THIRD, 1, 1, TTL_S, Lease("training", Round(3), -1, b"", -1, 1.0)))


class Side:
    """A register store that can sync, on a simulated host. With `answers` it lies: it sends these."""

    def __init__(self, network: MemoryNetwork, me: Identity, answers: RegisterBatch | None = None) -> None:
        self.host = network.host(me.peer_id)
        self.calls = Calls(self.host, RUN, on_fault=lambda peer, fault: None)
        self.registers = RegisterStore(RUN, me, 1)
        self.news: list[bytes] = []

        def learn(found: list[tuple[Register, bytes]]) -> None:
            self.news.extend(data for _, data in found)

        if answers is None:
            self.sync = RegisterSync(self.registers, self.calls, self.now, learn)
            return

        async def lie(peer: PeerId, request: KnownVersions) -> RegisterBatch:
            return answers

        self.calls.register(METHOD, KnownVersions, RegisterBatch, lie, max_bytes=MESSAGE_BYTES)

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def pulls_from(answers: RegisterBatch | None, scenario: Callable[[Side, Side], Awaitable[None]]) -> None:
    """Run `scenario` with a side and a peer that it is connected to, a liar if there are `answers`."""

    async def main() -> None:
        network = MemoryNetwork(seed=1, latency_s=0.01)
        sides = Side(network, ME), Side(network, OTHER, answers)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for side in sides:
                ready = asyncio.Event()
                tasks += [group.create_task(side.host.serve(ready.set)), group.create_task(side.calls.serve())]
                await ready.wait()
                await side.calls.started.wait()
            await sides[0].host.connect(PeerAddress(sides[1].host.peer_id, (sides[1].host.maddr,)))
            await scenario(*sides)
            for task in tasks:
                task.cancel()

    run_virtual(main())


def test_a_pull_brings_live_registers_with_the_rest_of_their_lives() -> None:
    async def scenario(mine: Side, theirs: Side) -> None:
        theirs.registers.merge(DATA, theirs.now() - 15)
        assert await mine.sync.pull(OTHER.peer_id) == 1
        assert mine.news == [DATA]
        left_s = mine.registers.expires(THIRD.peer_id, Lease, mine.now())
        assert left_s == pytest.approx(TTL_S - 15, abs=1)
        assert await mine.sync.pull(OTHER.peer_id) == 0, "what is known is not sent"

    pulls_from(None, scenario)


@pytest.mark.parametrize("age_s", [math.nan, math.inf, -math.inf, -1.0, -0.0, 5e-324, MAX_TTL_S + 1, 1e308])
def test_an_age_that_nobody_measures_is_refused(age_s: float) -> None:
    async def scenario(victim: Side, liar: Side) -> None:
        with pytest.raises(DecodeError):
            await victim.sync.pull(OTHER.peer_id)
        assert not victim.news, "and nothing is passed on"
        assert victim.registers.merge(DATA, victim.now()), "the author's own word still counts"
        assert victim.registers.expires(THIRD.peer_id, Lease, victim.now()) == pytest.approx(TTL_S)

    pulls_from(RegisterBatch(((age_s, DATA),)), scenario)


@pytest.mark.parametrize("age_s", [TTL_S, TTL_S + 1, MAX_TTL_S])
def test_a_register_that_is_called_dead_is_not_stored(age_s: float) -> None:
    async def scenario(victim: Side, liar: Side) -> None:
        assert await victim.sync.pull(OTHER.peer_id) == 0
        assert not victim.news
        assert victim.registers.merge(DATA, victim.now()), "a live copy from another peer counts"
        assert victim.registers.live(Lease, victim.now()).keys() == {THIRD.peer_id}

    pulls_from(RegisterBatch(((age_s, DATA),)), scenario)


def test_what_was_stored_of_a_batch_that_ends_illegally_is_news() -> None:
    async def scenario(victim: Side, liar: Side) -> None:
        with pytest.raises(DecodeError):
            await victim.sync.pull(OTHER.peer_id)
        assert victim.news == [DATA], "it would not be sent again"
        assert victim.registers.live(Lease, victim.now()).keys() == {THIRD.peer_id}

    pulls_from(RegisterBatch(((1.0, DATA), (1.0, b"junk"))), scenario)


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_restored_home_is_told_its_own_newest_lease_also_a_dead_one(from_disk: bool) -> None:
    own = codec.encode(sign_register(RUN, ME, 7, 3, TTL_S, Lease("training", Round(3), -1, b"", -1, 1.0)))

    async def scenario(mine: Side, theirs: Side) -> None:
        if from_disk:
            theirs.registers.raise_floors([own])
        else:
            theirs.registers.merge(own, theirs.now() - 2 * TTL_S)
            theirs.registers.drop_expired(theirs.now())
        assert await mine.sync.pull(OTHER.peer_id) == 0
        assert mine.registers.echoes == 0, "no other process runs with this identity"
        again = mine.registers.publish(Lease("training", Round(4), -1, b"", -1, 1.0), TTL_S, mine.now())
        assert theirs.registers.merge(again, theirs.now()), "its numbers go on above those that peers remember"
        await mine.sync.pull(OTHER.peer_id)

    pulls_from(None, scenario)
