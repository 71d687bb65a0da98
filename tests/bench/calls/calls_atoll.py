"""Child of `bench calls`: one side of an echo over `atoll.p2p.rpc.calls` and p2pd. Orders: address, connect,
echo."""

import asyncio
from typing import Annotated, Any

import msgspec
import uvloop
from msgspec import Meta

from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import PeerId, RunId
from atoll_bench.calls.in_flight import calls_per_s
from atoll_bench.child import obey
from atoll_bench.host import fresh_p2pd, serving

RUN = RunId(bytes(32))
METHOD = "bench.echo"
MAX_BYTES = 1 << 20


class Echo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request and reply."""

    data: Annotated[bytes, Meta(max_length=MAX_BYTES - 16)]


class Side:
    """One host with calls; every side can ask and answer."""

    def __init__(self, host: P2pdHost) -> None:
        self._host = host
        self.calls = Calls(host, RUN)
        self.calls.register(METHOD, Echo, Echo, self._answer, max_bytes=MAX_BYTES)
        self._peer: PeerId | None = None

    async def address(self) -> tuple[str, tuple[str, ...]]:
        """PeerID and where it listens."""
        return self._host.peer_id, await self._host.addresses()

    async def connect(self, peer: str, maddrs: list[str]) -> None:
        """Whom `echo` asks."""
        self._peer = PeerId(peer)
        await self._host.connect(PeerAddress(self._peer, tuple(maddrs)))

    async def echo(self, size: int, in_flight: int, seconds: float) -> float:
        """Calls per second."""
        peer, request = self._peer, Echo(bytes(size))
        assert peer is not None

        async def call() -> None:
            reply = await self.calls.call(peer, METHOD, request, Echo, max_bytes=MAX_BYTES)
            if len(reply.data) != size:
                raise LocalFault("the echo is not what was sent")

        return await calls_per_s(call, in_flight, seconds)

    async def _answer(self, _peer: PeerId, request: Echo) -> Echo:
        return request


async def main() -> None:
    """Until standard input ends."""
    host = fresh_p2pd()
    side = Side(host)
    orders: dict[str, Any] = {"address": side.address, "connect": side.connect, "echo": side.echo}
    async with serving(host) as group:
        serve = group.create_task(side.calls.serve())
        await obey(orders)
        serve.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
