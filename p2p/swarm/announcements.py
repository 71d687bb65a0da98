"""Announces where this node can be dialled, in its Addresses register and in the DHT; finds members in the DHT."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.p2p.discovery.dht import Dht
from atoll.p2p.host.interface import Host
from atoll.p2p.host.maddrs import MADDRS_PER_PEER
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.registers import Addresses

log = logging.getLogger(__name__)

ADDRESSES_TTL_S = 600.0
"""Time to live of the Addresses register, in seconds."""
_REFRESH_S = 150.0
_POLL_S = 2.0
_DHT_FIND_S = 60.0
_DHT_FIND_ALONE_S = 10.0
_DHT_ANNOUNCE_S = 200.0
_DHT_DEADLINE_S = 60.0


@dataclass(kw_only=True, eq=False)
class Announcements:
    """Publishes this node's addresses in one run, and learns those of others from the DHT."""

    host: Host
    run: RunId
    run_file: bytes
    """Signed RunSpec to announce in the DHT's list of runs; empty: not announced."""
    dht: Dht | None
    now: Callable[[], float]
    rng: random.Random
    publish: Callable[[Addresses, float], None]
    """Publishes the register with a time to live in seconds."""
    learn: Callable[[PeerId, Sequence[str], str], None]
    """Receives a peer, its multiaddrs and the source of that hint."""
    is_alone: Callable[[], bool]
    addresses: tuple[str, ...] = ()
    """Where others may dial this node, as published; while the transport restarts the old ones stay."""

    async def serve(self) -> None:
        """Announce and find until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_addresses())
            if self.dht is not None:
                group.create_task(self.dht.serve())
                group.create_task(self._announce_in_dht(self.dht))
                group.create_task(self._find_in_dht(self.dht))

    async def _publish_addresses(self) -> None:
        """Publish our addresses when they change, and before their register expires."""
        published_at = self.now()
        while True:
            try:
                maddrs = await self._own_maddrs()
            except Unreachable:
                maddrs = self.addresses
            if maddrs and (maddrs != self.addresses or self.now() - published_at >= _REFRESH_S):
                self.publish(Addresses(maddrs), ADDRESSES_TTL_S)
                self.addresses, published_at = maddrs, self.now()
            await asyncio.sleep(_POLL_S)

    async def _announce_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    await dht.announce(self.run, await self._own_maddrs(), self.run_file)
                pause_s = _DHT_ANNOUNCE_S
            except (Unreachable, TimeoutError) as error:
                log.debug("not announced in the DHT: %s", error)
                pause_s = _DHT_FIND_S
            await asyncio.sleep(pause_s * self.rng.uniform(0.5, 1.0))

    async def _find_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    for address in await dht.find(self.run):
                        self.learn(address.peer, address.maddrs, "dht")
            except (Unreachable, TimeoutError) as error:
                log.debug("nothing found in the DHT: %s", error)
            pause_s = _DHT_FIND_ALONE_S if self.is_alone() else _DHT_FIND_S
            await asyncio.sleep(pause_s * self.rng.uniform(0.5, 1.5))

    async def _own_maddrs(self) -> tuple[str, ...]:
        return (await self.host.addresses())[:MADDRS_PER_PEER]
