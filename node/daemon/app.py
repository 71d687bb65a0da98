"""The daemon: builds everything, runs it under one task group, and takes it down in order.

The end, in order: the worker saves and exits, then driver, network and control socket stop, and p2pd goes
with its host. A second signal ends at once; kill −9 loses at most the round at hand.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Callable

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.control_server import ControlServer
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.coordinator.run_moments import bring_moments
from atoll.node.daemon.coordinator.run_tokenizer import bring_tokenizer
from atoll.node.daemon.feed_recovery import marked
from atoll.node.daemon.host_factory import base_host, route_host
from atoll.node.daemon.rounds.types import Behind
from atoll.node.daemon.status import DaemonOperator
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.collector import GoodputCollector
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.daemon.web.listen_address import parse_listen_address
from atoll.node.daemon.web.server import WebServer
from atoll.node.daemon.web.site import Site
from atoll.node.ipc.worker_process import Trainer
from atoll.node.runs.capacity.free_resources import settled
from atoll.node.runs.invites import kept_invite, opening_entry
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_pipe import ChildOptions
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.limits.config import read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.swarm.run_fetch import serve_run
from atoll.p2p.swarm.swarm import Swarm, SwarmOptions
from atoll.p2p.system.atomic_files import make_folder
from atoll.p2p.system.key_file import load_or_create
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols import codec
from atoll.protocols.errors import AtollError, PeerFault, Unreachable
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.worker_messages import StartRequest
from atoll.protocols.run.moments import files_for
from atoll.protocols.run.run_spec import open_run

FINISH_POLL_S = 0.2
ADDRESSES_S = 2.0
"""Addresses in the status are refreshed so often."""


class _Stopped(Exception):
    """Ends the task group: the user asked for it."""


class Daemon:
    """One node in one run. The caller holds the home's lock."""

    def __init__(self, home: Home, config: NodeConfig, run_file: bytes) -> None:
        """Opens identity, ledger and log. Raises ConfigError, DiskFault, CorruptFault, DecodeError."""
        self.home, self.config = home, config
        self.spec = open_run(run_file)
        self.started_at = time.monotonic()
        self.identity = load_or_create(home.identity)
        folder = home.run(self.spec.id)
        make_folder(folder)
        me = self.identity.peer_id
        seeds = [parse_seed(seed) for seed in config.seeds]
        self.base = base_host(home, config, self.identity)
        self.limited = LimitedHost(self.base, read_limits(config.limits), home.month)
        self.host = route_host(self.limited, config, self.identity, self.spec.id, seeds, self._blame)
        options = SwarmOptions(run_file=run_file)
        serve_run(self.host, run_file)
        dht = Dht(self.identity, self._dht_options, rng=random.Random()) if config.dht else None
        gate = AdmissionGate(self.spec, me, time.time)
        self.swarm = Swarm(
            host=self.host,
            identity=self.identity,
            run=self.spec.id,
            home=folder,
            seeds=seeds,
            options=options,
            dht=dht,
            gate=gate,
        )
        self.log = RoundLog(folder, me, time.time)
        opening = opening_entry(self.spec, me, kept_invite(home, self.spec.id))
        self.net = SwarmNetwork(self.swarm, self.host, me, opening=opening, folder=folder)
        self.room, config = settled(self.spec, config, folder)
        self.driver = Driver(
            *(self.spec, me, self.net, self.log, folder / "spool", time.monotonic),
            eval_every=config.eval_every,
            room=self.room.experts if self.room else None,
        )
        start = StartRequest(
            *(codec.encode(self.spec), me, str(folder), config.data),
            *(config.threads, config.device, config.frozen, config.frozen_on_host),
            self._place(self.spec.data.tokenizer_blob),
            tuple(map(self._place, self.spec.start.moment_blobs if self.spec.start else ())),
            config.shard,
            config.exchange_on,
        )
        self.timekeeper = GoodputCollector(
            *(self.log, time.monotonic, lambda: self.driver.round, lambda: self.net.bytes_moved()[3])
        )
        self.trainer = Trainer(
            *(start, folder / "worker.log", self.driver.on_started, self.driver.on_progress),
            on_gone=self._on_worker_gone,
            on_spent=self.timekeeper.on_spent,
        )
        self.driver.trainer = self.trainer
        self.operator = DaemonOperator(self)
        self.web = WebServer(parse_listen_address(config.web), Site(self.operator).answer, time.monotonic)
        self.addresses: tuple[str, ...] = ()
        self._stop = asyncio.Event()
        self._finish_round = False

    def _place(self, blob: bytes) -> str:
        """Where the store keeps, or will keep, a file that travels with the run; empty for none."""
        return str(self.swarm.blobs.store.blob_path(Digest(blob))) if blob else ""

    async def run(self, on_up: Callable[[], None] = lambda: None) -> None:
        """Work until stopped. Raises the AtollError that this machine or its user must mend."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._start(group)
                on_up()
                await self._stop.wait()
                await self._wait_round()
                self.log.event("stopping")
                await self.trainer.stop()
                raise _Stopped
        except* _Stopped:
            pass
        except* AtollError as faults:
            fault = first_fault(faults)
            self.log.event("failed", error=fault.line())
            raise fault from faults
        finally:
            await self.trainer.stop()
            self.log.close()

    def stop(self, *, finish: bool = False) -> None:
        """End in good order; with `finish`, after the round at hand is closed. Idempotent."""
        self._finish_round = finish
        if finish:
            self.driver.pause("stopping after this round")
        self._stop.set()

    async def _start(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        up, answering = asyncio.Event(), asyncio.Event()
        group.create_task(self.swarm.serve(up.set), name="swarm")
        await up.wait()
        self.addresses = await self.host.addresses()
        control = ControlServer(self.home.control_socket, self.home.log, self.operator)
        group.create_task(control.serve(answering.set), name="control")
        await answering.wait()
        group.create_task(self.web.serve(), name="web")
        group.create_task(self._watch_addresses(), name="addresses")
        group.create_task(self.driver.serve(), name="driver")
        await asyncio.sleep(0)
        group.create_task(self.net.carry(self.driver), name="carry")
        group.create_task(self._serve_trainer(), name="trainer")
        group.create_task(self.timekeeper.serve(), name="timekeeper")

    async def _serve_trainer(self) -> None:
        await bring_tokenizer(self.spec, self.net, self._say)
        if marked(self.home.run(self.spec.id)) is None:  # what was restored has moments of a later round
            files = files_for(self.spec.model, () if splits(self.spec) else range(self.spec.model.expert_count))
            await bring_moments(self.spec, files, self.net, self._say, self.driver.has_begun)
        await self.trainer.serve()

    def _say(self, reason: str) -> None:
        """Why this node does not train yet."""
        driver = self.driver
        driver.post(lambda: driver.feed_round(Behind(reason, driver.now())))

    def _dht_options(self) -> ChildOptions:
        """The DHT's child speaks through our p2pd. Raises LocalFault while there is none."""
        assert isinstance(self.base, P2pdHost), "base_host refuses a DHT over anything else"
        return ChildOptions(control_socket=str(self.base.control_socket))

    def _blame(self, peer: PeerId, fault: PeerFault) -> None:
        self.swarm.blame(peer, fault)

    async def _watch_addresses(self) -> None:
        while True:
            with contextlib.suppress(Unreachable):  # p2pd restarts; the old ones come back
                self.addresses = await self.host.addresses()
            await asyncio.sleep(ADDRESSES_S)

    async def _wait_round(self) -> None:
        while self._finish_round and self.driver.is_busy():  # noqa: ASYNC110 - the machine has no waiters
            await asyncio.sleep(FINISH_POLL_S)

    def _on_worker_gone(self) -> None:
        self.timekeeper.on_worker_gone()
        self.driver.on_worker_gone()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            raise SystemExit(130)
        self.stop()


def first_fault(faults: BaseExceptionGroup[AtollError]) -> AtollError:
    """The first error of a group of groups."""
    inner: BaseException = faults
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    assert isinstance(inner, AtollError)
    return inner
