"""Child of `bench connections`: what a daemon keeps per peer, p2pd and calls, and how much memory both take.

Arguments: connections p2pd keeps at least and at most; none: its own defaults. Orders: address, look.
"""

import asyncio
import sys
from typing import Any

import psutil
import uvloop

from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll_bench.calls.calls_atoll import RUN
from atoll_bench.child import obey
from atoll_bench.host import fresh_p2pd, serving


class Node:
    """One host, and its two processes as the system sees them."""

    def __init__(self, host: P2pdHost) -> None:
        self._host = host
        self._me = psutil.Process()

    async def address(self) -> tuple[str, tuple[str, ...]]:
        """PeerID and where it listens."""
        return self._host.peer_id, await self._host.addresses()

    async def look(self) -> dict[str, float]:
        """Resident bytes and CPU seconds of both processes, distinct peers that are connected."""
        p2pd = psutil.Process(self._host.process_id)
        peers = {connection.peer for connection in await self._host.connections()}
        return {
            "node_bytes": self._me.memory_info().rss,
            "p2pd_bytes": p2pd.memory_info().rss,
            "cpu_s": sum(sum(process.cpu_times()[:2]) for process in (self._me, p2pd)),
            "peers": len(peers),
        }


async def main(*limits: str) -> None:
    """Until standard input ends."""
    low, high = map(int, limits) if limits else (P2pdOptions().connections_low, P2pdOptions().connections_high)
    host = fresh_p2pd(P2pdOptions(connections_low=low, connections_high=high))
    node, calls = Node(host), Calls(host, RUN)
    orders: dict[str, Any] = {"address": node.address, "look": node.look}
    async with serving(host) as group:
        serve = group.create_task(calls.serve())
        await obey(orders)
        serve.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
