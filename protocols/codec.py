"""Bytes <-> messages. Canonical msgpack: one byte string per value, sizes capped before decoding.

msgpack is the format (https://msgpack.org): all bytes that peers sign, hash or send as messages are msgpack.
msgspec is the library: message classes are `msgspec.Struct`s, and its msgpack encoder and decoder check types and
lengths. atoll does not import the package `msgpack`. msgspec also writes JSON, for local files and the control
socket only.

A decoder returns a value or raises DecodeError, nothing else. Encoding the decoded value must give back the same
bytes: a missing key, a redundant length form or a reordered map is refused, so a hash over the bytes names the
value. Ranges of numbers and largest lengths are part of the types. A float is finite, not −0 and not subnormal.
"""

import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
from msgspec.inspect import FloatType, type_info

from atoll.protocols.errors import ConfigError, DecodeError

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


def decode(
    data: bytes | memoryview, kind: type[T], *, max_bytes: int = MESSAGE_MAX_BYTES, any_float: bool = False
) -> T:
    """A message of type `kind`. Raises DecodeError for anything that is not its canonical form.

    `any_float` accepts NaN and all other floats: measurements of our own processes, never bytes of a peer.
    """
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
    if not (any_float or all(map(_is_plain, _floats(value)))):
        raise DecodeError(f"{kind_name(kind)} with a float that is not finite, −0 or subnormal")
    return value


def check_types(value: msgspec.Struct, prefix: str = "") -> None:
    """Raise ConfigError, with the key's name after `prefix`, unless every field is legal for its type."""
    try:
        decode(encode(value), type(value))
    except (DecodeError, UnicodeError, OverflowError) as error:
        reason, _, key = str(error.__cause__ or error).replace("`", "").partition(" - at $.")
        if not key:
            raise ConfigError(reason) from error
        found = attrgetter(key.partition("[")[0])(value)
        shown = f" = {found}" if isinstance(found, int | float) else ""
        raise ConfigError(f"{prefix}{key}{shown}: {reason}") from error


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in _float_fields(type(value)):
            yield from _floats(getattr(value, name))
    elif isinstance(value, tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _floats(part)


@lru_cache(maxsize=256)
def _float_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of the fields that may hold floats: a value may have a thousand digests that need no look."""
    return tuple(field.name for field in msgspec.structs.fields(kind) if _holds_float(type_info(field.type)))


def _holds_float(info: Any) -> bool:
    parts = msgspec.structs.astuple(info) if isinstance(info, msgspec.Struct) else info
    return isinstance(info, FloatType) or (isinstance(parts, tuple) and any(map(_holds_float, parts)))


def _is_plain(number: float) -> bool:
    """False for floats that no honest node writes."""
    return sys.float_info.min <= abs(number) < math.inf or (number == 0 and math.copysign(1, number) > 0)


def kind_name(kind: Any) -> str:
    """Name of a message type, for error texts."""
    return getattr(kind, "__name__", str(kind))
