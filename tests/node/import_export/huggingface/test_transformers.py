"""An exported folder gives the same logits in transformers, and comes back bit by bit."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from atoll.node.import_export.huggingface.ffn_slices import dense_of, joined
from atoll.node.import_export.huggingface.folder import load_folder, save_folder
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json, tokenizer_files
from atoll.node.import_export.huggingface.upcycle import upcycle
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.model.genesis import genesis
from atoll.protocols.errors import Divergence
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, RopeStretch, atoms
from tests.later import GROUP, transformers

pytestmark = GROUP

torch.set_num_threads(1)
DENSE = ModelSpec(
    dim=64, layers=3, heads=4, kv_heads=2, ffn=96, vocab=256, context=32, tied=True, rope_theta=5e4, norm_eps=1e-5
)
EXPERTS = ExpertsSpec(count=6, per_token=2, ffn=48)
MIXED = replace(DENSE, qk_norm=True, experts=EXPERTS)
SPECS = {
    "LlamaForCausalLM tied": DENSE,
    "LlamaForCausalLM untied": replace(DENSE, tied=False),
    "LlamaForCausalLM stretched": replace(
        DENSE, rope_stretch=RopeStretch(factor=8.0, low=1.0, high=4.0, original=16)
    ),
    "Qwen3ForCausalLM tied": replace(DENSE, qk_norm=True),
    "Qwen3ForCausalLM sliced": replace(DENSE, qk_norm=True, ffn=256, ffn_slices=4),
    "LlamaForCausalLM sliced": replace(DENSE, ffn=128, ffn_slices=2),
    "Qwen2ForCausalLM tied": replace(DENSE, qkv_bias=True),
    "Qwen2ForCausalLM sliced": replace(DENSE, qkv_bias=True, ffn=128, ffn_slices=2, tied=False),
    "GemmaForCausalLM tied": replace(DENSE, gemma=True),
    "GemmaForCausalLM wide heads": replace(DENSE, gemma=True, head_size=32, kv_heads=1),
    "LlamaForCausalLM narrow heads": replace(DENSE, head_size=8),
    "Qwen3ForCausalLM wide heads": replace(DENSE, qk_norm=True, head_size=32),
    "Qwen3MoeForCausalLM wide heads": replace(MIXED, head_size=24),
    "OlmoeForCausalLM tied": replace(MIXED, qk_norm_across=True),
    "OlmoeForCausalLM untied": replace(
        MIXED, qk_norm_across=True, tied=False, experts=replace(EXPERTS, normalise=False)
    ),
    "MixtralForCausalLM tied": replace(MIXED, qk_norm=False),
    "MixtralForCausalLM untied": replace(MIXED, qk_norm=False, tied=False, head_size=8),
    "Qwen3MoeForCausalLM tied": MIXED,
    "Qwen3MoeForCausalLM untied": replace(MIXED, tied=False, experts=replace(EXPERTS, normalise=False)),
}
TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


def theta_of(spec, seed=3):
    """Genesis with gains that are not all 1, and a router that has a say."""
    found = {name: torch.from_numpy(value) for name, value in genesis(spec, seed).items()}
    for at, (name, value) in enumerate(found.items()):
        if value.dim() == 1:
            found[name] = value + torch.arange(value.numel(), dtype=torch.int32) * (1 << 15) * (1 + at % 3)
        elif "mlp.gate." in name:
            found[name] = value * 8
    return found


def logits_of(spec, theta, tokens=TOKENS):
    model = Decoder(spec)
    write_atoms(model, ((name, value.float() * 2.0**-24) for name, value in theta.items()))
    with torch.no_grad():
        return model(tokens)


def saved(folder, spec, theta):
    return save_folder(folder, spec, theta.__getitem__, tokenizer_files(byte_tokenizer_json(), spec.context))


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_decoder(tmp_path, name):
    spec = SPECS[name]
    theta = theta_of(spec)
    assert saved(tmp_path / "out", spec, theta) == name.split()[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(model).__name__ == name.split()[0]
    with torch.no_grad():
        theirs = model(input_ids=TOKENS).logits
    ours = logits_of(spec, theta)
    assert float(ours.std()) > 0.05, "logits that say something"
    assert float((theirs - ours).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_there_and_back_is_the_same(tmp_path, name):
    spec = SPECS[name]
    theta = theta_of(spec)
    saved(tmp_path / "out", spec, theta)
    back = load_folder(tmp_path / "out")
    read, spec = joined(spec, theta.__getitem__), dense_of(spec)
    theta = {atom.name: read(atom.name) for atom in atoms(spec)}
    assert back.model == spec, "the weights of the router's losses are at their defaults, or travel"
    assert list(back.theta) == list(theta)
    # Gains above 1 have no room for all 31 bits in a float32: one of two steps.
    assert all(int((back.theta[n].long() - v.long()).abs().max()) <= 1 for n, v in theta.items())
    assert all(torch.equal(back.theta[n], v) for n, v in theta.items() if v.dim() == 2)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM tied",
        "LlamaForCausalLM stretched",
        "Qwen3ForCausalLM tied",
        "Qwen3ForCausalLM wide heads",
        "Qwen2ForCausalLM tied",
        "GemmaForCausalLM tied",
        "GemmaForCausalLM wide heads",
        "Qwen3MoeForCausalLM untied",
        "OlmoeForCausalLM untied",
        "MixtralForCausalLM untied",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_is_read(tmp_path, name, dtype):
    spec = SPECS[name]
    saved(tmp_path / "out", spec, theta_of(spec))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    model.save_pretrained(tmp_path / "again")
    back = load_folder(tmp_path / "again")
    assert back.model.experts == spec.experts
    if dtype == torch.float32:
        with torch.no_grad():
            theirs = model(input_ids=TOKENS).logits
        ours = logits_of(back.model, back.theta)
        assert float((theirs - ours).abs().max()) <= 1e-5


def test_the_tokenizer_gives_bytes(tmp_path):
    saved(tmp_path / "out", DENSE, theta_of(DENSE))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Hello, World!\n\tÄ é 你好 🙂  x"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.model_max_length == 32


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM tied", "Qwen2ForCausalLM tied", "GemmaForCausalLM tied"])
def test_it_generates(tmp_path, name):
    """With the KV cache, the tokens are those that the decoder finds likeliest, one after the other."""
    spec = SPECS[name]
    theta = theta_of(spec)
    saved(tmp_path / "out", spec, theta)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    start = TOKENS[:1, :4]
    found = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=5, max_length=None, do_sample=False
    )
    assert found.shape == (1, 9)
    assert found[0, 4:].tolist() == logits_of(spec, theta, found)[0, 3:-1].argmax(-1).tolist()


def test_biases_of_keys_that_no_run_can_hold_are_halved_and_their_queries_doubled(tmp_path):
    """As some published Qwen2 have them. The products of queries and keys stay, and so do the logits."""
    spec = SPECS["Qwen2ForCausalLM tied"]
    saved(tmp_path / "out", spec, theta_of(spec))
    path = tmp_path / "out/model.safetensors"
    tensors, name = load_file(path), "model.layers.1.self_attn.k_proj.bias"
    tensors[name][:3] = torch.tensor([300.0, -175.0, 4.0])
    save_file(tensors, path, metadata={"format": "pt"})
    back = load_folder(tmp_path / "out")
    assert back.keys_halved
    assert back.theta[name][:3].tolist() == [75 << 24, -175 << 22, 1 << 24]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(input_ids=TOKENS).logits
    assert float((theirs - logits_of(back.model, back.theta)).abs().max()) <= 1e-4, (
        "scores are up to 100 times as large"
    )
    tensors["model.layers.1.self_attn.q_proj.bias"][0] = 40.0
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(Divergence, match=r"layers\.1\.self_attn\.q_proj\.bias has a value that is NaN or outside"):
        load_folder(tmp_path / "out")


def test_both_keys_for_the_number_of_experts(tmp_path):
    saved(tmp_path / "out", MIXED, theta_of(MIXED))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_experts"] == config["num_local_experts"] == 6


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("noise", [None, 4])
def test_upcycling_starts_where_the_dense_model_ended(tmp_path, noise, qk_norm):
    dense = replace(DENSE, qk_norm=qk_norm)
    theta = theta_of(dense)
    experts = ExpertsSpec(count=4, per_token=2, ffn=96)
    model, found = upcycle(dense, theta, experts, 7, noise)
    difference = (logits_of(model, found) - logits_of(dense, theta)).abs().max()
    assert float(difference) <= 1e-5 if noise is None else 1e-5 < float(difference) < 0.2
    assert all(torch.equal(found[n], v) for n, v in upcycle(dense, theta, experts, 7, noise)[1].items())
    assert saved(tmp_path / "out", model, found) == ("Qwen3MoeForCausalLM" if qk_norm else "MixtralForCausalLM")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert float((loaded(input_ids=TOKENS).logits - logits_of(model, found)).abs().max()) <= 1e-5
