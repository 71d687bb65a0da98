"""Begins with a summary that the run's voters certified, where no peer has the records of the first rounds.

The peers that are connected are asked in turn, each for its chain of links. The newest summary that is proven is
taken, with the records that it names, and stored in one transaction. Then the driver is built anew, and replays
what is stored: from there on the node is like any node that cut its own ledger.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.node.daemon.certificates.full_summary import FullSummary
from atoll.node.daemon.certificates.links import after, check_link, check_summary, owner_of
from atoll.p2p.exchange.summaries import MAX_LINKS, SummaryExchange
from atoll.p2p.ledger.history import Cut, StoredLink
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols.errors import DecodeError, DiskFault, LocalFault, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, short
from atoll.protocols.ledger.records import Entry
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

CHAIN_MAX_BYTES = 1 << 26
"""Largest chain of one peer, in bytes: every link of it comes with its summary."""
LINKS_S = 60.0
"""Deadline of one peer's chain, in seconds."""
RECORDS_S = 120.0
"""Deadline of the records that a summary names."""


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

    async def bring(self) -> int | None:
        """The newest round of the summary that is stored now; None where no peer has one that helps."""
        asked = [await self._offer_of(peer) for peer in list(self.neighbours())]
        offers = [offer for offer in asked if offer is not None]
        # Of an old summary the records after it may be gone elsewhere: the newest is the best.
        for offer in sorted(offers, key=lambda offer: -offer.full.summary.round):
            try:
                async with asyncio.timeout(RECORDS_S):
                    entries = await self._records(offer)
                self._store(offer, entries)
            except (Unreachable, PeerFault, TimeoutError, DiskFault) as error:
                self._report(offer.peer, error)
            else:
                return offer.full.summary.round
        return None

    async def _offer_of(self, peer: PeerId) -> _Offer | None:
        try:
            async with asyncio.timeout(LINKS_S):
                return await self._chain_of(peer)
        except (Unreachable, PeerFault, LocalFault, TimeoutError) as error:
            self._report(peer, error)
            return None

    async def _chain_of(self, peer: PeerId) -> _Offer | None:
        """What a peer's chain of links proves, if that is newer than what this node knows."""
        trusted, full = owner_of(self.spec), None
        links: tuple[StoredLink, ...] = ()
        size_bytes = 0
        while len(links) < MAX_LINKS and (link := await self.exchange.link(peer, len(links))) is not None:
            certified = check_link(self.spec, link, trusted)
            data = await self.exchange.summary(peer, certified.name)
            size_bytes += len(data)
            if size_bytes > CHAIN_MAX_BYTES:
                raise DecodeError("a chain of summaries that is too large")
            full = check_summary(self.spec, certified, data)
            trusted, links = after(full), (*links, StoredLink(link, certified.name, data))
        is_newer = full is not None and full.summary.round > self.last_final()
        return _Offer(peer, full, links) if full is not None and is_newer else None

    async def _records(self, offer: _Offer) -> list[Entry]:
        """The records below the floors and the floors themselves, each author's in order."""
        wanted: dict[Digest, PeerId] = {
            name: floor.author for floor in offer.full.floors for name in (*floor.records, floor.entry)
        }
        found = await self.exchange.records(offer.peer, wanted)
        if any(found[name].author != author for name, author in wanted.items()):
            raise DecodeError("a summary that takes records for those of another author")
        return [found[name] for name in wanted]

    def _store(self, offer: _Offer, entries: list[Entry]) -> None:
        summary, last = offer.full.summary, offer.links[-1]
        cut = Cut(last.summary, summary.round, summary.forks, offer.full.places, offer.links)
        self.ledger.cut(cut, entries)
        log.warning("this node begins with the certified summary of rounds 0 to %d", summary.round)

    def _report(self, peer: PeerId, error: Exception) -> None:
        log.info("no summary from %s: %s", short(peer), error)
        if isinstance(error, PeerFault):
            self.on_fault(peer, error)


def fetcher_of(spec: RunSpec, swarm: Swarm, last_final: Callable[[], int]) -> SummaryFetcher:
    """The fetcher of a node in this swarm."""
    exchange = swarm.replication.summaries
    return SummaryFetcher(spec, swarm.ledger, exchange, swarm.neighbours, last_final, swarm.blame)


async def begin_with_summary(fetcher: SummaryFetcher, begin_again: Callable[[], None]) -> None:
    """Begin anew with a certified summary, and do not return; return where no peer has one that helps."""
    if await fetcher.bring() is not None:
        begin_again()
        await asyncio.Event().wait()
