"""The driver of the chain that a node is in, built anew on another chain, and the worker that goes on meanwhile.

Host, connections, ledger, registers and blobs are the same on every chain, so a node that changes its chain never
leaves its neighbours. What follows from the chain begins anew: rounds, votes, sets, and who counts in the ledger.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.node.daemon.assets.run_text import RunText
from atoll.node.daemon.certificates.history import LedgerHistory, needs_all_records
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.core.interfaces import RunContext
from atoll.node.daemon.driver_factory import build_driver
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.pulls.swarm_pulls import OnProgress, begin_pulls
from atoll.node.daemon.swarm_adapter import SwarmNetwork
from atoll.node.daemon.telemetry.collector import GoodputCollector
from atoll.node.ipc.chain_mark import ChainMark
from atoll.node.ipc.worker_pipe import WORKER_LOG
from atoll.node.ipc.worker_process import Trainer
from atoll.node.runs.capacity.free_resources import passes_of
from atoll.node.runs.capacity.open_rounds import open_rounds_of
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.interface import Host
from atoll.p2p.swarm.swarm import Swarm
from atoll.protocols import codec
from atoll.protocols.ids import Digest, Round
from atoll.protocols.local.worker_messages import StartRequest


@dataclass(slots=True, kw_only=True)
class CurrentChain:
    """Builds and holds the driver; holds the worker's supervisor, and the account of the worker's time."""

    plan: JoinPlan
    context: RunContext
    swarm: Swarm
    net: SwarmNetwork
    host: Host
    text: RunText
    on_other_chain: Callable[[Round | None], None]
    """See `ChainExit.begin_again`. None: the same chain, with a summary that the ledger has now."""
    driver: Driver = field(init=False)
    trainer: Trainer = field(init=False)
    goodput: GoodputCollector = field(init=False)
    _on_progress: OnProgress = field(init=False)

    def __post_init__(self) -> None:
        folder, net = self._folder, self.net
        self.trainer = Trainer(
            _start_request(self.plan, folder, self.swarm.blobs.store),
            folder / WORKER_LOG,
            lambda started: self.driver.on_started(started),
            lambda progress: self._on_progress(progress),
            on_gone=self._on_worker_gone,
            on_spent=lambda spent: self.goodput.on_spent(spent),
            on_unsaved=lambda why: self.context.log.event("not_saved", error=why),
            nice=self.plan.config.guest.nice,
        )
        self.goodput = GoodputCollector(
            self.context.log, time.monotonic, lambda: self.driver.round, lambda: net.bytes_moved().blob_contents_up
        )
        self._build()

    def hold(self, reason: str) -> None:
        """See `Driver.hold`."""
        self.driver.hold(reason)

    def change(self, held: str) -> None:
        """Begin anew, as another chain of the run is followed. What the driver did has ended; nothing runs yet.

        `held`: why the node must rest; empty: it need not.
        """
        self.net.forget_chain()
        self._build()
        self.trainer.restart()
        if held:
            self.hold(held)

    def _build(self) -> None:
        plan, spec, config = self.plan, self.plan.run.spec, self.plan.config
        self.driver = build_driver(
            self.context,
            self.net,
            self.trainer,
            self._folder / "spool",
            text=self.text,
            work=config.work,
            room=0 if not config.work.trains else plan.room.experts if plan.room else None,
            history=LedgerHistory(
                self.swarm.ledger,
                keeps_all=config.ledger_history == "all" or needs_all_records(spec),
                spec=spec if spec.history else None,
            ),
            open_rounds=open_rounds_of(spec, config.open_rounds_bytes),
        )
        mark, way_out = ChainMark(self._folder), self.driver.chain_exit
        way_out.mark, way_out.begin_again = mark, self.on_other_chain
        newest = self.context.log.newest_final()
        self.driver.finalizer.left_with = mark.keeps(newest.round if newest else None)
        self.net.listen(self.driver)
        self._on_progress = begin_pulls(self.driver, self.swarm, self.host, self._folder / "pulls")

    def _on_worker_gone(self, why: str) -> None:
        self.goodput.on_worker_gone()
        self.driver.on_worker_gone(why)

    @property
    def _folder(self) -> Path:
        return self.plan.home.run(self.plan.run.spec.id)


def _start_request(plan: JoinPlan, folder: Path, store: BlobStore) -> StartRequest:
    """The worker's first message."""
    spec, config = plan.run.spec, plan.config

    def path_of(blob: bytes) -> str:
        """Where the store has, or will have, a file that travels with the run; empty for none."""
        return str(store.blob_path(Digest(blob))) if blob else ""

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
