"""A folder of blobs: each is whole and verified, or a partial download that can be resumed.

`ID.blob` holds the bytes, `ID.manifest` the manifest. A download is `ID.part` plus `ID.have`, one bit per chunk. A
bit is written only after its chunk is on the disk, and every chunk is verified again when the download is resumed.
Chunks of an open download are served like those of a whole blob.
"""

import errno
import itertools
import os
from pathlib import Path
from typing import BinaryIO

from atoll.p2p.blobs.partial import PartialBlob
from atoll.p2p.system.atomic_files import disk, make_folder, read_whole, sync_folder, write_whole
from atoll.protocols import codec
from atoll.protocols.blobs import (
    BLOB_CHUNK_BYTES,
    MANIFEST_MAX_BYTES,
    BlobManifest,
    decode_manifest,
    manifest_of_bytes,
    manifest_of_file,
)
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import Digest, digest, short

BLOBS = "blobs"
"""Folder of a run's blobs, below the run's."""
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def blob_path(folder: Path, blob: bytes) -> Path:
    """Path of a whole blob in the folder of a store, whether it is there or not."""
    return folder / f"{blob.hex()}.blob"


class BlobStore:
    """Blobs on disk. Synchronous; one owner. Every method may raise DiskFault.

    `add_bytes`, `add_file`, `begin`, `finish`, `is_whole` and `chunk` read or write whole files: call them in a
    thread.
    """

    def __init__(self, folder: Path) -> None:
        """Open or create the folder; files that do not fit their manifest are removed."""
        self._folder = make_folder(folder)
        self._manifests: dict[Digest, BlobManifest] = {}
        self._open: dict[Digest, PartialBlob] = {}
        self._numbers = itertools.count(1)
        with disk(folder):
            for path in sorted(folder.glob("*.blob")):
                self._load(path)
            for path in folder.glob("*.part"):
                if not path.with_suffix(".manifest").exists():
                    path.unlink()
            for path in folder.glob("*.new"):
                path.unlink()

    def add_bytes(self, data: bytes) -> Digest:
        """Store bytes durably; return the blob id."""
        manifest = manifest_of_bytes(data)
        blob = manifest.id
        if blob not in self._manifests:
            new = self._new_file(blob)
            with disk(new), open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._complete(manifest, new)
        return blob

    def add_file(self, path: Path, *, move: bool = False, is_synced: bool = False) -> Digest:
        """Store a file's bytes durably; return the blob id. `move`: the file may be moved instead of linked.

        `is_synced`: its bytes are on the disk already, though perhaps not its name.
        The file must not be changed in place afterwards: on the same file system it is hard-linked.
        """
        with disk(path), open(path, "rb") as source:
            manifest = manifest_of_file(source)
            blob = manifest.id
            if blob in self._manifests:
                return blob
            new = self._new_file(blob)
            if not _linked(path, new, move):
                source.seek(0)
                _copy(source, new)
            elif not is_synced:
                os.fsync(source.fileno())
        self._complete(manifest, new)
        return blob

    def has(self, blob: Digest) -> bool:
        """Whether the whole blob is in the store."""
        return blob in self._manifests

    def path(self, blob: Digest) -> Path:
        """Read-only file of a whole blob. Raises LocalFault if it is not in the store."""
        self._manifest(blob)
        return self.blob_path(blob)

    def size(self, blob: Digest) -> int:
        """Size in bytes of a whole blob. Raises LocalFault if it is not in the store."""
        return self._manifest(blob).size_bytes

    def is_whole(self, blob: Digest) -> bool:
        """Read a whole blob; whether it still has its hash. Raises LocalFault if it is not in the store."""
        path = self.path(blob)
        with disk(path), open(path, "rb") as file:
            return manifest_of_file(file).id == blob

    def blob_path(self, blob: Digest) -> Path:
        """Path of a whole blob, whether it is in the store or not."""
        return blob_path(self._folder, blob)

    def manifest(self, blob: Digest) -> BlobManifest | None:
        """Manifest of a whole blob; None if it is not in the store."""
        return self._manifests.get(blob)

    def blobs(self) -> frozenset[Digest]:
        """Ids of all whole blobs."""
        return frozenset(self._manifests)

    def share(self, blob: Digest) -> tuple[BlobManifest, int] | None:
        """Manifest and present chunks (one bit each) of a blob that is whole or being fetched; else None."""
        manifest = self._manifests.get(blob)
        if manifest is not None:
            return manifest, (1 << manifest.chunks) - 1
        partial = self._open.get(blob)
        return (partial.manifest, partial.bits) if partial is not None else None

    def chunk(self, blob: Digest, index: int) -> bytes:
        """One verified chunk. Raises LocalFault if it is missing, CorruptFault (a whole blob is then deleted)."""
        manifest, partial = self._manifests.get(blob), self._open.get(blob)
        if manifest is None and partial is not None:
            return partial.read(index)
        manifest = self._manifest(blob)
        path = self._file(blob, "blob")
        with disk(path), open(path, "rb", buffering=0) as file:
            size = manifest.chunk_bytes(index)
            data = os.pread(file.fileno(), size, index * BLOB_CHUNK_BYTES)
        if digest(data) != manifest.chunk_hash(index):
            self.delete(blob)
            raise CorruptFault(f"{path} is damaged at chunk {index}", hint="it is fetched again from its holders")
        return data

    def delete(self, blob: Digest) -> None:
        """Delete a blob, whole or partial."""
        self._manifests.pop(blob, None)
        with disk(self._folder):
            for ending in ("blob", "part", "have", "manifest"):
                self._file(blob, ending).unlink(missing_ok=True)

    def known_manifest(self, blob: Digest) -> BlobManifest | None:
        """Manifest of a whole blob or of a download that was begun; else None."""
        if blob in self._manifests:
            return self._manifests[blob]
        try:
            data = read_whole(self._file(blob, "manifest"), max_bytes=MANIFEST_MAX_BYTES)
            return decode_manifest(data, blob) if data is not None else None
        except (CorruptFault, DecodeError):
            return None

    def begin(self, manifest: BlobManifest) -> PartialBlob:
        """Start or resume a download. Reads and verifies the chunks that an earlier one left."""
        blob = manifest.id
        path = self._file(blob, "manifest")
        with disk(path):
            path.write_bytes(codec.encode(manifest))  # one that a power loss damages is asked for again
        partial = PartialBlob(manifest, self._file(blob, "part"), self._file(blob, "have"))
        self._open[blob] = partial
        return partial

    def finish(self, partial: PartialBlob) -> Path:
        """Turn a complete download into a whole blob; return its file. Raises LocalFault if chunks are missing."""
        manifest = partial.manifest
        if partial.missing():
            self.suspend(partial)
            raise LocalFault("the download is not complete")
        partial.finish()
        self._complete(manifest, self._file(manifest.id, "part"))
        self.suspend(partial)  # not earlier, so that its chunks are served without a gap
        return self.path(manifest.id)

    def suspend(self, partial: PartialBlob) -> None:
        """Close a download; its chunks stay on disk. Idempotent."""
        blob = partial.manifest.id
        if self._open.get(blob) is partial:
            del self._open[blob]
        partial.close(keep=blob not in self._manifests)

    def _complete(self, manifest: BlobManifest, source: Path) -> None:
        """Give `source`, which is whole and durable, the name of the blob."""
        blob = manifest.id
        # The folder is synced once, after both names: a power loss between them leaves a blob that `_load`
        # removes, or a manifest like that of a download.
        write_whole(self._file(blob, "manifest"), codec.encode(manifest), syncs_folder=False)
        target = self._file(blob, "blob")
        with disk(target):
            os.replace(source, target)
            self._file(blob, "have").unlink(missing_ok=True)
        sync_folder(self._folder)
        self._manifests[blob] = manifest

    def _load(self, path: Path) -> None:
        try:
            blob = Digest(bytes.fromhex(path.stem))
        except ValueError:
            return
        manifest = self.known_manifest(blob)
        if manifest is not None and path.stat().st_size == manifest.size_bytes:
            self._manifests[blob] = manifest
        else:
            self.delete(blob)

    def _manifest(self, blob: Digest) -> BlobManifest:
        manifest = self._manifests.get(blob)
        if manifest is None:
            raise LocalFault(f"blob {short(blob)} is not here")
        return manifest

    def _new_file(self, blob: Digest) -> Path:
        """A new unique name: a download of the same blob may be open."""
        return self._folder / f"{blob.hex()}.{next(self._numbers)}.new"

    def _file(self, blob: Digest, ending: str) -> Path:
        return self._folder / f"{blob.hex()}.{ending}"


def _linked(path: Path, target: Path, move: bool) -> bool:
    """Link or move `path` to `target`; False across file systems and where links are not possible."""
    try:
        if move:
            os.rename(path, target)
        else:
            os.link(path, target)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def _copy(source: BinaryIO, target: Path) -> None:
    with open(target, "wb") as file:
        while block := source.read(BLOB_CHUNK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
