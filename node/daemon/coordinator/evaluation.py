"""When the model is evaluated: after a round that closed, as often as its pace allows."""

from typing import TYPE_CHECKING

from atoll.node.daemon.coordinator.eval_pace import EvalPace
from atoll.node.daemon.rounds.types import PublishAck
from atoll.protocols.local.worker_messages import EvaluateReply, EvaluateRequest

if TYPE_CHECKING:
    from atoll.node.daemon.coordinator.driver import Driver


class Evaluations:
    """Asks the worker for validation losses and logs them."""

    def __init__(self, driver: "Driver", every: int) -> None:
        self._driver, self._pace = driver, EvalPace(every, driver.spec.outer.rounds)

    def closed(self, action: PublishAck) -> None:
        """A round closed: evaluate it if it is time."""
        if self._pace.is_due(action.round, self._driver.now()):
            self._pace.allowance.asked()
            self._driver.start_task(self._evaluate(action), f"evaluate {action.round}")

    async def _evaluate(self, closed: PublishAck) -> None:
        """Loss of the view that this round closed with. A view that was folded meanwhile gets its own number."""
        took_s = 0.0
        try:
            evaluated = await self._driver.ask(EvaluateRequest(), EvaluateReply)
            took_s = evaluated.took_s
        finally:
            self._pace.allowance.took(self._driver.now(), took_s)
        if evaluated.state == closed.state:
            self._driver.log.evaluated(closed.round, evaluated.val_bpb)
