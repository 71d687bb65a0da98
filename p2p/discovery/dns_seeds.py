"""Keeps one /dnsaddr seed resolved, for ever: again when its records expire, with back-off when it fails."""

import asyncio
import logging
import random
from collections.abc import Callable

from atoll.p2p.discovery.backoff import backoff_s
from atoll.p2p.discovery.dnsaddr import Lookup, Resolved, resolve
from atoll.p2p.host.interface import PeerAddress
from atoll.protocols.errors import Unreachable

log = logging.getLogger(__name__)

RESOLVE_S = 10.0
"""For the whole tree of names."""
AGAIN_MIN_S = 60.0
AGAIN_MAX_S = 3600.0


class DnsSeed:
    """One name and what it stands for."""

    def __init__(self, seed: PeerAddress, lookup: Lookup, *, now: Callable[[], float], rng: random.Random) -> None:
        self.seed = seed
        self.addresses: tuple[PeerAddress, ...] = ()
        """As resolved last; kept while DNS is out of reach."""
        self.tries = 0
        """Failures in a row."""
        self.error = ""
        self.next_at = now()
        self._lookup, self._now, self._rng = lookup, now, rng

    @property
    def text(self) -> str:
        """As the user wrote it."""
        return self.seed.maddrs[0] + (f"/p2p/{self.seed.peer}" if self.seed.peer else "")

    async def serve(self, on_found: Callable[[tuple[PeerAddress, ...]], None]) -> None:
        """Resolve until cancelled."""
        while True:
            pause_s = await self._resolve(on_found)
            self.next_at = self._now() + pause_s
            await asyncio.sleep(pause_s)

    async def _resolve(self, on_found: Callable[[tuple[PeerAddress, ...]], None]) -> float:
        """Once; how long to wait then."""
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await resolve(self.seed, self._lookup)
        except TimeoutError:
            return self._failed(f"no DNS server answers in {RESOLVE_S:.0f} s")
        except Unreachable as error:
            return self._failed(error.line())
        self._tell(found)
        on_found(found.addresses)
        return min(max(found.ttl_s, AGAIN_MIN_S), AGAIN_MAX_S) * self._rng.uniform(0.75, 1.25)

    def _tell(self, found: Resolved) -> None:
        if found.addresses != self.addresses:
            for reason in found.refused:
                log.warning("%s: a record is not used: %s", self.text, reason)
        self.addresses, self.tries, self.error = found.addresses, 0, ""

    def _failed(self, reason: str) -> float:
        log.debug("%s: %s", self.text, reason)
        self.tries, self.error = self.tries + 1, reason
        return backoff_s(self.tries, self._rng)
