"""Several ways to one goal at the same time; the first that works wins."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from atoll.protocols.errors import Unreachable

T = TypeVar("T")


class _Won(Exception):
    """Ends the race."""


async def first(ways: Mapping[str, tuple[float, Callable[[], Awaitable[T]]]]) -> T:
    """Result of the first way that succeeds; the others are cancelled.

    `ways`: name -> (head start in seconds that it gives to the others, what it does). A way starts early when
    all others have failed. Raises Unreachable that names every failure.
    """
    reasons: dict[str, str] = {}
    won: list[T] = []
    running = len(ways)
    alone = asyncio.Event()
    if all(delay_s for delay_s, _ in ways.values()):
        alone.set()

    async def run(name: str, delay_s: float, way: Callable[[], Awaitable[T]]) -> None:
        nonlocal running
        try:
            async with asyncio.timeout(delay_s):
                await alone.wait()
        except TimeoutError:
            pass
        try:
            won.append(await way())
        except Unreachable as error:
            reasons[name] = str(error)
        except TimeoutError:
            reasons[name] = "no answer in time"
        else:
            raise _Won
        running -= 1
        if running == sum(1 for other, (later_s, _) in ways.items() if later_s and other not in reasons):
            alone.set()

    try:
        async with asyncio.TaskGroup() as group:
            for name, (delay_s, way) in ways.items():
                group.create_task(run(name, delay_s, way))
    except* _Won:
        pass
    if won:
        return won[0]
    raise Unreachable("; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no way to try")
