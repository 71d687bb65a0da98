"""How many new authors a neighbour and its address block may bring in a minute."""

from collections.abc import Callable

from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.protocols.ids import PeerId


class BringerRates:
    """Token buckets of neighbours and of blocks. Who brings only itself has another one of its block."""

    def __init__(self, per_minute: int, now: Callable[[], float], block_of: Callable[[PeerId], str]) -> None:
        self._block_of = block_of
        self._by_neighbour = PeerRateLimit(per_minute, now, per_minute)
        self._by_block = PeerRateLimit(2 * per_minute, now, 2 * per_minute)

    def take(self, author: PeerId, sender: PeerId) -> str:
        """Count a new author; say who brought too many, or nothing."""
        # A neighbour that brought enough takes nothing of what others of its block may bring.
        if sender != author and not self._by_neighbour.take(sender):
            return "one neighbour"
        # Who brings only itself does not stand in line with those whom a neighbour of its block brings.
        block = self._block_of(sender)
        return "" if self._by_block.take(f"{block} alone" if sender == author else block) else "its addresses"

    def is_spent(self, sender: PeerId) -> bool:
        """Whether a neighbour brings nobody else for now."""
        return not self._by_neighbour.has(sender)
