"""Writes a ModelSpec as the `config.json` of a Hugging Face checkpoint, and reads one back.

A dense model is Llama, Qwen3 with `qk_norm`, Qwen2 with `qkv_bias` or Gemma with `gemma`; a mixture is Mixtral,
Qwen3-MoE with `qk_norm`, or OLMoE with `qk_norm_across`. Mistral is read as Llama. Reading is strict: a key
that is neither understood nor without effect refuses the checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atoll.node.import_export.huggingface import rope
from atoll.node.import_export.huggingface.fields import read_bool, read_float, read_int
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


class Family(NamedTuple):
    """A `model_type` of transformers: its class, its key names, and its defaults for absent keys."""

    class_name: str
    width: str = "intermediate_size"
    """Key for the width of the feed-forward, or of one expert."""
    has_experts: bool = False
    kv_heads: bool = False
    """Whether an absent number of key heads means as many as heads. Otherwise the key is required."""
    head_dim: int | None = None
    """Default head size; None for model width / heads."""
    load_balance: float = 0.001
    rope_theta: float = 10_000.0
    tied: bool = False
    """Whether an absent `tie_word_embeddings` means that they are tied."""
    acts: tuple[str, ...] = ("silu",)
    """Values of `hidden_act` that mean what the decoder computes; the first is written."""
    window: int | None = None
    """Default of `sliding_window`, where every layer has one: tokens that a position sees, itself among them."""
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM", kv_heads=True, bos=1, eos=2),
    "mistral": Family("MistralForCausalLM", kv_heads=True, window=4096, bos=1, eos=2),
    "gemma": Family(
        "GemmaForCausalLM",
        head_dim=256,
        tied=True,
        # Published configs say "gelu", and transformers computes the tanh form for it.
        acts=("gelu_pytorch_tanh", "gelu"),
        bos=2,
        eos=1,
        pad=0,
    ),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "moe_intermediate_size", has_experts=True),
    "olmoe": Family("OlmoeForCausalLM", has_experts=True, kv_heads=True, load_balance=0.01, eos=50279, pad=1),
    "mixtral": Family("MixtralForCausalLM", has_experts=True, rope_theta=1e6, bos=1, eos=2),
}
_GEMMA = "it has norms after the layers too, and layers that see a window only; Gemma 1 (`gemma`) is read"
NOT_READ = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": "its positions are learned, and its layers have biases",
    "gpt_oss": "its attention has biases and sinks",
    "olmo2": "its norms come after the layers",
    "phi3": "its projections are stored in one tensor",
    "qwen2_moe": "one of its experts is shared by all tokens, which the decoder has not",
}
"""Families that people will try, and why the decoder does not compute them."""
_SIZES = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}
_IDLE = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_llama_config", "label2id", "max_window_layers", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "return_dict", "router_jitter_noise",
    "sliding_window", "torch_dtype", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_cache",
}  # fmt: skip
"""Keys that change no logits. `sliding_window`: it is off by another key, or null for Mixtral."""
_ONLY: dict[str, Callable[[Any], bool]] = {
    "attention_bias": lambda value: value is False,
    "clip_qkv": lambda value: value is None,
    "decoder_sparse_step": lambda value: value == 1,
    "hidden_activation": lambda value: value in (None, "gelu_pytorch_tanh"),
    "layer_types": lambda value: (
        value is None or (isinstance(value, list) and all(one == "full_attention" for one in value))
    ),
    "mlp_bias": lambda value: value is False,
    "mlp_only_layers": lambda value: value in (None, []),
    "pretraining_tp": lambda value: value == 1,
    "rope_interleaved": lambda value: value is False,
    "use_bidirectional_attention": lambda value: value in (None, False),
    "use_mrope": lambda value: value is False,
    "use_sliding_window": lambda value: value is False,
}
"""Keys whose value must pass a check: other values describe a model that the decoder does not compute."""
_READ = {
    *_SIZES.values(), "head_dim", "hidden_act", "intermediate_size", "max_position_embeddings", "model_type",
    "moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts",
    "rms_norm_eps", "router_aux_loss_coef", "tie_word_embeddings", *rope.KEYS,
}  # fmt: skip


def config_from_model(model: ModelSpec) -> dict[str, Any]:
    """The config of a model, without special tokens. Raises ConfigError for a model without a class."""
    kind = model_type_of(model)
    config: dict[str, Any] = {
        "architectures": [FAMILIES[kind].class_name],
        "model_type": kind,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
        "intermediate_size": model.ffn,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        **rope.rope_config(model),
        "tie_word_embeddings": model.tied,
        "hidden_act": FAMILIES[kind].acts[0],
        "attention_dropout": 0.0,
        "dtype": "float32",
    }
    if kind == "qwen2":  # its biases are no choice
        return config | {"use_sliding_window": False}
    config["attention_bias"] = False
    more = _experts(model.experts, kind) if model.experts else {"mlp_bias": False} if kind == "llama" else {}
    return config | more


def model_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config, with the longest context that it allows.

    Raises ConfigError, with the key's name, for anything that the decoder does not compute.
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in NOT_READ:
        raise ConfigError(f"config.json: model_type {kind!r} is not supported: {NOT_READ[kind]}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"config.json: model_type {kind!r} is none of {', '.join(FAMILIES)}")
    for key, value in config.items():
        if key in _ONLY and not _ONLY[key](value):
            raise ConfigError(f"config.json: {key} = {value!r} is not supported")
        if key not in _ONLY and key not in _IDLE and key not in _READ:
            raise ConfigError(f"config.json: key {key!r} is not supported")
    if (act := config.get("hidden_act", FAMILIES[kind].acts[0])) not in FAMILIES[kind].acts:
        raise ConfigError(f"config.json: hidden_act = {act!r} is not supported")
    return _built(config, kind)


def _built(config: Mapping[str, Any], kind: str) -> ModelSpec:
    family = FAMILIES[kind]
    if family.kv_heads and config.get(_SIZES["kv_heads"]) is None:
        config = {**config, _SIZES["kv_heads"]: config.get(_SIZES["heads"])}
    sizes = {ours: read_int(config, theirs) for ours, theirs in _SIZES.items()}
    experts = _read_experts(config, family) if family.has_experts else None
    theta, stretch = rope.rope_from_config(config, family.rope_theta)
    model = ModelSpec(
        dim=sizes["dim"],
        layers=sizes["layers"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        vocab=sizes["vocab"],
        ffn=experts.per_token * experts.ffn if experts else read_int(config, family.width),
        context=_context(config, family),
        tied=read_bool({"tie_word_embeddings": family.tied, **config}, "tie_word_embeddings"),
        rope_theta=theta,
        rope_stretch=stretch,
        norm_eps=read_float(config, "rms_norm_eps"),
        qk_norm=kind in ("qwen3", "qwen3_moe", "olmoe"),
        qk_norm_across=kind == "olmoe",
        qkv_bias=kind == "qwen2",
        gemma=kind == "gemma",
        head_size=_head_size(config.get("head_dim", family.head_dim), sizes["dim"], sizes["heads"]),
        experts=experts,
    )
    model.check()
    if kind == "olmoe" and model.head_size is not None:
        raise ConfigError(f"config.json: head_dim = {model.head_size} is not supported with model_type 'olmoe'")
    if kind == "mixtral" and config.get("sliding_window") is not None:
        raise ConfigError(f"config.json: sliding_window = {config['sliding_window']!r} is not supported")
    return model


def _context(config: Mapping[str, Any], family: Family) -> int:
    """The longest context: where attention has a window, its length, because it hides nothing of that."""
    longest = read_int(config, "max_position_embeddings")
    if family.window is None or config.get("sliding_window", family.window) is None:
        return longest
    return min(longest, read_int({"sliding_window": family.window, **config}, "sliding_window"))


def _head_size(found: Any, dim: int, heads: int) -> int | None:
    """The head size of a ModelSpec: None if it is `dim / heads`."""
    size = None if found is None else read_int({"head_dim": found}, "head_dim")
    return None if size is None or size * heads == dim else size


def _experts(experts: ExpertsSpec, kind: str) -> dict[str, Any]:
    found = {
        # transformers 5 writes only `num_local_experts` and reads both; version 4 reads `num_experts`.
        "num_experts": experts.count,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.load_balance,
        "output_router_logits": False,
        FAMILIES[kind].width: experts.ffn,
    }
    if kind == "mixtral":
        return found | {"sliding_window": None}
    own = {"norm_topk_prob": experts.normalise, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return found | own | {"use_sliding_window": False}


def _read_experts(config: Mapping[str, Any], family: Family) -> ExpertsSpec:
    count = "num_experts" if "num_experts" in config else "num_local_experts"
    return ExpertsSpec(
        count=read_int(config, count),
        per_token=read_int(config, "num_experts_per_tok"),
        ffn=read_int(config, family.width),
        normalise=family.class_name == "MixtralForCausalLM" or read_bool(config, "norm_topk_prob"),
        load_balance=read_float({"router_aux_loss_coef": family.load_balance, **config}, "router_aux_loss_coef"),
    )


def model_type_of(model: ModelSpec) -> str:
    """The `model_type` of a model in transformers. Raises ConfigError for a model without a class."""
    none = "has no class in transformers that we write"
    if model.qk_norm_across and (model.experts is None or model.head_size is not None):
        raise ConfigError(f"model.qk_norm_across without experts, or with model.head_size, {none}")
    if model.experts is None:
        if model.qkv_bias:
            return "qwen2"
        return "gemma" if model.gemma else "qwen3" if model.qk_norm else "llama"
    if not model.qk_norm and not model.experts.normalise:
        raise ConfigError(f"a mixture without model.qk_norm and without model.experts.normalise {none}")
    if model.experts.zero or model.experts.bias_rate:
        raise ConfigError("zero experts and a choice bias have no class in transformers that we write")
    if not model.qk_norm:
        return "mixtral"
    return "olmoe" if model.qk_norm_across else "qwen3_moe"
