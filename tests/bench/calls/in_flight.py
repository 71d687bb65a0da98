"""Drive one kind of call as fast as it goes, with a fixed number in flight, and count."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def calls_per_s(call: Callable[[], Awaitable[None]], in_flight: int, seconds: float) -> float:
    """Calls that were answered within `seconds`, over the time until the last one was."""
    end = time.perf_counter() + seconds
    done = 0

    async def repeat() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call()
            done += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(repeat())
    return done / (time.perf_counter() - began)
