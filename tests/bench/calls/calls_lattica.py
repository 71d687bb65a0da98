"""Child of `bench calls`: one side of an echo over the `lattica` package.

Arguments: a folder, a port, a bootstrap.
Its calls block a thread each; awaiting its futures was slower (1.9k calls/s against 2.6k), so threads are used.
lattica contacts strangers (STUN) at every start: run this in a network of its own.
"""

import asyncio
import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.protocols.errors import LocalFault, Unreachable
from atoll_bench.child import obey

_RESULT_S = 30
_CONNECT_S = 20.0
_POLL_S = 0.1


class Side:
    """One lattica node; every side can ask and answer."""

    def __init__(self, folder: str, port: str, bootstrap: str | None) -> None:
        self._lattica = importlib.import_module("lattica")  # by name: it is no dependency of ours
        build = self._lattica.Lattica.builder().with_listen_addrs([f"/ip4/127.0.0.1/tcp/{port}"])
        for switch in (build.with_mdns, build.with_upnp, build.with_autonat, build.with_dcutr):
            switch(False)
        build.with_storage_path(f"{folder}/storage").with_dht_db_path(f"{folder}/dht").with_key_path(
            f"{folder}/key"
        )
        if bootstrap:
            build.with_bootstraps([bootstrap])
        self._node = build.build()
        self._echo = self._handler()(self._node)
        self._peer = bootstrap.rpartition("/")[2] if bootstrap else ""

    async def address(self) -> str:
        """PeerID."""
        return str(self._node.peer_id())

    async def connect(self) -> None:
        """Wait for the bootstrap peer. Raises Unreachable."""
        end_s = time.monotonic() + _CONNECT_S
        while self._peer not in self._node.get_all_peers():
            if time.monotonic() > end_s:
                raise Unreachable("lattica did not connect")
            await asyncio.sleep(_POLL_S)

    async def echo(self, size: int, in_flight: int, seconds: float) -> float:
        """Calls per second."""
        return await asyncio.to_thread(self._echo_blocking, size, in_flight, seconds)

    def _echo_blocking(self, size: int, in_flight: int, seconds: float) -> float:
        data, stub = bytes(size), self._echo.get_stub(self._peer)
        end = time.perf_counter() + seconds

        def repeat(_: int) -> int:
            done = 0
            while time.perf_counter() < end:
                if len(stub.echo(data).result(_RESULT_S)) != size:
                    raise LocalFault("the echo is not what was sent")
                done += 1
            return done

        began = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as threads:
            done = sum(threads.map(repeat, range(in_flight)))
        return done / (time.perf_counter() - began)

    def _handler(self) -> Any:
        """lattica's class of a service; made here, because its base is only known at run time."""

        def echo(_self: Any, data: bytes) -> bytes:
            return data

        return type("Echo", (self._lattica.ConnectionHandler,), {"echo": self._lattica.rpc_method(echo)})


async def main(folder: str, port: str, bootstrap: str | None = None) -> None:
    """Until standard input ends."""
    side = Side(folder, port, bootstrap)
    orders: dict[str, Any] = {"address": side.address, "connect": side.connect, "echo": side.echo}
    await obey(orders)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
