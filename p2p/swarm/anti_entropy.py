"""Anti-entropy: peers exchange what gossip lost, after each new connection and then at random intervals."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from atoll.p2p.exchange.floors import RecordsGone
from atoll.p2p.exchange.orphans import OrphanExchange
from atoll.p2p.exchange.sync import LedgerSync
from atoll.p2p.membership.register_sync import RegisterSync
from atoll.p2p.swarm.exchange_turns import RETRIES, ExchangeTurns
from atoll.p2p.system.waiting import AnswerDeadline, Notifier
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Mean interval between two exchanges with a random member, and with another random neighbour, in seconds."""
WAITED_EVERY_S = 2.0
"""The same while finality waits for entries that only a question by name brings."""
EXCHANGE_S = 60.0
"""Deadline of one exchange, in seconds, while answers come."""
ANSWER_S = 10.0
"""Deadline of one answer, in seconds: the largest request and answer of honest peers take that on a line of
1.3 Mbit/s. It doubles with each failure in a row, for slower lines."""
SLOW_S = 10.0
"""An exchange with a peer that is no member may be slow for so many seconds while others wait for its place: as
long as a silent one has it."""
LEAST_PACE = 16 * 1024
"""Bytes of records in each second, in both ways, of one that is not slow: a tenth of a line of 1.3 Mbit/s."""
_PAUSE_S = 1.0


class PacedExchange:
    """What goes over to or from one peer, its deadline, and the bytes of records that moved since it began."""

    def __init__(self, deadline: AnswerDeadline, now_s: float, failures: int) -> None:
        """`failures`: how often this failed with the peer. For each it may be slow for twice as long."""
        self.deadline, self.began_s, self.moved_bytes, self.slow_s = deadline, now_s, 0, SLOW_S * 2.0**failures

    def heard(self, moved_bytes: int) -> None:
        """An answer came: it may go on. `moved_bytes`: of records, in both ways."""
        self.moved_bytes += moved_bytes
        self.deadline.heard()

    def is_slow(self, now_s: float) -> bool:
        """Whether it had its time and moves less than LEAST_PACE."""
        took_s = now_s - self.began_s
        return took_s >= self.slow_s and self.moved_bytes < LEAST_PACE * took_s


def end_slowest(running: Iterable[PacedExchange], now_s: float) -> None:
    """End one of those that are slow, whose places others wait for."""
    slow = [one for one in running if one.is_slow(now_s)]
    if slow:
        min(slow, key=lambda one: one.moved_bytes).deadline.end()


@dataclass(kw_only=True, eq=False)
class AntiEntropy:
    """Exchanges registers and ledger entries with queued peers, at most once at a time with each."""

    ledger: LedgerSync
    orphans: OrphanExchange
    registers: RegisterSync
    neighbours: Callable[[], Collection[PeerId]]
    is_accepted: Callable[[PeerId], bool]
    """Whether a final set, an epoch or the RunSpec names a peer."""
    rng: random.Random
    on_fault: Callable[[PeerId, PeerFault], None]
    on_local_fault: Callable[[LocalFault], None]
    on_gone: Callable[[RecordsGone], None] = lambda error: None
    """Receives that a peer lacks records which this node needs first."""
    on_whole: Callable[[PeerId], None] = lambda peer: None
    """Receives each peer with which there was a whole exchange."""
    on_exchange: Callable[[], None] = lambda: None
    """Called when an exchange is over, whole or not: `is_caught_up` may have changed."""

    def __post_init__(self) -> None:
        self.first: frozenset[PeerId] = frozenset()
        """Peers that are taken for accepted ones, as long as nothing here names any."""
        self._turns = ExchangeTurns(lambda peer: self.is_accepted(peer) or peer in self.first)
        self._running: dict[PeerId, PacedExchange] = {}
        self._exchanged: dict[PeerId, float] = {}
        """When the newest whole exchange with each neighbour ended, in seconds of the loop."""
        self._wake = Notifier()
        self.synced = asyncio.Event()
        """Set after the first whole exchange with any peer."""

    async def serve(self) -> None:
        """Exchange with queued peers until cancelled."""
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            group.create_task(self._remind())
            while True:
                await self._wake.wait()
                while (peer := self._turns.take(self.neighbours(), now())) is not None:
                    group.create_task(self._exchange(peer))

    def ask(self, peer: PeerId) -> None:
        """Queue an exchange with `peer`."""
        self._turns.ask(peer)
        self._wake.notify()

    def heard(self, peer: PeerId, moved_bytes: int) -> None:
        """An answer of `peer` came: an exchange with it may go on. `moved_bytes`: of records, in both ways."""
        if (running := self._running.get(peer)) is not None:
            running.heard(moved_bytes)

    def is_caught_up(self) -> bool:
        """Whether there was a whole exchange with every neighbour, and with at least one.

        Neighbours that do not answer, or break the protocol, do not count.
        """
        neighbours = set(self.neighbours())
        asked = {peer for peer in neighbours if self._turns.failures(peer) <= RETRIES}
        return bool(neighbours & self._exchanged.keys()) and asked <= self._exchanged.keys()

    def synced_peers(self, since_s: float = 0.0) -> frozenset[PeerId]:
        """Neighbours with which a whole exchange ended since then, in seconds of the loop."""
        return frozenset(peer for peer, ended_s in self._exchanged.items() if ended_s >= since_s)

    async def tell(self, peer: PeerId) -> bool:
        """Exchange registers and ledgers with one peer now. Returns whether both went over as wholes."""
        # First the ledger: what of the registers comes after it is as new as what the ledger says.
        with contextlib.suppress(Unreachable, PeerFault, LocalFault):
            await self.ledger.exchange(peer)
            await self.registers.pull(peer)
            return True
        return False

    async def _exchange(self, peer: PeerId) -> None:
        now = asyncio.get_running_loop().time
        failures = min(self._turns.failures(peer), RETRIES)
        deadline = AnswerDeadline(ANSWER_S * 2.0**failures, EXCHANGE_S)
        self._running[peer] = PacedExchange(deadline, now(), failures)
        try:
            async with deadline:
                await self.registers.pull(peer)
                await self.ledger.exchange(peer)
                await self.orphans.fetch(peer)
            self._turns.note_whole(peer)
            self.synced.set()
            self._exchanged[peer] = now()
            self.on_whole(peer)
        except RecordsGone as error:
            self.on_gone(error)
            self._turns.note_failed(peer, now(), RETRIES + 1)  # it has not got them in a second either
        except (Unreachable, TimeoutError) as error:
            log.debug("exchange with %s failed: %s", short(peer), error)
            self._turns.note_failed(peer, now())
        except PeerFault as fault:
            self.on_fault(peer, fault)
            # No quick retry, and `is_caught_up` does not wait for it.
            self._turns.note_failed(peer, now(), RETRIES + 1)
        except LocalFault as fault:
            self.on_local_fault(fault)
            await asyncio.sleep(_PAUSE_S)
        finally:
            del self._running[peer]
            self._turns.end(peer)
            self.on_exchange()
            self._wake.notify()

    def _end_slowest(self, now_s: float) -> None:
        """End one slow exchange whose place another peer waits for: its peer is asked again after that one."""
        here = self.neighbours()
        running = self._running.items()
        end_slowest((one for peer, one in running if self._turns.is_waited_for(peer, here)), now_s)

    async def _remind(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.time()
        while True:
            await asyncio.sleep(_PAUSE_S * self.rng.uniform(0.5, 1.5))
            neighbours = sorted(self.neighbours())
            self._wake.notify()  # somebody may have waited long enough
            self._end_slowest(loop.time())
            # A peer that comes back may have more by then.
            self._exchanged = {peer: at for peer, at in self._exchanged.items() if peer in neighbours}
            for peer in self._turns.to_retry(neighbours, loop.time()):
                self.ask(peer)
            if neighbours and loop.time() >= turn:
                every_s = WAITED_EVERY_S if self.orphans.wanted or self.orphans.covered else EVERY_S
                turn = loop.time() + every_s * self.rng.uniform(0.5, 1.5)
                # One of each: strangers may be many, and a member's turn would come seldom.
                for is_member in (True, False):
                    if group := [peer for peer in neighbours if self.is_accepted(peer) is is_member]:
                        self.ask(self.rng.choice(group))
