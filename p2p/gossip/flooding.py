"""Gossip by flooding: each node forwards a new message once, to a few of its neighbours.

Delivery is best effort: anti-entropy brings messages that a full queue or a rate limit drops. The topic's `accept`
decides whether a message is new; a PeerFault that it raises counts against the peer that sent the message.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.p2p.limits.token_bucket import Bucket
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.ids import PeerId, digest

FANOUT = 8
"""Most neighbours that a message is forwarded to."""
SEEN_IDS = 1 << 16
"""Number of message ids that are remembered."""
MESSAGES_PER_S = 200.0
MESSAGES_BURST = 2000.0
"""Burst allowed to one neighbour: more than a round of a hundred members needs. The rest is dropped, no fault."""
_HEADER_BYTES = 8
_ID_BYTES = 16

AcceptMessage = Callable[[PeerId, bytes], bool]


@dataclass(frozen=True, slots=True)
class GossipStatistics:
    """Numbers of messages since the start."""

    published: int
    received: int
    duplicates: int
    forwarded: int
    over_rate: int


class Gossip:
    """Floods messages over `calls` to the peers that `neighbours` returns."""

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
        self._buckets: dict[PeerId, Bucket] = {}
        self._published = 0
        self._received = 0
        self._duplicates = 0
        self._forwarded = 0
        self._over_rate = 0

    def subscribe(self, topic: str, accept: AcceptMessage, *, max_bytes: int) -> None:
        """Receive `topic`. `accept(sender, data)`: True forwards the data; raises PeerFault for illegal bytes."""

        async def receive(sender: PeerId, data: bytes) -> None:
            self._receive(topic, accept, sender, data)

        self._calls.register_notice(f"gossip.{topic}", bytes, receive, max_bytes=max_bytes + _HEADER_BYTES)

    def publish(self, topic: str, data: bytes) -> None:
        """Send a new message of our own."""
        self._published += 1
        self._mark(topic, data)
        self._send(topic, data, None)

    def forget(self, peer: PeerId) -> None:
        """Drop the rate limit state of a peer that is gone."""
        self._buckets.pop(peer, None)

    def statistics(self) -> GossipStatistics:
        """Totals of messages so far."""
        return GossipStatistics(
            published=self._published,
            received=self._received,
            duplicates=self._duplicates,
            forwarded=self._forwarded,
            over_rate=self._over_rate,
        )

    def _receive(self, topic: str, accept: AcceptMessage, sender: PeerId, data: bytes) -> None:
        if not self._bucket(sender).take(1, self._now()):
            self._over_rate += 1
            return
        self._received += 1
        if not self._mark(topic, data):
            self._duplicates += 1
        elif accept(sender, data):
            self._forwarded += 1
            self._send(topic, data, sender)

    def _send(self, topic: str, data: bytes, sender: PeerId | None) -> None:
        for peer in choose_peers(self._neighbours(), sender, self._fanout, self._rng):
            self._calls.notify(peer, f"gossip.{topic}", data)

    def _mark(self, topic: str, data: bytes) -> bool:
        """Remember the message; False if it was seen before."""
        name = digest(topic.encode(), b"\0", data)[:_ID_BYTES]
        if name in self._seen:
            return False
        self._seen[name] = None
        if len(self._seen) > SEEN_IDS:
            self._seen.popitem(last=False)
        return True

    def _bucket(self, peer: PeerId) -> Bucket:
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = Bucket(MESSAGES_PER_S, MESSAGES_BURST, self._now())
            self._buckets[peer] = bucket
        return bucket


def choose_peers(
    neighbours: Collection[PeerId], sender: PeerId | None, fanout: int, rng: random.Random
) -> list[PeerId]:
    """All neighbours but the sender; a random `fanout` of them if there are more."""
    others = sorted(peer for peer in neighbours if peer != sender)
    return others if len(others) <= fanout else rng.sample(others, fanout)
