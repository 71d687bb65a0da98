"""Ledger sync: anti-entropy between two ledgers over one call, `ledger.sync`, which either side may make.

1. we send our vector (at first without entries)   2. the peer adds our entries and answers with its vector and the
entries that we lack   3. we add those and send the entries that it lacks   4. we repeat this until both are equal

It is safe to cancel at any point: inserting is idempotent and every batch is whole.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.exchange.floors import FloorCheck
from atoll.p2p.ledger.insertion import Equivocation, InsertResult
from atoll.p2p.ledger.proofs import OFFERED
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.errors import DecodeError, PeerFault
from atoll.protocols.ids import PeerId, short
from atoll.protocols.ledger.records import Entry, decode_entry, decode_unverified

log = logging.getLogger(__name__)

METHOD = "ledger.sync"
BATCH_BYTES = 256 * 1024
MESSAGE_BYTES = BATCH_BYTES + 512 * 1024
"""Largest message, in bytes: a batch, a vector of all places, the names of equivocators and a proof or two."""
_LITTLE_BYTES = BATCH_BYTES // 8
"""A batch for a peer that has long stretches of more authors for us than we have for it: about 90 entries."""
_STRETCH = 16
"""Entries of one author that are no news of the moment: those of some four rounds."""
_FOR_PROOFS = 16
"""An exchange that so many messages brought nothing goes on for no proof: the next one brings more of them."""
_MAX_AUTHORS = 4096
_REFUSAL_CHARACTERS = 200
_MAX_ENTRIES = 2048
"""Most entries of a batch: the smallest has about 200 bytes."""
_VERIFIED_PER_TURN = 32
"""Number of signatures verified before other tasks run: about 3 ms."""

OnExchanged = Callable[[PeerId, InsertResult], None]
Vector: TypeAlias = Annotated[dict[PeerId, Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=_MAX_AUTHORS)]


class Exchange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of one side, and a batch of entries that the other side lacks."""

    wanted: Vector
    """Next sequence number wanted, by author."""
    closed: bool
    """Whether this side accepts no authors that `wanted` does not name."""
    forked: Annotated[tuple[PeerId, ...], Meta(max_length=_MAX_AUTHORS)]
    """Authors whose equivocation this side can prove: all, or so many that follow each other by name."""
    entries: Annotated[tuple[bytes, ...], Meta(max_length=_MAX_ENTRIES)]
    proofs: Annotated[tuple[tuple[bytes, bytes], ...], Meta(max_length=OFFERED)]
    refusal: Annotated[str, Meta(max_length=_REFUSAL_CHARACTERS)] = ""
    """Reason why this side refuses the other's own entries; empty if it does not, or the other never tried."""


@dataclass(eq=False)
class LedgerSync:
    """Exchanges entries of one ledger with peers."""

    ledger: Ledger
    calls: Calls
    on_exchanged: OnExchanged
    """Receives the sender and what its entries changed, if they did."""
    on_fault: Callable[[PeerId, PeerFault], None]
    on_told: Callable[[PeerId, "Exchange"], None] = lambda peer, message: None
    """Receives every message of an exchange: it says whether the peer stores what is ours."""
    on_answer: Callable[[PeerId, int], None] = lambda peer, moved_bytes: None
    """Receives who answered one of our calls, and the bytes of entries in both ways."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    """Chooses which proofs are named and offered where there are too many for one message."""

    def __post_init__(self) -> None:
        self.calls.register(METHOD, Exchange, Exchange, self._answer, max_bytes=MESSAGE_BYTES)
        self._verified: dict[bytes, Entry] = {}
        """Entries of batches that are being verified, by their bytes; none of these is stored yet."""
        self._floors = FloorCheck(self.ledger, self.calls)
        self._floors.register()

    async def exchange(self, peer: PeerId) -> int:
        """Bring both ledgers to their union; return the number of entries that were new to us.

        Raises Unreachable, PeerFault, RunMismatch, DiskFault; RecordsGone where the peer has more of a feed, but
        not what comes next here. The caller owns the deadline.
        """
        gained = in_vain = 0
        theirs: Exchange | None = None
        while True:
            ours = self._state(theirs, peer)
            before, theirs = theirs, await self.calls.call(peer, METHOD, ours, Exchange, max_bytes=MESSAGE_BYTES)
            self.on_answer(peer, sum(map(len, (*ours.entries, *theirs.entries))))
            fresh = await self._insert(peer, theirs)
            gained += fresh
            in_vain += not fresh
            is_stuck = before is not None and before.wanted == theirs.wanted
            if not fresh and (is_stuck or not self._has_news_for(theirs, for_proofs=in_vain < _FOR_PROOFS)):
                await self._floors.check(peer, theirs.wanted)
                self.ledger.end_bootstrap(peer)
                return gained

    async def _answer(self, peer: PeerId, theirs: Exchange) -> Exchange:
        await self._insert(peer, theirs)
        return self._state(theirs, peer)

    async def _insert(self, peer: PeerId, message: Exchange) -> int:
        if not message.refusal.isprintable():
            raise DecodeError("a refusal that is not printable")
        self.on_told(peer, message)
        fresh = self.insert(peer, await self.verified(filter(self._is_lacking, message.entries)))
        for first, second in message.proofs:
            self._add_proof(decode_entry(first, self.ledger.run), decode_entry(second, self.ledger.run))
        return fresh

    def _is_lacking(self, data: bytes) -> bool:
        """False for an entry that is here: after a partition several neighbours bring the same thousands.

        To find it costs a tenth of verifying it. Raises DecodeError, SignatureFault.
        """
        return data in self._verified or not self.ledger.holds(decode_unverified(data, self.ledger.run).id)

    def insert(self, peer: PeerId, entries: Iterable[Entry]) -> int:
        """Store verified entries that `peer` sent, and tell what they changed. Returns how many were new."""
        done = self.ledger.insert_all(entries, peer)
        for author, reason in done.refused:
            log.info("not stored: %s (from %s)", reason, short(peer) if peer != author else "itself")
        if done.fresh or done.pruned:
            self.on_exchanged(peer, done)
        for fork in done.forks:
            self._blame(fork)
        return len(done.fresh)

    async def verified(self, signed: Iterable[bytes]) -> list[Entry]:
        """Decode entries and verify their signatures; other tasks have their turns. Raises DecodeError.

        Batches of several peers that have their turns side by side verify what they have in common once.
        """
        entries: list[Entry] = []
        ours: list[bytes] = []
        try:
            for data in signed:
                if data not in self._verified:
                    self._verified[data] = decode_entry(data, self.ledger.run)
                    ours.append(data)
                entries.append(self._verified[data])
                if len(entries) % _VERIFIED_PER_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            for data in ours:  # the caller stores them before any other batch has a turn
                del self._verified[data]
        return entries

    def _add_proof(self, first: Entry, second: Entry) -> None:
        if self.ledger.add_proof(first, second):
            self._blame(Equivocation(first.author, second.seq))

    def _blame(self, fork: Equivocation) -> None:
        self.on_fault(fork.author, fork)

    def _state(self, theirs: Exchange | None, peer: PeerId) -> Exchange:
        ledger = self.ledger
        batch: list[bytes] = []
        proofs: list[tuple[bytes, bytes]] = []
        if theirs is not None:
            most = _LITTLE_BYTES if is_behind(ledger.vector(), theirs.wanted) else BATCH_BYTES
            batch = ledger.missing(theirs.wanted, most, only_known=theirs.closed)
            proofs = ledger.proofs_for(ledger.lacked_proofs(theirs.wanted, theirs.forked), self.rng)
        refusal, newcomers = ledger.refusal(peer)[:_REFUSAL_CHARACTERS], ledger.newcomers
        is_closed = ledger.is_closed or (newcomers is not None and newcomers.is_spent(peer))
        wanted, forked = ledger.wanted(_MAX_AUTHORS), ledger.named_equivocators(self.rng)
        return Exchange(wanted, is_closed, forked, tuple(batch), tuple(proofs), refusal)

    def _has_news_for(self, theirs: Exchange, *, for_proofs: bool) -> bool:
        return bool(
            self.ledger.missing(theirs.wanted, 1, only_known=theirs.closed)
            or (for_proofs and self.ledger.lacked_proofs(theirs.wanted, theirs.forked))
        )


def is_behind(ours: Mapping[PeerId, int], theirs: Mapping[PeerId, int]) -> bool:
    """Whether the other side has long stretches of half as many authors more for us than we have for it.

    After a partition the smaller side takes first, and then gives: else all nodes of the larger one verify what
    it has before they bring it what it lacks. Who only says so gets our entries in smaller batches. Only authors
    that both know count: strangers at one of them are no side.
    """
    known = ((at, theirs[author]) for author, at in ours.items() if theirs.get(author, CLOSED) < CLOSED)
    more = [there - here for here, there in known]
    lacked, lacking = sum(each > _STRETCH for each in more), sum(each < -_STRETCH for each in more)
    return lacked > 0 and 2 * lacked >= 3 * lacking
