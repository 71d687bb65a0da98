"""The relay: frames pass from one stream to another, inside caps, and the relay cannot read them.

Opt-in. A circuit is one stream between two peers that are both connected to us. Caps: circuits at once, circuits
of one peer, bytes a day, bytes a second over all circuits. Wire: docs/wires/relay.md.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from atoll.p2p.host.framing import PREFIX_BYTES, read_frame, write_frame
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import (
    NAT_MAX_BYTES,
    SEALED_MAX_BYTES,
    Circuit,
    Incoming,
    NatRefused,
    OpenCircuit,
    decode_opening,
    peer_named,
    refused,
)
from atoll.protocols.wires import CIRCUIT, RELAY

log = logging.getLogger(__name__)

RELAY_PROTOCOL = RELAY.protocol(1)
CIRCUIT_PROTOCOL = CIRCUIT.protocol(1)
OPEN_S = 8.0
"""A circuit that is not open by then is given up."""
IDLE_S = 60.0
"""A circuit through which no frame passes, either way, for so long is closed; its ends send more often."""
SMALL_BYTES = 1024
"""Frames up to this size have an eighth of the rate for themselves, so that beats do not wait behind downloads."""
CIRCUITS_PER_MINUTE = 600
"""Circuits that one peer may ask for; each costs its target a TLS handshake."""
DAY_S = 86400.0
_OPENERS = 4
"""Full shares of `circuits_per_peer` that may lead to one target."""


class RelayLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Caps on what we relay for others."""

    circuits: int = 256
    circuits_per_peer: int = 32
    """Opened by one peer. Four times as many may lead to one peer, so that no single opener fills them."""
    bytes_per_day: int = 20_000_000_000
    rate_bytes_s: float = 0.0
    """Over all circuits, each byte counted once; 0: no cap."""


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """A snapshot of the relay for the status page."""

    circuits: int
    circuits_served: int
    bytes_relayed: int
    """Since the start."""
    bytes_today: int
    """In the current window of 24 hours."""
    bytes_per_day: int
    refused: int


class _Pace:
    """A cap in bytes a second; 0: no cap. A sender waits until its bytes are due."""

    def __init__(self, rate_bytes_s: float, now: Callable[[], float]) -> None:
        self._rate = rate_bytes_s
        self._now = now
        self._free_at = 0.0

    def book(self, size: int) -> float:
        """Reserve `size` bytes and return the seconds until they may be sent."""
        if not self._rate:
            return 0.0
        now = self._now()
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at - now


class Relay:
    """Serves RELAY_PROTOCOL on `host`."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        limits: RelayLimits,
        now: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[], bool] = bool,
    ) -> None:
        """`is_stopped`: whether our limits stop large transfers; circuits then stop too."""
        self._host = host
        self._run = run
        self._limits = limits
        self._now = now
        self._is_stopped = is_stopped
        self._opened_by: Counter[PeerId] = Counter()
        self._opened_to: Counter[PeerId] = Counter()
        self._rate_limit = PeerRateLimit(CIRCUITS_PER_MINUTE, now)
        self._circuits = 0
        self._served = 0
        self._bytes = 0
        self._today = 0
        self._refused = 0
        self._day_began = now()
        # Two queues, because one would put the beats of held circuits behind megabytes of downloads.
        self._pace = _Pace(limits.rate_bytes_s * 7 / 8, now)
        self._quick = _Pace(limits.rate_bytes_s / 8, now)
        host.set_handler(RELAY_PROTOCOL, self._handle)

    def statistics(self) -> RelayStatistics:
        """Return a snapshot."""
        return RelayStatistics(
            circuits=self._circuits,
            circuits_served=self._served,
            bytes_relayed=self._bytes,
            bytes_today=self._today,
            bytes_per_day=self._limits.bytes_per_day,
            refused=self._refused,
        )

    async def _handle(self, stream: Stream) -> None:
        try:
            await self._serve(stream)
        except TimeoutError as error:
            raise Unreachable(f"{short(stream.peer)} neither asks nor listens") from error

    async def _serve(self, stream: Stream) -> None:
        async with asyncio.timeout(OPEN_S):
            wanted = codec.decode(await read_frame(stream, NAT_MAX_BYTES), Circuit, max_bytes=NAT_MAX_BYTES)
        target = peer_named(wanted.target)
        if why := self._objection(wanted.run, stream.peer, target):
            await self._refuse(stream, why)
            return
        # Counted before the first await: requests that arrive together must not all find the last free place.
        self._opened_by[stream.peer] += 1
        self._opened_to[target] += 1
        self._circuits += 1
        try:
            await self._connect(stream, target)
        finally:
            self._circuits -= 1
            for count, peer in ((self._opened_by, stream.peer), (self._opened_to, target)):
                count[peer] -= 1
                if not count[peer]:
                    del count[peer]

    def _objection(self, run: bytes, source: PeerId, target: PeerId) -> str:
        """Why the circuit is refused; empty if it is not."""
        limits = self._limits
        if run != self._run:
            return "another run"
        if target == self._host.peer_id or target == source:
            return "a circuit to its own end"
        if why := self._exhausted():
            return why
        if self._circuits >= limits.circuits or self._opened_by[source] >= limits.circuits_per_peer:
            return "too many circuits"
        if self._opened_to[target] >= _OPENERS * limits.circuits_per_peer:
            return "too many circuits to that peer"
        return "" if self._rate_limit.take(source) else "too many circuits in a minute"

    def _exhausted(self) -> str:
        """Why nothing is passed on; empty: frames pass. A relay cannot see which of them are bulk."""
        if self._now() - self._day_began >= DAY_S:
            self._day_began, self._today = self._now(), 0
        if self._today >= self._limits.bytes_per_day:
            return "the relay's bytes of this day are used up"
        return "the relay's own limits stop its large transfers" if self._is_stopped() else ""

    async def _connect(self, stream: Stream, target: PeerId) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                there = await self._host.open_stream(target, CIRCUIT_PROTOCOL)
        except (Unreachable, TimeoutError) as error:
            await self._refuse(stream, f"no connection to {short(target)}: {error}")
            return
        try:
            if await self._is_accepted(stream, there):
                self._served += 1
                await self._pass_on(stream, there)
        finally:
            there.reset()

    async def _is_accepted(self, here: Stream, there: Stream) -> bool:
        try:
            async with asyncio.timeout(OPEN_S):
                await write_frame(there, codec.encode(Incoming(self._run, here.peer)))
                answer = decode_opening(await read_frame(there, NAT_MAX_BYTES))
        except (AtollError, TimeoutError) as error:
            answer = refused(f"{short(there.peer)} does not answer: {error}")
        async with asyncio.timeout(OPEN_S):
            await write_frame(here, codec.encode(answer))
        return isinstance(answer, OpenCircuit)

    async def _refuse(self, stream: Stream, why: str) -> None:
        self._refused += 1
        answer: NatRefused = refused(why)
        async with asyncio.timeout(OPEN_S):
            await write_frame(stream, codec.encode(answer))

    async def _pass_on(self, here: Stream, there: Stream) -> None:
        """Pass frames both ways until one end is gone, then end the other."""
        moved_at = [self._now()]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(here, there, moved_at))
                group.create_task(self._pump(there, here, moved_at))
                group.create_task(self._until_idle(moved_at))
        except* Unreachable:
            pass
        async with asyncio.timeout(OPEN_S):
            await there.close()
        # A normal return would close `here`, and a responder must not close first: its close would wait for the
        # initiator. An error resets it, so that the initiator learns at once that the target is gone.
        raise Unreachable("the circuit is over")

    async def _until_idle(self, moved_at: list[float]) -> None:
        while (left_s := moved_at[0] + IDLE_S - self._now()) > 0:  # noqa: ASYNC110
            # Sleeping on, because an event for every frame would cost more.
            await asyncio.sleep(left_s)
        raise Unreachable("nothing passes any more")

    async def _pump(self, source: Stream, target: Stream, moved_at: list[float]) -> None:
        """`moved_at`: when a frame last passed, either way; a download is silent in one direction."""
        while True:
            try:
                frame = await read_frame(source, SEALED_MAX_BYTES)
            except DecodeError as error:
                raise Unreachable(str(error)) from error
            size = PREFIX_BYTES + len(frame)
            self._bytes += size
            # Counted when it arrives: what the other end does not accept was still our traffic.
            self._today += size
            if why := self._exhausted():
                raise Unreachable(why)
            wait_s = (self._quick if size <= SMALL_BYTES else self._pace).book(size)
            # A frame that waits for its rate is no idle circuit.
            moved_at[0] = self._now() + wait_s
            await asyncio.sleep(wait_s)
            await write_frame(target, frame)
            moved_at[0] = self._now()
