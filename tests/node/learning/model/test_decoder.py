"""The decoder is a Llama: names, shapes, order, causality, attention and rotation against plain formulas."""

import math

import numpy as np
import pytest
import torch

from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Attention, Decoder, loss_of, rope_tables, rotate
from atoll.node.learning.model.genesis import genesis
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll_bench.module_values import fill_module


def spec_of(**changes):
    base = {
        "dim": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 96,
        "vocab": 50,
        "context": 16,
        "tied": True,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
    }
    return ModelSpec(**{**base, **changes})


SPECS = [
    spec_of(),
    spec_of(tied=False),
    spec_of(heads=1, kv_heads=1, layers=1),
    spec_of(qkv_bias=True),
    spec_of(gemma=True, head_size=8),
    spec_of(dim=40, heads=4, kv_heads=4, ffn=70, vocab=256, tied=False),
]


def built(spec, seed=1):
    torch.set_num_threads(1)
    model = Decoder(spec)
    theta = {name: torch.from_numpy(value) for name, value in genesis(spec, seed).items()}
    arena = arena_of(spec)
    fill_module(model, bridge.gather(theta, arena).float() * 2.0**-24, arena)
    return model


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_are_exactly_the_atoms_in_their_order(spec):
    found = [(name, tuple(p.shape)) for name, p in Decoder(spec).named_parameters()]
    assert found == [(atom.name, atom.shape) for atom in atoms(spec)]
    assert sum(math.prod(shape) for _, shape in found) == spec.parameters


def test_buffers_are_no_part_of_a_checkpoint():
    assert set(Decoder(spec_of()).state_dict()) == {atom.name for atom in atoms(spec_of())}


@pytest.mark.parametrize("spec", SPECS)
def test_a_position_does_not_see_what_comes_after_it(spec):
    model = built(spec)
    tokens = torch.arange(16).reshape(1, 16) % spec.vocab
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 7) % spec.vocab
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9:], b[:, 9:])


def test_attention_equals_the_plain_formula_with_shared_keys():
    spec = spec_of()
    model = built(spec)
    layer: Attention = model.model.layers[0].self_attn
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    cos, sin = rope_tables(spec)

    def split(y, heads):
        return y.view(2, 16, heads, 16).transpose(1, 2)

    q = rotate(split(x @ layer.q_proj.weight.T, 4), cos, sin)
    k = rotate(split(x @ layer.k_proj.weight.T, 2), cos, sin)
    v = split(x @ layer.v_proj.weight.T, 2)
    out = torch.empty(2, 4, 16, 16)
    mask = torch.full((16, 16), -torch.inf).triu(1)
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].transpose(1, 2) / math.sqrt(16)
        out[:, head] = (scores + mask).softmax(-1) @ v[:, head // 2]
    wanted = out.transpose(1, 2).reshape(2, 16, 64) @ layer.o_proj.weight.T
    assert torch.allclose(layer(x, cos, sin), wanted, atol=1e-5)


def test_rotation_is_a_complex_turn_of_the_pairs_i_and_i_plus_half():
    spec = spec_of()
    cos, sin = rope_tables(spec)
    torch.manual_seed(0)
    x = torch.randn(1, 1, 16, 16)
    turned = rotate(x, cos, sin)[0, 0].numpy()
    pairs = x[0, 0, :, :8].numpy() + 1j * x[0, 0, :, 8:].numpy()
    angle = np.outer(np.arange(16), 1e4 ** (-np.arange(8) / 8))
    wanted = pairs * np.exp(1j * angle)
    assert np.allclose(turned, np.concatenate([wanted.real, wanted.imag], axis=1), atol=1e-5)


def test_biases_start_at_nothing():
    theta = genesis(spec_of(qkv_bias=True), 1)
    assert not any(values.any() for name, values in theta.items() if name.endswith("bias"))
    assert all(values.all() for name, values in theta.items() if name.endswith("norm.weight"))


def test_at_the_start_the_loss_is_near_that_of_guessing():
    spec = spec_of(vocab=256)
    window = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, 17)))
    with torch.no_grad():
        loss = float(loss_of(built(spec), window))
    assert abs(loss - math.log(256)) < 0.2


@pytest.mark.parametrize("spec", [spec_of(tied=False), spec_of(qkv_bias=True), spec_of(gemma=True)])
def test_every_parameter_learns(spec):
    model = built(spec)
    loss_of(model, torch.arange(34).reshape(2, 17) % 50).backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.parameters())
