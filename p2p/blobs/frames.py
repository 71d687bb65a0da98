"""The messages of the blob wire, each in one length frame. Page: docs/wires/blob.md.

initiator                       responder
Ask(blob)                ->     Offer(manifest) or Refusal(reason)
Want(index) … up to 4    ->     the chunk's bytes, in the order asked
Done()                   ->     Done()
closes                          closes after that
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols.ids import Digest
from atoll.protocols.wires import BLOB

PROTOCOL = BLOB.protocol(1)
WINDOW = 4
"""Chunks of 1 MiB that one stream has in flight."""
ASK_MAX_BYTES = 64
REASON_CHARACTERS = 120
OFFER_OVERHEAD_BYTES = 16 + 4 * REASON_CHARACTERS


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask", forbid_unknown_fields=True):
    """The first frame: which blob."""

    blob: Annotated[Digest, Meta(min_length=32, max_length=32)]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want", forbid_unknown_fields=True):
    """Send this chunk."""

    index: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done", forbid_unknown_fields=True):
    """The initiator has what it wanted; the responder has seen that."""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer", forbid_unknown_fields=True):
    """The responder holds the blob."""

    manifest: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal", forbid_unknown_fields=True):
    """The responder does not send this blob now."""

    reason: Annotated[str, Meta(max_length=REASON_CHARACTERS)]


Wish: TypeAlias = Want | Done
Answer: TypeAlias = Offer | Refusal
