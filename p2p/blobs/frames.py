"""The messages of the blob wire, each in one length frame. Page: docs/wires/blob.md.

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

from atoll.protocols.ids import Digest
from atoll.protocols.wires import BLOB

PROTOCOL = BLOB.protocol(2)
WINDOW = 16
"""Chunks of 1 MiB that one stream may have in flight."""
ASK_MAX_BYTES = 64
REASON_CHARACTERS = 120
HAVE_MAX_BYTES = 1 << 14
"""One bit per chunk of the largest blob."""
OFFER_OVERHEAD_BYTES = 32 + 4 * REASON_CHARACTERS

Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
Bits = Annotated[bytes, Meta(max_length=HAVE_MAX_BYTES)]
"""Chunk `i` is bit `i % 8` of byte `i // 8`; empty: all chunks."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask", forbid_unknown_fields=True):
    """The first frame: which blob, and how many of its first chunks come without being asked for."""

    blob: Annotated[Digest, Meta(min_length=32, max_length=32)]
    at_once: Annotated[int, Meta(ge=0, le=WINDOW)]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want", forbid_unknown_fields=True):
    """Send this chunk."""

    index: Index


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel", forbid_unknown_fields=True):
    """Do not send this chunk, unless it is being sent."""

    index: Index


class BlobOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The responder holds the blob, or a part of it."""

    manifest: bytes
    have: Bits


class BlobRefusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal", forbid_unknown_fields=True):
    """The responder does not send this blob now."""

    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS)]


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have", forbid_unknown_fields=True):
    """The chunks that the responder has by now; never fewer than before."""

    have: Bits


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk", forbid_unknown_fields=True):
    """The next frame holds the bytes of this chunk."""

    index: Index


Wish: TypeAlias = Want | Cancel
Answer: TypeAlias = BlobOffer | BlobRefusal
Piece: TypeAlias = Have | Chunk


def pack_bits(bits: int, chunks: int) -> bytes:
    """`bits` for the wire."""
    return b"" if bits == (1 << chunks) - 1 else bits.to_bytes(-(-chunks // 8), "little")


def unpack_bits(data: bytes, chunks: int) -> int:
    """The chunks that `data` names; bits above `chunks` are dropped."""
    everything = (1 << chunks) - 1
    return int.from_bytes(data, "little") & everything if data else everything
