"""Everything that a member of a run shares with the others, over one host: ledger, registers, blobs, peers.

The daemon serves a Swarm, publishes entries and leases through it, and re-reads `ledger` and `registers` when
its bell rings. Runs unchanged on the simulated network and on virtual time.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.p2p.blobs.blob_exchange import Blobs
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.discovery import TARGET, Discovery
from atoll.p2p.gossip.flooding import Gossip
from atoll.p2p.host.interface import (
    Connection,
    Host,
    HostEvent,
    HostRestarted,
    PeerAddress,
    PeerConnected,
    PeerDisconnected,
)
from atoll.p2p.host.interface import Path as Route
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.store import LEDGER_FILE, Equivocation, Ledger, Quota
from atoll.p2p.ledger.sync import LedgerSync
from atoll.p2p.membership.liveness import LivenessMonitor
from atoll.p2p.membership.register_store import RegisterStore, next_epoch
from atoll.p2p.membership.register_sync import RegisterSync
from atoll.p2p.membership.reputation import ReputationTable
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.swarm.anti_entropy import AntiEntropy
from atoll.p2p.system.notifier import Notifier
from atoll.protocols.errors import LocalFault, PeerFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, RunId, short
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, Body, Entry, decode_entry, encode_entry
from atoll.protocols.ledger.registers import REGISTER_MAX_BYTES, Addresses, Value

log = logging.getLogger(__name__)

ADDRESSES_TTL_S = 600.0
_ADDRESSES_EVERY_S = 150.0
_TICK_S = 1.0
_POLL_S = 10.0
_LOOK_S = 2.0
"""Connections and addresses are compared so often: those who look at the status, and peers who want us, wait."""
_PASSED_ON = 64
"""So many entries or registers of one exchange are passed on at once; a newcomer's first download is not."""
_DHT_FIND_S = 60.0
_DHT_ANNOUNCE_S = 200.0
_DHT_DEADLINE_S = 60.0
_CONNECT_S = 15.0


class SwarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Local choices; peers need not agree on them."""

    agent: str = "atoll"
    quota: Quota = Quota()
    target: int = TARGET
    """Connections that we open by ourselves."""
    run_file: bytes = b""
    """Signed RunSpec to announce in the DHT's list of runs; empty: not announced."""


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer for `atoll peers`."""

    peer: PeerId
    connected: bool
    path: str
    """direct, punched, relayed; empty when not connected."""
    maddr: str
    """Of the live connection, else of the best known address."""
    sources: tuple[str, ...]
    seen_s_ago: float | None
    rtt_s: float | None
    blob_bytes_up: int
    blob_bytes_down: int
    faults: int
    last_error: str


class Swarm:
    """One node's part in one run."""

    def __init__(
        self,
        host: Host,
        identity: Identity,
        run: RunId,
        home: Path,
        seeds: Sequence[PeerAddress] = (),
        *,
        options: SwarmOptions | None = None,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        dht: Dht | None = None,
        gate: AdmissionGate | None = None,
    ) -> None:
        """Opens what `home` holds. Raises DiskFault, CorruptFault, ConfigError, LocalFault.

        `gate`: whom the run admits; none: everybody.

        `now`: monotonic, the running loop's `time` under virtual time.
        """
        self.run = run
        self._host = host
        self._identity = identity
        self._options = options or SwarmOptions()
        self._now = now
        self._rng = rng or random.Random()
        self._dht = dht
        self._bells: list[Notifier] = []
        self._connections: dict[PeerId, Connection | None] = {}
        self._group: asyncio.TaskGroup | None = None
        self.local_fault: LocalFault | None = None
        """Newest failure to store what peers sent; None when the last attempt worked."""
        self.reputations = ReputationTable(now)
        self.ledger = Ledger(home / LEDGER_FILE, run, self._options.quota, gate)
        self.registers = RegisterStore(run, identity, next_epoch(home / "epoch"), admits=self.ledger.admits)
        self.refusals: dict[PeerId, str] = {}
        """Connected peers that do not admit us, each with its reason."""
        self.calls = Calls(host, run, agent=self._options.agent, on_fault=self.blame)
        self.blobs = Blobs(host, BlobStore(home / "blobs"), self.blame)
        self.gossip = Gossip(self.calls, self.neighbours, now, self._rng)
        self.gossip.join("entry", self._on_entry, max_bytes=ENTRY_MAX_BYTES)
        self.gossip.join("register", self._on_register, max_bytes=REGISTER_MAX_BYTES)
        self.discovery = Discovery(
            *(host, seeds, home / "peers.json"), now=now, rng=self._rng, target=self._options.target
        )
        self.liveness = LivenessMonitor(self.calls, self.neighbours, now, self.blame, self._on_silent)
        self._anti_entropy = AntiEntropy(
            LedgerSync(self.ledger, self.calls, self._on_fresh, self.blame, self._on_refused),
            RegisterSync(self.registers, self.calls, now, self._on_pulled),
            *(self.neighbours, self._rng, self.blame, self._on_local_fault),
        )

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve the host and everything on it until cancelled; `ready` once calls can be made.

        Raises what Host.serve raises. Closes the ledger at the end.
        """
        up = asyncio.Event()
        events = self._host.events()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._host.serve(up.set))
                await up.wait()
                self._group = group
                group.create_task(self.calls.serve())
                group.create_task(self._follow(events))
                group.create_task(self._anti_entropy.serve())
                group.create_task(self.discovery.serve())
                group.create_task(self._publish_addresses())
                group.create_task(self._expire())
                group.create_task(self._poll_connections())
                group.create_task(self.liveness.serve())
                if self._dht is not None:
                    group.create_task(self._dht.serve())
                    group.create_task(self._announce_in_dht(self._dht))
                    group.create_task(self._find_in_dht(self._dht))
                await asyncio.sleep(0)
                ready()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._group = None  # a group that ends takes no task
        finally:
            self.ledger.close()

    # What we say.

    def publish(self, body: Body) -> Entry:
        """Append to our feed, durably, and tell everyone. Raises DiskFault, LocalFault, DecodeError."""
        entry = self.ledger.append(self._identity, body)
        self.gossip.publish("entry", encode_entry(entry))
        self._notify()
        return entry

    def publish_register(self, value: Value, ttl_s: float) -> None:
        """Publish our register of this type; it dies after `ttl_s` unless it is published again."""
        self.gossip.publish("register", self.registers.publish(value, ttl_s, self._now()))
        self._notify()

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """Download a blob from holders, dialling those we are not connected to. See BlobFetcher.fetch."""
        others = [peer for peer in holders if peer != self._identity.peer_id]
        live = {connection.peer: connection.path for connection in await self._host.connections()}
        async with asyncio.TaskGroup() as group:
            for peer in others:
                if peer not in live:
                    group.create_task(self._try_connect(peer))
        # A relay's bytes are somebody's gift: it carries a blob only when nobody else has it.
        others.sort(key=lambda peer: (peer not in live, live.get(peer) is Route.RELAYED))
        return await self.blobs.fetch(blob, others, max_bytes)

    async def connect(self, peer: PeerId) -> None:
        """Dial a peer that is known and not connected. Whether that worked shows when it is asked."""
        if peer not in self._connections:
            await self._try_connect(peer)

    # What we hear.

    def subscribe(self) -> Notifier:
        """A bell that rings after every change of ledger, registers (deaths too) and connections."""
        bell = Notifier()
        self._bells.append(bell)
        return bell

    async def entries(self, cursor: int = 0) -> AsyncIterator[tuple[int, Entry]]:
        """All entries after `cursor` in arrival order, then new ones as they come; none is ever skipped."""
        bell = self.subscribe()
        try:
            while True:
                batch = self.ledger.since(cursor)
                for cursor, entry in batch:
                    yield cursor, entry
                if not batch:
                    await bell.wait()
        finally:
            self._bells.remove(bell)

    async def wait_synced(self) -> None:
        """Until one whole exchange with some peer is over. Before that a restored home may fork its feed."""
        await self._anti_entropy.synced.wait()

    def is_caught_up(self) -> bool:
        """See Repair.is_caught_up."""
        return self._anti_entropy.is_caught_up()

    def synced_peers(self) -> frozenset[PeerId]:
        """See Repair.synced_peers."""
        return self._anti_entropy.synced_peers()

    def sync_soon(self) -> None:
        """Something is missing here: exchange with every neighbour soon."""
        for peer in self.neighbours():
            self._anti_entropy.ask(peer)

    def live(self, kind: type[Value]) -> dict[PeerId, Value]:
        """Current registers of one type by author, our own included."""
        return dict(self.registers.live(kind, self._now()))

    # What a user sees.

    def neighbours(self) -> list[PeerId]:
        """Connected peers that we talk to."""
        return [peer for peer in self._connections if not self.reputations.is_banned(peer)]

    def peers(self) -> list[PeerView]:
        """Everybody we know of, connected ones first."""
        book = self.discovery.book
        reachable = (known.peer for known in book.all() if known.maddrs)
        names = dict.fromkeys((*self._connections, *reachable))
        return [self._row(peer) for peer in names]

    def discovery_table(self) -> dict[str, str]:
        """State of every seed and of the DHT."""
        table = self.discovery.table()
        if self._dht is not None:
            dht = self._dht.statistics()
            table["dht"] = "ready" if dht.is_ready else dht.last_error or "not started yet"
        return table

    def _row(self, peer: PeerId) -> PeerView:
        known, connection = self.discovery.book.get(peer), self._connections.get(peer)
        standing = self.reputations.get(peer)
        best = known.address.maddrs[:1] if known else ()
        seen = known.last_seen if known else None
        is_connected = peer in self._connections
        return PeerView(
            peer,
            is_connected,
            str(connection.path) if connection else "",
            connection.maddr if connection else "".join(best),
            tuple(sorted(set(known.maddrs.values()))) if known else (),
            0.0 if is_connected else None if seen is None else self._now() - seen,
            self.liveness.rtt_s.get(peer),
            *self.blobs.bytes_of(peer),
            standing.faults,
            standing.last or (known.last_error if known else ""),
        )

    # Reactions.

    def _notify(self) -> None:
        for bell in self._bells:
            bell.notify()

    def _on_entry(self, sender: PeerId, data: bytes) -> bool:
        entry = decode_entry(data, self.run)
        try:
            done = self.ledger.insert_all([entry], sender)
        except LocalFault as fault:
            self._on_local_fault(fault)
            return False
        for fork in done.forks:
            self._on_fork(sender, fork)
        if done.gap:
            self._anti_entropy.ask(sender)
        if done.fresh:
            self.local_fault = None
            self._notify()
        return bool(done.fresh or done.forks)

    def _on_fork(self, sender: PeerId, fork: Equivocation) -> None:
        self.blame(fork.author, fork)
        # The proof travels by exchange; the sender is the one who may not have it.
        self._anti_entropy.ask(sender)

    def _on_fresh(self, sender: PeerId, entries: tuple[Entry, ...]) -> None:
        self.local_fault = None
        if len(entries) <= _PASSED_ON:
            for entry in entries:
                self.gossip.publish("entry", encode_entry(entry))
        self._notify()

    def _on_register(self, sender: PeerId, data: bytes) -> bool:
        is_news = self.registers.merge(data, self._now())
        if is_news:
            self._on_register_news()
        return is_news

    def _on_pulled(self, registers: list[bytes]) -> None:
        if len(registers) <= _PASSED_ON:
            for data in registers:
                self.gossip.publish("register", data)
        self._on_register_news()

    def _on_register_news(self) -> None:
        for author, value in self.registers.drain_news():
            if isinstance(value, Addresses):
                self.discovery.learn(author, value.maddrs, "exchange")
        self._notify()

    def _on_refused(self, peer: PeerId, reason: str) -> None:
        if reason not in self.refusals.values():
            log.warning("peer %s stores nothing of ours: %s", short(peer), reason)
        self.refusals[peer] = reason
        self._notify()

    def _on_local_fault(self, fault: LocalFault) -> None:
        if self.local_fault is None:
            log.warning("what peers sent was not stored: %s", fault.line())
        self.local_fault = fault
        self._notify()

    def blame(self, peer: PeerId, fault: PeerFault) -> None:
        """A peer broke the protocol."""
        log.warning("peer %s: %s", short(peer), fault.line())
        if self.reputations.blame(peer, fault):
            self._notify()

    # Tasks.

    async def _follow(self, events: AsyncIterator[HostEvent]) -> None:
        async for event in events:
            match event:
                case PeerConnected(peer) if self.reputations.is_banned(peer):
                    await self._disconnect_banned(peer)
                case PeerConnected(peer):
                    self._on_connected(peer)
                case PeerDisconnected(peer):
                    self._on_disconnected(peer)
                case HostRestarted() if self._dht is not None:
                    self._dht.restart()

    def _on_connected(self, peer: PeerId) -> None:
        if peer in self._connections:
            return
        self._connections[peer] = None
        self.discovery.on_connected(peer)
        if not self.reputations.is_banned(peer):
            self._anti_entropy.ask(peer)
        self._notify()

    def _on_disconnected(self, peer: PeerId) -> None:
        if peer not in self._connections:
            return
        del self._connections[peer]
        self.refusals.pop(peer, None)
        self.liveness.forget(peer)
        self.gossip.forget(peer)
        self.discovery.on_disconnected(peer)
        self._notify()

    async def _poll_connections(self) -> None:
        """Paths for the status, events that were lost, and peers to keep away from."""
        while True:
            live = {connection.peer: connection for connection in await self._host.connections()}
            for peer in [peer for peer in self._connections if peer not in live]:
                self._on_disconnected(peer)
            for peer, connection in live.items():
                if self.reputations.is_banned(peer):
                    await self._disconnect_banned(peer)
                else:
                    self._on_connected(peer)
                    self._connections[peer] = connection
            await asyncio.sleep(_LOOK_S)

    async def _disconnect_banned(self, peer: PeerId) -> None:
        standing = self.reputations.get(peer)
        self._on_disconnected(peer)
        try:
            await self._host.disconnect(peer)
        except Unreachable as error:
            log.debug("%s: %s", short(peer), error)
        self.discovery.book.ban(peer, standing.last, standing.banned_until)

    def _on_silent(self, peer: PeerId) -> None:
        if self._group is not None:
            self._group.create_task(self._disconnect(peer))

    async def _disconnect(self, peer: PeerId) -> None:
        try:
            await self._host.disconnect(peer)
        except Unreachable as error:
            log.debug("%s: %s", short(peer), error)
        self._on_disconnected(peer)

    async def _publish_addresses(self) -> None:
        """Publish our own addresses when they change, and before they die."""
        told: tuple[str, ...] = ()
        told_at = self._now()
        while True:
            try:
                maddrs = (await self._host.addresses())[:16]
            except Unreachable:
                maddrs = told
            if maddrs and (maddrs != told or self._now() - told_at >= _ADDRESSES_EVERY_S):
                self.publish_register(Addresses(maddrs), ADDRESSES_TTL_S)
                told, told_at = maddrs, self._now()
            await asyncio.sleep(_LOOK_S)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self.registers.drop_expired(self._now()):
                self._notify()

    async def _try_connect(self, peer: PeerId) -> None:
        known = self.discovery.book.get(peer)
        if known is None or not known.maddrs:
            return
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._host.connect(known.address)
        except (Unreachable, TimeoutError) as error:
            log.debug("%s: %s", short(peer), error)

    async def _announce_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    await dht.announce(self.run, (await self._host.addresses())[:16], self._options.run_file)
                pause_s = _DHT_ANNOUNCE_S
            except (Unreachable, TimeoutError) as error:
                log.debug("not announced in the DHT: %s", error)
                pause_s = _DHT_FIND_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))

    async def _find_in_dht(self, dht: Dht) -> None:
        while True:
            try:
                async with asyncio.timeout(_DHT_DEADLINE_S):
                    for address in await dht.find(self.run):
                        self.discovery.learn(address.peer, address.maddrs, "dht")
            except (Unreachable, TimeoutError) as error:
                log.debug("nothing found in the DHT: %s", error)
            lonely = not self._connections
            await asyncio.sleep((_POLL_S if lonely else _DHT_FIND_S) * self._rng.uniform(0.5, 1.5))
