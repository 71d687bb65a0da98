"""Whether each atom should have its own k (L-GreCo, arXiv 2210.17357).

    python -m atoll_bench.convergence.atom_sizes

The arms of `bench convergence` with a payload of one part for each atom. Every N rounds a dynamic program chooses
k of each atom from the errors that the members' sums β·e + Δ would have: (a) the fewest bytes whose error is not
above that of `compress.k` everywhere, or (b) the least error of no more bytes. Each part is encoded and folded by
the product's codec. There is no wire for it: docs/decisions/0030-k-of-atoms-from-final-sets.md.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fold import RoundSet
from atoll.node.worker.fold_requests import fold_of
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import Arena, Span, arena_of
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.payload import HEADER_BYTES, payload_bytes
from atoll_bench.convergence.arms import arm_of, spec_of
from atoll_bench.convergence.crew import CrewRounds
from atoll_bench.module_values import read_module
from atoll_bench.reference_arms.baselines import Task

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Values of a chunk that an atom may have."""
EVERY = 10
"""Rounds between two choices."""
LOG_UNITS = 16
"""Errors are said in 16ths of log₂."""
LINE = "{arm:15} k {k:3} β {beta:g} seed {seed}: {bpb:.4f} bpb, {sent} bytes, error {error:.3f}, {cpu:.0f} CPU s"


class Choice(NamedTuple):
    """One k for each atom."""

    k: tuple[int, ...]
    size_bytes: int
    error: float


def choices(errors_AK: Sequence[Sequence[float]], chunks_A: Sequence[int]) -> list[Choice]:
    """The least error for every number of bytes that a payload can have, bytes rising and errors falling.

    `errors_AK`: squared error of each atom at each of SIZES. By dynamic program over atoms.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for errors_K, chunks in zip(errors_AK, chunks_A, strict=True):
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for size_bytes, (error, chosen) in best.items():
            for k, more in zip(SIZES, errors_K, strict=True):
                total = size_bytes + part_bytes(chunks, k)
                if total not in grown or error + more < grown[total][0]:
                    grown[total] = (error + more, (*chosen, k))
        best, least = {}, math.inf
        for total in sorted(grown):
            if grown[total][0] < least:  # more bytes with no less error are of no use to any atom behind
                best[total], least = grown[total], grown[total][0]
    return [Choice(chosen, size_bytes, error) for size_bytes, (error, chosen) in best.items()]


def part_bytes(chunks: int, k: int) -> int:
    """Bytes of an atom's part without a header: a payload has one."""
    return payload_bytes("sparse2", chunks, k) - HEADER_BYTES


def chosen_k(goal: str, errors_AK: Sequence[Sequence[float]], chunks_A: Sequence[int], uniform: int) -> Choice:
    """`bytes`: the fewest for the error of `uniform` everywhere; `error`: the least for its bytes."""
    at = SIZES.index(uniform)
    error = math.fsum(errors_K[at] for errors_K in errors_AK)
    size_bytes = sum(part_bytes(chunks, uniform) for chunks in chunks_A)
    found = choices(errors_AK, chunks_A)
    if goal == "bytes":
        return next(each for each in found if each.error <= error * (1 + 1e-9))
    return next(each for each in reversed(found) if each.size_bytes <= size_bytes)


def parts_of(arena: Arena) -> tuple[Span, ...]:
    """The chunks of each matrix, then those of all vectors."""
    matrices = [place for place in arena.placements if len(place.shape) == 2]
    spans = [Span(place.first_chunk, place.first_chunk + math.prod(place.blocks)) for place in matrices]
    return (*spans, Span(spans[-1].stop, arena.chunks))


class _PerAtom(CrewRounds):
    """Rounds whose payloads have a k for each atom; `goal`: see `chosen_k`, or empty for one k everywhere."""

    def __init__(self, task: Task, folder: Path, goal: str) -> None:
        super().__init__(task, folder, exact=False)
        spec = task.spec
        self._goal, self._uniform, self._beta = goal, spec.compress.k, spec.compress.feedback
        self._parts = parts_of(arena_of(spec.model))
        self.k: tuple[int, ...] = (self._uniform,) * len(self._parts)
        empty_C4096 = torch.zeros_like(self.fold.view_C4096, dtype=torch.float32)
        self._residuals = [empty_C4096.clone() for _ in range(task.members)]
        self._sent: dict[str, list[bytes]] = {}
        self._errors: list[list[list[float]]] = []
        self.shares: list[float] = []
        """What was not sent over what was to be sent, squared norms, of each payload."""
        self.fold = fold_of(spec, self._update)

    def round(self, number: int) -> Sequence[float]:
        """As a round of the bench; then k of the next rounds is chosen from what the members measured."""
        self._errors = []
        losses = super().round(number)
        if self._errors:
            chunks_A = [span.chunks for span in self._parts]
            # What the fold would know: the median over the members, in whole numbers.
            found = np.median(np.array(self._errors), axis=0)
            errors_AK = np.exp2(np.round(LOG_UNITS * np.log2(np.maximum(found, 1e-30))) / LOG_UNITS).tolist()
            self.k = chosen_k(self._goal, errors_AK, chunks_A, self._uniform).k
        return losses

    def _send(self, number: int, slot: int) -> tuple[int, Member]:
        weights = self._learners[slot].weights
        local_C4096 = read_module(self._learners[slot].module, arena_of(self._task.spec.model)).cpu()
        residual_C4096, anchor_C4096 = self._residuals[slot], weights.anchor_C4096
        goal_C4096 = self._beta * residual_C4096 + (anchor_C4096 - local_C4096)
        if self._goal and number % EVERY == 0:
            self._errors.append([self._errors_of(goal_C4096[span.start : span.stop]) for span in self._parts])
        sent = list[bytes]()
        for span, k in zip(self._parts, self.k, strict=True):
            rows = [each[span.start : span.stop] for each in (residual_C4096, anchor_C4096, local_C4096)]
            sent.append(codec_of("sparse2", k).encode(rows[0], rows[1], rows[2], self._beta))
        self.shares.append(float(residual_C4096.square().sum() / goal_C4096.square().sum()))
        name = digest(bytes([slot]))
        self._sent[str(slot)] = sent
        size_bytes = HEADER_BYTES + sum(map(len, sent)) - HEADER_BYTES * len(sent)
        return size_bytes, Member(name, PeerId(""), WEIGHT_UNIT, name, str(slot), ALL)

    @staticmethod
    def _errors_of(goal_N4096: Tensor) -> list[float]:
        """Squared error of an atom's sums at each of SIZES."""
        zeros_N4096, found = torch.zeros_like(goal_N4096), list[float]()
        for k in SIZES:
            left_N4096 = zeros_N4096.clone()
            codec_of("sparse2", k).encode(left_N4096, goal_N4096, zeros_N4096, 0.0)
            found.append(float(left_N4096.square().sum()))
        return found

    def _update(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        """θ + U, atom by atom."""
        step = OuterStep(self._task.spec.outer.alpha_256, self._task.spec.outer.floor_256)
        members = sorted(fresh.members, key=lambda member: member.entry)
        moved = [
            codec_of("sparse2", k).apply_update(
                theta_N4096[span.start : span.stop].contiguous(),
                [member.weight for member in members],
                [self._sent[member.path][at] for member in members],
                step,
            )
            for at, (span, k) in enumerate(zip(self._parts, self.k, strict=True))
        ]
        return torch.cat(moved)


def run(goal: str, *, k: int, beta: float, seed: int, rounds: int, size: str) -> str:
    """Train one arm; a line of what it gave."""
    arm = arm_of("sgd", size, total=15 * rounds, seed=seed, k=k, trial=(f"compress.feedback={beta:g}",))
    spec = spec_of(arm)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    torch.set_num_threads(1)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        trained = _PerAtom(Task(spec, data, 8, spec.outer.rounds, "cpu"), Path(folder), goal)
        last = list[float]()
        for number in range(spec.outer.rounds):
            trained.round(number)
            # A single state is noisy: the mean of the last rounds' ends.
            if number >= spec.outer.rounds - 5:
                last.append(trained.val_bpb())
    name = {"": "one k", "bytes": "(a) equal error", "error": "(b) equal bytes"}[goal]
    cpu_s, error = time.process_time() - began, median(trained.shares)
    line = LINE.format(
        arm=name, k=k, beta=beta, seed=seed, bpb=fmean(last), sent=trained.sent_bytes, error=error, cpu=cpu_s
    )
    return f"{line}; k at the end {' '.join(map(str, trained.k))}"


def main() -> None:
    """Print a line for each arm and seed."""
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--rounds", type=int, default=100)
    args.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args.add_argument("--goals", nargs="*", default=["bytes", "error"], choices=["bytes", "error"])
    args.add_argument("--uniform", type=int, nargs="*", default=[48, 32], help="smaller k that all atoms have")
    args.add_argument("--size", default="micro")
    args.add_argument("--feedback", type=float, default=0.5)
    given = args.parse_args()
    arms = (("", 64), *((goal, 64) for goal in given.goals), *(("", k) for k in given.uniform))
    for seed in given.seeds:
        for goal, k in arms:
            print(run(goal, k=k, beta=given.feedback, seed=seed, rounds=given.rounds, size=given.size), flush=True)


if __name__ == "__main__":
    main()
