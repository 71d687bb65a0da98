"""The decoder: a Llama-shaped language model, small enough to read.

RMSNorm, rotary positions, SwiGLU and grouped-query attention; `named_parameters()` are exactly
`protocols.model.atoms(spec)`, name, shape and order, so that a checkpoint is a Hugging Face Llama one.

Letters in names: B batch, T time, D model width, H heads, K key heads, E head size, F ffn width, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.protocols.model import ModelSpec


def linear(features_in: int, features_out: int) -> nn.Linear:
    """A matrix without bias and without initial values: those come from `genesis` or a snapshot."""
    made: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear, features_in, features_out, bias=False
    )
    return made


def rope_tables(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[context, head_dim]`, float32, in the half-rotated layout of Hugging Face Llama."""
    even = np.arange(0, model.head_dim, 2, dtype=np.float64)
    frequency_E2 = model.rope_theta ** (-even / model.head_dim)
    angle_TE2 = np.outer(np.arange(model.context, dtype=np.float64), frequency_E2)
    angle_TE = np.concatenate([angle_TE2, angle_TE2], axis=1)
    return torch.from_numpy(np.cos(angle_TE)).float(), torch.from_numpy(np.sin(angle_TE)).float()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) by its angle (RoFormer, arXiv 2104.09864)."""
    low, high = x_BHTE.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x_BHTE * cos_TE + turned * sin_TE).to(x_BHTE.dtype)


class Norm(nn.Module):
    """RMSNorm with a gain."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.dim))
        self._eps = model.norm_eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Scaled to unit mean square, then multiplied by the gain; the mean is taken in float32."""
        return functional.rms_norm(x_BTD.float(), self.weight.shape, self.weight.float(), self._eps)


class Attention(nn.Module):
    """Causal grouped-query attention: `heads` queries share `kv_heads` keys and values."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        narrow = model.kv_heads * model.head_dim
        self.q_proj = linear(model.dim, model.dim)
        self.k_proj = linear(model.dim, narrow)
        self.v_proj = linear(model.dim, narrow)
        self.o_proj = linear(model.dim, model.dim)
        self._head_dim = model.head_dim
        self._sharing = model.heads // model.kv_heads

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Mix positions; position t sees 0 … t."""
        q_BHTE = rotate(self._split(self.q_proj(x_BTD)), cos_TE, sin_TE)
        k_BKTE = rotate(self._split(self.k_proj(x_BTD)), cos_TE, sin_TE)
        v_BKTE = self._split(self.v_proj(x_BTD))
        # Repeated keys keep torch's flash kernel on CPU; `enable_gqa` falls back to the plain one there.
        k_BHTE = k_BKTE.repeat_interleave(self._sharing, dim=1)
        v_BHTE = v_BKTE.repeat_interleave(self._sharing, dim=1)
        mixed_BHTE = functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        out: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).reshape(x_BTD.shape))
        return out

    def _split(self, x_BTN: Tensor) -> Tensor:
        batch, time, _ = x_BTN.shape
        return x_BTN.view(batch, time, -1, self._head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = linear(model.dim, model.ffn)
        self.up_proj = linear(model.dim, model.ffn)
        self.down_proj = linear(model.ffn, model.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """down(silu(gate x) · up x)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(model)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = Norm(model)
        self.mlp = FeedForward(model)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """One step along the residual stream."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Trunk(nn.Module):
    """Everything below the output head; a module of its own because the names say `model.`."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            nn.Embedding, model.vocab, model.dim
        )
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = Norm(model)

    def forward(self, tokens_BT: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Last hidden state `[B, T, D]`, normed."""
        x_BTD = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TE, sin_TE)
        out: Tensor = self.norm(x_BTD)
        return out


class Decoder(nn.Module):
    """The language model. Its parameters hold no values until `bridge.scatter` fills them."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = Trunk(model)
        self.lm_head = None if model.tied else linear(model.dim, model.vocab)
        cos_TE, sin_TE = rope_tables(model)
        self.cos_TE: Tensor
        self.sin_TE: Tensor
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits `[B, T, V]` for int64 tokens `[B, T]`; T is at most the model's context."""
        time = tokens_BT.shape[1]
        x_BTD = self.model(tokens_BT, self.cos_TE[:time], self.sin_TE[:time])
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(x_BTD, head)


def loss_of(decoder: nn.Module, window_BT1: Tensor) -> Tensor:
    """Mean cross-entropy, nats per token, of int64 windows `[B, T + 1]`: each token from those before it."""
    logits_BTV = decoder(window_BT1[:, :-1])
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), window_BT1[:, 1:].flatten())
