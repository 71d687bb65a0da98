"""ModelSpec: the dimensions of the decoder that a run trains, and the atoms (named parameter tensors) they give.

Atoms carry the names that Hugging Face checkpoints of Llama, Qwen2, Qwen3, Gemma, Qwen3-MoE and OLMoE have on
disk: one tensor per expert and projection, however a node stacks them in memory. Shapes follow `nn.Linear`:
`[out, in]`.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.experts import MAX_EXPERTS, Size
from atoll.protocols.run.experts import ExpertsSpec as ExpertsSpec
from atoll.protocols.run.lora import (
    ALL_TARGETS,
    Alpha,
    Rank,
    Targets,
    check_rank,
    check_targets,
    factors_of,
    is_target,
)
from atoll.protocols.run.sections.plugin import PluginSpec

MAX_PARAMETERS = 1 << 37
MAX_EXPERT_LAYERS = 1 << 16
"""Most experts times layers: each pair has three atoms, and a peer's RunSpec decides the length of their table."""
SLICE_MULTIPLE = 64
"""A slice is so many hidden units wide, or a multiple: its matrices then fill whole blocks of the arena."""
_EXPERTS = ".mlp.experts."
PROJECTION_BIAS = "_proj.bias"
"""How the names of the biases of queries, keys and values end; genesis makes them 0."""
BIAS = "mlp.gate.e_score_correction_bias"
"""Name of the one atom that a controller changes, not a gradient (node/learning/model/moe.py)."""


class RopeStretch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rotary positions for a longer context: the scaling of Llama 3.1 and later (arXiv 2407.21783).

    Pairs with fewer than `low` rotations in `original` tokens are slowed by `factor`, pairs with more than `high`
    are unchanged, and those between are slowed in part. transformers calls it `llama3`.
    """

    factor: Annotated[float, Meta(ge=1, le=1 << 16)]
    low: Annotated[float, Meta(gt=0, le=1 << 16)]
    high: Annotated[float, Meta(gt=0, le=1 << 16)]
    original: Size
    """Context length, in tokens, before the stretch."""

    def stretched(self, turns: Sequence[float]) -> list[float]:
        """Radians per token of each pair, from those without the stretch. Pure."""
        return [turn * self._share(turn * self.original / (2 * math.pi)) for turn in turns]

    def _share(self, rounds: float) -> float:
        """The share of the speed that remains for a pair with `rounds` rotations in `original` tokens."""
        kept = min(1.0, max(0.0, (rounds - self.low) / (self.high - self.low)))
        return kept + (1 - kept) / self.factor


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A decoder: RMSNorm, RoPE, grouped-query attention; SwiGLU, or a mixture of experts of that shape.

    A key at its default is left out of the bytes: a spec without it is the same run as before the key existed.
    """

    dim: Size
    layers: Annotated[int, Meta(ge=1, le=1024)]
    heads: Annotated[int, Meta(ge=1, le=1024)]
    kv_heads: Size
    ffn: Size
    """Feed-forward width per token; with experts, `per_token` times the width of one expert."""
    vocab: Size
    context: Size
    """Tokens of one training sequence."""
    tied: bool
    """Whether the output head shares the embedding's weights."""
    rope_theta: Annotated[float, Meta(gt=1, le=1e12)]
    norm_eps: Annotated[float, Meta(gt=0, lt=1)]
    qk_norm: bool = False
    """Whether each head's query and key pass an RMSNorm before the rotation (Qwen3)."""
    qk_norm_across: bool = False
    """Whether that norm is one over all heads together instead (OLMoE). Needs `qk_norm`."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases (Qwen2)."""
    gemma: bool = False
    """Whether the gate is a GELU in its tanh form, and embeddings are multiplied by √dim (Gemma)."""
    head_size: Annotated[int, Meta(ge=2, le=1 << 14)] | None = None
    """Width of one attention head; None: `dim / heads`."""
    experts: ExpertsSpec | None = None
    rope_stretch: RopeStretch | None = None
    """Stretch of the rotary positions; None: `rope_theta` alone decides."""
    ffn_slices: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] = 0
    """Parts of equal width of each dense feed-forward, which members can train apart (PPU, arXiv 2509.22418).

    A SwiGLU is the sum of its slices, so the model computes the same function with any number of them. Atoms are
    named as those of a mixture in which all experts fire with weight 1. 0: members train all of it.
    """
    lora_rank: Rank = 0
    """Rank r of the adapters that are trained while the rest is frozen (docs/lora.md); 0: all is trained."""
    lora_alpha: Alpha | None = None
    """α: an adapter's output counts α/r times; None: r, as in peft, whose defaults are 8 and 8."""
    lora_targets: Targets = ALL_TARGETS
    """Matrices that get an adapter: `all`, as QLoRA advises (arXiv 2305.14314 §4), `attention`, `ffn`, `qv`."""
    plugin: PluginSpec | None = None
    """A model of an installed package in the decoder's place (docs/plugged-models.md). Its examples have `context`
    bytes; the other keys are those of `plugged`."""

    def check(self) -> None:
        """Raise ConfigError for dimensions that no decoder can have."""
        codec.check_types(self, "model.")
        if self.plugin is not None:
            self._check_plugin(self.plugin)
        self._check_heads()
        self._check_family()
        if self.rope_stretch is not None and not self.rope_stretch.low < self.rope_stretch.high:
            raise ConfigError("model.rope_stretch needs low < high")
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.ffn_slices:
            self._check_slices()
        self._check_lora()
        if self.base.parameters > MAX_PARAMETERS:
            raise ConfigError(f"model has {self.base.parameters} parameters; at most {MAX_PARAMETERS} are legal")

    def _check_plugin(self, plugin: PluginSpec) -> None:
        plugin.check()
        if self != plugged(plugin, self.context):
            raise ConfigError("model.plugin goes with no other key of the model than context", hint="use --model")

    def check_decoder(self) -> None:
        """Raise ConfigError where a language model is needed and the run's model is a package's."""
        if self.plugin is not None:
            raise ConfigError(
                f"the run trains {self.plugin.name} of the package {self.plugin.package}, no language model",
                hint="what its weights are for, the package says: `atoll checkpoint save` writes them",
            )

    def _check_heads(self) -> None:
        if self.head_size is None and (self.dim % self.heads or self.head_dim % 2):
            raise ConfigError("model.dim must be heads × an even head size")
        if self.head_dim % 2 or self.head_size == self.dim / self.heads:
            raise ConfigError("model.head_size must be even, and absent where it is dim / heads")
        if self.heads % self.kv_heads:
            raise ConfigError("model.heads must be a multiple of model.kv_heads")
        if self.qk_norm_across and not self.qk_norm:
            raise ConfigError("model.qk_norm_across needs model.qk_norm")

    def _check_family(self) -> None:
        """Qwen2 and Gemma are dense: other combinations have no class of transformers to use them with."""
        has_others = self.qk_norm or self.experts is not None
        if self.qkv_bias and has_others:
            raise ConfigError("model.qkv_bias is for dense models without model.qk_norm")
        if self.gemma and (has_others or self.qkv_bias or self.ffn_slices or not self.tied):
            raise ConfigError("model.gemma is for tied dense models without qk_norm, qkv_bias and ffn_slices")

    def _check_experts(self, experts: ExpertsSpec) -> None:
        experts.check()
        if self.layers * experts.count > MAX_EXPERT_LAYERS:
            raise ConfigError(f"model.layers × model.experts.count is above {MAX_EXPERT_LAYERS}")
        if self.ffn != experts.per_token * experts.ffn:
            raise ConfigError(
                f"model.ffn = {self.ffn} is not model.experts.per_token × ffn = {experts.per_token * experts.ffn}"
            )

    def _check_slices(self) -> None:
        if self.experts is not None:
            raise ConfigError(
                "model.ffn_slices cuts a dense feed-forward; a mixture has experts: leave one of them out"
            )
        if self.ffn_slices == 1 or self.ffn % (self.ffn_slices * SLICE_MULTIPLE):
            raise ConfigError(
                f"model.ffn_slices = {self.ffn_slices} must be at least 2, and cut model.ffn = {self.ffn}"
                f" into multiples of {SLICE_MULTIPLE}",
                hint=f"numbers that do: {', '.join(map(str, slice_counts(self.ffn))) or 'none'}",
            )
        if self.layers * self.ffn_slices > MAX_EXPERT_LAYERS:
            raise ConfigError(f"model.layers × model.ffn_slices is above {MAX_EXPERT_LAYERS}")

    def _check_lora(self) -> None:
        if self.lora_rank and self.expert_count:
            kind = "experts" if self.experts is not None else "ffn_slices"
            raise ConfigError(f"model.lora_rank and model.{kind} cannot go together: adapters are of dense layers")
        is_given = self.lora_alpha is not None or self.lora_targets != ALL_TARGETS
        check_targets(self.lora_rank, self.lora_targets, is_given=is_given)
        if self.lora_rank:
            check_rank(self.lora_rank, self.lora_sides)

    @property
    def base(self) -> "ModelSpec":
        """The frozen model below the adapters; the model itself where all is trained."""
        return msgspec.structs.replace(self, lora_rank=0, lora_alpha=None, lora_targets=ALL_TARGETS)

    @property
    def lora_scale(self) -> float:
        """α/r, by which an adapter's output counts."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    @property
    def lora_sides(self) -> dict[str, tuple[int, ...]]:
        """Shapes `(out, in)` of the matrices of one layer that get an adapter, by name."""
        layer = (*_attention("", self), *_swiglu("", self.dim, self.ffn))
        known = {atom.name: atom.shape for atom in layer if len(atom.shape) == 2}
        return {name: shape for name, shape in known.items() if is_target(name, self.lora_targets)}

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_size or self.dim // self.heads

    @property
    def qk_widths(self) -> tuple[int, int]:
        """Widths of the norms of queries and of keys."""
        across = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return across if self.qk_norm_across else (self.head_dim, self.head_dim)

    @property
    def expert_count(self) -> int:
        """Number of experts, or of slices, of each layer; 0 where a feed-forward has no parts."""
        return self.experts.count if self.experts is not None else self.ffn_slices

    @property
    def slice_ffn(self) -> int:
        """Width of one slice of a feed-forward; all of it without slices."""
        return self.ffn // (self.ffn_slices or 1)

    @property
    def parameters(self) -> int:
        """Number of parameters that the run trains: of the model, or of its adapters."""
        if self.plugin is not None:
            return self.plugin.parameters
        if self.lora_rank:
            return self.layers * sum(self.lora_rank * (out + into) for out, into in self.lora_sides.values())
        attention = 2 * self.dim * (self.heads + self.kv_heads) * self.head_dim
        attention += sum(self.qk_widths) if self.qk_norm else 0
        attention += (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        heads = 1 if self.tied else 2
        return heads * self.vocab * self.dim + self.layers * (attention + self._mlp + 2 * self.dim) + self.dim

    @property
    def _mlp(self) -> int:
        if self.experts is None:
            return 3 * self.dim * self.ffn
        bias = self.experts.slots if self.experts.bias_rate else 0
        return self.experts.slots * self.dim + bias + self.experts.count * 3 * self.dim * self.experts.ffn


def plugged(plugin: PluginSpec, context: int) -> ModelSpec:
    """The ModelSpec of a package's model, whose examples have `context` bytes: of a decoder all is least."""
    return ModelSpec(
        dim=2, layers=1, heads=1, kv_heads=1, ffn=1, vocab=256, context=context,
        tied=True, rope_theta=10000.0, norm_eps=1e-5, plugin=plugin,
    )  # fmt: skip


class Atom(msgspec.Struct, frozen=True):
    """One named parameter tensor: the unit of sharding, checkpointing and coverage."""

    name: str
    shape: tuple[int, ...]


def atoms(model: ModelSpec) -> tuple[Atom, ...]:
    """All atoms that a run trains, in the order that all members share: of the model, or of its adapters."""
    if model.plugin is not None:
        return tuple(Atom(one.name, one.shape) for one in model.plugin.tensors)
    if model.lora_rank:
        return _adapters(model)
    wide = model.dim
    found = [Atom("model.embed_tokens.weight", (model.vocab, wide))]
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        found.append(Atom(at + "input_layernorm.weight", (wide,)))
        found += _attention(at + "self_attn.", model)
        found.append(Atom(at + "post_attention_layernorm.weight", (wide,)))
        found += _feed_forward(at, model)
    found.append(Atom("model.norm.weight", (wide,)))
    if not model.tied:
        found.append(Atom("lm_head.weight", (model.vocab, wide)))
    return tuple(found)


def _adapters(model: ModelSpec) -> tuple[Atom, ...]:
    """Factors as vectors: as matrices of the arena they would fill `lora_rank` of the 64 rows of their blocks."""
    found: list[Atom] = []
    for atom in atoms(model.base):
        if is_target(atom.name, model.lora_targets):
            out, into = atom.shape
            first, second = factors_of(atom.name)
            found += [Atom(first, (model.lora_rank * into,)), Atom(second, (out * model.lora_rank,))]
    return tuple(found)


def is_experts(name: str) -> bool:
    """Whether a tensor of this name belongs to one expert, or to experts that are stacked in memory."""
    return _EXPERTS in name


def expert_of(name: str) -> int | None:
    """Number of the expert that an atom belongs to; None for atoms that every member trains."""
    _, found, rest = name.partition(_EXPERTS)
    return int(rest.split(".", 1)[0]) if found else None


def _attention(at: str, model: ModelSpec) -> list[Atom]:
    dim, wide, narrow = model.dim, model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = []
    for kind, rows in (("q", wide), ("k", narrow), ("v", narrow)):
        found.append(Atom(f"{at}{kind}_proj.weight", (rows, dim)))
        if model.qkv_bias:
            found.append(Atom(at + kind + PROJECTION_BIAS, (rows,)))
    found.append(Atom(at + "o_proj.weight", (dim, wide)))
    if model.qk_norm:
        found += [
            Atom(at + f"{kind}_norm.weight", (width,)) for kind, width in zip("qk", model.qk_widths, strict=True)
        ]
    return found


def slice_counts(ffn: int) -> list[int]:
    """Into how many FFN slices a feed-forward of this width can be cut."""
    return [count for count in range(2, ffn // SLICE_MULTIPLE + 1) if not ffn % (count * SLICE_MULTIPLE)]


def _feed_forward(at: str, model: ModelSpec) -> list[Atom]:
    if model.experts is not None:
        return _mixture(at, model, model.experts)
    if not model.ffn_slices:
        return _swiglu(at + "mlp.", model.dim, model.ffn)
    names = (f"{at}mlp.experts.{one}." for one in range(model.ffn_slices))
    return [atom for name in names for atom in _swiglu(name, model.dim, model.slice_ffn)]


def _mixture(at: str, model: ModelSpec, experts: ExpertsSpec) -> list[Atom]:
    found = [Atom(at + "mlp.gate.weight", (experts.slots, model.dim))]
    if experts.bias_rate:
        found.append(Atom(at + BIAS, (experts.slots,)))
    for expert in range(experts.count):
        found += _swiglu(f"{at}mlp.experts.{expert}.", model.dim, experts.ffn)
    return found


def _swiglu(at: str, wide: int, ffn: int) -> list[Atom]:
    return [
        Atom(at + "gate_proj.weight", (ffn, wide)),
        Atom(at + "up_proj.weight", (ffn, wide)),
        Atom(at + "down_proj.weight", (wide, ffn)),
    ]
