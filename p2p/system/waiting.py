"""Waiting, for asyncio tasks: a notifier, a group that ends at its first failure, the back-off of every retry."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

FIRST_S = 1.0
MAX_S = 60.0


class Notifier:
    """Wakes its one waiting task once for any number of changes since it last waited."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report a change; the waiting task wakes."""
        self._event.set()

    async def wait(self) -> None:
        """Return after the next change, or at once if there was one since the last wait. Safe to cancel."""
        await self._event.wait()
        self._event.clear()


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run `parts` until all return. If one fails, the others are cancelled and its error alone is raised."""
    failures: list[Exception] = []
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as faults:
        # The group's error and the frame that raised it hold each other, and would hold every stream that ended
        # with an error, its buffers too, until garbage is collected. So does an error raised while it is handled.
        faults.__traceback__ = None
        failures += faults.exceptions
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()


def backoff_s(
    failures: int,
    rng: random.Random | None = None,
    *,
    first_s: float = FIRST_S,
    max_s: float = MAX_S,
    jitter: float = 0.5,
) -> float:
    """Seconds to wait after the `failures`-th failure in a row (from 1): doubles from `first_s` up to `max_s`.

    With `rng`, the wait is multiplied by a random factor within 1 ± `jitter`, so that peers do not retry in step.
    """
    pause_s = min(max_s, first_s * 2.0 ** min(failures - 1, 16))
    return pause_s * rng.uniform(1 - jitter, 1 + jitter) if rng else pause_s
