"""A run by invitation: guests take part, strangers hear why they do not, members are left alone."""

import asyncio
import random
from pathlib import Path

import msgspec

from atoll.node.runs.presets import preset
from atoll.p2p.exchange.sync import Exchange
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.transports.memory.memory_network import MemoryHost, MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Admit, Leave
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.admission import AdmissionSpec, make_token, prove

OWNER, ANN, BEN, EVE = (Identity(bytes([number]) * 32) for number in range(1, 5))
SPEC = msgspec.structs.replace(preset("tiny", OWNER.peer_id, 1), admission=AdmissionSpec(mode="invite"))
NOW, DAY_S = 1_800_000_000, 86400
TOKEN = make_token(SPEC.id, OWNER, bytes(32), NOW + DAY_S)
LEASE = Lease("training", Round(0), Round(-1), b"", -1, 10.0)


class World:
    """Members behind gates with one clock; a stranger has none, as a changed program would."""

    def __init__(self, root: Path) -> None:
        self.root, self.unix_s = root, float(NOW)
        self.network = MemoryNetwork(seed=1, latency_s=0.02)
        self.hosts: dict[PeerId, MemoryHost] = {}
        self.group: asyncio.TaskGroup

    async def start(self, who: Identity, *seeds: Identity, gated: bool = True) -> Swarm:
        host = self.network.host(who.peer_id)
        places = [PeerAddress(seed.peer_id, (self.hosts[seed.peer_id].maddr,)) for seed in seeds]
        swarm = Swarm(
            host=host,
            identity=who,
            run=SPEC.id,
            home=self.root / who.peer_id,
            seeds=places,
            target=8,
            now=asyncio.get_running_loop().time,
            rng=random.Random(1),
            gate=AdmissionGate(SPEC, who.peer_id, lambda: self.unix_s) if gated else None,
        )
        self.hosts[who.peer_id] = host
        ready = asyncio.Event()
        self.group.create_task(swarm.serve(ready.set))
        await ready.wait()
        return swarm

    async def join(self, who: Identity, *seeds: Identity, gated: bool = True, token=TOKEN) -> Swarm:
        """Start, sync, and open the feed with the permit."""
        swarm = await self.start(who, *seeds, gated=gated)
        await swarm.wait_synced()
        swarm.publish(Admit(token.permit, prove(SPEC.id, token, who.peer_id)))
        swarm.publish(Leave(Round(0)))
        return swarm


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


def test_guests_take_part_and_strangers_hear_why_they_do_not(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        owner = await world.start(OWNER)
        owner.publish(Leave(Round(0)))
        ann = await world.start(ANN, OWNER)
        ann.publish_register(LEASE, 60.0)  # before anybody knows that it may
        await ann.wait_synced()
        ann.publish(Admit(TOKEN.permit, prove(SPEC.id, TOKEN, ANN.peer_id)))
        eve = await world.start(EVE, OWNER, ANN, gated=False)
        eve.publish_register(LEASE, 60.0)
        for number in range(20):
            eve.publish(Leave(Round(number)))
        await asyncio.sleep(40)
        for node in (owner, ann):
            assert set(node.ledger.vector()) == {OWNER.peer_id, ANN.peer_id}
            assert set(node.live(Lease)) == {ANN.peer_id}, "pulled once it was admitted"
            assert not any(row.faults for row in node.peers()), "whoever is not admitted broke no protocol"
        assert set(eve.ledger.vector()) == {OWNER.peer_id, ANN.peer_id, EVE.peer_id}, "reading is free"
        assert "is by invitation" in eve.replication.refusals[OWNER.peer_id]
        assert eve.replication.refusal in eve.replication.refusals.values()
        assert ann.replication.refusal == owner.replication.refusal == ""
        assert owner.replication.refusals == {}

    play(tmp_path, scenario)


def test_one_peer_that_admits_this_node_is_enough(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        owner = await world.start(OWNER)
        owner.publish(Leave(Round(0)))
        ann = await world.join(ANN, OWNER)
        told = ann.replication._on_told
        state = {"closed": False, "forked": (), "entries": (), "proofs": ()}
        told(BEN.peer_id, Exchange({}, **state, refusal="this run is mine"))
        told(EVE.peer_id, Exchange({}, **state))
        await asyncio.sleep(40)
        assert ann.replication.refusal == ""
        assert ann.replication.refusals == {BEN.peer_id: "this run is mine"}
        told(OWNER.peer_id, Exchange({ANN.peer_id: 1}, **state, refusal="excluded"))
        assert ann.replication.refusal, "who excluded it has its feed, and takes nothing more"
        told(OWNER.peer_id, Exchange({ANN.peer_id: 1}, **state))
        assert not ann.replication.refusal
        ann.replication.forget(OWNER.peer_id)
        assert ann.replication.refusal == "this run is mine"

    play(tmp_path, scenario)


def test_a_late_guest_gets_in_through_nobody_and_old_guests_stay(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        owner = await world.start(OWNER)
        owner.publish(Leave(Round(0)))
        ann = await world.join(ANN, OWNER)
        await asyncio.sleep(5)
        world.unix_s += 3 * DAY_S
        eve = await world.join(EVE, OWNER, ANN)
        await asyncio.sleep(30)
        assert set(owner.ledger.vector()) == set(ann.ledger.vector()) == {OWNER.peer_id, ANN.peer_id}
        assert "the permit expired 2 d 0 h ago; ask for a new invite" in eve.replication.refusals[ANN.peer_id]
        fresh = make_token(SPEC.id, OWNER, bytes([1]) * 32, NOW + 9 * DAY_S)
        ben = await world.join(BEN, ANN, token=fresh)  # knows only Ann, whose permit has expired meanwhile
        await asyncio.sleep(30)
        members = {OWNER.peer_id, ANN.peer_id, BEN.peer_id}
        assert members <= set(ben.ledger.vector())
        assert set(owner.ledger.vector()) == set(ann.ledger.vector()) == members

    play(tmp_path, scenario)
