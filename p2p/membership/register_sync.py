"""Pull every live register that a peer holds and we lack, so that a newcomer knows all leases at once.

1. we send the (epoch, seq) that we know of each author and key   2. the peer answers with newer live registers,
each with the time it has been held   3. again while there is more
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
    """Newest (epoch, seq) that the asker knows, by author and key."""

    newest: tuple[tuple[PeerId, str, int, int], ...]


class RegisterBatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Newer registers: (age in seconds, bytes)."""

    held: tuple[tuple[float, bytes], ...]


class RegisterSync:
    """Serves and makes pulls for one set of registers."""

    def __init__(
        self,
        registers: RegisterStore,
        calls: Calls,
        now: Callable[[], float],
        on_news: Callable[[list[bytes]], None],
    ) -> None:
        """`on_news(registers)` hears of those that a pull brought."""
        self._registers = registers
        self._calls = calls
        self._now = now
        self._on_news = on_news
        calls.register(METHOD, KnownVersions, RegisterBatch, self._answer, max_bytes=MESSAGE_BYTES)

    async def pull(self, peer: PeerId) -> int:
        """Take what `peer` has; the number of registers that were news.

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

    async def _answer(self, peer: PeerId, heard: KnownVersions) -> RegisterBatch:
        known = {(author, key): (epoch, seq) for author, key, epoch, seq in heard.newest}
        return RegisterBatch(tuple(self._registers.missing(known, self._now(), BATCH_BYTES)))
