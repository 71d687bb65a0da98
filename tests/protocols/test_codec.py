"""A decoder returns a value or raises DecodeError; one byte string per value."""

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.blobs import BlobManifest
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.records import Entry
from atoll.protocols.ledger.registers import Register
from atoll.protocols.local.worker_messages import ReplyEnvelope, RequestEnvelope
from atoll.protocols.run.run_spec import RunSpec, SignedRun

KINDS = [Entry, Register, RunSpec, SignedRun, BlobManifest, RequestEnvelope, ReplyEnvelope]


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    whole: int
    text: str
    real: float
    many: tuple[int, ...]


REALS = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False).map(lambda real: real + 0.0)
"""Every float that is legal in a message: no −0 either."""
BOXES = st.builds(
    Box,
    whole=st.integers(-(2**63), 2**64 - 1), text=st.text(), real=REALS,
    many=st.lists(st.integers(0, 9)).map(tuple),
)  # fmt: skip


@given(BOXES)
def test_round_trip_is_canonical(box):
    data = codec.encode(box)
    assert codec.encode(codec.decode(data, Box)) == data
    assert codec.decode(memoryview(data), Box).text == box.text


def test_golden_bytes():
    data = codec.encode(Box(1, "é", 0.5, (300,)))
    assert data.hex() == (
        "84" "a46d616e79" "91cd012c" "a47265616c" "cb3fe0000000000000" "a474657874" "a2c3a9" "a577686f6c65" "01"
    )  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb({"whole": 1, "text": "", "real": 0.0, "many": []}),  # keys out of order
        msgpack.packb({"many": [], "real": 0.0, "text": "", "whole": 1}) + b"\0",  # a tail
        msgpack.packb({"many": [], "real": 0, "text": "", "whole": 1}),  # an int where a float belongs
        msgpack.packb({"many": [], "real": 0.0, "text": "", "whole": 1.0}),
        msgpack.packb({"many": [], "real": 0.0, "text": "", "whole": True}),
        msgpack.packb({"many": [], "real": 0.0, "text": b"", "whole": 1}),
        msgpack.packb({"many": [], "real": 0.0, "text": "", "whole": 1, "x": 1}),
        msgpack.packb({"many": [], "real": 0.0, "text": ""}),
        msgpack.packb({"many": [], "real": 0.0, "text": "", "whole": 1}).replace(
            b"\x01", b"\xcc\x01"
        ),  # long form
        bytes.fromhex("84a46d616e79ddffffffff"),  # four thousand million elements, none of them there
        bytes.fromhex("84a46d616e7990a47265616cca00000000a474657874a0a577686f6c6501"),  # a float32
        bytes.fromhex("84a46d616e7990a47265616ccb0000000000000000a474657874a3eda080a577686f6c6501"),  # a surrogate
        b"\x81" * 60000,
        b"\x91" * 60000,
        b"\xc1",
    ],
)
def test_what_nobody_writes_is_refused(data):
    with pytest.raises(DecodeError):
        codec.decode(data, Box)


@pytest.mark.parametrize("letter", [b"\x91", b"\x81\xa1a"])
def test_nesting_without_end_is_a_decode_error_for_whatever_kind(letter):
    """Deeper than Python's stack: a type that has any value somewhere would raise RecursionError."""
    data = letter * (codec.MESSAGE_MAX_BYTES // len(letter) - 1) + b"\xc0"
    for kind in (list[Any], dict[str, Any], Box, object):
        with pytest.raises(DecodeError):
            codec.decode(data, kind)


def test_the_cap_comes_before_the_work():
    data = codec.encode(Box(1, "x" * 100, 0.0, ()))
    codec.decode(data, Box, max_bytes=len(data))
    with pytest.raises(DecodeError):
        codec.decode(data, Box, max_bytes=len(data) - 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.binary(max_size=200))
@example(data=bytes.fromhex("ddffffffff"))
@example(data=bytes.fromhex("c6ffffffff"))
@example(data=b"\x97" * 5000)
def test_random_bytes_raise_nothing_but_decode_error(kind, data):
    try:
        value = codec.decode(data, kind)
    except DecodeError:
        return
    assert codec.encode(value) == data
