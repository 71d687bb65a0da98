"""How many asks of one peer are answered: a token bucket for each peer, the oldest peers forgotten."""

from collections import OrderedDict
from collections.abc import Callable

from atoll.protocols.ids import PeerId

_PEERS = 4096


class Allowance:
    """So many a minute for each peer; a minute's worth may come at once."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        self._per_minute, self._now = per_minute, now
        self._left: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def take(self, peer: PeerId) -> bool:
        """Whether one more ask of `peer` is answered."""
        now = self._now()
        left, at = self._left.pop(peer, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - at) * self._per_minute / 60.0)
        self._left[peer] = (left - 1.0 if left >= 1.0 else left, now)
        if len(self._left) > _PEERS:
            self._left.popitem(last=False)
        return left >= 1.0
