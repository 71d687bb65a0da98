"""Differentially private passes: each sequence passes alone, its gradient is clipped, and their sum gets noise.

That is DP-SGD (Abadi et al., arXiv 1607.00133) with the gradient of one sequence at a time instead of those of all
at once: memory holds one gradient and one sum, and the norms are those of whole gradients. What the optimizer, the
compressor and the error feedback do with the sum afterwards depends on nothing else of the data.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.node.learning.inner.passes import Loss, Passes
from atoll.node.learning.inner.step_share import ALONE

Random: TypeAlias = Callable[[int], bytes]
"""Draws so many bytes. Whoever can repeat them can subtract the noise: outside of tests it is `os.urandom`."""
BLOCK = 4096
"""Values whose squares are added up in float32; of these sums the rest is float64."""
_MARGIN = 1 - 2.0**-12
"""A norm is rounded by less than 2⁻¹³: its squares by 2⁻²⁴ in each of at most 4096 additions in float32."""
_SLAB = 1 << 16
"""Values that get noise at once."""


class Privacy(NamedTuple):
    """What is done to the gradients of a step."""

    clip: float
    """C: largest norm of the gradient of one sequence."""
    noise: float
    """σ, in units of `clip`."""
    random: Random


class PrivatePasses(Passes):
    """Adds up clipped gradients, one sequence at a time, and adds noise once to their sum."""

    def __init__(
        self,
        module: nn.Module,
        loss_of: Loss,
        privacy: Privacy,
        *,
        recompute: Callable[[], bool] = lambda: False,
    ) -> None:
        """`recompute`: see Passes. Gradients of the module are views of one vector from here on."""
        super().__init__(module, loss_of, ALONE, micro_batch=1, recompute=recompute)
        self._privacy = privacy
        trained = [each for each in module.parameters() if each.requires_grad]
        self._count = sum(each.numel() for each in trained)
        blocks = -(-self._count // BLOCK)
        self._gradient_N = torch.zeros(blocks * BLOCK, device=self._device)
        """That of one sequence, then that of the step; zeros at its end."""
        self._sum_N = torch.zeros_like(self._gradient_N)
        at = 0
        for each in trained:
            each.grad = self._gradient_N[at : at + each.numel()].view_as(each)
            at += each.numel()

    def _add_up(self, window_BT1: Tensor) -> Tensor:
        self._sum_N.zero_()
        total = torch.zeros((), device=self._device)
        for window_1T1 in torch.tensor_split(window_BT1, len(window_BT1)):
            self._gradient_N.zero_()
            total += self._pass(self._loss_of, window_1T1, 1.0)
            self._sum_N.addcmul_(self._gradient_N, clip_factor(self._gradient_N, self._privacy.clip))
        self._add_noise()
        # By the sequences that were taken, which everybody may know: not by what they contributed.
        torch.div(self._sum_N, len(window_BT1), out=self._gradient_N)
        return total / len(window_BT1)

    def _add_noise(self) -> None:
        """Once a step: the sum of a step, and not each gradient, is what others see of it."""
        deviation = self._privacy.noise * self._privacy.clip
        for first in range(0, self._count, _SLAB):
            part = self._sum_N[first : min(first + _SLAB, self._count)]
            normal = torch.from_numpy(normals(len(part), self._privacy.random))
            part.add_(normal.to(self._device), alpha=deviation)


def clip_factor(gradient_N: Tensor, clip: float) -> Tensor:
    """The factor `[]`, float32, at most 1, with which a gradient has a norm of at most `clip`; N divides by BLOCK.

    Not finite where the gradient is not: the step then ends as a Divergence, and nothing of it is used.
    """
    block_M = torch.linalg.vector_norm(gradient_N.view(-1, BLOCK), dim=1)
    norm = torch.linalg.vector_norm(block_M, dtype=torch.float64)
    factor: Tensor = clip * _MARGIN / norm.clamp(min=clip)
    return factor.float()


def normals(count: int, random: Random) -> NDArray[np.float32]:
    """Standard normal values `[count]`, float32, four random bytes each (Box and Muller, 1958).

    They end at 6.8 deviations, which a normal value leaves with a probability of 10⁻¹¹.
    """
    pairs = -(-count // 2)
    drawn_2P = np.frombuffer(random(8 * pairs), "<u4").reshape(2, pairs)
    uniform_2P = (drawn_2P + 0.5) * 2.0**-32  # never 0, which has no logarithm
    radius_P, angle_P = np.sqrt(-2 * np.log(uniform_2P[0])), 2 * np.pi * uniform_2P[1]
    return np.concatenate((radius_P * np.cos(angle_P), radius_P * np.sin(angle_P)))[:count].astype(np.float32)
