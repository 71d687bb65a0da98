"""Members without a model: synthetic pseudo-gradients through the real codec, for the bench and its tests.

A pseudo-gradient has a scale of its own for every parameter (log-normal, so that its values have heavy tails), a
part that all members share, half of which stays from round to round, and noise of its own of the same size.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.node.daemon.reduction.effective_set import EffectiveSlice
from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.outer.fixed import plus, state_digest
from atoll.node.learning.reduction.reducing import (
    ReducerErrorFeedback,
    hand_back,
    nothing_kept,
    reduce_rows,
    slice_update,
)
from atoll.node.worker.folding.reduction_work import ARITHMETIC
from atoll.protocols.ids import Digest, digest
from atoll.protocols.ledger.reduction import ReductionRules
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import Layout

ALPHA_256 = 256
WEIGHT = 64
SIZE = 1e-3
"""Typical pseudo-gradient of a parameter."""


class Landscape:
    """Pseudo-gradients of one swarm; a pure function of (seed, round, member)."""

    def __init__(self, seed: int, chunks: int) -> None:
        self.chunks, self._seed = chunks, seed
        self._scale = SIZE * np.exp(0.8 * self._normal(0))
        self._lasting = self._normal(1)
        self._shared: tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = (-1, self._lasting)

    def delta_C4096(self, number: int, slot: int) -> Tensor:
        """float32."""
        if self._shared[0] != number:
            self._shared = number, (self._lasting + self._normal(2, number)) * np.float32(0.7071)
        own = self._normal(3, number, slot)
        return torch.from_numpy((own + self._shared[1]) * self._scale)

    def _normal(self, *words: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.random.default_rng((self._seed, *words)).standard_normal((self.chunks, CHUNK), np.float32)


class TrialMember:
    """Error feedback and weights of one member."""

    def __init__(self, rules: ReductionRules, beta: float) -> None:
        self._rules, self._beta = rules, beta
        self._residual = torch.zeros((rules.chunks, CHUNK))
        self._nowhere = torch.zeros((rules.chunks, CHUNK))

    def payload(self, delta_C4096: Tensor) -> bytes:
        """What the member sends of a pseudo-gradient."""
        layout = Layout("sparse2", len(delta_C4096), self._rules.k)
        return encode_residual(self._residual, self._nowhere, -delta_C4096, self._beta, layout)

    def take_back(self, rest: ReducerErrorFeedback) -> None:
        """What the member's reducer keeps no longer."""
        hand_back(self._residual, rest)


class States:
    """States of all members, by digest; each is computed once from the bytes that went in.

    Many members hold the same, and a simulation of them shares one memory.
    """

    def __init__(self, rules: ReductionRules) -> None:
        self._rules = rules
        self._known: dict[Digest, Tensor] = {}
        self._after: dict[Digest, Digest] = {}
        zero = torch.zeros((rules.chunks, CHUNK), dtype=torch.int32)
        self.first = state_digest(zero)
        self._thetas = {self.first: zero}

    def after(
        self,
        before: Digest,
        parts: tuple[EffectiveSlice, ...],
        raw: Mapping[tuple[Digest, Span], bytes],
        reduced: Mapping[Digest, bytes],
    ) -> Digest:
        """Digest of the state `before` and a round, from the rows and payloads that one member holds."""
        key = digest(before, *(_name_of(part, raw, reduced) for part in parts))
        if key not in self._after:
            updates = torch.cat([self._update(part, raw, reduced) for part in parts])
            theta = plus(self._thetas[before], updates)
            self._after[key] = state_digest(theta)
            self._thetas[self._after[key]] = theta
        return self._after[key]

    def keep(self, names: Collection[Digest]) -> None:
        """Forget all other states, and all updates."""
        self._thetas = {name: theta for name, theta in self._thetas.items() if name in names}
        self._known.clear()
        self._after.clear()

    def _update(
        self, part: EffectiveSlice, raw: Mapping[tuple[Digest, Span], bytes], reduced: Mapping[Digest, bytes]
    ) -> Tensor:
        key = _name_of(part, raw, reduced)
        if key not in self._known:
            rows = [(offer.weight, raw[offer.entry, part.span]) for offer in part.raw]
            payloads = [] if part.reduced is None else [(part.weight, reduced[part.reduced.entry])]
            self._known[key] = slice_update(part.span.chunks, rows, payloads, self._rules, ALPHA_256, ARITHMETIC)
        return self._known[key]


def _name_of(
    part: EffectiveSlice, raw: Mapping[tuple[Digest, Span], bytes], reduced: Mapping[Digest, bytes]
) -> Digest:
    """Of everything that an update is made of."""
    words = [part.span.start, part.span.chunks, part.weight, *(offer.weight for offer in part.raw)]
    payload = [] if part.reduced is None else [reduced[part.reduced.entry]]
    rows = [raw[offer.entry, part.span] for offer in part.raw]
    return digest(repr(words).encode(), *map(digest, payload), *map(digest, rows))


class Loss(NamedTuple):
    """How far reduced steps are from the exact means of the same payloads, and both from the uncompressed mean."""

    step: float
    """Relative error of the last round's step, in the 2-norm."""
    total: float
    """The same of the sum of all rounds: what error feedback still owes."""
    gathered_cosine: float
    """Of the sum of exact means with the sum of mean pseudo-gradients."""
    reduced_cosine: float
    """Of the sum of reduced steps with it."""


def losses(members: int, reduced_k: int, rounds: int, rules: ReductionRules, beta: float, seed: int) -> list[Loss]:
    """After each round of a swarm whose every chunk is reduced to `reduced_k` values, against the mean itself."""
    landscape = Landscape(seed, rules.chunks)
    swarm = [TrialMember(rules, beta) for _ in range(members)]
    kept = nothing_kept(Span(0, rules.chunks)).values_C4096
    exact, dense = (torch.zeros((rules.chunks, CHUNK), dtype=torch.float64) for _ in range(2))
    found: list[Loss] = []
    for number in range(rounds):
        deltas = [landscape.delta_C4096(number, slot) for slot in range(members)]
        dense += torch.stack(deltas).mean(0)
        sent = [each.payload(delta) for each, delta in zip(swarm, deltas, strict=True)]
        weighted = [(WEIGHT, *ARITHMETIC.decode(payload, rules.chunks, rules.k)) for payload in sent]
        mean = ARITHMETIC.weighted_mean(weighted, rules.floor_256)
        owed = mean + kept
        _, kept = reduce_rows(kept, weighted, reduced_k, rules.floor_256, ARITHMETIC)
        exact += mean
        step, total = _relative(owed - kept - mean, mean), _relative(kept, exact)
        found.append(Loss(step, total, _cosine(exact, dense), _cosine(exact - kept, dense)))
    return found


def _cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def _relative(error: Tensor, truth: Tensor) -> float:
    return float(error.double().norm() / truth.double().norm())
