"""What a run trains: the decoder's dimensions and the atoms (named parameter tensors) they give.

Atoms carry Hugging Face Llama names. Shapes follow `nn.Linear`: `[out, in]`.
"""

import math

import msgspec

from atoll.protocols.errors import ConfigError

MAX_PARAMETERS = 1 << 37


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Llama-shaped decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int
    """Tokens of one training sequence."""
    tied: bool
    """The output head is the embedding."""
    rope_theta: float
    norm_eps: float

    def check(self) -> None:
        """Raise ConfigError for dimensions that no decoder can have."""
        for name in ("dim", "layers", "heads", "kv_heads", "ffn", "vocab", "context"):
            if not 1 <= getattr(self, name) <= 1 << 22:
                raise ConfigError(f"model.{name} = {getattr(self, name)} is outside 1 … {1 << 22}")
        if self.layers > 1024 or self.heads > 1024:
            raise ConfigError("model: more than 1024 layers or heads")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ConfigError("model.dim must be heads × an even head size")
        if self.heads % self.kv_heads:
            raise ConfigError("model.heads must be a multiple of model.kv_heads")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1 and 0 < self.norm_eps < 1):
            raise ConfigError("model.rope_theta must be finite and above 1, model.norm_eps within 0 … 1")
        if self.parameters > MAX_PARAMETERS:
            raise ConfigError(f"model has {self.parameters} parameters; at most {MAX_PARAMETERS} are legal")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        layer = attention + 3 * self.dim * self.ffn + 2 * self.dim
        heads = 1 if self.tied else 2
        return heads * self.vocab * self.dim + self.layers * layer + self.dim


class Atom(msgspec.Struct, frozen=True):
    """One named parameter tensor: the unit of sharding, checkpointing and coverage."""

    name: str
    shape: tuple[int, ...]


def atoms(model: ModelSpec) -> tuple[Atom, ...]:
    """All atoms of a model in their one agreed order."""
    wide, narrow = model.dim, model.kv_heads * model.head_dim
    found = [Atom("model.embed_tokens.weight", (model.vocab, wide))]
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        found += [
            Atom(at + "input_layernorm.weight", (wide,)),
            Atom(at + "self_attn.q_proj.weight", (wide, wide)),
            Atom(at + "self_attn.k_proj.weight", (narrow, wide)),
            Atom(at + "self_attn.v_proj.weight", (narrow, wide)),
            Atom(at + "self_attn.o_proj.weight", (wide, wide)),
            Atom(at + "post_attention_layernorm.weight", (wide,)),
            Atom(at + "mlp.gate_proj.weight", (model.ffn, wide)),
            Atom(at + "mlp.up_proj.weight", (model.ffn, wide)),
            Atom(at + "mlp.down_proj.weight", (wide, model.ffn)),
        ]
    found.append(Atom("model.norm.weight", (wide,)))
    if not model.tied:
        found.append(Atom("lm_head.weight", (model.vocab, wide)))
    return tuple(found)
