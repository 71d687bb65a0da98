"""Adapters on a frozen base: with B = 0 the base's own bits, exact gradients of the factors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.model.bridge import named_atoms, write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of, token_losses
from atoll.node.learning.model.genesis import genesis, genesis_atom
from atoll.node.learning.model.lora import FrozenMatrix, FrozenProduct, base_values, check_storage, load_base
from atoll.node.runs.presets import preset
from atoll.node.worker.multi_device.replica import ALL_STORED, Replica
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.lora import factors_of, is_target
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import inner_spec

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[3] / "golden" / "lora.json"
DENSE = ModelSpec(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=50, context=16, tied=True, rope_theta=1e4, norm_eps=1e-5
)
MODELS = [
    replace(DENSE, lora_rank=4),
    replace(DENSE, lora_rank=3, lora_alpha=6.0, lora_targets="attention", tied=False),
    replace(DENSE, lora_rank=1, lora_targets="ffn", qk_norm=True),
    replace(DENSE, lora_rank=8, lora_alpha=1.0, lora_targets="qv", head_size=24),
    replace(DENSE, lora_rank=4, qkv_bias=True),
    replace(DENSE, lora_rank=4, gemma=True),
]
WINDOW = torch.arange(34).reshape(2, 17) * 7 % 50


def floats(spec, seed):
    return {name: torch.from_numpy(value).float() * 2.0**-24 for name, value in genesis(spec, seed).items()}


def pair(spec, *, zero=True, dtype=torch.float32):
    """The base as a model of its own, and an adapted decoder over it, with the factors' values."""
    theta, factors = floats(spec.base, 1), floats(spec, 2)
    theta |= {name: torch.linspace(-1, 1, len(value)) for name, value in theta.items() if name.endswith("bias")}
    if not zero:
        mean = torch.Generator().manual_seed(3)
        factors = {name: torch.randn(v.shape, generator=mean) * 0.05 for name, v in factors.items()}
    base, adapted = Decoder(spec.base), Decoder(spec, None, dtype)
    write_atoms(base, theta.items())
    load_base(adapted, spec, theta.__getitem__)
    write_atoms(adapted, factors.items())
    return base, adapted, theta, factors


def merged(spec, theta, factors):
    """The base's matrices with the adapters in them, as a differentiable function of the factors."""
    found = dict(theta)
    for name, value in theta.items():
        if is_target(name, spec.lora_targets):
            a, b = (factors[factor] for factor in factors_of(name))
            found[name] = value + spec.lora_scale * (b.view(-1, spec.lora_rank) @ a.view(spec.lora_rank, -1))
    return found


@pytest.mark.parametrize("spec", MODELS)
def test_an_adapter_of_zeros_has_the_bits_of_its_base(spec):
    base, adapted, _, factors = pair(spec)
    assert any(bool(value.any()) for value in factors.values()), "A is not zero"
    assert torch.equal(adapted(WINDOW[:, :-1]), base(WINDOW[:, :-1]))
    assert torch.equal(token_losses(adapted, WINDOW), token_losses(base, WINDOW))


@pytest.mark.parametrize("spec", MODELS)
def test_gradients_are_those_of_the_merged_matrices(spec):
    _, adapted, theta, factors = pair(spec, zero=False)
    loss = loss_of(adapted, WINDOW)
    loss.backward()
    leaves = {name: value.clone().requires_grad_() for name, value in factors.items()}
    plain = Decoder(spec.base)
    want = torch.func.functional_call(plain, merged(spec, theta, leaves), (WINDOW[:, :-1],), tie_weights=False)
    want_loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), WINDOW[:, 1:].flatten())
    want_loss.backward()
    assert float(loss.detach()) == pytest.approx(float(want_loss.detach()), rel=1e-5)
    found = {name: value.grad for name, value in adapted.named_parameters()}
    assert list(found) == [atom.name for atom in atoms(spec)]
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert bool(leaf.grad.any()), name
        torch.testing.assert_close(found[name].view(-1), leaf.grad, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("spec", MODELS)
def test_recomputed_layers_give_the_same_bits(spec):
    _, adapted, _, _ = pair(spec, zero=False)
    loss_of(adapted, WINDOW).backward()
    stored = {name: value.grad.clone() for name, value in adapted.named_parameters()}
    adapted.zero_grad()
    assert adapted.recompute_layers()
    loss_of(adapted, WINDOW).backward()
    assert all(torch.equal(stored[name], value.grad) for name, value in adapted.named_parameters())


def test_the_base_is_in_memory_once_and_no_state_has_it():
    spec = MODELS[0]
    _, adapted, theta, _ = pair(spec)
    frozen = base_values(adapted, spec)
    assert frozen.keys() == theta.keys()
    assert sum(value.numel() for value in adapted.parameters()) == spec.parameters
    assert list(named_atoms(adapted)) == [atom.name for atom in atoms(spec)]
    assert not any(value.requires_grad for value in frozen.values())
    kept = {value.data_ptr() for value in (*adapted.parameters(), *adapted.buffers())}
    assert len(kept) == len(theta) + len(atoms(spec)) + 2, "each value once, and the tables of the rotations"


@pytest.mark.parametrize("spec", MODELS)
def test_a_narrow_base_is_widened_for_its_products_and_not_saved(spec):
    _, narrow, theta, factors = pair(spec, zero=False, dtype=torch.bfloat16)
    wide = Decoder(spec)
    load_base(wide, spec, lambda name: theta[name].bfloat16().float() if theta[name].dim() > 1 else theta[name])
    write_atoms(wide, factors.items())
    assert torch.equal(narrow(WINDOW[:, :-1]), wide(WINDOW[:, :-1]))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_of(narrow, torch.cat((WINDOW, WINDOW, WINDOW[:1])))  # 80 tokens: no side of a matrix
    shapes = {value.shape for name, value in base_values(narrow, spec).items() if name.endswith("proj.weight")}
    matrices = shapes | {shape[::-1] for shape in shapes}
    assert not any(t.shape in matrices for t in saved), "a frozen matrix waits for the backward pass"


def test_the_product_gives_the_gradient_of_its_input():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: FrozenProduct.apply(x, weight, None), (x,))


def test_a_begins_by_the_seed_with_the_variance_of_peft_and_b_at_zero():
    spec = replace(DENSE, dim=256, ffn=512, lora_rank=16)
    values = {atom.name: genesis_atom(atom, spec, 5) for atom in atoms(spec)}
    first, second = factors_of("model.layers.1.mlp.down_proj.weight")
    assert not values[second].any()
    assert float((values[first] / 2**24).std()) == pytest.approx((1 / (3 * 512)) ** 0.5, rel=0.02)
    again = {atom.name: genesis_atom(atom, spec, 6) for atom in atoms(spec)}
    assert (again[first] != values[first]).any()


@pytest.mark.parametrize(
    ("dtype", "on_host", "why"), [(torch.int8, False, "float32 or bfloat16"), (torch.float32, True, "where steps")]
)
def test_other_ways_to_store_a_base_are_refused(dtype, on_host, why):
    with pytest.raises(ConfigError, match=why):
        check_storage(dtype, on_host)


def golden():
    """Losses of twelve steps of the adapters alone: the content of tests/golden/lora.json."""
    torch.set_num_threads(1)
    return {f"{spec.lora_targets} {spec.lora_rank}": _losses(spec) for spec in MODELS[:3]}


def _losses(spec):
    inner = inner_spec(total_steps=40, warmup_steps=4, lr=2e-2)
    run = replace(preset("tiny", peer_id_of(bytes(range(32))), 1), model=spec, inner=inner)
    made = Replica(run, ALL, "cpu", (torch.float32, False), memory=ALL_STORED)
    _, _, theta, factors = pair(spec)
    load_base(made.module, spec, theta.__getitem__)
    write_atoms(made.module, factors.items())

    def windows_of(step):
        return np.random.default_rng(step % 2).integers(0, spec.vocab, (4, spec.context + 1))

    return [round(loss, 4) for loss in run_steps(made.inner.step, windows_of, 0, 12)]


def test_golden_trajectory():
    """Up to the order of float sums, which machines choose."""
    recorded, found = json.loads(GOLDEN.read_text()), golden()
    assert recorded.keys() == found.keys()
    for name, losses in recorded.items():
        assert found[name] == pytest.approx(losses, abs=2e-4)
        assert losses[-1] < losses[0]


def test_on_a_quadratic_adapters_come_to_a_change_of_their_rank_and_stay():
    """The change has the adapters' rank, so they can be all of it; the frozen matrix is none of their business."""
    draw = torch.Generator().manual_seed(4)
    adapted = FrozenMatrix(torch.nn.Linear(12, 9, bias=False), torch.float32, 2, 0.5)
    adapted.weight.copy_(torch.randn(9, 12, generator=draw))
    change = torch.randn(9, 2, generator=draw) @ torch.randn(2, 12, generator=draw)
    x, before = torch.randn(64, 12, generator=draw), adapted.weight.clone()
    wanted = x @ (before + change).T
    factors = list(adapted.parameters())
    for value in factors:
        torch.nn.init.normal_(value, std=0.3, generator=draw)
    optimizer = torch.optim.Adam(factors, lr=0.02)
    errors = []
    for _ in range(1200):
        loss = ((adapted(x) - wanted) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()))
    assert max(errors[-100:]) < 1e-8 < errors[0]
    assert torch.equal(adapted.weight, before)
