"""Token buckets, and the order of grants: control before bulk, peers in equal shares. Pure; time is an argument.

The law, held by property tests: in any window of T seconds at most `rate * T + burst` bytes are granted.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum

from atoll.p2p.limits.bounded_table import put_newest

BURST_S = 0.25
BULK_SHARE = 0.85
"""Bulk leaves room, so that control finds tokens and short queues on the path. Source: DESIGN §5."""
_BURST_LOWEST_BYTES = 2048
_PIECE_LARGEST_BYTES = 64 * 1024
_PEERS_REMEMBERED = 4096


class TrafficClass(IntEnum):
    """Priority of bytes that wait; the lower class is sent first."""

    CONTROL = 0
    BULK = 1


class Bucket:
    """A token bucket: `rate_bytes_s` flow in, `burst_bytes` fit. It starts full. Tokens need not be bytes."""

    def __init__(self, rate_bytes_s: float, burst_bytes: float, now_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.burst_bytes = burst_bytes
        self._level = burst_bytes
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the tokens in the bucket; time never goes back."""
        if now_s > self._at_s:
            self._level = min(self.burst_bytes, self._level + (now_s - self._at_s) * self.rate_bytes_s)
            self._at_s = now_s
        return self._level

    def take(self, size_bytes: float, now_s: float) -> bool:
        """Take all of `size_bytes` or nothing."""
        if self.level(now_s) < size_bytes:
            return False
        self._level -= size_bytes
        return True

    def ready_s(self, size_bytes: float, now_s: float) -> float:
        """Return when `size_bytes` will be there if nothing else uses them. Never earlier than `now_s`."""
        lacking = min(size_bytes, self.burst_bytes) - self.level(now_s)
        return now_s + max(0.0, lacking / self.rate_bytes_s)


class PeerRateLimit:
    """A token bucket for each peer: `per_minute` requests a minute, and `burst` or as many at once."""

    def __init__(self, per_minute: int, now: Callable[[], float], burst: int | None = None) -> None:
        self._per_minute = per_minute
        self._burst = burst or per_minute
        self._now = now
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def take(self, peer: Hashable, count: float = 1) -> bool:
        """Whether one more request of `peer` is answered; an answered one is counted, as `count`."""
        now = self._now()
        bucket = self._buckets.get(peer) or Bucket(self._per_minute / 60.0, self._burst, now)
        put_newest(self._buckets, peer, bucket, _PEERS_REMEMBERED)
        return bucket.take(count, now)

    def has(self, peer: Hashable) -> bool:
        """Whether a request of `peer` would be answered now."""
        bucket = self._buckets.get(peer)
        return bucket is None or bucket.level(self._now()) >= 1


@dataclass(eq=False, slots=True)
class Ticket:
    """A request for tokens."""

    peer: Hashable
    traffic: TrafficClass
    size_bytes: float
    is_granted: bool = False


class Turns:
    """Waiting tickets of one class: the peer that got the fewest bytes is next (start-time fair queueing)."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Ticket]] = {}
        self._tags: dict[Hashable, float] = {}
        self._clock = 0.0

    def add(self, ticket: Ticket) -> None:
        """Append to the queue of the ticket's peer. A peer that was away does not save up turns."""
        self._queues.setdefault(ticket.peer, deque()).append(ticket)
        self._tags[ticket.peer] = max(self._tags.get(ticket.peer, 0.0), self._clock)

    def first(self) -> Ticket | None:
        """Return the ticket that is next."""
        peer = min(self._queues, key=self._tags.__getitem__, default=None)
        return None if peer is None else self._queues[peer][0]

    def pop(self, ticket: Ticket) -> None:
        """Remove a granted ticket and charge its peer."""
        self._clock = self._tags[ticket.peer]
        self._tags[ticket.peer] += ticket.size_bytes
        self.drop(ticket)
        for peer in [peer for peer, tag in self._tags.items() if tag <= self._clock and peer not in self._queues]:
            del self._tags[peer]

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket that is not waited for any more."""
        queue = self._queues.get(ticket.peer, deque())
        if ticket in queue:
            queue.remove(ticket)
        if not queue:
            self._queues.pop(ticket.peer, None)


class FairBucket:
    """One direction over all protocols: a bucket of `rate_bytes_s`, of which bulk gets BULK_SHARE at most."""

    def __init__(self, rate_bytes_s: float, now_s: float) -> None:
        burst = max(_BURST_LOWEST_BYTES, rate_bytes_s * BURST_S)
        self.rate_bytes_s = rate_bytes_s
        self.piece_bytes = int(min(_PIECE_LARGEST_BYTES, burst / 4))
        """Largest request; small enough that a request of control waits for at most one of bulk."""
        self._all = Bucket(rate_bytes_s, burst, now_s)
        self._bulk = Bucket(rate_bytes_s * BULK_SHARE, burst / 2, now_s)
        self._turns = {traffic: Turns() for traffic in TrafficClass}

    def ask(self, peer: Hashable, traffic: TrafficClass, size_bytes: float) -> Ticket:
        """Queue a request of at most `piece_bytes` (more is granted like that much)."""
        ticket = Ticket(peer, traffic, min(size_bytes, self._bulk.burst_bytes))
        self._turns[traffic].add(ticket)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket that is not waited for any more."""
        self._turns[ticket.traffic].drop(ticket)

    def grant(self, now_s: float) -> list[Ticket]:
        """Grant and return all tickets whose tokens are there."""
        granted: list[Ticket] = []
        for traffic in TrafficClass:
            while (ticket := self._turns[traffic].first()) is not None:
                if not self._take(ticket, now_s):
                    return granted  # bulk does not overtake control
                self._turns[traffic].pop(ticket)
                ticket.is_granted = True
                granted.append(ticket)
        return granted

    def next_s(self, now_s: float) -> float | None:
        """Return when `grant` is worth a call; None: no ticket waits."""
        for traffic in TrafficClass:
            ticket = self._turns[traffic].first()
            if ticket is not None:
                return self._ready_s(ticket, now_s)
        return None

    def _ready_s(self, ticket: Ticket, now_s: float) -> float:
        ready_s = self._all.ready_s(ticket.size_bytes, now_s)
        if ticket.traffic is TrafficClass.BULK:
            ready_s = max(ready_s, self._bulk.ready_s(ticket.size_bytes, now_s))
        return ready_s

    def _take(self, ticket: Ticket, now_s: float) -> bool:
        buckets = (self._all, self._bulk) if ticket.traffic is TrafficClass.BULK else (self._all,)
        if any(bucket.level(now_s) < ticket.size_bytes for bucket in buckets):
            return False
        return all(bucket.take(ticket.size_bytes, now_s) for bucket in buckets)
