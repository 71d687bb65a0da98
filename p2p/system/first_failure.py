"""Runs coroutines concurrently; the first failure ends all of them and is raised alone."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run `parts` until all return. If one fails, the others are cancelled and its error alone is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
