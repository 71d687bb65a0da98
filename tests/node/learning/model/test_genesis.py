"""Θ₀ is integers from a fixed stream: golden values, the right spread, and exact in float32."""

import math

import numpy as np
import pytest
import torch

from atoll.node.learning.model.genesis import UNIT, bell, genesis, genesis_atom, variance_inverse
from atoll.protocols.ids import digest
from atoll.protocols.run.model_spec import Atom, ModelSpec, atoms

SPEC = ModelSpec(
    dim=128,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn=192,
    vocab=256,
    context=32,
    tied=False,
    rope_theta=1e4,
    norm_eps=1e-5,
)


def test_golden_bytes_hold_on_every_machine():
    made = genesis(SPEC, 7)
    whole = digest(*(made[atom.name].astype("<i4").tobytes() for atom in atoms(SPEC)))
    assert whole.hex() == "5a7ac5de366db16e5625b8c1a7365d971ec5ecd8a5b3d432d55f1aa0919d1956"


def test_golden_first_values():
    assert bell(bytes(16), 4, 2500).tolist() == [-220559, -119781, -544377, -38124]


def test_names_shapes_and_types():
    made = genesis(SPEC, 7)
    assert [(n, v.shape) for n, v in made.items()] == [(a.name, a.shape) for a in atoms(SPEC)]
    assert all(v.dtype == np.int32 for v in made.values())


@pytest.mark.parametrize("inverse", [1, 64, 2500, 1 << 20])
def test_spread_is_the_wanted_one_and_centred(inverse):
    values = bell(bytes(16), 1 << 16, inverse) / UNIT
    sigma = 1 / math.sqrt(inverse)
    assert abs(values.std() / sigma - 1) < 0.01
    assert abs(values.mean()) < sigma * 0.02
    assert abs(values).max() < 3.5 * sigma
    assert abs((values**4).mean() / sigma**4 - 2.7) < 0.1, "four uniforms have a kurtosis of 2.7"


def test_a_long_atom_continues_the_stream_of_a_short_one():
    assert np.array_equal(bell(bytes(16), (1 << 20) + 5, 64)[: 1 << 20], bell(bytes(16), 1 << 20, 64))


def test_matrices_are_exact_in_float32():
    for value in genesis(SPEC, 7).values():
        back = (torch.from_numpy(value).float() * 2.0**-24).double() * 2.0**24
        assert torch.equal(back, torch.from_numpy(value).double())


def test_seed_and_name_choose_the_values_and_nothing_else():
    atom = Atom("model.layers.0.mlp.up_proj.weight", (192, 128))
    same = genesis_atom(atom, SPEC, 1)
    assert np.array_equal(same, genesis_atom(atom, SPEC, 1))
    assert not np.array_equal(same, genesis_atom(atom, SPEC, 2))
    assert not np.array_equal(same, genesis_atom(Atom("model.layers.1.mlp.up_proj.weight", (192, 128)), SPEC, 1))


def test_residual_writers_are_smaller_by_the_root_of_twice_the_layers():
    down = Atom("model.layers.0.mlp.down_proj.weight", (128, 192))
    up = Atom("model.layers.0.mlp.up_proj.weight", (192, 128))
    assert variance_inverse(down, SPEC) == 192 * 6
    assert variance_inverse(up, SPEC) == 128
