"""The index of a generation, in its three formats; the newest is written and all are read."""

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import DIGEST_BYTES, Digest, digest

FORMAT = 3
MANIFEST_MAX_BYTES = 64 << 20


class TensorRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the file, in file order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ArrayRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor that is a file of its own: nothing but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: bytes
    """What was hashed before the values."""
    hash: Digest
    """BLAKE3 of `before` and the values."""


class GenerationManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The index of a generation: its tensors, their hash and the caller's body."""

    format: int
    rows: tuple[TensorRow, ...]
    tensors: Digest
    """BLAKE3 of the tensor file; with parts, of that and of them (`hash_with_parts`), before format 3."""
    body: bytes
    """The caller's own message, msgpack."""
    arrays: tuple[ArrayRow, ...] = ()
    rare_rows: tuple[TensorRow, ...] = ()
    rare: bytes = b""
    """BLAKE3 of the file of rare tensors; with parts, of that and of them. Empty: there are none."""


class SecondManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The manifest of format 2."""

    format: int
    rows: tuple[TensorRow, ...]
    tensors: Digest
    body: bytes
    arrays: tuple[ArrayRow, ...]


class FirstManifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The manifest of format 1."""

    format: int
    rows: tuple[TensorRow, ...]
    tensors: Digest
    body: bytes


EMPTY = GenerationManifest(FORMAT, (), Digest(b""), b"")
"""Of a generation that nothing was written to yet."""


def manifest_of(data: bytes) -> GenerationManifest:
    """The index in a manifest's file. Raises DecodeError."""
    body = data[DIGEST_BYTES:]
    if digest(body) != data[:DIGEST_BYTES]:
        raise DecodeError("the manifest does not have its hash")
    manifest = _decoded(body)
    if not 1 <= manifest.format <= FORMAT:
        raise DecodeError(f"format {manifest.format}; this version reads 1 to {FORMAT}")
    return manifest


def _decoded(body: bytes) -> GenerationManifest:
    for kind in (GenerationManifest, SecondManifest):
        try:
            found = codec.decode(body, kind, max_bytes=MANIFEST_MAX_BYTES)
        except DecodeError:
            continue
        return GenerationManifest(**msgspec.structs.asdict(found))
    return GenerationManifest(
        **msgspec.structs.asdict(codec.decode(body, FirstManifest, max_bytes=MANIFEST_MAX_BYTES))
    )
