"""Has the shards of a packed text here when a round or an audit needs them, and no more of them than fit.

A run whose text is not packed needs none of this: its worker has the whole text.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll.node.daemon.assets.fetching import fetch_file
from atoll.node.daemon.core.interfaces import BlobShelf, RunContext
from atoll.node.runs.packs import add_pack
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.data.shard_index import INDEX_MAX_BYTES, ShardIndex, decode_index
from atoll.protocols.data.shard_order import Turn, shards_of, windows_a_shard
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import Digest

AUDIT_S = 60.0
"""Seconds for the shards that an audit needs."""
WHAT = "the packed text"
Report = Callable[[str], None]


class RunText:
    """The packed text of one run on this node."""

    def __init__(
        self, context: RunContext, net: BlobShelf, *, limit_bytes: int = 1 << 40, folder: Path | None = None
    ) -> None:
        """`limit_bytes`: of fetched shards that are kept; `folder`: this machine's copy of the packed text.

        Raises DiskFault.
        """
        self._context, self._net = context, net
        self._limit_bytes, self._folder = limit_bytes, folder
        self._index: ShardIndex | None = None
        self._keeps_all = False
        self._fetched: dict[Digest, None] = {}
        """Fetched shards that are here, the one that was needed longest ago first."""
        name = context.spec.data.index
        if name is not None and net.has_blob(name):
            with suppress(ConfigError):  # a damaged one is fetched again, an illegal one refused, in `begin`
                self._read_index(name)  # at once: nobody may delete its shards

    async def begin(self, report: Report) -> None:
        """Return when the index and the held-out tokens are here. Raises ConfigError where they cannot be used."""
        name = self._context.spec.data.index
        if name is None:
            return
        if self._folder is not None:
            await asyncio.to_thread(add_pack, self._folder, name, self._net.add_blob)
        await self._fetch(name, INDEX_MAX_BYTES, report, WHAT)
        index = self._read_index(name)
        shards = [index.shard(at) for at in range(index.count)]
        here = [blob for blob in shards if self._net.has_blob(blob)]
        self._keeps_all = len(here) == index.count  # others get them from here
        self._fetched = {} if self._keeps_all else dict.fromkeys(here)
        await self._fetch(Digest(index.held_out), index.held_out_bytes, report, WHAT)

    def _read_index(self, name: Digest) -> ShardIndex:
        path, spec = self._net.blob_path(name), self._context.spec
        try:
            with disk(path):
                index = decode_index(path.read_bytes())
        except DecodeError as error:
            raise ConfigError(f"{WHAT} of this run cannot be used: {error}", hint="ask its owner") from error
        if not windows_a_shard(index, spec.model.context):
            raise ConfigError(
                f"the shards of {WHAT} have {index.shard_tokens} tokens, a window {spec.model.context}",
                hint="ask the run's owner for one with larger shards",
            )
        self._context.kept.update(index.blobs)
        self._index = index
        return index

    async def prepare(self, turn: Turn, report: Report) -> bool:
        """Return when the shards of a member's turn are here; whether it had to wait.

        `report` receives what is fetched, and "" when that is over. The caller owns the deadline.
        """
        if self._index is None:
            return False
        needed = [self._index.shard(at) for at in shards_of(self._context.spec, self._index, turn)]
        lacking = [blob for blob in needed if not self._net.has_blob(blob)]
        for number, blob in enumerate(lacking, 1):
            what = f"shard {number} of {len(lacking)} of the round's text"
            await self._fetch(blob, self._index.shard_bytes, report, what)
            if not self._keeps_all:
                self._fetched[blob] = None
        for blob in needed:
            if blob in self._fetched:  # to the end: it was needed last
                del self._fetched[blob]
                self._fetched[blob] = None
        self._drop(frozenset(needed), self._index.shard_bytes)
        return bool(lacking)

    def shards_here(self, most: int) -> tuple[Digest, ...]:
        """Return at most `most` of the shards that are here, spread over the text; none where it is not packed."""
        index = self._index
        shards = [index.shard(at) for at in range(index.count)] if index is not None else []
        found = [*filter(self._net.has_blob, shards)]
        return tuple(found[:: max(1, -(-len(found) // most))])

    async def hold_all(self) -> None:
        """Fetch every shard, one after the other, and keep them: others get them here when the owner is gone."""
        assert self._index is not None, "it has begun"
        self._keeps_all, self._fetched = True, {}
        for at in range(self._index.count):
            await self._fetch(self._index.shard(at), self._index.shard_bytes, lambda reason: None, "a shard")

    async def prepare_audit(self, turn: Turn) -> None:
        """Return when what an audited member read is here. Raises TimeoutError, DiskFault, ConfigError."""
        async with asyncio.timeout(AUDIT_S):
            await self.prepare(turn, lambda reason: None)

    def _drop(self, needed: frozenset[Digest], shard_bytes: int) -> None:
        """Delete the shards that were needed longest ago, down to the limit. A worker that maps one keeps it."""
        surplus = len(self._fetched) - max(1, self._limit_bytes // shard_bytes)
        for blob in [blob for blob in self._fetched if blob not in needed][: max(0, surplus)]:
            self._net.delete_blob(blob)
            del self._fetched[blob]

    async def _fetch(self, blob: Digest, max_bytes: int, report: Report, what: str) -> None:
        spec = self._context.spec
        await fetch_file(blob, max_bytes, owner=spec.owner, net=self._net, report=report, what=what)
