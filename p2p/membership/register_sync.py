"""Register sync: pulls the live registers that a peer has and this node lacks, so that a newcomer knows all
leases.

1. we send the (epoch, seq) that we know of each author and key   2. the peer answers with newer live registers and
their ages   3. we repeat this while there is more
"""

from collections.abc import Callable

import msgspec

from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.ids import PeerId

METHOD = "registers.pull"
BATCH_BYTES = 256 * 1024
MESSAGE_BYTES = BATCH_BYTES + 512 * 1024
_MAX_PULLS = 64


class KnownVersions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request: the newest (epoch, seq) that the sender knows, by author and key."""

    newest: tuple[tuple[PeerId, str, int, int], ...]


class RegisterBatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer: newer registers, each as (age in seconds, bytes)."""

    held: tuple[tuple[float, bytes], ...]


class RegisterSync:
    """Pulls registers into one store, and answers pulls of peers."""

    def __init__(
        self,
        registers: RegisterStore,
        calls: Calls,
        now: Callable[[], float],
        on_news: Callable[[list[bytes]], None],
    ) -> None:
        """`on_news(registers)` receives the bytes of registers that a pull brought."""
        self._registers = registers
        self._calls = calls
        self._now = now
        self._on_news = on_news
        calls.register(METHOD, KnownVersions, RegisterBatch, self._answer, max_bytes=MESSAGE_BYTES)

    async def pull(self, peer: PeerId) -> int:
        """Pull registers from `peer`; return the number of those that were news.

        Raises Unreachable, PeerFault, RunMismatch. The caller owns the deadline.
        """
        gained = 0
        for _ in range(_MAX_PULLS):
            newest = tuple((author, key, *at) for (author, key), at in sorted(self._registers.versions().items()))
            batch = await self._calls.call(
                peer, METHOD, KnownVersions(newest), RegisterBatch, max_bytes=MESSAGE_BYTES
            )
            now = self._now()
            news = [data for age_s, data in batch.held if self._registers.merge(data, now, age_s)]
            if not news:
                break
            gained += len(news)
            self._on_news(news)
        return gained

    async def _answer(self, peer: PeerId, request: KnownVersions) -> RegisterBatch:
        known = {(author, key): (epoch, seq) for author, key, epoch, seq in request.newest}
        return RegisterBatch(tuple(self._registers.missing(known, self._now(), BATCH_BYTES)))
