"""A partial blob on disk: verified chunks in a sparse file, and a bitmap of those that are present."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from atoll.p2p.system.atomic_files import disk, read_whole, write_whole
from atoll.protocols.blobs import BLOB_CHUNK_BYTES, BlobManifest
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import digest, short

_WRITE_BYTES = 128 * 1024
"""Bytes per write: for larger writes Linux uses large folios, whose memory takes thrice the time (measured)."""
_FLUSH_CHUNKS = 16
_FLUSH_SOONEST_S = 0.5
_FLUSH_LATEST_S = 2.0
"""A flush is due after this many chunks, but not before the shorter and not after the longer time."""


class PartialBlob:
    """A download on disk, made by `BlobStore.begin`. Methods are thread-safe; each may raise DiskFault."""

    def __init__(self, manifest: BlobManifest, part: Path, have: Path) -> None:
        self.manifest = manifest
        self._part = part
        self._have_path = have
        with disk(part):
            self._file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            self._file.truncate(manifest.size_bytes)
        try:
            self._bits = sum(1 << index for index in self._resume())
        except BaseException:
            self._file.close()
            raise
        self._unflushed = 0
        self._flushed_s = time.monotonic()
        self._is_finished = False
        # A cancelled download must not close the file under a thread that writes.
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    @property
    def bits(self) -> int:
        """The present chunks, one bit each."""
        return self._bits

    @property
    def bytes_here(self) -> int:
        """Bytes of the present chunks, as if the last one were whole, at most the blob's size."""
        return min(self.manifest.size_bytes, self._bits.bit_count() * BLOB_CHUNK_BYTES)

    def missing(self) -> list[int]:
        """Indices of missing chunks, in order."""
        return [index for index in range(self.manifest.chunks) if not self._bits >> index & 1]

    def write_all(self, chunks: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Verify and write chunks. Raises DecodeError at the first that does not verify, DiskFault."""
        for index, data in chunks:
            self.write(index, data)

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Verify and write one chunk. Raises DecodeError if it does not have the manifest's hash, DiskFault."""
        if len(data) != self.manifest.chunk_bytes(index) or digest(data) != self.manifest.chunk_hash(index):
            raise DecodeError(f"chunk {index} of blob {short(self.manifest.id)} does not verify")
        with self._lock:
            self._require_open()
            if self._bits >> index & 1:
                return
            with disk(self._part):
                _write_at(self._file.fileno(), data, index * BLOB_CHUNK_BYTES)
            self._bits |= 1 << index
            self._unflushed += 1

    def read(self, index: int) -> bytes:
        """Read one verified chunk. Raises LocalFault if it is missing, CorruptFault if it does not verify now."""
        with self._lock:
            self._require_open()
            if not self._bits >> index & 1:
                raise LocalFault(f"chunk {index} of blob {short(self.manifest.id)} is not here")
            data = self._read_at(index)
        if digest(data) != self.manifest.chunk_hash(index):
            raise CorruptFault(f"{self._part} is damaged at chunk {index}", hint="check the disk")
        return data

    @property
    def is_flush_due(self) -> bool:
        """Whether a crash now would lose too much."""
        age_s = time.monotonic() - self._flushed_s
        limit_s = _FLUSH_SOONEST_S if self._unflushed >= _FLUSH_CHUNKS else _FLUSH_LATEST_S
        return self._unflushed > 0 and age_s >= limit_s

    def flush(self) -> None:
        """Make all present chunks durable. Other threads may write meanwhile."""
        with self._flushing:
            if self._is_finished:
                return
            bits = self._bits
            self._sync()
            write_whole(self._have_path, bits.to_bytes(-(-self.manifest.chunks // 8), "little"))

    def finish(self) -> None:
        """Make the complete download durable; its bitmap is not written any more."""
        with self._flushing:
            self._sync()
            self._is_finished = True

    def _sync(self) -> None:
        with self._lock:
            self._require_open()
            self._unflushed, self._flushed_s = 0, time.monotonic()
            descriptor = os.dup(self._file.fileno())
        try:
            with disk(self._part):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self, *, keep: bool = True) -> None:
        """Flush, if `keep`, and close the file. Idempotent."""
        try:
            if keep and not self._file.closed:
                self.flush()
        finally:
            with self._flushing, self._lock:
                self._file.close()

    def _resume(self) -> Iterator[int]:
        try:
            bits = int.from_bytes(read_whole(self._have_path, max_bytes=1 << 17) or b"", "little")
        except CorruptFault:
            bits = 0
        for index in range(self.manifest.chunks):
            if bits >> index & 1 and digest(self._read_at(index)) == self.manifest.chunk_hash(index):
                yield index

    def _read_at(self, index: int) -> bytes:
        with disk(self._part):
            return os.pread(self._file.fileno(), self.manifest.chunk_bytes(index), index * BLOB_CHUNK_BYTES)

    def _require_open(self) -> None:
        if self._file.closed:
            raise LocalFault("the download was closed")


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
        view, offset = view[written:], offset + written
