"""Muon: a matrix moves along its momentum with all singular values made about 1.

Jordan et al. (https://kellerjordan.github.io/posts/muon), as inner optimizer MuLoCo (arXiv 2505.23725). The
polar factor is approximated by five quintic steps of Newton and Schulz with the coefficients of Polar Express
(arXiv 2505.16932). The move is scaled to the size of AdamW's (arXiv 2502.16982), so that one learning rate and
one weight decay serve both.
"""

import math

import torch
from torch import Tensor

from atoll.node.learning.kernels.polar_express import COEFFICIENTS

ADAMW_RMS = 0.2
"""Root mean square of AdamW's usual move, in units of the rate."""
_LEAST_NORM = 1e-20
"""Momentum below it is no direction: it is divided by this instead of its norm."""


def muon_step(
    value_MN: Tensor, momentum_MN: Tensor, gradient_MN: Tensor, *, rate: float, beta: float, decay: float
) -> None:
    """One step of a matrix and its momentum, in place.

    m ← βm + (1 − β)g;  W ← (1 − rate·decay)W − rate·0.2·√max(M, N)·polar(βm + (1 − β)g). Nesterov's form.
    """
    momentum_MN.lerp_(gradient_MN, 1 - beta)
    move_MN = orthogonalized(torch.lerp(gradient_MN, momentum_MN, beta))
    value_MN.mul_(1 - rate * decay)
    value_MN.add_(move_MN, alpha=-rate * ADAMW_RMS * math.sqrt(max(value_MN.shape)))


def orthogonalized(matrix_MN: Tensor) -> Tensor:
    """About UVᵀ of a matrix USVᵀ, float32; singular values lie between 0.7 and 1.2, but for the very smallest.

    Products are bfloat16 on a GPU, as in a step, and float32 elsewhere. A zero matrix stays zero.
    """
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x_MN = matrix_MN.T if is_tall else matrix_MN
    # The norm comes before the cast: values that bfloat16 holds well are those near 1.
    x_MN = x_MN / x_MN.norm().clamp(min=_LEAST_NORM)
    x_MN = x_MN.bfloat16() if x_MN.is_cuda else x_MN
    for a, b, c in COEFFICIENTS:
        gram_MM = x_MN @ x_MN.T
        poly_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, poly_MM, x_MN, beta=a)
    return (x_MN.T if is_tall else x_MN).to(matrix_MN.dtype)
