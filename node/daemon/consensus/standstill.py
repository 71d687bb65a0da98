"""What a node remembers of a round that is not decided though a quorum is here (presence.py says what follows)."""

import msgspec

from atoll.protocols.ids import PeerId


class Standstill(msgspec.Struct, frozen=True):
    """Ballots of the round that decided nothing, and the newest try to go on without those that missed some."""

    parts: tuple[frozenset[PeerId], ...] = ()
    """Who took part in each of the newest ballots, or was away, the newest first."""
    tries: int = 0
    """How often it was tried."""
    since: float = 0.0
    """When the newest try began."""
    blamed: frozenset[PeerId] = frozenset()
    """Who is left out in it."""
