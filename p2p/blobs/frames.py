"""The messages of the blob wire, each in one length frame. Wire: docs/wires/blob.md.

initiator                            responder
Ask(blob, at_once)            ->     Offer(manifest, have) or Refusal(reason)
Want(index) …                 ->     Chunk(index), then a frame with the chunk's bytes
Cancel(index)                        … or nothing, if the chunk was cancelled in time
                              <-     Have(have) when a responder that still downloads has more
closes                               closes after that
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols.blobs import MANIFEST_MAX_BYTES
from atoll.protocols.ids import Digest
from atoll.protocols.wires import BLOB

PROTOCOL = BLOB.protocol(2)
WINDOW = 16
"""Most chunks of 1 MiB that one stream may have in flight."""
ASK_MAX_BYTES = 64
REASON_CHARACTERS = 120
HAVE_MAX_BYTES = 1 << 14
"""Largest bitmap, in bytes: one bit per chunk of the largest blob."""
OFFER_OVERHEAD_BYTES = 32 + 4 * REASON_CHARACTERS

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
Bits = Annotated[bytes, Meta(max_length=HAVE_MAX_BYTES)]
"""A bitmap of chunks: chunk `i` is bit `i % 8` of byte `i // 8`; empty: all chunks."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask", forbid_unknown_fields=True):
    """First frame: the blob, and the number of its first chunks to send at once."""

    blob: Digest
    at_once: Annotated[int, Meta(ge=0, le=WINDOW)]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want", forbid_unknown_fields=True):
    """Request to send a chunk."""

    index: Index


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel", forbid_unknown_fields=True):
    """Withdraw the request for a chunk, unless it is being sent."""

    index: Index


class BlobOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The responder has the blob, or a part of it."""

    manifest: Annotated[bytes, Meta(max_length=MANIFEST_MAX_BYTES)]
    """Encoded BlobManifest."""
    have: Bits
    """Chunks that it has."""


class BlobRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal", forbid_unknown_fields=True):
    """The responder does not send this blob now."""

    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS)]


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have", forbid_unknown_fields=True):
    """Update of the chunks that the responder has; never fewer than before."""

    have: Bits


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk", forbid_unknown_fields=True):
    """The next frame holds the bytes of this chunk."""

    index: Index


Wish: TypeAlias = Want | Cancel
Answer: TypeAlias = BlobOffer | BlobRefusal
Piece: TypeAlias = Have | Chunk


def pack_bits(bits: int, chunks: int) -> bytes:
    """Bitmap on the wire for the chunks set in `bits`."""
    return b"" if bits == (1 << chunks) - 1 else bits.to_bytes(-(-chunks // 8), "little")


def unpack_bits(data: bytes, chunks: int) -> int:
    """The chunks in a bitmap, one bit each; bits above `chunks` are dropped."""
    everything = (1 << chunks) - 1
    return int.from_bytes(data, "little") & everything if data else everything
