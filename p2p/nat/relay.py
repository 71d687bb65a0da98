"""Relay for others: frames from one stream to another, inside caps, without knowing what they say.

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

from atoll.p2p.framing import PREFIX_BYTES, read_frame, write_frame
from atoll.p2p.host import Host, Stream
from atoll.p2p.nat.tls import SEALED_MAX_BYTES
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, DecodeError, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import (
    NAT_MAX_BYTES,
    Circuit,
    Incoming,
    Open,
    Refused,
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
"""A circuit through which no frame passes for so long is closed; its ends speak more often than that."""
DAY_S = 86400.0


class RelayLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What we give to others."""

    circuits: int = 256
    circuits_per_peer: int = 32
    bytes_per_day: int = 20_000_000_000
    rate_bytes_s: float = 0.0
    """Over all circuits, each byte counted once; 0: no cap."""


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """For the status page."""

    circuits: int
    circuits_served: int
    bytes_relayed: int
    """Since the start."""
    bytes_today: int
    """In the current window of 24 hours."""
    bytes_per_day: int
    refused: int


class _Pace:
    """Bytes a second over all circuits: a sender waits until its bytes are due."""

    def __init__(self, rate_bytes_s: float, now: Callable[[], float]) -> None:
        self._rate, self._now, self._free_at = rate_bytes_s, now, 0.0

    async def take(self, size: int) -> None:
        if self._rate:
            now = self._now()
            self._free_at = max(self._free_at, now) + size / self._rate
            await asyncio.sleep(self._free_at - now)


class Relay:
    """Serves RELAY_PROTOCOL on `host`."""

    def __init__(
        self, host: Host, run: RunId, limits: RelayLimits, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`limits`: caps; see RelayLimits."""
        self._host, self._run, self._limits, self._now = host, run, limits, now
        self._open: Counter[PeerId] = Counter()
        self._circuits = self._served = self._bytes = self._today = self._refused = 0
        self._day_began = now()
        self._pace = _Pace(limits.rate_bytes_s, now)
        host.set_handler(RELAY_PROTOCOL, self._handle)

    def statistics(self) -> RelayStatistics:
        """A snapshot."""
        return RelayStatistics(
            *(self._circuits, self._served, self._bytes, self._today, self._limits.bytes_per_day, self._refused)
        )

    async def _handle(self, stream: Stream) -> None:
        try:
            await self._serve(stream)
        except TimeoutError as error:
            raise Unreachable(f"{short(stream.peer)} neither asks nor listens") from error

    async def _serve(self, stream: Stream) -> None:
        async with asyncio.timeout(OPEN_S):
            ask = codec.decode(await read_frame(stream, NAT_MAX_BYTES), Circuit, max_bytes=NAT_MAX_BYTES)
        target = peer_named(ask.target)
        if why := self._objection(ask.run, stream.peer, target):
            await self._refuse(stream, why)
            return
        ends = (stream.peer, target)
        self._open.update(ends)
        self._circuits += 1
        try:
            await self._connect(stream, target)
        finally:
            self._circuits -= 1
            self._open.subtract(ends)
            self._open += Counter()  # forget peers without circuits

    def _objection(self, run: bytes, source: PeerId, target: PeerId) -> str:
        limits = self._limits
        if run != self._run:
            return "another run"
        if target == self._host.peer_id or target == source:
            return "a circuit to its own end"
        if self._today_bytes() >= limits.bytes_per_day:
            return "the relay's bytes of this day are used up"
        if self._circuits >= limits.circuits or self._open[source] >= limits.circuits_per_peer:
            return "too many circuits"
        return "" if self._open[target] < limits.circuits_per_peer else "too many circuits to that peer"

    def _today_bytes(self) -> int:
        if self._now() - self._day_began >= DAY_S:
            self._day_began, self._today = self._now(), 0
        return self._today

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
        return isinstance(answer, Open)

    async def _refuse(self, stream: Stream, why: str) -> None:
        self._refused += 1
        answer: Refused = refused(why)
        async with asyncio.timeout(OPEN_S):
            await write_frame(stream, codec.encode(answer))

    async def _pass_on(self, here: Stream, there: Stream) -> None:
        """Both directions until one end is gone; then both are."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(here, there))
                group.create_task(self._pump(there, here))
        except* (Unreachable, TimeoutError):
            pass
        await there.close()
        # A responder that closes waits for the initiator; here it must hear of the other end at once.
        raise Unreachable("the circuit is over")

    async def _pump(self, source: Stream, target: Stream) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                try:
                    frame = await read_frame(source, SEALED_MAX_BYTES)
                except DecodeError as error:
                    raise Unreachable(str(error)) from error
            size = PREFIX_BYTES + len(frame)
            self._bytes += size
            self._today += size
            if self._today_bytes() > self._limits.bytes_per_day:
                raise Unreachable("the relay's bytes of this day are used up")
            await self._pace.take(size)
            async with asyncio.timeout(IDLE_S):
                await write_frame(target, frame)
