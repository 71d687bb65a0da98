"""Moments in eight bits: how exact, restored as they were, in either form, steps near those in float32."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.inner import quantized
from atoll.node.learning.inner.quantized import (
    BLOCK,
    CODES,
    SCALES,
    Quantized,
    decoded,
    encoded,
    saved_moment,
    slabs,
)
from atoll.node.worker.multi_device.replica import StepMemory
from atoll.protocols.errors import CorruptFault
from atoll.protocols.run.moments import kinds_of
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import inner_spec
from tests.node.learning.inner.test_muon import MUON, replica_of, values_of, windows_of

IN_INT8 = StepMemory(quantized=True)
ADAMW = inner_spec(total_steps=40, warmup_steps=4, lr=5e-3)
SPECS = {"adamw": ADAMW, "muon": MUON}


def nearest(values, table):
    return table[np.abs(values[:, None] - table).argmin(1)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 1000), st.integers(-30, 8), st.booleans())
def test_each_value_becomes_the_nearest_of_the_table(count, seed, exponent, is_first):
    """Written out again with numpy: the dynamic tree of arXiv 2110.02861, absmax of blocks of 256."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 10.0 ** (exponent + rng.integers(-5, 1, count))).astype(np.float32)
    kind, values = ("exp_avg", values) if is_first else ("exp_avg_sq", values**2)
    found = decoded(kind, encoded(kind, torch.from_numpy(values)), (count,)).numpy()
    table = [0.0, 1.0]
    for decade in range(7):
        ends = np.linspace(0.1, 1, 2 ** (decade + (not is_first)) + 1)
        means = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)
        table += [*means, *(-means if is_first else [])]
    assert len(table) == 256
    table = np.sort(table)
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        block = block if is_first else np.sqrt(block)
        scale = np.abs(block).max()
        if scale == 0 or scale < 1e-30:
            continue
        wanted = nearest(block / scale, table if is_first else table[1:]) * scale
        wanted = wanted if is_first else wanted**2
        # Halfway between two values of the table rounding decides.
        gap = np.abs(found[start : start + BLOCK] - wanted)
        off = np.abs(wanted - values[start : start + BLOCK])
        assert (gap <= 1e-5 * np.abs(wanted) + 2e-3 * off + 1e-38).all() or (gap > 0).sum() <= 1


def test_zeros_stay_zeros_and_what_divides_a_step_does_not_become_zero():
    assert not decoded("exp_avg", encoded("exp_avg", torch.zeros(300)), (300,)).any()
    assert not decoded("exp_avg_sq", encoded("exp_avg_sq", torch.zeros(300)), (300,)).any()
    small = torch.full((256,), 1e-16)
    small[3] = 1.0
    assert (decoded("exp_avg_sq", encoded("exp_avg_sq", small), (256,)) > 0).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([256, 1000, 1 << 20]))
def test_slabs_cover_a_matrix_and_its_blocks_once(rows, columns, most):
    before, quantized.SLAB_VALUES = quantized.SLAB_VALUES, most
    try:
        parts = list(slabs(torch.Size((rows, columns))))
    finally:
        quantized.SLAB_VALUES = before
    assert [row for part, _ in parts for row in range(rows)[part]] == list(range(rows))
    blocks = [block for _, part in parts for block in range(part.start, part.stop)]
    assert blocks == list(range(-(-rows * columns // BLOCK)))
    for part, own in parts[:-1]:
        assert (part.stop - part.start) * columns == (own.stop - own.start) * BLOCK


@pytest.mark.parametrize("optimizer", SPECS)
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_steps_stay_near_those_in_float32(optimizer, name):
    whole, small = (replica_of(name, SPECS[optimizer], memory) for memory in (StepMemory(), IN_INT8))
    start = values_of(whole.inner)
    losses = [list(run_steps(made.inner.step, windows_of, 0, 10)) for made in (whole, small)]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    moved = sum(float((v - start[n]).square().sum()) for n, v in values_of(whole.inner).items()) ** 0.5
    apart = (
        sum(float((v - whole.inner._atoms[n]).square().sum()) for n, v in values_of(small.inner).items()) ** 0.5
    )
    # Muon gives directions of little gradient the same weight, and routers choose by them.
    assert 0 < apart < (0.1 if optimizer == "adamw" else 0.3) * moved


def test_slabs_take_the_steps_of_the_whole(monkeypatch):
    whole, parts = replica_of(spec=ADAMW, memory=IN_INT8), replica_of(spec=ADAMW, memory=IN_INT8)
    list(run_steps(whole.inner.step, windows_of, 0, 3))
    monkeypatch.setattr(quantized, "SLAB_VALUES", 512)
    list(run_steps(parts.inner.step, windows_of, 0, 3))
    for atom, value in values_of(whole.inner).items():
        assert torch.equal(parts.inner._atoms[atom], value), atom


@pytest.mark.parametrize("optimizer", SPECS)
def test_a_saved_state_goes_on_with_the_same_bits_and_has_a_quarter_of_the_bytes(optimizer):
    spec = SPECS[optimizer]
    whole, part, resumed = (replica_of("mixture", spec, IN_INT8) for _ in range(3))
    list(run_steps(whole.inner.step, windows_of, 0, 6))
    list(run_steps(part.inner.step, windows_of, 0, 3))
    saved = {name: value.clone() for name, value in part.inner.state().items()}
    moments = sum(v.numel() * v.element_size() for n, v in saved.items() if not n.startswith("step/"))
    values = sum(v.numel() * len(kinds_of(optimizer, n)) for n, v in part.inner._atoms.items())
    assert moments <= 1.05 * values * (1 + 4 / BLOCK), "but for the padding of vectors"
    resumed.module.load_state_dict(part.module.state_dict())
    resumed.inner.load(saved)
    assert all(torch.equal(value, saved[name]) for name, value in resumed.inner.state().items())
    list(run_steps(resumed.inner.step, lambda i: windows_of(3 + i), 3, 3))
    for atom, value in values_of(whole.inner).items():
        assert torch.equal(resumed.inner._atoms[atom], value), atom


@pytest.mark.parametrize("optimizer", SPECS)
def test_a_node_goes_on_from_a_state_in_the_other_form(optimizer):
    spec = SPECS[optimizer]
    small, large = replica_of(spec=spec, memory=IN_INT8), replica_of(spec=spec)
    list(run_steps(small.inner.step, windows_of, 0, 3))
    large.inner.load(small.inner.state())
    for atom, value in large.inner._atoms.items():
        assert large.inner.state()[f"step/{atom}"] == 3
        for kind in kinds_of(optimizer, atom):
            wanted = saved_moment(small.inner.state(), kind, atom, value.shape)
            assert torch.equal(large.inner.state()[f"{kind}/{atom}"], wanted)
    again = replica_of(spec=spec, memory=IN_INT8)
    again.inner.load(large.inner.state())
    for atom, value in again.inner._atoms.items():
        for kind in kinds_of(optimizer, atom):
            here, there = (saved_moment(m.inner.state(), kind, atom, value.shape) for m in (again, small))
            assert torch.allclose(here, there, rtol=0.02, atol=0.02 * float(there.abs().max()))


def test_moments_from_elsewhere_are_added():
    small, large = replica_of(spec=ADAMW, memory=IN_INT8), replica_of(spec=ADAMW)
    for made in (small, large):
        list(run_steps(made.inner.step, windows_of, 0, 3))
    given_away = {name: value.clone() for name, value in large.inner.state().items()}
    for made in (small, large):
        made.inner.continue_from(given_away)
    for atom, value in large.inner._atoms.items():
        for kind in kinds_of("adamw", atom):
            found = saved_moment(small.inner.state(), kind, atom, value.shape)
            wanted = large.inner.state()[f"{kind}/{atom}"]
            assert float((found - wanted).norm()) <= 0.05 * float(wanted.norm()), (kind, atom)


@pytest.mark.parametrize("spoil", [CODES, SCALES, "size", "step"])
def test_another_models_state_is_refused(spoil):
    made, atom = replica_of(spec=ADAMW, memory=IN_INT8), "model.layers.0.mlp.up_proj.weight"
    made.inner.step(windows_of(0), 0)
    saved = made.inner.state()
    if spoil == "size":
        saved[f"exp_avg{CODES}/{atom}"] = saved[f"exp_avg{CODES}/{atom}"][:-BLOCK]
    elif spoil == "step":
        del saved[f"step/{atom}"]
    else:
        del saved[f"exp_avg{spoil}/{atom}"]
    with pytest.raises(CorruptFault, match="does not fit"):
        made.inner.load(saved)


def test_a_replica_that_is_built_again_keeps_the_form():
    assert replica_of(memory=IN_INT8).memory == IN_INT8
    assert isinstance(encoded("exp_avg", torch.ones(3)), Quantized)
