"""Brings the moments files that this node needs of those that its run may begin with. Nothing depends on them.

What all train comes before the worker begins; where members share the experts, the files of ours come when round 0
begins and the node knows its share.
"""

import asyncio
from collections.abc import Callable, Iterable

from atoll.node.daemon.coordinator.interfaces import Network, moments_max_bytes, whom_to_ask
from atoll.protocols.errors import DiskFault, PeerFault, Unreachable
from atoll.protocols.run.run_spec import RunSpec

ATTEMPT_S = 120.0
"""Then whoever is connected by now is asked. What came is kept."""
RETRY_S = 5.0
LOOK_S = 1.0
"""How often is looked, during a fetch, whether it is still worth it."""
PATIENCE_S = 600.0
"""Of one call, for all its files together. Then a node begins with fresh moments."""


async def bring_moments(
    spec: RunSpec, files: Iterable[int], net: Network, say: Callable[[str], None], has_begun: Callable[[], bool]
) -> None:
    """Return when these files are in the store; or, whatever is under way, when it is too late or took too long.

    Too late: `has_begun` says so, or more than half of the others are past round 0. Too long: PATIENCE_S.
    `say` hears what is fetched or waited for, and "" when that is over.
    """
    now = asyncio.get_running_loop().time
    until_s = now() + PATIENCE_S
    blobs = spec.start.moment_blobs if spec.start else ()
    lacking = [number for number in files if blobs and not net.has_blob(blobs[number])]
    if not lacking or has_begun() or _are_ahead(net):
        return
    async with asyncio.TaskGroup() as group:
        fetching = group.create_task(_fetch(spec, lacking, net, say))
        while not (fetching.done() or has_begun() or _are_ahead(net) or now() >= until_s):
            await asyncio.wait([fetching], timeout=LOOK_S)
        fetching.cancel()
    say("")


async def _fetch(spec: RunSpec, lacking: list[int], net: Network, say: Callable[[str], None]) -> None:
    """One file after the other, each until it is here."""
    for at, number in enumerate(lacking, 1):
        while reason := await _try(spec, number, net, say, f"file {at} of {len(lacking)}"):
            say(f"waiting for the moments of the run's checkpoint: {reason}")
            await asyncio.sleep(RETRY_S)


async def _try(spec: RunSpec, number: int, net: Network, say: Callable[[str], None], name: str) -> str:
    """Fetch one file. Returns why it did not come, or nothing."""
    assert spec.start
    say(f"fetching the moments of the run's checkpoint: {name}")
    try:
        async with asyncio.timeout(ATTEMPT_S):
            holders = whom_to_ask(spec.owner, net)
            await net.fetch_blob(spec.start.moment_blobs[number], holders, moments_max_bytes(spec, number))
    except DiskFault as error:
        return error.line()
    except TimeoutError:
        return f"{name} comes slowly"
    except (PeerFault, Unreachable):
        return "nobody reachable has them yet"
    return ""


def _are_ahead(net: Network) -> bool:
    """Whether most others are past the round that needs it. One of them may say what it likes."""
    rounds = [lease.round for lease, _ in net.leases().values()]
    return 2 * sum(number > 0 for number in rounds) > len(rounds)
