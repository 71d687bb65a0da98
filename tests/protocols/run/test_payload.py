"""Sizes of payloads, from the RunSpec alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.run.payload import (
    HEADER_BYTES,
    HIGH_LEVELS,
    LOW_LEVEL,
    MAX_Q,
    MOST_SCALE,
    NUMBERS,
    TOP_LEVEL,
    Layout,
    check_codec,
    check_frame,
    payload_bytes,
)


def test_the_published_size_at_64_of_4096():
    layout = Layout("sparse2", 1, 64)
    assert (layout.low_bits, layout.high_bits) == (6, 128)
    assert layout.row_bytes == (2, 48, 16, 16)
    assert payload_bytes("sparse2", 1000, 64) == HEADER_BYTES + 1000 * 82
    assert payload_bytes("sparse2", 10**6, 64) / (10**6 * 4096) <= 0.0205


@given(st.integers(1, 4096), st.integers(1, 1 << 25))
def test_any_layout_has_room_for_every_index_and_ends_at_its_size(k, chunks):
    layout = Layout("sparse2", chunks, k)
    assert layout.high_bits >= k + 1
    assert (4095 >> layout.low_bits) + k - 1 < layout.high_bits
    sections = [chunks * row for row in layout.row_bytes]
    assert layout.offsets[-1] + sections[-1] == layout.size_bytes
    assert list(layout.offsets[1:]) == [layout.offsets[i] + sections[i] for i in range(3)]


@pytest.mark.parametrize(("k", "low_bits"), [(1, 12), (2, 11), (3, 10), (63, 6), (64, 6), (65, 5), (4096, 0)])
def test_low_bits(k, low_bits):
    assert Layout("sparse2", 1, k).low_bits == low_bits


def test_header_golden_bytes():
    assert Layout("sparse2", 258, 64).header.hex() == "61746c70" + "01" + "01" + "4000" + "02010000"


@pytest.mark.parametrize(
    ("at", "byte", "words"),
    [
        (0, 0x60, "payload begins with 60746c70; one begins with 61746c70"),
        (3, 0x71, "payload begins with 61746c71; one begins with 61746c70"),
        (4, 2, "payload version 2; this node speaks 1"),
        (5, 3, r"payload codec 3 \(int8\); the run's is 1 \(sparse2\)"),
        (5, 9, r"payload codec 9 \(of no name\); the run's is 1 \(sparse2\)"),
        (6, 65, "payload k 65; the run's is 64"),
        (7, 1, "payload k 320; the run's is 64"),
        (8, 3, "payload chunks 3; 2 are legal"),
        (11, 1, "payload chunks 16777218; 2 are legal"),
    ],
)
def test_a_frame_of_another_header_is_refused_with_the_field_and_both_values(at, byte, words):
    layout = Layout("sparse2", 2, 64)
    payload = bytearray(layout.header + bytes(layout.size_bytes - HEADER_BYTES))
    check_frame(payload, layout)
    payload[at] = byte
    for said in (payload, memoryview(payload)):
        with pytest.raises(DecodeError, match=f"^{words}$"):
            check_frame(said, layout)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_other_header_is_one_refusal(said):
    layout = Layout("sparse2", 2, 64)
    payload = said + bytes(layout.size_bytes - HEADER_BYTES)
    if said == layout.header:
        check_frame(payload, layout)
        return
    with pytest.raises(DecodeError, match=r"^payload "):
        check_frame(payload, layout)


def test_the_first_field_that_differs_is_named():
    layout, other = Layout("sparse2", 2, 64), Layout("sparse1", 2, 65)
    payload = bytearray(other.header + bytes(layout.size_bytes - HEADER_BYTES))
    with pytest.raises(DecodeError, match="codec 2"):
        check_frame(payload, layout)
    payload[4] = 2
    for said in (payload, payload[:HEADER_BYTES], payload + b"more"):
        with pytest.raises(DecodeError, match="version 2"):
            check_frame(said, layout)


SIZE = Layout("sparse2", 2, 64).size_bytes


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, SIZE - 1, SIZE + 1])
def test_a_frame_of_another_length_is_refused(size):
    layout = Layout("sparse2", 2, 64)
    with pytest.raises(DecodeError, match=f"payload of {size} bytes where {SIZE} are legal"):
        check_frame((layout.header + bytes(layout.size_bytes))[:size], layout)


def test_the_largest_q_keeps_the_bit_budget():
    assert MAX_Q < 1 << 28
    assert 2 * 1024 * 255 * MAX_Q * 1024 + 1024 * 1024 * 255 < 1 << 63


@pytest.mark.parametrize(
    ("codec", "k", "number", "chunk_bytes"),
    [("sparse1", 64, "02", 2 + 48 + 16 + 8), ("int8", 4096, "03", 2 + 4096), ("e3m0", 4096, "04", 32 + 2048)],
)
def test_other_codecs_have_their_number_and_size(codec, k, number, chunk_bytes):
    layout = Layout(codec, 258, k)
    assert layout.header.hex() == "61746c70" + "01" + number + k.to_bytes(2, "little").hex() + "02010000"
    assert payload_bytes(codec, 258, k) == HEADER_BYTES + 258 * chunk_bytes
    assert layout.offsets[-1] + 258 * layout.row_bytes[-1] == layout.size_bytes


@pytest.mark.parametrize("codec", NUMBERS)
def test_no_value_exceeds_the_bound_of_the_bit_budget(codec):
    bits = MOST_SCALE[codec]
    scale = (1024 + bits % 1024) << (bits // 1024 - 1)
    level = TOP_LEVEL.get(codec, {"sparse2": HIGH_LEVELS[-1]}.get(codec, LOW_LEVEL))
    assert level * scale <= MAX_Q


@pytest.mark.parametrize(("codec", "k"), [("zip", 64), ("", 64), ("sparse2", 0), ("sparse1", 4097), ("int8", 64)])
def test_what_no_run_can_have_is_refused(codec, k):
    with pytest.raises(ConfigError, match="compress"):
        check_codec(codec, k)
