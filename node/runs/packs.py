"""Folders of packed texts, as `atoll data pack` writes them, and their files in a run's blobs."""

from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.p2p.system.atomic_files import disk, read_whole
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.data.shard_index import (
    HELD_OUT_FILE,
    INDEX_FILE,
    INDEX_MAX_BYTES,
    ShardIndex,
    decode_index,
    shard_file,
)
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError
from atoll.protocols.ids import Digest

_AGAIN = "pack the text again, or copy the folder again"


def is_pack(path: Path) -> bool:
    """Whether this is a folder of a packed text."""
    return (path / INDEX_FILE).is_file()


def read_pack(folder: Path) -> tuple[ShardIndex, Digest]:
    """The index in the folder of a packed text, and its blob id. Raises ConfigError, DiskFault."""
    try:
        data = read_whole(folder / INDEX_FILE, max_bytes=INDEX_MAX_BYTES)
        if data is None:
            raise ConfigError(f"{folder} is no packed text", hint="make one with `atoll data pack`")
        return decode_index(data), manifest_of_bytes(data).id
    except (CorruptFault, DecodeError) as error:
        raise ConfigError(f"{folder / INDEX_FILE} cannot be read: {error}", hint=_AGAIN) from error


def add_pack(folder: Path, wanted: Digest, add_file: Callable[[Path], Digest]) -> None:
    """Add all files of a packed text to a store of blobs (`add_file`), which links them where it can.

    `wanted`: the blob id of the index that it must have. Raises ConfigError, DiskFault.
    """
    index, name = read_pack(folder)
    if name != wanted:
        raise ConfigError(f"{folder} is not the packed text of this run", hint="give no --data: members send it")
    for path, blob, size in _files(folder, index):
        with disk(path):
            found = path.stat().st_size if path.exists() else -1
        if found != size or add_file(path) != blob:
            raise ConfigError(f"{path} is missing or damaged", hint=_AGAIN)
    add_file(folder / INDEX_FILE)  # last: whoever finds it finds all


def _files(folder: Path, index: ShardIndex) -> Iterator[tuple[Path, Digest, int]]:
    for at in range(index.count):
        yield folder / shard_file(at), index.shard(at), index.shard_bytes
    yield folder / HELD_OUT_FILE, Digest(index.held_out), index.held_out_bytes
