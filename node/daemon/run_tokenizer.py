"""Fetches the tokenizer of a run. The worker cannot begin without it."""

import asyncio
from collections.abc import Callable

from atoll.node.daemon.coordinator.interfaces import Network, peers_to_ask
from atoll.protocols.errors import ConfigError, DecodeError, DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec

ATTEMPT_S = 120.0
"""Seconds before an attempt is repeated with the peers that are connected by then. Parts that came are kept."""
RETRY_S = 5.0


async def fetch_tokenizer(spec: RunSpec, net: Network, report: Callable[[str], None]) -> None:
    """Return when the tokenizer is complete on disk; at once for a run without one.

    `report` receives the reason of a wait, and "" when the wait is over. Raises ConfigError if the file is larger
    than legal: then nobody can train this run.
    """
    blob = Digest(spec.data.tokenizer_blob)
    if not blob:
        return
    waited = False
    while True:
        try:
            if await _is_sound(net, blob):
                break
            async with asyncio.timeout(ATTEMPT_S):
                await net.fetch_blob(blob, peers_to_ask(spec.owner, net), TOKENIZER_MAX_BYTES)
            continue
        except DecodeError as error:
            raise ConfigError(
                f"the tokenizer of this run cannot be used: {error}", hint="ask its owner"
            ) from error
        except DiskFault as error:
            report(error.line())
        except (Unreachable, PeerFault, TimeoutError):
            report("waiting for the tokenizer: nobody reachable has it yet")
        waited = True
        await asyncio.sleep(RETRY_S)
    if waited:
        report("")


async def _is_sound(net: Network, blob: Digest) -> bool:
    """Return whether a blob is on disk and undamaged. A damaged one is deleted, so that it is fetched again."""
    if not net.has_blob(blob):
        return False
    if await net.is_whole(blob):
        return True
    net.delete_blob(blob)
    return False
