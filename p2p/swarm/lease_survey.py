"""Reads the leases of a run over its calls wire, before this node is a member."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.membership.register_sync import RegisterSync
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.errors import PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.registers import Lease

ASK_S = 15.0
"""How long anybody is waited for: who joins looks at this."""
REST_S = 3.0
"""How long the others are waited for once one has answered."""


async def read_leases(
    host: Host, run: RunId, identity: Identity, members: Iterable[PeerAddress]
) -> dict[PeerId, Lease]:
    """The live leases that `members` know, all of which are asked at once; empty where none answers.

    Each is signed by its author, who may lie. What came within ASK_S, and REST_S of the first answer, is returned.
    """
    calls, now = Calls(host, run, answers=False), asyncio.get_running_loop().time
    store = RegisterStore(run, identity, 0)
    sync = RegisterSync(store, calls, now, lambda news: None)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(calls.serve())
        await calls.started.wait()
        try:
            async with asyncio.timeout(ASK_S) as deadline, asyncio.TaskGroup() as ask_group:

                def answered() -> None:
                    deadline.reschedule(min(deadline.when() or math.inf, now() + REST_S))

                for member in members:
                    ask_group.create_task(_ask(host, sync, member, answered))
        except TimeoutError:
            pass  # one that answers nothing must not hide what the others said
        finally:
            serving.cancel()
    return store.live(Lease, now())


async def _ask(host: Host, sync: RegisterSync, member: PeerAddress, answered: Callable[[], None]) -> None:
    with contextlib.suppress(Unreachable, PeerFault):
        await host.connect(member)
        await sync.pull(member.peer)
        answered()
