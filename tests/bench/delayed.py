"""The swarm's own outer step in one process, with folds that come late and fragments that take turns.

A member sends its round, trains on, and learns the new view `delay_steps` inner steps later. What it did meanwhile
is merged by a LateRule. With no delay and one fragment this is the blocking round: everyone starts from the view.
"""

import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.outer.fixed import plus, to_fixed, to_float
from atoll.node.learning.outer.mean import Weighted, outer_update
from atoll.node.learning.reduction.reducing import reduce_rows
from atoll.protocols.ledger import coverage
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.payload import VALUE_BITS
from atoll_bench.inner_steps import run_steps
from atoll_bench.module_values import fill_module, read_module
from atoll_bench.reference_arms.baselines import Point, Task
from tests.plain import feedback, sparse2
from tests.plain.mean import PLAIN

_WEIGHT = 64
Seen = Callable[[int, Tensor], None]
"""Is shown the pseudo-gradient `[F, 4096]` of each contribution, with its round, without error feedback."""


class LateRule(NamedTuple):
    """How local weights L, anchor A and a late view V meet. A contribution is Δ = A − L.

    Rebase: A ← L when sent; L ← V + keep · (L − A), A ← V when folded. A step is in one contribution only.
    Forecast: as rebase, but first L ← A − (what was sent): the view as far as the member can know it. What the
    payload could not say is in the residual, and no longer in the weights.
    Blend (Streaming DiLoCo, arXiv 2501.18512 Alg. 2): A stays when sent; L ← keep · L + (1 − keep) · V, A ← V.
    """

    name: Literal["rebase", "forecast", "blend"]
    keep: float
    """κ of rebase and forecast: the share of the steps made meanwhile that survives. α of blend."""

    def merged(self, local_F4096: Tensor, anchor_F4096: Tensor, view_F4096: Tensor) -> Tensor:
        """The new local weights, float32; exactly the view where L = A, but for a blend."""
        origin = view_F4096 if self.name == "blend" else anchor_F4096
        return view_F4096 + self.keep * (local_F4096 - origin)


class _Member:
    """One member: its weights (in the module), anchor and residuals."""

    def __init__(self, task: Task, slot: int, rule: LateRule, rows: list[Tensor], seen: Seen) -> None:
        self._task, self._slot, self._rule, self._rows = task, slot, rule, rows
        self._seen = seen
        self._arena = arena_of(task.spec.model)
        self._inner: Inner = task.inner()
        self._anchor = to_float(to_fixed(task.genesis_C4096()))
        self._residuals = [torch.zeros((len(own), CHUNK)) for own in rows]

    def train(self, number: int, first: int, steps: int) -> list[float]:
        """Losses of steps first … first + steps − 1 of a round."""
        before = self._task.spec.steps_before(number) + first
        return list(
            run_steps(self._inner.step, lambda i: self._task.batch(number, self._slot, first + i), before, steps)
        )

    def send(self, number: int, fragment: int) -> Weighted:
        """This round's contribution for a fragment."""
        rows, compress = self._rows[fragment], self._task.spec.compress
        local_C4096 = self._local()
        delta_F4096 = self._anchor[rows] - local_C4096[rows]
        self._seen(number, delta_F4096)
        payload = feedback.feed(self._residuals[fragment], delta_F4096, compress.feedback, compress.k)
        sent = sparse2.decode(payload, len(rows), compress.k)
        if self._rule.name == "forecast":
            values = sent.q_Ck.to(torch.float32) * 2.0**-VALUE_BITS
            local_C4096[rows] = self._anchor[rows].scatter_add(1, sent.index_Ck, -values)
            fill_module(self._inner.module, local_C4096, self._arena)
        if self._rule.name != "blend":
            self._anchor[rows] = local_C4096[rows]
        return (_WEIGHT, *sent)

    def merge(self, fragment: int, view_F4096: Tensor) -> None:
        """The fold of a fragment is in: meet it."""
        rows, local_C4096 = self._rows[fragment], self._local()
        local_C4096[rows] = self._rule.merged(local_C4096[rows], self._anchor[rows], view_F4096)
        self._anchor[rows] = view_F4096
        fill_module(self._inner.module, local_C4096, self._arena)

    def _local(self) -> Tensor:
        return read_module(self._inner.module, self._arena).cpu()


def delayed_sparse(
    task: Task,
    rule: LateRule,
    delay_steps: int = 0,
    fragments: int = 1,
    present: float = 1.0,
    reduced_k: int | None = None,
    seen: Seen = lambda number, delta_F4096: None,
    folded: Seen = lambda number, theta_C4096: None,
) -> Iterator[Point]:
    """The sparse swarm; round r exchanges fragment r mod `fragments`. A Point for every turn of all fragments.

    A fold comes `delay_steps` inner steps after its round, but always before the next contribution is sent: one is
    under way at a time. A member sits a round out with probability 1 − `present`, and merges nevertheless.
    With `reduced_k`, the mean goes through reducers that keep so many values of a chunk. `folded` is shown
    Θ `[C, 4096]` after each round, float32. Scores the view. Raises ConfigError for more fragments than the
    model has.
    """
    began = time.monotonic()
    arena = arena_of(task.spec.model)
    rows = [_rows(cover) for cover in coverage.fragments(task.spec.model, fragments)]
    theta = to_fixed(task.genesis_C4096())
    members = [_Member(task, slot, rule, rows, seen) for slot in range(task.members)]
    judge = task.inner().module
    dice = torch.Generator().manual_seed(task.spec.seed)
    losses: list[float] = []
    kept = [torch.zeros((len(own), CHUNK), dtype=torch.int32) for own in rows]
    for number in range(task.rounds):
        now, past = number % fragments, (number - 1) % fragments
        view_F4096 = to_float(theta[rows[past]])
        wait = min(delay_steps, task.spec.steps(number))
        sent: list[Weighted] = []
        for member in members:
            here = float(torch.rand((), generator=dice)) < present
            losses += member.train(number, 0, wait) if here else []
            if number:
                member.merge(past, view_F4096)
            if here:
                losses += member.train(number, wait, task.spec.steps(number) - wait)
                sent.append(member.send(number, now))
        if sent and reduced_k is not None:
            payload, kept[now] = reduce_rows(kept[now], sent, reduced_k, task.spec.outer.floor_256, PLAIN)
            sent = [(1, *sparse2.decode(payload, len(rows[now]), reduced_k))]
        theta[rows[now]] = _folded(task, theta[rows[now]], sent)
        folded(number, to_float(theta))
        if now == fragments - 1:
            fill_module(judge, to_float(theta), arena)
            yield task.point(number, losses or [0.0], judge, began)
            losses = []


def _folded(task: Task, theta_F4096: Tensor, sent: list[Weighted]) -> Tensor:
    outer = task.spec.outer
    update_F4096 = outer_update(sent, len(theta_F4096), outer.alpha_256, outer.floor_256)
    return plus(theta_F4096, update_F4096)


def _rows(cover: coverage.Cover) -> Tensor:
    return torch.cat([torch.arange(*span) for span in cover])
