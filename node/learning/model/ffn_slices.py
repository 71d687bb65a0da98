"""A dense feed-forward in slices of its hidden units, of which a node trains some (PPU, arXiv 2509.22418).

SwiGLU is a sum over hidden units: down(silu(gate x) · up x) = Σ_e down_e(silu(gate_e x) · up_e x). So a slice is
an expert that fires for every token with weight 1, without router, sorting or auxiliary loss. Slices are stored as
experts are (`experts.Experts`): those that are trained here as one stack with gradients, the others frozen.

Letters: N tokens, E slices of a stack, F width of a slice, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.node.learning.model.expert_functions import Packed, Pair
from atoll.node.learning.model.experts import Experts
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


def slices_as_experts(model: ModelSpec) -> ExpertsSpec:
    """The mixture whose experts are the slices: as many, as wide, and all chosen by each token."""
    return ExpertsSpec(count=model.ffn_slices, per_token=model.ffn_slices, ffn=model.slice_ffn)


def sliced_swiglu(x_ND: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Sum of the outputs `[N, D]` of a stack of slices, all of which get the same rows."""
    h_NE2F = functional.linear(x_ND, gate_up_E2FD.flatten(0, 1)).view(len(x_ND), *gate_up_E2FD.shape[:2])
    gate_NEF, up_NEF = h_NE2F.chunk(2, -1)
    act_NEF = functional.silu(gate_NEF) * up_NEF
    # Slice by slice: one product of all would copy `down` into the order of its columns, and save the copy.
    first, *rest = zip(act_NEF.unbind(1), down_EDF.unbind(0), strict=True)
    y_ND: Tensor = first[0] @ first[1].mT
    for act_NF, down_DF in rest:
        y_ND = torch.addmm(y_ND, act_NF, down_DF.mT)
    return y_ND


class FrozenSlices(torch.autograd.Function):
    """`sliced_swiglu` of weights without gradient, slice by slice.

    It saves the pre-activations alone. Plain autograd would save the widened weights too: all that narrow storage
    (int8) gains would be lost until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_up: Packed, down: Packed) -> Tensor:
        """Output rows `[N, D]`."""
        y_ND = torch.zeros_like(x_ND)
        saved: list[Tensor] = []
        for one in range(len(gate_up.values_EOI)):
            h_N2F = x_ND @ gate_up.one(one, x_ND).mT
            gate_NF, up_NF = h_N2F.chunk(2, -1)
            y_ND.addmm_(functional.silu(gate_NF).mul_(up_NF), down.one(one, x_ND).mT)
            saved.append(h_N2F)
        ctx.save_for_backward(*saved)
        ctx.stacks = gate_up, down
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the input rows."""
        gate_up, down = ctx.stacks
        dx_ND = torch.zeros_like(dy_ND)
        for one, h_N2F in enumerate(ctx.saved_tensors):
            gate_NF, up_NF = h_N2F.chunk(2, -1)
            d_act_NF = dy_ND @ down.one(one, dy_ND)
            dh_N2F = torch.empty_like(h_N2F)
            d_gate_NF, d_up_NF = dh_N2F.chunk(2, -1)
            torch.mul(d_act_NF, functional.silu(gate_NF), out=d_up_NF)
            torch.ops.aten.silu_backward.grad_input(d_act_NF.mul_(up_NF), gate_NF, grad_input=d_gate_NF)
            dx_ND.addmm_(dh_N2F, gate_up.one(one, dy_ND))
        return dx_ND, None, None


class SlicedFeedForward(nn.Module):
    """The feed-forward of one layer of a dense model with `slices`; `owned` are the slices that are trained."""

    def __init__(
        self, model: ModelSpec, owned: frozenset[int], frozen_dtype: torch.dtype, frozen_on_host: bool
    ) -> None:
        super().__init__()
        # The name makes the atoms `mlp.experts.0.gate_proj.weight`, as `model_spec.atoms` says.
        self.experts = Experts(model.dim, slices_as_experts(model), owned, frozen_dtype, frozen_on_host)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """down(silu(gate x) · up x) over all slices, `[B, T, D]`."""
        device = x_BTD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BTD.dtype
        x_ND = x_BTD.flatten(0, 1).to(dtype)
        sides = [*self._trained(x_ND), *self._frozen(x_ND)]
        y_ND = sides[0] if len(sides) == 1 else sides[0] + sides[1]
        return y_ND.to(x_BTD.dtype).view_as(x_BTD)

    def _trained(self, x_ND: Tensor) -> list[Tensor]:
        if not self.experts.owned:
            return []
        return [sliced_swiglu(x_ND, self.experts.gate_up, self.experts.down)]

    def _frozen(self, x_ND: Tensor) -> list[Tensor]:
        shelf = self.experts.shelf
        if shelf is None:
            return []
        pair: Pair = shelf.packed("gate_up"), shelf.packed("down")
        with torch.autocast(x_ND.device.type, enabled=False):
            return [FrozenSlices.apply(x_ND, *pair)]  # type: ignore[no-untyped-call]
