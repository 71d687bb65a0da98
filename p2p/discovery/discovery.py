"""Discovery: dials known peers to keep enough connections. Addresses of seeds, cache, exchange, DHT are hints.

Each peer is dialled repeatedly, with back-off and jitter. No failure ends the loop; `rows` reports the state of
every seed, with the reason of a failure and its remedy.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from atoll.p2p.discovery import seed_table
from atoll.p2p.discovery.dial_errors import DialFault, explain
from atoll.p2p.discovery.dns import TxtLookup, system_lookup
from atoll.p2p.discovery.dnsaddr import DnsSeed
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.address_book import AddressBook, KnownPeer, is_dns_seed
from atoll.p2p.system.quiet_saves import QuietSaves
from atoll.p2p.system.waiting import FIRST_S as FIRST_BACKOFF_S
from atoll.p2p.system.waiting import Notifier, backoff_s
from atoll.protocols.errors import DiskFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

TARGET = 16
"""Connections that a node opens by itself; peers may open more to it."""
DIALS_AT_ONCE = 4
DIALS_MAX = 32
"""Most concurrent dials while no peer is connected, so that dials that hang do not delay others."""
STAGGER_S = 0.25
"""While no peer is connected, a dial older than this makes room for another one (as in RFC 8305)."""
DIAL_S = 15.0
EXPLORE_S = 60.0
"""Interval at which one peer is dialled beyond the target: two full halves of a swarm must find each other."""
LOST_EVERY_S = 5.0
"""Longest mean interval at which a lost peer is dialled: the sides of a partition must meet soon after it."""
LOST_DIAL_S = 4.0
"""Deadline of a dial to a lost peer. A dial that hangs repeats its packets ever more rarely. Once one has failed,
after 5 s, go-libp2p refuses further ones for up to 5 min. A new dial gets through at once."""
SLOW_DIAL_S = 2.0
"""A lost peer to which no dial got through within this time has the usual deadline."""
LOST_AT_ONCE = 8
"""Most concurrent dials to lost peers, so that they are at most 120 a minute."""
LOST_S = 3600.0
"""A peer that was connected is lost for this time. Then it is gone, and not cut off."""
FRESH_S = 20.0
"""Without any connection, a transport that refuses to dial is reset after this time, then ever more rarely."""
MAX_FRESH_S = 600.0
_TICK_S = 1.0
_FIRST_SAVE_S = 5.0
_SAVE_S = 30.0


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
        lookup: TxtLookup = system_lookup,
    ) -> None:
        """`seeds`: results of parse_seed. `cache`: file of good peers, read now, written while serving."""
        self.book = AddressBook(host.peer_id)
        self._host = host
        self._seeds = tuple(seed for seed in seeds if not is_dns_seed(seed))
        self._names = tuple(DnsSeed(seed, lookup, now=now, rng=rng) for seed in seeds if is_dns_seed(seed))
        self._cache, self._saves = cache, QuietSaves("the cache of peers is not saved")
        self._now = now
        self._rng = rng
        self._target = target
        self._connected: set[PeerId] = set()
        self._lost: set[PeerId] = set()
        self._dialling: dict[PeerId, float] = {}
        self._wake = Notifier()
        self._next_explore = now() + EXPLORE_S
        self._held_back = False
        self._next_fresh = now() + FRESH_S
        self._fresh_s = FRESH_S
        try:
            self.book.load(cache)
        except DiskFault as fault:
            log.warning("the cache of peers is not read: %s", fault.line())
        for seed in self._seeds:
            self.book.add(seed.peer, seed.maddrs, "seed")

    async def serve(self) -> None:
        """Dial peers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._save_often())
            for name in self._names:
                group.create_task(name.serve(self._on_resolved))
            while True:
                await self._forget_failures()
                for known in self._choose(self._now()):
                    self._dialling[known.peer] = self._now()
                    group.create_task(self._dial(known))
                try:
                    async with asyncio.timeout(STAGGER_S if self._is_racing() else self._rest_s()):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def learn(self, peer: PeerId, maddrs: Sequence[str], source: str) -> None:
        """Add addresses at which `peer` may be reached. `source`: where the hint comes from."""
        self.book.add(peer, maddrs, source)
        self._wake.notify()

    def on_connected(self, peer: PeerId) -> None:
        """Record that the host is connected to `peer`."""
        self._connected.add(peer)
        self._fresh_s = FRESH_S
        known, now = self.book.get(peer), self._now()
        if known is not None and known.failures:
            self._hurry(now)
        self.book.connected(peer, now)

    def on_disconnected(self, peer: PeerId) -> None:
        """Record that the host has lost `peer`; it is dialled again soon, with jitter against collisions."""
        self._connected.discard(peer)
        self._lost.add(peer)
        known, now = self.book.get(peer), self._now()
        if known is not None and self.book.lost(peer, now):
            known.next_dial = max(known.next_dial, now + self._rng.uniform(0.0, FIRST_BACKOFF_S))
        elif known is not None:
            pause_s = backoff_s(known.failures + 1, self._rng)
            self.book.failed(peer, known.last_error or "hung up soon", max(known.next_dial, now + pause_s))
        self._wake.notify()

    def is_unreachable(self, peer: PeerId) -> bool:
        """Whether a dial to `peer` failed since it was last connected."""
        known = self.book.get(peer)
        return known is not None and known.is_unreachable

    def deadline_s(self, known: KnownPeer) -> float:
        """Seconds after which a dial to a peer is given up: soon if it is lost, longer if dials to it are slow."""
        is_slow = (known.quickest_dial_s or 0.0) > SLOW_DIAL_S
        return LOST_DIAL_S if self._is_lost(known) and not is_slow else DIAL_S

    def table(self) -> dict[str, str]:
        """State of every seed of the user as one line each."""
        return {row.seed: seed_table.row_text(row) for row in self.rows() if not row.via}

    def rows(self) -> list[seed_table.SeedRow]:
        """State of every seed; the rows of a /dnsaddr seed's addresses follow its own row."""
        direct = [self._row(seed) for seed in self._seeds]
        for name in self._names:
            found = [self._row(address, via=name.text) for address in name.addresses]
            direct += [seed_table.dns_seed_row(name, found, self._now()), *found]
        return direct

    def _row(self, seed: PeerAddress, via: str = "") -> seed_table.SeedRow:
        text, known = f"{seed.maddrs[0]}/p2p/{seed.peer}", self.book.get(seed.peer)
        if seed.peer == self._host.peer_id:
            state = seed_table.THIS_NODE
        elif seed.peer in self._connected:
            state = seed_table.CONNECTED
        elif known is None or not known.failures:
            state = seed_table.DIALLING if seed.peer in self._dialling else seed_table.WAITING
        else:
            found = explain(known.last_error, seed.maddrs[0])
            next_s = max(0.0, max(known.next_dial, known.banned_until) - self._now())
            failed = seed_table.SeedRow(text, seed_table.FAILED, found.reason, found.remedy, via=via)
            return replace(failed, tries=known.failures, next_s=next_s)
        return seed_table.SeedRow(text, state, via=via)

    def _hurry(self, now: float) -> None:
        # A peer that was out of reach is back: a healed partition brings back the others that were lost with it.
        for known in self.book.all():
            if known.connection_order and known.failures and known.peer not in self._connected:
                known.next_dial = min(known.next_dial, now + self._rng.uniform(0.0, FIRST_BACKOFF_S))
        self._wake.notify()

    def _on_resolved(self, addresses: tuple[PeerAddress, ...]) -> None:
        for address in addresses:
            self.learn(address.peer, address.maddrs, "dns")

    def _choose(self, now: float) -> list[KnownPeer]:
        """Peers to dial now."""
        # While no peer is connected, old dials do not count: one that works must not wait behind those that hang.
        fresh = [peer for peer, since in self._dialling.items() if now - since < STAGGER_S or self._connected]
        room = min(DIALS_AT_ONCE - len(fresh), DIALS_MAX - len(self._dialling))
        due = [known for known in self.book.all() if self._is_due(known, now)]
        if room <= 0 or not due:
            return []
        lacking = self._target - len(self._connected) - len(fresh)
        if lacking <= 0 and now >= self._next_explore:
            lacking = 1
        if lacking <= 0:
            return []
        self._next_explore = now + self._rng.uniform(0.5, 1.5) * EXPLORE_S
        lost_room = max(0, LOST_AT_ONCE - sum(map(self._is_lost, map(self.book.get, self._dialling))))
        ordered = self._in_order(due)
        lost = [known for known in ordered if self._is_lost(known)][lost_room:]
        return [known for known in ordered if known not in lost][: min(room, lacking)]

    def _in_order(self, due: list[KnownPeer]) -> list[KnownPeer]:
        """Sort peers by past success, at random among equals, so that nodes do not all dial the same few.

        While no peer is connected, seeds and others alternate: either kind may be dead as a whole.
        """
        due.sort(key=lambda known: (known.failures, known.misses, self._rng.random()))
        if self._connected:
            return due
        hinted = {address.peer for name in self._names for address in name.addresses}
        hinted.update(seed.peer for seed in self._seeds)
        first = [known for known in due if known.peer in hinted]
        second = [known for known in due if known.peer not in hinted]
        turns = itertools.zip_longest(first, second)
        return [known for pair in turns for known in pair if known is not None]

    def _is_due(self, known: KnownPeer, now: float) -> bool:
        is_busy = known.peer in self._connected or known.peer in self._dialling
        return bool(known.maddrs) and not is_busy and max(known.next_dial, known.banned_until) <= now

    def _rest_s(self) -> float:
        """Seconds to wait for the next dial: to the tick, or until a lost peer is due if that is sooner."""
        lost = [known for known in map(self.book.get, self._lost) if known and self._is_lost(known)]
        self._lost = {known.peer for known in lost}
        due_s = (known.next_dial - self._now() for known in lost)
        return min((wait_s for wait_s in due_s if 0 < wait_s < _TICK_S), default=_TICK_S)

    def _is_racing(self) -> bool:
        return not self._connected and 0 < len(self._dialling) < DIALS_MAX

    async def _dial(self, known: KnownPeer) -> None:
        began, deadline_s = self._now(), self.deadline_s(known)
        try:
            async with asyncio.timeout(deadline_s):
                await self._host.connect(known.address, deadline_s)
        except TimeoutError:
            self._failed(known, f"no answer in {deadline_s:.0f} s", self._now() - began)
        except Unreachable as error:
            self._failed(known, error.line(), self._now() - began)
        else:
            known.quickest_dial_s = min(self._now() - began, known.quickest_dial_s or DIAL_S)
            # The host's event may be lost while it restarts; the caller's poll of connections repairs that.
            known.next_dial = max(known.next_dial, self._now() + FIRST_BACKOFF_S)
        finally:
            self._dialling.pop(known.peer, None)
            self._wake.notify()

    def _failed(self, known: KnownPeer, reason: str, took_s: float) -> None:
        log.debug("dial to %s failed: %s", short(known.peer), reason)
        next_dial = self._now() + self._pause_s(known, took_s)
        match explain(reason).kind:
            case DialFault.LOCAL:
                # Our own network restarts, so no peer was dialled: that is no failure of the peer.
                known.next_dial = next_dial
            case DialFault.BACKOFF:
                self.book.postponed(known.peer, reason, next_dial)
                self._held_back = True
            case _:
                known.is_unreachable = True
                self.book.failed(known.peer, reason, next_dial)

    def _pause_s(self, known: KnownPeer, took_s: float) -> float:
        """Seconds until the next dial to a peer after one more failure, of a dial that took `took_s`."""
        if not self._is_lost(known):
            return backoff_s(known.failures + 1, self._rng)
        pause_s = backoff_s(known.failures + 1, self._rng, max_s=LOST_EVERY_S) - took_s
        return max(pause_s, backoff_s(1, self._rng))

    def _is_lost(self, known: KnownPeer | None) -> bool:
        """Whether a peer was connected within the hour, and is not now."""
        if known is None or not known.connection_order or known.peer in self._connected:
            return False
        return self._now() - (known.last_seen or 0.0) < LOST_S

    async def _forget_failures(self) -> None:
        """Reset a transport that refuses to dial while no peer is connected: nothing is lost by that."""
        now = self._now()
        if self._held_back and not self._connected and now >= self._next_fresh:
            self._fresh_s = min(MAX_FRESH_S, 2 * self._fresh_s)
            self._next_fresh, self._held_back = now + self._fresh_s, False
            await self._host.forget_failures()

    async def _save_often(self) -> None:
        pause_s = _FIRST_SAVE_S  # a node that is killed soon has learnt something too
        try:
            while True:
                await asyncio.sleep(pause_s)
                self._save()
                pause_s = _SAVE_S
        finally:
            self._save()

    def _save(self) -> None:
        self._saves.does(lambda: self.book.save(self._cache))
