"""Made-up identities against the swarm of an open run: how far they get, and what a newcomer hears."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.newcomers import NewcomerQuota
from atoll.p2p.membership.register_store import MAX_STRANGERS
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest
from atoll.protocols.ledger.registers import Lease
from tests.p2p.swarm.flooder import Flooder, fake_work

RUN = RunId(digest(b"run"))
QUOTA = NewcomerQuota(authors=32, per_minute=30)


def who(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


class World:
    """Swarms of one open run, and a peer that floods some of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.network = MemoryNetwork(seed=1, latency_s=0.02)
        self.hosts: dict[PeerId, MemoryHost] = {}
        self.group: asyncio.TaskGroup

    async def start(self, number: int, *seeds: int, target: int = 1) -> Swarm:
        host = self.network.host(who(number).peer_id)
        swarm = Swarm(
            host=host,
            identity=who(number),
            run=RUN,
            home=self.root / f"{number}",
            seeds=[self.place(seed) for seed in seeds],
            target=target,
            now=asyncio.get_running_loop().time,
            rng=random.Random(number),
            newcomers=QUOTA,
        )
        self.hosts[who(number).peer_id] = host
        ready = asyncio.Event()
        self.group.create_task(swarm.serve(ready.set))
        await ready.wait()
        swarm.end_replay()
        return swarm

    def place(self, number: int) -> PeerAddress:
        return PeerAddress(who(number).peer_id, (self.hosts[who(number).peer_id].maddr,))

    def flood(self, count: int, *victims: int) -> Flooder:
        made = Flooder(RUN, count, [fake_work(0)])
        host = self.network.host(who(200).peer_id)
        self.group.create_task(made.serve(host, [self.place(number) for number in victims]))
        return made

    async def until(self, done: Callable[[], bool], limit_s: float) -> float:
        """Virtual seconds until `done`."""
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(limit_s):
            while not done():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time() - began


def play(root: Path, scenario) -> None:
    class Over(Exception):
        """Ends the world."""

    async def main() -> None:
        world = World(root)
        try:
            async with asyncio.TaskGroup() as world.group:
                await scenario(world)
                raise Over
        except* Over:
            pass

    run_virtual(main())


def test_a_flood_stays_with_the_one_that_it_reaches(tmp_path: Path) -> None:
    """3,000 made-up authors at the first of two members; of a newcomer there the second hears when it worked."""
    honest, accepted = who(4).peer_id, who(3).peer_id

    async def scenario(world: World) -> None:
        first, second = await world.start(1), await world.start(2, 1)
        member = await world.start(3, 2)
        member.publish(fake_work(0))
        await world.until(lambda: accepted in first.ledger.vector(), 30.0)
        for swarm in (first, second):
            swarm.newcomers.accept([accepted])
        flood = world.flood(3000, 1)
        await world.until(lambda: first.newcomers.counts[2] == QUOTA.authors, 60.0)
        newcomer = await world.start(4, 1)
        newcomer.publish(fake_work(0, b"honest"))
        newcomer.publish_register(Lease("training", 0, -1, b"", -1, 10.0), 60.0)
        await world.until(lambda: honest in first.ledger.vector() and honest in first.live(Lease), 5.0)
        await asyncio.sleep(20)
        assert honest not in second.ledger.vector(), "nobody passes on who did not work"
        first.vouch(honest)
        await world.until(lambda: honest in second.ledger.vector(), 5.0)
        await world.until(lambda: flood.sent >= 3000, 60.0)
        for swarm in (first, second):
            assert {accepted, honest} <= set(swarm.ledger.vector())
        assert first.newcomers.counts[:2] == (2, 1)
        assert first.newcomers.counts[2] <= QUOTA.authors
        assert second.newcomers.counts[2] <= QUOTA.authors // 2
        assert second.newcomers.pruned == 0
        assert first.ledger.disk_bytes < 8 << 20, "most of it is SQLite's log, at most 4 MiB"
        for swarm, most in ((first, MAX_STRANGERS + 4), (second, MAX_STRANGERS // 2 + 4)):
            assert len(swarm.live(Lease)) <= most, "leases take their own places, and stay there, too"

    play(tmp_path, scenario)


def test_full_ledgers_do_not_swap_authors(tmp_path: Path) -> None:
    """Two connected members, each full with others' newcomers: they stay as they are."""

    async def scenario(world: World) -> None:
        first, second = await world.start(1), await world.start(2)
        for seed, swarm in ((1, first), (2, second)):
            made = Flooder(RUN, QUOTA.authors, [fake_work(0)], seed=seed)
            swarm.newcomers.is_replaying = True
            swarm.replication.anti_entropy.ledger.ledger.insert_all(made.decoded(), who(100 + seed).peer_id)
            swarm.newcomers.is_replaying = False
        before = set(first.ledger.vector()), set(second.ledger.vector())
        third = await world.start(3, 1, 2, target=2)
        await asyncio.sleep(120)
        assert (set(first.ledger.vector()), set(second.ledger.vector())) == before
        assert first.newcomers.pruned == second.newcomers.pruned == 0
        assert sum(third.newcomers.counts) == 1, "and bring them to nobody"

    play(tmp_path, scenario)


def test_who_lost_its_place_hears_it_and_comes_back_with_work(tmp_path: Path) -> None:
    count = QUOTA.authors + 1

    async def scenario(world: World) -> None:
        member = await world.start(1)
        others = [await world.start(10 + number, 1) for number in range(count)]
        await asyncio.sleep(5)
        for at, swarm in enumerate(others):
            swarm.publish(fake_work(0, bytes([at])))
            await asyncio.sleep(0.2)
        await world.until(lambda: member.newcomers.pruned >= 1, 60.0)
        lost = [swarm for at, swarm in enumerate(others) if who(10 + at).peer_id not in member.ledger.vector()]
        assert len(lost) == 1
        await world.until(lambda: bool(lost[0].replication.refusals), 60.0)
        told = lost[0].replication.refusals[who(1).peer_id]
        assert "lost its place to others (ledger_newcomers)" in told
        assert "stay connected" in told
        for at in range(2, count):
            member.vouch(who(10 + at).peer_id)  # the others worked: there are places again
        await world.until(lambda: not lost[0].replication.refusals, 60.0)
        assert lost[0].newcomers.counts[0] == 1

    play(tmp_path, scenario)


def test_only_who_was_held_back_is_passed_on_when_it_worked(tmp_path: Path) -> None:
    passed: list[PeerId] = []

    async def scenario(world: World) -> None:
        member = await world.start(1)
        member.replication.pass_on = passed.append
        made = Flooder(RUN, QUOTA.authors // 2 + 1, [fake_work(0)])
        entries, authors = made.decoded(), [author.peer_id for author in made.authors]
        member.ledger.insert_all(entries[:2], authors[0])
        member.vouch(authors[0])
        assert passed == []
        member.ledger.insert_all(entries[2:], authors[0])
        assert member.newcomers.is_pressed
        member.vouch(authors[1])
        member.vouch(authors[1])
        assert passed == [authors[1]]

    play(tmp_path, scenario)
