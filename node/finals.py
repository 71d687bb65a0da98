"""Bringing the worker's Θ_final up to the newest final round: payload by payload, or by a snapshot.

Finalize actions queue up here in the order of the rounds (after a restart or for a newcomer: all of them).
Each is applied when its payloads are held. When they are not and a live member offers a snapshot
of a round in the queue, the snapshot is fetched instead; its state digest must be the one that the final
round's certificate names.
"""

from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll.node.finality_words as fin
import atoll.node.round_words as rnd
from atoll.protocols import worker as w
from atoll.protocols.errors import Divergence, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, Round

if TYPE_CHECKING:
    from atoll.node.driver import Driver

SNAPSHOT_EVERY = 5
"""Final rounds between two snapshots of our own."""
REMEMBERED = 64
"""Applied rounds that a worker may have to apply again: it saves a final round with the next trained one."""
RETRY_S = 5.0
"""Rest before a snapshot that could not be fetched is tried again."""


@dataclass(frozen=True, slots=True)
class SnapshotOffer:
    """A live member holds Θ_final(round) as this blob."""

    peer: PeerId
    blob: Digest
    round: Round


class Finals:
    """Applies final rounds in order. All of its work goes on in one task at a time."""

    def __init__(self, driver: "Driver") -> None:
        self._driver = driver
        self._queue: dict[int, fin.Finalize] = {}
        self.applied = Round(-1)
        self.offer: SnapshotOffer | None = None
        self._older: SnapshotOffer | None = None
        self._done: dict[int, fin.Finalize] = {}
        self._busy = False
        self._announced = False
        self._try_after: dict[Digest, float] = {}

    @property
    def newest(self) -> int:
        """Newest round that is known to be final."""
        return max(self._queue, default=self.applied)

    def add(self, action: fin.Finalize) -> None:
        """A round became final."""
        if action.round <= self.applied:
            self._driver.finalized(action)
            return
        self._queue[action.round] = action
        self.step()

    def worker_started(self, final: Round) -> None:
        """A fresh worker holds Θ_final(final)."""
        self._announced = False
        self._advance_to(final)
        self._queue |= {number: done for number, done in self._done.items() if number > final}
        self.applied = final
        self._driver.feed_finality(fin.Finalized(final))
        self.step()

    def step(self) -> None:
        """Start whatever can be done next. Harmless at any time."""
        if self._busy or not self._driver.worker_ready or not self._driver.synced:
            return
        action = self._queue.get(self.applied + 1)
        if action is None:
            self._go_on()
            return
        known = self._driver.known(action.contributions)
        complete = len(known) == len(action.contributions) and all(one.held for one in known)
        offer = None if complete else self._best_offer()
        if complete:
            self._begin(self._apply(action), f"finalize {action.round}")
        elif offer is not None:
            self._begin(self._adopt(offer, self._queue[offer.round].state), f"adopt {offer.round}")
        else:
            self._driver.want_all(known)

    def _go_on(self) -> None:
        if not self._announced:
            self._announced = True
            self._driver.ready(self.applied)

    def _best_offer(self) -> SnapshotOffer | None:
        now = self._driver.now()
        for offer in self._driver.offers():
            if offer.round in self._queue and self._try_after.get(offer.blob, now) <= now:
                return offer
        return None

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._busy = True
        self._driver.start_task(self._alone(work), name)

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._busy = False
        self._driver.post(self.step)

    async def _apply(self, action: fin.Finalize) -> None:
        members = self._driver.members(self._driver.known(action.contributions))
        done = await self._driver.ask(w.Finalize(action.round, members), w.Finalized)
        if done.state != action.state:
            raise Divergence(
                f"round {action.round}: our fold gives {done.state.hex()[:8]}, the final state is "
                f"{action.state.hex()[:8]}",
                hint="remove the run's state folder in this home; a new start fetches a snapshot",
            )
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
        path = self._driver.snapshot_path(number)
        done = await self._driver.ask(w.Snapshot(str(path)), w.Snapshotted)
        blob = self._driver.keep_snapshot(Path(done.path))
        self._older, self.offer = self.offer, SnapshotOffer(self._driver.me, blob, number)
        if self._older is not None:
            self._driver.drop_payloads(self._older.round)

    async def _adopt(self, offer: SnapshotOffer, state: Digest) -> None:
        driver = self._driver
        driver.feed_round(
            rnd.Behind(f"fetching the model of round {offer.round} from …{offer.peer[-8:]}", driver.now())
        )
        self._announced = False
        try:
            path = await driver.fetch_snapshot(offer)
            await driver.ask(w.Adopt(offer.round, str(path), state, self._ours_up_to(offer.round)), w.Adopted)
        except (Unreachable, PeerFault, TimeoutError) as error:
            self._try_after[offer.blob] = driver.now() + RETRY_S
            driver.log.event("snapshot_failed", peer=offer.peer, round=offer.round, error=str(error))
            if isinstance(error, PeerFault):
                driver.blame(offer.peer, error)
            return
        self._advance_to(offer.round)
        self._older, self.offer = self.offer, SnapshotOffer(driver.me, offer.blob, offer.round)

    def _ours_up_to(self, number: Round) -> tuple[Digest, ...]:
        """Our payloads in the final sets of the queue up to `number`."""
        sets = (self._queue[at].contributions for at in sorted(self._queue) if at <= number)
        ours = (one for entries in sets for one in self._driver.known(entries) if one.author == self._driver.me)
        return tuple(one.payload for one in ours)
