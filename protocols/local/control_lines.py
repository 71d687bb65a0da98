"""Encodes and decodes control messages, one line of JSON each. A decoder raises nothing but DecodeError."""

from typing import Any

import msgspec

from atoll.protocols import errors
from atoll.protocols.errors import DecodeError
from atoll.protocols.local import control_messages
from atoll.protocols.wires import CONTROL

REQUEST_MAX_BYTES = 64 * 1024
MAX_PAUSE_S = 3650 * 86400
"""Longest pause that ends by itself."""
MAX_RATES = 64
"""Most characters of both rates of SetLimits."""
REPLY_MAX_BYTES = 32 * 1024 * 1024
"""Largest reply: the rounds of a long run. Both ends belong to the same user."""


class _Version(msgspec.Struct, frozen=True):
    v: int


_encoder = msgspec.json.Encoder()
_version = msgspec.json.Decoder(_Version)
_requests = msgspec.json.Decoder(control_messages.ControlRequest)
_replies = msgspec.json.Decoder(control_messages.ControlReply)


def encode_ask(ask: control_messages.Ask) -> bytes:
    """A request as one line of JSON for the daemon."""
    return _encoder.encode(control_messages.ControlRequest(CONTROL.newest, ask)) + b"\n"


def encode_answer(answer: control_messages.Answer) -> bytes:
    """An answer as one line of JSON for the operator. Non-finite numbers become null."""
    return _encoder.encode(control_messages.ControlReply(CONTROL.newest, answer)) + b"\n"


def decode_ask(line: bytes) -> control_messages.Ask:
    """The request on a line, with its numbers in range. Raises DecodeError."""
    request: control_messages.ControlRequest = _decode(_requests, line, REQUEST_MAX_BYTES)
    ask = request.ask
    match ask:
        case control_messages.Watch():
            _within("interval_s", ask.interval_s, 0.05, 3600)
        case control_messages.GetRounds():
            _within("last", ask.last, 1, control_messages.MAX_ROUNDS)
        case control_messages.GetLogs():
            _within("tail", ask.tail, 0, control_messages.MAX_LINES)
        case control_messages.PauseNode():
            if not (len(ask.reason) <= 200 and ask.reason.isprintable()):
                raise DecodeError("reason must have at most 200 printable characters")
            _within("for_s", 1.0 if ask.for_s is None else ask.for_s, 1.0, MAX_PAUSE_S)
        case control_messages.SetLimits():
            if len((ask.up or "") + (ask.down or "")) > MAX_RATES:
                raise DecodeError(f"rates must have at most {MAX_RATES} characters")
        case control_messages.ExcludePeer():
            if not (len(ask.reason) <= control_messages.MAX_REASON and ask.reason.isprintable()):
                raise DecodeError(f"reason must have at most {control_messages.MAX_REASON} printable characters")
            _within("first", ask.first or 0, 0, (1 << 24) - 1)
            _within("since", ask.since or 0, 0, (1 << 24) - 1)
    return ask


def decode_answer(line: bytes) -> control_messages.Answer:
    """The answer on a line. Raises DecodeError."""
    reply: control_messages.ControlReply = _decode(_replies, line, REPLY_MAX_BYTES)
    return reply.answer


def refusal(error: errors.AtollError) -> control_messages.CommandRefused:
    """The answer that carries an error to the operator."""
    return control_messages.CommandRefused(type(error).__name__, str(error), error.hint)


def fault_of(refused: control_messages.CommandRefused) -> errors.AtollError:
    """The error in a refusal; LocalFault if this side does not know its name."""
    kind = getattr(errors, refused.fault, errors.LocalFault)
    if not (isinstance(kind, type) and issubclass(kind, errors.AtollError)):
        kind = errors.LocalFault
    return kind(refused.message, hint=refused.hint)


def _decode(decoder: msgspec.json.Decoder[Any], line: bytes, max_bytes: int) -> Any:
    if len(line) > max_bytes:
        raise DecodeError(f"{len(line)} bytes where at most {max_bytes} are legal")
    try:
        version = _version.decode(line).v
        if not CONTROL.oldest <= version <= CONTROL.newest:
            raise DecodeError(
                f"control version {version}; this side speaks {CONTROL.oldest} to {CONTROL.newest}",
                hint="upgrade atoll and restart the node",
            )
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not a legal control message: {error}") from error


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise DecodeError(f"{name} = {value} is outside {low} … {high}")
