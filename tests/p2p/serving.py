"""Hosts that serve for as long as a test needs them."""

import asyncio
import contextlib


@contextlib.asynccontextmanager
async def serving(*hosts):
    """Hosts (or swarms) that serve within the block."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for host in hosts:
            ready = asyncio.Event()
            tasks.append(group.create_task(host.serve(ready.set)))
            await ready.wait()
        yield
        for task in tasks:
            task.cancel()
