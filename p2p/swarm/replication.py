"""Replicates a run's ledger and registers: gossip carries news at once, anti-entropy brings what gossip lost."""

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.p2p.exchange.floors import RecordsGone
from atoll.p2p.exchange.orphans import OrphanExchange
from atoll.p2p.exchange.summaries import SummaryExchange
from atoll.p2p.exchange.sync import Exchange, LedgerSync
from atoll.p2p.gossip.gossip import Gossip
from atoll.p2p.ledger.insertion import Equivocation, InsertResult
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.membership.register_sync import RegisterSync
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.swarm.anti_entropy import AntiEntropy
from atoll.protocols.errors import LocalFault, PeerFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, short
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, Body, Entry, decode_entry, encode_entry
from atoll.protocols.ledger.registers import REGISTER_MAX_BYTES, Addresses, Register, Value

log = logging.getLogger(__name__)

_TICK_S = 1.0
_FORWARDED_MAX = 64
"""News of one exchange that are forwarded by gossip, at most. More, as after a partition, are exchanged with
every neighbour at once. A newcomer's first download is not forwarded."""


@dataclass(kw_only=True, eq=False)
class Replication:
    """One node's copy of the run's ledger and registers, kept equal with its neighbours' copies."""

    identity: Identity
    ledger: Ledger
    registers: RegisterStore
    calls: Calls
    neighbours: Callable[[], Collection[PeerId]]
    now: Callable[[], float]
    rng: random.Random
    on_fault: Callable[[PeerId, PeerFault], None]
    on_addresses: Callable[[PeerId, Addresses], None]
    on_change: Callable[[], None]
    """Runs after every change of ledger, registers, `refusals` and `local_fault`."""
    on_pruned: Callable[[PeerId], None] = lambda author: None
    """Receives each author whose feed had to go."""

    def __post_init__(self) -> None:
        self._failed: LocalFault | None = None
        self.records_gone = ""
        """Why the newest exchange was no whole one: the peer keeps recent records only. Empty: it was not so."""
        self._gone_at: PeerId | None = None
        """Who said so."""
        self._own_entries = 0
        """Entries that our own feed has at least, as an entry of ours proves that a peer has."""
        self.refusals: dict[PeerId, str] = {}
        """Connected peers that do not admit us, each with its reason."""
        self._admitted_by: set[PeerId] = set()
        """Connected peers whose ledger has our feed, and that do not refuse it."""
        self._gossip = Gossip(self.identity.peer_id, self.calls, self.neighbours, self.now, self.rng)
        self._gossip.subscribe("entry", self._on_entry, max_bytes=ENTRY_MAX_BYTES)
        self._gossip.subscribe("register", self._on_register, max_bytes=REGISTER_MAX_BYTES)
        sync = LedgerSync(self.ledger, self.calls, self._on_exchanged, self.on_fault, self._on_told, rng=self.rng)
        sync.on_answer = self._on_answer
        self.orphans = OrphanExchange(sync)
        self.summaries = SummaryExchange(self.ledger, self.calls)
        self.summaries.register()
        self.anti_entropy = AntiEntropy(
            ledger=sync,
            orphans=self.orphans,
            registers=RegisterSync(self.registers, self.calls, self.now, self._on_pulled, self._on_answer),
            neighbours=self.neighbours,
            is_accepted=self._is_accepted,
            rng=self.rng,
            on_fault=self.on_fault,
            on_local_fault=self._on_local_fault,
            on_gone=self._on_gone,
            on_whole=self._on_whole,
        )

    async def serve(self) -> None:
        """Exchange with neighbours and expire registers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.anti_entropy.serve())
            while True:
                await asyncio.sleep(_TICK_S)
                if self.registers.drop_expired(self.now()):
                    self.on_change()

    def publish(self, body: Body) -> Entry:
        """Append to our feed, durably, and send the entry to everyone. Raises as `Ledger.append`."""
        entry = self.ledger.append(self.identity, body)
        self._gossip.publish("entry", encode_entry(entry), entry.author)
        self.on_change()
        return entry

    @property
    def refusal(self) -> str:
        """Why what this node writes is stored by no connected peer; empty if one stores it, or none refuses it.

        One peer that admits this node is enough: a single liar stops nobody.
        """
        return "" if self._admitted_by else next(iter(self.refusals.values()), "")

    @property
    def local_fault(self) -> LocalFault | None:
        """Newest failure to store what peers sent; None when the last attempt succeeded."""
        return self._failed or self.ledger.fault

    @property
    def lacks_own_entries(self) -> bool:
        """Whether a peer proved that our own feed is longer than here: what we write would be a second history."""
        return self.ledger.vector().get(self.identity.peer_id, 0) < self._own_entries

    def pass_on(self, author: PeerId) -> None:
        """Send what this author wrote to everyone: while it had shown no work it may not have been passed on."""
        for entry in self.ledger.entries(author=author):
            self._gossip.publish("entry", encode_entry(entry), author)

    def publish_register(self, value: Value, ttl_s: float) -> None:
        """Publish our register of this type; it expires after `ttl_s` seconds unless it is published again."""
        register = self.registers.publish(value, ttl_s, self.now())
        self._gossip.publish("register", register, self.identity.peer_id)
        self.on_change()

    def forget_chain(self) -> None:
        """Ask for nothing more that the chain which the node leaves named."""
        self.records_gone = ""
        self.orphans.clear()

    def forget(self, peer: PeerId) -> None:
        """Drop what belongs to the connection with `peer`, which is lost."""
        self.refusals.pop(peer, None)
        self._admitted_by.discard(peer)
        self._gossip.forget(peer)

    def _on_entry(self, sender: PeerId, data: bytes) -> PeerId | None:
        entry = decode_entry(data, self.ledger.run)
        try:
            done = self.ledger.insert_all([entry], sender)
        except LocalFault as fault:
            self._on_local_fault(fault)
            return None
        for fork in done.forks:
            self._on_fork(sender, fork)
        for author in done.pruned:
            self.on_pruned(author)
        if done.gap:
            self.anti_entropy.ask(sender)
        if done.fresh:
            self._failed = None
            self.on_change()
        return entry.author if (done.fresh or done.forks) and not self._is_held_back(entry.author) else None

    def _is_held_back(self, author: PeerId) -> bool:
        """Whether the entries of this author are not passed on: it showed no work, and many like it wait."""
        newcomers = self.ledger.newcomers
        return newcomers is not None and newcomers.is_pressed and newcomers.is_new(author)

    def _on_fork(self, sender: PeerId, fork: Equivocation) -> None:
        self.on_fault(fork.author, fork)
        # The proof travels by exchange; the sender may not have it yet.
        self.anti_entropy.ask(sender)

    def _on_exchanged(self, sender: PeerId, done: InsertResult) -> None:
        for author in done.pruned:
            self.on_pruned(author)
        if not done.fresh:
            return
        self._failed = None
        if len(done.fresh) <= _FORWARDED_MAX:
            for entry in done.fresh:
                if not self._is_held_back(entry.author):
                    self._gossip.publish("entry", encode_entry(entry), entry.author)
        elif self.anti_entropy.synced.is_set():
            for peer in self.neighbours():
                if peer != sender:
                    self.anti_entropy.ask(peer)
        self.on_change()

    def _on_gone(self, error: RecordsGone) -> None:
        self._own_entries = max(self._own_entries, error.own_entries)
        if not self.records_gone:
            log.warning("%s", error)
        self.records_gone, self._gone_at = str(error), error.peer
        self.on_change()

    def _on_whole(self, peer: PeerId) -> None:
        # A newcomer that has as little as this node shows nothing.
        if self.records_gone and (peer == self._gone_at or self._is_accepted(peer)):
            self.records_gone = ""
            self.on_change()

    def _on_answer(self, peer: PeerId) -> None:
        self.anti_entropy.heard(peer)

    def _is_accepted(self, peer: PeerId) -> bool:
        return (newcomers := self.ledger.newcomers) is not None and newcomers.is_accepted(peer)

    def _on_register(self, sender: PeerId, data: bytes) -> PeerId | None:
        register = self.registers.merge(data, self.now())
        if register is None:
            return None
        self._on_register_news([register])
        return None if self._is_of_the_crowd(register.author) else register.author

    def _is_of_the_crowd(self, author: PeerId) -> bool:
        return self.registers.is_pressed and self.registers.is_stranger(author)

    def _on_pulled(self, registers: list[tuple[Register, bytes]]) -> None:
        if len(registers) <= _FORWARDED_MAX:
            for register, data in registers:
                if not self._is_of_the_crowd(register.author):
                    self._gossip.publish("register", data, register.author)
        self._on_register_news([register for register, _ in registers])

    def _on_register_news(self, registers: list[Register]) -> None:
        for register in registers:
            if isinstance(register.value, Addresses):
                self.on_addresses(register.author, register.value)
        self.on_change()

    def _on_told(self, peer: PeerId, message: Exchange) -> None:
        reason = message.refusal
        # One that has not been offered our feed yet refuses nothing, and admits nothing.
        is_held = not reason and message.wanted.get(self.identity.peer_id, 0) > 0
        (self._admitted_by.add if is_held else self._admitted_by.discard)(peer)
        if not reason:
            if self.refusals.pop(peer, None) is not None:
                self.on_change()
            return
        if reason not in self.refusals.values():
            log.warning("peer %s stores nothing of ours: %s", short(peer), reason)
        self.refusals[peer] = reason
        self.on_change()

    def _on_local_fault(self, fault: LocalFault) -> None:
        if self._failed is None:
            log.warning("what peers sent was not stored: %s", fault.line())
        self._failed = fault
        self.on_change()
