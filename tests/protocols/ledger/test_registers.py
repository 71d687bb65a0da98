"""Registers: signed, ordered by (epoch, seq), every number within its bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.ledger.registers import (
    REGISTER_VERSION,
    Addresses,
    Holding,
    Lease,
    Register,
    Validation,
    decode_register,
    sign_register,
    unsigned,
)

AUTHOR = Identity(bytes(range(32)))
RUN = RunId(b"r" * 32)
LEASE = Lease("training", 4, 3, b"s" * 32, 2, 812.5, 2.25, 3.5, "Zoë")
HOLDING = Holding(b"\x03", 8)
FOUND = Validation(3, b"s" * 32, 2.5)
ADDRESSES = Addresses(("/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.1/udp/4001/quic-v1"))


def forged(value, **changes):
    """A register that is signed but was never checked."""
    draft = replace(Register(REGISTER_VERSION, RUN, AUTHOR.peer_id, 1, 2, 30.0, value, b""), **changes)
    return codec.encode(replace(draft, signature=AUTHOR.sign("register/6", unsigned(draft))))


@pytest.mark.parametrize(
    "value", [LEASE, replace(LEASE, snapshot=b"", snapshot_round=-1, final=-1), ADDRESSES, HOLDING, FOUND]
)
def test_round_trip(value):
    reg = sign_register(RUN, AUTHOR, 1, 2, 30.0, value)
    assert decode_register(codec.encode(reg), RUN) == reg


def test_a_holding_is_small_and_bounded():
    assert codec.encode(HOLDING) == codec.encode(["holding", b"\x03", 8, []])
    blob = bytes(32)
    for bad in (
        Holding(bytes(513), 8),
        Holding(b"", -1),
        Holding(b"", 4097),
        Holding(b"", 8, ((0, blob[:-1]),)),
        Holding(b"", 8, ((-1, blob),)),
        Holding(b"", 8, ((4096, blob),)),
        Holding(b"", 8, tuple((at, blob) for at in range(49))),
    ):
        with pytest.raises(DecodeError):
            decode_register(forged(bad), RUN)


def test_golden_bytes():
    author = AUTHOR.peer_id.encode().hex()
    assert (
        forged(LEASE)
        .hex()
        .startswith(
            "98"
            "06"
            "c420" + "72" * 32 + "d934" + author + "01"
            "02"
            "cb403e000000000000"  # ttl 30.0
            "9a"
            "a56c65617365"
            "a8747261696e696e67"
            "04"
            "03"
            "c420" + "73" * 32 + "02"
            "cb4089640000000000"
            "cb4002000000000000"
            "cb400c000000000000"
            "a45a6fc3ab"
            "c440"
        )
    )


@pytest.mark.parametrize(
    "value",
    [
        *(replace(LEASE, **{key: value}) for key, values in {
            "round": (-1, 1 << 24), "final": (-2, 1 << 24), "snapshot": (b"x",), "snapshot_round": (-2, 1 << 24),
            "tokens_per_s": (-1.0, math.nan, math.inf, 1e12), "activity": ("sleeping",),
            "loss": (-0.1, math.nan, math.inf, 1e6), "round_s": (-0.1, math.nan, math.inf, 1e9),
            "name": ("x" * 33, " x", "x\x1b[2J", "\u202eretto", "e\u0301", 7, b"x", None),
        }.items() for value in values),
        Validation(1 << 24, b"s" * 32, 1.0), Validation(3, b"s" * 31, 1.0), Validation(3, b"", 1.0),
        *(Validation(3, b"s" * 32, bpb) for bpb in (-0.1, 1e6, math.inf, math.nan)),
        Addresses(("x",) * 17), Addresses(("x" * 257,)), Addresses(("",)),
        Addresses(("\x1b[31m",)), Addresses(("é",)), Addresses(("/ip4/192.0.2.1/tcp/4001\n",)),
    ],
)  # fmt: skip
def test_illegal_values_are_refused(value):
    with pytest.raises(DecodeError):
        decode_register(forged(value), RUN)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3}, {"version": 5}, {"version": 7},
            {"run": RunId(b"x" * 32)}, {"epoch": -1}, {"epoch": 1 << 48}, {"seq": -1},
        {"seq": 1 << 48},
        {"ttl_s": 0.0}, {"ttl_s": -1.0}, {"ttl_s": 3601.0}, {"ttl_s": math.nan}, {"ttl_s": math.inf},
        {"author": "x"},
    ],
)  # fmt: skip
def test_illegal_envelopes_are_refused(changes):
    with pytest.raises(DecodeError):
        decode_register(forged(LEASE, **changes), RUN)


def test_anothers_signature_is_refused():
    with pytest.raises(SignatureFault):
        decode_register(forged(LEASE, author=Identity(bytes(32)).peer_id), RUN)


def test_an_oversized_register_is_refused():
    with pytest.raises(DecodeError):
        decode_register(forged(Addresses(("x" * 256,) * 16)), RUN)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([LEASE, ADDRESSES, FOUND]), st.data())
def test_mutations_raise_peer_faults_only(value, data):
    raw = bytearray(forged(value))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PeerFault):
        decode_register(bytes(raw), RUN)
