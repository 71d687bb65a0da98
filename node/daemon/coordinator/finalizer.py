"""Bringing the worker's Θ_final up to the newest final round: payload by payload, or by a snapshot.

Finalize actions queue up here in the order of the rounds (after a restart or for a newcomer: all of them).
Each is applied when its payloads are held. When they are not and a live member offers a snapshot of a round
in the queue, the snapshot is fetched instead: at once where nobody keeps the payloads any more, after PATIENCE_S
where they may still come. Its state digest must be the one that the final round's certificate names.

The two newest snapshots of our own are kept; payloads of rounds before the older one are dropped.

A run whose Θ₀ is given by a file has it as the snapshot of round −1: it is fetched like others, from whoever has
it, where no newer one is offered. Who joined by a newer snapshot never needs it.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.node.daemon.consensus.types import FinalApplied, FinalizeRound
from atoll.node.daemon.coordinator.interfaces import Network, snapshot_max_bytes, whom_to_ask
from atoll.node.daemon.rounds.types import Behind
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import ConfigError, DiskFault, Divergence, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.local.worker_messages import (
    NOTHING_YET,
    AdoptReply,
    AdoptRequest,
    Counted,
    FinalizeReply,
    FinalizeRequest,
    SnapshotReply,
    SnapshotRequest,
    StartReply,
)

if TYPE_CHECKING:
    from atoll.node.daemon.coordinator.driver import Driver

SNAPSHOT_EVERY = 5
"""Final rounds between two snapshots of our own."""
REMEMBERED = 1024
"""Applied rounds that a worker may have to apply again: it saves a final round with the next trained one."""
SNAPSHOT_S = 3600.0
"""Deadline of one snapshot download."""
RETRY_S = 5.0
"""Rest before a snapshot that could not be fetched is tried again."""
PATIENCE_S = 20.0
"""So long payloads that others should still hold are waited for before a whole snapshot is fetched instead."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A live member holds Θ_final(round) as this blob."""

    peer: PeerId
    blob: Digest
    round: Round


class Finals:
    """Applies final rounds in order. All of its work goes on in one task at a time."""

    def __init__(self, driver: "Driver", net: Network, spool: Path) -> None:
        """`spool`: where the worker writes snapshots before they become blobs."""
        self._driver, self._net, self._spool = driver, net, spool
        self._queue: dict[int, FinalizeRound] = {}
        self.applied = Round(-1)
        self.offer: SnapshotOffer | None = None
        self._older: SnapshotOffer | None = None
        self._done: dict[int, FinalizeRound] = {}
        self._busy = False
        self._announced = False
        self._try_after: dict[Digest, float] = {}
        self._waiting: tuple[int, float] = (-1, 0.0)
        """The round whose payloads are waited for, and since when."""

    @property
    def _is_empty(self) -> bool:
        """The worker has no weights at all."""
        return self.applied == NOTHING_YET

    @property
    def snapshots(self) -> set[Digest]:
        """Blobs that this node offers, or can go back to."""
        return {offer.blob for offer in (self.offer, self._older) if offer is not None}

    @property
    def newest(self) -> int:
        """Newest round that is known to be final."""
        return max(self._queue, default=self.applied)

    def add(self, action: FinalizeRound) -> None:
        """A round became final."""
        if action.round <= self.applied:
            self._driver.finalized(action)
            return
        self._queue[action.round] = action
        self.step()

    def worker_started(self, started: StartReply) -> None:
        """A fresh worker holds Θ_final(started.final). Raises Divergence where that is not the final state."""
        final = Round(started.final)
        action = self._queue.get(final) or self._done.get(final)
        if action is not None and action.state != started.state:
            raise _divergence(action, started.state)
        self._check_start(final, started.state)
        self._announced = False
        self._advance_to(final)
        self._queue |= {number: done for number, done in self._done.items() if number > final}
        self.applied = final
        self._driver.feed_finality(FinalApplied(final))
        self.step()

    def step(self) -> None:
        """Start whatever can be done next. Harmless at any time."""
        if self._busy or not self._driver.worker_ready or not self._driver.synced:
            return
        if not self._queue and not self._is_empty:
            self._go_on()
            return
        action = self._queue.get(self.applied + 1)
        if action and self._driver.sets.is_here(action.round, action.contributions):
            self._begin(self._apply(action), f"finalize {action.round}")
            return
        offer = self._best_offer()
        if offer is not None and self._is_time_for(offer):
            self._begin_adopting(offer)
        elif self._is_empty:
            self._begin_start()
        elif action:
            self._driver.sets.want(action.round, action.contributions)

    def _go_on(self) -> None:
        if not self._announced:
            self._announced = True
            self._driver.ready(self.applied)
            if self.offer is None and self.applied >= 0:
                self._begin(self._snapshot(self.applied), f"snapshot {self.applied}")

    def _best_offer(self) -> SnapshotOffer | None:
        """The newest that helps: a member's, or our own where the worker lost more than payloads reach back."""
        now = self._driver.now()
        ours = [offer for offer in (self.offer, self._older) if offer is not None]
        offers: list[SnapshotOffer] = [*ours, *self._offers()]
        for offer in sorted(offers, key=lambda offer: -offer.round):
            if offer.round in self._queue and self._try_after.get(offer.blob, now) <= now:
                return offer
        return None

    def _is_time_for(self, offer: SnapshotOffer) -> bool:
        """Payloads are much smaller than a snapshot, but members keep them for SNAPSHOT_EVERY rounds only."""
        now = self._driver.now()
        if self._waiting[0] != self.applied + 1:
            self._waiting = (self.applied + 1, now)
        are_gone = self.applied + 1 < offer.round - SNAPSHOT_EVERY
        return are_gone or self._is_empty or now - self._waiting[1] >= PATIENCE_S

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._busy = True
        self._driver.start_task(self._alone(work), name)

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._busy = False
        self._driver.post(self.step)

    async def _apply(self, action: FinalizeRound) -> None:
        number, names = action.round, action.contributions
        done = await self._driver.sets.ask(
            number, names, lambda *parts: FinalizeRequest(number, *parts), FinalizeReply
        )
        if done.state != action.state:
            raise _divergence(action, done.state)
        self._advance_to(action.round)
        if (action.round + 1) % SNAPSHOT_EVERY == 0:
            await self._snapshot(action.round)

    def _advance_to(self, number: Round) -> None:
        self.applied = number
        for at in sorted(at for at in self._queue if at <= number):
            self._done[at] = self._queue.pop(at)
            self._driver.finalized(self._done[at])
        for at in sorted(self._done)[:-REMEMBERED]:
            del self._done[at]

    async def _snapshot(self, number: Round) -> None:
        """Take one; where the disk refuses, the next comes SNAPSHOT_EVERY rounds later."""
        path = self._snapshot_path(number)
        try:
            done = await self._driver.ask(SnapshotRequest(str(path)), SnapshotReply)
            blob = self._keep_snapshot(Path(done.path))
        except DiskFault as error:
            self._driver.disk_trouble(error)
            return
        self._keep(SnapshotOffer(self._driver.me, blob, done.round))

    def _keep(self, offer: SnapshotOffer) -> None:
        """Offer this one from now on; delete the one before the last."""
        if self.offer is not None and self.offer.blob == offer.blob:
            return
        oldest, self._older, self.offer = self._older, self.offer, offer
        if oldest is not None and oldest.blob not in (offer.blob, self._older and self._older.blob):
            self._driver.delete_blob(oldest.blob)
        if self._older is not None:
            self._driver.sets.drop(min(self._older.round, offer.round))
            self._forget_start()

    def _forget_start(self) -> None:
        """Nobody begins at round 0 any more. The owner keeps the files."""
        start, driver = self._driver.spec.start, self._driver
        given = (Digest(start.weights), *start.moment_blobs) if start else ()
        for blob in given if driver.me != driver.spec.owner else ():
            if self._net.has_blob(blob):
                driver.delete_blob(blob)

    def _begin_adopting(self, offer: SnapshotOffer) -> None:
        ours = self._ours_up_to(offer.round)
        if ours is None:
            self._net.sync_soon()
        else:
            self._begin(self._adopt(offer, self._queue[offer.round].state, ours), f"adopt {offer.round}")

    async def _adopt(self, offer: SnapshotOffer, state: Digest, ours: tuple[Counted, ...]) -> None:
        """Take over a snapshot, if it can be had now."""
        driver, is_start = self._driver, offer.round < 0
        self._announced = False
        if not is_start:
            reason = f"fetching the model of round {offer.round} from …{offer.peer[-8:]}"
            driver.feed_round(Behind(reason, driver.now()))
        try:
            path = await self._fetch_snapshot(offer)
            await driver.ask_until_saved(AdoptRequest(offer.round, str(path), state, ours), AdoptReply)
        except (DiskFault, Unreachable, PeerFault, TimeoutError) as error:
            await self._on_no_snapshot(offer, error)
            return
        self._advance_to(offer.round)
        if is_start:
            driver.feed_finality(FinalApplied(offer.round))
        else:
            self._keep(SnapshotOffer(driver.me, offer.blob, offer.round))

    def _begin_start(self) -> None:
        """Fetch Θ₀, unless that was tried just now."""
        driver = self._driver
        assert driver.spec.start, "a worker without weights is of a run whose start is given"
        offer = SnapshotOffer(driver.spec.owner, Digest(driver.spec.start.weights), Round(-1))
        if self._try_after.get(offer.blob, 0.0) <= driver.now():
            if offer.blob not in self._try_after:
                driver.feed_round(Behind("fetching the start weights", driver.now()))
            self._begin(self._adopt(offer, Digest(driver.spec.start.state), ()), "start weights")

    def _check_start(self, final: int, state: Digest) -> None:
        start = self._driver.spec.start
        if start and final == -1 and state != start.state:
            raise Divergence(
                "the saved start weights are not those of the run",
                hint="remove the run's state folder in this home; they are fetched again",
            )

    async def _on_no_snapshot(self, offer: SnapshotOffer, error: Exception) -> None:
        driver = self._driver
        if offer.round < 0:
            await self._on_no_start(offer, error)
        self._try_after = {blob: at for blob, at in self._try_after.items() if at > driver.now()}
        self._try_after[offer.blob] = driver.now() + RETRY_S
        driver.log.event("snapshot_failed", peer=offer.peer, round=offer.round, error=str(error))
        if isinstance(error, DiskFault):
            driver.disk_trouble(error)
        elif isinstance(error, PeerFault):
            driver.delete_blob(offer.blob)
            if offer.peer != driver.me and offer.round >= 0:
                driver.blame(offer.peer, error)

    async def _on_no_start(self, offer: SnapshotOffer, error: Exception) -> None:
        """Say why training does not begin. Raises ConfigError where the file itself is not what the run says."""
        blob = offer.blob
        if isinstance(error, PeerFault) and (not self._net.has_blob(blob) or await self._net.is_whole(blob)):
            raise ConfigError(
                f"the start weights of this run cannot be used: {error}", hint="ask its owner"
            ) from error
        if not isinstance(error, DiskFault | PeerFault):
            waiting = "waiting for the start weights: nobody reachable has them yet"
            self._driver.feed_round(Behind(waiting, self._driver.now()))

    def _ours_up_to(self, number: Round) -> tuple[Counted, ...] | None:
        """What of ours counts in the final sets of the queue up to `number`. None: the ledger lacks something."""
        counted: list[Counted] = []
        for at in sorted(at for at in self._queue if at <= number):
            ours = self._driver.sets.counted(at, self._queue[at].contributions)
            if ours is None:
                return None
            counted += ours
        return tuple(counted)

    def _offers(self) -> list[SnapshotOffer]:
        """Snapshots that live members offer, newest first."""
        found = [
            SnapshotOffer(peer, Digest(lease.snapshot), Round(lease.snapshot_round))
            for peer, (lease, _) in self._net.leases().items()
            if lease.snapshot and lease.snapshot_round >= 0
        ]
        return sorted(found, key=lambda offer: -offer.round)

    def _snapshot_path(self, number: Round) -> Path:
        """Where the worker writes a snapshot before it becomes a blob."""
        return self._spool / f"snapshot-{number}.safetensors"

    def _keep_snapshot(self, path: Path) -> Digest:
        """Take a snapshot into the blob store."""
        blob = self._net.add_blob(path, move=True)
        with disk(path):
            path.unlink(missing_ok=True)
        return blob

    async def _fetch_snapshot(self, offer: SnapshotOffer) -> Path:
        """A snapshot from whoever offers it."""
        async with asyncio.timeout(SNAPSHOT_S):
            holders = whom_to_ask(offer.peer, self._net)
            return await self._net.fetch_blob(offer.blob, holders, snapshot_max_bytes(self._driver.spec))


def _divergence(action: FinalizeRound, ours: Digest) -> Divergence:
    return Divergence(
        f"round {action.round}: our fold gives {ours.hex()[:8]}, the final state is {action.state.hex()[:8]}",
        hint="remove the run's state folder in this home; a new start fetches a snapshot",
    )
