"""Fetches a file of a run from whoever has it, for as long as it takes."""

import asyncio
from collections.abc import Awaitable, Callable

from atoll.node.daemon.core.interfaces import BlobShelf
from atoll.p2p.blobs.asking import peers_to_ask
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError, DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short

ATTEMPT_S = 120.0
"""Seconds before an attempt is repeated with the peers that are connected by then. Parts that came are kept."""
RETRY_S = 5.0


async def fetch_file(
    blob: Digest, max_bytes: int, *, owner: PeerId, net: BlobShelf, report: Callable[[str], None], what: str
) -> None:
    """Return when the blob is complete on disk; peers are asked again and again, the run's owner first.

    `report` receives what is fetched or waited for, in which the file is called `what`, and "" when that is over.
    Raises ConfigError if the file is larger than legal: then nobody can train this run.
    """
    said = False
    while True:
        try:
            if await _is_sound(net, blob):
                break
            said = True
            report(f"fetching {what}")
            async with asyncio.timeout(ATTEMPT_S):
                await net.fetch_blob(blob, peers_to_ask(owner, net.neighbours()), max_bytes)
            continue
        except DecodeError as error:
            raise ConfigError(f"{what} of this run cannot be used: {error}", hint="ask its owner") from error
        except DiskFault as error:
            report(error.line())
        except (Unreachable, PeerFault, TimeoutError):
            report(f"waiting for {what}: nobody reachable has it yet")
        said = True
        await asyncio.sleep(RETRY_S)
    if said:
        report("")


async def _is_sound(net: BlobShelf, blob: Digest) -> bool:
    """Return whether a blob is on disk and undamaged. A damaged one is deleted, so that it is fetched again."""
    if not net.has_blob(blob):
        return False
    if await net.is_whole(blob):
        return True
    net.delete_blob(blob)
    return False


async def verify_whole(net: BlobShelf, blob: Digest, check: Callable[[], Awaitable[object]]) -> None:
    """Check a blob on the disk. Raises DecodeError if what was sent is wrong, CorruptFault if the disk damaged it.

    A damaged one is deleted, so that it is fetched again, and nobody is blamed for it.
    """
    try:
        await check()
    except DecodeError as error:
        if await _is_sound(net, blob):
            raise
        raise CorruptFault(f"blob {short(blob)} was damaged on the disk: {error}") from error
