"""The arithmetic of memory, against measurements and against itself."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config.node_config import NodeConfig
from atoll.node.learning.inner import evaluate
from atoll.node.learning.model import moe, token_loss
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.genesis import genesis_atom
from atoll.node.learning.model.lora import load_base
from atoll.node.runs.capacity import memory_model as footprint
from atoll.node.runs.capacity.memory_model import (
    FROZEN_BYTES,
    activation_bytes,
    encoder_bytes,
    needs_of,
    parts_of,
    saved_bytes,
    trained_bytes,
)
from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.model_spec import atoms, expert_of
from atoll.protocols.run.moments import is_orthogonalized

OWNER = peer_id_of(bytes(range(32)))
CPU = NodeConfig(device="cpu", threads=1)
GPU = NodeConfig(device="cuda:0", threads=1, exchange_on="host")
MEASURED_MIB = {
    ("tiny", 8, 1, "on", None, "float32"): 468,
    ("10m", 4, 1, "on", None, "float32"): 836,
    ("10m", 16, 8, "off", None, "float32"): 1210,
    ("50m", 2, 1, "on", None, "float32"): 2270,
    ("50m", 2, 1, "off", None, "float32"): 2443,
    ("50m", 4, 4, "off", None, "float32"): 3408,
    ("moe-smoke", 8, 8, "off", 2, "float32"): 522,
    ("moe-12m", 4, 1, "on", 4, "float32"): 792,
    ("moe-12m", 4, 1, "on", 4, "int8"): 757,
    ("moe-12m", 4, 4, "off", 16, "float32"): 982,
    ("moe-12m", 16, 16, "off", 2, "float32"): 1352,
}
"""Peak memory of a worker (1 thread, torch 2.13 CPU): three rounds of two steps, three folds,
one of them final, a change of experts, two validations. Preset, sequences a step, of these at once, layers
recomputed, experts trained of a layer, how others are kept."""


def run_of(name="moe-12m", batch=4, holders=1):
    spec = preset(name, OWNER, 1)
    spec = msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, batch=batch))
    return msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, holders=holders))


@pytest.mark.parametrize(("case", "mib"), MEASURED_MIB.items())
def test_memory_is_near_what_was_measured(case, mib):
    name, batch, micro_batch, recompute, experts, frozen = case
    spec = run_of(name, batch, int(experts is not None))
    config = msgspec.structs.replace(CPU, frozen=frozen, micro_batch=micro_batch, recompute=recompute)
    need = needs_of(spec, config, experts)
    assert need.device == 0
    assert 0.87 <= (mib << 20) / need.host <= 1.05


def test_a_node_that_trains_nothing_needs_neither_gradients_nor_moments():
    """Measured of the worker: 625 MiB of 10m after two final rounds and two validations."""
    needs = {
        roles: needs_of(run_of("10m"), msgspec.structs.replace(CPU, roles=roles)).host
        for roles in ((), ("evaluate",), ("relay",))
    }
    assert 0.87 <= (625 << 20) / needs["evaluate",] <= 1.05
    assert needs["relay",] < needs["evaluate",] < needs[()]
    on_gpu = [needs_of(run_of("10m"), msgspec.structs.replace(GPU, roles=roles)) for roles in ((), ("evaluate",))]
    assert on_gpu[1].device < on_gpu[0].device


@pytest.mark.parametrize(("name", "most_gb"), [("1b", 20), ("350m", 8), ("125m", 3.5), ("50m", 2)])
def test_presets_fit_the_cards_that_people_have(name, most_gb):
    assert needs_of(preset(name, OWNER, 1), GPU).device <= most_gb * 1e9


def test_50m_fits_three_gigabytes_of_a_host():
    assert needs_of(preset("50m", OWNER, 1), CPU).host <= 3.0e9


@given(batch=st.integers(1, 64), micro_batch=st.integers(1, 64), on_gpu=st.booleans())
def test_what_is_said_without_a_choice_is_the_least(batch, micro_batch, on_gpu):
    spec, config = run_of("10m", batch, 0), GPU if on_gpu else CPU
    for recompute in ("on", "off"):
        chosen = msgspec.structs.replace(config, micro_batch=micro_batch, recompute=recompute)
        least, most = needs_of(spec, config), needs_of(spec, chosen)
        assert least.host <= most.host
        assert least.device <= most.device
        whole = needs_of(spec, msgspec.structs.replace(chosen, micro_batch=batch))
        assert micro_batch > batch or (most.host <= whole.host and most.device <= whole.device)
        # Beside recomputed steps of two or three windows other work is the most that a GPU holds.
        small = on_gpu and recompute == "on" and batch < 4
        assert (micro_batch < batch and not small) <= (most != whole)


def kept_by_autograd(model, owned, cast):
    """Bytes that a forward of three sequences saves, but weights and copies of them."""
    decoder = Decoder(model, owned)
    write_atoms(
        decoder, ((a.name, torch.from_numpy(genesis_atom(a, model, 1)).float() * 2.0**-24) for a in atoms(model))
    )
    if model.lora_rank:
        base = {a.name: torch.from_numpy(genesis_atom(a, model.base, 1)) for a in atoms(model.base)}
        load_base(decoder, model, lambda name: base[name].float() * 2.0**-24)
    weights = {value.untyped_storage().data_ptr() for value in (*decoder.parameters(), *decoder.buffers())}
    matrices = [value for value in decoder.parameters() if value.dim() > 1]
    shapes = {value.shape for value in matrices} | {value.mT.shape for value in matrices}
    found = {}

    def keep(value):
        place = value.untyped_storage()
        if place.data_ptr() not in weights and value.shape not in shapes:
            found[place.data_ptr()] = place.nbytes()
        return value

    window_BT1 = torch.randint(0, model.vocab, (3, model.context + 1), generator=torch.Generator().manual_seed(1))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss_of(decoder, window_BT1)
        return sum(found.values())


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    ("name", "owned"), [("tiny", None), ("10m", None), ("moe-smoke", 8), ("moe-smoke", 2), ("moe-12m", 0)]
)
def test_a_step_keeps_what_is_said(name, owned, cast, monkeypatch):
    monkeypatch.setattr(moe, "uses_grouped_product", lambda *_: cast)
    model = preset(name, OWNER, 1).model
    kept = kept_by_autograd(model, owned if owned is None else frozenset(range(owned)), cast)
    said = 3 * model.context * (model.layers * saved_bytes(model, owned, cast=cast) + 4 * model.dim)
    assert 0.95 <= kept / said <= 1.04


@pytest.mark.parametrize("family", ["qkv_bias", "gemma"])
def test_a_step_of_another_family_keeps_what_is_said(family):
    model = msgspec.structs.replace(preset("tiny", OWNER, 1).model, **{family: True})
    kept = kept_by_autograd(model, None, cast=False)
    said = 3 * model.context * (model.layers * saved_bytes(model, None) + 4 * model.dim)
    assert 0.95 <= kept / said <= 1.04


@pytest.mark.parametrize("owned", [4, 1, 0])
def test_a_step_with_ffn_slices_keeps_what_is_said(owned):
    model = msgspec.structs.replace(preset("10m", OWNER, 1).model, ffn_slices=4)
    kept = kept_by_autograd(model, frozenset(range(owned)), cast=False)
    said = 3 * model.context * (model.layers * saved_bytes(model, owned) + 4 * model.dim)
    assert 0.95 <= kept / said <= 1.04


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("targets", "least"), [("all", 0.8), ("ffn", 0.65), ("qv", 0.6)])
def test_a_step_of_a_lora_run_keeps_no_more_than_is_said(targets, least, cast):
    """Frozen gains and matrices save less than trained ones; the arithmetic does not count that."""
    model = msgspec.structs.replace(preset("10m", OWNER, 1).model, lora_rank=8, lora_targets=targets)
    kept = kept_by_autograd(model, None, cast)
    said = 3 * model.context * (model.layers * saved_bytes(model, cast=cast) + 4 * model.dim)
    assert least <= kept / said <= 1


def test_a_lora_run_takes_16_bytes_of_an_adapter_and_what_its_base_is_stored_in():
    whole = run_of("1b", holders=0)
    whole = msgspec.structs.replace(whole, inner=with_adamw(whole.inner))
    model = msgspec.structs.replace(whole.model, lora_rank=16)
    spec = msgspec.structs.replace(whole, model=model, base=bytes(32))
    trained, frozen = parts_of(model)
    assert (trained, frozen) == (model.parameters, whole.model.parameters)
    assert trained < frozen / 50
    config = msgspec.structs.replace(CPU, micro_batch=1, recompute="on")
    narrow = msgspec.structs.replace(config, frozen="bfloat16")
    saved = needs_of(spec, config).host - needs_of(spec, narrow).host
    assert saved == 2 * frozen
    assert needs_of(whole, config).host - needs_of(spec, config).host > 30 * (frozen - trained)


def test_a_quarter_of_the_ffn_slices_takes_what_16_T_and_b_F_say():
    """FFNs are two thirds of 1b: a quarter of them leaves 0.39 of the parameters to train."""
    model = msgspec.structs.replace(preset("1b", OWNER, 1).model, ffn_slices=8)
    trained, frozen = parts_of(model, 2)
    assert trained + frozen == model.parameters
    assert trained == model.parameters - 6 * model.layers * 3 * model.dim * 1024
    assert 0.38 <= trained / model.parameters <= 0.40


@pytest.mark.parametrize("frozen", FROZEN_BYTES)
def test_an_expert_less_saves_what_it_costs_more_to_train(frozen):
    spec = run_of(batch=64)
    config = msgspec.structs.replace(GPU, frozen=frozen, micro_batch=64, recompute="off")
    one = 3 * 192 * 192 * 6
    assert parts_of(spec.model, 15) == (spec.model.parameters - one, one)
    saved = needs_of(spec, config, 16).device - needs_of(spec, config, 15).device
    steps = activation_bytes(spec.model, 64, 16, cast=True) - activation_bytes(spec.model, 64, 15, cast=True)
    assert saved == (16 - FROZEN_BYTES[frozen]) * one + steps


@pytest.mark.parametrize(("name", "experts"), [("tiny", None), ("50m", None), ("moe-12m", None), ("moe-12m", 3)])
def test_muon_saves_one_moment_of_each_matrix_that_it_moves(name, experts):
    plain = run_of(name, holders=int(name == "moe-12m"))
    plain = msgspec.structs.replace(plain, inner=with_adamw(plain.inner))
    spec = msgspec.structs.replace(plain, inner=msgspec.structs.replace(plain.inner, optimizer="muon"))
    ours = [
        atom
        for atom in atoms(spec.model)
        if is_orthogonalized("muon", atom.name) and (experts is None or (expert_of(atom.name) or 0) < experts)
    ]
    values = sum(torch.Size(atom.shape).numel() for atom in ours)
    assert trained_bytes(plain, experts) - trained_bytes(spec, experts) == 4 * values
    large = msgspec.structs.replace(CPU, micro_batch=4, recompute="off")  # its passes need more than a matrix
    saved = needs_of(plain, large, experts).host - needs_of(spec, large, experts).host
    assert saved == 4 * values


def test_frozen_experts_on_the_host_are_not_on_the_device():
    spec = run_of()
    here, there = (needs_of(spec, msgspec.structs.replace(GPU, frozen_on_host=on), 2) for on in (False, True))
    assert here.device - there.device == 4 * parts_of(spec.model, 2)[1]
    assert here.host == there.host, "built there first"


def test_a_device_that_encodes_holds_error_feedback_and_anchor_of_all():
    spec = run_of()
    on = msgspec.structs.replace(GPU, exchange_on="device")
    more = needs_of(spec, on, 2).device - needs_of(spec, GPU, 2).device
    assert more == encoder_bytes(spec) > 8 * spec.model.parameters
    parts = NodeConfig(device="cuda:0,cuda:1", threads=1, shard=True)
    assert needs_of(spec, msgspec.structs.replace(parts, exchange_on="device"), 2) == needs_of(spec, parts, 2)


def test_a_validation_takes_the_place_of_a_step():
    assert evaluate.TOKENS_AT_ONCE == footprint.VALIDATED_TOKENS
    spec = run_of("50m", 4, 0)
    step = needs_of(spec, msgspec.structs.replace(GPU, micro_batch=4, recompute="off")).device
    assert step > needs_of(spec, GPU).device
    wide = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, vocab=8192 + 64))
    rows = 64 * spec.model.dim
    logits = token_loss.slab_tokens(8192 + 64) * (8192 + 64) - token_loss.slab_tokens(8192) * 8192 + 512 * 64
    assert needs_of(wide, CPU).host - needs_of(spec, CPU).host == (16 + 20 + 2 * 4) * rows + 4 * logits


def test_devices_share_the_sequences_and_as_parts_what_is_trained_too():
    spec = run_of("50m", 32, 0)
    whole = msgspec.structs.replace(GPU, micro_batch=32)
    many = msgspec.structs.replace(whole, device="cuda:0,cuda:1")
    one, two = needs_of(spec, whole), needs_of(spec, many)
    parts = needs_of(spec, msgspec.structs.replace(many, shard=True))
    assert two.host > one.host, "of two processes"
    assert two.device < one.device
    assert two.device - parts.device == 8 * spec.model.parameters
    ranks = needs_of(spec, msgspec.structs.replace(CPU, device="cpu,cpu")).host
    assert ranks - needs_of(spec, CPU).host >= 16 * spec.model.parameters


def test_a_gpu_takes_the_tensors_off_the_host():
    spec = run_of("350m", 128, 0)
    on_cpu, on_gpu = needs_of(spec, CPU), needs_of(spec, GPU)
    assert on_gpu.device > 16 * spec.model.parameters
    assert on_gpu.host < on_cpu.host


@given(
    experts=st.integers(0, 15),
    frozen=st.sampled_from(sorted(FROZEN_BYTES)),
    on_host=st.booleans(),
    device=st.sampled_from(["cpu", "cpu,cpu", "cuda", "cuda:0,cuda:1"]),
    shard=st.booleans(),
    batch=st.integers(1, 64),
)
def test_one_expert_more_never_needs_less(experts, frozen, on_host, device, shard, batch):
    """What makes a search for the most that fits a search."""
    config = NodeConfig(
        device=device, threads=1, frozen=frozen, frozen_on_host=on_host, shard=shard and "," in device
    )
    spec = run_of(batch=batch)
    less, more = needs_of(spec, config, experts), needs_of(spec, config, experts + 1)
    assert less.host < more.host
    assert less.device <= more.device


def test_a_member_of_a_zeroth_order_run_needs_what_one_that_validates_needs():
    spec = preset("10m", OWNER, 1)
    spec = msgspec.structs.replace(spec, inner=with_adamw(spec.inner))
    scalar = msgspec.structs.replace(
        spec,
        inner=msgspec.structs.replace(spec.inner, optimizer="spsa"),
        compress=msgspec.structs.replace(spec.compress, codec="scalar"),
    )
    watching = msgspec.structs.replace(CPU, roles=("evaluate",))
    assert needs_of(scalar, CPU) == needs_of(spec, watching)
    saved = needs_of(spec, CPU).host - needs_of(scalar, CPU).host
    # Gradients and moments, 12 bytes of a parameter; anchor and error feedback, 8.
    assert saved >= 20 * spec.model.parameters
