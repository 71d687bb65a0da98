"""Sizes of payloads, from the RunSpec alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError
from atoll.protocols.payload import HEADER_BYTES, MAX_Q, Layout, check_frame, payload_bytes


def test_the_published_size_at_64_of_4096():
    layout = Layout(1, 64)
    assert (layout.low_bits, layout.high_bits) == (6, 128)
    assert layout.row_bytes == (2, 48, 16, 16)
    assert payload_bytes(1000, 64) == HEADER_BYTES + 1000 * 82
    assert payload_bytes(10**6, 64) / (10**6 * 4096) <= 0.0205


@given(st.integers(1, 4096), st.integers(1, 1 << 25))
def test_any_layout_has_room_for_every_index_and_ends_at_its_size(k, chunks):
    layout = Layout(chunks, k)
    assert layout.high_bits >= k + 1
    assert (4095 >> layout.low_bits) + k - 1 < layout.high_bits
    sections = [chunks * row for row in layout.row_bytes]
    assert layout.offsets[-1] + sections[-1] == layout.size_bytes
    assert list(layout.offsets[1:]) == [layout.offsets[i] + sections[i] for i in range(3)]


@pytest.mark.parametrize(("k", "low_bits"), [(1, 12), (2, 11), (3, 10), (63, 6), (64, 6), (65, 5), (4096, 0)])
def test_low_bits(k, low_bits):
    assert Layout(1, k).low_bits == low_bits


def test_header_golden_bytes():
    assert Layout(258, 64).header.hex() == "61746c70" + "01" + "01" + "4000" + "02010000"


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_a_frame_of_another_header_is_refused(at):
    layout = Layout(2, 64)
    payload = bytearray(layout.header + bytes(layout.size_bytes - HEADER_BYTES))
    check_frame(payload, layout)
    payload[at] ^= 1
    with pytest.raises(DecodeError):
        check_frame(payload, layout)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, Layout(2, 64).size_bytes - 1, Layout(2, 64).size_bytes + 1])
def test_a_frame_of_another_length_is_refused(size):
    layout = Layout(2, 64)
    with pytest.raises(DecodeError):
        check_frame((layout.header + bytes(layout.size_bytes))[:size], layout)


def test_the_largest_q_keeps_the_bit_budget():
    assert MAX_Q < 1 << 28
    assert 2 * 1024 * 255 * MAX_Q * 1024 + 1024 * 1024 * 255 < 1 << 63
