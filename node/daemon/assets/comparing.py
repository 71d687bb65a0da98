"""When this node may decide: its ledger is as complete as it can be after a start, and after its own lease ended.

From the end of its lease on the others may go on without it. What it decided before it heard of that would undo
their rounds, where it decides alone. A disk that refuses, a worker that hangs and a daemon that stood
still end it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from atoll.node.daemon.core.interfaces import SwarmListener
from atoll.p2p.swarm.swarm import Swarm

ALONE_S = 8.0
"""A node that has worked in this run goes on alone if nobody answers for so long."""
FRESH_S = 10.0
"""A node without a lease decides for so long after a comparison, unless its disk refuses an entry again."""
POLL_S = 0.25


@dataclass(slots=True)
class Silence:
    """For how long this node had no lease of its own. Times are seconds of one monotonic clock."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ledgers must be compared."""
    passed_s: float | None = None
    """For how long before the newest comparison no lease was renewed; None: it was not because of that."""
    _renewed_at: float = math.inf
    _ends_at: float = math.inf
    _silent_s: float = 0.0  # the longest time from a lease that ended to the next, until ledgers are compared
    _fresh_until: float = -math.inf
    _is_asked: bool = False

    def renew(self, now: float, ttl_s: float) -> None:
        """The own lease was published. That it had ended before is not forgotten."""
        self._look(now)
        self._renewed_at, self._ends_at = now, now + ttl_s

    def refuse(self) -> None:
        """The disk refused an entry: what was compared before may be old when it takes one."""
        self._fresh_until = -math.inf

    def must_compare(self, now: float) -> bool:
        """Whether ledgers must be compared before this node decides. If so, it is asked for."""
        self._look(now)
        if not self._silent_s or now < self._fresh_until:
            return False
        if not self._is_asked:
            self._is_asked = True
            self.asked.set()
        return True

    def end(self, now: float) -> None:
        """Ledgers were compared, or nobody answered."""
        if self._silent_s:
            self._look(now)
        self.passed_s = self._silent_s or None
        self._silent_s, self._fresh_until, self._is_asked = 0.0, now + FRESH_S, False

    def forget(self) -> None:
        """Nobody compares any more: who decides next asks again."""
        self.asked.clear()
        self._is_asked = False

    def _look(self, now: float) -> None:
        # Not up to the comparison: who was silent for a moment, and votes minutes later, was not away.
        if now >= self._ends_at:
            self._silent_s = max(self._silent_s, now - self._renewed_at)


async def compare_when_asked(silence: Silence, swarm: Swarm, tell: Callable[[], Awaitable[None]]) -> None:
    """Compare ledgers each time that it is asked for, and tell the driver; until cancelled."""
    while True:
        await silence.asked.wait()
        silence.asked.clear()
        await _compare_again(swarm)
        await tell()


async def _compare_again(swarm: Swarm) -> None:
    """Return after a whole exchange with a member that ended since, or after ALONE_S."""
    repair, began_s = swarm.replication.anti_entropy, asyncio.get_running_loop().time()
    swarm.sync_soon()
    while asyncio.get_running_loop().time() < began_s + ALONE_S:
        if any(map(swarm.newcomers.is_accepted, repair.synced_peers(began_s))):
            return
        await asyncio.sleep(POLL_S)


async def wait_synced(
    swarm: Swarm, listener: SwarmListener, bring_summary: Callable[[], Awaitable[None]], *, worked: bool
) -> None:
    """Wait for a whole exchange; a node that worked here waits for ALONE_S, if its own feed is complete."""
    replication, is_told = swarm.replication, False
    while True:
        try:
            async with asyncio.timeout(ALONE_S):
                await swarm.wait_synced()
        except TimeoutError:
            if replication.records_gone:
                await bring_summary()
            if not worked or replication.lacks_own_entries:
                if replication.records_gone:
                    listener.on_behind(replication.records_gone)
                    is_told = True
                continue
            listener.on_alone(ALONE_S)
        if is_told:
            listener.on_behind("")
        return
