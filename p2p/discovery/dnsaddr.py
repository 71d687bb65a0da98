"""Seeds by name: resolves `/dnsaddr/seed.example.org` through TXT records at `_dnsaddr.seed.example.org`.

This is libp2p's convention (multiaddr's protocols/DNSADDR.md): a record holds `dnsaddr=` and a multiaddr, which
may be another /dnsaddr. DNS answers are not signed, so an address without /p2p/PEERID is refused: anyone on the
path could answer there.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from atoll.p2p.discovery.dns import LOOKUP_S, TxtLookup
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import MADDRS_PER_PEER, parse_maddr
from atoll.p2p.membership.address_book import dns_name
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import PeerId, peer_bytes

log = logging.getLogger(__name__)

RESOLVE_S = 10.0
"""Deadline for one seed, in seconds: its name and every nested name."""
REFRESH_MIN_S = 60.0
REFRESH_MAX_S = 3600.0
"""Bounds of the time after which a resolved name is looked up again, whatever its records' time to live is."""
RESULTS_MAX = 32
"""Most multiaddrs of one seed, those of nested names included."""
DEPTH_MAX = 4
"""Most levels of nested names."""
LOOKUPS_MAX = 16
"""Most DNS lookups for one seed."""
RECORD_MAX_BYTES = 512
_PREFIX = b"dnsaddr="


@dataclass(frozen=True, slots=True)
class Resolved:
    """Result of resolving one seed."""

    addresses: tuple[PeerAddress, ...]
    refused: tuple[str, ...]
    """Reasons why records cannot be used."""
    ttl_s: float
    """Shortest time to live of all records, in seconds."""


@dataclass(frozen=True, slots=True)
class _Nested:
    name: str
    peer: PeerId


class _Walk:
    """State of one resolution: addresses found so far, and names that were looked up."""

    def __init__(self, lookup: TxtLookup) -> None:
        self._lookup = lookup
        self._seen: set[_Nested] = set()
        self._found: dict[PeerId, dict[str, None]] = {}
        self.refused: list[str] = []
        self.faults: list[Unreachable] = []
        self.ttl_s = float("inf")

    async def level(self, wanted: list[_Nested]) -> list[_Nested]:
        """Look up all names of one level at once; return the names of the next level."""
        fresh = [nested for nested in dict.fromkeys(wanted) if nested not in self._seen]
        fresh = fresh[: LOOKUPS_MAX - len(self._seen)]
        self._seen.update(fresh)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(nested)) for nested in fresh]
        return [deeper for task in tasks for deeper in task.result()]

    async def _ask(self, nested: _Nested) -> list[_Nested]:
        try:
            async with asyncio.timeout(LOOKUP_S):
                answer = await self._lookup(f"_dnsaddr.{nested.name}")
        except TimeoutError:
            self.faults.append(Unreachable(f"no DNS server answers for {nested.name} in {LOOKUP_S:.0f} s"))
            return []
        except Unreachable as error:
            self.faults.append(error)
            return []
        self.ttl_s = min(self.ttl_s, answer.ttl_s)
        return [deeper for text in answer.texts for deeper in self._add(text, nested.peer)]

    def _add(self, text: bytes, wanted: PeerId) -> list[_Nested]:
        """Add one record; return the name that it points to, if any. Records of other kinds are ignored."""
        if not text.startswith(_PREFIX):
            return []
        try:
            maddr, peer = parse_record(text)
        except DecodeError as error:
            self.refused.append(str(error))
            return []
        if wanted and peer and peer != wanted:
            return []
        if maddr.startswith("/dnsaddr/"):
            return [_Nested(dns_name(maddr), peer or wanted)]
        if not peer:
            self.refused.append(f"{maddr} names no PeerID")
        elif sum(map(len, self._found.values())) < RESULTS_MAX:
            self._found.setdefault(peer, {})[maddr] = None
        return []

    def addresses(self) -> tuple[PeerAddress, ...]:
        """Addresses found so far, one PeerAddress per peer."""
        return tuple(PeerAddress(peer, tuple(maddrs)[:MADDRS_PER_PEER]) for peer, maddrs in self._found.items())


async def resolve(seed: PeerAddress, lookup: TxtLookup) -> Resolved:
    """Addresses behind a /dnsaddr seed; with an empty `peer`, those of every peer that DNS names.

    Raises Unreachable if nothing usable is found: unknown name, silent servers, no or bad records. The caller owns
    the deadline.
    """
    name = dns_name(seed.maddrs[0])
    walk, wanted = _Walk(lookup), [_Nested(name, seed.peer)]
    for _ in range(DEPTH_MAX):
        wanted = await walk.level(wanted)
    found = walk.addresses()
    if found:
        return Resolved(found, tuple(walk.refused), walk.ttl_s)
    if walk.faults:
        raise walk.faults[0]
    if walk.refused:
        raise Unreachable(f"no usable dnsaddr record at _dnsaddr.{name}: {walk.refused[0]}")
    raise Unreachable(f"no dnsaddr record at _dnsaddr.{name}" + (f" for {seed.peer}" if seed.peer else ""))


def parse_record(text: bytes) -> tuple[str, PeerId]:
    """Multiaddr and PeerID (empty if absent) of a record `dnsaddr=…`. Raises DecodeError."""
    if len(text) > RECORD_MAX_BYTES or not text.isascii():
        raise DecodeError("a dnsaddr record is too long or not ASCII")
    value = text.decode("ascii").removeprefix(_PREFIX.decode()).strip()
    maddr, separator, peer = value.rpartition("/p2p/")
    if not separator:
        maddr, peer = value, ""
    elif not maddr or "/" in peer:
        # the last /p2p is a relay's: the peer itself is not named
        maddr, peer = value, ""
    if peer:
        peer_bytes(PeerId(peer))
    if maddr.startswith("/dnsaddr/"):
        dns_name(maddr)
    else:
        parse_maddr(maddr)
    return maddr, PeerId(peer)


@dataclass(eq=False)
class DnsSeed:
    """Keeps one /dnsaddr seed resolved: again when its records expire, with back-off when it fails."""

    seed: PeerAddress
    lookup: TxtLookup
    now: Callable[[], float]
    rng: random.Random
    addresses: tuple[PeerAddress, ...] = ()
    """Result of the last successful resolution; unchanged while DNS is out of reach."""
    tries: int = 0
    """Number of failures in a row."""
    error: str = ""
    """Reason of the newest failure; empty after a success."""

    def __post_init__(self) -> None:
        self.next_at = self.now()
        """Time of the next resolution, on the clock `now`."""

    @property
    def text(self) -> str:
        """The seed as the user wrote it."""
        return self.seed.maddrs[0] + (f"/p2p/{self.seed.peer}" if self.seed.peer else "")

    async def serve(self, on_found: Callable[[tuple[PeerAddress, ...]], None]) -> None:
        """Resolve repeatedly until cancelled; `on_found` receives the addresses."""
        while True:
            pause_s = await self._resolve(on_found)
            self.next_at = self.now() + pause_s
            await asyncio.sleep(pause_s)

    async def _resolve(self, on_found: Callable[[tuple[PeerAddress, ...]], None]) -> float:
        """Resolve once; return the pause before the next time, in seconds."""
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await resolve(self.seed, self.lookup)
        except TimeoutError:
            return self._failed(f"no DNS server answers in {RESOLVE_S:.0f} s")
        except Unreachable as error:
            return self._failed(error.line())
        self._record(found)
        on_found(found.addresses)
        return min(max(found.ttl_s, REFRESH_MIN_S), REFRESH_MAX_S) * self.rng.uniform(0.75, 1.25)

    def _record(self, found: Resolved) -> None:
        if found.addresses != self.addresses:
            for reason in found.refused:
                log.warning("%s: a record is not used: %s", self.text, reason)
        self.addresses = found.addresses
        self.tries = 0
        self.error = ""

    def _failed(self, reason: str) -> float:
        log.debug("%s: %s", self.text, reason)
        self.tries, self.error = self.tries + 1, reason
        return backoff_s(self.tries, self.rng)
