"""Builds the driver and all its parts. This is the only place that knows how they are connected."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atoll.node.config.roles import TRAINS, Work
from atoll.node.daemon.assets.fetching import verify_whole
from atoll.node.daemon.assets.later_payloads import LaterPayloads
from atoll.node.daemon.assets.run_files import RoundFiles
from atoll.node.daemon.assets.run_text import RunText
from atoll.node.daemon.audits.auditor import Auditor
from atoll.node.daemon.audits.newcomer_weights import Weigh
from atoll.node.daemon.audits.weighing import Weighing, build_weighing
from atoll.node.daemon.certificates.history import LedgerHistory
from atoll.node.daemon.consensus import machine as finality_machine
from atoll.node.daemon.consensus.chains.chain_exit import ChainExit
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex, ContributionSets
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.coordinator.evaluation import Evaluator
from atoll.node.daemon.coordinator.finalizer import Finalizer
from atoll.node.daemon.coordinator.leases import MemberLeases
from atoll.node.daemon.coordinator.local_training import LocalTraining
from atoll.node.daemon.coordinator.moment_transfer import MomentTransfer
from atoll.node.daemon.coordinator.newcomers import NewcomerWatch
from atoll.node.daemon.coordinator.payload_fetcher import PayloadFetcher
from atoll.node.daemon.core.interfaces import (
    Network,
    NoReduction,
    RoundReducer,
    RunContext,
    SlicedSets,
    WorkerProcess,
)
from atoll.node.daemon.core.runtime import EventQueue, FaultGuard, Machines, WorkerClient
from atoll.node.daemon.experts.expert_assignment import ExpertAssignment
from atoll.node.daemon.member_standing import MemberStandings
from atoll.node.daemon.reduction.coordinator import ReductionCoordinator
from atoll.node.daemon.removal.other_chains import OtherChains
from atoll.node.daemon.removal.removals import Removals
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds.state import RoundConfig, config_of
from atoll.node.daemon.rounds.trials import Trials
from atoll.node.runs.capacity.open_rounds import ANY_DISK, OpenRounds
from atoll.protocols.audits.shown_work import first_tally
from atoll.protocols.ids import Digest, Round
from atoll.protocols.local.contribution_forms import PayloadRecord, legal_size, verification_of
from atoll.protocols.local.worker_messages import VerifyReply


class _Common(NamedTuple):
    """What most parts need."""

    context: RunContext
    net: Network
    spool: Path
    queue: EventQueue
    machines: Machines
    guard: FaultGuard
    worker: WorkerClient


class _Training(NamedTuple):
    assignment: ExpertAssignment
    moments: MomentTransfer
    leases: MemberLeases
    training: LocalTraining
    removals: Removals


def build_driver(
    context: RunContext,
    net: Network,
    worker_process: WorkerProcess,
    spool: Path,
    *,
    text: RunText | None = None,
    work: Work = TRAINS,
    room: int | None = None,
    rng: random.Random | None = None,
    history: LedgerHistory | None = None,
    open_rounds: OpenRounds = ANY_DISK,
) -> Driver:
    """Return the driver of one node in one run.

    `text`: the run's text, by default without a limit of the disk. `work`: by default it trains. `room`: most
    experts of each layer to train; None: any number. `rng` chooses what is opened and audited; by default nobody
    can foresee it. `history`: what stands for old records; None: all are here. `open_rounds`: how many may be.
    """
    config = config_of(context.spec, context.me, work.instead, has_worker=work.has_model, open_rounds=open_rounds)
    common = _build_common(context, net, worker_process, spool, config)
    text, rng = text or RunText(context, net), rng or random.SystemRandom()
    contributions = ContributionIndex(context.me, payloads := _build_payloads(common))
    reducer: ReductionCoordinator | NoReduction = NoReduction()
    if context.spec.reduce and work.has_model:
        reducer = ReductionCoordinator(
            **common._asdict(),
            fetcher=payloads,
            contributions=contributions,
            applied=lambda: finalizer.applied,
            on_rows=lambda: finalizer.step(),
            rng=rng,
        )
    weighing = _build_weighing(common, contributions, rng, text, history, work)
    sets = _build_sets(common, contributions, payloads, reducer, weighing.weigh, lambda: finalizer.applied)
    evaluator = _build_evaluator(common, work, weighing)
    finalizer = _build_finalizer(common, sets, weighing, evaluator)
    driver = Driver(
        context=context,
        net=net,
        queue=common.queue,
        machines=common.machines,
        guard=common.guard,
        worker=common.worker,
        contributions=contributions,
        sets=sets,
        reducer=reducer,
        finalizer=finalizer,
        **_build_training(common, contributions, finalizer, reducer, weighing.auditor, room, text)._asdict(),
        on_set=weighing.on_set,
        newcomers=NewcomerWatch(context=context, net=net, machines=common.machines, contributions=contributions),
        evaluator=evaluator,
        standings=_build_standings(common, weighing, reducer),
        history=history,
        chain_exit=ChainExit(guard=common.guard, now=context.now, event=partial(context.log.event, "other_chain")),
    )
    payloads.subscribe(driver.on_payload_resolved)
    payloads.subscribe(lambda _: finalizer.step())
    return driver


def _build_common(
    context: RunContext, net: Network, worker_process: WorkerProcess, spool: Path, config: RoundConfig
) -> _Common:
    guard, spec = FaultGuard(net, context.log, context.now), context.spec
    machines = Machines(
        round_machine.begin(config),
        finality_machine.begin(
            spec.id,
            context.me,
            spec.outer.rounds,
            spec.owner,
            lease_s=spec.pace.lease_s,
            tally=first_tally(spec),
            excise_rounds=spec.pace.excise_rounds or 0,
            summary_every=spec.history.every if spec.history else 0,
        ),
    )
    return _Common(
        context=context,
        net=net,
        spool=spool,
        queue=EventQueue(),
        machines=machines,
        guard=guard,
        worker=WorkerClient(worker_process, guard),
    )


def _build_weighing(
    common: _Common,
    contributions: ContributionIndex,
    rng: random.Random,
    text: RunText,
    history: LedgerHistory | None,
    work: Work,
) -> Weighing:
    return build_weighing(
        context=common.context,
        net=common.net,
        queue=common.queue,
        machines=common.machines,
        worker=common.worker,
        contributions=contributions,
        prepare=text.prepare_audit,
        rng=rng,
        work=work,
        summary=history.summary if history is not None else None,
    )


def _build_finalizer(
    common: _Common, sets: ContributionSets, weighing: Weighing, evaluator: Evaluator
) -> Finalizer:
    def on_applied(number: Round, state: Digest) -> None:
        weighing.on_applied(number)
        evaluator.on_final(number, state)

    has_model = evaluator.work.has_model
    return Finalizer(**common._asdict(), sets=sets, has_model=has_model, on_applied=on_applied)


def _build_standings(common: _Common, weighing: Weighing, reducer: RoundReducer) -> MemberStandings:
    return MemberStandings(
        me=common.context.me,
        finality=lambda: common.machines.finality,
        auditor=weighing.auditor,
        for_others=weighing.for_others,
        share_of=weighing.share_of,
        distrusted=reducer.distrusted if isinstance(reducer, ReductionCoordinator) else dict,
    )


def _build_evaluator(common: _Common, work: Work, weighing: Weighing) -> Evaluator:
    return Evaluator(
        on_step=weighing.step,
        context=common.context,
        net=common.net,
        worker=common.worker,
        start_task=common.queue.start_task,
        is_newest=lambda number: number >= common.machines.finality.last_final,
        is_paused=lambda: bool(common.machines.round.resting or common.machines.round.held),
        work=work,
    )


def _build_sets(
    common: _Common,
    contributions: ContributionIndex,
    payloads: PayloadFetcher,
    slices: SlicedSets,
    weigh: Weigh,
    applied: Callable[[], Round],
) -> ContributionSets:
    return ContributionSets(
        context=common.context,
        blobs=common.net,
        index=contributions,
        payloads=payloads,
        slices=slices,
        worker=common.worker,
        guard=common.guard,
        applied=applied,
        weigh=weigh,
    )


def _build_payloads(common: _Common) -> PayloadFetcher:
    async def verify(path: Path, record: PayloadRecord) -> None:
        asked = verification_of(path, record)
        await verify_whole(common.net, record.payload, lambda: common.worker.ask(asked, VerifyReply))

    return PayloadFetcher(
        blobs=common.net,
        size_of=lambda record: legal_size(common.context.spec, record),
        verify=verify,
        start_task=common.queue.start_task,
        post=common.queue.post,
        on_fault=common.guard.blame,
        on_disk_fault=common.guard.on_disk_fault,
        bringer_of=common.net.bringer,
        is_known=lambda peer: common.machines.finality.last_final < 0 or common.net.is_accepted(peer),
        pushed=common.net.take_pushed,
        waits=LaterPayloads(
            context=common.context,
            start_task=common.queue.start_task,
            leases=common.net.leases,
            machines=common.machines,
        ),
    )


def _build_training(
    common: _Common,
    contributions: ContributionIndex,
    finalizer: Finalizer,
    reducer: RoundReducer,
    auditor: Auditor | None,
    room: int | None,
    text: RunText,
) -> _Training:
    context, net = common.context, common.net
    assignment = ExpertAssignment(context.spec, context.me, net, room)
    moments = MomentTransfer(
        context=context,
        net=net,
        worker=common.worker,
        guard=common.guard,
        assignment=assignment,
        round_now=lambda: common.machines.round.round,
        start_task=common.queue.start_task,
    )
    removals = Removals(
        context=context,
        net=net,
        machines=common.machines,
        guard=common.guard,
        reducer=reducer,
        is_synced=lambda: finalizer.is_synced,
        are_correctable=finalizer.sets.are_correctable,
        apart=OtherChains(common.machines, context.now),
    )
    leases = MemberLeases(
        context=context,
        net=net,
        assignment=assignment,
        feed_round=common.machines.feed_round,
        offer=lambda: finalizer.offer,
        applied=lambda: finalizer.applied,
        tokens_per_s=lambda: training.tokens_per_s,
        loss=lambda: training.loss,
        round_s=lambda: training.starts.round_s,
        refused=lambda: common.guard.trouble,
        trials=Trials(net.block_of),
        is_excluded=removals.is_excluded,
    )
    training = LocalTraining(
        context=context,
        net=net,
        machines=common.machines,
        worker=common.worker,
        guard=common.guard,
        contributions=contributions,
        assignment=assignment,
        moments=moments,
        leases=leases,
        assets=RoundFiles(context=context, net=net, text=text, start_task=common.queue.start_task),
        verdicts=auditor.verdicts if auditor else lambda: None,
        applied=lambda: finalizer.applied,
        is_reduced=reducer.is_reduced,
    )
    return _Training(assignment, moments, leases, training, removals)
