"""Puts this node's payloads of rounds that are open again back into the blob store, beside all else.

The store drops the payloads of final rounds. A change of chain opens such rounds again; their files are still in
the worker's spool.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from atoll.p2p.system.disk_reports import DISK_RETRY_S
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import Digest
from atoll.protocols.local.worker_messages import Pending


class Shelf(Protocol):
    """The blob store of this node."""

    def has_blob(self, blob: Digest) -> bool:
        """Return whether a blob is there, complete."""

    def add_blob(self, path: Path, *, is_synced: bool) -> Digest:
        """Store a file durably, whose bytes are on the disk; it is called in a thread. Raises DiskFault."""


@dataclass(kw_only=True, slots=True)
class PayloadsAgain:
    """What is put back, and who learns of it."""

    shelf: Shelf
    on_disk_fault: Callable[[DiskFault], None]
    is_open: Callable[[Pending], bool]
    """Whether a payload's contribution is known, and its round not in the worker's model."""
    is_whole: Callable[[Pending, Digest], bool]
    """Whether what was put there is the payload as it was; it tells of one that is not."""
    on_back: Callable[[Digest], None]
    """Called with each payload that is back."""

    async def put_back(self, trained: Iterable[Pending]) -> None:
        """Return once all are back, are not needed any more, or are gone."""
        left = list(trained)
        while True:
            left = [pending for pending in left if not await self._is_done(pending)]
            if not left:
                return
            await asyncio.sleep(DISK_RETRY_S)

    async def _is_done(self, pending: Pending) -> bool:
        # Looked at in its turn: beside this the worker adopts a model, and sweeps the files of rounds before it.
        if not self.is_open(pending):
            return True
        if self.shelf.has_blob(pending.payload):
            # Perhaps since a moment ago: a thread that put it back outlives the driver that began it.
            self.on_back(pending.payload)
            return True
        try:
            # Each is two syncs, and after a long cut there are more than a hundred. The worker synced the bytes.
            add = partial(self.shelf.add_blob, Path(pending.path), is_synced=True)
            blob = await asyncio.get_running_loop().run_in_executor(None, add)
        except DiskFault as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return True
            self.on_disk_fault(error)
            return False
        if self.is_whole(pending, blob):
            # Whoever saw its record before now took it for missing, and does not ask for one's own work again.
            self.on_back(pending.payload)
        return True
