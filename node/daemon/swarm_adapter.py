"""The swarm as the driver sees it (`Network`), and the tasks that carry its news to the driver."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from atoll.node.daemon.assets.comparing import Silence, compare_when_asked, wait_synced
from atoll.node.daemon.assets.feed_recovery import clear_mark, wait_for_feed
from atoll.node.daemon.assets.first_records import wait_for_records
from atoll.node.daemon.assets.lost_ledger import lost_feed, with_summaries
from atoll.node.daemon.core.interfaces import SwarmListener
from atoll.node.daemon.telemetry.round_log import TrafficTotals
from atoll.p2p.exchange.orphans import WantedEntries
from atoll.p2p.host.interface import Host
from atoll.p2p.rpc.single_request import RequestHandler, SingleRequests
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.errors import AtollError, DiskFault, PeerFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import Body, Entry
from atoll.protocols.ledger.reduction import ASK_MAX_BYTES
from atoll.protocols.ledger.registers import Claim, ClaimKind, Holding, Lease
from atoll.protocols.wires import REDUCTION

BREATH_S = 0.002
"""Rest between two parts of the work on a puzzle, in which this node answers its peers."""
TOLD_S = 5.0
"""How often the user is told of it."""


async def _bring_nothing() -> None:
    """In runs without certified summaries there is nothing to begin with."""


class SwarmNetwork:
    """Adapts one Swarm. Synchronous but for downloads."""

    def __init__(
        self,
        swarm: Swarm,
        host: Host,
        me: PeerId,
        now: Callable[[], float] = time.monotonic,
        opening: Iterable[Body | None] = (),
        folder: Path | None = None,
    ) -> None:
        """`opening`: what our feed must begin with, if it has not begun, after None for each part of its work.

        `folder`: the run's, which may be marked as restored, or is marked now (node/daemon/assets/lost_ledger.py).
        """
        self._opening, self._folder = opening, folder
        self.bring_summary: Callable[[], Awaitable[None]] = _bring_nothing
        """Called while peers lack old records that this node needs; does not return if its driver begins anew."""
        self._lost_feed = lost_feed(folder, me, swarm.ledger, swarm.registers.remembered) if folder else None
        """The feed that must come back before this node publishes; None if nothing was lost."""
        self._swarm = swarm
        self._host = host
        self._me = me
        self._now = now
        self._replayed = 0
        self._carried = 0
        self._excluded: set[PeerId] = set()
        self._silence = Silence()
        self._is_accepted = False
        """Whether a final set, an epoch or the RunSpec names this node."""
        self._has_carried = asyncio.Event()
        self._questions = SingleRequests(host, REDUCTION.protocol(), ASK_MAX_BYTES)

    # --- interfaces.Network --------------------------------------------------------------------

    def publish(self, body: Body) -> Entry:
        """See Swarm.publish."""
        try:
            return self._swarm.publish(body)
        except DiskFault:
            self._silence.refuse()
            raise

    def must_compare(self) -> bool:
        """See Silence."""
        return self._silence.must_compare(self._now())

    def entries(self) -> list[Entry]:
        """All entries on disk in arrival order (so each author's in order)."""
        found: list[Entry] = []
        while batch := self._swarm.ledger.since(self._replayed):
            found += [entry for _, entry in batch]
            self._replayed = batch[-1][0]
        return found

    def orphans(self) -> list[Entry]:
        """See Ledger.orphans."""
        return self._swarm.ledger.orphans()

    def equivocators(self) -> frozenset[PeerId]:
        """See Ledger.equivocators."""
        return self._swarm.ledger.equivocators()

    def fetch_orphans(self, number: Round, *names: tuple[Digest, ...], covered: bool = False) -> None:
        """See Swarm.fetch_orphans."""
        self._swarm.fetch_orphans(WantedEntries(number, *names), covered=covered)

    def put_holding(self, holding: Holding, ttl_s: float) -> None:
        """See Swarm.publish_register."""
        if self._lost_feed is None:
            self._swarm.publish_register(holding, ttl_s)

    def holdings(self) -> dict[PeerId, Holding]:
        """Live announcements of other members."""
        live = self._swarm.registers.live(Holding, self._now())
        return {peer: holding for peer, holding in live.items() if peer != self._me}

    def put_claim(self, claim: Claim, ttl_s: float) -> None:
        """See Swarm.publish_register."""
        self._swarm.publish_register(claim, ttl_s)

    def claims(self, kind: type[ClaimKind]) -> dict[PeerId, ClaimKind]:
        """Live claims of others."""
        live = self._swarm.registers.live(kind, self._now())
        return {peer: claim for peer, claim in live.items() if peer != self._me}

    def put_lease(self, lease: Lease, ttl_s: float) -> None:
        """See Swarm.publish_register."""
        self._silence.renew(self._now(), ttl_s)
        if self._lost_feed is None:
            self._swarm.publish_register(lease, ttl_s)

    def leases(self) -> dict[PeerId, tuple[Lease, float]]:
        """Live leases of others with their remaining life in seconds."""
        now, registers = self._now(), self._swarm.registers
        others = {peer: lease for peer, lease in registers.live(Lease, now).items() if peer != self._me}
        return {peer: (lease, registers.expires(peer, Lease, now) or 0.0) for peer, lease in others.items()}

    def down_s(self, within_s: float) -> float:
        """See Network."""
        return self._swarm.down_s(within_s) if self._silence.passed_s is None else self._silence.passed_s

    @property
    def read_to(self) -> int:
        """The ledger's cursor after the newest entry that the driver read."""
        return max(self._carried, self._replayed)

    def add_blob(self, path: Path, *, move: bool = False, is_synced: bool = False) -> Digest:
        """See BlobStore.add_file."""
        return self._swarm.blobs.store.add_file(path, move=move, is_synced=is_synced)

    def blobs_above(self, size_bytes: int) -> list[Digest]:
        """All complete blobs larger than `size_bytes`."""
        store = self._swarm.blobs.store
        return [blob for blob in sorted(store.blobs()) if store.size(blob) > size_bytes]

    def has_blob(self, blob: Digest) -> bool:
        """See BlobStore.has."""
        return self._swarm.blobs.store.has(blob)

    def blob_path(self, blob: Digest) -> Path:
        """See BlobStore.path."""
        return self._swarm.blobs.store.path(blob)

    async def is_whole(self, blob: Digest) -> bool:
        """Whether a held blob's bytes still have its hash. Raises DiskFault."""
        return await asyncio.to_thread(self._swarm.blobs.store.is_whole, blob)

    def delete_blob(self, blob: Digest) -> None:
        """See BlobStore.delete."""
        self._swarm.blobs.store.delete(blob)

    def neighbours(self) -> list[PeerId]:
        """The connected peers."""
        return self._swarm.neighbours()

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        """See Swarm.fetch."""
        return await self._swarm.fetch(blob, holders, max_bytes)

    async def take_pushed(self, blob: Digest, max_bytes: int) -> Path | None:
        """See PushedBlobs.take."""
        return await self._swarm.take_pushed(blob, max_bytes)

    def fetched_bytes(self, blob: Digest) -> int:
        """See Blobs.fetched_bytes."""
        return self._swarm.blobs.fetched_bytes(blob)

    async def ask_peer(self, peer: PeerId, question: bytes, max_bytes: int) -> bytes:
        """Ask a peer, dialling it if it is not connected. See SingleRequests.ask."""
        await self._swarm.connect(peer)
        return await self._questions.ask(peer, question, max_bytes)

    def answer_by(self, answer: RequestHandler) -> None:
        """See SingleRequests.set_handler."""

        async def unless_excluded(peer: PeerId, question: bytes) -> bytes:
            return b"" if peer in self._excluded else await answer(peer, question)

        self._questions.set_handler(unless_excluded)

    def sync_soon(self) -> None:
        """Ask the neighbours for missing entries now."""
        self._swarm.sync_soon()

    def accept(self, authors: Iterable[PeerId], *, by_work: bool = True) -> None:
        """See NewcomerBudget."""
        named = tuple(authors)
        self._is_accepted |= self._me in named
        self._swarm.newcomers.accept(named, by_work=by_work)

    def keep(self, authors: Iterable[PeerId]) -> None:
        """See NewcomerBudget."""
        self._swarm.newcomers.keep(authors)

    def vouch(self, author: PeerId) -> str:
        """See Swarm.vouch."""
        return self._swarm.vouch(author)

    def exclude(self, peer: PeerId, reason: str) -> None:
        """See Swarm.exclude."""
        self._excluded.add(peer)
        self._swarm.exclude(peer, reason)

    def refusal(self) -> str:
        """See Network."""
        # Final sets name a member. Strangers that are the only peers here must not stop it by a line of text.
        is_member = self._is_accepted and self._me not in self._excluded
        return "" if is_member else self._swarm.replication.refusal

    def require(self, entries: Iterable[Digest], proposer: PeerId | None) -> None:
        """See Swarm.require."""
        self._swarm.require(entries, proposer)

    def end_replay(self) -> None:
        """See Swarm.end_replay."""
        self._silence.end(self._now())
        self._swarm.end_replay()

    def bringer(self, author: PeerId) -> PeerId | None:
        """See NewcomerBudget."""
        newcomers = self._swarm.newcomers
        return newcomers.bringer(author) if newcomers.is_pressed else None

    def is_accepted(self, author: PeerId) -> bool:
        """See NewcomerBudget."""
        return self._swarm.newcomers.is_accepted(author)

    def is_unreachable(self, peer: PeerId) -> bool:
        """See LeaseRegisters."""
        return self._swarm.discovery.is_unreachable(peer)

    def is_tried(self, peer: PeerId) -> bool:
        """See LeaseRegisters."""
        return self._swarm.newcomers.is_tried(peer)

    def block_of(self, peer: PeerId) -> str:
        """See LeaseRegisters."""
        return self._swarm.newcomers.block_of(peer)

    def blame(self, peer: PeerId, error: AtollError) -> None:
        """Count a fault of a peer whose payload or snapshot broke the protocol."""
        if isinstance(error, PeerFault):
            self._swarm.blame(peer, error)

    def bytes_moved(self) -> TrafficTotals:
        """Return the traffic totals since the start."""
        host, blobs = self._host.statistics(), self._swarm.blobs.statistics()
        return TrafficTotals(
            up=host.bytes_up,
            down=host.bytes_down,
            blobs_up=blobs.wire_bytes_up,
            blob_contents_up=blobs.bytes_up,
            blob_contents_down=blobs.bytes_down,
        )

    # --- changes of the chain -------------------------------------------------------------------

    def listen(self, listener: SwarmListener) -> None:
        """From now on this listener learns whose feeds had to go, and of orphans, those during its replay too."""
        self._swarm.on_pruned = listener.on_pruned
        self._swarm.replication.orphans.on_found = listener.on_orphans

    def forget_chain(self) -> None:
        """Be as at the start for the next listener, over the same connections. See Swarm.forget_chain."""
        self._replayed = self._carried = 0
        self._excluded.clear()
        self._is_accepted = False
        self._silence.forget()
        self._swarm.forget_chain()

    # --- tasks ----------------------------------------------------------------------------------

    async def carry(self, listener: SwarmListener, lease_s: float) -> None:
        """Bring entries and changes of leases, in order, until cancelled. Leases last `lease_s` seconds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry_entries(listener))
            group.create_task(self._carry_changes(listener))
            group.create_task(self._report_synced(listener, lease_s))
            tell = partial(self._tell_synced, listener)
            group.create_task(compare_when_asked(self._silence, self._swarm, tell))

    async def _carry_entries(self, listener: SwarmListener) -> None:
        async for cursor, entry in self._swarm.entries(self._replayed):
            listener.on_entry(entry)
            self._carried = cursor
            self._has_carried.set()

    async def _carry_changes(self, listener: SwarmListener) -> None:
        with self._swarm.subscribed() as bell:
            while True:
                await bell.wait()
                listener.on_leases()

    async def _report_synced(self, listener: SwarmListener, lease_s: float) -> None:
        """Synced after one exchange with a peer; a node that knows nobody is synced with everybody.

        The driver hears it after what the exchange brought: of our own votes, too.
        """
        if self._folder is not None and self._lost_feed is not None:
            waiting = wait_for_feed(self._swarm, self._me, self._lost_feed, lease_s, self._now, listener.on_behind)
            await with_summaries(waiting, self._swarm.replication, lambda: self.bring_summary())
            self._swarm.ledger.signers.note(self._me)
            clear_mark(self._folder)
            self._lost_feed = None
        elif self._swarm.expects_members():
            worked = self._me in self._swarm.ledger.vector()
            await wait_synced(self._swarm, listener, lambda: self.bring_summary(), worked=worked)
            await wait_for_records(self._swarm, lambda: (lease for lease, _ in self.leases().values()))
        if self._me not in self._swarm.ledger.vector():
            told_s = -math.inf
            for body in self._opening:
                if body is not None:
                    self._swarm.publish(body)
                    if told_s > -math.inf:  # what else this node waits for is not over
                        listener.on_behind("")
                    break
                if self._now() - told_s > TOLD_S:
                    told_s = self._now()
                    listener.on_behind("solving the puzzle that this run asks of newcomers")
                await asyncio.sleep(BREATH_S)
        await self._tell_synced(listener)

    async def _tell_synced(self, listener: SwarmListener) -> None:
        if self._swarm.ledger.since(self.read_to, 1):
            # All that is stored by then is carried at once. What comes after it may never end.
            self._has_carried.clear()
            await self._has_carried.wait()
        listener.on_synced()
