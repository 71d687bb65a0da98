"""Validates rounds: a trainer its view now and then, an evaluator the final rounds, for all (docs/roles.md).

An evaluator publishes what it finds. A trainer takes over the values of those that it believes, and validates no
more while there is one.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from atoll.node.config.roles import Work
from atoll.node.daemon.core.interfaces import LeaseRegisters, RunContext
from atoll.node.daemon.core.runtime import WorkerClient
from atoll.node.daemon.telemetry.validators import EvaluationPace, Validators
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.registers import Validation
from atoll.protocols.local.worker_messages import EvaluateReply, EvaluateRequest
from atoll.protocols.run.sections.privacy import has_own_data


@dataclass(kw_only=True)
class Evaluator:
    """Asks the worker for validation losses, logs and publishes them, and hears those of others."""

    context: RunContext
    net: LeaseRegisters
    worker: WorkerClient
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    is_newest: Callable[[Round], bool]
    """Whether no round after this one is known to be final."""
    is_paused: Callable[[], bool]
    on_step: Callable[[], None]
    """Called in each step: what else evaluators and trainers do for each other."""
    work: Work
    """Who trains validates what it closed, who does not the newest final round. Evaluators publish it."""
    validated: int = 0
    """Rounds that this node validated since its start."""
    validators: Validators = field(default_factory=Validators)
    _wanted: tuple[Round, Digest] | None = None
    """The newest final round that a node without training has not validated yet, and its state."""
    _is_busy: bool = False
    _published: Validation | None = None
    _published_at: float = -1e9

    def __post_init__(self) -> None:
        self._pace = EvaluationPace(self.work.eval_every, self.context.spec.outer.rounds)

    def on_closed(self, number: Round, state: Digest) -> None:
        """Evaluate a round that closed with this view, if it is due."""
        if self.work.trains and self._pace.is_due(
            number,
            self.context.now(),
            is_relieved=self.validators.relieve(number) and not self.work.evaluates,
            is_in_doubt=self.validators.is_in_doubt,
            has_trained=self.context.log.tokens > 0,
        ):
            self._pace.budget.asked()
            self.start_task(self._evaluate(number, state), f"evaluate {number}")

    def on_final(self, number: Round, state: Digest) -> None:
        """Θ_final is that of this round. While one round is validated, only the newest of the next ones waits."""
        if not self.work.evaluates:
            return
        if self.work.trains:
            self._publish(number, state)
            return
        self._wanted = (number, state)
        self.step()

    def step(self) -> None:
        """Take over what others found; validate the final round that waits. Harmless at any time."""
        self.on_step()
        self.validators.hear(self.net.claims(Validation))
        for peer, said in self.validators.believed.items():
            self.context.log.validated_by(peer, said)
        if self.context.now() - self._published_at > self.context.spec.pace.lease_s / 3:
            self._renew()
        # A node that comes late applies many rounds one after the other: only the last of them is worth it.
        may_begin = self.worker.is_ready and not (self._is_busy or self.is_paused())
        if (wanted := self._wanted) and may_begin and self.is_newest(wanted[0]):
            self._wanted, self._is_busy = None, True
            self.start_task(self._evaluate(*wanted), f"evaluate {wanted[0]}")

    async def _evaluate(self, number: Round, state: Digest) -> None:
        """Log the loss of the view that this round closed with. A view that was folded meanwhile is not logged."""
        took_s = 0.0
        try:
            evaluated = await self.worker.ask(EvaluateRequest(), EvaluateReply)
            took_s = evaluated.took_s
        finally:
            self._is_busy = False
            self._pace.budget.took(self.context.now(), took_s)
        if evaluated.state == state:
            self.validated += 1
            self.validators.find(state, evaluated.val_bpb)
            self.context.log.evaluated(number, state, evaluated.val_bpb)
            if self.work.evaluates and not self.work.trains:
                self._publish(number, state)

    def _publish(self, number: Round, state: Digest) -> None:
        """Tell the others what this node found of a final round, if it did."""
        if state in self.validators.own and not has_own_data(self.context.spec):  # it has no noise
            self._published = Validation(number, state, self.validators.own[state])
            self._renew()

    def _renew(self) -> None:
        """Say it again before it ends. It lives as long as a lease: nobody is to rely on a node that is gone."""
        if self._published is not None:
            self._published_at = self.context.now()
            self.net.put_claim(self._published, self.context.spec.pace.lease_s)
