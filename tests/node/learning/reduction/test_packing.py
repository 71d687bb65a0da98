"""Error feedback on the wire: exact, and one form for each value."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.reduction.packing import packed, unpacked
from atoll.protocols.errors import DecodeError

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


def values_of(some):
    """4096 values, most of them zero."""
    values = torch.zeros(4096, dtype=torch.int32)
    for place, value in some.items():
        values[place] = value
    return values


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.integers(0, 4095), INT32, max_size=20))
def test_what_is_packed_is_read_back(some):
    values = values_of(some)
    assert torch.equal(unpacked(packed(values)), values)


def test_golden_bytes():
    assert packed(values_of({})) == b"\0"
    data = packed(values_of({0: 1, 1: -1, 2: -2}))
    assert (len(data), data[:3].hex()) == (1 + 4096 * 2 // 8, "023600")
    assert len(packed(values_of({7: -(1 << 31)}))) == 1 + 4 * 4096


def test_values_of_the_usual_size_take_little_more_than_half():
    values = (torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 1e-3 * 2**26 / 2).to(torch.int32)
    assert len(packed(values)) < 0.6 * 4 * 4096


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        b"\x21" + bytes(4096 * 33 // 8),
        b"\x02" + bytes(1024),
        b"\x01" + bytes(511),
        b"\x01" + bytes(513),
        b"\x02" + b"\x01" + bytes(1023),
    ],
    ids=["empty", "more than nothing", "33 bits", "zeros in 2 bits", "short", "long", "1 in 2 bits"],
)
def test_other_forms_are_refused(data):
    with pytest.raises(DecodeError):
        unpacked(data)
