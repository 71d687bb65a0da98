"""The wait for tokens on the event loop, for one direction of one host."""

import asyncio

from atoll.p2p.limits.token_bucket import FairBucket, Ticket, TrafficClass
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId

WIRE_OVERHEAD = 1.06
"""Bytes on the wire per byte of a stream: packet headers, tags, acknowledgements (QUIC over IPv6)."""
_SOONEST_S = 0.001


class Pacer:
    """Paces all bytes of one direction. Without a rate it costs one comparison."""

    def __init__(self) -> None:
        self.bulk_off = ""
        """Why bulk traffic stands still; empty: it does not."""
        self._bucket: FairBucket | None = None
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rate_bytes_s(self) -> float | None:
        """Bytes per second; None: no limit."""
        return None if self._bucket is None else self._bucket.rate_bytes_s

    @property
    def piece_bytes(self) -> int | None:
        """Stream bytes to ask for at a time; None: no limit."""
        return None if self._bucket is None else int(self._bucket.piece_bytes / WIRE_OVERHEAD)

    def set(self, rate_bytes_s: float | None, bulk_off: str) -> None:
        """Change the rate and the reason why bulk is off; waiting traffic passes or fails with that reason."""
        if (rate_bytes_s, bulk_off) == (self.rate_bytes_s, self.bulk_off):
            return
        self.bulk_off = bulk_off
        if rate_bytes_s != self.rate_bytes_s:
            now_s = asyncio.get_running_loop().time()
            self._bucket = None if rate_bytes_s is None else FairBucket(rate_bytes_s, now_s)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def take(self, peer: PeerId, traffic: TrafficClass, size_bytes: int) -> None:
        """Wait for the turn of `size_bytes` (at most `piece_bytes`). Raises Unreachable while bulk is off."""
        self.require(traffic)
        if self._bucket is None:
            return
        bucket, ticket = self._bucket, self._bucket.ask(peer, traffic, size_bytes * WIRE_OVERHEAD)
        self._grant()
        if ticket.is_granted:
            return
        self._waiting[ticket] = future = asyncio.get_running_loop().create_future()
        try:
            await future
        finally:
            self._waiting.pop(ticket, None)
            bucket.drop(ticket)
        self.require(traffic)

    def require(self, traffic: TrafficClass) -> None:
        """Raises Unreachable while bulk is off."""
        if self.bulk_off and traffic is TrafficClass.BULK:
            raise Unreachable(self.bulk_off)

    def _grant(self) -> None:
        """Grant every ticket that has its tokens, and schedule the next grant."""
        if self._bucket is None:
            return
        loop = asyncio.get_running_loop()
        for ticket in self._bucket.grant(loop.time()):
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._bucket.next_s(loop.time())
        self._timer = None if next_s is None else loop.call_at(max(next_s, loop.time() + _SOONEST_S), self._grant)
