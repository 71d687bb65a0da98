"""A newcomer whose first neighbour is as new as it waits a little for one that has records.

A whole exchange with such a neighbour brings nothing. The node would begin as in round 0, and take the rounds that
members then bring for open ones, until it has read their records.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.ledger.registers import Lease

LIMIT_S = 8.0
"""Then it begins all the same: who has the records may be gone, or a lease lies."""


async def wait_for_records(swarm: Swarm, leases: Callable[[], Iterable[Lease]]) -> None:
    """Return at once with a ledger that is not empty, or in a run that just begins; else soon, as said above.

    `leases` returns those of others.
    """
    repair, is_ready = swarm.replication.anti_entropy, bool(swarm.ledger.vector())
    with swarm.subscribed() as changes, suppress(TimeoutError):
        before, repair.on_exchange = repair.on_exchange, changes.notify
        try:
            async with asyncio.timeout(LIMIT_S):
                while not (is_ready or _has_just_begun([*leases()])):
                    await changes.wait()
                    is_ready = bool(swarm.ledger.vector()) and repair.is_caught_up()
        finally:
            repair.on_exchange = before


def _has_just_begun(leases: list[Lease]) -> bool:
    """Whether somebody is past its own start, and nobody calls a round final: there are no records yet."""
    return any(lease.activity != "syncing" for lease in leases) and all(lease.final < 0 for lease in leases)
