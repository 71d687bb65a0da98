"""A host under the user's limits: every stream of every protocol is paced, and the month is counted."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from atoll.p2p.host.interface import Handler, Host, Stream
from atoll.p2p.limits.config import Caps, GivenRates, Limits
from atoll.p2p.limits.monthly_quota import load_month, month_begin, month_end, quota_reason, save_month
from atoll.p2p.limits.pacer import WIRE_OVERHEAD, Pacer
from atoll.p2p.limits.token_bucket import TrafficClass
from atoll.p2p.system.quiet_saves import QuietSaves
from atoll.protocols.ids import PeerId
from atoll.protocols.wires import BLOB, CIRCUIT, RELAY

log = logging.getLogger(__name__)

BULK = (BLOB.family,)
"""Prefixes of the protocols that wait for all others."""
CIRCUITS = (RELAY.family, CIRCUIT.family)
"""Prefixes of the protocols that carry others: their streams are control until an end knows what is inside."""
UPDATE_S = 1.0
"""How often the schedule and the quota are applied."""
SAVE_S = 60.0
"""A kill costs at most so much of the month's count."""


class LimitedStream:
    """A stream whose bytes wait for their turn. See `atoll.p2p.host.interface.Stream`; `inner` does the work."""

    def __init__(self, inner: Stream, traffic: TrafficClass, up: Pacer, down: Pacer) -> None:
        self.peer = inner.peer
        self.protocol = inner.protocol
        self.close = inner.close
        self.reset = inner.reset
        self._inner = inner
        self.traffic = traffic
        """Class of the bytes; the end of a circuit changes it to that of the protocol inside."""
        self._up = up
        self._down = down
        self._unread = bytearray()
        """Read and not handed out: a reader may be cancelled while it waits for its turn."""

    async def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raises Unreachable when the stream ends before, or bulk traffic stands still."""
        self._down.require(self.traffic)
        if not self._unread and self._down.piece_bytes is None:
            return await self._inner.read_exactly(size)
        while (lacking := size - len(self._unread)) > 0:
            part = await self._inner.read_exactly(min(lacking, self._down.piece_bytes or lacking))
            self._unread += part
            await self._down.take(self.peer, self.traffic, len(part))
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Hand over all of `data` at the rate of the host. Raises Unreachable."""
        self._up.require(self.traffic)
        if self._up.piece_bytes is None:
            return await self._inner.write(data)
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            part = view[start : start + (self._up.piece_bytes or len(view))]
            await self._up.take(self.peer, self.traffic, len(part))
            await self._inner.write(part)
            start += len(part)


@dataclass(frozen=True, slots=True)
class LimitsStatistics:
    """A snapshot for the status page. Bytes of the month are bytes on the wire, estimated."""

    up_bytes_s: float | None
    down_bytes_s: float | None
    month_up_bytes: int
    month_down_bytes: int
    month_quota_bytes: int | None
    month_ends: str
    """ISO date on which the next month begins."""
    stopped: str
    """Why bulk traffic stands still; empty: it does not."""


class LimitedHost:
    """See `atoll.p2p.host.interface.Host`. Nothing else may open or serve streams on `inner`."""

    def __init__(
        self,
        inner: Host,
        limits: Limits,
        month_file: Path,
        *,
        is_started: bool = False,
        local_now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`month_file`: this month's count. `local_now`: the user's clock. Raises DiskFault.

        `is_started`: the owner of `inner` serves it, before and after this host is served.
        """
        self.inner = inner
        self._is_started = is_started
        self._limits = limits
        self._given = GivenRates()
        self._file, self._saves = month_file, QuietSaves("this month's traffic is not saved")
        self._local_now = local_now
        self._up, self._down = Pacer(), Pacer()
        # Limits concern streams; the rest passes through.
        self.peer_id = inner.peer_id
        self.addresses = inner.addresses
        self.connect = inner.connect
        self.disconnect = inner.disconnect
        self.connections = inner.connections
        self.forget_failures = inner.forget_failures
        self.favour = inner.favour
        self.events = inner.events
        self.statistics = inner.statistics
        self._month = load_month(month_file, local_now().date(), limits.month_start_day)
        self._saved = self._month
        self._counted = 0, 0
        self._said: tuple[date, float] = date.min, 0.0
        """Month that the clock says, and for how many seconds the node has seen it say so."""

    async def serve(self, ready: Callable[[], None]) -> None:
        """See Host.serve. The rates hold before the first stream."""
        self._update()
        try:
            if self._is_started:
                ready()
                await self._account()
            async with asyncio.TaskGroup() as group:
                accounting = group.create_task(self._account())
                try:
                    await self.inner.serve(ready)
                finally:
                    accounting.cancel()
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        finally:
            self._update()
            self._save()

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See Host. Raises Unreachable for bulk traffic that stands still."""
        self._up.require(traffic_of(protocol))
        return self._limited(await self.inner.open_stream(peer, protocol))

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """See Host."""

        async def limited(stream: Stream) -> None:
            self._up.require(traffic_of(protocol))
            await handler(self._limited(stream))

        self.inner.set_handler(protocol, limited)

    def set_rates(self, given: GivenRates) -> None:
        """Apply other rates than the configuration's for all streams until the node ends. Raises ConfigError."""
        given.over(Caps())
        self._given = given
        self._update()

    def limits(self) -> LimitsStatistics:
        """Return a snapshot."""
        return LimitsStatistics(
            up_bytes_s=self._up.rate_bytes_s,
            down_bytes_s=self._down.rate_bytes_s,
            month_up_bytes=self._month.up_bytes,
            month_down_bytes=self._month.down_bytes,
            month_quota_bytes=self._limits.month_bytes,
            month_ends=month_end(date.fromisoformat(self._month.begin)).isoformat(),
            stopped=self._up.bulk_off,
        )

    def _limited(self, stream: Stream) -> Stream:
        # Without a limit too: one may be set while the stream is open. It costs 0.2 µs a read or write.
        return LimitedStream(stream, traffic_of(stream.protocol), self._up, self._down)

    async def _account(self) -> None:
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        while True:
            await asyncio.sleep(UPDATE_S)
            self._update(UPDATE_S)
            if loop.time() - saved_s >= SAVE_S:
                saved_s = loop.time()
                await asyncio.to_thread(self._save)

    def _update(self, passed_s: float = 0.0) -> None:
        """Count the bytes that moved, and apply the rates of the schedule and the quota.

        `passed_s`: seconds since the last call, not those in which the machine slept.
        """
        now, total = self._local_now(), self.inner.statistics()
        up, down = total.bytes_up - self._counted[0], total.bytes_down - self._counted[1]
        self._counted = total.bytes_up, total.bytes_down
        begin = month_begin(now.date(), self._limits.month_start_day)
        self._said = begin, self._said[1] + passed_s if self._said[0] == begin else 0.0
        self._month = self._month.add(round(up * WIRE_OVERHEAD), round(down * WIRE_OVERHEAD), *self._said)
        caps = self._given.over(self._limits.caps(now))
        bulk_off = quota_reason(self._month, self._limits.month_bytes) or caps.bulk_off
        if bulk_off and bulk_off != self._up.bulk_off:
            log.warning("large transfers stop: %s", bulk_off)
        self._up.set(caps.up_bytes_s, bulk_off)
        self._down.set(caps.down_bytes_s, bulk_off)

    def _save(self) -> None:
        """Save the month's count; a disk that fails costs the count, not the network."""
        month = self._month
        if month == self._saved:
            return
        if self._saves.does(lambda: save_month(self._file, month)):
            self._saved = month


def traffic_of(protocol: str) -> TrafficClass:
    """Return the class of a protocol's traffic."""
    return TrafficClass.BULK if protocol.startswith(BULK) else TrafficClass.CONTROL


def carries(stream: Stream, protocol: str) -> None:
    """Count `stream`, a circuit, as `protocol` from now on, which runs inside. Nothing else can see that."""
    if isinstance(stream, LimitedStream):
        stream.traffic = traffic_of(protocol)
