"""A feed-forward in slices: the same function, exact gradients whoever owns which, nothing saved in vain."""

import math

import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.model.bridge import frozen_names, named_atoms, trained_atoms, write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.ffn_slices import FrozenSlices, sliced_swiglu
from atoll.node.learning.model.genesis import genesis, genesis_atom
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms, expert_of

torch.set_num_threads(1)
DENSE = ModelSpec(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=256, vocab=50, context=16, tied=True, rope_theta=1e4, norm_eps=1e-5
)
SPEC = replace(DENSE, ffn_slices=4)
WINDOW = torch.arange(34).reshape(2, 17) * 7 % 50
OWNED = [None, frozenset({2}), frozenset({3, 0}), frozenset()]


def theta_of(spec=SPEC):
    return {name: torch.from_numpy(value).float() * 2.0**-24 for name, value in genesis(spec, 1).items()}


def whole(theta):
    """The same values as atoms of the dense model, cut and joined by hand."""
    found = {name: value for name, value in theta.items() if expert_of(name) is None}
    for layer in range(SPEC.layers):
        at = f"model.layers.{layer}.mlp."
        for projection, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            parts = [theta[f"{at}experts.{one}.{projection}.weight"] for one in range(SPEC.ffn_slices)]
            found[f"{at}{projection}.weight"] = torch.cat(parts, dim)
    return found


def trained(spec, theta, **options):
    """Loss, and gradients by atom, of a decoder with these values."""
    model = Decoder(spec, **options)
    write_atoms(model, theta.items())
    loss = loss_of(model, WINDOW)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), trained_atoms(model, grads), model


@pytest.mark.parametrize("owned", OWNED)
def test_whoever_owns_what_it_is_the_dense_model(owned):
    theta = theta_of()
    loss, grads, _ = trained(SPEC, theta, owned=owned)
    want_loss, want, _ = trained(DENSE, whole(theta))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    width = SPEC.slice_ffn
    for name, grad in grads.items():
        one = expert_of(name)
        expected = want[name if one is None else name.replace(f".experts.{one}", "")]
        if one is not None:
            part = slice(one * width, (one + 1) * width)
            expected = expected[:, part] if "down_proj" in name else expected[part]
        assert float((grad - expected).norm()) <= 2e-6 * float(expected.norm()), name
    ours = frozenset(range(4)) if owned is None else owned
    assert {expert_of(name) for name in grads} == {None, *ours}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_narrow_storage_has_the_exact_gradients_of_the_stored_values(dtype):
    theta = theta_of()
    loss, grads, model = trained(SPEC, theta, owned=frozenset({1}), frozen_dtype=dtype)
    stored = dict(theta)
    for layer, part in enumerate(model.model.layers):
        shelf = part.mlp.experts.shelf
        like = torch.empty(0)
        for at, one in enumerate(part.mlp.experts.frozen):
            gate_up = shelf.packed("gate_up").one(at, like)
            name = f"model.layers.{layer}.mlp.experts.{one}."
            stored[f"{name}gate_proj.weight"], stored[f"{name}up_proj.weight"] = gate_up.chunk(2)
            stored[f"{name}down_proj.weight"] = shelf.packed("down").one(at, like)
    want_loss, want, _ = trained(SPEC, stored, owned=frozenset({1}))
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert loss != pytest.approx(trained(SPEC, theta)[0], rel=1e-9), "the stored values are others"
    for name, grad in grads.items():
        assert float((grad - want[name]).norm()) <= 2e-6 * float(want[name].norm()), name


def test_frozen_slices_have_the_gradient_that_autograd_has():
    source = torch.Generator().manual_seed(5)
    gate_up, down = (torch.randn(shape, generator=source) * 0.2 for shape in ((3, 128, 64), (3, 64, 64)))
    x = torch.randn(10, 64, generator=source, requires_grad=True)
    from_autograd = torch.autograd.grad(sliced_swiglu(x, gate_up, down).square().sum(), x)[0]
    model = Decoder(replace(SPEC, ffn=192, ffn_slices=3), frozenset())
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.shelf.packed("gate_up").values_EOI.copy_(gate_up)
        experts.shelf.packed("down").values_EOI.copy_(down)
    pair = experts.shelf.packed("gate_up"), experts.shelf.packed("down")
    ours = torch.autograd.grad(FrozenSlices.apply(x, *pair).square().sum(), x)[0]
    assert torch.allclose(ours, from_autograd, rtol=1e-4, atol=1e-5)


def test_a_frozen_slice_saves_its_pre_activations_alone():
    sizes = []

    def keep(value):
        sizes.append(tuple(value.shape))
        return value

    model = Decoder(SPEC, frozenset(), torch.int8)
    write_atoms(model, theta_of().items())
    x = torch.randn(6, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.model.layers[0].mlp(x.view(2, 3, 64))
    assert sizes == [(6, 2 * SPEC.slice_ffn)] * SPEC.ffn_slices, "no widened weight, no input"


def test_frozen_slices_are_no_parameters_and_have_names():
    model = Decoder(SPEC, frozenset({1}), torch.bfloat16)
    assert {expert_of(name) for name in frozen_names(model)} == {0, 2, 3}
    assert set(named_atoms(model)) == {atom.name for atom in atoms(SPEC)}


def test_it_starts_as_the_dense_model_does():
    """The spread of the first values is that of the whole feed-forward, though each atom is a part of it."""
    of = {spec.ffn_slices: {atom.name: atom for atom in atoms(spec)} for spec in (SPEC, DENSE)}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        sliced = genesis_atom(of[4][f"model.layers.0.mlp.experts.1.{projection}.weight"], SPEC, 1)
        dense = genesis_atom(of[0][f"model.layers.0.mlp.{projection}.weight"], DENSE, 1)
        assert float(sliced.std()) == pytest.approx(float(dense.std()), rel=0.05)


def test_atoms_are_as_many_values_as_the_dense_model_has():
    assert sum(math.prod(atom.shape) for atom in atoms(SPEC)) == SPEC.parameters == DENSE.parameters


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ffn_slices": 3}, "into multiples of 64"),
        ({"ffn_slices": 1}, "at least 2"),
        ({"ffn_slices": 8}, "into multiples of 64"),
        ({"ffn_slices": -1}, "ffn_slices"),
        ({"ffn_slices": 5000}, "ffn_slices"),
        ({"layers": 1024, "ffn_slices": 128, "ffn": 128 * 64}, "model.layers × model.ffn_slices"),
        ({"experts": ExpertsSpec(count=4, per_token=2, ffn=128)}, "a mixture has experts"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(changes, said):
    with pytest.raises(ConfigError) as refused:
        replace(SPEC, **changes).check()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
