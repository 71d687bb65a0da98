"""Removes a run from a home: its `.run` file, its folder, and the path of its text. The identity stays.

A node that joins the run again with this identity must not begin its feed anew: two entries of one number, and no
peer accepts anything from it. So a removed ledger with entries of this node leaves the mark of a restored home
behind (node/daemon/assets/feed_recovery.py): a later start waits until the others have returned that feed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from atoll.node.config.home import Home, hold_lock
from atoll.node.daemon.assets.feed_recovery import LostFeed, mark_restored, read_mark
from atoll.node.daemon.assets.lost_ledger import others_of
from atoll.node.runs.run_files import FoundRun
from atoll.p2p.ledger.signers import Signers
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.system.atomic_files import disk, make_folder, sync_folder
from atoll.p2p.system.key_file import load
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import PeerId, RunId

ASIDE = ".removed-"
"""Prefix of a folder that is being removed: no node takes it for a run's."""


class Removal(NamedTuple):
    """What `run rm` deletes."""

    run: str
    """Run id, hex."""
    name: str
    paths: tuple[str, ...]
    """Files and folders, only those that exist."""
    files: int
    bytes: int
    """Sizes of all these files together; space that is freed may be less where files have holes."""


def planned(home: Home, run: FoundRun) -> Removal:
    """What removing `run` from `home` would delete. A file outside the home stays. Raises DiskFault."""
    here = (home.run(run.spec.id), home.data_path(run.spec.id), *_run_files(home, run))
    paths = [path for path in here if path.exists()]
    with disk(home.runs):
        sizes = [file.lstat().st_size for path in paths for file in _files_of(path)]
    return Removal(run.spec.id.hex(), run.spec.name, tuple(map(str, paths)), len(sizes), sum(sizes))


def remove(home: Home, run: FoundRun, removal: Removal) -> bool:
    """Delete what was planned; returns whether a mark stays. The caller holds `unused`. Raises DiskFault.

    The run's folder goes aside first: after a power loss in between, nobody finds half of it under its name.
    """
    folder = home.run(run.spec.id)
    me, feed = _feed_in(home, run)
    for path in map(Path, removal.paths):
        with disk(path):
            if path.is_dir():
                os.rename(path, path.with_name(ASIDE + path.name))
            else:
                path.unlink(missing_ok=True)
    if feed is not None:
        mark_restored(make_folder(folder), feed.entries, feed.others, me)
    sync_folder(home.runs)
    for left in home.runs.glob(f"{ASIDE}*"):
        with disk(left):
            shutil.rmtree(left)
    return feed is not None


def _feed_in(home: Home, run: FoundRun) -> tuple[PeerId | None, LostFeed | None]:
    """Our name, and what is known of our feed; None where our key is gone, or nobody else can have any of it."""
    folder, me = home.run(run.spec.id), None
    try:
        me = load(home.identity).peer_id
        return me, _feed_of(me, folder, run.spec.id)
    except FileNotFoundError:
        return None, None  # the identity is gone too, and nobody signs with it again
    except CorruptFault:
        return me, LostFeed(1, frozenset())


def _feed_of(me: PeerId, folder: Path, run: RunId) -> LostFeed | None:
    marked = read_mark(folder, me)
    vector: dict[PeerId, int] = {}
    if (folder / LEDGER_FILE).exists():
        with closing(Ledger(folder / LEDGER_FILE, run)) as ledger:
            vector = ledger.vector()
    is_lost = marked is None and me not in vector and me in Signers(folder)  # its ledger was moved away
    entries = max(vector.get(me, 0), marked.entries if marked else 0, int(is_lost))
    if not entries:
        return None
    # Who left for good, or wrote one entry, is not waited for where final sets name the members.
    named = others_of(folder, me) or (frozenset(vector) - {me})
    others = named | (marked.others if marked else frozenset())
    return LostFeed(entries, others) if others or is_lost else None


@contextmanager
def unused(home: Home, run: FoundRun, running: str | None) -> Iterator[None]:
    """No node of `home` trains `run` while the block runs. Raises ConfigError if one does, or might.

    `running`: id of the run that the node of this home trains, in hex; None: no node answers.
    """
    if running == run.spec.id.hex():
        raise ConfigError(f"a node of this home trains {run.spec.name!r} now", hint="`atoll stop --wait` first")
    if running:  # a node never changes its run, so this one is free as long as that one runs
        yield
        return
    with hold_lock(home):
        yield


def _run_files(home: Home, run: FoundRun) -> list[Path]:
    """The run's file, where it is one of this home."""
    return [run.path] if run.path.resolve().parent == home.runs.resolve() else []


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir() or path.is_symlink():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder) / name for name in names)
