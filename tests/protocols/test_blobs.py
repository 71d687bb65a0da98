"""A blob's id names its manifest, the manifest names every chunk."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.blobs import (
    BLOB_CHUNK_BYTES,
    BlobManifest,
    decode_manifest,
    manifest_of_bytes,
    manifest_of_file,
)
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import digest


@pytest.mark.parametrize(
    "size", [0, 1, BLOB_CHUNK_BYTES - 1, BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES + 1, 3 * BLOB_CHUNK_BYTES]
)
def test_chunks_cover_the_blob(size):
    data = bytes(size)
    manifest = manifest_of_bytes(data)
    assert manifest == manifest_of_file(io.BytesIO(data))
    assert sum(manifest.chunk_bytes(at) for at in range(manifest.chunks)) == size
    for at in range(manifest.chunks):
        part = data[at * BLOB_CHUNK_BYTES : (at + 1) * BLOB_CHUNK_BYTES]
        assert len(part) == manifest.chunk_bytes(at) > 0
        assert digest(part) == manifest.chunk_hash(at)
    assert decode_manifest(codec.encode(manifest), manifest.id) == manifest


def test_golden_id():
    assert (
        manifest_of_bytes(b"atoll").id.hex() == "434948d0067f70c3540a85bf7c8585e1bf08efa6eede8e116121ad40ba8b8cae"
    )


@pytest.mark.parametrize(
    "bad",
    [
        BlobManifest(2, 5, bytes(32)),
        BlobManifest(1, -5, b""),
        BlobManifest(1, -1, b""),
        BlobManifest(1, 5, b""),
        BlobManifest(1, 5, bytes(31)),
        BlobManifest(1, 5, bytes(64)),
        BlobManifest(1, 0, bytes(32)),
        BlobManifest(1, BLOB_CHUNK_BYTES + 1, bytes(32)),
        BlobManifest(1, 2**64 - 1, bytes(32)),
        BlobManifest(1, -(2**63), bytes(32)),
    ],
)
def test_illegal_manifests_are_refused_under_their_own_name(bad):
    with pytest.raises(DecodeError):
        decode_manifest(codec.encode(bad), bad.id)


@settings(max_examples=100)
@given(st.data())
def test_a_changed_manifest_is_another_blob(data):
    manifest = manifest_of_bytes(b"x" * (BLOB_CHUNK_BYTES + 5))
    raw = bytearray(codec.encode(manifest))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DecodeError):
        decode_manifest(bytes(raw), manifest.id)


def test_a_manifest_of_another_blob_is_refused():
    manifest = manifest_of_bytes(b"one")
    with pytest.raises(DecodeError):
        decode_manifest(codec.encode(replace(manifest, size_bytes=4)), manifest.id)
