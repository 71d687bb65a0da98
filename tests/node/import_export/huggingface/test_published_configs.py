"""Configs as people publish them: what transformers loads from one is what we load from it."""

import json
import math

import pytest
import torch
from msgspec.structs import replace

from atoll.node.import_export.huggingface.config import NOT_READ, config_from_model, model_from_config
from atoll.node.import_export.huggingface.folder import load_folder
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import RopeStretch
from tests.later import GROUP, transformers
from tests.node.import_export.huggingface.test_transformers import DENSE, MIXED, TOKENS, logits_of, saved, theta_of

pytestmark = GROUP

GONE = object()
SMOL = {
    "_name_or_path": "somewhere", "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "is_llama_config": True,
    "initializer_range": 0.041666666666666664, "mlp_bias": False, "pad_token_id": 2, "pretraining_tp": 1,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "rope_parameters": GONE,
}  # fmt: skip
"""The keys of SmolLM2-135M."""
PLAIN = {"rope_parameters": GONE, "rope_theta": GONE}
LLAMA_3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
"""The scaling of Llama-3.2-1B, but for the length that it had before."""
STRETCH = RopeStretch(factor=32.0, low=1.0, high=4.0, original=20)
MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "mlp_bias": GONE,
    "attention_bias": GONE,
}
QWEN2 = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": GONE,
    "initializer_range": 0.02, "max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 32768,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False,
}  # fmt: skip
"""Keys that Qwen2.5-0.5B has."""
GEMMA = {
    "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": GONE, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
"""Keys that gemma-2b has: no word of its tied embeddings, and a GELU that is computed in its tanh form."""
OLMOE = replace(MIXED, qk_norm_across=True, rope_theta=1e4)
CONFIGS = {
    "SmolLM2": (DENSE, SMOL, 1e5),
    "no base at all": (DENSE, PLAIN, 1e4),
    "no base, null scaling": (DENSE, PLAIN | {"rope_scaling": None, "rope_parameters": None}, 1e4),
    "OLMoE without a base": (OLMOE, PLAIN, 1e4),
    "Mixtral without a base": (replace(MIXED, qk_norm=False, rope_theta=1e6), PLAIN, 1e6),
    "plain scaling of version 4": (DENSE, PLAIN | {"rope_theta": 3e4, "rope_scaling": {"type": "default"}}, 3e4),
    "scaling goes first": (
        DENSE,
        {"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 3e4, "rope_scaling": {"rope_type": "default"}},
        3e4,
    ),
    "the base inside goes first": (DENSE, {"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 3e4}, 7e4),
    "Llama 3.2": (
        DENSE,
        PLAIN | {"rope_theta": 5e5, "rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 20}},
        5e5,
    ),
    "Llama 3.2 as version 5 writes it": (
        DENSE,
        PLAIN | {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 20, "rope_theta": 5e5}},
        5e5,
    ),
    "Mistral 7B v0.3": (
        replace(DENSE, rope_theta=1e6),
        PLAIN | MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None},
        1e6,
    ),
    "Mistral with a window as long as TOKENS": (DENSE, PLAIN | MISTRAL | {"sliding_window": 32}, 1e4),
    "Qwen2.5": (replace(DENSE, qkv_bias=True, rope_theta=1e6), PLAIN | QWEN2, 1e6),
    "Gemma 2B": (replace(DENSE, gemma=True), PLAIN | GEMMA, 1e4),
    "Gemma in version 5": (replace(DENSE, gemma=True), {"use_bidirectional_attention": None}, 5e4),
    "one key head for each head": (replace(DENSE, kv_heads=4), {"num_key_value_heads": GONE}, 5e4),
    "Qwen3 with heads of 128": (replace(DENSE, qk_norm=True, head_size=128), {"head_dim": GONE}, 5e4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_logits_of_transformers(tmp_path, name):
    spec, changes, base = CONFIGS[name]
    saved(tmp_path / "hf", spec, theta_of(spec))
    path = tmp_path / "hf/config.json"
    config = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v is not GONE}
    path.write_text(json.dumps(config))
    found = load_folder(tmp_path / "hf")
    assert found.model.rope_theta == base
    assert found.model.rope_stretch == (STRETCH if "Llama 3" in name else None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        difference = theirs(input_ids=TOKENS).logits - logits_of(found.model, found.theta)
    assert float(difference.abs().max()) <= 1e-5


@pytest.mark.parametrize(("window", "context"), [(None, 32), (20, 20), (GONE, 32), (64, 32)])
def test_a_window_is_the_longest_context(window, context):
    """Within it every position sees all before it, as in the decoder; 4096 if the config has no word of it."""
    config = {**config_from_model(DENSE), **MISTRAL, "sliding_window": window}
    found = model_from_config({key: value for key, value in config.items() if value is not GONE})
    assert found == replace(DENSE, context=context)


def test_a_short_window_is_cut_to_where_transformers_agrees(tmp_path):
    saved(tmp_path / "hf", DENSE, theta_of(DENSE))
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **MISTRAL, "mlp_bias": False, "sliding_window": 20,
        "attention_bias": False}))  # fmt: skip
    found = load_folder(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        difference = (theirs(input_ids=TOKENS).logits - logits_of(DENSE, found.theta)).abs().amax(dim=(0, 2))
    assert float(difference[: found.model.context].max()) <= 1e-5
    assert float(difference[found.model.context :].min()) > 1e-5, "beyond it the window hides something"


@pytest.mark.parametrize("kind", NOT_READ)
def test_families_that_the_decoder_does_not_compute_are_refused_with_the_reason(kind):
    with pytest.raises(ConfigError) as refused:
        model_from_config({**config_from_model(DENSE), "model_type": kind})
    assert str(refused.value) == f"config.json: model_type {kind!r} is not supported: {NOT_READ[kind]}"


@pytest.mark.parametrize(
    ("spec", "changes", "said"),
    [
        (replace(DENSE, gemma=True), {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        (replace(DENSE, gemma=True), {"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        (replace(DENSE, gemma=True), {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (replace(DENSE, qkv_bias=True), {"use_sliding_window": True}, "use_sliding_window = True"),
        (replace(DENSE, qkv_bias=True), {"use_mrope": True}, "use_mrope = True"),
        (replace(DENSE, qkv_bias=True), {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_another_function_would_need_is_refused_by_name(spec, changes, said):
    with pytest.raises(ConfigError) as refused:
        model_from_config({**config_from_model(spec), **changes})
    assert str(refused.value) == f"config.json: {said} is not supported"


def test_gemma_has_heads_of_256_and_tied_embeddings_where_its_config_does_not_say():
    config = config_from_model(replace(DENSE, gemma=True))
    found = model_from_config({k: v for k, v in config.items() if k not in ("head_dim", "tie_word_embeddings")})
    assert found == replace(DENSE, gemma=True, head_size=256)


def test_what_a_config_does_not_say_is_its_familys(tmp_path):
    config = config_from_model(OLMOE)
    for key in ("router_aux_loss_coef", "rope_theta", "rope_parameters"):
        del config[key]
    assert model_from_config(config).experts.load_balance == 0.01


def test_a_stretch_keeps_the_fast_turns_and_slows_the_slow_ones():
    full = 2 * math.pi
    assert STRETCH.stretched([full]) == [full]
    assert STRETCH.stretched([full * 4 / 20]) == [full * 4 / 20], "four rounds in twenty tokens"
    assert STRETCH.stretched([full / 20, full / 2000]) == [full / 20 / 32, full / 2000 / 32]
    assert STRETCH.stretched([full * 2.5 / 20])[0] == pytest.approx(full * 2.5 / 20 * (0.5 + 0.5 / 32))


@pytest.mark.parametrize("changes", [{"factor": 0.5}, {"low": 4.0}, {"low": 0.0}, {"original": 0}, {"high": 1e9}])
def test_a_stretch_that_makes_no_rotations_is_refused(changes):
    with pytest.raises(ConfigError, match=r"model\.rope_stretch"):
        replace(DENSE, rope_stretch=replace(STRETCH, **changes)).check()
