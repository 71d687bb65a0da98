"""Leases of a run, asked by a node that is no member yet, of all members at once: all transports."""

import asyncio

import pytest

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.membership.register_sync import METHOD, KnownVersions, RegisterBatch, RegisterSync
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.swarm.lease_survey import read_leases
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest, peer_id_of
from atoll.protocols.ledger.registers import Lease

RUN, OTHER_RUN = RunId(digest(b"run")), RunId(digest(b"other"))
MEMBER, NEWCOMER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
NOBODY = PeerAddress(peer_id_of(bytes([9]) * 32), ("/ip4/127.0.0.1/tcp/1",))
LEASE = Lease("training", Round(7), 5, b"", -1, 100.0)


def test_a_newcomer_reads_what_a_member_knows_and_can_be_a_member_afterwards(run_lab, dial):
    async def scenario(lab):
        made = []
        asker, member = await lab.host(), await lab.host(prepare=lambda host: made.append(Calls(host, RUN)))
        (calls,), now = made, asyncio.get_running_loop().time
        registers = RegisterStore(RUN, MEMBER, 1)
        RegisterSync(registers, calls, now, lambda news: None)
        registers.publish(LEASE, 600.0, now())
        async with asyncio.TaskGroup() as group:
            serving = [group.create_task(calls.serve())]
            address = await dial(member)
            found = await read_leases(asker, RUN, NEWCOMER, [NOBODY, address])
            assert found == {MEMBER.peer_id: LEASE}
            assert await read_leases(asker, OTHER_RUN, NEWCOMER, [address]) == {}, "it is of another run"
            assert await read_leases(asker, RUN, NEWCOMER, [NOBODY]) == {}
            with pytest.raises(Unreachable):
                await calls.call(asker.peer_id, METHOD, KnownVersions(()), RegisterBatch)
            # From now on the newcomer answers, over the same host.
            ours = Calls(asker, RUN)
            theirs = RegisterStore(RUN, NEWCOMER, 1)
            sync = RegisterSync(theirs, ours, now, lambda news: None)
            serving.append(group.create_task(ours.serve()))
            await ours.started.wait()
            assert await sync.pull(address.peer) == 1
            for task in serving:
                task.cancel()

    run_lab(scenario)
