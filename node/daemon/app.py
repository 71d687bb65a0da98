"""The daemon: `node start` in three phases. A plan is read once, the parts are built from it, then they run.

A node that must follow another chain of its run ends what belongs to the chain, and begins it anew as at the
start: its connections, its ledger and the worker's process go on (node/daemon/chain/).

The end is one ordered script, `Daemon._shut_down`: the worker saves and exits, then driver, network and control
socket stop, and the host at last. A second signal ends at once; kill −9 loses at most the round at hand.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from atoll.node.daemon.assets.base_weights import fetch_base
from atoll.node.daemon.assets.moments import fetch_moments
from atoll.node.daemon.assets.tokenizer import fetch_tokenizer
from atoll.node.daemon.build import NodeParts, build
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.leaving.hand_over import begin_hand_over
from atoll.node.daemon.leaving.neighbours import SwarmNeighbours
from atoll.node.daemon.status import StopDaemon
from atoll.node.ipc.chain_mark import news_of
from atoll.node.ipc.worker_pipe import EarlyWorker
from atoll.p2p.system.c_heap import FreePages
from atoll.p2p.system.garbage import settle_garbage
from atoll.p2p.system.interned_names import settle_interned_names
from atoll.protocols.errors import AtollError, first_fault
from atoll.protocols.ids import Round
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.moments import files_for

log = logging.getLogger(__name__)

WORKER_S = 30.0
"""Deadline of the worker's end: it is asked to save and exit, and killed after 20 s; at once while it loads."""
PART_S = 5.0
"""Deadline of the end of every other part."""
SHARDS_ASKED = 32
"""Most shards of a packed text about which a leaving node asks the others."""
SETTLE_S = 10.0
"""After a change of the chain the collector waits for so long: it holds up the loop, and others wait for us."""


BuildParts: TypeAlias = Callable[[JoinPlan, StopDaemon, Callable[[Round | None], None]], NodeParts]
OF_CHAIN = "worker", "goodput", "carry", "driver", "garbage"
"""Tasks that end when the node changes its chain, in this order: what they report to ends after them."""


class Daemon:
    """One node in one run. The caller holds the home's lock, and reads the plan."""

    def __init__(
        self,
        plan: JoinPlan,
        build_parts: BuildParts = build,
        *,
        report: Callable[[str], None] = lambda line: None,
        worker: EarlyWorker | None = None,
    ) -> None:
        """Build the parts. Raises what `build` raises.

        `report` gets lines that the user must read. `worker`: what may have begun already; the caller ends it.
        """
        self._plan = plan
        self._worker = worker or EarlyWorker()
        self._report = report
        self._stop = asyncio.Event()
        self._finish = asyncio.Event()
        self._outranked = asyncio.Event()
        self._parts = build_parts(plan, self.stop, self.leave_chain)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fault: AtollError | None = None
        self._is_told_to_stop = False
        """The newest end in the journal is "stopping"."""

    def stop(self, *, finish: bool = False) -> None:
        """End in good order; with `finish`, after the round at hand is closed. Idempotent."""
        if finish:
            self._finish.set()
        else:
            self._stop.set()

    def leave_chain(self, first: Round | None) -> None:
        """Begin the chain anew: on another one, for which the state is marked, and which decides from `first` on.

        None: on the same chain, with a summary that the ledger has now.
        """
        if first is not None:
            log.warning("another part of the run decides from round %d on; this node joins it", first)
            self._report(news_of(self._plan.home.run(self._plan.run.spec.id), first))
        self._outranked.set()

    async def run(self, on_up: Callable[[], None] = lambda: None) -> None:
        """Work until stopped; `on_up` is called when all parts run.

        Raises the AtollError that this machine or its user must repair, after an end in good order.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._begin(group, "start-up", self._start_parts(group, on_up))
                self._begin(group, "finish", self._stop_after_round())
                await self._stop.wait()
                await self._shut_down()
        except Exception as bug:  # in some part; the group ended without that order
            self._parts.log.event("crashed", error=f"{bug!r:.500}")
            log.critical("a bug ends this node", exc_info=bug)
            raise
        finally:
            self._parts.log.close()
        if self._fault is not None:
            raise self._fault

    async def _start_parts(self, group: asyncio.TaskGroup, on_up: Callable[[], None]) -> None:
        """Start each part as soon as those that it needs are ready, and what belongs to a chain for each chain."""
        parts = self._parts
        if self._plan.config.work.has_model:
            # Its imports take longer than all that comes before it is needed.
            trainer = parts.chain.trainer
            await trainer.prepare(await self._worker.take(trainer.log_path))
        await self._plan.host.start()
        self._begin(group, "host", self._plan.host.watch())
        await self._begin_ready(group, "network", parts.swarm.serve)
        await self._begin_ready(group, "control", parts.control.serve)
        self._begin(group, "web", parts.web.serve())
        self._begin(group, "loggers", parts.loggers.serve())
        self._begin(group, "heap", FreePages(asyncio.get_running_loop().time).serve())
        if parts.samples is not None:
            self._begin(group, "sample", parts.samples.serve())
        await self._begin_ready(group, "guest", parts.guest.serve)
        await self._begin_chain(group)
        settle_garbage()
        settle_interned_names()
        on_up()
        while True:
            await self._outranked.wait()
            if self._stop.is_set() or self._finish.is_set():  # the next start begins the chain anew
                self._stop.set()
                return
            await self._end_chain()
            await self._begin_chain(group)
            self._begin(group, "garbage", _settle_later())

    async def _begin_chain(self, group: asyncio.TaskGroup) -> None:
        """Replay the ledger and begin to work, on the chain that it says."""
        chain, net = self._parts.chain, self._parts.net
        await self._begin_ready(group, "driver", chain.driver.serve)
        self._begin(group, "carry", net.carry(chain.driver, self._plan.run.spec.pace.lease_s))
        self._begin(group, "goodput", chain.goodput.serve())
        if self._plan.config.work.has_model:
            self._begin(group, "worker", self._serve_worker())

    async def _end_chain(self) -> None:
        """End what belongs to the chain, all of it: no two drivers may ever write into one feed."""
        parts = self._parts
        parts.chain.trainer.keep()
        for task in [self._tasks[name] for name in OF_CHAIN if name in self._tasks]:
            task.cancel()
            await asyncio.wait((task,))  # without a deadline
        self._outranked.clear()
        parts.chain.change(parts.guest.verdict.reason)

    async def _stop_after_round(self) -> None:
        await self._finish.wait()
        self._parts.chain.driver.pause("stopping after this round")
        await self._parts.chain.driver.wait_idle()
        self._stop.set()

    async def _shut_down(self) -> None:
        """End the parts in order. The log names a part that misses its deadline, and the next one ends."""
        how, facts = ("failed", {"error": self._fault.line()}) if self._fault else ("stopping", {})
        self._parts.log.event(how, **facts)
        self._is_told_to_stop = self._fault is None
        await self._end("start-up", "finish", "host")
        await self._end_worker()
        await self._end(*OF_CHAIN)
        # The last entry of this node, so it comes after everything that writes has ended. After a fault there is
        # none: a node that finds its identity in use elsewhere must not write into that one's feed.
        if self._fault is None and not self._outranked.is_set() and self._parts.chain.driver.leave():
            await self._hand_over()
        await self._end("network", "addresses")
        await self._end("web", "control", "loggers", "heap", "sample", "guest")
        async with _deadline("the host", PART_S):
            await self._plan.host.stop()

    async def _hand_over(self) -> None:
        parts = self._parts
        neighbours = SwarmNeighbours(parts.swarm, parts.net)
        await begin_hand_over(parts.chain.driver, neighbours, parts.text.shards_here(SHARDS_ASKED)).run()

    def _begin(self, group: asyncio.TaskGroup, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = group.create_task(self._after_save(self._guarded(work)), name=name)

    async def _begin_ready(
        self, group: asyncio.TaskGroup, name: str, serve: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]
    ) -> None:
        """Begin a part and return when it calls back that it is ready."""
        ready = asyncio.Event()
        self._begin(group, name, serve(ready.set))
        await ready.wait()

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A part's fault ends the whole node in good order; a bug in it goes out."""
        try:
            await work
        except* AtollError as faults:
            self._fault = self._fault or first_fault(faults)
            if self._is_told_to_stop:  # that is not all
                self._is_told_to_stop = False
                self._parts.log.event("failed", error=self._fault.line())
            self._stop.set()

    async def _after_save(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a bug of a part out once the worker was asked to save: it ends the group, and the worker with it."""
        try:
            await work
        except Exception as bug:
            try:
                await self._end_worker()
            finally:
                raise bug  # also where this part is ended meanwhile

    async def _end_worker(self) -> None:
        async with _deadline("the worker", WORKER_S):
            await self._parts.chain.trainer.stop()

    async def _end(self, *names: str) -> None:
        """Cancel these parts at once and wait until they have ended. The deadline cuts their clean-up off."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        async with _deadline(", ".join(names), PART_S):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_worker(self) -> None:
        """Get the files that the worker starts with, then keep a worker alive."""
        spec, net, driver = self._plan.run.spec, self._parts.net, self._parts.chain.driver
        work = self._plan.config.work
        if spec.data.tokenizer_blob and work.reads_text:
            await fetch_tokenizer(spec, net, driver.on_behind)
        if spec.base and work.has_model:
            await fetch_base(spec, net, driver.on_behind)
        if spec.data.index is not None and (work.reads_text or work.seeds):
            await self._parts.text.begin(driver.on_behind)
        if self._plan.restored is None and work.trains:  # a restored state has moments of a later round
            files = files_for(spec.model, () if splits(spec) else range(spec.model.expert_count))
            await fetch_moments(spec, files, net, driver.on_behind, driver.has_begun)
        async with asyncio.TaskGroup() as group:
            if spec.data.index is not None and work.seeds:
                group.create_task(self._parts.text.hold_all(), name="packed text")
            await self._parts.chain.trainer.serve()


async def _settle_later() -> None:
    await asyncio.sleep(SETTLE_S)
    settle_garbage(anew=True)


@asynccontextmanager
async def _deadline(what: str, limit_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        log.warning("%s did not end within %.0f s", what, limit_s)
