"""Validates the view after a round: every few rounds, or as often as it costs little."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from atoll.node.daemon.coordinator.interfaces import RunContext
from atoll.node.daemon.coordinator.runtime import WorkerClient
from atoll.node.ipc.time_budget import TimeBudget
from atoll.protocols.ids import Digest, Round
from atoll.protocols.local.worker_messages import EvaluateReply, EvaluateRequest

SHARE = 0.01
"""Largest share of the time that goes into validation where the user names no number of rounds."""


@dataclass(slots=True)
class EvaluationPace:
    """`every`: rounds from one validation to the next; 0: as SHARE allows. The last round is always validated."""

    every: int
    rounds: int
    budget: TimeBudget = field(default_factory=lambda: TimeBudget(SHARE))

    def is_due(self, number: int, now: float) -> bool:
        """Return whether round `number`, which has closed, is to be validated at `now` (monotonic seconds)."""
        if number == self.rounds - 1:
            return True
        return number % self.every == 0 if self.every else self.budget.is_due(now)


@dataclass
class Evaluator:
    """Asks the worker for validation losses and logs them."""

    context: RunContext
    worker: WorkerClient
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    every: int

    def __post_init__(self) -> None:
        self._pace = EvaluationPace(self.every, self.context.spec.outer.rounds)

    def on_closed(self, number: Round, state: Digest) -> None:
        """Evaluate a round that closed with this view, if it is due."""
        if self._pace.is_due(number, self.context.now()):
            self._pace.budget.asked()
            self.start_task(self._evaluate(number, state), f"evaluate {number}")

    async def _evaluate(self, number: Round, state: Digest) -> None:
        """Log the loss of the view that this round closed with. A view that was folded meanwhile is not logged."""
        took_s = 0.0
        try:
            evaluated = await self.worker.ask(EvaluateRequest(), EvaluateReply)
            took_s = evaluated.took_s
        finally:
            self._pace.budget.took(self.context.now(), took_s)
        if evaluated.state == state:
            self.context.log.evaluated(number, evaluated.val_bpb)
