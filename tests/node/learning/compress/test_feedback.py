"""Error feedback: what was not said is kept, and nothing is kept of what failed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError, Divergence
from tests.plain.feedback import feed, give_back
from tests.plain.sparse2 import decode, dequantise

torch.set_num_threads(1)
K, BETA = 64, 0.95


def noise(seed, chunks=3):
    return torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * 1e-3


def said(payload, chunks=3):
    return dequantise(*decode(payload, chunks, K), chunks)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 100), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_residual_and_payload_add_up_to_the_input(seed, beta):
    residual, delta = noise(seed), noise(seed + 1)
    whole = torch.add(residual * beta, delta)
    payload = feed(residual, delta, beta, K)
    assert torch.equal(residual, whole - said(payload))


def test_a_payload_given_back_is_as_if_it_had_not_been_said():
    residual, delta = noise(1), noise(2)
    whole = residual * BETA + delta
    payload = feed(residual, delta, BETA, K)
    give_back(residual, payload, K)
    assert torch.allclose(residual, whole, atol=1e-9, rtol=1e-6)


def test_everything_is_said_in_the_end():
    residual, total = torch.zeros((3, 4096)), torch.zeros((3, 4096))
    delta = noise(3)
    for number in range(80):
        total += said(feed(residual, delta if number == 0 else torch.zeros_like(delta), 1.0, K))
    assert torch.allclose(total + residual, delta, atol=1e-7)
    assert residual.norm() < 0.1 * delta.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["delta", "residual", "last chunk"])
def test_divergence_leaves_the_residual_alone(bad, where):
    residual, delta = noise(1, 300), noise(2, 300)
    target = residual if where == "residual" else delta
    target[299 if where == "last chunk" else 0, 7] = bad
    before = residual.clone()
    with pytest.raises(Divergence):
        feed(residual, delta, BETA, K)
    assert torch.equal(residual.nan_to_num(), before.nan_to_num())


def test_a_payload_of_another_shape_is_not_given_back():
    residual = noise(1)
    payload = feed(noise(1, 4), noise(2, 4), BETA, K)
    before = residual.clone()
    with pytest.raises(DecodeError):
        give_back(residual, payload, K)
    assert torch.equal(residual, before)
