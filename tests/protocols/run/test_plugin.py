"""`model.plugin`: what it cannot go with is refused when a run is made, in one line; unset, run ids stay."""

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms, plugged
from atoll.protocols.run.run_spec import StartSpec, open_run, sign_run
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.compression import CompressSpec
from atoll.protocols.run.sections.objective import ObjectiveSpec
from atoll.protocols.run.sections.plugin import MAX_TENSORS, PluginSpec, TensorSpec
from atoll.protocols.run.sections.serving import ServingSpec

PLUGIN = PluginSpec(
    name="lanes.1",
    package="atoll-lanes",
    tensors=(TensorSpec("a.weight", (70, 9), 5), TensorSpec("a.bias", (70,), 0), TensorSpec("b.gain", (9,), -1)),
    saved=1000,
)


def with_plugin(spec, **more):
    """A legal run of it; `more`: keys of PluginSpec."""
    model = plugged(replace(PLUGIN, **more), 64)
    data = replace(spec.data, source=model.plugin.source)
    return replace(spec, model=model, data=data)


def tensor(**more):
    return {"tensors": (replace(PLUGIN.tensors[0], **more),)}


MANY = tuple(TensorSpec(f"t{at}", (1,), 0) for at in range(MAX_TENSORS + 1))
WORDS = [
    ({"name": "lanes"}, "model.plugin.name"),
    ({"name": "lanes.0"}, "model.plugin.name"),
    ({"name": "lanes.1\n"}, "model.plugin.name"),
    ({"package": "--index-url=x"}, "model.plugin.package"),
    ({"tensors": ()}, "model.plugin.tensors"),
    ({"tensors": MANY}, "model.plugin.tensors"),
    ({"saved": 0}, "model.plugin.saved"),
    ({"saved": (1 << 36) + 1}, "model.plugin.saved"),
    (tensor(name="A"), "model.plugin.tensors"),
    (tensor(name="a\n"), "model.plugin.tensors"),
    (tensor(name="a" * 65), "model.plugin.tensors"),
    (tensor(name="x.mlp.experts.0.w"), "'experts', which means something else"),
    (tensor(name="x.lora_a"), "'lora_', which means something else"),
    (tensor(name="momentum1.a"), "'momentum', which means something else"),
    (tensor(name="model.layers.0.w"), "'model.', which means something else"),
    (tensor(shape=()), "model.plugin.tensors"),
    (tensor(shape=(1, 2, 3)), "model.plugin.tensors"),
    (tensor(shape=(0, 2)), "model.plugin.tensors"),
    (tensor(shape=((1 << 22) + 1, 1)), "model.plugin.tensors"),
    (tensor(shape=(1 << 22, 1 << 22)), "parameters; at most 137438953472 are legal"),
    (tensor(start=-2), "model.plugin.tensors"),
    (tensor(start=(1 << 32) + 1), "model.plugin.tensors"),
    ({"tensors": (PLUGIN.tensors[0], PLUGIN.tensors[0])}, "must have each name once"),
]


@pytest.mark.parametrize(("more", "said"), WORDS)
def test_what_no_model_can_say_of_itself_is_refused(spec, owner, more, said):
    with pytest.raises(ConfigError, match=said):
        sign_run(with_plugin(spec, **more), owner)


def key(section, **more):
    return lambda spec: replace(spec, **{section: replace(getattr(spec, section), **more)})


def whole(**more):
    return lambda spec: replace(spec, **more)


OTHER_KEY = "goes with no other key of the model than context"
TOGETHER = [
    (key("model", dim=4), OTHER_KEY),
    (key("model", layers=2), OTHER_KEY),
    (key("model", lora_rank=1), OTHER_KEY),
    (key("model", ffn_slices=2), OTHER_KEY),
    (key("model", experts=ExpertsSpec(count=4, per_token=1, ffn=1)), OTHER_KEY),
    (key("model", plugin=None), "data.source plugin:… is for runs with model.plugin"),
    (key("inner", optimizer="muon"), "model.plugin and inner.optimizer other than adamw cannot go together"),
    (key("outer", fragments=2), "model.plugin and outer.fragments cannot go together"),
    (key("outer", holders=1), "outer.holders is for runs whose model has experts"),
    (whole(objective=ObjectiveSpec(name="sigreg.1", weight=1.0)), "model.plugin and objective cannot go together"),
    (whole(audit=AuditSpec()), "model.plugin and audit cannot go together"),
    (whole(serving=ServingSpec()), "model.plugin and serving cannot go together"),
    (whole(start=StartSpec(weights=Digest(bytes(32)), state=Digest(bytes(32)))), "model.plugin and start cannot"),
    (key("data", source="synthetic:markov"), "model.plugin and data.source or data.tokenizer of another kind"),
    (key("data", source="plugin:lanes.2"), "model.plugin and data.source or data.tokenizer of another kind"),
    (key("data", tokenizer="bpe8k"), "model.plugin and data.source or data.tokenizer of another kind"),
]


@pytest.mark.parametrize(("change", "said"), TOGETHER)
def test_what_a_model_of_a_package_cannot_go_with_is_refused_in_one_line(spec, owner, change, said):
    with pytest.raises(ConfigError, match=said) as caught:
        sign_run(change(with_plugin(spec)), owner)
    assert "\n" not in str(caught.value)


def test_steps_without_gradients_are_refused(spec, owner):
    run = with_plugin(spec)
    run = replace(
        run,
        inner=replace(run.inner, optimizer="spsa", weight_decay=0.0, lr=1e-3),
        compress=CompressSpec(codec="scalar", k=512, feedback=0.0),
        outer=replace(run.outer, overlap_steps=0, overlap_most=UNSET, fragments=1),
        reduce=None,
    )
    with pytest.raises(ConfigError, match=r"inner\.optimizer other than adamw"):
        sign_run(run, owner)


def test_what_works_is_a_run_that_opens_again(spec, owner):
    for run in (with_plugin(spec), with_plugin(spec, tensors=MANY[:-1])):
        assert open_run(sign_run(run, owner)) == run


def test_the_largest_legal_model_fits_into_a_run(spec, owner):
    names = (f"{at:03}".rjust(64, "t") for at in range(MAX_TENSORS))
    longest = tuple(TensorSpec(name, (1 << 14, 1 << 14), 1 << 32) for name in names)
    assert len(sign_run(with_plugin(spec, tensors=longest), owner)) < codec.MESSAGE_MAX_BYTES // 2


def test_a_run_without_one_has_the_bytes_that_it_had(spec):
    assert b"plugin" not in codec.encode(spec)


def test_bytes_of_a_model_are_those_that_they_were():
    """Golden: members of other versions must read the same run."""
    assert codec.encode(PLUGIN).hex() == (
        "84a46e616d65a76c616e65732e31a77061636b616765ab61746f6c6c2d6c616e6573a57361766564cd03e8a7"
        "74656e736f72739393a8612e7765696768749246090593a6612e6269617391460093a6622e6761696e9109ff"
    )


def test_unknown_keys_are_refused():
    tree = msgspec.to_builtins(PLUGIN)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(tree | {"code": "import os"}), PluginSpec)
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(tree | {"tensors": [["a", [1], 0, 0]]}), PluginSpec)


def test_the_tensors_are_the_atoms(spec):
    run = with_plugin(spec)
    assert [(atom.name, atom.shape) for atom in atoms(run.model)] == [(t.name, t.shape) for t in PLUGIN.tensors]
    arena = arena_of(run.model)
    assert (arena.values, arena.chunks) == (70 * 9 + 70 + 9, 2 + 1)
    assert run.model.parameters == arena.values
    assert size_of(cover_of(run, 0)) == arena.chunks


def test_a_language_model_is_asked_for_in_one_line(spec, model: ModelSpec):
    model.check_decoder()
    with pytest.raises(ConfigError, match=r"trains lanes\.1 of the package atoll-lanes, no language model"):
        with_plugin(spec).model.check_decoder()
