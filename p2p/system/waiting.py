"""Waiting, for asyncio tasks: a notifier, a deadline that answers move, a group that ends at its first failure,
the back-off of every retry."""

import asyncio
import random
from collections.abc import Callable, Coroutine
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


class AnswerDeadline:
    """A deadline that each answer moves: `answer_s` after the newest, at most `limit_s` after the beginning.

    An async context manager, once: it gives `heard`, and raises TimeoutError.
    """

    def __init__(self, answer_s: float, limit_s: float) -> None:
        self._answer_s, self._limit_s = answer_s, limit_s
        self._scope: asyncio.Timeout | None = None

    def heard(self) -> None:
        """An answer came."""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(min(self._ends_s, asyncio.get_running_loop().time() + self._answer_s))

    def end(self) -> None:
        """Let it be over now."""
        self._ends_s = asyncio.get_running_loop().time()
        self.heard()

    async def __aenter__(self) -> Callable[[], None]:
        self._ends_s = asyncio.get_running_loop().time() + self._limit_s
        self._scope = await asyncio.timeout(min(self._answer_s, self._limit_s)).__aenter__()
        return self.heard

    async def __aexit__(self, *error: Any) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            await scope.__aexit__(*error)


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
