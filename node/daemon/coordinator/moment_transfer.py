"""Moments of experts that change their holder: from whoever gives one up to whoever takes it.

Who gives an expert up offers its moments as a blob, in its register `holding`, for some rounds; who takes one
looks for such an offer for as long and adds what it gets to its own moments (`Inner.continue_from`). Nobody waits
for it: without an offer, as after a death, moments start fresh.
"""

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.node.daemon.coordinator.interfaces import Network
from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.local.worker_messages import InheritReply, InheritRequest, ReleasedMoments
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.moments import MAX_OFFERED, moments_bytes

if TYPE_CHECKING:
    from atoll.node.daemon.coordinator.driver import Driver

log = logging.getLogger(__name__)

ROUNDS = 3
"""So long moments are offered and looked for. What is older has been forgotten by the optimiser anyway."""
ATTEMPT_S = 600.0
REST_S = 2.0
"""A worker that has not come to the round that takes them is asked again after so long."""


class Handover:
    """One download at a time."""

    def __init__(self, driver: "Driver", net: Network) -> None:
        self._driver, self._net = driver, net
        self._offers: dict[int, tuple[Digest, int]] = {}
        """By expert: the blob, and the round in which it was given up."""
        self._wanted: dict[int, int] = {}
        """Experts that came, and the round in which they did."""
        self._tried: set[Digest] = set()
        """Offers that led to nothing more."""
        self._fetched: set[Digest] = set()
        """Blobs that are here for this alone."""
        self._busy = False
        self._again_at = 0.0

    def drop_old(self) -> None:
        """Delete what an earlier life of this node offered or fetched. All such files have one size."""
        size = moments_bytes(self._driver.spec.model)
        if size:
            found = set(self._net.blobs_above(size - 1)).difference(self._net.blobs_above(size))
            for blob in found - self._driver.contributions.payloads() - set(self._driver.spec.given):
                self._driver.delete_blob(blob)

    def taken(self, before: bytes, now: bytes) -> bytes:
        """In the round at hand we train the experts `now`, no longer those of `before` (bitmaps). Gives `now`."""
        if now != before:
            old, new = (experts_in(bitmap, self._driver.spec.model.expert_count) for bitmap in (before, now))
            self._wanted = {expert: at for expert, at in self._wanted.items() if expert in new}
            self._wanted.update(dict.fromkeys(new - old, self._driver.round.round))
        return now

    def offer(self, parted: tuple[ReleasedMoments, ...]) -> None:
        """The worker gave these up in the round at hand."""
        try:
            for one in parted[: MAX_OFFERED - len(self._offers)]:
                self._withdraw(one.expert)
                self._offers[one.expert] = self._net.add_blob(Path(one.path)), self._driver.round.round
        except DiskFault as error:
            self._driver.disk_trouble(error)
        if parted:
            self._say()

    def step(self) -> None:
        """Start what can be done now. Harmless at any time."""
        number = self._driver.round.round
        self._forget(number)
        is_free = not self._busy and self._driver.worker_ready and self._driver.now() >= self._again_at
        found = self._next() if self._wanted and is_free else None
        if found is not None:
            self._busy = True
            self._driver.start_task(self._bring(*found), f"moments {found[0]}")

    def _next(self) -> tuple[int, PeerId, Digest] | None:
        for peer, holding in sorted(self._net.holdings().items()):
            for expert, blob in holding.moments:
                if expert in self._wanted and Digest(blob) not in self._tried:
                    return expert, peer, Digest(blob)
        return None

    async def _bring(self, expert: int, peer: PeerId, blob: Digest) -> None:
        try:
            if await self._used(expert, peer, blob):
                self._wanted.pop(expert, None)
                self._driver.log.event("inherited", expert=expert, peer=peer)
                self._tried.add(blob)
            else:
                self._again_at = self._driver.now() + REST_S
            return
        except DecodeError as error:
            self._driver.blame(peer, error)
        except DiskFault as error:
            self._driver.disk_trouble(error)
        except (AtollError, TimeoutError) as error:
            log.debug("moments of expert %d: %s", expert, error)
        finally:
            self._busy = False
        self._tried.add(blob)

    async def _used(self, expert: int, peer: PeerId, blob: Digest) -> bool:
        """False where the worker has not come to the round that takes it. Raises AtollError, TimeoutError."""
        if blob not in self._fetched:
            if self._net.has_blob(blob):  # something else's, which must not be deleted with this
                raise AtollError("what is offered as moments is another blob of the run")
            async with asyncio.timeout(ATTEMPT_S):
                await self._net.fetch_blob(blob, [peer], moments_bytes(self._driver.spec.model))
            self._fetched.add(blob)
        return (await self._driver.ask(InheritRequest(expert, str(self._net.blob_path(blob))), InheritReply)).used

    def _forget(self, number: int) -> None:
        self._wanted = {expert: at for expert, at in self._wanted.items() if number < at + ROUNDS}
        if not self._busy:
            for blob in self._fetched & self._tried if self._wanted else self._fetched.copy():
                self._fetched.discard(blob)
                self._driver.delete_blob(blob)
        if not self._wanted:
            self._tried.clear()
        old = [expert for expert, (_, at) in self._offers.items() if number >= at + ROUNDS]
        for expert in old:
            self._withdraw(expert)
        if old:
            self._say()

    def _withdraw(self, expert: int) -> None:
        if expert in self._offers:
            blob, _ = self._offers.pop(expert)
            self._driver.delete_blob(blob)

    def _say(self) -> None:
        self._driver.share.moments = tuple(sorted((e, bytes(blob)) for e, (blob, _) in self._offers.items()))
        self._driver.share.say()
