"""Whole nodes: a newcomer that needs a snapshot, leases that offer false ones, and a peer that sends nothing."""

import asyncio
import contextlib

import pytest

from atoll.p2p.blobs.frames import PROTOCOL
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.registers import Lease, sign_register

MEMBERS, NEEDS_SNAPSHOT = 3, 13
IN_S = 5.0


def offer_false(w, liars, number):
    """Registers as any connected peer may bring them: each offers a blob that nobody has, of the newest round."""
    top = Round(w.nodes[0].driver.finality.last_final)
    for liar in liars:
        lease = Lease("observing", top, top, digest(b"nothing", liar.peer_id.encode()), top, 10.0)
        data = codec.encode(sign_register(w.spec.id, liar, 1, number, 600.0, lease))
        for node in w.nodes.values():
            if node.swarm is not None:
                node.swarm.replication._on_register(w.nodes[0].peer, data)


@pytest.mark.parametrize("count", [0, 2, 30])
def test_false_offers_of_strangers_do_not_delay_a_newcomer(world, count):
    liars = [Identity(bytes([150 + n]) * 32) for n in range(count)]

    async def silent(stream):
        await asyncio.sleep(3600)

    async def story():
        async with world(400, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(lambda: w.all_final(NEEDS_SNAPSHOT))
            host = w.network.host(Identity(bytes([201]) * 32).peer_id)
            host.set_handler(PROTOCOL, silent)

            async def attack():
                async with asyncio.TaskGroup() as group:
                    up = asyncio.Event()
                    group.create_task(host.serve(up.set))
                    await up.wait()
                    for number in range(1, 10_000):
                        offer_false(w, liars, number)
                        for other in list(w.hosts.values()):
                            with contextlib.suppress(Unreachable):
                                await host.connect(PeerAddress(other.peer_id, (other.maddr,)))
                        await asyncio.sleep(0.2)

            task = w._group.create_task(attack())
            await asyncio.sleep(2.0)
            newcomer = w.start(MEMBERS)
            assert await w.until(lambda: newcomer.worker.final >= NEEDS_SNAPSHOT, 100.0) <= IN_S
            task.cancel()

    run_virtual(story())
