"""Announces where this node can be dialled, in its Addresses register and in the DHT; finds members in the DHT."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

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


class Announcements:
    """Publishes this node's addresses in one run, and learns those of others from the DHT."""

    def __init__(
        self,
        *,
        host: Host,
        run: RunId,
        run_file: bytes,
        dht: Dht | None,
        now: Callable[[], float],
        rng: random.Random,
        publish: Callable[[Addresses, float], None],
        learn: Callable[[PeerId, Sequence[str], str], None],
        is_alone: Callable[[], bool],
    ) -> None:
        """`publish(value, ttl_s)` sends the register; `learn(peer, maddrs, source)` receives found addresses."""
        self._host = host
        self._run = run
        self._run_file = run_file
        self._dht = dht
        self._now = now
        self._rng = rng
        self._publish = publish
        self._learn = learn
        self._is_alone = is_alone

    async def serve(self) -> None:
        """Announce and find until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_addresses())
            if self._dht is not None:
                group.create_task(self._dht.serve())
                group.create_task(self._announce_in_dht(self._dht))
                group.create_task(self._find_in_dht(self._dht))

    async def _publish_addresses(self) -> None:
        """Publish our addresses when they change, and before their register expires."""
        published: tuple[str, ...] = ()
        published_at = self._now()
        while True:
            try:
                maddrs = await self._own_maddrs()
            except Unreachable:
                maddrs = published
            if maddrs and (maddrs != published or self._now() - published_at >= _REFRESH_S):
                self._publish(Addresses(maddrs), ADDRESSES_TTL_S)
                published, published_at = maddrs, self._now()
            await asyncio.sleep(_POLL_S)

    async def _announce_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    await dht.announce(self._run, await self._own_maddrs(), self._run_file)
                pause_s = _DHT_ANNOUNCE_S
            except (Unreachable, TimeoutError) as error:
                log.debug("not announced in the DHT: %s", error)
                pause_s = _DHT_FIND_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    async def _find_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    for address in await dht.find(self._run):
                        self._learn(address.peer, address.maddrs, "dht")
            except (Unreachable, TimeoutError) as error:
                log.debug("nothing found in the DHT: %s", error)
            pause_s = _DHT_FIND_ALONE_S if self._is_alone() else _DHT_FIND_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))

    async def _own_maddrs(self) -> tuple[str, ...]:
        return (await self._host.addresses())[:MADDRS_PER_PEER]
