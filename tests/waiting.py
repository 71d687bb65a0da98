"""How long tests wait for real processes and sockets: until something happens, or plainly hangs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

HANGS_S = 300.0
"""No single step of a test takes a tenth of this on two cores that a dozen other processes share."""
LOOK_S = 0.02
PROCESS_LOOK_S = 0.1
"""Between two looks at other processes: a status takes milliseconds of theirs and ours, and they train."""


def poll(what: str, true: Callable[[], Any], limit_s: float = HANGS_S) -> Any:
    """Look until `true` returns something true, and return that. Raises AssertionError at the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(PROCESS_LOOK_S)
    return found


async def eventually(true: Callable[[], Awaitable[Any] | Any], limit_s: float = HANGS_S) -> Any:
    """`poll` for a coroutine function or a plain one, with the loop free meanwhile. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while True:
            found = true()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            await asyncio.sleep(LOOK_S)
