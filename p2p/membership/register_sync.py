"""Pulls the live registers that a peer has and this node lacks, so that a newcomer knows all leases.

This node sends the (epoch, seq) that it knows of each author and key, the peer answers with newer live registers
and their ages, and this repeats while there is more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import MAX_TTL_S, Ordinal, Register

METHOD = "registers.pull"
BATCH_BYTES = 256 * 1024
MESSAGE_BYTES = BATCH_BYTES + 512 * 1024
_MAX_PULLS = 64
_MAX_NAMED = 8000
"""Most versions that one request names; each has 90 bytes at most. Of what it does not name too much comes."""
_Version: TypeAlias = tuple[PeerId, Annotated[str, Meta(max_length=16)], Ordinal, Ordinal]
_Aged: TypeAlias = tuple[Annotated[float, Meta(ge=0, le=MAX_TTL_S)], bytes]


class KnownVersions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request: the newest (epoch, seq) that the sender knows, by author and key."""

    newest: Annotated[tuple[_Version, ...], Meta(max_length=1 << 14)]


class RegisterBatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer: newer registers, each as (age in seconds, bytes)."""

    held: Annotated[tuple[_Aged, ...], Meta(max_length=1 << 11)]


@dataclass(eq=False)
class RegisterSync:
    """Pulls registers into one store, and answers pulls of peers."""

    registers: RegisterStore
    calls: Calls
    now: Callable[[], float]
    on_news: Callable[[list[tuple[Register, bytes]]], None]
    """Receives registers that a pull brought, with their bytes."""
    on_answer: Callable[[PeerId, int], None] = lambda peer, moved_bytes: None
    """Receives who answered one of our calls, and the bytes of registers that came."""

    def __post_init__(self) -> None:
        self.calls.register(METHOD, KnownVersions, RegisterBatch, self._answer, max_bytes=MESSAGE_BYTES)

    async def pull(self, peer: PeerId) -> int:
        """Pull registers from `peer`; return the number of those that were news.

        Raises Unreachable, PeerFault, RunMismatch. The caller owns the deadline.
        """
        gained = 0
        for _ in range(_MAX_PULLS):
            batch = await self.calls.call(peer, METHOD, self._known(), RegisterBatch, max_bytes=MESSAGE_BYTES)
            self.on_answer(peer, sum(len(data) for _, data in batch.held))
            news: list[tuple[Register, bytes]] = []
            try:
                for age_s, data in batch.held:
                    if (register := self.registers.merge(data, self.now(), age_s)) is not None:
                        news.append((register, data))
            finally:  # also of a batch whose end is illegal: what is stored is news only once
                if news:
                    self.on_news(news)
            if not news:
                break
            gained += len(news)
        return gained

    def _known(self) -> KnownVersions:
        newest = list(self.registers.versions().items())[-_MAX_NAMED:]
        return KnownVersions(tuple((author, key, *at) for (author, key), at in sorted(newest)))

    async def _answer(self, peer: PeerId, request: KnownVersions) -> RegisterBatch:
        known = {(author, key): (epoch, seq) for author, key, epoch, seq in request.newest}
        found = self.registers.missing(known, self.now(), BATCH_BYTES)
        # Also one that has expired: a home that was restored lost the count of its starts, and continues above it.
        return RegisterBatch((*found, *self.registers.newest_of(peer, known)))
