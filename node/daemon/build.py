"""Phase 2 of `node start`: construct every part of the daemon from the plan. Nothing runs yet, and no torch."""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.node.config.devices import devices_of
from atoll.node.config.guest import read_guest
from atoll.node.daemon.assets.run_text import RunText
from atoll.node.daemon.assets.summary_fetch import begin_with_summary, fetcher_of
from atoll.node.daemon.chain.current_chain import CurrentChain
from atoll.node.daemon.control_server import ControlServer
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.host_factory import route_host
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.loggers.feed import LoggerFeed, loggers_of
from atoll.node.daemon.samples.choice import sampler_of
from atoll.node.daemon.samples.sampler import Sampler
from atoll.node.daemon.status import DaemonOperator, StopDaemon
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.measured import NodeMeasurements
from atoll.node.daemon.telemetry.page_source import PageSource
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.daemon.web.page_access import PageAccess
from atoll.node.daemon.web.page_control import PageControl
from atoll.node.daemon.web.server import WebServer, has_loopback, parse_listen_address
from atoll.node.daemon.web.site import Site
from atoll.node.guest.sensors import MachineFiles, MachineSensors
from atoll.node.guest.watch import GuestWatch
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
from atoll.protocols.errors import LocalFault, PeerFault
from atoll.protocols.ids import PeerId, Round

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What runs in a daemon. Who needs a part is given that part, never all of them."""

    swarm: Swarm
    net: SwarmNetwork
    log: RoundLog
    chain: CurrentChain
    text: RunText
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
    chain = CurrentChain(
        plan=plan, context=context, swarm=swarm, net=net, host=routed, text=text, on_other_chain=on_other_chain
    )
    if plan.run.spec.history:
        fetcher = fetcher_of(plan.run.spec, swarm, lambda: chain.driver.finality.last_final)
        net.bring_summary = lambda: begin_with_summary(fetcher, lambda: on_other_chain(None))
    web = WebServer(parse_listen_address(config.web), lambda request: site.answer(request), time.monotonic)
    loggers = loggers_of(config.loggers, folder / "loggers", plan.run.spec.name, log.rows)
    guest = GuestWatch(read_guest(config.guest), MachineSensors(MachineFiles()), chain.hold)
    samples = sampler_of(plan, log, lambda: chain.driver.view()) if config.sample_every_s else None
    access = PageAccess(time.monotonic, secrets.token_bytes, is_open=has_loopback(config.web))
    operator = DaemonOperator(
        plan=plan,
        log=log,
        host=routed,
        limited=limited,
        swarm=swarm,
        net=net,
        chain=chain,
        trainer=chain.trainer,
        goodput=chain.goodput,
        web=web,
        access=access,
        loggers=loggers,
        guest=guest,
        stop_daemon=stop,
    )
    measured = NodeMeasurements(plan, net, chain.goodput.durations, loggers.counts)
    site = Site(PageSource(plan, swarm.ledger, log, operator, samples), measured, PageControl(access, operator))
    control = ControlServer(plan.home.control_socket, plan.home.log, operator)
    log.listeners += chain.goodput.durations.on_event, loggers.on_event
    swarm.calls.on_answer, log.on_closed = chain.goodput.durations.round_trips.add, control.socket.remove
    return NodeParts(
        swarm=swarm,
        net=net,
        log=log,
        chain=chain,
        text=text,
        control=control,
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
