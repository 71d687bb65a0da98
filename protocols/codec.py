"""Bytes <-> messages. Canonical msgpack: one byte string per value, sizes capped before decoding.

msgpack is the format (https://msgpack.org): all bytes that peers sign, hash or send as messages are msgpack.
msgspec is the library: message classes are `msgspec.Struct`s, and its msgpack encoder and decoder check types and
lengths. atoll does not import the package `msgpack`. msgspec also writes JSON, for local files and the control
socket only.

A decoder returns a value or raises DecodeError, nothing else. Encoding the decoded value must give back the same
bytes: a missing key, a redundant length form or a reordered map is refused, so a hash over the bytes names the
value.
"""

from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from atoll.protocols.errors import DecodeError

T = TypeVar("T")

MESSAGE_MAX_BYTES = 64 * 1024
"""Default cap, in bytes, of one call message, ledger entry or gossip item."""

_encoder = msgspec.msgpack.Encoder(order="sorted")


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, strict=True)


def encode(value: Any) -> bytes:
    """Canonical msgpack bytes of a message."""
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
    """Name of a message type, for error texts."""
    return getattr(kind, "__name__", str(kind))
