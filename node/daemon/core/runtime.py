"""What all parts of the coordinator run on: one event queue, the two machines, a guard of faults, the worker.

Each part gets the pieces that it needs by name. No part knows the driver.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from atoll.node.daemon.consensus import machine as finality_machine
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.core.interfaces import Network, WorkerProcess
from atoll.node.daemon.rounds import machine as round_machine
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.state import Phase, RoundState
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.ipc.worker_process import WorkerDied, unless_needless
from atoll.p2p.system.disk_reports import DISK_RETRY_S, DiskReports
from atoll.protocols.errors import AtollError, DiskFault, PeerFault
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Body, Entry
from atoll.protocols.local.worker_messages import Ask

A = TypeVar("A")
log = logging.getLogger(__name__)

_BUSY = (Phase.TRAIN, Phase.COLLECT, Phase.FOLD)


class EventQueue:
    """Runs events one after the other, and owns every task that the coordinator starts."""

    def __init__(self) -> None:
        self._events: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    async def serve(self, begin: Callable[[], None]) -> None:
        """Call `begin`, then run posted events until cancelled. Ends all started tasks."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            begin()
            while True:
                self._wake.clear()
                while self._events:
                    self._events.popleft()()
                await self._wake.wait()

    def post(self, event: Callable[[], None]) -> None:
        """Run `event` after the events before it. Safe in any callback of the loop."""
        self._events.append(event)
        self._wake.set()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` as a task. The worker's death ends it without an error: WorkerReady comes again."""
        assert self._group is not None, "the queue is not served yet"
        self._group.create_task(unless_needless(work), name=name)


class Machines:
    """The states of the round machine and of the finality machine. An event's actions are performed at once."""

    def __init__(self, round_state: RoundState, finality: finality_types.FinalityState) -> None:
        self.round, self.finality = round_state, finality
        self.idle = asyncio.Event()
        """Set while no round of this node is under way."""
        self.idle.set()
        self.perform_round: Callable[[round_types.Action], None]
        self.perform_finality: Callable[[finality_types.Action], None]

    def feed_round(self, event: round_types.Event) -> None:
        """Step the round machine and perform its actions."""
        self.round, actions = round_machine.step(self.round, event)
        if self.round.phase in _BUSY:
            self.idle.clear()
        else:
            self.idle.set()
        for action in actions:
            self.perform_round(action)

    def feed_finality(self, event: finality_types.Event) -> None:
        """Step the finality machine and perform its actions."""
        self.finality, actions = finality_machine.step(self.finality, event)
        for action in actions:
            self.perform_finality(action)


class FaultGuard:
    """Network calls whose faults end here: peers are blamed, the disk's refusals are reported to the user."""

    def __init__(self, net: Network, round_log: RoundLog, now: Callable[[], float]) -> None:
        self._net, self._log, self._now = net, round_log, now
        self._reports = DiskReports()
        self.trouble = ""
        """What the disk refused last, until it works again."""
        self.refused: set[str] = set()  # entries of its own, or what its worker must save: it votes for nothing

    def publish(self, body: Body) -> Entry | None:
        """Append to the own feed. Returns None if the disk refuses."""
        try:
            entry = self._net.publish(body)
        except DiskFault as error:
            self.on_disk_fault(error, "entry")
            return None
        self.on_disk_success("entry")
        return entry

    def delete_blob(self, blob: Digest) -> None:
        """Delete a blob; a disk that refuses keeps the file."""
        self.does(partial(self._net.delete_blob, blob))

    def does(self, work: Callable[[], None]) -> bool:
        """Do what writes to the disk. False: it refuses, and this is reported."""
        try:
            work()
        except DiskFault as error:
            self.on_disk_fault(error)
            return False
        return True

    def blame(self, peer: PeerId, error: AtollError) -> None:
        """Record that a peer broke the protocol."""
        self._net.blame(peer, error)
        if isinstance(error, PeerFault):
            self._log.event("peer_fault", peer=peer, fault=error.line())

    def on_disk_fault(self, error: DiskFault, refused: str = "") -> None:
        """Report a refusal of the disk, each kind once a minute at most. The caller tries again."""
        self.refused |= {refused} - {""}
        self.trouble = f"{error.line()}; the node goes on by itself"
        if self._reports.is_due(str(error), self._now()):
            log.warning("%s", self.trouble)
            self._log.event("trouble", error=self.trouble)

    def on_disk_success(self, taken: str = "") -> None:
        """Report that the disk works again, if it did not."""
        self.trouble, self.refused = "", self.refused - {taken}
        if self._reports.end():
            self._log.event("trouble_over")


class WorkerClient:
    """Sends requests to the worker. Between two lives of the worker every request raises WorkerDied."""

    def __init__(self, worker: WorkerProcess, guard: FaultGuard) -> None:
        self._worker, self._guard = worker, guard
        self.is_ready = self.has_stepped = False
        self.asked = 0
        """Requests that it has not answered yet."""
        self.lives = 0
        """Workers that ended. A request to one of them is not repeated to the next."""

    @property
    def starting(self) -> int:
        """Signs of progress of its start; 0: it is ready, or was not asked to start yet."""
        return 0 if self.is_ready else self._worker.start_moves

    def on_started(self) -> None:
        """A fresh worker has its state: from now on it is asked."""
        self.is_ready = True

    def on_gone(self) -> None:
        """The worker died: requests raise WorkerDied until the next one has started."""
        self.is_ready = self.has_stepped = False
        self.lives += 1

    def check_life(self, life: int) -> None:
        """Raise WorkerDied if the worker of that life is gone."""
        if life != self.lives:
            raise WorkerDied("the worker that was asked is gone")

    async def ask(self, ask: Ask, kind: type[A]) -> A:
        """Return the worker's reply. Raises WorkerDied, or the fault that the worker named."""
        if not self.is_ready:
            raise WorkerDied("the worker is not running; it is being started")
        self.asked += 1
        try:
            return await self._worker.ask(ask, kind)
        finally:
            self.asked -= 1

    async def ask_until_saved(self, ask: Ask, kind: type[A], check_need: Callable[[], None] | None = None) -> A:
        """Repeat what the disk refused, unless `check_need` raises. Raises WorkerDied, or the worker's fault."""
        life = self.lives
        while True:
            try:
                answer = await self.ask(ask, kind)
            except DiskFault as error:
                self._guard.on_disk_fault(error, "work")
                await asyncio.sleep(DISK_RETRY_S)
                self.check_life(life)
                if check_need is not None:
                    check_need()
            else:
                self._guard.on_disk_success("work")
                return answer
