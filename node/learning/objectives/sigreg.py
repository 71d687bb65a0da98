"""SIGReg, LeJEPA's sketched isotropic Gaussian regularisation (arXiv 2511.08544): hidden states like N(0, I).

Hidden states are projected onto M random unit directions. Along each the Epps-Pulley statistic compares their
empirical characteristic function φ with that of a standard normal variable, and the term is the mean of

    N · ∫ |φ(t) − exp(−t²/2)|² exp(−t²/2) dt

over the directions, by the trapezoid rule at 17 points of [−5, 5], as published. N is the tokens of a whole step,
so that a member whose steps have fewer has the same weight for it.

The statistic is no sum over tokens: φ is the mean over all tokens of a step. Means are what a step's parts
exchange (`Pool`), and its gradient through φ is linear once φ is known, so parts of any size are exact.

Letters: N tokens, S tokens of a slab, D model width, M directions, P positive points.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atoll.node.learning.objectives.interface import Pool

DIRECTIONS = 1024
POINTS = 8
"""Points above 0. The integrand is even, and 0 at 0, so they stand for all 17."""
_REACH = 5.0
_SLAB_VALUES = 1 << 18
"""Cosines of a slab, and as many sines: 1 MiB each."""


class SigReg:
    """The term of one member's steps."""

    def __init__(self, width: int, tokens: int, settings: Mapping[str, float]) -> None:
        """`settings`: legal by sections/objective.BUILT_IN."""
        self._shape_DM = width, int(settings.get("directions", DIRECTIONS))
        self._tokens = tokens
        self._directions_DM = torch.empty(self._shape_DM)

    def begin(self, seed: int, device: torch.device) -> None:
        """Draw the directions of a step."""
        drawn_DM = np.random.Generator(np.random.Philox(key=seed)).standard_normal(self._shape_DM)
        drawn_DM /= np.linalg.norm(drawn_DM, axis=0)
        self._directions_DM = torch.from_numpy(drawn_DM).to(device, torch.float32)

    def means(self, hidden_ND: Tensor) -> Tensor:
        """Real and imaginary part of φ at each point along each direction, `[2, P, M]`."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            sum_2PM = hidden_ND.new_zeros((2, POINTS, self._shape_DM[1]), dtype=torch.float32)
            for _, wave_2PSM in _slabs(hidden_ND.float(), self._directions_DM):
                sum_2PM += wave_2PSM.sum(2)
        return sum_2PM / len(hidden_ND)

    def term(self, hidden_ND: Tensor, pool: Pool) -> Tensor:
        """The statistic of the whole step, a mean over the directions."""
        mean_2PM = pool(self.means(hidden_ND.detach()))
        found: Tensor = _Statistic.apply(  # type: ignore[no-untyped-call]
            hidden_ND, self._directions_DM, mean_2PM, self._tokens
        )
        return found


def points() -> tuple[list[float], list[float]]:
    """The positive points t and their weights, which stand for −t too: trapezoid · exp(−t²/2)."""
    step = _REACH / POINTS
    at = [step * (number + 1) for number in range(POINTS)]
    ends = [2.0] * (POINTS - 1) + [1.0]  # the last one is an end of the interval
    return at, [share * step * math.exp(-t * t / 2) for t, share in zip(at, ends, strict=True)]


class _Statistic(torch.autograd.Function):
    """N · Σ w · |φ − g|² / M with φ given. Its gradient goes through this part's share of φ."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, directions_DM: Tensor, mean_2PM: Tensor, tokens: int) -> Tensor:
        at_P, weight_P = (mean_2PM.new_tensor(values) for values in points())
        excess_2PM = mean_2PM.clone()
        excess_2PM[0] -= torch.exp(-at_P.square() / 2)[:, None]
        scaled_2PM = excess_2PM * (weight_P[:, None] * (tokens / directions_DM.shape[1]))
        ctx.save_for_backward(x_ND, directions_DM, scaled_2PM)
        return (scaled_2PM * excess_2PM).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        x_ND, directions_DM, scaled_2PM = ctx.saved_tensors
        at_P = scaled_2PM.new_tensor(points()[0])
        # d cos(tz) = −t sin(tz) dz and d sin(tz) = t cos(tz) dz, each the N-th part of a mean.
        slope_2PM = scaled_2PM * (2 * scale / len(x_ND)) * at_P[:, None]
        grad_ND = torch.empty_like(x_ND, dtype=torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            for rows, wave_2PSM in _slabs(x_ND.float(), directions_DM):
                grad_SM = (slope_2PM[1][:, None] * wave_2PSM[0] - slope_2PM[0][:, None] * wave_2PSM[1]).sum(0)
                grad_ND[rows] = grad_SM @ directions_DM.T
        return grad_ND.to(x_ND.dtype), None, None, None


def _slabs(x_ND: Tensor, directions_DM: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, cosine and sine of t · projection `[2, P, S, M]`) of each slab of tokens."""
    size = max(1, _SLAB_VALUES // (POINTS * directions_DM.shape[1]))
    for start in range(0, len(x_ND), size):
        rows = slice(start, start + size)
        turn_SM = (x_ND[rows] @ directions_DM) * (_REACH / POINTS)
        wave_2PSM = turn_SM.new_empty((2, POINTS, *turn_SM.shape))
        cos_SM, sin_SM = wave_2PSM[0, 0], wave_2PSM[1, 0]
        torch.cos(turn_SM, out=cos_SM)
        torch.sin(turn_SM, out=sin_SM)
        for number in range(1, POINTS):  # the points are multiples of the first: two products in place of a sine
            before_cos_SM, before_sin_SM = wave_2PSM[:, number - 1]
            wave_2PSM[0, number] = before_cos_SM * cos_SM - before_sin_SM * sin_SM
            wave_2PSM[1, number] = before_sin_SM * cos_SM + before_cos_SM * sin_SM
        yield rows, wave_2PSM
