"""Five nodes on the simulated network: they converge, survive a partition, a death and a newcomer."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import astuple, replace

from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import Listing
from atoll.p2p.discovery.dht_role import Part, Role
from atoll.p2p.exchange.floors import RecordsGone
from atoll.p2p.exchange.orphans import WantedEntries
from atoll.p2p.host.interface import Connection, PeerAddress, PeerDisconnected, Route
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.membership.reputation import BANNED, FAULTS_ALLOWED, HALF_LIFE_S, ReputationTable
from atoll.p2p.swarm.announcements import DhtUse
from atoll.p2p.swarm.connections import FAVOUR_S, POLL_S
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.transports.host_base import Announcer
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, DiskFault, PeerFault, RunMismatch, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import Ack, Contribution, SlicedContribution, sign_entry
from atoll.protocols.ledger.registers import Lease, Register, sign_register

RUN = RunId(digest(b"run of the swarm tests"))


class World:
    """A network and the nodes in it; leaving the block stops them all."""

    def __init__(self, root: Path, **network: float) -> None:
        self.root = root
        self.network = MemoryNetwork(seed=1, **network)
        self.nodes: dict[int, Swarm] = {}
        self.hosts: dict[int, MemoryHost] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> "World":
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for number in tuple(self.nodes):
            await self.stop(number)
        await self._group.__aexit__(*error)

    async def start(
        self,
        number: int,
        *seeds: int,
        home: str = "",
        run: RunId = RUN,
        dht: Callable[[MemoryHost], DhtUse] | None = None,
        quota: Quota | None = None,
    ) -> Swarm:
        """Serve a node; its seeds are the nodes of these numbers."""
        identity = Identity(bytes([number]) * 32)
        host = self.network.host(identity.peer_id)
        addresses = [PeerAddress(self.hosts[seed].peer_id, (self.hosts[seed].maddr,)) for seed in seeds]
        swarm = Swarm(
            host=host,
            identity=identity,
            run=run,
            home=self.root / (home or f"n{number}"),
            seeds=addresses,
            target=8,
            quota=quota,
            dht=dht(host) if dht else None,
            now=asyncio.get_running_loop().time,
            wall_s=asyncio.get_running_loop().time,
            rng=random.Random(number),
        )
        self.nodes[number], self.hosts[number] = swarm, host
        ready = asyncio.Event()
        self._tasks[number] = self._group.create_task(swarm.serve(ready.set))
        await ready.wait()
        return swarm

    async def stop(self, number: int) -> None:
        """End a node, as a kill would: nothing is said."""
        del self.nodes[number]
        task = self._tasks.pop(number)
        task.cancel()
        await asyncio.wait([task])

    async def until_equal(self, limit_s: float = 60.0) -> float:
        """Wait until all ledgers have one vector; virtual seconds that took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        while len({tuple(sorted(node.ledger.vector().items())) for node in self.nodes.values()}) > 1:
            assert loop.time() - started < limit_s, [node.ledger.vector() for node in self.nodes.values()]
            await asyncio.sleep(0.05)
        return loop.time() - started


def ack(number: int) -> Ack:
    return Ack(Round(number), digest(b"set"), digest(number.to_bytes(4, "big")))


def lease(number: int) -> Lease:
    return Lease("training", Round(number), Round(-1), b"", -1, 10.0)


def peer(number: int) -> PeerId:
    return Identity(bytes([number]) * 32).peer_id


def test_old_leases_of_a_member_that_is_gone_hold_nobody_that_starts_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, latency_s=0.05) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            heard: list[bytes] = []
            for number in range(5):
                two.publish_register(lease(number), 60.0)
                await asyncio.sleep(5)
                heard += [
                    data for _, data in one.registers.missing({}, asyncio.get_running_loop().time(), 1 << 20)
                ]
            await world.stop(2)
            await world.stop(1)
            again = await world.start(1)
            for data in heard[:-1]:
                again.registers.merge(data, 0.0)
            assert peer(2) not in again.live(Lease), "a stranger recorded them and plays them again"

    run_virtual(main())


def test_for_how_long_it_was_down_is_told_at_its_start_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            assert one.down_s(20.0) == math.inf, "it never ran"
            await asyncio.sleep(70)
            one.publish_register(lease(1), 60.0)
            await world.stop(1)
            await asyncio.sleep(30)
            again = await world.start(1)
            assert 29.0 <= again.down_s(20.0) <= 31.0
            await asyncio.sleep(21)
            assert again.down_s(20.0) == 0.0, "a new driver of a node that is up was not away"

    run_virtual(main())


def test_members_are_favoured_again_and_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            favoured: list[PeerId] = []

            async def favour(peer: PeerId) -> None:
                favoured.append(peer)

            world.hosts[1].favour = favour
            await world.start(2, 1)
            await world.start(3, 1)
            await asyncio.sleep(3 * FAVOUR_S)
            assert favoured == [], "nobody is a member"
            one.newcomers.accept([peer(2)])
            await asyncio.sleep(3 * FAVOUR_S)
            assert len(favoured) >= 3, "a transport forgets it with the connection"
            assert {*favoured} == {peer(2)}

    run_virtual(main())


def test_of_too_many_leases_a_node_keeps_those_of_who_worked_most(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, latency_s=0.05) as world:
            one = await world.start(1)
            for number in (2, 3):
                (await world.start(number, 1)).publish_register(lease(number), 60.0)
                await asyncio.sleep(5)
            assert one.live(Lease).keys() == {peer(2), peer(3)}
            one.newcomers.accept([peer(2)])
            kept = one.registers.newest_leases(1)
            assert [codec.decode(data, Register, max_bytes=1000).author for data in kept] == [peer(2)]

    run_virtual(main())


def test_five_nodes_converge_part_heal_die_and_are_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, latency_s=0.05) as world:
            one = await world.start(1)
            for number in (2, 3, 4, 5):
                await world.start(number, 1)
            await asyncio.sleep(5)
            assert all(len(node.neighbours()) == 4 for node in world.nodes.values()), "exchange meshes them"

            for number, node in world.nodes.items():
                node.publish(ack(number))
                node.publish_register(lease(number), 60.0)
            assert await world.until_equal() < 1.0, "gossip, not anti-entropy"
            await asyncio.sleep(1)
            assert all(len(node.live(Lease)) == 5 for node in world.nodes.values())
            assert len(one.ledger.vector()) == 5

            world.network.cut([peer(1), peer(2)], [peer(3), peer(4), peer(5)])
            await asyncio.sleep(30)
            assert {row.peer for row in one.peers() if row.connected} == {peer(2)}
            for number, node in world.nodes.items():
                node.publish(ack(100 + number))
            await asyncio.sleep(5)
            assert one.ledger.vector()[peer(3)] == 1
            world.network.heal()
            assert await world.until_equal(150) < 120
            assert set(one.ledger.vector().values()) == {2}

            await world.stop(5)
            await asyncio.sleep(70)
            assert peer(5) not in one.live(Lease), "a lease dies with its node"
            one.publish(ack(200))
            six = await world.start(6, 1)
            six.publish(ack(6))
            six.publish_register(lease(6), 60.0)
            await world.until_equal()
            assert len(six.ledger.vector()) == 6
            assert six.ledger.vector()[peer(1)] == 3
            await asyncio.sleep(1)
            assert peer(6) in one.live(Lease)
            assert not any(row.faults for node in world.nodes.values() for row in node.peers())

    run_virtual(main(), seed=3)


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_ledger_of_a_long_partition_is_passed_on_at_once(tmp_path: Path, is_asked: bool) -> None:
    """One member of a side meets the other side, whose ledger has more entries than gossip takes."""

    async def main() -> None:
        async with World(tmp_path, latency_s=0.05) as world:
            for number in (1, 2, 3):
                await world.start(number, *range(1, number))
            await asyncio.sleep(5)
            world.network.cut([peer(1), peer(2)], [peer(3)])
            await asyncio.sleep(30)
            for number in range(300):
                world.nodes[3].publish(ack(number))
            world.network.heal()
            world.network.cut([peer(2)], [peer(3)])
            for node in world.nodes.values():
                node.replication.anti_entropy.rng = random.Random(1)
            first, second = (3, 1) if is_asked else (1, 3)
            await world.hosts[first].connect(PeerAddress(peer(second), (world.hosts[second].maddr,)))
            while world.nodes[1].ledger.vector().get(peer(3), 0) < 300:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            assert world.nodes[2].ledger.vector().get(peer(3)) == 300

    run_virtual(main(), seed=3)


def test_it_replays_to_the_same_trace(tmp_path: Path) -> None:
    async def main(root: Path) -> list[object]:
        async with World(root, latency_s=0.02, loss=0.05) as world:
            for number in (1, 2, 3):
                (await world.start(number, *((1,) if number > 1 else ()))).publish(ack(number))
            await world.until_equal()
            await asyncio.sleep(20)
            arrivals = [entry.id for _, entry in world.nodes[3].ledger.since(0)]
            return [arrivals, [host.statistics() for host in world.hosts.values()]]

    first = run_virtual(main(tmp_path / "a"), seed=5)
    assert first == run_virtual(main(tmp_path / "b"), seed=5)


def test_a_restarted_node_goes_on_in_its_feed_without_any_seed(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await world.start(1)
            two = await world.start(2, 1)
            two.publish(ack(1))
            await two.wait_synced()
            await world.until_equal()
            epoch = two.registers.versions()[(peer(2), "addresses")][0]
            await world.stop(2)
            await asyncio.sleep(1)
            two = await world.start(2)
            await two.wait_synced()
            two.publish(ack(2))
            await world.until_equal()
            assert two.ledger.vector() == {peer(2): 2}
            assert two.registers.versions()[(peer(2), "addresses")][0] == epoch + 1

    run_virtual(main())


def test_a_home_that_lost_its_ledger_gets_its_own_feed_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            two.publish(ack(1))
            await two.wait_synced()
            await world.until_equal()
            await world.stop(2)
            two = await world.start(2, 1, home="empty")
            await two.wait_synced()
            assert two.publish(ack(2)).seq == 1
            await world.until_equal()
            assert not one.ledger.equivocators()

    run_virtual(main())


def test_entries_are_never_skipped_by_a_slow_reader(tmp_path: Path) -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            for number in range(10):
                one.publish(ack(number))
            async with asyncio.timeout(60):
                async for _, entry in two.entries():
                    seen.append(entry.seq)
                    await asyncio.sleep(0.2)
                    if len(seen) % 2 == 0:
                        one.publish(ack(100 + len(seen)))
                    if len(seen) == 19:
                        return seen
        return []

    assert run_virtual(main()) == list(range(19))


def test_what_a_ballot_names_is_asked_for_unless_it_is_here(tmp_path: Path, monkeypatch) -> None:
    """Each ballot of a reduced round names all Reductions: readers would exchange with all their neighbours."""

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            entry = one.publish(ack(1))
            await world.until_equal()
            asked: list[PeerId] = []
            proposers: list[PeerId | None] = []
            monkeypatch.setattr(two.replication.anti_entropy, "ask", asked.append)
            monkeypatch.setattr(two.newcomers, "require", lambda entries, proposer: proposers.append(proposer))
            two.require([entry.id], peer(1))
            assert not asked
            two.require([entry.id, digest(b"an entry that is not here")], peer(1))
            assert asked == [peer(1)]
            two.require([digest(b"an entry that is not here")], None)
            assert proposers == [peer(1), None]

    run_virtual(main())


def test_an_equivocator_is_known_to_all_and_relays_are_innocent(tmp_path: Path) -> None:
    liar = Identity(bytes([9]) * 32)
    branches = [sign_entry(RUN, liar, 0, b"", ack(number)) for number in (1, 2)]

    async def main() -> None:
        async with World(tmp_path) as world:
            (await world.start(1)).ledger.insert_all(branches[:1])
            (await world.start(2)).ledger.insert_all(branches[1:])
            await world.start(3, 1, 2)
            await asyncio.sleep(60)
            for node in world.nodes.values():
                assert node.ledger.equivocators() == {liar.peer_id}
                assert node.reputations.get(liar.peer_id).faults
                assert not any(row.faults for row in node.peers() if row.peer != liar.peer_id)

    run_virtual(main())


def test_who_passes_on_a_second_history_by_gossip_is_innocent(tmp_path: Path) -> None:
    liar = Identity(bytes([9]) * 32)
    first, second = (sign_entry(RUN, liar, 0, b"", ack(number)) for number in (1, 2))

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            one.ledger.insert_all([first])
            two.replication._gossip.publish("entry", codec.encode(second), second.author)
            await asyncio.sleep(1)
            assert one.ledger.equivocators() == {liar.peer_id}
            assert one.reputations.get(liar.peer_id).faults == 1
            assert one.reputations.get(peer(2)).faults == 0

    run_virtual(main())


def test_a_killed_peer_is_lost_at_once_where_the_host_says_it_later(tmp_path: Path, monkeypatch) -> None:
    """p2pd tells of no lost connection: its host compares lists each second. Streams end with their peer."""
    announce = Announcer.announce
    monkeypatch.setattr(
        Announcer, "announce", lambda self, event: isinstance(event, PeerDisconnected) or announce(self, event)
    )

    async def story() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            await world.start(2, 1)
            await asyncio.sleep(10 + 0.4 * POLL_S)
            peer = world.hosts[2].peer_id
            assert one.neighbours() == [peer]
            world.network.kill(peer)
            await asyncio.sleep(0.2)
            assert one.neighbours() == []

    run_virtual(story())


def test_a_peer_of_another_run_is_left_alone_but_not_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1, run=RunId(digest(b"other")))
            await asyncio.sleep(30)
            assert not two.neighbours()
            assert not any(row.connected for row in two.peers())
            assert "trains" in next(iter(two.discovery_table().values()))
            assert one.reputations.get(peer(2)).faults == 0

    run_virtual(main())


def test_a_peer_that_sends_garbage_is_sent_away_for_a_while(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            for number in range(int(FAULTS_ALLOWED) + 2):
                two.calls.notify(peer(1), "gossip.entry", b"garbage %d" % number)
            await asyncio.sleep(15)
            assert one.reputations.get(peer(2)).faults > FAULTS_ALLOWED
            assert peer(2) not in one.neighbours()
            assert not [row for row in one.peers() if row.connected]
            assert one.publish(ack(1)).seq == 0, "the node itself goes on"

    run_virtual(main())


def test_gossip_with_a_forged_signature_is_blamed_and_not_stored(tmp_path: Path) -> None:
    """The author is a third one, so that only the signature tells a forgery from news that is passed on."""
    author = Identity(bytes([9]) * 32)
    entry = sign_entry(RUN, author, 0, b"", ack(1))
    register = sign_register(RUN, author, 1, 1, 20.0, lease(1))

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            gossip = two.replication._gossip
            for topic, news in (("entry", entry), ("register", register)):
                before = one.reputations.get(peer(2)).faults
                gossip.publish(topic, codec.encode(replace(news, signature=bytes(64))), author.peer_id)
                await asyncio.sleep(1)
                assert one.reputations.get(peer(2)).faults == before + 1
            assert author.peer_id not in one.ledger.vector()
            assert author.peer_id not in one.live(Lease)
            gossip.publish("entry", codec.encode(entry), author.peer_id)
            gossip.publish("register", codec.encode(register), author.peer_id)
            await asyncio.sleep(1)
            assert author.peer_id in one.ledger.vector()
            assert author.peer_id in one.live(Lease)

    run_virtual(main())


def test_blobs_travel_between_nodes_that_were_not_connected(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 * (1 << 20) + 5)

    async def main() -> None:
        async with World(tmp_path, bandwidth_bps=100e6) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            blob = one.blobs.store.add_bytes(data)
            await world.hosts[2].disconnect(peer(1))
            path = await two.fetch(blob, [peer(2), peer(1)], 4 << 20)
            assert path.read_bytes() == data
            assert next(row for row in two.peers() if row.peer == peer(1)).blob_bytes_down == len(data)

    run_virtual(main())


@pytest.mark.parametrize("kind", ["gathered", "reduced", "relayed"])
def test_a_small_payload_comes_before_the_record_that_names_it(tmp_path: Path, monkeypatch, kind: str) -> None:
    """In runs whose rounds may be reduced, and to a neighbour behind a relay, it is not sent unasked."""
    if kind == "relayed":
        monkeypatch.setattr(MemoryHost, "connections", relayed(MemoryHost.connections))

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            await asyncio.sleep(2 * POLL_S)
            blob = one.blobs.store.add_bytes(b"payload" * 1000)
            record = Contribution(Round(0), digest(b"base"), blob, 8, 1000, 64, 4.0)
            if kind == "reduced":
                record = SlicedContribution(*astuple(record), rows=digest(b"rows"))
            entry = one.publish(record)
            await world.until_equal()
            assert two.ledger.get(entry.id) is not None
            # Nobody is asked: no holder is named.
            if kind == "gathered":
                assert (await two.fetch(blob, [], 7000)).read_bytes() == b"payload" * 1000
            else:
                with pytest.raises(Unreachable):
                    await two.fetch(blob, [], 7000)

    run_virtual(main())


def relayed(connections: Callable[[MemoryHost], Awaitable[Sequence[Connection]]]):
    async def found(host: MemoryHost) -> list[Connection]:
        return [Connection(each.peer, each.maddr, Route.RELAYED) for each in await connections(host)]

    return found


def in_dht(world: World, *bootstrap: int, public: bool = True) -> Callable[[MemoryHost], DhtUse]:
    """A server of the DHT without bootstrap peers, else a client."""
    part = Part(Role.CLIENT if bootstrap else Role.SERVER, "a test")
    seeds = [PeerAddress(world.hosts[one].peer_id, (world.hosts[one].maddr,)) for one in bootstrap]

    def use(host: MemoryHost) -> DhtUse:
        number = len(world.hosts) + 1
        identity = next(
            one for one in map(Identity, (bytes([n]) * 32 for n in range(99))) if one.peer_id == host.peer_id
        )
        dht = Dht(host, identity, seeds, rng=random.Random(number))
        listing = Listing(b"x" * number, 0) if public else None
        return DhtUse(dht=dht, part=lambda: part, listing=listing, is_owner=False)

    return use


ANOTHER = RunId(digest(b"another run"))


def test_the_dht_alone_brings_nodes_together(tmp_path: Path) -> None:
    """A node of another run serves the DHT."""

    async def main() -> None:
        async with World(tmp_path) as world:
            await world.start(9, run=ANOTHER, dht=in_dht(world))
            for number in (1, 2, 3):
                await world.start(number, dht=in_dht(world, 9))
            await asyncio.sleep(60)
            assert all(len(world.nodes[number].neighbours()) == 2 for number in (1, 2, 3))
            assert world.nodes[9].neighbours() == []
            assert world.nodes[1].discovery_table() == {"dht": "client, knows 1 server: a test"}
            assert {"dht"} <= {source for row in world.nodes[3].peers() for source in row.sources}
            assert world.nodes[1].expects_members()

    run_virtual(main())


def test_members_of_a_private_run_are_neither_announced_nor_looked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            await world.start(9, run=ANOTHER, dht=in_dht(world))
            await world.start(1, dht=in_dht(world, 9))
            hidden = await world.start(2, dht=in_dht(world, 9, public=False))
            await asyncio.sleep(900)
            assert not hidden.neighbours()
            assert not hidden.expects_members()
            assert not world.nodes[1].neighbours(), "it was not announced"

    run_virtual(main())


def test_peers_of_other_runs_stay_connected_for_the_dht_and_are_no_neighbours(tmp_path: Path) -> None:
    """Without a part in the DHT they are disconnected; with one, no part of the swarm sees them."""

    async def main() -> None:
        async with World(tmp_path) as world:
            await world.start(1, dht=in_dht(world))
            await world.start(2, 1, run=ANOTHER, dht=in_dht(world, 1))
            await world.start(3, 1)
            await asyncio.sleep(60)
            assert [node.neighbours() for node in world.nodes.values()] == [[peer(3)], [], [peer(1)]]
            assert {link.peer for link in await world.hosts[1].connections()} == {peer(2), peer(3)}
            await world.start(4, 3, run=ANOTHER)
            await asyncio.sleep(60)
            assert peer(4) not in {link.peer for link in await world.hosts[3].connections()}

    run_virtual(main())


def test_a_full_disk_is_said_and_the_node_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1, quota=Quota(disk_bytes=24 * 4096))
            await two.wait_synced()
            two.newcomers.accept([peer(1)])
            for number in range(300):
                one.publish(ack(number))
                await asyncio.sleep(0.1)
            assert isinstance(two.replication.local_fault, DiskFault)
            assert two.replication.local_fault.hint
            assert 0 < two.ledger.vector()[peer(1)] < 300
            assert not any(row.faults for node in world.nodes.values() for row in node.peers())
            await world.stop(2)
            two = await world.start(2, 1)
            await world.until_equal()
            assert two.replication.local_fault is None

    run_virtual(main())


def test_a_full_ledger_is_said_without_a_fault(tmp_path: Path) -> None:
    """Its last part takes this node's own entries, and no others."""

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            two = await world.start(2, 1)
            await two.wait_synced()
            assert two.replication.local_fault is None
            two.newcomers.shares.quota = Quota(disk_bytes=two.ledger._db.used_bytes)
            one.publish(ack(1))
            two.publish(ack(2))
            await asyncio.sleep(60)
            assert list(two.ledger.vector()) == [peer(2)]
            assert one.ledger.vector() == {peer(1): 1, peer(2): 1}
            assert "this node's own records only" in two.replication.local_fault.line()
            assert one.replication.refusals == {peer(2): two.ledger.refusal(peer(1))}
            assert two.ledger.refusal(peer(1)).startswith("this ledger is full (ledger_bytes)")

    run_virtual(main())


def test_a_fault_now_and_then_never_bans() -> None:
    """A score halves in HALF_LIFE_S: one fault in that time stays below 2 for ever."""
    now = [0.0]
    standings = ReputationTable(lambda: now[0])
    for _ in range(1000):
        assert not standings.blame(peer(1), DecodeError("a flipped bit"))
        assert standings.get(peer(1)).score <= 2
        now[0] += HALF_LIFE_S


def test_a_ban_is_logged_with_the_whole_name_of_the_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The oracle of real swarms reads it: no correct node is ever banned."""

    async def main() -> None:
        async with World(tmp_path) as world:
            one = await world.start(1)
            for _ in range(int(FAULTS_ALLOWED)):
                one.blame(peer(2), DecodeError("bad"))
            assert BANNED not in caplog.text
            one.blame(peer(2), DecodeError("bad"))

    run_virtual(main())
    assert f"{peer(2)} {BANNED}" in caplog.text


def test_standing_counts_proofs_only() -> None:
    now = [0.0]
    standings = ReputationTable(lambda: now[0])
    for _ in range(100):
        assert not standings.blame(peer(1), PeerFault("refused"))
    for _ in range(int(FAULTS_ALLOWED)):
        assert not standings.blame(peer(1), DecodeError("bad"))
        now[0] += 1
    assert standings.blame(peer(1), DecodeError("bad"))
    assert standings.is_banned(peer(1))
    now[0] += 601
    assert not standings.is_banned(peer(1))
    assert standings.blame(peer(2), RunMismatch("other"))
    assert standings.get(peer(2)).faults == 0


def test_an_excluded_peer_reads_why_and_gets_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one, two, three = await world.start(1), await world.start(2, 1), await world.start(3, 1, 2)
            await asyncio.sleep(5)
            for number, node in world.nodes.items():
                node.publish(ack(number))
                node.publish_register(lease(number), 600.0)
            blob = one.blobs.store.add_bytes(b"payload" * 1000)
            await world.until_equal()
            await asyncio.sleep(1)
            assert peer(3) in one.live(Lease)
            for node in (one, two):
                node.exclude(peer(3), "excluded: noise")
                assert peer(3) not in node.neighbours()
                assert peer(3) not in node.live(Lease)
            three.publish(ack(4))
            three.publish_register(lease(4), 600.0)
            await asyncio.sleep(60)
            assert set(three.replication.refusals.values()) == {"excluded: noise"}
            assert peer(3) not in {*one.live(Lease), *two.live(Lease)}
            assert one.ledger.vector()[peer(3)] == 2, "what it writes stays readable: a set may name it"
            with pytest.raises(Unreachable):
                await three.fetch(blob, [peer(1)], 1 << 20)
            assert (await two.fetch(blob, [peer(1)], 1 << 20)).exists()
            await world.stop(3)
            again = await world.start(3, 1, 2)
            await asyncio.sleep(30)
            assert "excluded: noise" in again.replication.refusals.values()

    run_virtual(main())


def test_what_followed_from_a_chain_is_forgotten_over_the_same_connections(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one, two, three = await world.start(1), await world.start(2, 1), await world.start(3, 1, 2)
            await asyncio.sleep(5)
            for number, node in world.nodes.items():
                node.publish(ack(number))
            await world.until_equal()
            blob = one.blobs.store.add_bytes(b"payload" * 1000)
            connected_s = [known.connected_at for known in one.discovery.book.all()]
            one.newcomers.accept([peer(1), peer(2)], by_work=False)
            for _ in range(3):
                one.newcomers.accept([peer(2)])
            one.end_replay()
            is_accepted = one.calls._answers._is_accepted
            assert [is_accepted(peer(number)) for number in (2, 3)] == [True, False]
            one.exclude(peer(3), "excluded: noise")
            one.replication.records_gone = "keeps recent records only"
            one.fetch_orphans(WantedEntries(Round(1), (Digest(bytes(32)),)))
            assert one.newcomers.shares.rounds(peer(2)) == 3
            one.forget_chain()
            assert one.newcomers.is_replaying, "nobody knows yet who counts in the other chain"
            assert one.ledger.newcomers is one.newcomers
            assert one.newcomers.shares.rounds(peer(2)) == 0, "its replay counts each round again"
            assert not one.newcomers.is_accepted(peer(2))
            assert not is_accepted(peer(2)), "nor do calls take it for a member"
            assert one.newcomers.shares.holds(peer(2))
            assert not one.replication.records_gone
            assert not one.replication.orphans.wanted
            assert peer(3) in one.neighbours()
            assert one.ledger.admits(peer(3))
            assert (await three.fetch(blob, [peer(1)], 1 << 20)).exists()
            two.publish(ack(5))
            three.publish(ack(6))
            await asyncio.sleep(30)
            assert one.ledger.vector() == two.ledger.vector()
            await asyncio.sleep(200)
            assert peer(3) in {known.peer for known in one.discovery.book.all()}, "its addresses are learnt again"
            assert connected_s[0] in [known.connected_at for known in one.discovery.book.all()]
            with one.subscribed():
                assert len(one._notifiers) == 1
            assert not one._notifiers

    run_virtual(main())


def test_that_records_are_gone_holds_until_a_whole_exchange_shows_that_it_is_not_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path) as world:
            one, _, _ = await world.start(1), await world.start(2, 1), await world.start(3, 1, 2)
            await asyncio.sleep(5)
            replication = one.replication

            def says_gone(liar: PeerId) -> None:
                replication._on_gone(RecordsGone(liar, 0))

            says_gone(peer(9))
            await asyncio.sleep(60)
            assert replication.records_gone, "strangers that have as little show nothing"
            one.newcomers.accept([peer(2)], by_work=False)
            await asyncio.sleep(60)
            assert not replication.records_gone, "a member showed it"
            says_gone(peer(3))
            one.newcomers = one._make_newcomers()
            one.ledger.newcomers = one.newcomers
            await asyncio.sleep(60)
            assert not replication.records_gone, "who said so has them"

    run_virtual(main())
