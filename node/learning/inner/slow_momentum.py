"""A slow momentum beside the gradient: AdamW's step for members that are long without each other's gradients.

    m ← β₁m + (1 − β₁)g      v ← β₂v + (1 − β₂)g²      W ← (1 − η·decay)W − η·[(1 − ω)g + ω·m̂] / (√v̂ + ε)

Source: Iacob et al., MT-DAO, arXiv 2510.05361, with one momentum: their quasi-hyperbolic form, after Ma and Yarats
(arXiv 1810.06801). After a round's steps a momentum of β₁ = 0.995 … 0.999 is still there and one of 0.9 is
gone, while g follows the loss. It takes no memory beyond AdamW's. ω = 1 is AdamW, whose correction of the bias
of m̂ and v̂ is used here, because moments of experts have ages of their own.

Their members also average m and v every K_u and K_v steps. Here they do not: it would be a second payload as large
as the dense one. So this is their K_u = K_v = ∞; m stays with the member from round to round, in its saved state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.protocols.run.run_spec import InnerSpec


def slow_momentum_step(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    spec: InnerSpec,
    rate: float,
    decay: float,
) -> None:
    """Update values, moments and step counts in place, as `adamw.adamw_step`; ω is `spec.momentum_share`."""
    for value, gradient, m, v, step in zip(values, gradients, first, second, steps, strict=True):
        step.add_(1)
        m.lerp_(gradient, 1 - spec.beta1)
        v.mul_(spec.beta2).addcmul_(gradient, gradient, value=1 - spec.beta2)
        # On the device: a count that is read here would wait for a GPU at each atom.
        m_hat = m / (1 - torch.pow(spec.beta1, step))
        root = (v / (1 - torch.pow(spec.beta2, step))).sqrt_().add_(spec.eps)
        value.mul_(1 - rate * decay)
        value.addcdiv_(torch.lerp(gradient, m_hat, spec.momentum_share), root, value=-rate)
