"""The mixture: the plain formula, exact gradients whoever owns which experts, nothing saved in vain."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional

from atoll.node.learning.model import moe as moe_module
from atoll.node.learning.model.bridge import named_atoms, trained_atoms, write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.expert_functions import Packed, products, quantise, weight_gradients
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.moe import Mixture, RouterLoads, load_balance, move_biases, router_z
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms

torch.set_num_threads(1)
EXPERTS = ExpertsSpec(count=6, per_token=2, ffn=48)
SPEC = ModelSpec(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=50, context=16, tied=True, rope_theta=1e4, norm_eps=1e-5,
    qk_norm=True, experts=EXPERTS,
)  # fmt: skip
ZERO = replace(EXPERTS, zero=3, per_token=3, computed=2.0, bias_rate=0.01)
WINDOW = torch.arange(34).reshape(2, 17) * 7 % 50


def theta_of(spec, seed=1):
    return {name: torch.from_numpy(value).float() * 2.0**-24 for name, value in genesis(spec, seed).items()}


def built(spec, seed=1, **options):
    model = Decoder(spec, **options)
    write_atoms(model, theta_of(spec, seed).items())
    return model


def gradients(model, window=WINDOW):
    loss = loss_of(model, window)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), trained_atoms(model, grads)


def mixture(experts=EXPERTS, owned=None, dim=64, dtype=torch.float32, seed=0, on_host=False):
    every = frozenset(range(experts.count))
    made = Mixture(dim, experts, every if owned is None else frozenset(owned), dtype, on_host)
    source = torch.Generator().manual_seed(seed)
    values = {"gate.weight": torch.randn(experts.slots, dim, generator=source) * 0.3}
    for expert in range(experts.count):
        for name, shape in (
            ("gate", (experts.ffn, dim)),
            ("up", (experts.ffn, dim)),
            ("down", (dim, experts.ffn)),
        ):
            values[f"experts.{expert}.{name}_proj.weight"] = torch.randn(shape, generator=source) * 0.1
    write_atoms(made, values.items())
    return made, values


def plain(x_ND, values, experts, bias=None):
    """Token by token, expert by expert."""
    probability = (x_ND @ values["gate.weight"].T).softmax(-1)
    rows = []
    for token, p in zip(x_ND, probability, strict=True):
        chosen = (p if bias is None else p + bias).topk(experts.per_token).indices.tolist()
        weights = p[chosen] / p[chosen].sum() if experts.normalise else p[chosen]
        outs = []
        for slot in chosen:
            at = f"experts.{slot}."
            if slot >= experts.count:
                outs.append(token)
                continue
            gate, up, down = (values[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
            outs.append(down @ (functional.silu(gate @ token) * (up @ token)))
        rows.append(sum(w * out for w, out in zip(weights, outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("owned", [None, {5, 2}, set(), {0}])
@pytest.mark.parametrize("experts", [EXPERTS, replace(EXPERTS, normalise=False), ZERO], ids=["k2", "raw", "zero"])
def test_output_equals_the_plain_formula(experts, owned):
    made, values = mixture(experts, owned)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert torch.allclose(made(x, None).flatten(0, 1), plain(x.flatten(0, 1), values, experts), atol=1e-5)


def test_the_bias_moves_the_choice_and_not_the_weights():
    made, values = mixture(ZERO)
    bias = torch.tensor([0.0, 0, 1, 0, 0, 0, 0, 0, 1])
    made.gate.e_score_correction_bias.copy_(bias)
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert torch.allclose(made(x, None)[0], plain(x[0], values, ZERO, bias), atol=1e-5)
        assert {2, 8} <= set(made.gate(x[0]).slot_Nk[7].tolist())


@pytest.mark.parametrize("owned", [{5, 2}, {0, 1, 2, 3, 4}, set()])
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, experts=ZERO, ffn=144)], ids=["plain", "zero"])
def test_gradients_are_those_of_the_model_that_trains_everything(spec, owned):
    loss, whole = gradients(built(spec))
    same, ours = gradients(built(spec, owned=frozenset(owned)))
    assert abs(loss - same) < 1e-6
    shared = {name for name in whole if ".experts." not in name}
    mine = {name for name in whole if any(f".experts.{expert}." in name for expert in owned)}
    assert ours.keys() == shared | mine
    for name, grad in ours.items():
        assert torch.allclose(grad, whole[name], atol=1e-6), name
    assert all(float(whole[f"model.layers.{layer}.mlp.gate.weight"].abs().sum()) > 0 for layer in range(2))


def test_gradient_of_the_input_is_exact_through_frozen_experts():
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    towards = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for owned in (None, {3}, set()):
        made, _ = mixture(EXPERTS, owned)
        leaf = x.clone().requires_grad_()
        made(leaf, None).backward(towards)
        found.append((leaf.grad, made.gate.weight.grad))
    for grads in found[1:]:
        assert torch.allclose(grads[0], found[0][0], atol=1e-6)
        assert torch.allclose(grads[1], found[0][1], atol=1e-6)


def test_gradients_agree_with_finite_differences():
    experts = ExpertsSpec(count=3, per_token=2, ffn=4)
    made, _ = mixture(experts, {1}, dim=4)
    made.double()
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    inputs = (x, made.experts.gate_up, made.experts.down)
    assert torch.autograd.gradcheck(lambda x, *_: made.experts(x, [3, 0, 4]), inputs)


def saved_by(run):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t):
        run()
    return shapes


@pytest.mark.parametrize(
    ("owned", "saved"), [(set(), [(20, 32)]), ({0}, [(20, 32), (5, 16), (1, 32, 16), (1, 16, 16)])]
)
def test_frozen_experts_save_their_pre_activations_and_nothing_else(owned, saved):
    """The owned ones also save their input, five rows, and their weights."""
    made, _ = mixture(ExpertsSpec(count=3, per_token=1, ffn=16), owned, dim=16)
    x = torch.randn(20, 16, requires_grad=True)
    y = []
    assert saved_by(lambda: y.append(made.experts(x, [5, 0, 15]))) == saved
    y[0].sum().backward()
    assert x.grad is not None
    assert all(buffer.grad is None for buffer in made.experts.shelf.buffers())


def test_a_layer_saves_less_the_fewer_experts_it_owns():
    x = torch.randn(1, 64, 64)

    def values(owned):
        made, _ = mixture(EXPERTS, owned)
        leaf = x.clone().requires_grad_()
        rows = [s for s in saved_by(lambda: made(leaf, None)) if s[0] not in (6, len(owned or range(6)))]
        return sum(s[0] * s[1] for s in rows if len(s) == 2)

    everything, half, nothing = values(None), values({0, 1, 2}), values(set())
    assert nothing < half < everything
    assert everything - nothing == 64 * 2 * 64, "the input of all rows"


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.int8, 2e-2)])
def test_narrow_storage_is_close_and_its_gradient_is_that_of_what_is_stored(dtype, atol, on_host):
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    exact, values = mixture(EXPERTS, {1})
    narrow, _ = mixture(EXPERTS, {1}, dtype=dtype, on_host=on_host)
    stored = dict(values)
    for name, matrix in values.items():
        if ".1." in name or name == "gate.weight":
            continue
        if dtype == torch.bfloat16:
            stored[name] = matrix.bfloat16().float()
        else:
            small, scale = quantise(matrix)
            stored[name] = small.float() * scale
    same, _ = mixture(EXPERTS, {1})
    write_atoms(same, stored.items())
    grads = []
    for made in (exact, narrow, same):
        leaf = x.clone().requires_grad_()
        out = made(leaf, None)
        out.square().sum().backward()
        grads.append((out.detach(), leaf.grad))
    assert torch.allclose(grads[0][0], grads[1][0], atol=atol)
    for found, wanted in zip(grads[1], grads[2], strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)
    assert not any("shelf" in name for name in narrow.state_dict())
    assert bool(list(narrow.experts.shelf.buffers())) != on_host


def test_int8_keeps_each_row_within_half_a_step():
    matrix = torch.randn(10, 33) * torch.logspace(-4, 2, 10)[:, None]
    matrix[3] = 0
    small, scale = quantise(matrix)
    assert small.dtype == torch.int8
    assert bool(((small * scale - matrix).abs() <= scale * 0.5001).all())
    assert not small[3].any()


@pytest.mark.parametrize(("wide", "narrow"), [(16, 8), (12, 4)])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0]])
def test_products_of_sorted_rows(wide, narrow, counts):
    source = torch.Generator().manual_seed(4)
    stack = torch.randn(3, wide, narrow, generator=source)
    x, dy = (torch.randn(sum(counts), size, generator=source) for size in (narrow, wide))
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    products(x, Packed(stack), counts, y, transposed=True)
    assert torch.allclose(y, torch.einsum("pi,poi->po", x, stack[expert]), atol=1e-5)
    products(dy, Packed(stack), counts, dx, transposed=False)
    assert torch.allclose(dx, torch.einsum("po,poi->pi", dy, stack[expert]), atol=1e-5)
    wanted = torch.zeros(3, wide, narrow).index_add_(0, expert, torch.einsum("po,pi->poi", dy, x))
    assert torch.allclose(weight_gradients(dy, x, counts), wanted, atol=1e-5)


@pytest.fixture
def grouped(monkeypatch):
    """The way of an accelerator, on this CPU."""
    return lambda way: monkeypatch.setattr(moe_module, "uses_grouped_product", lambda *_: way)


@pytest.mark.parametrize("experts", [EXPERTS, ZERO], ids=["plain", "zero experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("owned", [None, {4, 1}, set()])
def test_the_way_of_an_accelerator_gives_the_same_layer(grouped, experts, dtype, owned):
    """One product of all experts, with ends that stay on the device: output and all gradients."""
    x = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(5))
    found = []
    for way in (False, True):
        grouped(way)
        made, _ = mixture(experts, owned, dtype=dtype)
        leaf = x.clone().requires_grad_()
        out = made(leaf, None)
        out.square().sum().backward()
        trained = {name: p.grad for name, p in made.named_parameters()}
        found.append({"out": out.detach(), "x": leaf.grad, **trained})
    assert found[0].keys() == found[1].keys()
    assert ("experts.down" in found[0]) == (owned != set())
    for name, value in found[0].items():
        assert torch.allclose(found[1][name], value, atol=1e-4), name


def layer_without_values(experts, owned):
    """Forward and backward of a layer whose values nobody can read: an operation that needs one of them raises."""
    with FakeTensorMode():
        made = Mixture(64, experts, frozenset(owned), torch.bfloat16, False)
        x = torch.empty(2, 24, 64, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loads = RouterLoads()
            loss = made(x, loads).float().square().mean() + loads.layers[0].term
        loss.backward()
        move_biases(nn.ModuleList([made]), experts, lambda seen: seen)
        assert x.grad is not None


@pytest.mark.parametrize("experts", [EXPERTS, ZERO], ids=["plain", "zero experts"])
@pytest.mark.parametrize("owned", [set(range(6)), {4, 1}, set()])
def test_a_layer_never_waits_for_its_device(grouped, experts, owned):
    """Without a GPU the stand-in for a wait is a value that the host asks for: fake tensors have none."""
    grouped(True)
    layer_without_values(experts, owned)


def test_the_way_of_a_cpu_does_ask_for_values(grouped):
    """So the test above can fail."""
    grouped(False)
    with pytest.raises(DataDependentOutputException):
        layer_without_values(EXPERTS, {4, 1})


@pytest.mark.parametrize("owned", [None, {4, 1}, set()])
def test_atoms_are_views_with_the_agreed_names_and_shapes(owned):
    spec = replace(SPEC, experts=ZERO, ffn=144)
    model = built(spec, owned=None if owned is None else frozenset(owned))
    found = named_atoms(model)
    assert {name: tuple(value.shape) for name, value in found.items()} == {a.name: a.shape for a in atoms(spec)}
    theta = theta_of(spec)
    assert all(torch.equal(found[name], theta[name]) for name in theta)
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    found[name].fill_(3)
    assert float(named_atoms(model)[name][5, 5]) == 3
    assert float(found["model.layers.1.mlp.experts.4.gate_proj.weight"].max()) < 3


def test_atoms_of_a_dense_model_are_its_parameters():
    model = Decoder(replace(SPEC, experts=None))
    assert [(n, v.data_ptr()) for n, v in named_atoms(model).items()] == [
        (n, p.data_ptr()) for n, p in model.named_parameters()
    ]


def test_an_atom_that_is_not_there_is_an_error():
    with pytest.raises(KeyError):
        write_atoms(built(SPEC), [("model.layers.0.mlp.experts.6.up_proj.weight", torch.zeros(48, 64))])


def test_only_owned_experts_are_parameters():
    model = built(SPEC, owned=frozenset({0, 3, 4}))
    frozen = 2 * 3 * 3 * 48 * 64
    assert sum(p.numel() for p in model.parameters()) == SPEC.parameters - frozen
    before = {name: value.clone() for name, value in named_atoms(model).items()}
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, WINDOW).backward()
    adam.step()
    moved = {name for name, value in named_atoms(model).items() if not torch.equal(value, before[name])}
    trained = {name for name in before if not any(f".experts.{e}." in name for e in (1, 2, 5))}
    assert moved == trained


def test_an_expert_that_is_not_there_cannot_be_owned():
    with pytest.raises(ConfigError, match="0 … 5"):
        Decoder(SPEC, owned=frozenset({0, 6}))


def test_load_balance_is_one_when_even_and_e_when_all_choose_one():
    even = torch.full((8, 4), 0.25)
    assert float(load_balance(even.mean(0), torch.tensor([2, 2, 2, 2]))) == pytest.approx(1)
    one = functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).float()
    assert float(load_balance(one.mean(0), torch.tensor([8, 0, 0, 0]))) == pytest.approx(4)
    assert float(load_balance(even.mean(0), torch.tensor([0, 0, 0, 0]))) == pytest.approx(0)
    half = torch.cat([even * 0.5, even * 0.5], 1)[:, :4]
    assert float(load_balance(half.mean(0), torch.tensor([1, 1, 1, 1]))) == pytest.approx(1), (
        "zero experts take no part"
    )


def test_router_z_is_the_squared_log_of_the_sum():
    assert float(router_z(torch.zeros(3, 4))) == pytest.approx(1.921812, abs=1e-5)


def test_terms_are_part_of_the_training_loss_and_not_of_an_evaluation():
    quiet = replace(SPEC, experts=replace(EXPERTS, load_balance=0.0, router_z=0.0))
    loud = replace(SPEC, experts=replace(EXPERTS, load_balance=0.5, router_z=0.25))
    with torch.no_grad():
        assert float(loss_of(built(quiet), WINDOW)) == float(loss_of(built(loud), WINDOW))
    loads = RouterLoads()
    model = built(loud)
    model(WINDOW[:, :-1], loads)
    terms = [load.term for load in loads.layers]
    assert len(terms) == 2
    difference = float((loss_of(model, WINDOW) - loss_of(built(quiet), WINDOW)).detach())
    assert difference == pytest.approx(float(torch.stack(terms).detach().mean()), abs=1e-5)


def test_two_layers_that_lean_opposite_ways_do_not_cancel():
    """Pooled over layers, their counts would look even."""
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    for sign in (1, -1):
        made, _ = mixture(ExpertsSpec(count=2, per_token=1, ffn=8, load_balance=1.0, router_z=0.0))
        lean = torch.ones(64) * sign
        write_atoms(made, [("gate.weight", torch.stack([lean, -lean]))])
        loads = RouterLoads()
        made(x.abs(), loads)
        assert float(loads.layers[0].term.detach()) == pytest.approx(2, abs=1e-3)


def test_parts_of_a_step_with_pooled_loads_have_together_the_gradient_of_the_whole():
    loud = replace(SPEC, experts=replace(EXPERTS, load_balance=0.5, router_z=0.25))
    window = torch.randint(0, SPEC.vocab, (3, 9), generator=torch.Generator().manual_seed(5))
    parts, shares = (window[:1], window[1:]), (1 / 3, 2 / 3)
    whole, model = built(loud), built(loud)
    wanted = loss_of(whole, window)
    wanted.backward()
    seen = []
    for part in parts:
        loss_of(model, part, lambda here: seen.append(here) or here)
    together = sum(share * here for share, here in zip(shares, seen, strict=True))
    losses = [loss_of(model, part, lambda _: together) for part in parts]
    loss = sum(share * part for share, part in zip(shares, losses, strict=True))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6), name


def test_a_mixture_learns():
    torch.manual_seed(0)
    model = built(SPEC, owned=frozenset({0, 1, 2}))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = loss_of(model, WINDOW)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_qk_norm_normalises_each_head_before_the_rotation():
    plain_spec = replace(SPEC, experts=None, qk_norm=True)
    model = built(plain_spec)
    large = {name: value * (100.0 if "q_proj" in name else 1.0) for name, value in theta_of(plain_spec).items()}
    other = Decoder(plain_spec)
    write_atoms(other, large.items())
    with torch.no_grad():
        assert torch.allclose(model(WINDOW[:, :-1]), other(WINDOW[:, :-1]), atol=1e-3), "the size of q is lost"


def test_under_autocast_products_are_narrow_and_gradients_are_not():
    model, narrow = built(SPEC, owned=frozenset({1})), built(SPEC, owned=frozenset({1}))
    loss, wide_grads = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = loss_of(narrow, WINDOW)
    out.backward()
    assert float(out.detach()) == pytest.approx(loss, rel=1e-2)
    name = "model.layers.0.mlp.experts.gate_up"
    found = dict(narrow.named_parameters())[name].grad
    assert found.dtype == torch.float32
    assert (
        functional.cosine_similarity(found.flatten(), dict(model.named_parameters())[name].grad.flatten(), 0)
        > 0.99
    )
    assert wide_grads
