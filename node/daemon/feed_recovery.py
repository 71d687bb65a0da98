"""A home that was restored has lost its ledger, and with it the end of this node's own feed.

Who goes on from an older end signs two histories, and nobody takes anything from it any more. So a mark in the
run's folder says how long the feed was at least and who else was a member, and until the others gave it back
nothing is written: not before every neighbour told what it has, and more than half of the other members did (one
alone may have been away); and then not for one more lease, in which a twin with this identity would be heard.
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
"""However short a lease is: a register needs some time to get here."""
_MARK = "restored"
_MARK_MAX_BYTES = 1 << 20
_LISTENING = "this home was restored: listening whether its identity is in use elsewhere"


class Lost(NamedTuple):
    """What a mark says."""

    entries: int
    """This node's feed has at least so many, wherever they are."""
    others: frozenset[PeerId]
    """The other members of the checkpoint's newest rounds."""

    @property
    def needed(self) -> int:
        """So many of the others must tell what they have: more than half."""
        return len(self.others) // 2 + 1 if self.others else 0


def mark(run_folder: Path, entries: int, others: Iterable[PeerId]) -> None:
    """See Lost. Raises DiskFault."""
    write_whole(run_folder / _MARK, "".join(f"{line}\n" for line in (entries, *sorted(others))).encode())


def marked(run_folder: Path) -> Lost | None:
    """What `mark` said, if the feed has not come back since. Raises DiskFault, CorruptFault."""
    data = read_whole(run_folder / _MARK, max_bytes=_MARK_MAX_BYTES)
    if data is None:
        return None
    try:
        entries, *others = data.decode("ascii").split()
        for peer in others:
            peer_bytes(PeerId(peer))
        return Lost(int(entries), frozenset(map(PeerId, others)))
    except (ValueError, DecodeError) as error:
        raise CorruptFault(
            f"{run_folder / _MARK} does not hold a number and peers", hint="restore this home again"
        ) from error


def unmark(run_folder: Path) -> None:
    """The feed is back. Raises DiskFault."""
    with disk(run_folder):
        (run_folder / _MARK).unlink(missing_ok=True)
    sync_folder(run_folder)


async def wait_for_feed(
    swarm: Swarm, me: PeerId, lost: Lost, lease_s: float, now: Callable[[], float], say: Callable[[str], None]
) -> None:
    """Until the feed is back and nobody else uses it. `say` hears what is waited for.

    This node must not announce what it does meanwhile: what is announced under its name is another's then.
    Raises LocalFault where another node has this identity.
    """
    await _hear_others(swarm, me, lost, say)
    since_s, echoes = now(), swarm.registers.echoes
    while now() - since_s < max(lease_s, _LISTEN_MIN_S) or not swarm.is_caught_up():
        _check_alone(swarm, echoes)
        say(_LISTENING)
        await asyncio.sleep(POLL_S)
        swarm.sync_soon()
    _check_alone(swarm, echoes)  # what came in the last second counts too


async def _hear_others(swarm: Swarm, me: PeerId, lost: Lost, say: Callable[[str], None]) -> None:
    """Until enough of the others told what they have, and the feed is as long as it was at least."""
    told = swarm.synced_peers() & lost.others
    turns = itertools.cycle(sorted(lost.others))
    while not (
        swarm.is_caught_up() and len(told) >= lost.needed and swarm.ledger.vector().get(me, 0) >= lost.entries
    ):
        say(_waiting(lost, len(told)))
        if (peer := next(turns, me)) not in told:  # of many members only some are neighbours by themselves
            await swarm.connect(peer)
        await asyncio.sleep(POLL_S)
        swarm.sync_soon()
        told |= swarm.synced_peers() & lost.others


def _waiting(lost: Lost, told: int) -> str:
    reason = "this home was restored: waiting for peers that have this node's feed"
    if told >= lost.needed:
        return reason
    return (
        f"{reason}; {told} of {len(lost.others)} other members told what they have, {lost.needed} must "
        "(are they gone for good: `atoll run new NAME --from-checkpoint DIR`)"
    )


def _check_alone(swarm: Swarm, echoes: int) -> None:
    if swarm.registers.echoes > echoes:
        raise LocalFault(
            "another node that runs has this identity",
            hint="stop that one first; or move identity.key away, to begin as a new node",
        )
