"""Bytes <-> messages. Canonical msgpack: one byte string per value, sizes capped before decoding.

A decoder returns a value or raises DecodeError, nothing else. Encoding the decoded value must give
back the same bytes, so that a missing key, a redundant length form or a reordered map is refused
and a hash over the bytes names the value.
"""

from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from atoll.protocols.errors import DecodeError

T = TypeVar("T")

MESSAGE_MAX_BYTES = 64 * 1024
"""Cap for one control message, record or gossip item."""

_encoder = msgspec.msgpack.Encoder(order="sorted")


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True)


def encode(value: Any) -> bytes:
    """Canonical bytes of a message."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T], *, max_bytes: int = MESSAGE_MAX_BYTES) -> T:
    """A message of type `kind`. Raises DecodeError for anything that is not its canonical form."""
    if len(data) > max_bytes:
        raise DecodeError(f"{len(data)} bytes where at most {max_bytes} are legal")
    try:
        value: T = _decoder(cast(Any, kind)).decode(data)
        again = _encoder.encode(value)
    except (
        msgspec.MsgspecError,
        UnicodeError,
        OverflowError,
        RecursionError,
        ValueError,
        TypeError,
    ) as error:
        raise DecodeError(f"not a legal {kind_name(kind)}: {error}") from error
    if again != bytes(data):
        raise DecodeError(f"not the canonical form of {kind_name(kind)}")
    return value


def kind_name(kind: Any) -> str:
    """Name of a message type for people."""
    return getattr(kind, "__name__", str(kind))
