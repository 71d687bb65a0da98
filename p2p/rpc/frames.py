"""The bytes of the calls wire: a Hello, then frames of a kind byte, an id, a method and a body.

Every frame has exactly one encoding. Wire: docs/wires/calls.md; golden bytes: tests/p2p/rpc/test_frames.py.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.wires import CALLS

PROTOCOL = CALLS.protocol(1)
"""Protocol id. Its number is the Hello's version and never changes; the Hello settles the wire's version."""
HELLO_MAX_BYTES = 1024
METHOD_MAX_BYTES = 64
HEADER_MAX_BYTES = 6 + METHOD_MAX_BYTES
AGENT_CHARACTERS = 64
MESSAGE_CHARACTERS = 300
_ID = struct.Struct("<BI")


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """First frame of each side of a calls stream."""

    agent: Annotated[str, Meta(max_length=AGENT_CHARACTERS)]
    """Program and version, for people."""
    newest: int
    """Newest version of the wire that the sender speaks."""
    oldest: int
    """Oldest version of the wire that the sender speaks."""
    peer: PeerId
    run: RunId
    wire: Annotated[str, Meta(max_length=32)]


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a FAILURE frame."""

    error: Annotated[str, Meta(max_length=32)]
    """Class name of the error in protocols/errors.py."""
    message: Annotated[str, Meta(max_length=MESSAGE_CHARACTERS)]


class Kind(IntEnum):
    """Kind of a frame, its first byte."""

    REQUEST = 1
    REPLY = 2
    FAILURE = 3
    NOTICE = 4
    CANCEL = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame; `id` is 0 for notices, `method` empty but for requests and notices."""

    kind: Kind
    id: int
    method: str
    body: memoryview


def hello(run_id: RunId, peer: PeerId, agent: str) -> Hello:
    """The Hello of this node."""
    printable = "".join(letter for letter in agent if letter.isprintable())[:AGENT_CHARACTERS]
    return Hello(agent=printable, newest=CALLS.newest, oldest=CALLS.oldest, peer=peer, run=run_id, wire=CALLS.name)


def request(number: int, method: str, body: bytes) -> bytes:
    """Frame of request `number`."""
    return _ID.pack(Kind.REQUEST, number) + _method(method) + body


def reply(number: int, body: bytes) -> bytes:
    """Frame of the reply to request `number`."""
    return _ID.pack(Kind.REPLY, number) + body


def failure(number: int, error: str, message: str) -> bytes:
    """Frame with the reason why request `number` failed."""
    body = Failure(error=error[:32], message=" ".join(message.split())[:MESSAGE_CHARACTERS])
    return _ID.pack(Kind.FAILURE, number) + codec.encode(body)


def notice(method: str, body: bytes) -> bytes:
    """Frame of a one-way notification."""
    return bytes((Kind.NOTICE,)) + _method(method) + body


def cancel(number: int) -> bytes:
    """Frame that cancels request `number`: its caller no longer waits."""
    return _ID.pack(Kind.CANCEL, number)


def parse(data: bytes) -> Frame:
    """Decode one frame. Raises DecodeError."""
    if not data:
        raise DecodeError("an empty frame")
    kind = data[0]
    if kind == Kind.NOTICE:
        method, start = _read_method(data, 1)
        return Frame(Kind.NOTICE, 0, method, memoryview(data)[start:])
    if not Kind.REQUEST <= kind <= Kind.CANCEL or len(data) < _ID.size:
        raise DecodeError(f"not a frame: kind {kind}, {len(data)} bytes")
    number: int = _ID.unpack_from(data)[1]
    if kind == Kind.REQUEST:
        method, start = _read_method(data, _ID.size)
        return Frame(Kind.REQUEST, number, method, memoryview(data)[start:])
    if kind == Kind.CANCEL and len(data) != _ID.size:
        raise DecodeError("a cancel frame with a body")
    return Frame(Kind(kind), number, "", memoryview(data)[_ID.size :])


def _method(name: str) -> bytes:
    raw = name.encode("ascii")
    if not 0 < len(raw) <= METHOD_MAX_BYTES:
        raise ValueError(f"a method name has 1 to {METHOD_MAX_BYTES} ASCII letters: {name!r}")
    return bytes((len(raw),)) + raw


def _read_method(data: bytes, at: int) -> tuple[str, int]:
    size = data[at] if at < len(data) else 0
    end = at + 1 + size
    if not 0 < size <= METHOD_MAX_BYTES or end > len(data):
        raise DecodeError("a frame without a legal method name")
    raw = data[at + 1 : end]
    if not raw.isascii():
        raise DecodeError("a method name that is not ASCII")
    return raw.decode("ascii"), end
