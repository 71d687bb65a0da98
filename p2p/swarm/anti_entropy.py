"""Anti-entropy: peers exchange what gossip lost, after each new connection and then at random intervals."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.p2p.exchange.floors import RecordsGone
from atoll.p2p.exchange.orphans import OrphanExchange
from atoll.p2p.exchange.sync import LedgerSync
from atoll.p2p.membership.register_sync import RegisterSync
from atoll.p2p.system.waiting import Notifier
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Mean interval between two exchanges with a random neighbour, in seconds."""
WAITED_EVERY_S = 2.0
"""The same while finality waits for entries that only a question by name brings."""
EXCHANGE_S = 60.0
"""Deadline of one exchange, in seconds."""
_AT_ONCE = 4
_PAUSE_S = 1.0
_RETRIES = 3
"""Number of quick retries with a peer whose exchange failed; then it waits for its random turn."""


@dataclass(kw_only=True, eq=False)
class AntiEntropy:
    """Exchanges registers and ledger entries with queued peers, at most once at a time with each."""

    ledger: LedgerSync
    orphans: OrphanExchange
    registers: RegisterSync
    neighbours: Callable[[], Collection[PeerId]]
    rng: random.Random
    on_fault: Callable[[PeerId, PeerFault], None]
    on_local_fault: Callable[[LocalFault], None]
    on_gone: Callable[[RecordsGone], None] = lambda error: None
    """Receives that a peer lacks records which this node needs first."""
    on_exchange: Callable[[], None] = lambda: None
    """Called when an exchange is over, whole or not: `is_caught_up` may have changed."""

    def __post_init__(self) -> None:
        self._queue: dict[PeerId, None] = {}
        self._failed: dict[PeerId, int] = {}
        """Number of failed exchanges in a row, by peer."""
        self._busy: set[PeerId] = set()
        self._exchanged: set[PeerId] = set()
        self._wake = Notifier()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.synced = asyncio.Event()
        """Set after the first whole exchange with any peer."""

    async def serve(self) -> None:
        """Exchange with queued peers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._remind())
            while True:
                await self._wake.wait()
                for peer in [peer for peer in self._queue if peer not in self._busy]:
                    await self._slots.acquire()
                    self._queue.pop(peer, None)
                    self._busy.add(peer)
                    group.create_task(self._exchange(peer))

    def ask(self, peer: PeerId) -> None:
        """Queue an exchange with `peer`."""
        self._queue[peer] = None
        self._wake.notify()

    def is_caught_up(self) -> bool:
        """Whether there was a whole exchange with every neighbour, and with at least one.

        Neighbours that do not answer, or break the protocol, do not count.
        """
        neighbours = set(self.neighbours())
        asked = {peer for peer in neighbours if self._failed.get(peer, 0) <= _RETRIES}
        return bool(neighbours & self._exchanged) and asked <= self._exchanged

    def synced_peers(self) -> frozenset[PeerId]:
        """Neighbours with which there was a whole exchange."""
        return frozenset(self._exchanged)

    async def tell(self, peer: PeerId) -> bool:
        """Exchange registers and ledgers with one peer now. Returns whether both went over as wholes."""
        # First the ledger: what of the registers comes after it is as new as what the ledger says.
        with contextlib.suppress(Unreachable, PeerFault, LocalFault):
            await self.ledger.exchange(peer)
            await self.registers.pull(peer)
            return True
        return False

    async def _exchange(self, peer: PeerId) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await self.registers.pull(peer)
                await self.ledger.exchange(peer)
                await self.orphans.fetch(peer)
            self._failed.pop(peer, None)
            self.synced.set()
            self._exchanged.add(peer)
        except RecordsGone as error:
            self.on_gone(error)
            self._failed[peer] = _RETRIES + 1  # it has not got them in a second either
        except (Unreachable, TimeoutError) as error:
            log.debug("exchange with %s failed: %s", short(peer), error)
            self._failed[peer] = self._failed.get(peer, 0) + 1
        except PeerFault as fault:
            self.on_fault(peer, fault)
            self._failed[peer] = _RETRIES + 1  # no quick retry, and `is_caught_up` does not wait for it
        except LocalFault as fault:
            self.on_local_fault(fault)
            await asyncio.sleep(_PAUSE_S)
        finally:
            self._slots.release()
            self._busy.discard(peer)
            self.on_exchange()
            if peer in self._queue:
                self._wake.notify()

    async def _remind(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.time()
        while True:
            await asyncio.sleep(_PAUSE_S * self.rng.uniform(0.5, 1.5))
            neighbours = sorted(self.neighbours())
            self._failed = {peer: tries for peer, tries in self._failed.items() if peer in neighbours}
            self._exchanged &= {*neighbours}  # a peer that comes back may have more by then
            for peer in [peer for peer, tries in self._failed.items() if tries <= _RETRIES]:
                self.ask(peer)
            if neighbours and loop.time() >= turn:
                every_s = WAITED_EVERY_S if self.orphans.wanted or self.orphans.covered else EVERY_S
                turn = loop.time() + every_s * self.rng.uniform(0.5, 1.5)
                self.ask(self.rng.choice(neighbours))
