"""Which payloads a node that comes late leaves for later: those of rounds that are final, here or elsewhere.

A snapshot stands for them, so most are never fetched. To wait costs time only: the payloads of the next round to
apply are fetched at once, and the leases of others count for one lease after the start. By then the ledger is read
in full, or they lie.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from atoll.node.daemon.coordinator.finalizer import SNAPSHOT_EVERY
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.core.runtime import Machines
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.registers import Lease

LOOK_S = 0.5
"""Seconds between two looks at the rounds that wait, one look for all their payloads."""
LOOKS = 60
"""After so many looks whoever waits asks again: of what nobody wants any more, the wait ends then."""


@dataclass(kw_only=True)
class LaterPayloads:
    """Whether a payload waits; asked before each attempt to fetch it."""

    context: RunContext
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    leases: Callable[[], Mapping[PeerId, tuple[Lease, float]]]
    """The live leases of others."""
    machines: Machines
    """What the ledger proves final, who decides the next round, and the newest round in this node's Θ_final."""
    _began: float = field(init=False)
    _ends: dict[Round, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.context.now()

    def __call__(self, number: Round) -> asyncio.Event | None:
        """Return what ends the wait for the payloads of round `number`; then ask again. None: they do not wait."""
        if number not in self._ends and number not in self.waiting():
            return None
        if not self._ends:
            self.start_task(self._look(), "rounds that wait")
        return self._ends.setdefault(number, asyncio.Event())

    def waiting(self) -> range:
        """The rounds whose payloads wait."""
        final = max(self.machines.finality.last_final, self._newest_elsewhere())
        following = self.machines.round.final + 1
        # Who is this near applies round by round, and the others hold the payloads yet.
        return range(following + 1, final + 1 if final > following + SNAPSHOT_EVERY else 0)

    async def _look(self) -> None:
        looks = 0
        while self._ends:
            await asyncio.sleep(LOOK_S)
            looks, waiting = looks + 1, self.waiting()
            for number, end in [*self._ends.items()]:
                if number not in waiting:
                    self._ends.pop(number).set()
                elif looks % LOOKS == 0:
                    self._ends[number] = asyncio.Event()
                    end.set()

    def _newest_elsewhere(self) -> int:
        """The median of what others call final, soon after the start: a minority of liars moves it little."""
        if self.context.now() - self._began >= self.context.spec.pace.lease_s:
            return -1
        final = {peer: lease.final for peer, (lease, _) in self.leases().items()}
        # A newcomer knows only the owner as a voter: where none is here, all count.
        deciding = [final[peer] for peer in self.machines.finality.voters if peer in final]
        return median_low(deciding or final.values() or [-1])
