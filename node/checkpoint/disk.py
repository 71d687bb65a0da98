"""Files that are there whole or not at all: temporary name, fsync, rename, fsync of the folder.

Large files of the worker, written in pieces and hashed on the way; small ones: `p2p.system.atomic_files`.
"""

import mmap
import os
import shutil
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import torch
from blake3 import blake3

from atoll.p2p.system.atomic_files import disk, sync_folder
from atoll.protocols.errors import CorruptFault
from atoll.protocols.ids import Digest

Piece = bytes | memoryview
TEMPORARY = ".part"
"""Suffix of an unfinished file; the owner of the folder may delete it at the start."""


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
    size = path.stat().st_size
    if size == 0:
        return memoryview(b"")
    try:
        # Not by `mmap`: its maps hold a descriptor each, and of payloads more than a hundred are mapped at once.
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except RuntimeError:
        # Such a map counts as memory, and a file may be larger than that. What else is wrong is told again here.
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return mapped.numpy().data.toreadonly()


def map_payload(path: str) -> memoryview:
    """As `map_file`, of a blob that peers hold too. Raises CorruptFault where it is gone, DiskFault."""
    with disk(Path(path)):
        try:
            return map_file(Path(path))
        except FileNotFoundError as error:
            raise CorruptFault(f"{path} is gone", hint="it is fetched again from its holders") from error


def remove_tree(path: Path) -> None:
    """Delete a folder or a file if it is there. Raises OSError."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
