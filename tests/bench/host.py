"""A host for a child process: one p2pd with a fresh identity, which lives as long as the block."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from atoll.p2p.host.interface import Host
from atoll.p2p.transports.host_base import OnFault, log_fault
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.identity import Identity


def fresh_p2pd(options: P2pdOptions | None = None, on_fault: OnFault = log_fault) -> P2pdHost:
    """A host that nobody knows."""
    return P2pdHost(Identity(os.urandom(32)), options, on_fault=on_fault)


@contextlib.asynccontextmanager
async def serving(host: Host) -> AsyncIterator[asyncio.TaskGroup]:
    """`host` serves in the block; the group is for what else must end with it. Raises LocalFault."""
    ready = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            serve = group.create_task(host.serve(ready.set))
            await ready.wait()
            try:
                yield group
            finally:
                serve.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
