"""What a node asks of the DHT for its run while nothing happens: requests a minute, on virtual time."""

import asyncio
import random
from collections import Counter

import pytest

from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import Listing
from atoll.p2p.discovery.dht_role import Part, Role
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.swarm.announcements import Announcements, DhtUse
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest

SERVERS = 12
MINUTES = 30


async def part_of(lab, bootstrap: list[PeerAddress], role: Role, *, is_alone: bool) -> PeerId:
    """A node in the DHT, with all that it announces and looks for."""
    host = await lab.host()
    identity = next(one for n in range(99) if (one := Identity(bytes([n]) * 32)).peer_id == host.peer_id)
    dht = Dht(host, identity, bootstrap, rng=random.Random(host.peer_id))
    run = RunId(digest(b"lonely" if is_alone else b"common"))
    announcements = Announcements(
        host=host,
        run=run,
        use=DhtUse(
            dht=dht,
            part=lambda: Part(role, "a test"),
            listing=Listing(bytes(run), 0) if role is Role.CLIENT else None,
            is_owner=is_alone,
        ),
        now=asyncio.get_running_loop().time,
        rng=random.Random(host.peer_id),
        publish=lambda *_: None,
        learn=lambda *_: None,
        is_alone=lambda: is_alone,
    )
    lab.spawn(announcements.serve())
    return host.peer_id


@pytest.mark.parametrize(("servers", "member_asks", "alone_asks"), [(1, 2.5, 3.5), (SERVERS, 12, 20)])
def test_a_quiet_node_asks_seldom(run_memory, monkeypatch, servers, member_asks, alone_asks):
    asked: Counter[PeerId] = Counter()
    ask = Dht._ask

    async def counting(dht: Dht, *request) -> bytes:
        asked[dht.host.peer_id] += 1
        return await ask(dht, *request)

    monkeypatch.setattr(Dht, "_ask", counting)

    async def scenario(lab) -> None:
        first = await part_of(lab, [], Role.SERVER, is_alone=False)
        bootstrap = [PeerAddress(first, ("/memory/1",))]
        for _ in range(servers - 1):
            await part_of(lab, bootstrap, Role.SERVER, is_alone=False)
        member, _ = [await part_of(lab, bootstrap, Role.CLIENT, is_alone=False) for _ in range(2)]
        alone = await part_of(lab, bootstrap, Role.CLIENT, is_alone=True)
        off = await part_of(lab, bootstrap, Role.OFF, is_alone=True)
        await asyncio.sleep(600)
        asked.clear()
        await asyncio.sleep(60 * MINUTES)
        assert 0 < asked[member] / MINUTES <= member_asks
        assert 0 < asked[alone] / MINUTES <= alone_asks
        assert asked[off] == 0

    run_memory(scenario)
