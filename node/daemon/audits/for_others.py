"""An evaluator's part in audits: it makes those that trainers call for, and publishes what it found."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.node.daemon.audits.drawing import AuditDraw
from atoll.node.daemon.core.interfaces import LeaseRegisters, RunContext
from atoll.node.daemon.core.runtime import WorkerClient
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import CorruptFault, DecodeError, DiskFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.audit_claims import MAX_FOUND, AuditCall, AuditFindings
from atoll.protocols.local.worker_messages import AuditReply, AuditRequest

KEPT = 8
"""Final sets that the worker's Θ_final may be behind by, and is still audited after."""


@dataclass(kw_only=True)
class AuditsForOthers:
    """For a node with the role `evaluate` that does not train, in a run with audits."""

    context: RunContext
    net: LeaseRegisters
    draws: AuditDraw
    worker: WorkerClient
    prepare: Callable[[Turn], Awaitable[None]]
    start_task: Callable[[Coroutine[Any, Any, None], str], None]
    is_paused: Callable[[], bool]
    made: int = 0
    """Audits since the start."""
    _sets: dict[int, tuple[Digest, ...]] = field(default_factory=dict)
    _applied: Round = Round(-1)  # noqa: RUF009
    _served: set[PeerId] = field(default_factory=set)
    """Members whose calls about the newest applied round were served: one call each."""
    _found: dict[bytes, int] = field(default_factory=dict)
    _is_busy: bool = False
    _published_at: float = -1e9

    def on_set(self, number: Round, names: tuple[Digest, ...], is_final: bool) -> None:
        """A set of a round is known."""
        if is_final:
            self._sets[number] = names
            self._sets = {at: each for at, each in self._sets.items() if at > number - KEPT}

    def on_applied(self, number: Round) -> None:
        """Θ_final is that after this round: audits of it are made now, and of no earlier one."""
        self._applied = number
        self._served.clear()

    def step(self) -> None:
        """Make the audits that were called for. An empty register says that calls are heard."""
        if self.context.now() - self._published_at > self.context.spec.pace.lease_s / 3:
            self._publish()
        names = self._sets.get(self._applied)
        if names is None or self._is_busy or not self.worker.is_ready or self.is_paused():
            return
        calls = {
            peer: call
            for peer, call in self.net.claims(AuditCall).items()
            if call.round == self._applied and peer not in self._served
        }
        if calls and self.draws.is_whole(names):
            self._served |= calls.keys()
            self._is_busy = True
            self.start_task(self._serve(self._applied, names, calls), f"audits of {self._applied} for others")

    async def _serve(self, number: Round, names: tuple[Digest, ...], calls: Mapping[PeerId, AuditCall]) -> None:
        try:
            for peer, call in sorted(calls.items()):
                for key, request in self.draws.draw(number, names, peer, call.seed).items():
                    if self._applied != number:
                        return
                    await self._audit(key, request)
                self._publish()
        finally:
            self._is_busy = False

    async def _audit(self, key: bytes, request: AuditRequest) -> None:
        """Measure; what is measured at another state than the trainer's is no finding."""
        try:
            await self.prepare(Turn(request.round, PeerId(request.audited.author)))
            done = await self.worker.ask(request, AuditReply)
        except (CorruptFault, DecodeError, DiskFault, TimeoutError):
            return  # the trainer measures it itself
        if done.at == request.round:
            self.made += 1
            self._found = dict([*self._found.items(), (key, done.excess)][-MAX_FOUND:])

    def _publish(self) -> None:
        self._published_at = self.context.now()
        self.net.put_claim(AuditFindings(tuple(self._found.items())), self.context.spec.pace.lease_s)
