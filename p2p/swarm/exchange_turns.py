"""Whose turn it is to exchange: members first, and silent peers hold only some of the places. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Collection

from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import PeerId

AT_ONCE = 4
"""Most exchanges at once."""
FOR_ALL = 2
"""Places for peers that are not accepted, or whose newest exchange failed; the others are kept for members."""
WAIT_S = 3.0
"""A peer waits for so many seconds while an exchange with a member that answers goes on: that one may bring what
this one would, and after a partition all neighbours bring the same thousands of entries."""
RETRIES = 3
"""Number of quick retries with a peer whose exchange failed; then it waits for its random turn."""
_KEPT_S = 300.0
"""How long failures of a peer that left count, in seconds: to dial anew must not make it a new peer."""
_KEPT = 1024
"""Most peers whose failures count."""


class ExchangeTurns:
    """The queue of peers, those whose exchange goes on, and how often each failed."""

    def __init__(self, is_accepted: Callable[[PeerId], bool]) -> None:
        self._is_accepted = is_accepted
        self._queue: dict[PeerId, float | None] = {}
        """Since when each waits; None: nobody looked yet."""
        self._busy: set[PeerId] = set()
        self._failed: OrderedDict[PeerId, tuple[int, float]] = OrderedDict()
        """Failed exchanges in a row, and when the peer was last a neighbour or failed."""

    def ask(self, peer: PeerId) -> None:
        """Queue `peer`; nothing if it is queued."""
        self._queue.setdefault(peer)

    def failures(self, peer: PeerId) -> int:
        """Number of failed exchanges in a row with `peer`."""
        return self._failed.get(peer, (0, 0.0))[0]

    def take(self, neighbours: Collection[PeerId], now: float) -> PeerId | None:
        """The next peer, whose exchange begins; None while nobody may. Who is no neighbour leaves the queue."""
        asked = self._queue.items()
        self._queue = {peer: now if since is None else since for peer, since in asked if peer in neighbours}
        # Who knows no member, as a newcomer, takes any peer for one until it fails.
        knows_nobody = not any(map(self._is_accepted, neighbours))

        def is_sound(peer: PeerId) -> bool:
            return self.failures(peer) == 0 and (knows_nobody or self._is_accepted(peer))

        has_room = sum(not is_sound(peer) for peer in self._busy) < FOR_ALL
        ready = [peer for peer in self._queue if peer not in self._busy and (has_room or is_sound(peer))]
        if not knows_nobody and any(map(is_sound, self._busy)):
            ready = [peer for peer in ready if self._has_waited(peer, now)]
        if not ready or len(self._busy) >= AT_ONCE:
            return None
        # A member that failed too often has its turns among the others, or it would take theirs.
        failed = {peer: self.failures(peer) for peer in ready}
        chosen = min(ready, key=lambda peer: (not self._is_accepted(peer) or failed[peer] > RETRIES, failed[peer]))
        del self._queue[chosen]
        self._busy.add(chosen)
        return chosen

    def _has_waited(self, peer: PeerId, now: float) -> bool:
        since = self._queue[peer]
        return since is not None and now - since >= WAIT_S

    def is_waited_for(self, peer: PeerId, neighbours: Collection[PeerId]) -> bool:
        """Whether a neighbour that failed no more often waits for the place of `peer`, which is no member."""
        waiting = (other for other in self._queue if other in neighbours and other not in self._busy)
        most = self.failures(peer)
        return not self._is_accepted(peer) and any(self.failures(other) <= most for other in waiting)

    def end(self, peer: PeerId) -> None:
        """The exchange with `peer` is over."""
        self._busy.discard(peer)

    def note_whole(self, peer: PeerId) -> None:
        """It was a whole one."""
        self._failed.pop(peer, None)

    def note_failed(self, peer: PeerId, now: float, times: int = 1) -> None:
        """It failed, which counts `times`."""
        put_newest(self._failed, peer, (self.failures(peer) + times, now), _KEPT)

    def to_retry(self, neighbours: Collection[PeerId], now: float) -> list[PeerId]:
        """Neighbours that failed, but not too often. Failures of those that left long ago are forgotten."""
        for peer, (times, seen_s) in list(self._failed.items()):
            if peer in neighbours:
                self._failed[peer] = times, now
            elif now - seen_s > _KEPT_S:
                del self._failed[peer]
        return [peer for peer in neighbours if 0 < self.failures(peer) <= RETRIES]
