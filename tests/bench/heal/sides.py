"""Two sides of a partition that train apart, and meet on the model of the larger one, in one process."""

import copy
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.node.learning.data.dataset import Dataset
from atoll.node.runs.capacity.open_rounds import past_payloads_of
from atoll.node.worker.error_feedback import share_of_left
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.byzantine.trial import MEMBERS, STEPS, Case, Trial, spec_of


class Length(NamedTuple):
    """Rounds together, apart, and after the heal."""

    before: int
    cut: int
    after: int


class Way(NamedTuple):
    """What a member that changes its chain brings along."""

    keeps: bool
    """Its error feedback and its moments."""
    returns: bool = False
    """Its own payloads since the cut return to the error feedback, as many as a worker keeps."""
    decays: bool = False
    """They return as if they had never been sent: decayed by every payload since."""
    shared: bool = False
    """Only a share of them returns: their mean."""


SHIPPED = "returned as a mean"
"""What the worker does (node/worker/error_feedback.py)."""
WAYS = {
    "begins anew": Way(keeps=False),
    "keeps error feedback": Way(keeps=True),
    SHIPPED: Way(keeps=True, returns=True, decays=True, shared=True),
    "returned decayed": Way(keeps=True, returns=True, decays=True),
    "returned whole": Way(keeps=True, returns=True),
}
ALONE = ("larger side alone", "smaller side alone")


class Side(Trial):
    """Honest members of one side."""

    def __init__(self, data: Dataset, seed: int, length: Length, feedback: float) -> None:
        """All members, at the beginning."""
        super().__init__(Case("mean", None, 0, seed), data, _spec(seed, length, feedback))
        self.sent: list[list[bytes]] = []
        """Payloads of each round since the cut, by slot."""

    def part(self, slots: range) -> "Side":
        """Copy some of the members, as they are now."""
        at = torch.tensor([self.slots.index(slot) for slot in slots])
        moments = {name: (a[at], b[at]) for name, (a, b) in self._members.moments.items()}
        return self._with(list(slots), moments, self._residual_MC4096[at])

    def joined(self, other: "Side", way: Way) -> "Side":
        """Copy both together on the model of this side."""
        theirs, residual = other._members.moments, other._residual_MC4096.clone()
        if not way.keeps:
            residual.zero_()
            theirs = {name: (torch.zeros_like(a), torch.zeros_like(b)) for name, (a, b) in theirs.items()}
        feedback = self.spec.compress.feedback
        kept = past_payloads_of(self.spec) if way.returns else 0
        for age, payloads in enumerate(reversed(other.sent[-kept:] if kept else [])):
            share = (feedback**age if way.decays else 1.0) * (share_of_left(feedback) if way.shared else 1.0)
            for slot, payload in enumerate(payloads):
                residual[slot] += share * self._values(payload)
        moments = {
            name: (torch.cat([a, theirs[name][0]]), torch.cat([b, theirs[name][1]]))
            for name, (a, b) in self._members.moments.items()
        }
        return self._with([*self.slots, *other.slots], moments, torch.cat([self._residual_MC4096, residual]))

    def run(self, first: int, count: int) -> "Side":
        """Train rounds from `first` on."""
        for number in range(first, first + count):
            self.round(number)
        return self

    def validation(self) -> float:
        """Bits per byte."""
        return self._validation()

    def _with(self, slots: list[int], moments: dict[str, tuple[Tensor, Tensor]], residual: Tensor) -> "Side":
        new = copy.copy(self)
        new.slots, new.sent, new._residual_MC4096 = slots, [], residual.clone()
        new._members = self._members.others(len(slots), moments)
        new.theta_C4096 = self.theta_C4096.clone()
        new._named = {name: torch.empty_like(value) for name, value in self._named.items()}
        return new

    def _train(self, number: int) -> list[bytes]:
        sent = super()._train(number)
        self.sent.append(sent)
        return sent


def _spec(seed: int, length: Length, feedback: float) -> RunSpec:
    """The run of `bench byzantine`, for so many rounds, with this decay of the error feedback."""
    spec, rounds, replace = spec_of(Case("mean", None, 0, seed)), sum(length), msgspec.structs.replace
    inner = replace(spec.inner, total_steps=rounds * STEPS)
    compress = replace(spec.compress, feedback=feedback)
    made: RunSpec = replace(spec, inner=inner, outer=replace(spec.outer, rounds=rounds), compress=compress)
    return made


def outcome(data: Dataset, seed: int, length: Length, smaller: int, feedback: float) -> dict[str, float]:
    """Validation at the end, bits per byte: of each side that went on alone, and of both by each way."""
    together = Side(data, seed, length, feedback).run(0, length.before)
    sides = [together.part(range(MEMBERS - smaller)), together.part(range(MEMBERS - smaller, MEMBERS))]
    larger, other = (side.run(length.before, length.cut) for side in sides)
    healed = length.before + length.cut
    found = {
        name: side.part(range(side.slots[0], side.slots[-1] + 1)).run(healed, length.after).validation()
        for name, side in zip(ALONE, (larger, other), strict=True)
    }
    return found | {
        name: larger.joined(other, way).run(healed, length.after).validation() for name, way in WAYS.items()
    }
