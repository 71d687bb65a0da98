"""`inner.optimizer`: what it goes with, what is refused in one line; unset, run ids stay."""

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.worker.multi_device.modes import check_shards
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms
from atoll.protocols.run.moments import is_orthogonalized, kinds_of, moments_bytes
from atoll.protocols.run.run_spec import CompressSpec, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec

EXPERTS = ExpertsSpec(count=4, per_token=2, ffn=64)
MODEL = ModelSpec(
    dim=64, layers=2, heads=2, kv_heads=1, ffn=128, vocab=256, context=16, tied=False, rope_theta=1e4,
    norm_eps=1e-5, qk_norm=True,
)  # fmt: skip
REFUSED = [
    ({"muon_lr": 2.0}, "inner.muon_lr is for runs with inner.optimizer muon"),
    ({"muon_momentum": 0.9}, "inner.muon_momentum is for runs with inner.optimizer muon"),
    ({"optimizer": "adamw", "muon_lr": 2.0}, "inner.muon_lr is for runs"),
    ({"optimizer": "lion"}, "inner.optimizer"),
    ({"optimizer": "muon", "muon_momentum": 1.0}, "inner.muon_momentum"),
    ({"optimizer": "muon", "muon_lr": 65.0}, "inner.muon_lr"),
    ({"optimizer": "muon", "momentum_share": 0.9}, "inner.momentum_share is for runs with inner.optimizer adamw"),
    ({"momentum_share": 0.9, "beta1": 0.995, "beta2": 0.95}, "needs inner.beta2 above 0.990025"),
    ({"momentum_share": 1.1}, "inner.momentum_share"),
]
LEGAL = [
    {},
    {"compress": CompressSpec(codec="sparse1", k=128, feedback=0.5)},
    {"compress": CompressSpec(codec="int8", k=4096, feedback=0.0)},
    {"compress": CompressSpec(codec="e3m0", k=4096, feedback=0.5)},
    {"outer": {"rule": "nesterov"}},
    {"outer": {"fragments": 2, "overlap_steps": 1}},
    {"outer": {"aggregate": "krum"}},
    {"audit": AuditSpec()},
    {"model": replace(MODEL, experts=EXPERTS), "outer": {"holders": 1}},
]
"""What Muon goes with: every codec, every rule of the outer step, mixtures whose experts change hands. A slow
momentum goes with the same."""


def changed(spec, inner, more=()):
    more = dict(more)
    outer = replace(spec.outer, **more.pop("outer", {}))
    return replace(spec, inner=replace(spec.inner, **inner), outer=outer, **more)


@pytest.mark.parametrize(("inner", "said"), REFUSED)
def test_what_an_optimizer_cannot_go_with_is_refused_in_one_line(spec, owner, inner, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, inner), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, more):
    for inner in ({"optimizer": "muon", "muon_lr": 2.0}, {"momentum_share": 0.9, "beta1": 0.995, "beta2": 0.999}):
        run = changed(spec, inner, more)
        assert open_run(sign_run(run, owner)) == run


@pytest.mark.parametrize(("optimizer", "said"), [("adamw", ""), ("muon", "shard cannot go with inner.optimizer")])
def test_devices_that_have_parts_of_a_matrix_cannot_take_muons_steps(spec, optimizer, said):
    run = changed(spec, {"optimizer": optimizer})
    if not said:
        check_shards(run, 2)
        return
    with pytest.raises(ConfigError, match=said) as caught:
        check_shards(run, 2)
    assert "\n" not in str(caught.value)


def test_a_run_without_an_optimizer_has_the_bytes_that_it_had(spec):
    body = codec.encode(spec)
    assert b"optimizer" not in body
    assert b"muon" not in body
    assert b"momentum_share" not in body
    assert codec.encode(changed(spec, {"optimizer": "adamw"})) == codec.encode(changed(spec, {}))
    assert changed(spec, {"optimizer": "muon"}).id != changed(spec, {}).id
    assert spec.outer.rule is UNSET, "the bytes above are of a run without any choice"


def test_projections_are_turned_and_nothing_else():
    for model in (MODEL, replace(MODEL, experts=EXPERTS)):
        for atom in atoms(model):
            is_turned = len(atom.shape) == 2 and not any(
                part in atom.name for part in ("embed_tokens", "lm_head", "gate.weight")
            )
            assert is_orthogonalized("muon", atom.name) == is_turned, atom.name
            assert not is_orthogonalized("adamw", atom.name)
            assert kinds_of("muon", atom.name) == (("exp_avg",) if is_turned else ("exp_avg", "exp_avg_sq"))


def test_moments_of_an_expert_are_half_as_large():
    model = replace(MODEL, experts=EXPERTS)
    values = 2 * 3 * 64 * 64
    assert moments_bytes(model, "adamw") == 4 + 4 * values
    assert moments_bytes(model, "muon") == 4 + 2 * values
    assert moments_bytes(MODEL, "muon") == 0
