"""Transfers the optimizer moments of experts that change their holder.

The node that gives an expert up offers its moments as a blob, in its register `holding`, for some rounds. The node
that gets the expert looks for such an offer for as long, and its worker adds the moments to its own
(`Inner.continue_from`). Nobody waits for the transfer: without an offer, as after a death, moments start fresh.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.node.daemon.core.runtime import FaultGuard, WorkerClient
from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.protocols.errors import AtollError, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.local.worker_messages import InheritReply, InheritRequest, ReleasedMoments
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.moments import MAX_OFFERED, moments_bytes

log = logging.getLogger(__name__)

ROUNDS = 3
"""Rounds for which moments are offered and looked for. The optimizer has forgotten older ones anyway."""
ATTEMPT_S = 600.0
REST_S = 2.0
"""Seconds before a worker that has not come to the round that needs the moments is asked again."""


@dataclass(kw_only=True)
class MomentTransfer:
    """Offers the moments of experts that left this node, and fetches those of experts that came: one at a time."""

    context: RunContext
    net: Network
    worker: WorkerClient
    guard: FaultGuard
    assignment: ExpertAssignment
    round_now: Callable[[], int]
    """Returns the round that this node works on."""
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    _offers: dict[int, tuple[Digest, int]] = field(default_factory=dict)
    """By expert: the blob, and the round in which the expert was given up."""
    _wanted: dict[int, int] = field(default_factory=dict)
    """Experts that came, and the round in which they did."""
    _tried: set[Digest] = field(default_factory=set)
    """Offers that need no further attempt."""
    _fetched: set[Digest] = field(default_factory=set)
    """Blobs that were fetched for the transfer alone."""
    _busy: bool = False
    _retry_at: float = 0.0

    @property
    def _size(self) -> int:
        spec = self.context.spec
        return moments_bytes(spec.model, spec.inner.optimizer)

    def drop_old(self, needed: set[Digest]) -> None:
        """Delete what an earlier life of this node offered or fetched, except `needed`. All have one size."""
        size = self._size
        if size:
            found = set(self.net.blobs_above(size - 1)).difference(self.net.blobs_above(size))
            for blob in found - needed - self.context.kept:
                self.guard.delete_blob(blob)

    def on_assigned(self, before: bytes, now: bytes) -> None:
        """From this round on the node trains the experts `now` in place of `before` (bitmaps)."""
        if now == before:
            return
        old, new = (experts_in(bitmap, self.context.spec.model.expert_count) for bitmap in (before, now))
        self._wanted = {expert: at for expert, at in self._wanted.items() if expert in new}
        self._wanted.update(dict.fromkeys(new - old, self.round_now()))

    def offer(self, released: tuple[ReleasedMoments, ...]) -> None:
        """Offer the moments that the worker gave up in this round."""
        try:
            for one in released[: MAX_OFFERED - len(self._offers)]:
                self._withdraw(one.expert)
                self._offers[one.expert] = self.net.add_blob(Path(one.path)), self.round_now()
        except DiskFault as error:
            self.guard.on_disk_fault(error)
        if released:
            self._publish()

    def step(self) -> None:
        """Start what can be done now. Harmless at any time."""
        self._forget(self.round_now())
        is_free = not self._busy and self.worker.is_ready and self.context.now() >= self._retry_at
        found = self._next_offer() if self._wanted and is_free else None
        if found is not None:
            self._busy = True
            expert, peer, blob = found
            self.start_task(self._transfer(expert, peer, blob), f"moments {expert}")

    def _next_offer(self) -> tuple[int, PeerId, Digest] | None:
        for peer, holding in sorted(self.net.holdings().items()):
            for expert, blob in holding.moments:
                if expert in self._wanted and Digest(blob) not in self._tried:
                    return expert, peer, Digest(blob)
        return None

    async def _transfer(self, expert: int, peer: PeerId, blob: Digest) -> None:
        try:
            if await self._is_used(expert, peer, blob):
                self._wanted.pop(expert, None)
                self.context.log.event("inherited", expert=expert, peer=peer)
                self._tried.add(blob)
            else:
                self._retry_at = self.context.now() + REST_S
            return
        except DecodeError as error:
            self.guard.blame(peer, error)
        except DiskFault as error:
            self.guard.on_disk_fault(error)
        except (AtollError, TimeoutError) as error:
            log.debug("moments of expert %d: %s", expert, error)
        finally:
            self._busy = False
        self._tried.add(blob)

    async def _is_used(self, expert: int, peer: PeerId, blob: Digest) -> bool:
        """Return False if the worker has not come to the round that needs it. Raises AtollError, TimeoutError."""
        if blob not in self._fetched:
            if self.net.has_blob(blob):  # it has another use, and must not be deleted with this one
                raise AtollError("what is offered as moments is another blob of the run")
            async with asyncio.timeout(ATTEMPT_S):
                await self.net.fetch_blob(blob, [peer], self._size)
            self._fetched.add(blob)
        return (await self.worker.ask(InheritRequest(expert, str(self.net.blob_path(blob))), InheritReply)).used

    def _forget(self, number: int) -> None:
        self._wanted = {expert: at for expert, at in self._wanted.items() if number < at + ROUNDS}
        if not self._busy:
            for blob in self._fetched & self._tried if self._wanted else self._fetched.copy():
                self._fetched.discard(blob)
                self.guard.delete_blob(blob)
        if not self._wanted:
            self._tried.clear()
        old = [expert for expert, (_, at) in self._offers.items() if number >= at + ROUNDS]
        for expert in old:
            self._withdraw(expert)
        if old:
            self._publish()

    def _withdraw(self, expert: int) -> None:
        if expert in self._offers:
            blob, _ = self._offers.pop(expert)
            self.guard.delete_blob(blob)

    def _publish(self) -> None:
        offers = sorted((expert, blob) for expert, (blob, _) in self._offers.items())
        self.assignment.offered_moments = tuple(offers)
        self.assignment.publish()
