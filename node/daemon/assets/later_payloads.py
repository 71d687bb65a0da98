"""Which payloads a node that comes late leaves for later: those of rounds that are final, here or elsewhere.

A snapshot stands for them, so most are never fetched. To wait costs time only: the payloads of the next round to
apply are fetched at once, and the leases of others count for one lease after the start. By then the ledger is read
in full, or they lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.node.daemon.coordinator.interfaces import RunContext
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease


@dataclass(kw_only=True)
class LaterPayloads:
    """Whether a payload waits; asked before each attempt to fetch it."""

    context: RunContext
    leases: Callable[[], Mapping[PeerId, tuple[Lease, float]]]
    """The live leases of others."""
    newest: Callable[[], int]
    """The newest round that the ledger proves final."""
    applied: Callable[[], int]
    """The newest round in this node's Θ_final."""
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.context.now()

    def __call__(self, number: int) -> bool:
        """Whether the payloads of round `number` wait."""
        final, following = max(self.newest(), self._newest_elsewhere()), self.applied() + 1
        # Who is this near applies round by round, and the others hold the payloads yet.
        return following < number <= final and final > following + SNAPSHOT_EVERY

    def _newest_elsewhere(self) -> int:
        """The median of what others call final, soon after the start: a minority of liars moves it little."""
        if self.context.now() - self._began >= self.context.spec.pace.lease_s:
            return -1
        return median_low([lease.final for lease, _ in self.leases().values()] or [-1])
