"""Run the parts of one conversation at once: the first failure ends all of them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Until all `parts` return. If one fails the others are cancelled and its error alone is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
