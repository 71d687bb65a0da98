"""Which feeds a peer has from a floor on only: a node that lacks what is below cannot go on with that peer's help.

A peer that cut its ledger offers nothing of a feed to who has not reached its floor. Who gets nothing, while the
peer says that it has more, asks for the floors with one call, `ledger.floors`. Such an exchange is no whole one:
this node does not know what others know, and above all it may not know its own newest entries.
"""

import heapq
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import PeerId, short
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, decode_entry, encode_entry

METHOD = "ledger.floors"
_MAX_AUTHORS = 4096
MESSAGE_BYTES = 256 * 1024 + ENTRY_MAX_BYTES
"""Largest message, in bytes: a floor for each author, and one entry."""

Floors: TypeAlias = Annotated[dict[PeerId, Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=_MAX_AUTHORS)]


class FloorsQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks for the floors of all feeds of a ledger."""


class FeedFloors(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The floors of one ledger."""

    floors: Floors
    """First sequence number of each cut feed from which on its entries are here."""
    own: Annotated[tuple[bytes, ...], Meta(max_length=1)] = ()
    """The newest entry of who asks, if there is one: its own signature says how long its feed is."""


class RecordsGone(Unreachable):
    """A peer has entries that follow some which neither it nor this node has."""

    def __init__(self, peer: PeerId, own_entries: int) -> None:
        super().__init__(
            f"{short(peer)} keeps recent records only, and this node lacks older ones; "
            "it needs a peer that keeps all (ledger_history)"
        )
        self.peer = peer
        """Who says so."""
        self.own_entries = own_entries
        """Entries that this node's own feed has at least, which it proved itself; 0: nothing is known of that."""


@dataclass(frozen=True, slots=True)
class FloorCheck:
    """Asks peers for their floors, and answers them."""

    ledger: Ledger
    calls: Calls

    def register(self) -> None:
        """Answer others from now on."""
        self.calls.register(METHOD, FloorsQuery, FeedFloors, self._answer, max_bytes=MESSAGE_BYTES)

    async def check(self, peer: PeerId, theirs: dict[PeerId, int]) -> None:
        """Raise RecordsGone if `peer`, whose vector is `theirs`, has more of a feed that cannot go on here.

        Also raises what `Calls.call` raises, DecodeError, SignatureFault.
        """
        ours, me = self.ledger.wanted(), self.calls.me
        lacking = {
            author: ours.get(author, 0)
            for author, there in theirs.items()
            if ours.get(author, 0) < there < CLOSED and self._counts(author)
        }
        if not lacking:
            return
        found = await self.calls.call(peer, METHOD, FloorsQuery(), FeedFloors, max_bytes=MESSAGE_BYTES)
        if all(at >= found.floors.get(author, 0) for author, at in lacking.items()):
            return
        own = [decode_entry(data, self.ledger.run) for data in found.own]
        if any(entry.author != me for entry in own):
            raise DecodeError("floors: an entry of somebody else")
        raise RecordsGone(peer, max((entry.seq + 1 for entry in own), default=0))

    def _counts(self, author: PeerId) -> bool:
        # Of authors that no final set names a ledger may lack what others have: the budget of newcomers says so.
        # Before the replay is over nobody is known. A stranger that is in the way then costs ALONE_S at most.
        newcomers = self.ledger.newcomers
        if newcomers is None or newcomers.is_replaying or author == self.calls.me:
            return True
        return newcomers.is_accepted(author)

    async def _answer(self, peer: PeerId, query: FloorsQuery) -> FeedFloors:
        head, floors = self.ledger.head(peer), self.ledger.history.floors
        # Those that rest may be any number, and names can be made to be the first. Who asks must know its own.
        resting = self.ledger.resting
        first = heapq.nsmallest(
            _MAX_AUTHORS, floors, key=lambda author: (author != peer, author in resting, author)
        )
        found = {author: floors[author] for author in first}
        return FeedFloors(found, () if head is None else (encode_entry(head),))
