"""Fixed point: exact, checked, never saturated."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.learning.outer.fixed import plus, state_digest, to_fixed, to_float
from atoll.protocols.errors import Divergence
from atoll.protocols.ids import digest


@given(st.integers(-(2**31), 2**31 - 1))
def test_float_and_back(units):
    value = to_float(torch.tensor([units], dtype=torch.int32))
    assert float(value) == float(torch.tensor(units * 2.0**-24, dtype=torch.float64).float())
    if abs(units) <= 1 << 24:
        assert int(to_fixed(value)) == units


@given(st.floats(-127, 127, width=32))
def test_rounds_to_the_nearest_step_and_halves_to_even(value):
    assert int(to_fixed(torch.tensor([value]))) == round(value * 2**24)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 128.0, -128.001, 1e30])
def test_out_of_range_is_divergence(value):
    with pytest.raises(Divergence):
        to_fixed(torch.tensor([0.0, value]))


def test_the_ends_of_the_range():
    low = torch.full((1, 4096), -(2**31), dtype=torch.int32)
    one, zero = torch.ones_like(low), torch.zeros_like(low)
    assert int(plus(low, one, one)[0, 0]) == -(2**31)
    with pytest.raises(Divergence):
        plus(low, zero, one)
    with pytest.raises(Divergence):
        plus(-1 - low, one)


def test_digest_is_of_header_and_little_endian_values():
    theta = torch.zeros((2, 4096), dtype=torch.int32)
    theta[0, 0], theta[1, 4095] = 0x01020304, -2
    body = b"\x04\x03\x02\x01" + bytes(4 * 8190) + b"\xfe\xff\xff\xff"
    assert state_digest(theta) == digest(b"atoll/state/1\0" + (2).to_bytes(8, "little") + body)
    assert state_digest(theta[:1]) != state_digest(theta)
    assert state_digest(theta.t().contiguous().t()) == state_digest(theta)
