"""Builds what gives contributions their weights, and audits them."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from atoll.node.config.roles import Work
from atoll.node.daemon.audits.auditor import Auditor
from atoll.node.daemon.audits.drawing import AuditDraw, is_repeatable
from atoll.node.daemon.audits.for_others import AuditsForOthers
from atoll.node.daemon.audits.newcomer_weights import NewcomerWeights, OnSet, Weigh, claimed_weights, no_one
from atoll.node.daemon.audits.stale_weights import weights_of
from atoll.node.daemon.certificates.summary import Summary
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.node.daemon.core.runtime import EventQueue, Machines, WorkerClient
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.probation import Tally


@dataclass(slots=True)
class Weighing:
    """The parts that weigh, and those that must learn of sets for it."""

    auditor: Auditor | None = None
    """None in a run without audits."""
    for_others: AuditsForOthers | None = None
    """On an evaluator in a run whose audits it can make."""
    weigh: Weigh = claimed_weights
    """Returns the weight of each contribution of a set."""
    share_of: Callable[[PeerId], int] = lambda peer: 256
    """Returns 256ths of its weight that the work of a member has that may be on probation."""
    learners: list[OnSet] = field(default_factory=list)

    def on_set(self, number: Round, names: tuple[Digest, ...], deciders: frozenset[PeerId] | None) -> None:
        """The view has this set of a round; or it is final, and these decide the next round."""
        if self.auditor and deciders is not None:
            self.auditor.note_deciders(number, deciders)
        for learn in self.learners:
            learn(number, names, deciders is not None)

    def on_applied(self, number: Round) -> None:
        """Θ_final is that after this round."""
        if self.for_others:
            self.for_others.on_applied(number)
        elif self.auditor:
            self.auditor.on_applied(number)

    def step(self) -> None:
        """Perform what is due at this time."""
        if self.for_others:
            self.for_others.step()
        elif self.auditor:
            self.auditor.step()


def build_weighing(
    *,
    context: RunContext,
    net: Network,
    queue: EventQueue,
    machines: Machines,
    worker: WorkerClient,
    contributions: ContributionIndex,
    prepare: Callable[[Turn], Awaitable[None]],
    rng: random.Random,
    work: Work,
    summary: Summary | None,
) -> Weighing:
    """Return the parts of one node. `prepare` fetches what a member's turn read; `summary`: of old records."""
    made = Weighing()
    if audits := context.spec.audit:
        draws = AuditDraw(
            each=audits.per_round,
            contributions=contributions,
            blobs=net,
            weigh=lambda number, found: made.weigh(number, found),
        )
        made.auditor = Auditor(
            audits=audits,
            context=context,
            contributions=contributions,
            draws=draws,
            net=net,
            queue=queue,
            machines=machines,
            worker=worker,
            rng=rng,
            prepare=prepare,
            may_adopt=work.trains and is_repeatable(context.spec),
        )
        made.learners = [made.auditor.on_set]
        if not audits.by_payload:
            made.weigh = made.auditor.weigh
        if work.evaluates and not work.trains and is_repeatable(context.spec):
            made.for_others = AuditsForOthers(
                context=context,
                net=net,
                draws=draws,
                worker=worker,
                prepare=prepare,
                start_task=queue.start_task,
                is_paused=lambda: bool(machines.round.resting or machines.round.held),
            )
            made.learners.append(made.for_others.on_set)
    _weigh_less(
        made, context=context, queue=queue, machines=machines, contributions=contributions, summary=summary
    )
    if made.auditor and audits and audits.by_payload:
        # What is shared is what counts: else copies on probation would take part of a weight, and then lose it.
        made.auditor.claimed, made.weigh = made.weigh, made.auditor.weigh
    return made


def _weigh_less(
    made: Weighing,
    *,
    context: RunContext,
    queue: EventQueue,
    machines: Machines,
    contributions: ContributionIndex,
    summary: Summary | None,
) -> None:
    """Add what takes from the weights that audits or claims give: the age of work, and probation."""
    pace = context.spec.pace
    if pace.stale:
        made.weigh, learners = weights_of(
            context=context, queue=queue, machines=machines, contributions=contributions, claimed=made.weigh
        )
        made.learners += learners
    if pace.probation_256:
        newcomers = NewcomerWeights(
            share_256=pace.probation_256,
            tally=summary.work if summary else Tally(context.spec.probation),
            final=summary.round if summary else -1,
            context=context,
            contributions=contributions,
            queue=queue,
            machines=machines,
            claimed=made.weigh,
            is_bounded=bool(context.spec.outer.by_weight),
            gone_in=made.auditor.gone_in if made.auditor else no_one,
        )
        made.weigh, made.share_of = newcomers.weigh, newcomers.share_of
        made.learners.append(newcomers.on_set)
