"""EControl: the error is fed back with a control step, and members track what the fold has of theirs.

    c = C(ηe + Δ − βh)        h ← βh + c        e ← e + Δ − h

C is codec and top-k; η is `compress.control`. The fold does the same with the mean of all c: with outer.rule
`slowmo`, v ← βv + mean(c) and Θ ← Θ − αv, so v is the mean of all members' h, and Θ moves by estimates of the
pseudo-gradients that become exact where these stand still. With `sgd` and `average` there is no v: β is 0, h is c,
and what remains is error feedback with the control step, e ← e + Δ − c.

Source: Gao, Islamov and Stich, EControl, arXiv 2311.05645, Algorithm 2, which has β = 1. There every member sends
in every round, for ever. Here members leave, and the h of one that left would stay in v: a β below 1 lets it
decay, and h decays likewise. In rounds that a member missed the fold moved by its βh, β²h … all the same, so these
leave e when it sends again. η: the paper tunes it; 0.1, our default, is that of a public implementation.

In exact arithmetic (members with equal weights, sets of the same members): the sum of all h is the sum of all Δ
less e. Nothing that was trained is lost, or sent twice.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.compress.feedback.memory import Encode, Memory, Returned
from atoll.protocols.run.arena import Span


class EControl(NamedTuple):
    """η, β of the fold, how many rounds apart the rounds of a chunk are, and h where β is not 0."""

    eta: float
    beta: float
    every: int
    memory: Memory | None

    def send(self, number: int, span: Span, error_N4096: Tensor, delta_N4096: Tensor, encode: Encode) -> None:
        """See FeedbackRule."""
        # The estimate as the fold has it before this round's c: βh, also where rounds were missed.
        estimate_N4096 = None if self.memory is None else self._decayed(self.memory, number, span, error_N4096)
        if estimate_N4096 is not None:
            delta_N4096.sub_(estimate_N4096)
        wanted_N4096 = delta_N4096.add_(error_N4096 * self.eta)
        rest_N4096 = wanted_N4096.clone()
        encode(rest_N4096)
        # e + Δ − h = e + (c + rest − ηe + βh) − (βh + c) = (1 − η)e + rest: no difference of large numbers.
        error_N4096.mul_(1 - self.eta).add_(rest_N4096)
        if self.memory is not None and estimate_N4096 is not None:
            estimate_N4096.add_(wanted_N4096.sub_(rest_N4096))
            self.memory.round_C[span.start : span.stop] = number

    def _decayed(self, memory: Memory, number: int, span: Span, error_N4096: Tensor) -> Tensor:
        """h becomes βh as of round `number`, and leaves e for every round that was missed; a view of it."""
        rows = slice(span.start, span.stop)
        h_N4096, before_N = memory.values_C4096[rows], memory.round_C[rows]
        # A chunk that was never sent has h = 0, so any age will do. Rounds that are sent again, after the node
        # left its chain, count as one.
        missed_N = torch.where(before_N < 0, 0, (number - before_N) // self.every - 1).clamp_(min=0)
        if bool(missed_N.any()):
            moved_N = self._sum_of_powers(missed_N + 1) - 1
            error_N4096.sub_(h_N4096 * moved_N.to(h_N4096)[:, None])
        return h_N4096.mul_(torch.tensor(self.beta).pow(missed_N + 1).to(h_N4096)[:, None])

    def _sum_of_powers(self, count_N: Tensor) -> Tensor:
        """β⁰ + β¹ + … of so many terms, float32."""
        return (1 - torch.tensor(self.beta).pow(count_N)) / (1 - self.beta)

    def most_norm(self, number: int, values: int) -> float:
        """Any length: the control step bounds the error, not the pseudo-gradient."""
        return math.inf

    def returned(self, number: int, chunks: int) -> Returned:
        """A c that no set has is in no v: it leaves h, and e has what h took of it in each round since."""
        if self.memory is None:
            return Returned(torch.ones(chunks), torch.zeros(chunks))
        age_C = torch.div(self.memory.round_C - number, self.every, rounding_mode="floor")
        held_C = age_C >= 0  # h was dropped, or never had it
        age_C = age_C.clamp(min=0)
        return Returned(self._sum_of_powers(age_C + 1), torch.tensor(self.beta).pow(age_C) * held_C)
