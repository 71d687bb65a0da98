"""The file by which the daemon tells the next worker that its state belongs to a chain that the node leaves."""

from pathlib import Path

from atoll.p2p.system.atomic_files import disk, read_whole, sync_folder, write_whole
from atoll.protocols.errors import CorruptFault

ASIDE = "state-aside"
"""Folder of the newest state whose chain this node left."""
MARK = "leaving-chain"
"""Name of the file, in the run's folder."""
_MAX_BYTES = 32


def mark_left(run_folder: Path, first: int) -> None:
    """Write durably that the state in this folder must not go on from round `first` on.

    Raises DiskFault, CorruptFault.
    """
    before = first_left(run_folder)  # no worker has read it yet
    write_whole(run_folder / MARK, b"%d\n" % (first if before is None else min(first, before)))


def put_back(run_folder: Path, before: int | None) -> None:
    """Let a mark say what it said before this node tried to leave, and could not. Raises DiskFault."""
    if before is None:
        remove_mark(run_folder)
    else:
        write_whole(run_folder / MARK, b"%d\n" % before)


def first_left(run_folder: Path) -> int | None:
    """The first round that another chain decides; None without a mark. Raises DiskFault, CorruptFault."""
    data = read_whole(run_folder / MARK, max_bytes=_MAX_BYTES)
    if data is None:
        return None
    if data.strip() and not data.strip().isdigit():
        raise CorruptFault(f"{run_folder / MARK} does not hold a number", hint="write the number 0 into it")
    return int(data or b"0")


def news_of(run_folder: Path, first: int) -> str:
    """The line by which the user learns that this node leaves its chain at round `first`."""
    return (
        f"this node joins the others' model from round {first} on; its own work returns through its error "
        f"feedback. The model that it had is in {run_folder / ASIDE}"
    )


def remove_mark(run_folder: Path) -> None:
    """The state belongs to no chain that the node left. Raises DiskFault."""
    with disk(run_folder):
        (run_folder / MARK).unlink(missing_ok=True)
    sync_folder(run_folder)
