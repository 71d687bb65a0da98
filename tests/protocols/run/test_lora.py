"""LoRA runs: sizes follow from the spec, earlier runs are what they were, bad settings are refused."""

import math

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.bounds import base_max_bytes, snapshot_max_bytes
from atoll.protocols.run.model_spec import ExpertsSpec, atoms
from atoll.protocols.run.run_spec import RunSpec, SignedRun, StartSpec, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec

BASE = bytes(range(32))


@pytest.fixture
def lora(spec):
    """The run of the tests with adapters."""
    model = replace(spec.model, lora_rank=4)
    return replace(spec, model=model, base=BASE, start=UNSET, reduce=None)


def test_a_run_without_adapters_has_the_bytes_that_it_always_had(spec):
    said = codec.encode(spec)
    assert b"lora" not in said
    assert b"base" not in said
    assert spec.model.base == spec.model


def test_a_lora_run_travels(lora, owner):
    found = open_run(sign_run(lora, owner))
    assert found == lora
    assert lora.id != replace(lora, base=bytes(32)).id, "another base is another run"
    assert lora.given.count(BASE) == 1, "members serve the base to others"


@pytest.mark.parametrize(("targets", "count"), [("all", 7), ("attention", 4), ("ffn", 3), ("qv", 2)])
def test_sizes_are_those_of_the_factors(lora, targets, count):
    model = replace(lora.model, lora_targets=targets)
    model.check()
    table = atoms(model)
    assert len(table) == 2 * count * model.layers
    assert model.parameters == sum(math.prod(atom.shape) for atom in table)
    arena = arena_of(model)
    # Laid end to end, nothing is padded but the end.
    assert arena.chunks == -(-model.parameters // CHUNK)
    whole = {atom.name: atom.shape for atom in atoms(model.base)}
    for atom in table:
        at, _, factor = atom.name.removesuffix(".weight").rpartition(".")
        out, into = whole[f"{at}.weight"]
        assert atom.shape == (4 * (into if factor == "lora_A" else out),)


def test_what_members_send_and_keep_is_of_the_adapters_size(lora):
    whole = replace(lora, model=lora.model.base, base=UNSET)
    assert lora.model.parameters < whole.model.parameters / 4
    assert payload_size(lora, 0) < payload_size(whole, 0) / 4
    assert snapshot_max_bytes(lora) < snapshot_max_bytes(whole)
    assert base_max_bytes(lora) == snapshot_max_bytes(whole)
    assert base_max_bytes(whole) == 0


def test_the_scale_is_alpha_over_rank_and_one_by_default(lora):
    assert lora.model.lora_scale == 1.0
    assert replace(lora.model, lora_alpha=16.0).lora_scale == 4.0


START = StartSpec(weights=BASE, state=BASE)
REFUSED = [
    ({"base": UNSET}, "model.lora_rank needs imported weights"),
    ({"model.lora_rank": 0}, "base is for runs with model.lora_rank"),
    ({"model.lora_rank": 0, "base": UNSET, "model.lora_alpha": 8.0}, "are for runs with model.lora_rank"),
    ({"model.lora_rank": 0, "base": UNSET, "model.lora_targets": "qv"}, "are for runs with model.lora_rank"),
    ({"model.lora_rank": 33}, "model.lora_rank = 33 is above the smaller side of k_proj.weight, 32"),
    ({"model.lora_targets": "embed_tokens"}, "embedding and head are frozen, and a tied one is both at once"),
    ({"model.lora_targets": "lm_head"}, "embedding and head are frozen"),
    ({"model.lora_targets": "norm"}, "is none of all, attention, ffn, qv"),
    ({"model.ffn_slices": 2}, "model.lora_rank and model.ffn_slices cannot go together"),
    ({"model.experts": ExpertsSpec(count=4, per_token=2, ffn=64)}, "model.lora_rank and model.experts cannot"),
    ({"start": START}, "model.lora_rank and start cannot go together"),
    ({"outer.fragments": 2}, "model.lora_rank and outer.fragments cannot go together"),
    ({"audit": AuditSpec()}, "model.lora_rank and audit cannot go together"),
    ({"inner.optimizer": "muon"}, "model.lora_rank and inner.optimizer muon cannot go together"),
    ({"inner.expert_lr": 2.0}, "inner.expert_lr is for runs whose model has experts"),
    ({"outer.holders": 1}, "outer.holders is for runs whose model has experts"),
]


def changed(spec: RunSpec, keys) -> RunSpec:
    for key, value in keys.items():
        at, _, name = key.rpartition(".")
        spec = replace(spec, **{at: replace(getattr(spec, at), **{name: value})} if at else {name: value})
    return spec


@pytest.mark.parametrize(("keys", "why"), REFUSED, ids=[" ".join(keys) for keys, _ in REFUSED])
def test_what_cannot_go_together_is_refused_here_and_from_outside(lora, owner, keys, why):
    model = replace(lora.model, dim=64, heads=2, kv_heads=1, ffn=128, head_size=None)
    good = replace(lora, model=model)
    good.check()
    bad = changed(good, keys)
    with pytest.raises(ConfigError) as caught:
        bad.check()
    assert why in str(caught.value)
    assert "\n" not in caught.value.line()
    body = codec.encode(bad)
    with pytest.raises(DecodeError):
        open_run(codec.encode(SignedRun(body, owner.sign("run/1", body))))


@pytest.mark.parametrize("rank", [-1, 1025])
def test_ranks_have_a_range(lora, rank):
    with pytest.raises(ConfigError, match=r"model\.lora_rank"):
        changed(lora, {"model.lora_rank": rank}).check()


@pytest.mark.parametrize(
    "keys",
    [
        {"outer.rule": "nesterov"},
        {"outer.rule": "slowmo"},
        {"outer.rule": "average", "compress.codec": "int8", "compress.k": 4096, "outer.alpha_256": 256},
        {"outer.aggregate": "clip", "outer.floor_256": 64},
        {"outer.overlap_steps": 1},
    ],
)
def test_what_goes_with_adapters(lora, keys):
    changed(lora, keys).check()
