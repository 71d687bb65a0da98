"""Blobs: immutable bytes named by BLAKE3, cut into chunks of 1 MiB that verify one by one.

A blob's id is the BLAKE3 of its canonical manifest (version, size, chunk hashes). The id is enough to verify the
manifest, and the manifest to verify each chunk from any holder.
"""

from collections.abc import Iterable
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest, digest

MANIFEST_VERSION = 1
BLOB_CHUNK_BYTES = 1 << 20
MANIFEST_MAX_BYTES = 4 << 20


class BlobManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Size of a blob and the hash of every chunk."""

    version: int
    size_bytes: Annotated[int, Meta(ge=0)]
    hashes: Annotated[bytes, Meta(max_length=MANIFEST_MAX_BYTES)]
    """BLAKE3 of each chunk, 32 bytes each, in order."""

    @property
    def chunks(self) -> int:
        """Number of chunks; the last may be short."""
        return len(self.hashes) // DIGEST_BYTES

    def chunk_hash(self, index: int) -> Digest:
        """BLAKE3 of chunk `index`."""
        return Digest(self.hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    def chunk_bytes(self, index: int) -> int:
        """Size in bytes of chunk `index`."""
        return min(BLOB_CHUNK_BYTES, self.size_bytes - index * BLOB_CHUNK_BYTES)

    @property
    def id(self) -> Digest:
        """The blob's id: BLAKE3 of the canonical manifest."""
        return digest(codec.encode(self))


def manifest_of(chunks: Iterable[bytes | memoryview]) -> BlobManifest:
    """Manifest of a sequence of 1 MiB chunks (the last may be short)."""
    size, hashes = 0, bytearray()
    for chunk in chunks:
        size += len(chunk)
        hashes += digest(chunk)
    return BlobManifest(MANIFEST_VERSION, size, bytes(hashes))


def manifest_of_bytes(data: bytes | bytearray | memoryview) -> BlobManifest:
    """Manifest of bytes in memory."""
    view = memoryview(data)
    return manifest_of(view[at : at + BLOB_CHUNK_BYTES] for at in range(0, len(view), BLOB_CHUNK_BYTES))


def manifest_of_file(file: BinaryIO) -> BlobManifest:
    """Manifest of an open file, which is read once to its end."""
    return manifest_of(iter(lambda: file.read(BLOB_CHUNK_BYTES), b""))


def decode_manifest(data: bytes, blob: Digest) -> BlobManifest:
    """The manifest whose id is `blob`. Raises DecodeError for any other bytes."""
    manifest = codec.decode(data, BlobManifest, max_bytes=MANIFEST_MAX_BYTES)
    chunks = -(-manifest.size_bytes // BLOB_CHUNK_BYTES)
    if manifest.version != MANIFEST_VERSION:
        raise DecodeError("manifest of another version")
    if len(manifest.hashes) != chunks * DIGEST_BYTES or manifest.id != blob:
        raise DecodeError("manifest does not belong to the blob")
    return manifest
