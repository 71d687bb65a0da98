"""Reads the leases of a run over its calls wire, before this node is a member."""

import asyncio
from collections.abc import Iterable

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.register_store import RegisterStore, RegisterSync
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.errors import PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.registers import Lease


async def read_leases(
    host: Host, run: RunId, identity: Identity, members: Iterable[PeerAddress]
) -> dict[PeerId, Lease]:
    """The live leases that the first of `members` to answer knows; empty where none answers.

    Each is signed by its author, who may lie. The caller owns the deadline.
    """
    calls, now = Calls(host, run, answers=False), asyncio.get_running_loop().time
    store = RegisterStore(run, identity, 0)
    sync = RegisterSync(store, calls, now, lambda news: None)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(calls.serve())
        await calls.started.wait()
        try:
            for member in members:
                if await _has_answered(host, sync, member):
                    break
        finally:
            serving.cancel()
    return store.live(Lease, now())


async def _has_answered(host: Host, sync: RegisterSync, member: PeerAddress) -> bool:
    try:
        await host.connect(member)
        await sync.pull(member.peer)
    except (Unreachable, PeerFault):
        return False
    return True
