"""Files that are there whole or not at all: temporary name, fsync, rename, fsync of the folder.

Every refusal of the disk becomes DiskFault here, with what the user can do about it.
"""

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from blake3 import blake3

from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import Digest

Piece = bytes | memoryview
TEMPORARY = ".part"
"""Suffix of what was not finished; whoever owns the folder may delete it at the start."""

_HINTS = {
    errno.ENOSPC: "free some space; the state before this one is intact",
    errno.EDQUOT: "raise the disk quota; the state before this one is intact",
    errno.EFBIG: "raise the file size limit; the state before this one is intact",
    errno.EROFS: "remount the disk for writing",
    errno.EACCES: "make the folder writable for this user",
    errno.EIO: "the disk is failing: move the folder to another one",
}


@contextlib.contextmanager
def disk(path: Path) -> Iterator[None]:
    """Turn OSError inside into DiskFault that names `path`."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "look at the folder and its disk")
        raise DiskFault(f"{path}: {error.strerror or error}", hint=hint) from error


def write_file(path: Path, pieces: Iterable[Piece]) -> tuple[int, Digest]:
    """Write `path` whole or not at all. Size and BLAKE3. Raises DiskFault."""
    part = path.with_name(path.name + TEMPORARY)
    with disk(path):
        try:
            written = write_synced(part, pieces)
            part.replace(path)
            sync_folder(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return written


def write_synced(path: Path, pieces: Iterable[Piece]) -> tuple[int, Digest]:
    """Write and fsync a file under its own name. Size and BLAKE3. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        written = write_pieces(file, pieces)
        os.fsync(file.fileno())
    return written


def write_pieces(file: FileIO, pieces: Iterable[Piece]) -> tuple[int, Digest]:
    """Hand the pieces to the kernel; an fsync of the same descriptor makes them safe. Raises OSError."""
    size, hasher = 0, blake3()
    for piece in pieces:
        write_piece(file, piece)
        hasher.update(piece)
        size += len(piece)
    return size, Digest(hasher.digest())


def write_piece(file: FileIO, piece: Piece) -> None:
    """Hand all of it to the kernel, at the file's place. Raises OSError."""
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def map_file(path: Path) -> memoryview:
    """The bytes of a file that is never changed in place, without a copy in memory. Raises OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Delete a folder or a file if it is there. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
