"""A host under the user's limits: every stream of every protocol is paced, and the month is counted."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from atoll.p2p.host.interface import Connection, Handler, Host, HostEvent, HostStatistics, PeerAddress, Stream
from atoll.p2p.limits.config import Limits
from atoll.p2p.limits.limited_stream import LimitedStream
from atoll.p2p.limits.monthly_quota import load_month, month_end, quota_reason, save_month
from atoll.p2p.limits.pacer import WIRE_OVERHEAD, Pacer
from atoll.p2p.limits.token_bucket import TrafficClass
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId

log = logging.getLogger(__name__)

BULK = ("/atoll/blob/",)
"""Prefixes of the protocols that wait for all others."""
LOOK_S = 1.0
"""How often the schedule and the quota are looked at."""
SAVE_S = 60.0
"""A kill costs at most so much of the month's count."""


@dataclass(frozen=True, slots=True)
class LimitsStatistics:
    """For the status page. Bytes of the month are bytes on the wire, estimated."""

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
    """See `atoll.p2p.host.interface.Host`; `inner` does the work. Call nothing of `inner` that opens or
    serves streams."""

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
        self._file = month_file
        self._local_now = local_now
        self._up, self._down = Pacer(), Pacer()
        self._month = load_month(month_file, local_now().date(), limits.month_start_day)
        self._saved = self._month
        self._counted = 0, 0

    @property
    def peer_id(self) -> PeerId:
        """Our PeerID."""
        return self.inner.peer_id

    async def serve(self, ready: Callable[[], None]) -> None:
        """See Host.serve. The rates hold before the first stream."""
        self._look()
        try:
            if self._is_started:
                ready()
                await self._keep_books()
            async with asyncio.TaskGroup() as group:
                books = group.create_task(self._keep_books())
                try:
                    await self.inner.serve(ready)
                finally:
                    books.cancel()
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None
        finally:
            self._look()
            self._save()

    async def addresses(self) -> tuple[str, ...]:
        """See Host."""
        return await self.inner.addresses()

    async def connect(self, address: PeerAddress) -> None:
        """See Host."""
        await self.inner.connect(address)

    async def disconnect(self, peer: PeerId) -> None:
        """See Host."""
        await self.inner.disconnect(peer)

    async def connections(self) -> tuple[Connection, ...]:
        """See Host."""
        return await self.inner.connections()

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """See Host. Raises Unreachable for bulk traffic that stands still."""
        self._up.require(traffic_of(protocol))
        return self._limited(await self.inner.open_stream(peer, protocol))

    async def forget_failures(self) -> None:
        """See Host."""
        await self.inner.forget_failures()

    def set_handler(self, protocol: str, handler: Handler) -> None:
        """See Host."""

        async def limited(stream: Stream) -> None:
            self._up.require(traffic_of(protocol))
            await handler(self._limited(stream))

        self.inner.set_handler(protocol, limited if self._is_any(protocol) else handler)

    def events(self) -> AsyncIterator[HostEvent]:
        """See Host."""
        return self.inner.events()

    def statistics(self) -> HostStatistics:
        """See Host."""
        return self.inner.statistics()

    def limits(self) -> LimitsStatistics:
        """A snapshot."""
        return LimitsStatistics(
            up_bytes_s=self._up.rate_bytes_s,
            down_bytes_s=self._down.rate_bytes_s,
            month_up_bytes=self._month.up_bytes,
            month_down_bytes=self._month.down_bytes,
            month_quota_bytes=self._limits.month_bytes,
            month_ends=month_end(date.fromisoformat(self._month.begin)).isoformat(),
            stopped=self._up.bulk_off,
        )

    def _is_any(self, protocol: str) -> bool:
        """Whether anything can ever limit this protocol; what is unlimited is not wrapped and costs nothing."""
        is_bulk = traffic_of(protocol) is TrafficClass.BULK
        return self._limits.has_rates or (is_bulk and self._limits.month_bytes is not None)

    def _limited(self, stream: Stream) -> Stream:
        if not self._is_any(stream.protocol):
            return stream
        return LimitedStream(stream, traffic_of(stream.protocol), self._up, self._down)

    async def _keep_books(self) -> None:
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
            if loop.time() - saved_s >= SAVE_S:
                saved_s = loop.time()
                await asyncio.to_thread(self._save)

    def _look(self) -> None:
        """Count what moved, and let hold what the schedule and the quota say now."""
        now, total = self._local_now(), self.inner.statistics()
        up, down = total.bytes_up - self._counted[0], total.bytes_down - self._counted[1]
        self._counted = total.bytes_up, total.bytes_down
        self._month = self._month.add(
            round(up * WIRE_OVERHEAD), round(down * WIRE_OVERHEAD), now.date(), self._limits.month_start_day
        )
        caps = self._limits.caps(now)
        bulk_off = quota_reason(self._month, self._limits.month_bytes) or caps.bulk_off
        if bulk_off and bulk_off != self._up.bulk_off:
            log.warning("large transfers stop: %s", bulk_off)
        self._up.set(caps.up_bytes_s, bulk_off)
        self._down.set(caps.down_bytes_s, bulk_off)

    def _save(self) -> None:
        """A disk that fails costs the count, not the network."""
        month = self._month
        if month == self._saved:
            return
        try:
            save_month(self._file, month)
            self._saved = month
        except DiskFault as fault:
            log.warning("this month's traffic is not saved: %s", fault.line())


def traffic_of(protocol: str) -> TrafficClass:
    """The class of a protocol."""
    return TrafficClass.BULK if protocol.startswith(BULK) else TrafficClass.CONTROL
