"""Joins the slices of a dense run's feed-forwards, so that an export is a plain Llama or Qwen3."""

from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.protocols.run.model_spec import ModelSpec

Read = Callable[[str], Tensor]
"""An atom by name, in its shape."""


def dense_of(model: ModelSpec) -> ModelSpec:
    """The same model with whole feed-forwards: it computes the same function."""
    return replace(model, ffn_slices=0)


def joined(model: ModelSpec, read: Read) -> Read:
    """Reads atoms of `dense_of(model)` by those of `model`, one whole matrix in memory at a time."""
    if not model.ffn_slices:
        return read

    def read_whole(name: str) -> Tensor:
        at, found, projection = name.partition(".mlp.")
        if not found:
            return read(name)
        parts = [read(f"{at}.mlp.experts.{one}.{projection}") for one in range(model.ffn_slices)]
        # Hidden units are rows of gate and up, and columns of down.
        return torch.cat(parts, dim=1 if projection.startswith("down_proj") else 0)

    return read_whole
