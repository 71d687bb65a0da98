"""Flood small messages to everyone: each node passes news on once, to a few peers.

Best effort: what a full queue or an allowance drops, anti-entropy brings. A message is news when its topic's
`accept` says so; a message that `accept` refuses with PeerFault is blamed on the peer that sent it.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.p2p.rpc.calls import Calls
from atoll.protocols.ids import PeerId, digest

FANOUT = 8
SEEN_IDS = 1 << 16
MESSAGES_PER_S = 200.0
MESSAGES_BURST = 2000.0
"""Above what a round of a hundred members makes every neighbour pass on; more is dropped, and no fault."""
_HEADER_BYTES = 8
_ID_BYTES = 16

AcceptMessage = Callable[[PeerId, bytes], bool]


@dataclass(slots=True)
class TokenBucket:
    """An allowance of `rate_per_s` that saves up to `burst`."""

    rate_per_s: float
    burst: float
    level: float
    at: float

    def take(self, now: float, cost: float = 1.0) -> bool:
        """Spend `cost` if it is there."""
        self.level = min(self.burst, self.level + (now - self.at) * self.rate_per_s)
        self.at = now
        if self.level < cost:
            return False
        self.level -= cost
        return True


@dataclass(frozen=True, slots=True)
class GossipStatistics:
    """Totals since the start."""

    published: int
    heard: int
    duplicates: int
    forwarded: int
    over_rate: int


class Gossip:
    """One flood over `calls` among the peers that `neighbours` names."""

    def __init__(
        self,
        calls: Calls,
        neighbours: Callable[[], Collection[PeerId]],
        now: Callable[[], float],
        rng: random.Random,
        *,
        fanout: int = FANOUT,
    ) -> None:
        self._calls = calls
        self._neighbours = neighbours
        self._now = now
        self._rng = rng
        self._fanout = fanout
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._buckets: dict[PeerId, TokenBucket] = {}
        self._published = self._heard = self._duplicates = self._forwarded = self._over_rate = 0

    def subscribe(self, topic: str, accept: AcceptMessage, *, max_bytes: int) -> None:
        """Hear `topic`. `accept(sender, data)`: True passes it on; raises PeerFault for illegal bytes."""

        async def hear(sender: PeerId, data: bytes) -> None:
            self._receive(topic, accept, sender, data)

        self._calls.register_notice(f"gossip.{topic}", bytes, hear, max_bytes=max_bytes + _HEADER_BYTES)

    def publish(self, topic: str, data: bytes) -> None:
        """Send our own news."""
        self._published += 1
        self._mark(topic, data)
        self._send(topic, data, None)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: drop its allowance."""
        self._buckets.pop(peer, None)

    def statistics(self) -> GossipStatistics:
        """A snapshot."""
        return GossipStatistics(self._published, self._heard, self._duplicates, self._forwarded, self._over_rate)

    def _receive(self, topic: str, accept: AcceptMessage, sender: PeerId, data: bytes) -> None:
        if not self._bucket(sender).take(self._now()):
            self._over_rate += 1
            return
        self._heard += 1
        if not self._mark(topic, data):
            self._duplicates += 1
        elif accept(sender, data):
            self._forwarded += 1
            self._send(topic, data, sender)

    def _send(self, topic: str, data: bytes, sender: PeerId | None) -> None:
        for peer in choose_peers(self._neighbours(), sender, self._fanout, self._rng):
            self._calls.notify(peer, f"gossip.{topic}", data)

    def _mark(self, topic: str, data: bytes) -> bool:
        """Remember the message; False if it was known."""
        name = digest(topic.encode(), b"\0", data)[:_ID_BYTES]
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > SEEN_IDS:
            self._seen.popitem(last=False)
        return True

    def _bucket(self, peer: PeerId) -> TokenBucket:
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = TokenBucket(MESSAGES_PER_S, MESSAGES_BURST, MESSAGES_BURST, self._now())
            self._buckets[peer] = bucket
        return bucket


def choose_peers(
    neighbours: Collection[PeerId], sender: PeerId | None, fanout: int, rng: random.Random
) -> list[PeerId]:
    """All neighbours but the sender, a random `fanout` of them if there are more."""
    others = sorted(peer for peer in neighbours if peer != sender)
    return others if len(others) <= fanout else rng.sample(others, fanout)
