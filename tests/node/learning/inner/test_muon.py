"""Muon: against its formula, a golden trajectory, saved state, moments of strangers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.inner.moments import pack, unpack
from atoll.node.learning.inner.muon import ADAMW_RMS, muon_step, orthogonalized
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.genesis import genesis
from atoll.node.runs.presets import preset
from atoll.node.worker.multi_device.replica import ALL_STORED, Replica, StepMemory
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.moments import MAX_STEPS, is_orthogonalized, kinds_of
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import inner_spec
from tests.plain.muon import PlainAdamW, PlainMuon, polar

GOLDEN = Path(__file__).parents[3] / "golden" / "muon.json"
MODEL = ModelSpec(
    dim=64, layers=2, heads=2, kv_heads=1, ffn=128, vocab=96, context=8, tied=True, rope_theta=1e4, norm_eps=1e-5
)
MODELS = {
    "dense": MODEL,
    "mixture": replace(MODEL, qk_norm=True, experts=ExpertsSpec(count=4, per_token=2, ffn=64)),
}
MUON = inner_spec(optimizer="muon", clip=0.5, total_steps=40, warmup_steps=4, lr=5e-3, muon_lr=2.0)


def replica_of(name="dense", spec=MUON, memory=ALL_STORED):
    model = MODELS[name]
    run = replace(preset("tiny", peer_id_of(bytes(range(32))), 1), model=model, inner=spec)
    owned = bitmap_of(range(4), 4) if model.experts else ALL
    made = Replica(run, owned, "cpu", (torch.float32, False), memory=memory)
    values = genesis(model, 1).items()
    write_atoms(made.module, ((name, torch.from_numpy(value).float() * 2.0**-24) for name, value in values))
    return made


def windows_of(step):
    return np.random.default_rng(step).integers(0, MODEL.vocab, (4, MODEL.context + 1))


def values_of(inner):
    return {name: value.clone() for name, value in inner._atoms.items()}


@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 192), (1, 64), (64, 1)])
def test_a_direction_is_what_the_singular_values_say(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrix)
    assert found.shape == shape
    assert torch.allclose(found.double(), torch.from_numpy(polar(matrix.double().numpy())), atol=2e-5)
    assert torch.allclose(orthogonalized(matrix * 1e-12), found, atol=1e-5)
    assert not orthogonalized(torch.zeros(shape)).any()


def test_singular_values_of_a_move_stay_below_the_bound_that_clipping_relies_on():
    """1.25: what `outer.aggregate` allows of a step (node/learning/outer/aggregation.py)."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        matrix = torch.randn(96, 64, generator=generator) * torch.rand(64, generator=generator) ** (seed / 2)
        assert float(torch.linalg.svdvals(orthogonalized(matrix))[0]) < 1.25


def gradients_of(made, window):
    made.inner.passes.run(torch.from_numpy(window), made.inner._begin)
    named = {name: p.grad.clone() for name, p in made.module.named_parameters()}
    return {name: g.double().numpy() for name, g in made.inner._by_atom(named).items()}


@pytest.mark.parametrize("name", MODELS)
def test_steps_follow_the_formulas(name):
    """The gradients are the product's own; all that follows from them is written out again."""
    torch.set_num_threads(1)
    spec = replace(MUON, expert_lr=0.5) if name == "mixture" else MUON
    made, beside = replica_of(name, spec), replica_of(name, spec)
    plain = {}
    for atom, value in values_of(made.inner).items():
        if is_orthogonalized("muon", atom):
            plain[atom] = PlainMuon(value.numpy(), spec.muon_momentum, spec.weight_decay)
        else:
            plain[atom] = PlainAdamW(value.numpy(), spec, spec.weight_decay if value.dim() > 1 else 0.0)
    assert sum(isinstance(each, PlainMuon) for each in plain.values()) == (14 if name == "dense" else 8 + 24)
    for step in range(8):
        beside.module.load_state_dict(made.module.state_dict())
        found = gradients_of(beside, windows_of(step))
        norm = math.sqrt(sum(float((g**2).sum()) for g in found.values()))
        assert norm > spec.clip, "the test must clip"
        made.inner.step(windows_of(step), step)
        rate = learning_rate(spec, step)
        for atom, each in plain.items():
            factor = spec.muon_lr if isinstance(each, PlainMuon) else 1.0
            factor *= spec.expert_lr if ".experts." in atom else 1.0
            each.step(found[atom] * min(1, spec.clip / (norm + 1e-6)), rate * factor)
    for atom, value in values_of(made.inner).items():
        close = torch.allclose(value.double(), torch.from_numpy(plain[atom].value), atol=3e-5)
        assert close, atom


def test_on_a_quadratic_a_falling_rate_comes_to_the_least_point_and_zero_gradients_stay_there():
    """A move has one length whatever the gradient's is, so the rate decides how near it comes."""
    draw = torch.Generator().manual_seed(2)
    least_MN, value_MN = (torch.randn(24, 16, generator=draw) for _ in range(2))
    momentum_MN, steps = torch.zeros_like(value_MN), 600
    for at in range(steps):
        rate = 0.05 * (1 - at / steps)
        muon_step(value_MN, momentum_MN, value_MN - least_MN, rate=rate, beta=0.9, decay=0.0)
    assert float((value_MN - least_MN).abs().max()) < 2e-3
    resting_MN = least_MN.clone()
    muon_step(resting_MN, torch.zeros_like(least_MN), torch.zeros_like(least_MN), rate=0.05, beta=0.9, decay=0.0)
    assert torch.equal(resting_MN, least_MN)


def golden():
    """Losses of twelve steps: the content of tests/golden/muon.json."""
    torch.set_num_threads(1)
    return {
        name: [round(loss, 4) for loss in run_steps(replica_of(name).inner.step, windows_of, 0, 12)]
        for name in MODELS
    }


def test_golden_trajectory():
    """Up to the order of float sums, which machines choose."""
    recorded, found = json.loads(GOLDEN.read_text()), golden()
    assert recorded.keys() == found.keys()
    for name, losses in recorded.items():
        assert found[name] == pytest.approx(losses, abs=2e-4)


def test_micro_batches_and_recomputation_take_the_same_steps():
    whole, parts = replica_of(), replica_of(memory=StepMemory(1, True))
    for step in range(4):
        assert parts.inner.step(windows_of(step), step) == pytest.approx(
            whole.inner.step(windows_of(step), step), rel=1e-5
        )
    for atom, value in values_of(whole.inner).items():
        assert torch.allclose(parts.inner._atoms[atom], value, atol=1e-4), atom


def test_a_matrix_has_one_moment_and_a_saved_state_goes_on_with_the_same_bits():
    whole, part, resumed = replica_of(), replica_of(), replica_of()
    list(run_steps(whole.inner.step, windows_of, 0, 8))
    list(run_steps(part.inner.step, windows_of, 0, 3))
    saved = {name: value.clone() for name, value in part.inner.state().items()}
    assert set(saved) == {
        f"{kind}/{atom}" for atom in part.inner._atoms for kind in ("step", *kinds_of("muon", atom))
    }
    assert sum(name.startswith("exp_avg_sq/") for name in saved) == len(part.inner._atoms) - 14
    resumed.module.load_state_dict(part.module.state_dict())
    resumed.inner.load(saved)
    list(run_steps(resumed.inner.step, lambda i: windows_of(3 + i), 3, 5))
    for atom, value in values_of(whole.inner).items():
        assert torch.equal(resumed.inner._atoms[atom], value), atom
    del saved["exp_avg/model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CorruptFault, match="does not fit"):
        resumed.inner.load(saved)


def test_a_state_of_adamw_has_the_names_that_it_had():
    made = replica_of(spec=inner_spec())
    made.inner.step(windows_of(0), 0)
    assert set(made.inner.state()) == {
        f"{kind}/{atom}" for atom in made.inner._atoms for kind in ("step", "exp_avg", "exp_avg_sq")
    }


NAMES = [f"model.layers.0.mlp.experts.1.{kind}_proj.weight" for kind in ("gate", "up", "down")]
SHAPES = [(name, (64, 64)) for name in NAMES]


def packed(steps=5):
    made = replica_of("mixture")
    list(run_steps(made.inner.step, windows_of, 0, steps))
    return made.inner, pack(made.inner.state(), NAMES)


def test_a_momentum_that_is_handed_over_is_half_as_large_and_adds_up():
    inner, data = packed()
    assert len(data) == 4 + 2 * 3 * 64 * 64
    found = unpack(data, SHAPES, MUON)
    assert {name.split("/")[0] for name in found} == {"step", "exp_avg"}
    for name in NAMES:
        key = f"exp_avg/{name}"
        assert torch.allclose(found[key], inner.state()[key], rtol=2**-8, atol=0)
    before = {name: inner.state()[f"exp_avg/{name}"].clone() for name in NAMES}
    inner.continue_from(found)
    for name in NAMES:
        wanted = before[name] + MUON.muon_momentum**5 * found[f"exp_avg/{name}"]
        assert torch.allclose(inner.state()[f"exp_avg/{name}"], wanted)
        assert inner.state()[f"step/{name}"] == 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4, -1.0])
def test_a_momentum_that_clipped_gradients_cannot_have_given_is_refused(value):
    _, data = packed(2)
    values = torch.frombuffer(bytearray(data), dtype=torch.bfloat16, offset=4).clone()
    values[7] = value
    with pytest.raises(DecodeError, match="clipped gradients"):
        unpack(data[:4] + values.view(torch.uint8).numpy().tobytes(), SHAPES, MUON)


def test_another_size_and_impossible_steps_are_refused():
    _, data = packed(2)
    for spoiled in (data[:-1], data + b"x", bytes(4) + data[4:], b"", data[:4] + 2 * data[4:]):
        with pytest.raises(DecodeError, match="not the moments"):
            unpack(spoiled, SHAPES, MUON)
    with pytest.raises(DecodeError, match="not the moments"):
        unpack((MAX_STEPS + 1).to_bytes(4, "little") + data[4:], SHAPES, MUON)


def test_the_worst_momentum_of_a_stranger_turns_a_step_but_does_not_lengthen_it():
    inner, data = packed(2)
    steps, count = data[:4], 3 * 64 * 64
    worst = torch.full((count,), MUON.clip / math.sqrt(count)).bfloat16()
    inner.continue_from(unpack(steps + worst.view(torch.uint8).numpy().tobytes(), SHAPES, MUON))
    before = {name: inner._atoms[name].clone() for name in NAMES}
    inner.step(windows_of(9), 9)
    rate = learning_rate(MUON, 9) * MUON.muon_lr
    for name in NAMES:
        moved = inner._atoms[name] - (1 - rate * MUON.weight_decay) * before[name]
        assert float(torch.linalg.svdvals(moved)[0]) <= 1.25 * rate * ADAMW_RMS * math.sqrt(64)
