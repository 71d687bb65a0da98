"""The decoder: a language model shaped like Llama, Qwen2, Qwen3, Gemma, Qwen3-MoE or OLMoE, small enough to read.

RMSNorm, rotary positions, grouped-query attention, and SwiGLU or a mixture of experts. `bridge.named_atoms` are
exactly `protocols.model.atoms(spec)`, so that a checkpoint is a Hugging Face one; a dense decoder's
`named_parameters()` are the same in name, shape and order.

Letters in names: B batch, T time, D model width, H heads, K key heads, E head size, F ffn width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.node.learning.model.ffn_slices import SlicedFeedForward
from atoll.node.learning.model.lora import adapt
from atoll.node.learning.model.moe import Mixture, Pool, RouterLoad, RouterLoads, mean_loads, pooled_loads
from atoll.node.learning.model.recompute import recomputed
from atoll.node.learning.model.token_loss import each_loss, mean_loss
from atoll.protocols.run.model_spec import ModelSpec


class Matrix(nn.Linear):
    """A linear map without initial values: those come from `genesis` or a snapshot.

    Not `nn.utils.skip_init`: it draws values on the meta device, and torch imports its compiler for it.
    """

    def __init__(self, features_in: int, features_out: int, *, bias: bool = False) -> None:
        super().__init__(features_in, features_out, bias=bias)

    def reset_parameters(self) -> None:
        """Leave the values as they are."""


def rope_tables(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[context, head_dim]`, float32, in the half-rotated layout of Hugging Face Llama."""
    even = np.arange(0, model.head_dim, 2, dtype=np.float64)
    frequency_E2 = model.rope_theta ** (-even / model.head_dim)
    if model.rope_stretch is not None:
        frequency_E2 = np.array(model.rope_stretch.stretched(frequency_E2.tolist()))
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

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Last axis scaled to unit mean square, then multiplied by the gain; the mean is taken in float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self._eps)


class Attention(nn.Module):
    """Causal grouped-query attention: `heads` queries share `kv_heads` keys and values."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = Matrix(model.dim, wide, bias=model.qkv_bias)
        self.k_proj = Matrix(model.dim, narrow, bias=model.qkv_bias)
        self.v_proj = Matrix(model.dim, narrow, bias=model.qkv_bias)
        self.o_proj = Matrix(wide, model.dim)
        query, key = model.qk_widths
        self.q_norm = Norm(query, model.norm_eps) if model.qk_norm else None
        self.k_norm = Norm(key, model.norm_eps) if model.qk_norm else None
        self._across = model.qk_norm_across
        self._head_dim = model.head_dim
        self._sharing = model.heads // model.kv_heads

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Mix positions; position t sees 0 … t."""
        q_BHTE, k_BKTE = (
            self._normed(self.q_proj(x_BTD), self.q_norm),
            self._normed(self.k_proj(x_BTD), self.k_norm),
        )
        q_BHTE, k_BKTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BKTE, cos_TE, sin_TE)
        v_BKTE = self._split(self.v_proj(x_BTD))
        # Repeated keys keep torch's flash kernel on CPU; `enable_gqa` falls back to the plain one there.
        k_BHTE = k_BKTE.repeat_interleave(self._sharing, dim=1)
        v_BHTE = v_BKTE.repeat_interleave(self._sharing, dim=1)
        mixed_BHTE = functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        out: Tensor = self.o_proj(mixed_BHTE.transpose(1, 2).flatten(2))
        return out

    def _normed(self, x_BTN: Tensor, norm: Norm | None) -> Tensor:
        """In heads, with the norm over all of them or over each."""
        if norm is None:
            return self._split(x_BTN)
        if self._across:
            return self._split(norm(x_BTN).to(x_BTN.dtype))
        normed_BHTE: Tensor = norm(self._split(x_BTN))
        return normed_BHTE.to(x_BTN.dtype)

    def _split(self, x_BTN: Tensor) -> Tensor:
        batch, time, _ = x_BTN.shape
        return x_BTN.view(batch, time, -1, self._head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """The feed-forward of a dense layer: SwiGLU, or GeGLU for Gemma (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Matrix(model.dim, model.ffn)
        self.up_proj = Matrix(model.dim, model.ffn)
        self.down_proj = Matrix(model.ffn, model.dim)
        self._has_gelu = model.gemma

    def forward(self, x_BTD: Tensor) -> Tensor:
        """down(act(gate x) · up x), act a SiLU or a GELU."""
        gate_BTF = self.gate_proj(x_BTD)
        act_BTF = functional.gelu(gate_BTF, approximate="tanh") if self._has_gelu else functional.silu(gate_BTF)
        out: Tensor = self.down_proj(act_BTF * self.up_proj(x_BTD))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: ModelSpec, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = Norm(model.dim, model.norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = Norm(model.dim, model.norm_eps)
        self.mlp = mlp
        self.recompute = False
        """Whether the backward pass computes the layer again instead of storing what it needs."""

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, loads: RouterLoads | None) -> Tensor:
        """One step along the residual stream."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._block(x_BTD, cos_TE, sin_TE, loads)

        def body(x_BTD: Tensor) -> tuple[Tensor, ...]:
            here = RouterLoads()
            out_BTD = self._block(x_BTD, cos_TE, sin_TE, here)
            return out_BTD, *(value for load in here.layers for value in load[:3])

        out_BTD, *load = recomputed(body, x_BTD, self.parameters())
        if load and loads is not None and isinstance(self.mlp, Mixture):
            count_E, mean_E, z = load
            loads.layers.append(RouterLoad(count_E, mean_E, z, x_BTD.shape[:2].numel(), self.mlp.spec))
        return out_BTD

    def _block(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, loads: RouterLoads | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        normed_BTD = self.post_attention_layernorm(x_BTD)
        mixed = isinstance(self.mlp, Mixture)
        out: Tensor = x_BTD + (self.mlp(normed_BTD, loads) if mixed else self.mlp(normed_BTD))
        return out


class Trunk(nn.Module):
    """Everything below the output head; a module of its own because the names say `model.`."""

    def __init__(self, model: ModelSpec, mlp_of: Callable[[], nn.Module]) -> None:
        super().__init__()
        no_values = torch.empty(model.vocab, model.dim)
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            no_values, freeze=False
        )
        self.layers = nn.ModuleList(Layer(model, mlp_of()) for _ in range(model.layers))
        self.norm = Norm(model.dim, model.norm_eps)
        self._embed_scale = model.dim**0.5 if model.gemma else None

    def forward(self, tokens_BT: Tensor, cos_TE: Tensor, sin_TE: Tensor, loads: RouterLoads | None) -> Tensor:
        """Last hidden state `[B, T, D]`, normed."""
        x_BTD = self.embed_tokens(tokens_BT)
        if self._embed_scale is not None:
            x_BTD = x_BTD * self._embed_scale
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TE, sin_TE, loads)
        out: Tensor = self.norm(x_BTD)
        return out


Readout = Callable[[Tensor, Tensor], Tensor]
"""What a caller wants of the last hidden states `[B, T, D]` and the head `[V, D]`; their product may be large."""


def _logits(x_BTD: Tensor, head_VD: Tensor) -> Tensor:
    """The product of both; the head of a frozen base may be stored narrow."""
    return functional.linear(x_BTD, head_VD.to(x_BTD.dtype))


class Decoder(nn.Module):
    """The language model. Its parameters hold no values until `genesis` or a snapshot gives them some.

    With `model.lora_rank` its parameters are the adapters; the base lies in buffers, stored as `frozen_dtype`.
    `owned`: the experts that are trained here, in every layer; None: all. The others are stored as `frozen_dtype`
    (float32, bfloat16 or int8), on the host if `frozen_on_host`: they then stay there when the model moves.
    """

    def __init__(
        self,
        model: ModelSpec,
        owned: frozenset[int] | None = None,
        frozen_dtype: torch.dtype = torch.float32,
        frozen_on_host: bool = False,
    ) -> None:
        super().__init__()

        def mlp() -> nn.Module:
            if not model.expert_count:
                return FeedForward(model)
            ours = frozenset(range(model.expert_count)) if owned is None else owned
            if model.experts is None:
                return SlicedFeedForward(model, ours, frozen_dtype, frozen_on_host)
            return Mixture(model.dim, model.experts, ours, frozen_dtype, frozen_on_host)

        self.model = Trunk(model, mlp)
        self.lm_head = None if model.tied else Matrix(model.dim, model.vocab)
        cos_TE, sin_TE = rope_tables(model)
        self.cos_TE: Tensor
        self.sin_TE: Tensor
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)
        if model.lora_rank:
            adapt(self, model, frozen_dtype)

    def forward(self, tokens_BT: Tensor, loads: RouterLoads | None = None, readout: Readout = _logits) -> Tensor:
        """Logits `[B, T, V]` for int64 tokens `[B, T]`, or another `readout`; T is at most the model's context.

        Each mixture adds what its router did to `loads`.
        """
        time = tokens_BT.shape[1]
        x_BTD = self.model(tokens_BT, self.cos_TE[:time], self.sin_TE[:time], loads)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return readout(x_BTD, head)

    @property
    def is_recomputed(self) -> bool:
        """Whether backward passes compute layers again."""
        return all(layer.recompute for layer in self.model.layers if isinstance(layer, Layer))

    def recompute_layers(self) -> bool:
        """Recompute layers in backward passes from now on; whether they were stored until now."""
        layers = (layer for layer in self.model.layers if isinstance(layer, Layer))
        stored = [layer for layer in layers if not layer.recompute]
        for layer in stored:
            layer.recompute = True
        return bool(stored)


Term = Callable[[Tensor, Pool], Tensor]
"""Computes a term of the loss from the last hidden states `[N, D]` of N tokens of a step."""


def loss_of(decoder: nn.Module, window_BT1: Tensor, pool: Pool | None = None, term: Term | None = None) -> Tensor:
    """Mean cross-entropy, nats per token, of int64 windows `[B, T + 1]`: each token from those before it.

    Where gradients are recorded, the mean of the mixtures' terms is added: they steer the router and measure
    nothing, so that an evaluation is cross-entropy alone. `pool`: where these windows are a part of a step's.
    `term`: added as well, to the loss of a dense decoder.
    """
    loads = RouterLoads() if torch.is_grad_enabled() else None

    def readout(x_BTD: Tensor, head_VD: Tensor) -> Tensor:
        loss = mean_loss(window_BT1[:, 1:], x_BTD, head_VD)
        return loss if term is None else loss + term(x_BTD.flatten(0, 1), pool or (lambda here: here))

    loss: Tensor = decoder(window_BT1[:, :-1], loads, readout)
    layers = loads.layers if loads is not None else []
    if layers and pool is not None:
        layers = pooled_loads(layers, pool)
    return loss + torch.stack([load.term for load in layers]).mean() if layers else loss


def loads_of(decoder: nn.Module, window_BT1: Tensor) -> Tensor:
    """What `loss_of` asks its `pool` for, of these windows `[B, T + 1]` alone. No gradient."""
    loads = RouterLoads()
    decoder(window_BT1[:, :-1], loads, lambda x_BTD, _: x_BTD)
    return mean_loads(loads.layers)


def hidden_means(decoder: nn.Module, means: Callable[[Tensor], Tensor], window_BT1: Tensor) -> Tensor:
    """`means` of the last hidden states `[N, D]` of all tokens of windows `[B, T + 1]` but each one's last."""
    found: Tensor = decoder(window_BT1[:, :-1], None, lambda x_BTD, _: means(x_BTD.flatten(0, 1)))
    return found


def token_losses(decoder: nn.Module, window_BT1: Tensor) -> Tensor:
    """Cross-entropy of each token but the first of int64 windows, nats, float32 `[B, T]`. No gradient."""
    found: Tensor = decoder(window_BT1[:, :-1], None, partial(each_loss, window_BT1[:, 1:]))
    return found
