"""Blobs on disk: whole or partial, verified, resumable, and honest about damage."""

import os
import random
from pathlib import Path

import pytest

from atoll.p2p.blobs.store import BlobStore
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_bytes
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import Digest

DATA = random.Random(1).randbytes(3 * BLOB_CHUNK_BYTES + 100)
MANIFEST = manifest_of_bytes(DATA)
CHUNKS = [DATA[at : at + BLOB_CHUNK_BYTES] for at in range(0, len(DATA), BLOB_CHUNK_BYTES)]


@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_bytes_come_back(tmp_path: Path, data: bytes) -> None:
    store = BlobStore(tmp_path)
    blob = store.add_bytes(data)
    assert blob == manifest_of_bytes(data).id
    assert store.add_bytes(data) == blob
    again = BlobStore(tmp_path)
    assert again.has(blob)
    assert again.path(blob).read_bytes() == data
    assert again.size(blob) == again.size_of_all() == len(data)
    assert b"".join(again.chunk(blob, index) for index in range(again.manifest(blob).chunks)) == data


@pytest.mark.parametrize("move", [False, True])
def test_files_are_copied_or_taken(tmp_path: Path, move: bool) -> None:
    source = tmp_path / "payload"
    source.write_bytes(DATA)
    store = BlobStore(tmp_path / "blobs")
    blob = store.add_file(source, move=move)
    assert store.path(blob).read_bytes() == DATA
    assert source.exists() is not move


def test_deleted_blobs_are_gone(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = store.add_bytes(DATA)
    store.delete(blob)
    store.delete(blob)
    assert not store.has(blob)
    assert not list(tmp_path.iterdir())
    with pytest.raises(LocalFault, match="not here"):
        store.path(blob)


def test_a_damaged_blob_is_dropped_not_served(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob = store.add_bytes(DATA)
    with open(store.path(blob), "r+b") as file:
        file.seek(BLOB_CHUNK_BYTES + 7)
        file.write(b"\0\0")
    assert store.chunk(blob, 0) == CHUNKS[0]
    with pytest.raises(CorruptFault, match="chunk 1"):
        store.chunk(blob, 1)
    assert not store.has(blob)


@pytest.mark.parametrize("damage", ["cut", "manifest", "no manifest"])
def test_what_does_not_fit_its_manifest_is_not_opened(tmp_path: Path, damage: str) -> None:
    store = BlobStore(tmp_path)
    blob = store.add_bytes(DATA)
    if damage == "cut":
        os.truncate(store.path(blob), 10)
    elif damage == "manifest":
        store.path(blob).with_suffix(".manifest").write_bytes(b"junk")
    else:
        store.path(blob).with_suffix(".manifest").unlink()
    (tmp_path / "notes.blob").write_bytes(b"not ours")
    again = BlobStore(tmp_path)
    assert not again.blobs()
    assert (tmp_path / "notes.blob").exists()


def test_a_download_resumes_after_a_restart_and_trusts_only_what_verifies(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    partial = store.begin(MANIFEST)
    assert partial.missing() == [0, 1, 2, 3]
    with pytest.raises(DecodeError):
        partial.write(0, CHUNKS[1])
    with pytest.raises(DecodeError):
        partial.write(3, CHUNKS[0])
    for index in (3, 1, 0):
        partial.write(index, CHUNKS[index])
    partial.close()
    with open(tmp_path / f"{MANIFEST.id.hex()}.part", "r+b") as file:
        file.write(b"rot")

    again = BlobStore(tmp_path)
    assert not again.has(MANIFEST.id)
    partial = again.begin(MANIFEST)
    assert partial.missing() == [0, 2]
    with pytest.raises(LocalFault, match="not complete"):
        again.finish(partial)
    partial = again.begin(MANIFEST)
    for index in partial.missing():
        partial.write(index, CHUNKS[index])
    assert again.finish(partial).read_bytes() == DATA
    assert {file.suffix for file in tmp_path.iterdir()} == {".blob", ".manifest"}


def missing(folder: Path) -> list[int]:
    partial = BlobStore(folder).begin(MANIFEST)
    partial.close()
    return partial.missing()


def test_chunks_that_were_not_flushed_are_fetched_again(tmp_path: Path) -> None:
    partial = BlobStore(tmp_path).begin(MANIFEST)
    partial.write(0, CHUNKS[0])
    partial.flush()
    partial.write(1, CHUNKS[1])
    partial._file.close()  # a kill: no flush
    assert missing(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("bits", [b"", b"\xff" * 100, b"\xff" * (1 << 18)], ids=["empty", "lies", "huge"])
def test_a_damaged_bitmap_costs_only_the_download(tmp_path: Path, bits: bytes) -> None:
    store = BlobStore(tmp_path)
    store.begin(MANIFEST).close()
    (tmp_path / f"{MANIFEST.id.hex()}.have").write_bytes(bits)
    assert missing(tmp_path) == [0, 1, 2, 3]


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    orphan = tmp_path / f"{Digest(bytes(32)).hex()}.part"
    orphan.write_bytes(b"half")
    BlobStore(tmp_path)
    assert not orphan.exists()
