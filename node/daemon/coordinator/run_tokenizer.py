"""Brings the tokenizer that travels with a run: the worker cannot begin without it."""

import asyncio
from collections.abc import Callable

from atoll.node.daemon.coordinator.interfaces import Network, whom_to_ask
from atoll.protocols.errors import ConfigError, DecodeError, DiskFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec

ATTEMPT_S = 120.0
RETRY_S = 5.0


async def bring_tokenizer(spec: RunSpec, net: Network, say: Callable[[str], None]) -> None:
    """Return when the file is in the store, whole; at once for a run without one.

    `say` hears why it is waited for, and "" when that is over. Raises ConfigError where the file is larger than
    legal: then nobody can train this run.
    """
    blob = Digest(spec.data.tokenizer_blob)
    if not blob:
        return
    waited = False
    while True:
        try:
            if await _is_here(net, blob):
                break
            async with asyncio.timeout(ATTEMPT_S):
                await net.fetch_blob(blob, whom_to_ask(spec.owner, net), TOKENIZER_MAX_BYTES)
        except DecodeError as error:
            raise ConfigError(
                f"the tokenizer of this run cannot be used: {error}", hint="ask its owner"
            ) from error
        except DiskFault as error:
            waited = await _rest(say, error.line())
        except (Unreachable, PeerFault, TimeoutError):
            waited = await _rest(say, "waiting for the tokenizer: nobody reachable has it yet")
    if waited:
        say("")


async def _rest(say: Callable[[str], None], reason: str) -> bool:
    say(reason)
    await asyncio.sleep(RETRY_S)
    return True


async def _is_here(net: Network, blob: Digest) -> bool:
    """A file that the disk damaged is deleted, and fetched again."""
    if not net.has_blob(blob):
        return False
    if await net.is_whole(blob):
        return True
    net.delete_blob(blob)
    return False
