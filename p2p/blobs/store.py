"""A folder of blobs. A blob is there whole and verified, or it is a partial download that can be resumed.

`ID.blob` holds the bytes, `ID.manifest` the manifest. A download is `ID.part` plus `ID.have`, one bit per chunk;
the bits are written only after the chunks that they name are on the disk.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from atoll.p2p.files import disk, make_folder, read_whole, sync_folder, write_whole
from atoll.protocols import codec
from atoll.protocols.blobs import (
    BLOB_CHUNK_BYTES,
    MANIFEST_MAX_BYTES,
    Manifest,
    decode_manifest,
    manifest_of_bytes,
    manifest_of_file,
)
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import Digest, digest, short

_FLUSH_CHUNKS = 16


class BlobStore:
    """Blobs on disk. Synchronous; one owner. Every method may raise DiskFault."""

    def __init__(self, folder: Path) -> None:
        """Open or create; what does not fit its manifest is removed."""
        self._folder = make_folder(folder)
        self._manifests: dict[Digest, Manifest] = {}
        with disk(folder):
            for path in sorted(folder.glob("*.blob")):
                self._load(path)
            for path in folder.glob("*.part"):
                if not path.with_suffix(".manifest").exists():
                    path.unlink()

    def add_bytes(self, data: bytes) -> Digest:
        """Store bytes; durable when this returns."""
        manifest = manifest_of_bytes(data)
        blob = manifest.id
        if blob not in self._manifests:
            part = self._file(blob, "part")
            with disk(part), open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._complete(blob, manifest)
        return blob

    def add_file(self, path: Path, *, move: bool = False) -> Digest:
        """Store a file's bytes. `move`: the file may be taken instead of copied (if on the same file system)."""
        with disk(path), open(path, "rb") as source:
            manifest = manifest_of_file(source)
            blob = manifest.id
            if blob in self._manifests:
                return blob
            part = self._file(blob, "part")
            if move and os.stat(path).st_dev == os.stat(self._folder).st_dev:
                os.fsync(source.fileno())
                os.replace(path, part)
            else:
                source.seek(0)
                _copy(source, part)
        self._complete(blob, manifest)
        return blob

    def has(self, blob: Digest) -> bool:
        """Is the whole blob here?"""
        return blob in self._manifests

    def path(self, blob: Digest) -> Path:
        """File of a whole blob; read only. Raises LocalFault if it is not here."""
        self._manifest(blob)
        return self._file(blob, "blob")

    def size(self, blob: Digest) -> int:
        """Bytes of a whole blob. Raises LocalFault if it is not here."""
        return self._manifest(blob).size_bytes

    def manifest(self, blob: Digest) -> Manifest | None:
        """Manifest of a whole blob."""
        return self._manifests.get(blob)

    def blobs(self) -> frozenset[Digest]:
        """Everything that is here whole."""
        return frozenset(self._manifests)

    def size_of_all(self) -> int:
        """Bytes of all whole blobs."""
        return sum(manifest.size_bytes for manifest in self._manifests.values())

    def chunk(self, blob: Digest, index: int) -> bytes:
        """One verified chunk. Raises LocalFault if the blob is not here, CorruptFault (the blob is dropped)."""
        manifest = self._manifest(blob)
        path = self._file(blob, "blob")
        with disk(path), open(path, "rb") as file:
            file.seek(index * BLOB_CHUNK_BYTES)
            data = file.read(manifest.chunk_bytes(index))
        if digest(data) != manifest.chunk_hash(index):
            self.delete(blob)
            raise CorruptFault(f"{path} is damaged at chunk {index}", hint="it is fetched again from its holders")
        return data

    def delete(self, blob: Digest) -> None:
        """Forget a blob, whole or partial."""
        self._manifests.pop(blob, None)
        with disk(self._folder):
            for ending in ("blob", "part", "have", "manifest"):
                self._file(blob, ending).unlink(missing_ok=True)

    def known_manifest(self, blob: Digest) -> Manifest | None:
        """Manifest of a whole blob or of a download that was begun."""
        if blob in self._manifests:
            return self._manifests[blob]
        try:
            data = read_whole(self._file(blob, "manifest"), max_bytes=MANIFEST_MAX_BYTES)
            return decode_manifest(data, blob) if data is not None else None
        except (CorruptFault, DecodeError):
            return None

    def begin(self, manifest: Manifest) -> "Partial":
        """Start or resume a download. Reads and verifies what an earlier one left."""
        blob = manifest.id
        write_whole(self._file(blob, "manifest"), codec.encode(manifest))
        return Partial(manifest, self._file(blob, "part"), self._file(blob, "have"))

    def finish(self, partial: "Partial") -> Path:
        """A complete download becomes a blob."""
        partial.close()
        if partial.missing():
            raise LocalFault("the download is not complete")
        self._complete(partial.manifest.id, partial.manifest)
        return self.path(partial.manifest.id)

    def _complete(self, blob: Digest, manifest: Manifest) -> None:
        """`ID.part` is whole and on the disk: give it its name."""
        write_whole(self._file(blob, "manifest"), codec.encode(manifest))
        target = self._file(blob, "blob")
        with disk(target):
            os.replace(self._file(blob, "part"), target)
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

    def _manifest(self, blob: Digest) -> Manifest:
        manifest = self._manifests.get(blob)
        if manifest is None:
            raise LocalFault(f"blob {short(blob)} is not here")
        return manifest

    def _file(self, blob: Digest, ending: str) -> Path:
        return self._folder / f"{blob.hex()}.{ending}"


class Partial:
    """A download in progress: verified chunks in a sparse file, and which of them are there."""

    def __init__(self, manifest: Manifest, part: Path, have: Path) -> None:
        self.manifest = manifest
        self._part = part
        self._have_path = have
        with disk(part):
            self._file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            self._file.truncate(manifest.size_bytes)
        try:
            self._have = set(self._resume())
        except BaseException:
            self._file.close()
            raise
        self._unflushed = 0
        # Threads write chunks; a cancelled download must not close the file under them.
        self._lock = threading.RLock()

    @property
    def is_complete(self) -> bool:
        """All chunks are here."""
        return len(self._have) == self.manifest.chunks

    def missing(self) -> list[int]:
        """Chunks that are not here yet, in order."""
        return [index for index in range(self.manifest.chunks) if index not in self._have]

    def write(self, index: int, data: bytes) -> None:
        """Add a chunk. Raises DecodeError if it is not the one that the manifest names, DiskFault."""
        if len(data) != self.manifest.chunk_bytes(index) or digest(data) != self.manifest.chunk_hash(index):
            raise DecodeError(f"chunk {index} of blob {short(self.manifest.id)} does not verify")
        with self._lock:
            if self._file.closed:
                raise LocalFault("the download was closed")
            with disk(self._part):
                _write_at(self._file.fileno(), data, index * BLOB_CHUNK_BYTES)
            self._have.add(index)
            self._unflushed += 1
            if self._unflushed >= _FLUSH_CHUNKS:
                self.flush()

    def flush(self) -> None:
        """What is here survives a power loss."""
        with disk(self._part):
            os.fsync(self._file.fileno())
        bits = sum(1 << index for index in self._have)
        write_whole(self._have_path, bits.to_bytes(-(-self.manifest.chunks // 8), "little"))
        self._unflushed = 0

    def close(self) -> None:
        """Flush and give the file back. Idempotent."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self.flush()
            finally:
                self._file.close()

    def _resume(self) -> Iterator[int]:
        try:
            bits = int.from_bytes(read_whole(self._have_path, max_bytes=1 << 17) or b"", "little")
        except CorruptFault:
            bits = 0
        for index in range(self.manifest.chunks):
            if bits >> index & 1:
                with disk(self._part):
                    data = os.pread(
                        self._file.fileno(), self.manifest.chunk_bytes(index), index * BLOB_CHUNK_BYTES
                    )
                if digest(data) == self.manifest.chunk_hash(index):
                    yield index


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _copy(source: BinaryIO, target: Path) -> None:
    with open(target, "wb") as file:
        while block := source.read(BLOB_CHUNK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
