"""Brings the moments file that a run may begin with, before the worker begins. Nothing depends on it."""

import asyncio
from collections.abc import Callable

from atoll.node.needs import Network, moments_max_bytes, whom_to_ask
from atoll.protocols.errors import DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest
from atoll.protocols.run import RunSpec

ATTEMPT_S = 3600.0
RETRY_S = 5.0
PATIENCE_S = 600.0
"""After so long without anybody who has it, a node begins with fresh moments."""


async def bring_moments(
    spec: RunSpec, net: Network, say: Callable[[str], None], has_begun: Callable[[], bool]
) -> None:
    """Return when the file is in the store, or round 0 is over, or it was waited for long enough.

    `say` hears why it is waited for, and "" when that is over. `has_begun`: is there a contribution?
    """
    blob = Digest(spec.start.moments) if spec.start else Digest(b"")
    waited_s = 0.0
    while blob and not net.has_blob(blob) and not (has_begun() or _are_ahead(net)) and waited_s < PATIENCE_S:
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await net.fetch_blob(blob, whom_to_ask(spec.owner, net), moments_max_bytes(spec))
        except (DiskFault, PeerFault, Unreachable, TimeoutError) as error:
            reason = error.line() if isinstance(error, DiskFault) else "nobody reachable has them yet"
            say(f"waiting for the moments of the run's checkpoint: {reason}")
            await asyncio.sleep(RETRY_S)
            waited_s += RETRY_S
    if waited_s:
        say("")


def _are_ahead(net: Network) -> bool:
    """Whether others are past the round that needs it."""
    return any(lease.round > 0 for lease, _ in net.leases().values())
