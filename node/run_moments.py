"""Brings the moments files that this node needs of those that its run may begin with. Nothing depends on them.

What all train comes before the worker begins; where members share the experts, the files of ours come when round 0
begins and the node knows its share.
"""

import asyncio
from collections.abc import Callable, Iterable

from atoll.node.needs import Network, moments_max_bytes, whom_to_ask
from atoll.protocols.errors import DiskFault, PeerFault, Unreachable
from atoll.protocols.run import RunSpec

ATTEMPT_S = 3600.0
RETRY_S = 5.0
PATIENCE_S = 600.0
"""After so long without anybody who has it, a node begins with fresh moments."""


async def bring_moments(
    spec: RunSpec, files: Iterable[int], net: Network, say: Callable[[str], None], has_begun: Callable[[], bool]
) -> None:
    """Return when these files are in the store, or round 0 is over, or they were waited for long enough.

    `say` hears why they are waited for, and "" when that is over. `has_begun`: is it too late for them?
    """
    blobs = spec.start.moment_blobs if spec.start else ()
    lacking = [number for number in files if blobs and not net.has_blob(blobs[number])]
    waited_s = 0.0
    while lacking and not (has_begun() or _are_ahead(net)) and waited_s < PATIENCE_S:
        number = lacking[0]
        try:
            async with asyncio.timeout(ATTEMPT_S):
                holders = whom_to_ask(spec.owner, net)
                await net.fetch_blob(blobs[number], holders, moments_max_bytes(spec, number))
            del lacking[0]
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
