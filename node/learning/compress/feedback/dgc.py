"""Deep Gradient Compression, at the level of pseudo-gradients.

    Δ ← Δ · min(1, clip / ‖Δ‖)     local clipping, ‖·‖ over all that the round exchanges
    u ← mu + Δ,  e ← e + u          momentum correction: e accumulates velocities, not gradients
    c = C(e),    e ← e − c          what was sent leaves e, here with the quantiser's error left in it
    u ← 0 where c ≠ 0               momentum factor masking

The sparsity warm-up is `compress.warmup`, and goes with every rule. Source: Lin et al., arXiv 1712.01887,
Algorithms 1 to 4; m = 0.9, and 75 %, 94 % and 98.4 % of the values left out in the first epochs (k = 1024, 256 and
64 of 4096).

What of it belongs to a loop of local steps: all four, with a round in the place of a step. Δ is then what H steps
of AdamW did, whose own moments stay with the member; m is an outer momentum, so the fold must have none. What does
not: the paper scales its bound by 1/√N, because its fold is a sum over N workers. This fold is a mean, over
another N in each round. Its bound is of a gradient; a Δ is measured in what steps at the peak rate can move.
A round that the member missed is no step of u. A payload that missed its final set is in e again; the momentum
that was masked for it is not.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.compress.feedback.memory import Encode, Memory, Returned
from atoll.protocols.run.arena import Span
from atoll.protocols.run.run_spec import RunSpec


class DeepGradientCompression(NamedTuple):
    """The rule of a run, with its velocities u."""

    spec: RunSpec
    memory: Memory

    def send(self, number: int, span: Span, error_N4096: Tensor, delta_N4096: Tensor, encode: Encode) -> None:
        """See FeedbackRule."""
        rows = slice(span.start, span.stop)
        velocity_N4096 = self.memory.values_C4096[rows]
        velocity_N4096.mul_(self.spec.compress.beta).add_(delta_N4096)
        error_N4096.add_(velocity_N4096)
        wanted_N4096 = error_N4096.clone()
        encode(error_N4096)
        # What was sent is not 0, so it changed e: no codec must say which values it chose.
        velocity_N4096.masked_fill_(error_N4096 != wanted_N4096, 0)
        self.memory.round_C[rows] = number

    def most_norm(self, number: int, values: int) -> float:
        """The clip: a share of what the round's steps can move so many values by at the peak rate."""
        spec = self.spec
        # A fragment is exchanged every so many rounds, with the progress of all of them.
        steps = spec.steps(number) * spec.outer.fragments * spec.pace.most_256 / 256
        rate = spec.inner.lr * max(1.0, spec.inner.expert_lr, spec.inner.muon_lr)
        return spec.compress.clip_share * rate * steps * math.sqrt(values)

    def returned(self, number: int, chunks: int) -> Returned:
        """All of it returns to e, which does not decay."""
        return Returned(torch.ones(chunks), torch.zeros(chunks))
