"""Fetches the moments that a run may begin with. Nothing depends on them.

Those that all members train come before the worker begins; those of shared experts come when round 0 begins and
the node knows its experts.
"""

import asyncio
from collections.abc import Callable, Iterable

from atoll.node.daemon.assets.fetching import ATTEMPT_S, RETRY_S
from atoll.node.daemon.core.interfaces import Network
from atoll.p2p.blobs.asking import peers_to_ask
from atoll.protocols.errors import DiskFault, PeerFault, Unreachable
from atoll.protocols.run.bounds import moments_max_bytes
from atoll.protocols.run.run_spec import RunSpec

POLL_S = 1.0
"""Seconds between two checks, during a fetch of moments, whether they are still worth it."""
PATIENCE_S = 600.0
"""Seconds for all moments files of one call. Then the node begins with fresh moments."""


async def fetch_moments(
    spec: RunSpec, files: Iterable[int], net: Network, report: Callable[[str], None], has_begun: Callable[[], bool]
) -> None:
    """Return when these moments files are on disk, or when it is too late for them, or after PATIENCE_S.

    It is too late when `has_begun` returns True, or more than half of the other members are past round 0. `report`
    receives what is fetched or waited for, and "" when that is over.
    """
    now = asyncio.get_running_loop().time
    until_s = now() + PATIENCE_S
    blobs = spec.start.moment_blobs if spec.start else ()
    lacking = [number for number in files if blobs and not net.has_blob(blobs[number])]
    if not lacking or has_begun() or _are_ahead(net):
        return
    async with asyncio.TaskGroup() as group:
        fetching = group.create_task(_fetch_files(spec, lacking, net, report))
        while not (fetching.done() or has_begun() or _are_ahead(net) or now() >= until_s):
            await asyncio.wait([fetching], timeout=POLL_S)
        fetching.cancel()
    report("")


async def _fetch_files(spec: RunSpec, lacking: list[int], net: Network, report: Callable[[str], None]) -> None:
    """Fetch one file after the other, each until it is here."""
    for at, number in enumerate(lacking, 1):
        name = f"file {at} of {len(lacking)}"
        report(f"fetching the moments of the run's checkpoint: {name}")
        while reason := await _try_file(spec, number, net, name):
            report(f"waiting for the moments of the run's checkpoint: {reason}")
            await asyncio.sleep(RETRY_S)
            report(f"fetching the moments of the run's checkpoint: {name}")


async def _try_file(spec: RunSpec, number: int, net: Network, name: str) -> str:
    """Fetch one file. Returns why it did not come, or nothing."""
    assert spec.start
    try:
        async with asyncio.timeout(ATTEMPT_S):
            holders = peers_to_ask(spec.owner, net.neighbours())
            await net.fetch_blob(spec.start.moment_blobs[number], holders, moments_max_bytes(spec, number))
    except DiskFault as error:
        return error.line()
    except TimeoutError:
        return f"{name} comes slowly"
    except (PeerFault, Unreachable):
        return "nobody reachable has them yet"
    return ""


def _are_ahead(net: Network) -> bool:
    """Return whether most others are past round 0. One of them alone may claim anything."""
    rounds = [lease.round for lease, _ in net.leases().values()]
    return 2 * sum(number > 0 for number in rounds) > len(rounds)
