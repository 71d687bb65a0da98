"""How many asks of one peer are answered: a token bucket for each peer, the oldest peers forgotten."""

from collections import OrderedDict
from collections.abc import Callable

from atoll.p2p.limits.token_bucket import Bucket
from atoll.protocols.ids import PeerId

_PEERS = 4096


class PeerRateLimit:
    """So many a minute for each peer; a minute's worth may come at once."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        self._per_minute, self._now = per_minute, now
        self._buckets: OrderedDict[PeerId, Bucket] = OrderedDict()

    def take(self, peer: PeerId) -> bool:
        """Whether one more ask of `peer` is answered."""
        now = self._now()
        bucket = self._buckets.pop(peer, None) or Bucket(self._per_minute / 60.0, self._per_minute, now)
        self._buckets[peer] = bucket
        if len(self._buckets) > _PEERS:
            self._buckets.popitem(last=False)
        return bucket.take(1, now)
