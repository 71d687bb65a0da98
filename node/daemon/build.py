"""Phase 2 of `node start`: construct every part of the daemon from the plan. Nothing runs yet, and no torch."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.node.config.guest import read_guest
from atoll.node.config.node_config import devices_of
from atoll.node.daemon.assets.run_text import RunText
from atoll.node.daemon.assets.summary_fetch import begin_with_summary, fetcher_of
from atoll.node.daemon.certificates.history import LedgerHistory, needs_all_records
from atoll.node.daemon.control_server import ControlServer
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.coordinator.interfaces import RunContext
from atoll.node.daemon.driver_factory import build_driver
from atoll.node.daemon.host_factory import route_host
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.loggers.feed import LoggerFeed, loggers_of
from atoll.node.daemon.pulls.swarm_pulls import begin_pulls
from atoll.node.daemon.samples.choice import sampler_of
from atoll.node.daemon.samples.sampler import Sampler
from atoll.node.daemon.status import DaemonOperator, StopDaemon
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.collector import GoodputCollector
from atoll.node.daemon.telemetry.measured import NodeMeasurements
from atoll.node.daemon.telemetry.page_source import PageSource
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.daemon.web.page_access import PageAccess
from atoll.node.daemon.web.page_control import PageControl
from atoll.node.daemon.web.server import WebServer, has_loopback, parse_listen_address
from atoll.node.daemon.web.site import Site
from atoll.node.guest.sensors import MachineFiles, MachineSensors
from atoll.node.guest.watch import GuestWatch
from atoll.node.ipc.worker_process import Trainer
from atoll.node.runs.capacity.free_resources import passes_of
from atoll.node.runs.capacity.open_rounds import open_rounds_of
from atoll.node.runs.given_invites import find_given
from atoll.node.runs.invites import opening_entry
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import Listing
from atoll.p2p.discovery.dht_role import choose_part
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.newcomers import NewcomerQuota
from atoll.p2p.ledger.shares import Quota
from atoll.p2p.limits.config import read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.nat.route_host import RouteHost
from atoll.p2p.swarm.announcements import DhtUse
from atoll.p2p.swarm.invite_fetch import serve_invites
from atoll.p2p.swarm.run_fetch import serve_run
from atoll.p2p.swarm.swarm import Swarm
from atoll.p2p.system.atomic_files import make_folder
from atoll.protocols import codec
from atoll.protocols.errors import LocalFault, PeerFault
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.local.worker_messages import StartRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What runs in a daemon. Who needs a part is given that part, never all of them."""

    swarm: Swarm
    net: SwarmNetwork
    log: RoundLog
    driver: Driver
    text: RunText
    trainer: Trainer
    goodput: GoodputCollector
    control: ControlServer
    web: WebServer
    loggers: LoggerFeed
    samples: Sampler | None
    """None where the user wants no sample texts."""
    guest: GuestWatch


def build(plan: JoinPlan, stop: StopDaemon, on_other_chain: Callable[[Round | None], None]) -> NodeParts:
    """Construct the parts; opens ledger and log. Raises DiskFault, CorruptFault, ConfigError, LocalFault.

    `on_other_chain` is called when the node must begin again on another chain of the run, or, with None, with a
    summary that its ledger has now.
    """
    folder = make_folder(plan.home.run(plan.run.spec.id))
    limited, routed, swarm = _build_network(plan, folder)
    me, config = plan.identity.peer_id, plan.config
    log = RoundLog(folder, me, time.time)
    for member in plan.members:
        swarm.discovery.learn(member.peer, member.maddrs, "dht")
    net = SwarmNetwork(swarm, routed, me, opening=opening_entry(plan.run.spec, me, plan.invite), folder=folder)
    context = RunContext(plan.run.spec, me, log, time.monotonic, len(devices_of(config.device)), name=config.name)
    copy = Path(config.data).expanduser() if config.data else None
    text = RunText(context, net, limit_bytes=config.shard_bytes, folder=copy)
    trainer, driver, goodput = _build_training(plan, context, swarm=swarm, net=net, text=text, host=routed)
    driver.on_other_chain = on_other_chain
    if plan.run.spec.history:
        fetcher = fetcher_of(plan.run.spec, swarm, lambda: driver.finality.last_final)
        net.bring_summary = lambda: begin_with_summary(fetcher, lambda: on_other_chain(None))
    web = WebServer(parse_listen_address(config.web), lambda request: site.answer(request), time.monotonic)
    loggers = loggers_of(config.loggers, folder / "loggers", plan.run.spec.name, log.rows)
    guest = GuestWatch(read_guest(config.guest), MachineSensors(MachineFiles()), driver.hold)
    samples = sampler_of(plan, log, driver.view) if config.sample_every_s else None
    access = PageAccess(time.monotonic, secrets.token_bytes, is_open=has_loopback(config.web))
    operator = DaemonOperator(
        plan=plan,
        log=log,
        host=routed,
        limited=limited,
        swarm=swarm,
        net=net,
        control=driver,
        trainer=trainer,
        goodput=goodput,
        web=web,
        access=access,
        loggers=loggers,
        guest=guest,
        stop_daemon=stop,
    )
    measured = NodeMeasurements(plan, net, goodput.durations, loggers.counts)
    site = Site(PageSource(plan, swarm.ledger, log, operator, samples), measured, PageControl(access, operator))
    log.listeners += goodput.durations.on_event, loggers.on_event
    swarm.calls.on_answer = goodput.durations.round_trips.add
    return NodeParts(
        swarm=swarm,
        net=net,
        log=log,
        driver=driver,
        text=text,
        trainer=trainer,
        goodput=goodput,
        control=ControlServer(plan.home.control_socket, plan.home.log, operator),
        web=web,
        loggers=loggers,
        samples=samples,
        guest=guest,
    )


def _build_network(plan: JoinPlan, folder: Path) -> tuple[LimitedHost, RouteHost, Swarm]:
    """The node's host under the user's limits, with routes through NATs, and the swarm of the run on it."""
    spec, config, identity = plan.run.spec, plan.config, plan.identity
    quota = Quota(config.ledger_bytes, config.ledger_author_bytes, config.ledger_round_bytes)
    seeds = [parse_seed(seed) for seed in config.seeds]

    def blame(peer: PeerId, fault: PeerFault) -> None:
        swarm.blame(peer, fault)

    limited = LimitedHost(plan.host.host, read_limits(config.limits), plan.home.month, is_started=True)
    routed = route_host(limited, config, identity, spec.id, seeds, blame)
    serve_run(routed, plan.run.data)

    async def find_invite(wanted: bytes) -> str:
        try:
            return await asyncio.to_thread(find_given, plan.home, spec.id, wanted, time.time())
        except LocalFault as error:
            logger.warning("an invite is asked for that cannot be read: %s", error.line())
            return ""

    serve_invites(routed, find_invite)
    swarm = Swarm(
        host=routed,
        identity=identity,
        run=spec.id,
        home=folder,
        seeds=seeds,
        dht=_dht_use(plan, routed),
        gate=AdmissionGate(spec, identity.peer_id, time.time),
        quota=quota,
        newcomers=NewcomerQuota(config.ledger_newcomers, config.ledger_newcomers_per_minute),
    )
    swarm.ledger.check_author(identity.peer_id)
    return limited, routed, swarm


def _dht_use(plan: JoinPlan, host: RouteHost) -> DhtUse:
    """A node of the DHT on `host`. A run is private unless everybody may join, or the user said otherwise."""
    config, spec, path = plan.config, plan.run.spec, plan.run.path
    is_public = spec.admission.mode == "open" if config.public is None else config.public
    bootstrap = [parse_seed(seed) for seed in config.dht_bootstrap]
    return DhtUse(
        dht=Dht(host, plan.identity, bootstrap, rng=random.Random()),
        part=lambda: choose_part(
            config.dht, host.survey.verdict.reach, is_public=is_public, has_bootstrap=bool(bootstrap)
        ),
        # The plan is stored before the parts are built, so a run that was fetched has its file by now.
        listing=Listing(plan.run.data, int(path.stat().st_mtime)) if is_public else None,
        is_owner=spec.owner == plan.identity.peer_id,
    )


def _build_training(
    plan: JoinPlan, context: RunContext, *, swarm: Swarm, net: SwarmNetwork, text: RunText, host: RouteHost
) -> tuple[Trainer, Driver, GoodputCollector]:
    """The worker's supervisor, the driver that asks the worker, and the account of the worker's time."""
    folder = plan.home.run(plan.run.spec.id)
    # The worker reports to parts that are made after it.
    trainer = Trainer(
        _start_request(plan, folder, swarm),
        folder / "worker.log",
        lambda started: driver.on_started(started),
        lambda progress: on_progress(progress),
        on_gone=lambda why: _on_worker_gone(goodput, driver, why),
        on_spent=lambda spent: goodput.on_spent(spent),
        nice=plan.config.guest.nice,
    )
    driver = build_driver(
        context,
        net,
        trainer,
        folder / "spool",
        text=text,
        work=plan.config.work,
        room=0 if not plan.config.work.trains else plan.room.experts if plan.room else None,
        history=LedgerHistory(
            swarm.ledger,
            keeps_all=plan.config.ledger_history == "all" or needs_all_records(plan.run.spec),
            spec=plan.run.spec if plan.run.spec.history else None,
        ),
        open_rounds=open_rounds_of(plan.run.spec, plan.config.open_rounds_bytes),
    )
    on_progress = begin_pulls(driver, swarm, host, folder / "pulls")
    goodput = GoodputCollector(
        context.log, time.monotonic, lambda: driver.round, lambda: net.bytes_moved().blob_contents_up
    )
    return trainer, driver, goodput


def _start_request(plan: JoinPlan, folder: Path, swarm: Swarm) -> StartRequest:
    """The worker's first message."""
    spec, config = plan.run.spec, plan.config

    def path_of(blob: bytes) -> str:
        """Where the store has, or will have, a file that travels with the run; empty for none."""
        return str(swarm.blobs.store.blob_path(Digest(blob))) if blob else ""

    micro_batch, recompute = passes_of(spec, config, plan.free, plan.room.experts if plan.room else None)
    return StartRequest(
        spec=codec.encode(spec),
        peer=plan.identity.peer_id,
        home=str(folder),
        data=config.data,
        threads=config.threads,
        device=config.device,
        frozen=config.frozen,
        frozen_on_host=config.frozen_on_host,
        tokenizer=path_of(spec.data.tokenizer_blob),
        moments=tuple(map(path_of, spec.start.moment_blobs if spec.start else ())),
        shard=config.shard,
        exchange_on=config.exchange_on,
        micro_batch=micro_batch,
        recompute=recompute,
        quantized=config.optimizer_states == "int8",
        base=path_of(spec.base or b""),
        average_rounds=config.average_rounds or 0,
        trains=config.work.trains,
        reads_text=config.work.reads_text,
        gpu_memory=config.guest.gpu_memory,
    )


def _on_worker_gone(goodput: GoodputCollector, driver: Driver, why: str) -> None:
    goodput.on_worker_gone()
    driver.on_worker_gone(why)
