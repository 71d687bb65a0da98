"""Recovers the node's own feed after its home was restored, or lost its ledger. Nothing is written before that.

A node that continues an older end of its feed signs two histories, and its peers accept nothing from it any more.
So a mark in the run's folder has a lower bound of the feed's length and the other members. The node waits until
more than half of these (one may have been away), and each that is a neighbour and not silent, have exchanged
ledgers with it; not for strangers, who could dial anew for ever. Then it listens for one more lease, in which
registers of a second node with this identity would arrive.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.system.atomic_files import disk, read_whole, sync_folder, write_whole
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import PeerId, peer_bytes

POLL_S = 1.0
_LISTEN_MIN_S = 3 * POLL_S
"""Shortest time to listen, however short a lease is: a register needs some time to arrive."""
SILENT_S = 120.0
"""How long a neighbour that answers nothing is waited for, in seconds: two exchanges as long as they may be."""
_MARK = "restored"
_MARK_MAX_BYTES = 1 << 20
_RESTORED = "this home was restored or lost its ledger"
_LISTENING = f"{_RESTORED}: listening whether its identity is in use elsewhere"


class LostFeed(NamedTuple):
    """What is known of a feed that was lost: the content of a mark."""

    entries: int
    """Lower bound of the entries of this node's feed, wherever they are."""
    others: frozenset[PeerId]
    """The other members of the checkpoint's newest rounds."""

    @property
    def needed(self) -> int:
        """How many of the others must exchange ledgers with this node: more than half."""
        return len(self.others) // 2 + 1 if self.others else 0


def mark_restored(run_folder: Path, entries: int, others: Iterable[PeerId], me: PeerId | None) -> None:
    """Write the mark of a restored home into a run's folder; `me` None: for any identity. Raises DiskFault."""
    lines = f"{entries} {me or ''}", *sorted(others)
    write_whole(run_folder / _MARK, "".join(f"{line}\n" for line in lines).encode())


def read_mark(run_folder: Path, me: PeerId) -> LostFeed | None:
    """The mark in a run's folder; None if the feed is complete, or another identity's: a new one has nothing to
    wait for. Raises DiskFault, CorruptFault.
    """
    data = read_whole(run_folder / _MARK, max_bytes=_MARK_MAX_BYTES)
    if data is None:
        return None
    try:
        first, _, rest = data.decode("ascii").partition("\n")
        entries, *owner = first.split()  # marks of older versions name no owner
        for peer in (*owner, *(others := rest.split())):
            peer_bytes(PeerId(peer))
        return LostFeed(int(entries), frozenset(map(PeerId, others))) if owner in ([], [me]) else None
    except (ValueError, DecodeError) as error:
        raise CorruptFault(
            f"{run_folder / _MARK} does not hold a number and peers", hint="restore this home again"
        ) from error


def clear_mark(run_folder: Path) -> None:
    """Remove the mark: the feed is complete again. Raises DiskFault."""
    with disk(run_folder):
        (run_folder / _MARK).unlink(missing_ok=True)
    sync_folder(run_folder)


async def wait_for_feed(
    swarm: Swarm,
    me: PeerId,
    lost: LostFeed,
    lease_s: float,
    now: Callable[[], float],
    report: Callable[[str], None],
) -> None:
    """Return when the feed is complete and nobody else uses it. `report` receives the reason of the wait.

    This node must not publish registers meanwhile: those under its name come from a second node with this
    identity. Raises LocalFault if there is one.
    """
    repair, silent = swarm.replication.anti_entropy, _Silent(swarm, lost.others, now)
    repair.first = lost.others
    await _wait_for_others(swarm, me, lost, silent, report)
    # A mark without others names nobody: then it is who is connected now, not who dials anew.
    silent.named = lost.others or frozenset(swarm.neighbours())
    since_s, echoes = now(), swarm.registers.echoes
    while silent.are_awaited() or now() - since_s < max(lease_s, _LISTEN_MIN_S):
        _check_unique(swarm, echoes)
        report(_LISTENING)
        await asyncio.sleep(POLL_S)
        swarm.sync_soon()
    _check_unique(swarm, echoes)  # registers of the last second count too
    repair.first = frozenset()


class _Silent:
    """Neighbours of the mark that have not exchanged ledgers with this node since it waits."""

    def __init__(self, swarm: Swarm, named: frozenset[PeerId], now: Callable[[], float]) -> None:
        self.named = named
        self.answered: set[PeerId] = set()
        self._swarm, self._now = swarm, now
        self._seen_s: dict[PeerId, float] = {}
        self._has_exchanged = False

    def are_awaited(self) -> bool:
        """Whether there are any, or nobody exchanged at all; each counts for SILENT_S after it was first seen."""
        synced = self._swarm.replication.anti_entropy.synced_peers()
        self.answered |= synced & self.named
        self._has_exchanged |= bool(synced)
        missing = {*self._swarm.neighbours()} & self.named - self.answered
        since = [self._seen_s.setdefault(peer, self._now()) for peer in missing]
        return not self._has_exchanged or any(self._now() - seen_s < SILENT_S for seen_s in since)


async def _wait_for_others(
    swarm: Swarm, me: PeerId, lost: LostFeed, silent: _Silent, report: Callable[[str], None]
) -> None:
    """Return when enough of the others exchanged ledgers with this node, and the feed has its least length."""
    turns, answered = itertools.cycle(sorted(lost.others)), silent.answered
    while silent.are_awaited() or len(answered) < lost.needed or swarm.ledger.vector().get(me, 0) < lost.entries:
        report(_waiting(lost, len(answered)))
        if (peer := next(turns, me)) not in answered:  # of many members only some are neighbours by themselves
            await swarm.connect(peer)
        await asyncio.sleep(POLL_S)
        swarm.sync_soon()


def _waiting(lost: LostFeed, answered: int) -> str:
    told = f"; {answered} of {len(lost.others)} other members told what they have, {lost.needed} must"
    return (
        f"{_RESTORED}: waiting for peers that have this node's feed{told if answered < lost.needed else ''} (are "
        "they gone for good: `atoll run new NAME --from-checkpoint DIR`, or move identity.key away to begin as a "
        "new node)"
    )


def _check_unique(swarm: Swarm, echoes: int) -> None:
    if swarm.registers.echoes > echoes:
        raise LocalFault(
            "another node that runs has this identity",
            hint="stop that one first; or move identity.key away, to begin as a new node",
        )
