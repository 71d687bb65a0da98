"""Which downloads of offered snapshots go on side by side, and which one gives way. Pure.

The first offer is tried alone. While nothing of it comes, others begin beside it, so that a peer that answers
nothing costs the node its place among AT_ONCE for a moment. The fastest one goes on and the others give way. One
that is fast enough stays alone: two would share the same link. A slow one is compared with others now and then,
for a liar may send a byte at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.node.daemon.snapshots.offers import Trust

AT_ONCE = 4
"""Most downloads side by side."""
STAGGER_S = 1.0
"""Seconds from one beginning to the next while nothing comes."""
FIRST_S = 4.0
"""Seconds that a download has for its first bytes while others wait; twice as many after each failure."""
LONGEST = 6
"""Most doublings of it."""
SOON_S = 120.0
"""The fastest download stays alone for so long, if it would be over by then at its pace."""
ALONE_S = 30.0
"""Else others are compared with it for FIRST_S, then it is alone for so long, in turn."""


@dataclass(frozen=True, slots=True)
class Running:
    """One download that goes on."""

    trust: Trust
    age_s: float
    moved_bytes: int
    """What came since it began."""
    left_bytes: int
    """What is missing at most."""
    failures: int

    @property
    def rate_bytes_s(self) -> float:
        """Its pace since it began."""
        return self.moved_bytes / max(self.age_s, 1e-3)

    @property
    def is_alone(self) -> bool:
        """Whether nothing begins beside it, if it is the fastest."""
        # The age counts too: a liar may send all but the last bytes at once, and then next to nothing.
        if self.age_s <= SOON_S and self.left_bytes <= SOON_S * self.rate_bytes_s:
            return True
        return self.age_s % (FIRST_S + ALONE_S) >= FIRST_S


def fastest(running: Sequence[Running]) -> Running | None:
    """Return the one that receives most a second; None if nothing comes. Θ₀ never holds back a newer state."""
    moving = [one for one in running if one.moved_bytes and one.trust != Trust.START]
    return max(moving, key=lambda one: one.rate_bytes_s, default=None)


def gives_way(one: Running, running: Sequence[Running], *, is_awaited: bool) -> bool:
    """Return whether this download ends now. `is_awaited`: another offer waits for its place."""
    best = fastest(running)
    if one is best or one.trust == Trust.START or not (is_awaited or best):
        return False
    return one.age_s >= FIRST_S * 2.0 ** min(one.failures, LONGEST)


def may_begin(trust: Trust, running: Sequence[Running]) -> bool:
    """Return whether one more download of an offer may begin now."""
    if trust == Trust.START:
        return not running
    others = [one for one in running if one.trust != Trust.START]
    waits_s = FIRST_S if trust == Trust.UNKNOWN else STAGGER_S
    if len(others) >= AT_ONCE or any(one.age_s < waits_s for one in others):
        return False
    # Identities without work cost nothing, so there is no end of them: one at a time.
    if trust == Trust.UNKNOWN and any(one.trust == Trust.UNKNOWN for one in others):
        return False
    best = fastest(running)
    return best is None or not best.is_alone
