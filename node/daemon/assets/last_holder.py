"""A node that leaves stays while it alone has the run's newest state and another one is fetching that. Bounded."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease

logger = logging.getLogger(__name__)

STAYS_S = 60.0
"""Longest stay: three times as long as a lease of the presets takes to say what its member has."""
POLL_S = 0.25
"""Seconds between two looks at the leases."""


def is_last(applied: int, voters: Collection[PeerId], staying: Mapping[PeerId, Lease]) -> bool:
    """Whether members stay, and none of them has the final state of round `applied`, as far as their leases say.

    `voters`: of the round after `applied`. Pure.
    """
    # A lease is as old as its round, so it names an earlier final round than its member has. But who votes for a
    # set has its payloads on disk (docs/finality.md), and who trains the next round has closed this one.
    return (
        applied >= 0
        and bool(staying)
        and not any(
            lease.final >= applied or (peer in voters and lease.round > applied) for peer, lease in staying.items()
        )
    )


async def stay_while_last(
    applied: int,
    voters: Collection[PeerId],
    staying: Callable[[], Mapping[PeerId, Lease]],
    log: RoundLog,
    limit_s: float = STAYS_S,
) -> bool:
    """Return when a member of those `staying` has the final state of round `applied`, or nobody stays.

    Returns False, and warns the user, if that is not so after `limit_s`: the others cannot go on without this
    node, which has left. `voters`: of the round after `applied`.
    """
    is_told = False
    try:
        async with asyncio.timeout(limit_s):
            while is_last(applied, voters, staying()):
                if not is_told:
                    is_told = True
                    log.event("hands_on", round=applied)
                    logger.warning(
                        "nobody else has round %d yet; ends as soon as a member has it, or in %.0f s",
                        applied, limit_s,
                    )  # fmt: skip
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        logger.warning("nobody else has round %d: the others go on from it when this node is back", applied)
        return False
    return True
