"""ModelSpec: dense specs keep their bytes, mixtures have their atoms, and every illegal key is named."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import BIAS, ExpertsSpec, ModelSpec, atoms, expert_of

DENSE = ModelSpec(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=50, context=16, tied=True, rope_theta=1e4, norm_eps=1e-5
)
EXPERTS = ExpertsSpec(count=6, per_token=2, ffn=48)
MIXED = replace(DENSE, qk_norm=True, experts=EXPERTS)
ZERO = replace(EXPERTS, zero=3, per_token=3, computed=2.0, bias_rate=0.01)


def test_a_dense_spec_has_the_bytes_that_it_had_before_there_were_experts():
    found = codec.encode(DENSE)
    assert b"experts" not in found
    assert not any(key in found for key in (b"qk_norm", b"qkv_bias", b"gemma"))
    assert codec.decode(found, ModelSpec) == DENSE
    assert codec.decode(codec.encode(MIXED), ModelSpec) == MIXED


def test_a_default_that_is_spelled_out_is_not_canonical():
    spelled = msgspec.msgpack.encode(msgspec.to_builtins(MIXED) | {"tied": True, "qk_norm": False}, order="sorted")
    with pytest.raises(DecodeError):
        codec.decode(spelled, ModelSpec)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 9), ffn=st.integers(1, 40), zero=st.integers(0, 3), tied=st.booleans(),
    norm=st.booleans(), layers=st.integers(1, 3), rate=st.sampled_from([0.0, 0.01]), across=st.booleans(),
    head=st.sampled_from([None, 2, 8, 48]), data=st.data(),
)  # fmt: skip
def test_parameters_are_the_sum_of_the_atoms(count, ffn, zero, tied, norm, layers, rate, across, head, data):
    rate = rate or (0.5 if zero else 0.0)
    per_token = data.draw(st.integers(1, count))
    experts = ExpertsSpec(
        count=count, per_token=per_token, ffn=ffn, zero=zero, computed=1.0 if zero else None, bias_rate=rate
    )
    model = replace(DENSE, layers=layers, tied=tied, qk_norm=norm, experts=experts, ffn=per_token * ffn)
    model = replace(model, head_size=head, qk_norm_across=norm and across)
    model.check()
    table = atoms(model)
    assert sum(math.prod(atom.shape) for atom in table) == model.parameters == arena_of(model).values
    assert len({atom.name for atom in table}) == len(table)
    assert sum(atom.name.endswith(BIAS) for atom in table) == (layers if rate else 0)
    owners = [expert_of(atom.name) for atom in table]
    assert [owners.count(expert) for expert in range(count)] == [3 * layers] * count


def test_atoms_have_the_names_that_checkpoints_have_on_disk():
    shapes = {atom.name: atom.shape for atom in atoms(MIXED)}
    at = "model.layers.1."
    assert shapes[at + "mlp.gate.weight"] == (6, 64)
    assert shapes[at + "mlp.experts.5.gate_proj.weight"] == (48, 64)
    assert shapes[at + "mlp.experts.5.up_proj.weight"] == (48, 64)
    assert shapes[at + "mlp.experts.0.down_proj.weight"] == (64, 48)
    assert shapes[at + "self_attn.q_norm.weight"] == shapes[at + "self_attn.k_norm.weight"] == (16,)
    assert at + "mlp.up_proj.weight" not in shapes
    assert expert_of(at + "mlp.experts.5.up_proj.weight") == 5
    assert expert_of(at + "mlp.gate.weight") is None
    biased = {a.name: a.shape for a in atoms(replace(MIXED, experts=ZERO, ffn=144))}
    assert biased[at + "mlp.gate.weight"] == (9, 64)
    assert biased[at + "mlp.gate.e_score_correction_bias"] == (9,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("count", 0), ("count", 4097), ("per_token", 0), ("per_token", 7), ("ffn", 0), ("ffn", 1 << 23),
        ("zero", -1), ("zero", 4097), ("load_balance", math.nan), ("load_balance", -0.1), ("router_z", 2.0),
        ("bias_rate", math.inf), ("computed", 1.0),
    ],
)  # fmt: skip
def test_an_illegal_key_is_named(key, value):
    bad = replace(EXPERTS, **{key: value})
    with pytest.raises(ConfigError, match=rf"model\.experts\.{key}"):
        replace(MIXED, experts=bad).check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"computed": None}, "needs model.experts.computed"),
        ({"bias_rate": 0.0}, "needs model.experts.computed"),
        ({"computed": 3.5}, "model.experts.computed = 3.5"),
        ({"computed": math.nan}, "model.experts.computed = nan"),
    ],
)
def test_zero_experts_need_a_target_and_a_controller(changes, said):
    replace(MIXED, experts=ZERO, ffn=144).check()
    with pytest.raises(ConfigError, match=said):
        replace(MIXED, experts=replace(ZERO, **changes), ffn=144).check()


def test_the_width_that_a_token_passes_is_one_number():
    with pytest.raises(ConfigError, match=r"model\.ffn = 95"):
        replace(MIXED, ffn=95).check()


def test_a_table_of_atoms_has_a_bound():
    many = replace(MIXED, layers=1024, experts=replace(EXPERTS, count=65))
    with pytest.raises(ConfigError, match=r"model\.layers × model\.experts\.count"):
        many.check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_size": 3}, "head_size must be even"),
        ({"head_size": 16}, "absent where it is dim / heads"),
        ({"head_size": 0}, r"model\.head_size = 0"),
        ({"heads": 3, "kv_heads": 1}, r"model\.dim must be heads"),
        ({"qk_norm_across": True}, r"needs model\.qk_norm"),
    ],
)
def test_heads_that_no_decoder_has_are_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        replace(DENSE, **changes).check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qkv_bias": True, "qk_norm": True}, r"model\.qkv_bias is for dense models"),
        ({"qkv_bias": True, "experts": EXPERTS}, r"model\.qkv_bias is for dense models"),
        ({"gemma": True, "qk_norm": True}, r"model\.gemma is for tied dense models"),
        ({"gemma": True, "experts": EXPERTS}, r"model\.gemma is for tied dense models"),
        ({"gemma": True, "qkv_bias": True}, r"model\.gemma is for tied dense models"),
        ({"gemma": True, "ffn": 128, "ffn_slices": 2}, r"model\.gemma is for tied dense models"),
        ({"gemma": True, "tied": False}, r"model\.gemma is for tied dense models"),
    ],
)
def test_families_that_no_class_computes_are_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        replace(DENSE, **changes).check()


def test_biases_stand_behind_their_matrices():
    model = replace(DENSE, qkv_bias=True)
    model.check()
    found = [(atom.name.removeprefix("model.layers.1.self_attn."), atom.shape) for atom in atoms(model)]
    start = found.index(("q_proj.weight", (64, 64)))
    assert found[start : start + 7] == [
        ("q_proj.weight", (64, 64)),
        ("q_proj.bias", (64,)),
        ("k_proj.weight", (32, 64)),
        ("k_proj.bias", (32,)),
        ("v_proj.weight", (32, 64)),
        ("v_proj.bias", (32,)),
        ("o_proj.weight", (64, 64)),
    ]
    assert sum(math.prod(atom.shape) for atom in atoms(model)) == model.parameters == arena_of(model).values


def test_a_head_size_frees_the_width():
    model = replace(DENSE, heads=3, kv_heads=1, head_size=40)
    model.check()
    shapes = {atom.name: atom.shape for atom in atoms(model)}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (120, 64)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 120)
