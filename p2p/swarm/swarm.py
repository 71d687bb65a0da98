"""Everything that a member of a run shares with the others, over one host: ledger, registers, blobs, peers.

The daemon serves a Swarm, publishes entries and registers through it, and re-reads `ledger` and `registers` when
its notifier wakes. A Swarm runs unchanged on the simulated network and on virtual time.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.pushed import PushedBlobs
from atoll.p2p.blobs.store import BLOBS, BlobStore
from atoll.p2p.discovery.discovery import TARGET, Discovery
from atoll.p2p.exchange.orphans import WantedEntries
from atoll.p2p.host.interface import Host, PeerAddress, Route
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.newcomers import NewcomerQuota, Newcomers
from atoll.p2p.ledger.shares import Quota, Shares
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.membership.kept_leases import KeptLeases
from atoll.p2p.membership.register_store import RegisterStore, next_epoch
from atoll.p2p.membership.reputation import BANNED, LEFT_ALONE, ReputationTable
from atoll.p2p.rpc.calls import Calls
from atoll.p2p.swarm.announcements import Announcements, DhtUse
from atoll.p2p.swarm.connections import PeerConnections, PeerView
from atoll.p2p.swarm.replication import Replication
from atoll.p2p.system.waiting import Notifier
from atoll.protocols.errors import PeerFault, RunMismatch
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, RunId, short
from atoll.protocols.ledger.records import Body, Entry
from atoll.protocols.ledger.registers import Value

log = logging.getLogger(__name__)


class Swarm:
    """One node's part in one run."""

    def __init__(
        self,
        *,
        host: Host,
        identity: Identity,
        run: RunId,
        home: Path,
        seeds: Sequence[PeerAddress] = (),
        quota: Quota | None = None,
        target: int = TARGET,
        now: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        dht: DhtUse | None = None,
        gate: AdmissionGate | None = None,
        newcomers: NewcomerQuota | None = None,
    ) -> None:
        """Open what the folder `home` holds. Raises DiskFault, CorruptFault, ConfigError, LocalFault.

        `gate` decides which peers the run admits; None admits everybody. `target`: connections that we open by
        ourselves. `now` is a monotonic clock, under virtual time the running loop's `time`; `wall_s` goes on while
        the machine is off. `newcomers`: places of authors that are not accepted yet.
        """
        rng = rng or random.Random()
        self.run = run
        self._host = host
        self._identity = identity
        self._now = now
        self._dht = dht
        self._notifiers: list[Notifier] = []
        self.reputations = ReputationTable(now)
        self._quotas = quota or Quota(), newcomers or NewcomerQuota()
        self.newcomers = self._make_newcomers()
        self.on_pruned: Callable[[PeerId], None] = lambda author: None
        """Receives authors whose feeds had to go from the ledger (p2p/ledger/newcomers.py)."""
        self.ledger = Ledger(home / LEDGER_FILE, run, quota, gate, self.newcomers)
        self.registers = self._make_registers(next_epoch(home / "epoch"))
        self._kept = KeptLeases(self.registers, home / "leases", wall_s)
        self._began_at = now()
        self.calls = Calls(host, run, on_fault=self.blame, is_accepted=self._is_accepted)
        self.blobs = Blobs(host, BlobStore(home / BLOBS), self.blame, self._is_accepted)
        self._pushed = PushedBlobs(self.calls, self.blobs, now)
        self.discovery = Discovery(host, seeds, home / "peers.json", now=now, rng=rng, target=target)
        self._connections = self._make_connections()
        self.replication = Replication(
            identity=identity,
            ledger=self.ledger,
            registers=self.registers,
            calls=self.calls,
            neighbours=self.neighbours,
            now=now,
            rng=rng,
            on_fault=self.blame,
            on_addresses=lambda peer, addresses: self.discovery.learn(peer, addresses.maddrs, "exchange"),
            on_change=self._notify,
            on_pruned=lambda author: self.on_pruned(author),
        )
        self._announcements = self._make_announcements(rng)

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve the host and everything on it until cancelled; call `ready` once calls can be made.

        Raises what Host.serve raises. Closes the ledger at the end.
        """
        up = asyncio.Event()
        events = self._host.events()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._host.serve(up.set))
                await up.wait()
                group.create_task(self.calls.serve())
                group.create_task(self._connections.serve(events))
                group.create_task(self.replication.serve())
                group.create_task(self.discovery.serve())
                group.create_task(self._kept.serve())
                group.create_task(self._announcements.serve())
                await self.calls.started.wait()
                ready()
        finally:
            self.ledger.close()

    # --- publish and fetch -----------------------------------------------------------------------

    def publish(self, body: Body) -> Entry:
        """Append to our feed, durably, and send to everyone. Raises DiskFault, LocalFault, DecodeError."""
        self._pushed.send_payload_of(body, self._connections.direct_neighbours)  # a relay's traffic is donated
        return self.replication.publish(body)

    def publish_register(self, value: Value, ttl_s: float) -> None:
        """Publish our register of this type; it expires after `ttl_s` seconds unless it is published again."""
        self.replication.publish_register(value, ttl_s)

    async def fetch(self, blob: Digest, holders: Sequence[PeerId], max_bytes: int) -> Path:
        """Download a blob from holders, dialling those we are not connected to. See BlobFetcher.fetch."""
        if (path := await self.take_pushed(blob, max_bytes)) is not None:
            return path
        others = [peer for peer in holders if peer != self._identity.peer_id]
        live = await self._connections.routes()
        async with asyncio.TaskGroup() as group:
            for peer in [peer for peer in others if peer not in live]:
                group.create_task(self._connections.dial(peer))
        # A relay's traffic is donated: a relayed holder is used only if no other holder has the blob.
        others.sort(key=lambda peer: (peer not in live, live.get(peer) is Route.RELAYED))
        return await self.blobs.fetch(blob, others, max_bytes)

    async def take_pushed(self, blob: Digest, max_bytes: int) -> Path | None:
        """See PushedBlobs.take."""
        return await self._pushed.take(blob, max_bytes)

    def exclude(self, peer: PeerId, reason: str) -> None:
        """From now on nothing of `peer` is fetched, and nothing served to it but the ledger, which says why."""
        self.ledger.exclude(peer, reason)
        self.registers.drop(peer)
        self.blobs.refuse(peer)
        self._connections.exclude(peer)

    def forget_chain(self) -> None:
        """Forget what followed from the chain that this node leaves: who has worked, and who is excluded."""
        self.newcomers = self._make_newcomers()
        self.ledger.forget_chain(self.newcomers)
        self.blobs.refuse_nobody()
        self._connections.exclude_nobody()
        self.replication.forget_chain()
        self.sync_soon()

    async def connect(self, peer: PeerId) -> None:
        """Dial a known peer that is not connected. A failed dial raises nothing: the next request to it fails."""
        if not self._connections.is_connected(peer):
            await self._connections.dial(peer)

    # --- newcomers -------------------------------------------------------------------------------

    def vouch(self, author: PeerId) -> str:
        """A payload of this author was verified: others hear of it. Returns who brought it (`Newcomers.line`)."""
        was_pressed = self.newcomers.is_pressed
        if self.newcomers.vouch(author) and was_pressed:  # else it was passed on when it came
            self.replication.pass_on(author)
        return self.newcomers.line(author)

    def require(self, entries: Iterable[Digest], proposer: PeerId | None) -> None:
        """A proposer's ballot, or (None) a final set names these entries: ask for those that are not here."""
        lacking = [one for one in entries if self.ledger.get(one) is None]  # most Reductions of a ballot are here
        if lacking:
            self.newcomers.require(lacking, proposer)
            self.sync_soon()

    def fetch_orphans(self, wanted: WantedEntries, *, covered: bool = False) -> None:
        """Ask neighbours for these entries of equivocators until others of the round, or none, are wanted."""
        self.replication.orphans.want(wanted, covered=covered)
        if self.replication.orphans.wanted:
            self.sync_soon()

    def end_replay(self) -> None:
        """All of the ledger was replayed, so `accept` knows who counts. Raises DiskFault."""
        for author in self.ledger.end_replay():
            self.on_pruned(author)

    # --- read ------------------------------------------------------------------------------------

    @contextmanager
    def subscribed(self) -> Iterator[Notifier]:
        """A notifier that wakes after every change of ledger, registers (expiry too) and connections."""
        notifier = Notifier()
        self._notifiers.append(notifier)
        try:
            yield notifier
        finally:
            self._notifiers.remove(notifier)

    async def entries(self, cursor: int = 0) -> AsyncIterator[tuple[int, Entry]]:
        """All entries after `cursor` in arrival order, then new ones as they arrive; none is ever skipped."""
        stored = -1
        with self.subscribed() as notifier:
            while True:
                while stored != self.ledger.stored:  # most changes are of registers: the file is not read for them
                    stored = self.ledger.stored
                    while batch := self.ledger.since(cursor):
                        for cursor, entry in batch:
                            yield cursor, entry
                await notifier.wait()

    async def wait_synced(self) -> None:
        """Wait for one whole exchange with some peer. Before that, a restored home may fork its own feed."""
        await self.replication.anti_entropy.synced.wait()

    def sync_soon(self) -> None:
        """Exchange with every neighbour soon: something is missing here."""
        for peer in self.neighbours():
            self.replication.anti_entropy.ask(peer)

    async def tell(self, peer: PeerId) -> bool:
        """Bring our ledger to a neighbour, and its own here. Returns whether that went well."""
        return await self.replication.anti_entropy.tell(peer)

    def live(self, kind: type[Value]) -> dict[PeerId, Value]:
        """Live registers of one type by author, our own included."""
        return dict(self.registers.live(kind, self._now()))

    def down_s(self, within_s: float) -> float:
        """Seconds for which this node was down before it began, if that is `within_s` ago; infinite: not known."""
        return self._kept.down_s if self._now() - self._began_at < within_s else 0.0

    def neighbours(self) -> list[PeerId]:
        """Connected peers that are not banned."""
        return self._connections.neighbours()

    def peers(self) -> list[PeerView]:
        """All known peers, connected ones first."""
        return self._connections.views(self.blobs.bytes_of)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial this node."""
        return self._announcements.addresses

    def expects_members(self) -> bool:
        """Whether this node knows peers to join, or looks for those of another owner's run in the DHT."""
        if (use := self._dht) is not None and use.listing is not None and use.dht.bootstrap and not use.is_owner:
            return True
        # Peers of other runs may be connected, for the DHT; their addresses are not in the book.
        return bool(self.discovery.table()) or any(known.maddrs for known in self.discovery.book.all())

    def discovery_table(self) -> dict[str, str]:
        """State of every seed and of the DHT, as one line each."""
        table = self.discovery.table()
        if self._dht is not None:
            table["dht"] = self._dht.dht.state
        return table

    # --- reactions -------------------------------------------------------------------------------

    def blame(self, peer: PeerId, fault: PeerFault) -> None:
        """Count a protocol violation of `peer`; enough of them ban it for a while."""
        is_stranger = isinstance(fault, RunMismatch)
        level = logging.INFO if is_stranger else logging.WARNING
        log.log(level, "peer %s: %s", short(peer), fault.line())
        if self.reputations.blame(peer, fault):
            log.log(level, "peer %s %s", peer, LEFT_ALONE if is_stranger else BANNED)
            self._notify()

    def _is_accepted(self, peer: PeerId) -> bool:
        return self.newcomers.is_accepted(peer)

    def _is_known(self, peer: PeerId) -> bool:
        return self.newcomers.is_held_by_work(peer) or self._connections.is_connected(peer)

    def _make_registers(self, epoch: int) -> RegisterStore:
        return RegisterStore(
            self.run,
            self._identity,
            epoch,
            admits=self.ledger.admits,
            is_known=self._is_known,
            rank=lambda peer: self.newcomers.shares.rounds(peer),
        )

    def _make_newcomers(self) -> Newcomers:
        quota, places = self._quotas
        shares = Shares(self._identity.peer_id, quota)
        return Newcomers(places, self._now, lambda peer: self._connections.maddr_of(peer), shares=shares)

    def _make_connections(self) -> PeerConnections:
        return PeerConnections(
            host=self._host,
            discovery=self.discovery,
            reputations=self.reputations,
            calls=self.calls,
            now=self._now,
            on_fault=self.blame,
            on_connected=self._on_connected,
            on_lost=self._on_lost,
            is_member=self._is_accepted,
            shares_connections=lambda: self._dht is not None and self._dht.dht.is_on,
        )

    def _make_announcements(self, rng: random.Random) -> Announcements:
        return Announcements(
            host=self._host,
            run=self.run,
            use=self._dht,
            now=self._now,
            rng=rng,
            publish=self.publish_register,
            learn=self.discovery.learn,
            is_alone=lambda: self._connections.is_alone,
        )

    def _on_connected(self, peer: PeerId) -> None:
        if not self.reputations.is_banned(peer):
            self.replication.anti_entropy.ask(peer)
        self._notify()

    def _on_lost(self, peer: PeerId) -> None:
        self.replication.forget(peer)
        self._notify()

    def _notify(self) -> None:
        for notifier in self._notifiers:
            notifier.notify()
