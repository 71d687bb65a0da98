"""Blobs on disk: whole or partial, verified, resumable, and honest about damage."""

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.p2p.blobs.store import BlobStore
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, manifest_of_bytes
from atoll.protocols.errors import CorruptFault, DecodeError, DiskFault, LocalFault
from atoll.protocols.ids import Digest
from tests.disk_order import DiskOrder

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
    assert again.size(blob) == len(data)
    assert b"".join(again.chunk(blob, index) for index in range(again.manifest(blob).chunks)) == data


@pytest.mark.parametrize("move", [False, True])
def test_files_get_a_second_name_or_are_taken(tmp_path: Path, move: bool) -> None:
    source = tmp_path / "payload"
    source.write_bytes(DATA)
    inode = source.stat().st_ino
    store = BlobStore(tmp_path / "blobs")
    blob = store.add_file(source, move=move)
    assert store.path(blob).read_bytes() == DATA
    assert source.exists() is not move
    assert store.path(blob).stat().st_ino == inode, "nothing was copied"
    source.unlink(missing_ok=True)
    assert BlobStore(tmp_path / "blobs").path(blob).read_bytes() == DATA


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_files_are_copied_where_names_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: bool, refusal: int
) -> None:
    source = tmp_path / "payload"
    source.write_bytes(DATA)

    def refuse(*_: object) -> None:
        raise OSError(refusal, "no")

    for name in ("link", "rename"):
        monkeypatch.setattr(os, name, refuse)
    store = BlobStore(tmp_path / "blobs")
    blob = store.add_file(source, move=move)
    assert store.path(blob).read_bytes() == source.read_bytes() == DATA
    assert store.path(blob).stat().st_ino != source.stat().st_ino
    assert not list((tmp_path / "blobs").glob("*.new"))


def test_a_disk_that_refuses_the_name_is_a_fault_and_not_copied_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "payload"
    source.write_bytes(DATA)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(DiskFault):
        BlobStore(tmp_path / "blobs").add_file(source)


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


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.protocols.identity import Identity

async def main():
    folder, network = Path(sys.argv[1]), MemoryNetwork(bandwidth_bps=400e6)
    hosts = [network.host(Identity(bytes([n]) * 32).peer_id) for n in (1, 2)]
    async with asyncio.TaskGroup() as group:
        for host in hosts:
            ready = asyncio.Event()
            group.create_task(host.serve(ready.set))
            await ready.wait()
        here, there = (Blobs(host, BlobStore(folder / name), print) for host, name in zip(hosts, ("own", "other")))
        blob = there.store.add_bytes(bytes(range(256)) * 4096 * 200)
        await hosts[0].connect(PeerAddress(hosts[1].peer_id, (hosts[1].maddr,)))
        group.create_task(here.fetch(blob, [hosts[1].peer_id], 1 << 30))
        while here.statistics().bytes_down < 60 << 20:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)  # by itself: on a busy machine the download would go on until we do

asyncio.run(main())
"""


def test_a_killed_process_costs_little_of_its_download(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -signal.SIGKILL
    manifest = manifest_of_bytes(bytes(range(256)) * 4096 * 200)
    partial = BlobStore(tmp_path / "own").begin(manifest)
    partial.close()
    assert 100 <= len(partial.missing()) <= 200 - 30, "at least half of what came is still here"


@pytest.mark.parametrize("way", ["bytes", "link", "move", "copy", "download"])
def test_a_blob_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way
) -> None:
    store, order = BlobStore(tmp_path / "store"), DiskOrder(monkeypatch)
    given = tmp_path / "given"
    given.write_bytes(DATA)
    if way == "copy":
        monkeypatch.setattr("atoll.p2p.blobs.store._linked", lambda *_: False)
    if way == "bytes":
        store.add_bytes(DATA)
    elif way == "download":
        partial = store.begin(MANIFEST)
        partial.write_all(enumerate(CHUNKS))
        store.finish(partial)
    else:
        store.add_file(given, move=way == "move")
    assert store.is_whole(MANIFEST.id)
    order.check(f"{MANIFEST.id.hex()}.blob", f"{MANIFEST.id.hex()}.manifest")


@pytest.mark.parametrize(("is_synced", "syncs"), [(False, 3), (True, 2)])
def test_what_is_on_the_disk_is_stored_with_two_syncs(tmp_path, monkeypatch, is_synced, syncs):
    """Of the manifest and of the folder. After a change of chain a hundred payloads go back into the store."""
    store, fsync, given, synced = BlobStore(tmp_path / "store"), os.fsync, tmp_path / "given", []
    given.write_bytes(DATA)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor))[1])
    store.add_file(given, is_synced=is_synced)
    assert len(synced) == syncs


@pytest.mark.parametrize("lost", ["manifest", "blob"])
def test_a_power_loss_between_the_two_names_of_a_blob_leaves_none(tmp_path, lost):
    store, given = BlobStore(tmp_path / "store"), tmp_path / "given"
    given.write_bytes(DATA)
    store.add_file(given)
    (tmp_path / "store" / f"{MANIFEST.id.hex()}.{lost}").unlink()
    again = BlobStore(tmp_path / "store")
    assert not again.has(MANIFEST.id)
    assert again.add_file(given) == MANIFEST.id, "it can be stored again"
    assert again.is_whole(MANIFEST.id)


def test_open_downloads_are_shared_without_a_gap(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.share(MANIFEST.id) is None
    partial = store.begin(MANIFEST)
    assert store.share(MANIFEST.id) == (MANIFEST, 0)
    partial.write(2, CHUNKS[2])
    assert store.share(MANIFEST.id) == (MANIFEST, 0b100)
    assert store.chunk(MANIFEST.id, 2) == CHUNKS[2]
    with pytest.raises(LocalFault, match="not here"):
        store.chunk(MANIFEST.id, 1)
    for index in partial.missing():
        partial.write(index, CHUNKS[index])
    store.finish(partial)
    assert store.share(MANIFEST.id) == (MANIFEST, 0b1111)
    assert store.chunk(MANIFEST.id, 1) == CHUNKS[1]
    again = store.begin(manifest_of_bytes(b"other"))
    store.suspend(again)
    store.suspend(again)
    assert store.share(again.manifest.id) is None


def test_a_chunk_that_rots_on_disk_is_not_served(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    partial = store.begin(MANIFEST)
    partial.write(1, CHUNKS[1])
    with open(tmp_path / f"{MANIFEST.id.hex()}.part", "r+b") as file:
        file.seek(BLOB_CHUNK_BYTES + 3)
        file.write(b"rot")
    with pytest.raises(CorruptFault):
        store.chunk(MANIFEST.id, 1)
    store.suspend(partial)


def test_a_blob_that_is_added_while_it_is_fetched(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    partial = store.begin(MANIFEST)
    partial.write(0, CHUNKS[0])
    store.add_bytes(DATA)
    for index in partial.missing():
        partial.write(index, CHUNKS[index])
    assert store.finish(partial).read_bytes() == DATA
    assert {file.suffix for file in tmp_path.iterdir()} == {".blob", ".manifest"}
