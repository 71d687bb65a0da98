"""Begins with a summary that the run's voters certified, where no peer has the records of the first rounds.

The peers that are connected are asked for their chains of links, AT_ONCE at a time, members first and those that
failed last. The newest summary that is proven soon is taken, with the records that it names, which any peers may
bring, and stored in one transaction. Then the driver is built anew, and replays what is stored: from there on the
node is like any node that cut its own ledger.
"""

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from atoll.node.daemon.certificates.full_summary import FullSummary
from atoll.node.daemon.certificates.links import after, check_link, check_summary, owner_of
from atoll.p2p.exchange.summaries import MAX_LINKS, OnAnswer, SummaryExchange
from atoll.p2p.ledger.history import Cut, StoredLink
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.limits.bounded_table import put_newest
from atoll.p2p.swarm.anti_entropy import ANSWER_S, PacedExchange, end_slowest
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.system.waiting import AnswerDeadline
from atoll.protocols.errors import DecodeError, DiskFault, LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short
from atoll.protocols.ledger.records import Entry
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

CHAIN_MAX_BYTES = 1 << 26
"""Largest chain of one peer, in bytes: every link of it comes with its summary."""
LINKS_S = 60.0
"""Deadline of one peer's chain, in seconds, while answers come."""
RECORDS_S = 120.0
"""Deadline of one peer's records, in seconds, while answers come."""
NEWER_S = 5.0
"""How long a proven summary waits for newer ones, in seconds: any old one is public, so a liar may be first."""
AT_ONCE = 8
PACED_S = 1.0
"""How often one slow chain may end, in seconds."""
_DOUBLED = 3
"""So often ANSWER_S doubles, with each failure of a peer."""
_KEPT = 512
"""Most peers whose failures count."""


@dataclass(frozen=True, slots=True)
class _Offer:
    peer: PeerId
    full: FullSummary
    links: tuple[StoredLink, ...]


@dataclass(frozen=True, slots=True)
class SummaryFetcher:
    """Asks for a certified summary, and stores it."""

    spec: RunSpec
    ledger: Ledger
    exchange: SummaryExchange
    neighbours: Callable[[], Collection[PeerId]]
    last_final: Callable[[], int]
    """The newest round that this node knows to be final."""
    on_fault: Callable[[PeerId, PeerFault], None]

    rank: Callable[[PeerId], int] = lambda peer: 0
    """Who is asked first: members, then authors, then anybody."""
    failed: OrderedDict[PeerId, int] = field(default_factory=OrderedDict)
    """How often each peer failed."""
    running: dict[PeerId, PacedExchange] = field(default_factory=dict)
    """The chains that come now."""

    async def bring(self) -> int | None:
        """The newest round of the summary that is stored now; None where no peer has one that helps."""
        before, offers, proven = dict(self.failed), list[_Offer](), asyncio.Event()
        turns = deque(self._in_turn(self.neighbours()))
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(self._ask(place, turns, offers, proven)) for place in range(AT_ONCE)]
            group.create_task(_end_soon(asking, proven))
            pacing = group.create_task(self._end_slow(turns))
            await asyncio.wait(asking)
            pacing.cancel()
            proven.set()
        # Of an old summary the records after it may be gone elsewhere: the newest is the best.
        for offer in sorted(offers, key=lambda offer: -offer.full.summary.round):
            try:
                self._store(offer, await self._records(offer, before))
            except (PeerFault, Unreachable, DiskFault) as error:
                self._report(offer.peer, error)
            else:
                return offer.full.summary.round
        return None

    def _in_turn(self, peers: Collection[PeerId]) -> list[PeerId]:
        return sorted(peers, key=lambda peer: (self.failed.get(peer, 0), self.rank(peer)))

    async def _end_slow(self, turns: Collection[PeerId]) -> None:
        """End slow chains of peers that are no members, as exchanges, while who failed no more often waits."""
        while True:
            await asyncio.sleep(PACED_S)
            least = min((self.failed.get(peer, 0) for peer in turns), default=math.inf)
            strangers = {peer: one for peer, one in self.running.items() if self.rank(peer) > 0}
            waited_for = (one for peer, one in strangers.items() if self.failed.get(peer, 0) >= least)
            end_slowest(waited_for, asyncio.get_running_loop().time())

    async def _ask(self, place: int, turns: deque[PeerId], offers: list[_Offer], proven: asyncio.Event) -> None:
        # Of those that failed fewer are asked at once: over a slow line no chain of eight would ever be whole.
        while turns and place < AT_ONCE >> self._doublings(turns[0]):
            peer = turns.popleft()
            try:
                if (offer := await self._chain_of(peer)) is not None:
                    offers.append(offer)
                    proven.set()
            except (Unreachable, PeerFault, LocalFault, TimeoutError) as error:
                self._report(peer, error)

    def _deadline(self, peer: PeerId, limit_s: float) -> AnswerDeadline:
        return AnswerDeadline(ANSWER_S * 2.0 ** self._doublings(peer), limit_s)

    def _doublings(self, peer: PeerId) -> int:
        return min(self.failed.get(peer, 0), _DOUBLED)

    async def _chain_of(self, peer: PeerId) -> _Offer | None:
        """What a peer's chain of links proves, if that is newer than what this node knows."""
        deadline = self._deadline(peer, LINKS_S)
        one = PacedExchange(deadline, asyncio.get_running_loop().time(), self._doublings(peer))
        self.running[peer] = one
        try:
            async with deadline:
                full, links = await self._proven(peer, one.heard)
        finally:
            del self.running[peer]
        is_newer = full is not None and full.summary.round > self.last_final()
        return _Offer(peer, full, links) if full is not None and is_newer else None

    async def _proven(self, peer: PeerId, heard: OnAnswer) -> tuple[FullSummary | None, tuple[StoredLink, ...]]:
        """The last summary of a peer's chain, which all links before it prove, and the links."""
        trusted, full = owner_of(self.spec), None
        links: tuple[StoredLink, ...] = ()
        size_bytes = 0
        while len(links) < MAX_LINKS and (link := await self.exchange.link(peer, len(links), heard)) is not None:
            certified = check_link(self.spec, link, trusted)
            data = await self.exchange.summary(peer, certified.name, heard)
            size_bytes += len(data)
            if size_bytes > CHAIN_MAX_BYTES:
                raise DecodeError("a chain of summaries that is too large")
            full = check_summary(self.spec, certified, data)
            trusted, links = after(full), (*links, StoredLink(link, certified.name, data))
        return full, links

    async def _records(self, offer: _Offer, before: dict[PeerId, int]) -> list[Entry]:
        """The records below the floors and the floors themselves, each author's in order.

        Raises DecodeError; Unreachable where no peer that answered (`before`: the failures until then) has all.
        """
        wanted: dict[Digest, PeerId] = {
            name: floor.author for floor in offer.full.floors for name in (*floor.records, floor.entry)
        }
        found: dict[Digest, Entry] = {}
        others = [peer for peer in self._in_turn(self.neighbours()) if peer != offer.peer]
        for peer in (offer.peer, *others):
            if wanted.keys() - found.keys() and self.failed.get(peer, 0) <= before.get(peer, 0):
                await self._records_of(peer, wanted, found)
        if wanted.keys() - found.keys():
            raise Unreachable("no peer has all records that its summary names")
        if any(found[name].author != author for name, author in wanted.items()):
            raise DecodeError("a summary that takes records for those of another author")
        return [found[name] for name in wanted]

    async def _records_of(self, peer: PeerId, wanted: Collection[Digest], found: dict[Digest, Entry]) -> None:
        try:
            async with self._deadline(peer, RECORDS_S) as heard:
                await self.exchange.records(peer, wanted, found, heard)
        except (Unreachable, PeerFault, LocalFault, TimeoutError) as error:
            self._report(peer, error)

    def _store(self, offer: _Offer, entries: list[Entry]) -> None:
        summary, last = offer.full.summary, offer.links[-1]
        cut = Cut(last.summary, summary.round, summary.forks, offer.full.places, offer.links)
        self.ledger.cut(cut, entries)
        log.warning("this node begins with the certified summary of rounds 0 to %d", summary.round)

    def _report(self, peer: PeerId, error: Exception) -> None:
        log.info("no summary from %s: %s", short(peer), error)
        put_newest(self.failed, peer, self.failed.get(peer, 0) + 1, _KEPT)
        if isinstance(error, PeerFault):
            self.on_fault(peer, error)


def fetcher_of(spec: RunSpec, swarm: Swarm, last_final: Callable[[], int]) -> SummaryFetcher:
    """The fetcher of a node in this swarm."""
    exchange = swarm.replication.summaries

    def rank(peer: PeerId) -> int:
        return 0 if swarm.newcomers.is_accepted(peer) else 1 if peer in swarm.ledger.vector() else 2

    return SummaryFetcher(
        spec, swarm.ledger, exchange, swarm.neighbours, last_final, on_fault=swarm.blame, rank=rank
    )


async def _end_soon(asking: Iterable[asyncio.Task[None]], proven: asyncio.Event) -> None:
    await proven.wait()
    await asyncio.wait(asking, timeout=NEWER_S)
    for task in asking:
        task.cancel()


async def begin_with_summary(fetcher: SummaryFetcher, begin_again: Callable[[], None]) -> None:
    """Begin anew with a certified summary, and do not return; return where no peer has one that helps."""
    if await fetcher.bring() is not None:
        begin_again()
        await asyncio.Event().wait()
