"""The worker's requests about a set that is folded slice by slice."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
from atoll.node.daemon.core.interfaces import Network, RequestOf
from atoll.node.daemon.core.runtime import FaultGuard, WorkerClient
from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.node.daemon.reduction.row_fetcher import RowFetcher
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.protocols.errors import CorruptFault, DecodeError, Superseded
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.reduction import Claim, Offer
from atoll.protocols.local.worker_messages import Counted, Member, Published, ReduceRequest, Slice
from atoll.protocols.run.arena import Span

A = TypeVar("A")
Parts = tuple[EffectiveSlice, ...]
POLL_S = 0.2
"""Seconds between two looks whether everything that a request needs is on disk."""


@dataclass(frozen=True, slots=True)
class SliceStore:
    """The rows and Reductions on this node's disk, as the worker reads them."""

    net: Network
    ledger: ReductionLedger
    payloads: PayloadFetcher
    rows: RowFetcher

    def is_available(self, part: EffectiveSlice) -> bool:
        """Return whether everything that counts in a slice is on disk."""
        reduced = part.reduced is None or self.payloads.is_held(part.reduced.body)
        return reduced and all(self.rows.store.has(offer.entry, part.span) for offer in part.raw)

    def slice_of(self, part: EffectiveSlice) -> Slice:
        """Return what counts in a slice as the worker's fold reads it."""
        return Slice(
            span=part.span,
            reduced=(self._reduction(part.reduced, part.weight),) if part.reduced is not None else (),
            raw=tuple(self.raw_member(offer, part.span) for offer in part.raw),
            ours=self.ledger.has_ours(part),
        )

    def raw_member(self, offer: Offer, span: Span) -> Member:
        """Return a contribution's rows as the worker reads them."""
        payload = self.ledger.contribution(offer.entry).payload
        path = str(self.rows.store.path(offer.entry, span))
        return Member(entry=offer.entry, author=offer.author, weight=offer.weight, payload=payload, path=path)

    def reduce_request(
        self, number: Round, span: Span, offers: Sequence[Offer], before: Claim | None
    ) -> ReduceRequest:
        """Return what makes our Reduction of a round, which continues the one before."""
        return ReduceRequest(
            round=number,
            span=span,
            raw=tuple(self.raw_member(offer, span) for offer in offers),
            roots=tuple(self.ledger.contribution(offer.entry).rows for offer in offers),
            previous=before.body.round if before else -1,
        )

    def published(self, first: int) -> tuple[Published, ...]:
        """Return our Reductions from round `first` on, the newest first, if what they were made of is here."""
        claims = self.ledger.claims
        mine = [one for one in claims.values() if one.author == self.ledger.me and one.body.round >= first]
        found = []
        for claim in sorted(mine, key=lambda claim: claim.body.round, reverse=True):
            body, offers, before = claim.body, self.ledger.covered(claim), claims.get(Digest(claim.body.previous))
            is_here = offers and self.net.has_blob(body.payload) and bool(body.previous) == (before is not None)
            if is_here and all(self.rows.has(offer, body.span) for offer in offers):
                ask = self.reduce_request(body.round, body.span, offers, before)
                path = str(self.net.blob_path(body.payload))
                found.append(Published(ask, path, body.kept, before.body.kept if before else b""))
        return tuple(found)

    def _reduction(self, claim: Claim, weight: int) -> Member:
        payload = claim.body.payload
        path = str(self.net.blob_path(payload))
        return Member(entry=claim.entry, author=claim.author, weight=weight, payload=payload, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedSet:
    """One set of contributions and Reductions of a reduced round. Implements `SlicedSet`: see there."""

    number: Round
    names: tuple[Digest, ...]
    parts_of: Callable[[Round, tuple[Digest, ...]], Parts | None]
    """Returns what counts in each slice; None while the ledger lacks something that a Reduction covers."""
    fetch_part: Callable[[Round, EffectiveSlice], None]
    """Starts fetching what a slice lacks."""
    store: SliceStore
    worker: WorkerClient
    guard: FaultGuard
    log: RoundLog
    applied: Callable[[], Round]

    def is_available(self) -> bool:
        return self._slices() is not None

    def fetch(self) -> None:
        parts = self.parts_of(self.number, self.names)
        if parts is None:
            unknown = self.store.ledger.unknown_members(self.names)
            self.store.net.fetch_orphans(self.number, unknown, covered=True)
            self.store.net.sync_soon()
        for part in parts or ():
            self.fetch_part(self.number, part)

    def counted(self) -> tuple[Counted, ...] | None:
        ledger = self.store.ledger
        claims = [ledger.claims[name] for name in self.names if name in ledger.claims]
        reduced = [Counted(one.body.payload, (), self.number) for one in claims if one.author == ledger.me]
        mine = [offer.entry for offer in ledger.offers(self.number) if offer.author == ledger.me]
        if not mine:
            return tuple(reduced)
        parts = ledger.parts(self.number, self.names)
        if parts is None:
            return None
        # Our rows may count in a slice raw or inside somebody's Reduction; both are spent, so neither goes back
        # into the error feedback.
        spans = tuple(part.span for part in parts if ledger.has_ours(part))
        return (*(Counted(ledger.contribution(entry).payload, spans, self.number) for entry in mine), *reduced)

    async def ask(self, request_of: RequestOf, kind: type[A]) -> A:
        life = self.worker.lives
        while True:
            slices = self._slices()
            if slices is not None:
                try:
                    return await self.worker.ask_until_saved(request_of((), slices), kind)
                except (DecodeError, CorruptFault) as error:
                    self.log.event("slices_damaged", round=self.number, error=error.line())
                    self._drop_damaged()
            self.fetch()
            await asyncio.sleep(POLL_S)
            self.worker.check_life(life)
            if self.number <= self.applied():
                raise Superseded(f"round {self.number} is final already")

    def _slices(self) -> tuple[Slice, ...] | None:
        """Return the set as the worker reads it; None while not all is here."""
        parts = self.parts_of(self.number, self.names)
        if not parts or not all(map(self.store.is_available, parts)):
            return None
        return tuple(map(self.store.slice_of, parts))

    def _drop_damaged(self) -> None:
        """Delete all of the set. The worker does not say which file is damaged, so all are fetched again."""
        for part in self.store.ledger.parts(self.number, self.names) or ():
            for offer in part.raw:
                self.store.rows.store.drop(offer.entry, part.span)
            if part.reduced is not None:
                self.guard.delete_blob(part.reduced.body.payload)
