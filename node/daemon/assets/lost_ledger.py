"""Finds at a start that this node's own feed is lost: its ledger has none of it, though this home signed entries.

Then the home gets the mark of a restored one (feed_recovery.py), before anybody is connected, and waits for its
feed. Its file of signers says so; in homes of older versions, which have none, a final set that names this node.
How often it was started, leases that it saw, and the worker's state say nothing: a start may be killed before the
first entry, and some nodes never sign one.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

from atoll.node.daemon.assets.feed_recovery import LostFeed, mark_restored, read_mark
from atoll.node.daemon.telemetry.round_log import LOG_FILE
from atoll.node.daemon.telemetry.round_rows import RoundRows
from atoll.p2p.ledger.signers import Signers
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.swarm.replication import Replication
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.ids import PeerId

NEWEST = 16
"""Final sets from which the other members are taken: those that half of these sets name. Who came for a few rounds
is not waited for."""
SUMMARY_S = 8.0
"""How often a summary is asked for while peers lack old records, in seconds."""


def has_worked(run_folder: Path, me: PeerId, restored: LostFeed | None) -> bool:
    """Whether this node worked in the run before, so that peers have seen its permit. Raises DiskFault."""
    is_marked = restored is not None and restored.entries > 0
    return is_marked or (run_folder / LEDGER_FILE).exists() or me in Signers(run_folder)


def lost_feed(run_folder: Path, me: PeerId, ledger: Ledger, seen: Collection[PeerId]) -> LostFeed | None:
    """What must come back before this node writes; None if its feed is here, or has not begun.

    `seen`: authors of leases that an earlier start saw; the other members, where no final set names any. Raises
    DiskFault, CorruptFault.
    """
    if (marked := read_mark(run_folder, me)) is not None:
        return marked
    if me in ledger.vector():
        ledger.signers.note(me)  # a home of an older version has no such file
        return None
    if me not in ledger.signers and not any(me in names for names in _newest_sets(run_folder, me)):
        return None
    mark_restored(run_folder, 1, others_of(run_folder, me) or {*seen} - {me}, me)
    return read_mark(run_folder, me)


def others_of(run_folder: Path, me: PeerId) -> frozenset[PeerId]:
    """The other members by the newest final sets that this home knows; empty: it knows none. Raises DiskFault."""
    sets = _newest_sets(run_folder, me)[:NEWEST]
    counts = Counter(name for names in sets for name in names)
    return frozenset(name for name, count in counts.items() if 2 * count >= len(sets)) - {me}


def _newest_sets(run_folder: Path, me: PeerId) -> list[frozenset[PeerId]]:
    """Authors of the newest final sets that this home knows, the newest set first."""
    with disk(run_folder), closing(RoundRows(run_folder / LOG_FILE, me)) as rows:
        return [frozenset(map(PeerId, row.contributors)) for row in rows.held() if row.final and row.contributors]


async def with_summaries(
    waiting: Coroutine[Any, Any, None], replication: Replication, bring: Callable[[], Awaitable[None]]
) -> None:
    """Wait for the feed; while peers lack records before it, ask for a summary, which has the end of each feed."""

    async def ask() -> None:
        while True:
            await asyncio.sleep(SUMMARY_S)
            if replication.records_gone:
                await bring()

    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask())
        await waiting
        asking.cancel()
