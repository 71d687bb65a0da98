"""LoRA: a frozen base, and pairs of small factors that are trained (arXiv 2106.09685; docs/lora.md).

`adapt` turns a decoder that was just built. All its parameters become buffers, so that gradients, moments and
atoms are those of the factors alone, and each matrix of a layer becomes a `FrozenMatrix`.

Letters: I features in, O features out, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.lora import is_target
from atoll.protocols.run.model_spec import ModelSpec, atoms

_WEIGHT = "weight"
STORED = (torch.float32, torch.bfloat16)
"""How a base may be stored. Eight bits would need a scale for each row, which only experts have."""


def check_storage(dtype: torch.dtype, on_host: bool) -> None:
    """Raise ConfigError for a way of storing frozen values that the base of a LoRA run does not have."""
    if dtype not in STORED:
        raise ConfigError(
            "the base of a LoRA run is stored as float32 or bfloat16", hint="set frozen = bfloat16 in config.toml"
        )
    if on_host:
        raise ConfigError("the base of a LoRA run lies where steps are taken", hint="unset frozen_on_host")


class FrozenProduct(torch.autograd.Function):
    """x·Wᵀ + b for a weight and a bias without gradient, widened for the product if they are stored narrow.

    It saves neither the input nor a widened copy: plain autograd would save both until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product, in the dtype of `x`."""
        ctx.weight_OI = weight_OI
        return functional.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the input."""
        return dy @ ctx.weight_OI.to(dy.dtype), None, None


class Factor(nn.Module):
    """One trained factor of an adapter, without values until `genesis` or a state gives it some."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        """x·Wᵀ."""
        y: Tensor = functional.linear(x, self.weight)
        return y


class FrozenMatrix(nn.Module):
    """W·x, and with an adapter W·x + (α/r)·B·(A·x). Atoms of the factors are named as peft names them."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, rank: int, scale: float) -> None:
        """`rank` 0: there is no adapter."""
        super().__init__()
        features_out, features_in = linear.weight.shape
        self.weight: Tensor
        self.register_buffer(_WEIGHT, torch.empty(features_out, features_in, dtype=dtype), persistent=False)
        self.bias: Tensor | None
        bias = None if linear.bias is None else torch.empty(features_out)
        self.register_buffer("bias", bias, persistent=False)
        self.lora_A = Factor(rank, features_in) if rank else None
        self.lora_B = Factor(features_out, rank) if rank else None
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output; with B = 0 it has the bits of the base's."""
        device = x.device.type
        rows = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        with torch.autocast(device, enabled=False):
            y: Tensor = FrozenProduct.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        if self.lora_A is None or self.lora_B is None:
            return y
        moved: Tensor = self.lora_B(self.lora_A(x))
        return y + moved * self._scale


class FrozenEmbedding(nn.Module):
    """Rows of a table without gradient, float32 however they are stored."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer(_WEIGHT, torch.empty(rows, width, dtype=dtype), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of these tokens."""
        rows: Tensor = functional.embedding(tokens, self.weight).float()
        return rows


def adapt(decoder: nn.Module, model: ModelSpec, dtype: torch.dtype) -> None:
    """Freeze a decoder that was just built, and give its targets adapters. `dtype`: of the base's matrices."""
    for name, module in list(decoder.named_modules()):
        at, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear):
            rank = model.lora_rank if is_target(f"{name}.{_WEIGHT}", model.lora_targets) else 0
            frozen: nn.Module = FrozenMatrix(module, dtype, rank, model.lora_scale)
        elif isinstance(module, nn.Embedding):
            frozen = FrozenEmbedding(module.num_embeddings, module.embedding_dim, dtype)
        else:
            _freeze_own(module)
            continue
        setattr(decoder.get_submodule(at), attribute, frozen)


def base_values(decoder: nn.Module, model: ModelSpec) -> dict[str, Tensor]:
    """The frozen tensors of an adapted decoder by the names of the base's atoms; writing to one changes it."""
    buffers = dict(decoder.named_buffers())
    return {atom.name: buffers[atom.name] for atom in atoms(model.base)}


def load_base(decoder: nn.Module, model: ModelSpec, read: Callable[[str], Tensor]) -> None:
    """Fill an adapted decoder with its base. `read` gives an atom in float; one is in memory at a time."""
    for name, value in base_values(decoder, model).items():
        value.copy_(read(name))


def _freeze_own(module: nn.Module) -> None:
    """Make a module's own parameters buffers that no state dict has."""
    for name, value in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        module.register_buffer(name, value.detach(), persistent=False)
