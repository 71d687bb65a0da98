"""Moments that change hands: one size, exact joining of two histories, and nothing that throws weights far."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.checkpoint.universal import is_valid
from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.moments import pack, second_moment_bound, unpack
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.run.moments import MAX_STEPS
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import Toy, batch_of, inner_spec, loss_of

NAMES = ["table", "gain"]
SHAPES = [("table", (16, 16)), ("gain", (16,))]
SIZE = 4 + 4 * (256 + 16)


def state_after(gradients, beta1, beta2):
    first = second = np.zeros(3)
    for gradient in gradients:
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
    return first, second


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), min_size=1, max_size=60),
    st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.8, 0.9), (0.0, 0.5)]),
)
def test_no_gradients_exceed_the_bound(gradients, betas):
    first, second = state_after([np.array(g) for g in gradients], *betas)
    spec = inner_spec(beta1=betas[0], beta2=betas[1])
    assert (first**2 <= second_moment_bound(spec) * second * (1 + 1e-9) + 1e-300).all()


def test_second_moments_that_forget_faster_give_no_bound():
    assert second_moment_bound(inner_spec(beta1=0.9, beta2=0.8)) == 0.0
    assert second_moment_bound(inner_spec(beta1=0.9, beta2=0.0)) == 0.0


def trained(steps, **changes):
    inner = Inner(Toy(), loss_of, inner_spec(**changes))
    list(run_steps(inner.step, batch_of, 0, steps))
    return inner


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_what_was_packed_is_unpacked(beta2):
    inner = trained(30, beta2=beta2)
    data = pack(inner.state(), NAMES)
    assert len(data) == SIZE
    found = unpack(data, SHAPES, inner_spec(beta2=beta2))
    for name, value in inner.state().items():
        assert torch.allclose(found[name], value, rtol=2**-8, atol=0), name


def test_who_has_not_trained_has_nothing_to_give():
    assert pack(Inner(Toy(), loss_of, inner_spec()).state(), NAMES) == b""
    assert pack(trained(3).state(), ["other"]) == b""


def linear(module, window):
    """Gradients that do not depend on the weights."""
    return (module.table * float(window.sum() % 7 - 3)).sum() + (module.gain * float(window[0, 0])).sum()


@pytest.mark.parametrize("late", [0, 1, 7])
def test_moments_that_come_late_are_as_if_all_steps_had_been_taken_here(late):
    whole, before, after = (Inner(Toy(), linear, inner_spec()) for _ in range(3))
    list(run_steps(whole.step, batch_of, 0, 12 + late))
    list(run_steps(before.step, batch_of, 0, 12))
    list(run_steps(after.step, lambda i: batch_of(12 + i), 12, late))
    after.continue_from(before.state())
    for name, value in whole.state().items():
        assert torch.allclose(after.state()[name], value, rtol=1e-5, atol=1e-9), name


def test_moments_of_what_is_not_trained_here_are_refused():
    state = trained(3).state()
    with pytest.raises(CorruptFault, match="other is not trained here"):
        trained(1).continue_from({key.replace("/gain", "/other"): value for key, value in state.items()})


def lie(data, at, value):
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, offset=4).clone()
    values[at] = value
    return data[:4] + values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, float("nan")),
        (5, float("inf")),
        (-1, float("nan")),
        (-1, float("inf")),
        (-1, -1e-3),
        (0, 1e9),
        (3, -50.0),
    ],
)
def test_moments_that_nobody_can_have_are_refused(at, value):
    data = pack(trained(30).state(), NAMES)
    with pytest.raises(DecodeError, match="no gradients"):
        unpack(lie(data, at, value), SHAPES, inner_spec())


@pytest.mark.parametrize(
    "spoil", [lambda d: d[:-1], lambda d: d + b"x", lambda d: bytes(4) + d[4:], lambda d: b""]
)
def test_another_size_and_no_steps_are_refused(spoil):
    data = pack(trained(3).state(), NAMES)
    with pytest.raises(DecodeError, match="not the moments"):
        unpack(spoil(data), SHAPES, inner_spec())


def claiming(steps):
    return unpack(steps.to_bytes(4, "little") + pack(trained(3).state(), NAMES)[4:], SHAPES, inner_spec())


def test_steps_of_strangers_stay_where_a_checkpoint_takes_them():
    """However often they come: one liar could make an expert's moments useless to a run that goes on."""
    with pytest.raises(DecodeError, match="not the moments"):
        claiming(MAX_STEPS + 1)
    inner = trained(3)
    for _ in range(2):
        inner.continue_from(claiming(MAX_STEPS))
    assert all(is_valid(name, value) for name, value in inner.state().items())


def test_without_a_bound_nothing_is_taken_from_others():
    spec = inner_spec(beta1=0.9, beta2=0.8)
    with pytest.raises(DecodeError):
        unpack(pack(trained(3, beta2=0.8).state(), NAMES), SHAPES, spec)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=SIZE - 4, max_size=SIZE - 4), st.integers(1, MAX_STEPS))
def test_bytes_that_pass_move_nothing_further_than_a_few_rates(noise, steps):
    """Whatever a stranger sends that is taken: the next step stays within a small multiple of the rate."""
    spec = inner_spec(lr=1e-3, lr_min=1.0, warmup_steps=0, weight_decay=0.0)
    inner = Inner(Toy(), loss_of, spec)
    inner.step(batch_of(0), 0)
    values = torch.frombuffer(bytearray(noise), dtype=torch.bfloat16).clone()
    first, second = values.chunk(2)  # the worst that passes
    second.copy_(second.float().abs().nan_to_num(1.0, 1.0, 1.0).clamp(0, 1e30))
    first.copy_((second_moment_bound(spec) * second.double()).sqrt().float().copysign(first.float()))
    found = unpack(steps.to_bytes(4, "little") + values.view(torch.uint8).numpy().tobytes(), SHAPES, spec)
    inner.continue_from(found)
    before = inner.module.table.detach().clone()
    inner.step(batch_of(1), 1)
    assert float((inner.module.table.detach() - before).abs().max()) <= 3 * 1e-3
