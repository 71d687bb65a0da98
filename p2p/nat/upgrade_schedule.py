"""When to try to better a relayed connection, and when the circuits that a direct one replaced must end."""

import random

from atoll.protocols.ids import PeerId

FIRST_S = 3.0
MAX_S = 600.0
GRACE_S = 20.0
"""After an upgrade, relayed streams may end by themselves for so long."""


class Upgrades:
    """One schedule for each held peer: ever more rarely, with jitter."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._due: dict[PeerId, tuple[float, float]] = {}
        """Peer -> (when, the pause before it)."""

    def held(self, peer: PeerId, now: float) -> None:
        """The first circuit to `peer` is held."""
        self._due[peer] = (now + self._rng.uniform(0.8, 1.2) * FIRST_S, FIRST_S)

    def replaced(self, peer: PeerId, now: float) -> None:
        """A direct connection exists beside the circuits."""
        self._due[peer] = (now + GRACE_S, FIRST_S)

    def forget(self, peer: PeerId) -> None:
        """Nothing is held any more."""
        self._due.pop(peer, None)

    def is_due(self, peer: PeerId, now: float) -> bool:
        """Whether something is to be done now."""
        return now >= self._due.get(peer, (now, FIRST_S))[0]

    def postpone(self, peer: PeerId, now: float) -> None:
        """A try begins: the next one is later, and later still after that."""
        pause_s = min(MAX_S, 3.0 * self._due.get(peer, (now, FIRST_S))[1])
        self._due[peer] = (now + pause_s * self._rng.uniform(0.8, 1.2), pause_s)
