"""Members that share the experts of a mixture, in one process: their loss round by round (`bench experts --loss`).

Everything that trains, encodes and folds is what a worker has. Only one fold is there, for it is the same on all
members; there are no processes, no disk and no network, so that a run needs the time of its arithmetic alone.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import OnHost, codec_of
from atoll.node.learning.compress.folding import OuterStep, rows_of
from atoll.node.learning.data.dataset import Dataset, WindowPlace, windows
from atoll.node.learning.inner.evaluate import VAL_WINDOWS, evaluate
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import loss_of
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.merging import merge_after_round
from atoll.node.learning.outer.fold import Fold, RoundSet, round_set
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.learner import Learner
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.ledger.coverage import cover_of
from atoll.protocols.local.worker_messages import Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.inner_steps import run_steps
from atoll_bench.reference_arms.baselines import Point

Plan = Callable[[int], Mapping[int, bytes]]
"""Round -> the members that take part, with the bitmap of the experts that each trains."""


class Trial:
    """`members` members of a run whose rounds do not overlap."""

    def __init__(self, spec: RunSpec, data: Dataset, members: int, folder: Path, device: str = "cpu") -> None:
        """`folder` is written to; the steps are taken on `device`, and the host does everything else.

        Raises ConfigError for runs that overlap, reduce or begin with given weights.
        """
        if spec.outer.overlap_steps or spec.outer.fragments > 1 or spec.reduce or spec.start:
            raise ConfigError("a trial has whole rounds, one after the other, from fresh weights")
        torch.set_num_threads(1)  # the bits depend on it
        self._spec, self._data, self._count = spec, data, members
        arena = arena_of(spec.model)
        theta = {name: torch.from_numpy(value) for name, value in genesis(spec.model, spec.seed).items()}
        covers, after = partial(cover_of, spec), partial(merge_after_round, spec)
        self.fold = Fold(bridge.gather(theta, arena), arena, self._onto, covers, after=after)
        self._learners = [Learner(spec, device) for _ in range(members)]
        self._sendings = [ErrorFeedback(spec, folder / f"member-{slot}", OnHost()) for slot in range(members)]
        self._payloads: dict[str, bytes] = {}
        self._tokens, self._began = 0, time.monotonic()

    def rounds(self, plan: Plan) -> Iterator[Point]:
        """Train the run's rounds; the validation is that of the fold."""
        for number in range(self._spec.outer.rounds):
            losses = list[float]()
            shares = plan(number)
            self._payloads.clear()
            for slot, experts in shares.items():
                losses += self._train(number, slot, experts)
            members = [_member(slot, experts) for slot, experts in shares.items()]
            self.fold.prepare_final(round_set(number, members))()
            yield self._point(number, losses)

    def _train(self, number: int, slot: int, experts: bytes) -> list[float]:
        """A member's round; its payload is in the fold's reach then."""
        learner, steps = self._learners[slot], self._spec.steps(number)
        learner.set_trained_experts(experts)
        self._hand_over(learner)
        learner.weights.start(self.fold.view_C4096)
        first = self._spec.steps_before(number)
        place = WindowPlace(self._spec.seed, first, slot, self._count, self._spec.inner.batch)

        def batch(step: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
            return self._data.batch(windows(place, step, self._data.num_windows))

        losses = list(run_steps(learner.step, batch, first, steps))
        self._payloads[str(slot)] = bytes(self._sendings[slot].encode(number, learner.weights))
        self._tokens += steps * self._spec.inner.batch * self._spec.model.context
        return losses

    def _hand_over(self, to: Learner) -> None:
        """Moments of experts that others gave up, as a swarm's members hand them over."""
        for learner in self._learners:
            taken = [expert for expert, moments in learner.released.items() if to.inherit(expert, moments)]
            for expert in taken:
                del learner.released[expert]

    def _onto(self, fresh: RoundSet, theta_N4096: Tensor) -> Tensor:
        compress, outer = self._spec.compress, self._spec.outer
        cover = partial(cover_of, self._spec, fresh.number)
        return codec_of(compress.codec, compress.k).apply_update(
            theta_N4096,
            [member.weight for member in fresh.members],
            [self._payloads[member.path] for member in fresh.members],
            OuterStep(outer.alpha_256, outer.floor_256),
            rows=[rows_of(cover(member.experts), cover()) for member in fresh.members],
        )

    def _point(self, number: int, losses: Sequence[float]) -> Point:
        learner = self._learners[0]
        with learner.weights.replaced_by(self.fold.view_C4096):
            val_WT1 = self._data.validation(VAL_WINDOWS)
            found = evaluate(learner.module, loss_of, val_WT1, self._data.validation_bytes(VAL_WINDOWS))
        seconds = time.monotonic() - self._began
        return Point(number, self._tokens, float(np.mean(losses)), found.val_bpb, seconds)


def _member(slot: int, experts: bytes) -> Member:
    name = digest(bytes([slot]))
    return Member(name, PeerId(""), WEIGHT_UNIT, name, str(slot), experts)
