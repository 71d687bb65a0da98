"""Brings what only this node has to a member that stays, and waits until one proves to have it. Bounded.

Members that leave in the same moment must not count on each other. So only a neighbour counts that took this
node's ledger after its last entry, and whose answer held no `Leave` and no lease that says the same: of two
leavers at least the one that asks later sees that the other leaves, and the other one, if it is counted on, sees
it of this one before it ends.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.leaving.holders import LONGEST_S, Lacking, Needs, Stayer, Step, find_lacking, next_step
from atoll.node.daemon.leaving.node_needs import needs_of
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.registers import Lease

logger = logging.getLogger(__name__)

TELL_S = 10.0
"""Deadline of one exchange of ledgers with one neighbour."""
ASK_S = 5.0
"""Deadline of one question whether a neighbour has a blob."""
POLL_S = 0.25
"""Seconds between two looks at the leases, and between two rounds of questions."""
SAID_S = 1.0
"""Seconds before the user reads why the node does not end yet."""


def begin_hand_over(driver: Driver, net: "Neighbours", text: Collection[Digest] = ()) -> "HandOver":
    """Return the last task of a node whose driver has ended, and that wrote its `Leave` if it ever contributed."""
    driver.leases.leave()
    if driver.contributions.newest_own() is None:
        driver.leases.publish()  # nothing else says it: a seeder writes no Leave, nor does who never contributed
    return HandOver(
        needs=needs_of(driver.finality, driver.finalizer, driver.contributions, driver.reducer),
        text=text,
        voters=driver.finality.voters,
        left=tuple(driver.view().left),
        net=net,
        renew_lease=driver.leases.publish_if_due,
        log=driver.context.log,
    )


class Neighbours(Protocol):
    """What a leaving node needs of the swarm; `SwarmNeighbours` implements it."""

    def staying(self, without: Collection[PeerId]) -> dict[PeerId, Lease]:
        """Return the leases of the neighbours that did not leave. `without` did, as far as is known."""

    def neighbours(self) -> list[PeerId]:
        """Return the connected peers."""

    async def tell(self, peer: PeerId) -> bool:
        """Exchange ledgers and leases with a neighbour; return whether all of both went over."""

    async def offers_whole(self, peer: PeerId, blob: Digest) -> bool:
        """Return whether a neighbour offers all of a blob that is here."""

    def blob_bytes_up(self) -> int:
        """Return the bytes of blobs served since the start."""


@dataclass(kw_only=True)
class HandOver:
    """One node's last task."""

    needs: Needs
    text: Collection[Digest]
    """Some of the shards of a packed text that are here."""
    voters: Collection[PeerId]
    """Of the round after `needs.newest`."""
    left: Collection[PeerId]
    """Members that left before, as this node read them."""
    net: Neighbours
    renew_lease: Callable[[], None]
    """Renews the own lease if it is due: others find what this node serves by it."""
    log: RoundLog
    _told: set[PeerId] = field(default_factory=set)
    _holds: dict[PeerId, set[Digest]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> bool:
        """Return when those that stay have everything, or nobody stays. False, with a warning, if they lack some.

        The bounds are those of holders.py. Ends at once when it is cancelled.
        """
        if not self._staying():
            await self._tell_anybody()
            return True
        asking: dict[PeerId, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            try:
                return await self._wait(group, asking)
            finally:
                for task in asking.values():
                    task.cancel()

    async def _wait(self, group: asyncio.TaskGroup, asking: dict[PeerId, asyncio.Task[None]]) -> bool:
        now = asyncio.get_running_loop().time
        began_s = moved_s = now()
        sign, is_said = self._sign(), False
        while staying := self._staying():
            for peer in staying.keys() - asking.keys():
                asking[peer] = group.create_task(self._ask(peer))
            if (newer := self._sign()) != sign:
                sign, moved_s = newer, now()
            lacking = self._lacking(staying)
            step = next_step(lacking, now() - began_s, now() - moved_s)
            if step is not Step.WAIT:
                break
            if not is_said and now() - began_s >= SAID_S:
                is_said = True
                self._say_wait(lacking)
            self.renew_lease()
            await self._rest()
        else:
            return True
        if step is Step.GIVE_UP:
            words = lacking.words(self.needs.newest)
            logger.warning("ends, and nobody else has %s: the others wait for it until this node is back", words)
            self.log.event("handed_over", lacking=words)
        return step is Step.END

    def _say_wait(self, lacking: Lacking) -> None:
        words = lacking.words(self.needs.newest)
        self.log.event("hands_on", round=self.needs.newest, lacking=words)
        logger.warning(
            "nobody else has %s yet: this node ends as soon as a member has it, or in %.0f s; Ctrl-C or SIGTERM "
            "ends it at once, and the others then wait until it is back", words, LONGEST_S,
        )  # fmt: skip

    def _staying(self) -> dict[PeerId, Lease]:
        return self.net.staying(self.left)

    def _lacking(self, staying: Mapping[PeerId, Lease]) -> Lacking:
        stayers = [
            Stayer(lease.final, lease.round, bool(lease.snapshot), peer in self.voters)
            for peer, lease in staying.items()
            if peer in self._told
        ]
        held = self._held(staying)
        return find_lacking(self.needs, stayers, held, lacks_text=not held.issuperset(self.text))

    def _held(self, staying: Collection[PeerId]) -> set[Digest]:
        return set().union(*(self._holds.get(peer, ()) for peer in staying))

    def _sign(self) -> object:
        """What changes when somebody gets what it lacks."""
        staying = self._staying()
        finals = sorted((peer, lease.final, lease.snapshot) for peer, lease in staying.items())
        return finals, len(self._held(staying)), len(self._told), self.net.blob_bytes_up()

    async def _rest(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _ask(self, peer: PeerId) -> None:
        """Tell one neighbour, then ask it for what nobody is known to have, until cancelled."""
        await self._tell_until_told(peer)
        held = self._holds.setdefault(peer, set())
        while True:
            self._changed.set()
            for blob in self._wanted_of(peer):
                if await self._offers(peer, blob):
                    held.add(blob)
            await asyncio.sleep(POLL_S)

    async def _tell_until_told(self, peer: PeerId) -> None:
        pause_s = POLL_S
        while not await self._is_told(peer):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, TELL_S)
        self._told.add(peer)

    def _wanted_of(self, peer: PeerId) -> Iterator[Digest]:
        lease = self._staying().get(peer)
        blobs = self.needs.blobs(lease.final) if lease is not None else ()
        for blob in (*sorted(blobs), *self.text):
            if blob not in self._held(self._staying()):
                yield blob

    async def _is_told(self, peer: PeerId) -> bool:
        try:
            async with asyncio.timeout(TELL_S):
                return await self.net.tell(peer)
        except TimeoutError:
            return False

    async def _offers(self, peer: PeerId, blob: Digest) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                return await self.net.offers_whole(peer, blob)
        except TimeoutError:
            return False

    async def _tell_anybody(self) -> None:
        """Nobody stays. A neighbour that leaves too, or has no lease yet, may be back before this node is."""
        for peer in sorted(self.net.neighbours()):
            if await self._is_told(peer):
                return
