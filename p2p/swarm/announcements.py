"""Announces where this node can be dialled, in its Addresses register and in the DHT; finds members in the DHT."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import Listing
from atoll.p2p.discovery.dht_role import Part
from atoll.p2p.host.interface import Host
from atoll.p2p.host.maddrs import MADDRS_PER_PEER
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.ledger.registers import Addresses

log = logging.getLogger(__name__)

ADDRESSES_TTL_S = 600.0
"""Time to live of the Addresses register, in seconds."""
_REFRESH_S = 150.0
_POLL_S = 2.0
_DHT_SOON_S = 5.0
_DHT_ANNOUNCE_S = 200.0
_DHT_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class DhtUse:
    """What this node does in the DHT for its run."""

    dht: Dht
    part: Callable[[], Part]
    """The part to play now."""
    listing: Listing | None
    """The run, for the list of runs; None for a private one, whose members are not announced either."""
    is_owner: bool


@dataclass(kw_only=True, eq=False)
class Announcements:
    """Publishes this node's addresses in one run, and learns those of others from the DHT."""

    host: Host
    run: RunId
    use: DhtUse | None
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
            if self.use is not None:
                group.create_task(self.use.dht.serve())
                if self.use.listing is not None:
                    group.create_task(self._use_dht(self.use, self.use.listing))

    async def _publish_addresses(self) -> None:
        """Publish our addresses when they change, and before their register expires; play the part in the DHT."""
        published_at = self.now()
        while True:
            try:
                maddrs = await self._own_maddrs()
            except Unreachable:
                maddrs = self.addresses
            if self.use is not None:
                self.use.dht.play(self.use.part(), maddrs)
            if maddrs and (maddrs != self.addresses or self.now() - published_at >= _REFRESH_S):
                self.publish(Addresses(maddrs), ADDRESSES_TTL_S)
                self.addresses, published_at = maddrs, self.now()
            await asyncio.sleep(_POLL_S)

    async def _use_dht(self, use: DhtUse, listing: Listing) -> None:
        """Announce this node and its run, and look for other members."""
        announce_at, tries = 0.0, 0
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    if self.now() < announce_at:
                        members = await use.dht.find(self.run)
                    else:
                        maddrs = await self._own_maddrs()
                        members = await use.dht.announce(self.run, maddrs, listing, is_owner=use.is_owner)
                        announce_at = self.now() + _DHT_ANNOUNCE_S * self.rng.uniform(1.0, 1.5)
                    for address in members:
                        self.learn(address.peer, address.maddrs, "dht")
            except (Unreachable, TimeoutError) as error:
                log.debug("no news from the DHT: %s", error)
            tries = tries + 1 if self.is_alone() or self.now() >= announce_at else 0
            await asyncio.sleep(
                backoff_s(tries, self.rng, first_s=_DHT_SOON_S) if tries else announce_at - self.now()
            )

    async def _own_maddrs(self) -> tuple[str, ...]:
        return (await self.host.addresses())[:MADDRS_PER_PEER]
