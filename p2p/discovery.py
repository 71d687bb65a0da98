"""Find peers and stay connected to enough of them, for ever: seeds, cache, exchange and DHT are only hints.

Every peer that is worth dialling is dialled again and again, with back-off and jitter. No failure ends the loop;
what failed is in `table`.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.p2p.bell import Bell
from atoll.p2p.host import Host, PeerAddress
from atoll.p2p.peers import AddressBook, KnownPeer
from atoll.protocols.errors import DiskFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

TARGET = 16
"""Connections that we open by ourselves; peers may open more to us."""
DIALS_AT_ONCE = 4
DIAL_S = 15.0
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
EXPLORE_S = 60.0
"""With enough connections, still dial one more peer so often: two full halves of a swarm must find each other."""
_TICK_S = 1.0
_SAVE_S = 30.0


def backoff_s(failures: int, rng: random.Random) -> float:
    """Wait after the `failures`-th failed dial in a row: doubles, capped, with ± 50 % jitter."""
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * rng.uniform(0.5, 1.5))


class Discovery:
    """The dial loop over one address book."""

    def __init__(
        self,
        host: Host,
        seeds: Sequence[PeerAddress],
        cache: Path,
        *,
        now: Callable[[], float],
        rng: random.Random,
        target: int = TARGET,
    ) -> None:
        """`cache`: file of good peers; read now, written while serving. Raises DiskFault."""
        self.book = AddressBook(host.peer_id)
        self._host = host
        self._seeds = tuple(seeds)
        self._cache = cache
        self._now = now
        self._rng = rng
        self._target = target
        self._connected: set[PeerId] = set()
        self._dialling: set[PeerId] = set()
        self._wake = Bell()
        self._next_explore = now() + EXPLORE_S
        self.book.load(cache)
        for seed in self._seeds:
            self.book.add(seed.peer, seed.maddrs, "seed")

    async def serve(self) -> None:
        """Dial until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save_often())
            while True:
                for known in self._choose(self._now()):
                    self._dialling.add(known.peer)
                    group.create_task(self._dial(known))
                try:
                    async with asyncio.timeout(_TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def learn(self, peer: PeerId, maddrs: Sequence[str], source: str) -> None:
        """A hint where `peer` may be."""
        self.book.add(peer, maddrs, source)
        self._wake.ring()

    def on_connected(self, peer: PeerId) -> None:
        """The host has a connection to `peer`."""
        self._connected.add(peer)
        known, now = self.book.get(peer), self._now()
        if known is not None and known.failures:
            self._hurry(now)
        self.book.connected(peer, now)

    def on_disconnected(self, peer: PeerId) -> None:
        """The host has lost `peer`; it is dialled again soon, with jitter so that two sides do not collide."""
        self._connected.discard(peer)
        known, now = self.book.get(peer), self._now()
        if known is not None and self.book.lost(peer, now):
            known.next_dial = max(known.next_dial, now + self._rng.uniform(0.0, FIRST_BACKOFF_S))
        elif known is not None:
            pause_s = backoff_s(known.failures + 1, self._rng)
            self.book.failed(peer, known.last_error or "hung up soon", max(known.next_dial, now + pause_s))
        self._wake.ring()

    def _hurry(self, now: float) -> None:
        # One who was out of reach is back: a healed cut brings back the others that were lost with it.
        for known in self.book.all():
            if known.good and known.failures and known.peer not in self._connected:
                known.next_dial = min(known.next_dial, now + self._rng.uniform(0.0, FIRST_BACKOFF_S))
        self._wake.ring()

    def table(self) -> dict[str, str]:
        """State of every seed: `connected`, `this node`, or why it is not."""
        return {f"{seed.maddrs[0]}/p2p/{seed.peer}": self._state_of(seed.peer) for seed in self._seeds}

    def _state_of(self, peer: PeerId) -> str:
        if peer == self._host.peer_id:
            return "this node"
        if peer in self._connected:
            return "connected"
        known = self.book.get(peer)
        if known is None or not known.failures:
            return "dialling" if peer in self._dialling else "not tried yet"
        wait_s = max(0.0, max(known.next_dial, known.away_until) - self._now())
        return f"{known.last_error} (tried {known.failures} times, again in {wait_s:.0f} s)"

    def _choose(self, now: float) -> list[KnownPeer]:
        """Whom to dial now."""
        room = DIALS_AT_ONCE - len(self._dialling)
        due = [known for known in self.book.all() if self._is_due(known, now)]
        if room <= 0 or not due:
            return []
        lacking = self._target - len(self._connected) - len(self._dialling)
        if lacking <= 0 and now >= self._next_explore:
            lacking = 1
        if lacking <= 0:
            return []
        self._next_explore = now + self._rng.uniform(0.5, 1.5) * EXPLORE_S
        # Those never seen to work come last; among equals chance decides, so that not all dial the same few.
        due.sort(key=lambda known: (known.failures, self._rng.random()))
        return due[: min(room, lacking)]

    def _is_due(self, known: KnownPeer, now: float) -> bool:
        is_busy = known.peer in self._connected or known.peer in self._dialling
        return bool(known.maddrs) and not is_busy and max(known.next_dial, known.away_until) <= now

    async def _dial(self, known: KnownPeer) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await self._host.connect(known.address)
        except TimeoutError:
            self._failed(known, f"no answer in {DIAL_S:.0f} s")
        except Unreachable as error:
            self._failed(known, error.line())
        else:
            # The host's event may be lost while it restarts; the caller's poll of connections repairs that.
            known.next_dial = max(known.next_dial, self._now() + FIRST_BACKOFF_S)
        finally:
            self._dialling.discard(known.peer)
            self._wake.ring()

    def _failed(self, known: KnownPeer, reason: str) -> None:
        log.debug("dial to %s failed: %s", short(known.peer), reason)
        self.book.failed(known.peer, reason, self._now() + backoff_s(known.failures + 1, self._rng))

    async def _save_often(self) -> None:
        try:
            while True:
                await asyncio.sleep(_SAVE_S)
                self._save()
        finally:
            self._save()

    def _save(self) -> None:
        try:
            self.book.save(self._cache)
        except DiskFault as fault:
            log.warning("the cache of peers is not saved: %s", fault.line())
