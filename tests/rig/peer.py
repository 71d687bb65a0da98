"""One node's network without training, for the cases: orders come as JSON lines, answers go back as JSON lines.

`python -m tests.rig.peer` on a host of the lab. Orders: see `Peer`. It is the product's own code: p2pd and routes.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, PeerAddress, Stream
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.nat.relay import RelayLimits
from atoll.p2p.nat.route_host import RouteHost, RouteOptions
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.p2pd.process import P2pdOptions
from atoll.protocols.errors import AtollError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, digest
from atoll_lab.sweep import scratch

RUN = RunId(digest(b"run of the rig"))
ECHO = "/rig/echo/1"
FRAME_MAX_BYTES = 1 << 20


async def echo(stream: Stream) -> None:
    """Send every frame back until the initiator ends."""
    while True:
        await write_frame(stream, await read_frame(stream, FRAME_MAX_BYTES))


class Peer:
    """Each public method is an order; its result is the answer."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._task: asyncio.Task[None] | None = None
        self._host: RouteHost | None = None
        self._folder = scratch()

    @property
    def host(self) -> RouteHost:
        assert self._host is not None, "the first order is `new`"
        return self._host

    async def new(
        self, seed: int, port: int, *, relay: bool = False, port_map: bool = False, up: str = ""
    ) -> dict[str, Any]:
        """Start a fresh host; the one before ends first. `up`: its upload limit."""
        await self.end()
        identity = Identity(digest(b"rig", str(seed).encode()))
        listen = (f"/ip4/0.0.0.0/tcp/{port}", f"/ip4/0.0.0.0/udp/{port}/quic-v1")
        base: Host = P2pdHost(identity, P2pdOptions(listen=listen, port_map=port_map), poll_s=0.2)
        if up:
            limits = read_limits(LimitsConfig(up=up))
            base = LimitedHost(base, limits, Path(self._folder.name) / "month.json")
        self._host = RouteHost(base, identity, RUN, RouteOptions(relay=RelayLimits() if relay else None))
        self._host.set_handler(ECHO, echo)
        ready = asyncio.Event()
        self._task = self._group.create_task(self._host.serve(ready.set))
        await ready.wait()
        return {"peer": identity.peer_id}

    async def end(self) -> None:
        """End the host."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def addresses(self) -> list[str]:
        """Return the addresses that others may dial."""
        return list(await self.host.addresses())

    async def connect(self, peer: str, maddrs: list[str]) -> float:
        """Connect to a peer and return the seconds that it took."""
        began = time.monotonic()
        await self.host.connect(PeerAddress(PeerId(peer), tuple(maddrs)))
        return time.monotonic() - began

    async def disconnect(self, peer: str) -> None:
        """Close all connections to a peer."""
        await self.host.disconnect(PeerId(peer))

    async def path(self, peer: str) -> str:
        """Return the path to a peer: direct, punched or relayed; empty if it is not connected."""
        found = [str(c.path) for c in await self.host.connections() if c.peer == peer]
        return found[0] if found else ""

    async def say(self, peer: str, size: int) -> float:
        """Return the seconds for `size` bytes there and back; the echo is compared."""
        began = time.monotonic()
        stream = await self.host.open_stream(PeerId(peer), ECHO)
        for start in range(0, size, FRAME_MAX_BYTES):
            data = digest(str(start).encode()) * (min(FRAME_MAX_BYTES, size - start) // 32)
            await write_frame(stream, data)
            if await read_frame(stream, FRAME_MAX_BYTES) != data:
                raise AtollError("other bytes came back")
        await stream.close()
        return time.monotonic() - began

    async def routes(self) -> dict[str, Any]:
        """Return how the host is reached, and the traffic that it relays."""
        found = self.host.routes()
        relayed = found.relay.bytes_relayed if found.relay else 0
        ports = self.host.statistics().port_map
        return {"reach": found.reach, "why": found.why, "relayed": relayed, "port_map": ports}


async def obey(peer: Peer, line: bytes) -> dict[str, Any]:
    """Carry out one order and return the answer."""
    order = json.loads(line)
    name = order.pop("do")
    try:
        async with asyncio.timeout(order.pop("within_s", 60.0)):
            return {"ok": True, "answer": await getattr(peer, name)(**order)}
    except (AtollError, TimeoutError) as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


async def main() -> None:
    """Carry out orders until standard input ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        peer = Peer(group)
        while line := await reader.readline():
            print(json.dumps(await obey(peer, line)), flush=True)
        await peer.end()


if __name__ == "__main__":
    uvloop.run(main())
