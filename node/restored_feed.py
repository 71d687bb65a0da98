"""A home that was restored has lost its ledger, and with it the end of this node's own feed.

Who goes on from an older end signs two histories, and nobody takes anything from it any more. So a mark in the
run's folder says how long the feed was at least, and until the others gave it back nothing is written: not before
every neighbour told what it has, and then not for one more lease, in which another node with this identity would
be heard.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from atoll.p2p.files import disk, read_whole, sync_folder, write_whole
from atoll.p2p.swarm import Swarm
from atoll.protocols.errors import CorruptFault, LocalFault
from atoll.protocols.ids import PeerId

POLL_S = 1.0
_MARK = "restored"
_NO_FEED = "this home was restored: waiting for peers that have this node's feed"
_LISTENING = "this home was restored: listening whether its identity is in use elsewhere"


def mark(run_folder: Path, entries: int) -> None:
    """This node's feed has at least so many entries, wherever they are. Raises DiskFault."""
    write_whole(run_folder / _MARK, b"%d\n" % entries)


def marked(run_folder: Path) -> int | None:
    """What `mark` said, if the feed has not come back since. Raises DiskFault, CorruptFault."""
    data = read_whole(run_folder / _MARK, max_bytes=32)
    if data is not None and not data.strip().isdigit():
        raise CorruptFault(f"{run_folder / _MARK} does not hold a number", hint="restore this home again")
    return None if data is None else int(data)


def unmark(run_folder: Path) -> None:
    """The feed is back. Raises DiskFault."""
    with disk(run_folder):
        (run_folder / _MARK).unlink(missing_ok=True)
    sync_folder(run_folder)


async def wait_for_feed(
    swarm: Swarm, me: PeerId, entries: int, lease_s: float, now: Callable[[], float], say: Callable[[str], None]
) -> None:
    """Until the feed is back and nobody else uses it. `say` hears what is waited for.

    This node must not announce what it does meanwhile: what is announced under its name is another's then.
    Raises LocalFault where another node has this identity.
    """
    since_s: float | None = None
    echoes = 0
    while since_s is None or now() - since_s < lease_s or not swarm.is_abreast():
        if since_s is None and swarm.is_abreast() and swarm.ledger.vector().get(me, 0) >= entries:
            since_s, echoes = now(), swarm.registers.echoes
        if since_s is not None and swarm.registers.echoes > echoes:
            raise LocalFault(
                "another node that runs has this identity",
                hint="stop that one first; or move identity.key away, to begin as a new node",
            )
        say(_NO_FEED if since_s is None else _LISTENING)
        await asyncio.sleep(POLL_S)
        swarm.repair_soon()
