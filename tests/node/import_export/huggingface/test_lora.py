"""A LoRA run leaves merged, as a plain Llama, or as a folder that peft loads: both compute what was trained."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from atoll.node.import_export.huggingface.folder import load_folder, save_folder
from atoll.node.import_export.huggingface.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_tensors,
    merged_reader,
    save_adapter,
)
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json, tokenizer_files
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.lora import load_base
from atoll.protocols.errors import ConfigError, Divergence
from atoll.protocols.run.lora import TARGETS
from atoll.protocols.run.model_spec import ModelSpec, atoms
from tests.later import GROUP, peft, transformers

torch.set_num_threads(1)
# peft asks transformers for a property by its older name.
pytestmark = [GROUP, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]
DENSE = ModelSpec(
    dim=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=256, context=32, tied=True, rope_theta=5e4, norm_eps=1e-5
)
SPECS = {
    "Llama, all": replace(DENSE, lora_rank=4),
    "Llama, attention": replace(DENSE, tied=False, lora_rank=3, lora_alpha=12.0, lora_targets="attention"),
    "Qwen3, wide heads, ffn": replace(DENSE, qk_norm=True, head_size=32, lora_rank=5, lora_targets="ffn"),
    "Qwen3, qv": replace(DENSE, qk_norm=True, lora_rank=8, lora_alpha=4.0, lora_targets="qv"),
}
TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def values_of(spec):
    """Base and factors, int32; B is not zero."""
    theta = {name: torch.from_numpy(value) for name, value in genesis(spec.base, 3).items()}
    draw = torch.Generator().manual_seed(4)
    factors = {
        atom.name: (torch.randn(atom.shape, generator=draw) * 0.1 * (1 << 24)).to(torch.int32)
        for atom in atoms(spec)
    }
    return theta, factors


def floats(values):
    return {name: value.float() * 2.0**-24 for name, value in values.items()}


def logits_of(spec, theta, factors):
    decoder = Decoder(spec)
    load_base(decoder, spec, floats(theta).__getitem__)
    write_atoms(decoder, floats(factors).items())
    with torch.no_grad():
        return decoder(TOKENS)


def save_base(folder, spec, read):
    texts = tokenizer_files(byte_tokenizer_json(), spec.context, None)
    return save_folder(folder, spec.base, read, texts)


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", SPECS)
def test_the_merged_export_has_the_adapters_logits(tmp_path, name):
    spec = SPECS[name]
    theta, factors = values_of(spec)
    want = logits_of(spec, theta, factors)
    kind = save_base(tmp_path / "hf", spec, merged_reader(spec, factors.__getitem__, theta.__getitem__))
    assert kind == f"{name.split(',')[0]}ForCausalLM"
    with torch.no_grad():
        found = loaded(tmp_path / "hf")(TOKENS).logits
    plain = logits_of(spec, theta, {factor: torch.zeros_like(value) for factor, value in factors.items()})
    assert float((want - plain).abs().max()) > 0.1, "the adapter says something"
    assert float((found - want).abs().max()) < 1e-5
    assert load_folder(tmp_path / "hf").model == spec.base


@pytest.mark.parametrize("name", SPECS)
def test_peft_loads_the_adapter_and_computes_its_logits(tmp_path, name):
    spec = SPECS[name]
    theta, factors = values_of(spec)
    save_base(tmp_path / "hf", spec, theta.__getitem__)
    save_adapter(tmp_path / "adapter", spec, factors.__getitem__, str(tmp_path / "hf"), {"README.md": "a card"})
    model = peft.PeftModel.from_pretrained(loaded(tmp_path / "hf"), tmp_path / "adapter")
    with torch.no_grad():
        found = model(TOKENS).logits
        merged = model.merge_and_unload()(TOKENS).logits
    want = logits_of(spec, theta, factors)
    assert float((found - want).abs().max()) < 1e-5
    assert float((merged - want).abs().max()) < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_names_and_shapes_are_those_that_peft_itself_writes(tmp_path, name):
    spec = SPECS[name]
    theta, factors = values_of(spec)
    save_base(tmp_path / "hf", spec, theta.__getitem__)
    config = peft.LoraConfig(
        r=spec.lora_rank,
        lora_alpha=int(spec.lora_scale * spec.lora_rank),
        target_modules=list(TARGETS[spec.lora_targets]),
        task_type="CAUSAL_LM",
    )
    peft.get_peft_model(loaded(tmp_path / "hf"), config).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / ADAPTER_WEIGHTS)
    ours = adapter_tensors(spec, factors.__getitem__)
    assert {n: (v.shape, v.dtype) for n, v in ours.items()} == {n: (v.shape, v.dtype) for n, v in theirs.items()}
    save_adapter(tmp_path / "ours", spec, factors.__getitem__, None, {})
    written = json.loads((tmp_path / "ours" / ADAPTER_CONFIG).read_text())
    published = json.loads((tmp_path / "theirs" / ADAPTER_CONFIG).read_text())
    assert written.keys() <= published.keys()
    assert set(written.pop("target_modules")) == set(published["target_modules"])
    assert written.pop("base_model_name_or_path") is None
    assert {key: published[key] for key in written} == written


def test_nothing_but_an_adapter_is_replaced(tmp_path):
    spec = SPECS["Llama, all"]
    _, factors = values_of(spec)
    to = tmp_path / "adapter"
    save_adapter(to, spec, factors.__getitem__, None, {"README.md": "one"})
    with pytest.raises(ConfigError, match="is already there"):
        save_adapter(to, spec, factors.__getitem__, None, {})
    save_adapter(to, spec, factors.__getitem__, None, {"README.md": "two"}, replace=True)
    assert (to / "README.md").read_text() == "two\n"
    (to / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="is already there"):
        save_adapter(to, spec, factors.__getitem__, None, {}, replace=True)


def test_a_merged_value_that_no_run_can_have_is_refused():
    spec = SPECS["Llama, all"]
    theta, factors = values_of(spec)
    large = {name: torch.full_like(value, 100 << 24) for name, value in factors.items()}
    read = merged_reader(spec, large.__getitem__, theta.__getitem__)
    with pytest.raises(Divergence, match="q_proj"):
        read("model.layers.0.self_attn.q_proj.weight")
