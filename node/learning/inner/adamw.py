"""AdamW's step on tensors, with moments in float32 or in eight bits."""

from torch import Tensor
from torch.optim.adamw import adamw

from atoll.node.learning.inner.quantized import BLOCK, CODES, SCALES, Quantized, decoded, encoded, slabs
from atoll.node.learning.inner.slow_momentum import slow_momentum_step
from atoll.protocols.run.moments import KINDS
from atoll.protocols.run.run_spec import InnerSpec
from atoll.protocols.run.sections.optimizer import WHOLE_SHARE


def adamw_step(
    values: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    spec: InnerSpec,
    rate: float,
    decay: float,
) -> None:
    """Update values, moments and step counts in place.

    Calls torch's AdamW function, because its class would import torch's compiler, which takes seconds; with a
    slow momentum, `slow_momentum_step`.
    """
    if spec.momentum_share != WHOLE_SHARE:
        slow_momentum_step(values, gradients, first, second, steps, spec, rate, decay)
        return
    adamw(
        values,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=rate,
        weight_decay=decay,
        eps=spec.eps,
        maximize=False,
    )


def step_in_slabs(
    value: Tensor, gradient: Tensor, state: dict[str, Tensor], spec: InnerSpec, rate: float, decay: float
) -> None:
    """As `adamw_step` for one value whose moments are in eight bits: they are float32 for a slab at a time."""
    for rows, blocks in slabs(value.shape):
        codes = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        # Views of experts need not be contiguous, and torch's function wants all alike.
        part = value[rows].contiguous()
        stored = (Quantized(state[kind + CODES][codes], state[kind + SCALES][blocks]) for kind in KINDS)
        first, second = (decoded(kind, each, part.shape) for kind, each in zip(KINDS, stored, strict=True))
        # The count of each slab's step is the atom's: torch's function counts by itself.
        steps = [state["step"].clone()]
        adamw_step([part], [gradient[rows].contiguous()], [first], [second], steps, spec, rate, decay)
        value[rows] = part
        for kind, moment in zip(KINDS, (first, second), strict=True):
            state[kind + CODES][codes], state[kind + SCALES][blocks] = encoded(kind, moment)
    state["step"].add_(1)
