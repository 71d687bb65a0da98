"""`outer.rule`: what it cannot go with is refused when a run is made, in one line; unset, run ids stay."""

import msgspec
import pytest

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import digest
from atoll.protocols.run.arena import arena_of, state_arena_of
from atoll.protocols.run.bounds import snapshot_max_bytes
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import CompressSpec, StartSpec, open_run, sign_run
from atoll.protocols.run.sections.merging import MergeSpec
from atoll.protocols.run.slices import ReduceSpec

DENSE = CompressSpec(codec="int8", k=4096, feedback=0.95)
AVERAGE = {"rule": "average", "alpha_256": 256}
START = StartSpec(weights=digest(b"weights"), state=digest(b"state"))
REFUSED = [
    ({"momentum_256": 230}, {}, "for runs with outer.rule nesterov, slowmo or co2"),
    ({"rule": "sgd", "momentum_256": 230}, {}, "for runs with outer.rule nesterov, slowmo or co2"),
    ({"rule": "average", "alpha_256": 179}, {"compress": DENSE}, "needs outer.alpha_256 256"),
    ({"rule": "average", "alpha_256": 256}, {}, "needs compress.codec int8 or e3m0"),
    ({"rule": "nesterov"}, {"reduce": ReduceSpec()}, "nesterov and reduce cannot go together"),
    ({"rule": "slowmo"}, {"start": START}, "slowmo and start cannot go together"),
    ({"rule": "nesterov", "holders": 1}, {"experts": True}, "nesterov and outer.holders cannot go together"),
    (
        {"rule": "slowmo", "merge": MergeSpec(every=2, until=9, alpha_4096=1024)},
        {"experts": True},
        "outer.merge cannot",
    ),
    ({"rule": "nesterov", "momentum_256": 256}, {}, "momentum_256"),
    ({"rule": "adam"}, {}, "rule"),
    ({"rule": "slowmo", "stale_256": 128}, {}, "for runs with outer.rule co2"),
    ({"clip_65536": 128}, {}, "for runs with outer.rule co2"),
    ({"late": "blend", "overlap_steps": 0}, {}, "outer.late is for runs with outer.overlap_steps above 0"),
    ({"late": "forecast", "overlap_steps": 1}, {}, "late"),
    ({"rule": "co2", "stale_256": 0}, {}, "stale_256"),
    ({"rule": "co2"}, {"reduce": ReduceSpec()}, "co2 and reduce cannot go together"),
    ({"rule": "co2"}, {"start": START}, "co2 and start cannot go together"),
    ({"rule": "co2", "holders": 1}, {"experts": True}, "co2 and outer.holders cannot go together"),
    ({"step_most_256": 2560}, {}, "for runs with outer.aggregate edit"),
    ({"step_most_256": 2560, "aggregate": "nnm"}, {}, "for runs with outer.aggregate edit"),
    ({"liars_256": 64, "aggregate": "edit"}, {}, "liars_256 is not for outer.aggregate edit"),
    ({"aggregate": "edit", "floor_256": 0}, {}, "needs outer.floor_256 above 0"),
    ({"aggregate": "edit"}, {"reduce": ReduceSpec()}, "reduce and outer.aggregate cannot go together"),
    ({"spectrum": "isotropic"}, {"reduce": ReduceSpec()}, "spectrum isotropic and reduce cannot go together"),
    (
        {**AVERAGE, "spectrum": "isotropic"},
        {"compress": DENSE},
        "outer.rule average and outer.spectrum cannot go together",
    ),
    ({**AVERAGE, "aggregate": "clip"}, {"compress": DENSE}, "outer.rule average and outer.aggregate"),
    ({**AVERAGE, "aggregate": "edit"}, {"compress": DENSE}, "outer.rule average and outer.aggregate"),
    (AVERAGE, {"compress": DENSE, "probation": True}, "outer.rule average and pace.probation_256"),
    ({"spectrum": "isotropic"}, {"lora": True}, "model.lora_rank and outer.spectrum cannot go together"),
    (
        {"spectrum": "isotropic"},
        {"compress": CompressSpec(codec="int8", k=4096, feedback=1.0, feedback_rule="econtrol")},
        "spectrum isotropic and compress.feedback_rule econtrol",
    ),
    ({"spectrum": "flat"}, {}, "spectrum"),
]
LEGAL = [
    ({"rule": "sgd"}, {}),
    ({"rule": "average", "alpha_256": 256}, {"compress": DENSE}),
    ({"rule": "nesterov", "alpha_256": 179}, {}),
    ({"rule": "nesterov", "alpha_256": 179, "fragments": 2, "overlap_steps": 1}, {"compress": DENSE}),
    ({"rule": "slowmo", "momentum_256": 128}, {"experts": True}),
    ({"rule": "nesterov", "aggregate": "edit", "step_most_256": 256}, {"compress": DENSE}),
    ({"aggregate": "edit", "holders": 1}, {"experts": True}),
    ({"late": "blend", "overlap_steps": 1}, {}),
    ({"rule": "nesterov"}, {"lora": True}),
    ({"spectrum": "isotropic", "rule": "nesterov", "alpha_256": 461, "momentum_256": 205}, {"compress": DENSE}),
    ({"spectrum": "isotropic", "alpha_256": 538, "aggregate": "nnm", "holders": 1}, {"experts": True}),
    ({"rule": "co2", "stale_256": 256, "clip_65536": 1, "momentum_256": 0, "fragments": 2}, {}),
]


def changed(spec, outer, more):
    more = dict(more)
    if more.pop("experts", False):
        more["model"] = msgspec.structs.replace(spec.model, experts=ExpertsSpec(count=4, per_token=2, ffn=50))
    if more.pop("lora", False):
        more |= {"model": msgspec.structs.replace(spec.model, lora_rank=4), "base": digest(b"base")}
    if more.pop("probation", False):
        more["pace"] = msgspec.structs.replace(spec.pace, probation=4, probation_256=64)
    return msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, **outer), **more)


@pytest.mark.parametrize(("outer", "more", "said"), REFUSED)
def test_what_a_rule_cannot_work_with_is_refused_in_one_line(spec, owner, outer, more, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(changed(spec, outer, more), owner)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("outer", "more"), LEGAL)
def test_what_works_is_a_run_that_opens_again(spec, owner, outer, more):
    run = changed(spec, outer, more)
    assert open_run(sign_run(run, owner)) == run


def test_a_run_without_a_rule_has_the_bytes_that_it_had(spec):
    body = codec.encode(spec)
    assert b"rule" not in body
    assert b"momentum" not in body
    assert b"spectrum" not in body
    assert spec.outer.momenta == 0


def test_co2_keeps_its_momentum_and_a_pending_mean(spec):
    outer = changed(spec, {"rule": "co2"}, {}).outer
    names = {place.name.split(".")[0] for place in state_arena_of(spec.model, outer.momenta).placements}
    assert {"momentum1", "momentum2"} <= names
    assert "momentum3" not in names


def test_a_state_with_momentum_has_the_models_arena_twice(spec):
    one, two = arena_of(spec.model), state_arena_of(spec.model, 1)
    assert state_arena_of(spec.model, 0) == one
    assert (two.chunks, two.values) == (2 * one.chunks, 2 * one.values)
    assert len({place.name for place in two.placements}) == 2 * len(one.placements)
    for first, second in zip(one.placements, two.placements[len(one.placements) :], strict=True):
        assert second.name == f"momentum1.{first.name}"
        assert (second.shape, second.first_chunk) == (first.shape, first.first_chunk + one.chunks)
    ruled = changed(spec, {"rule": "nesterov"}, {})
    assert snapshot_max_bytes(ruled) == 2 * snapshot_max_bytes(spec) - 4096
