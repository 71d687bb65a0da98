"""The newest lease of each member, on disk: a node that starts again knows which leases it has seen, and when.

A register has no date. A store that just began would take any lease for news, so who recorded those of a member
that is gone could play them one after the other to a node that was started again: each would hold its rounds for
the life of a lease.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from atoll.p2p.membership.register_store import MAX_AUTHORS, RegisterStore
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.p2p.system.quiet_saves import QuietSaves
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ledger.registers import REGISTER_MAX_BYTES

log = logging.getLogger(__name__)

SAVE_S = 20.0
"""Seconds between two writes: leases of the last one can be played again after a kill, which a lease or two is."""
WHOLE_PERIODS = 3
"""Periods of SAVE_S, which are a lease of the presets, after which a node was here."""
_MAX_BYTES = MAX_AUTHORS * (REGISTER_MAX_BYTES + 8)
_Lease = Annotated[bytes, Meta(max_length=REGISTER_MAX_BYTES)]


class SeenLeases(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The file: signed registers, so that a restored home can be told its own."""

    version: Literal[1, 2]
    leases: Annotated[tuple[_Lease, ...], Meta(max_length=MAX_AUTHORS)]
    at_s: float | None = None
    """When it was written, in seconds of the machine's own clock; version 1 does not say."""


class KeptLeases:
    """Keeps the newest leases of one register store in the file `path`."""

    def __init__(self, registers: RegisterStore, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        """Raise the store's floors by what the file holds. A damaged file is ignored. Raises DiskFault."""
        self._registers, self._path, self._saves = registers, path, QuietSaves("the newest leases are not saved")
        self._wall_s = wall_s
        found = self._read()
        self._saved, self._at_s, self._periods = found.leases, found.at_s, 0
        # A clock that was put back says nothing.
        gone_s = -1.0 if found.at_s is None else wall_s() - found.at_s
        self.down_s = gone_s if gone_s >= 0.0 else math.inf
        """Seconds for which this node was down before it began, within SAVE_S; infinite where nothing says so."""
        registers.raise_floors(self._saved)

    def _read(self) -> SeenLeases:
        try:
            data = read_whole(self._path, max_bytes=_MAX_BYTES)
            if data is not None:
                return codec.decode(data, SeenLeases, max_bytes=_MAX_BYTES)
        except (CorruptFault, DecodeError):
            log.warning("%s is damaged: old leases of members may count as new ones for a while", self._path)
        return SeenLeases(2, ())

    async def serve(self) -> None:
        """Save them from time to time until cancelled, and at the end. A full disk is only logged."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                self._periods += 1
                self.save()
        finally:
            self.save()

    def save(self) -> None:
        """Write the file if there is a newer lease. A disk that refuses is only logged, and once."""
        newest = tuple(self._registers.newest_leases())
        if newest == self._saved:
            return
        # A start that ended soon may not have met those that went on while the node was down: it counts as none.
        at_s = self._wall_s() if self._periods >= WHOLE_PERIODS else self._at_s
        if self._saves.does(lambda: write_whole(self._path, codec.encode(SeenLeases(2, newest, at_s)))):
            self._saved = newest
