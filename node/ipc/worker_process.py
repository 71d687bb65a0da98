"""The daemon's side of the worker: spawn it, ask it, and start it again when it dies.

The worker is a spawned child, never a fork. It dies with the daemon: its stdin ends, and on Linux the
kernel kills it. When it dies by itself (out of memory, a CUDA error), pending asks raise WorkerDied, and
`on_started` tells the driver what the fresh one found on disk.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.node.config.devices import devices_of
from atoll.node.ipc.start_clock import StartClock
from atoll.node.ipc.start_moves import StartMoves, cpu_seconds
from atoll.node.ipc.worker_pipe import WORKER, WorkerPipe, spawn
from atoll.p2p.system.child_processes import kernel_kills
from atoll.p2p.system.waiting import backoff_s
from atoll.protocols import errors
from atoll.protocols.local import worker_messages
from atoll.protocols.local.progress import WorkProgress
from atoll.protocols.local.time_spent import TimeSpent

A = TypeVar("A")
log = logging.getLogger(__name__)

START_S = 1800.0
"""Longest start of a worker: it imports torch and builds the model, perhaps on a slow, busy machine."""
START_STILL_S = 120.0
"""A worker whose start makes no progress for so long is ended, and started again."""
START_LOOK_S = 5.0
"""Time between two looks at a start."""
REFUSED_S = 2.0
"""A process that the system refused is tried again so much later."""
STOP_S = 20.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
GIVE_UP_AFTER = 5
"""Deaths in a row without a trained round or an hour of life after which the worker is not started again."""
HEALTHY_S = 3600.0
REPORT_S = 1.0
"""A worker that was silent for so long is asked how it spends its time."""
LOG_TAIL_BYTES = 4096
START_TIMES = "start_times"
"""Beside the worker's log: how long the phases of its newest start took here."""
DIED = "the worker died"
OUT_OF_MEMORY = "the kernel ended the worker for lack of memory"
STOOD_STILL = "the worker stood still while it started"
MORE_MEMORY = (
    'set recompute = "on" and micro_batch = 1 in config.toml, end other programs, or join a smaller run: '
    "see atoll doctor --fit"
)


class WorkerDied(errors.LocalFault):
    """The worker process ended while a request was pending."""


class StartStoodStill(WorkerDied):
    """A start made no progress for too long, or has no end."""


@dataclass(frozen=True, slots=True)
class TrainerStatistics:
    """Figures of the worker process."""

    pid: int
    restarts: int


@dataclass
class Trainer:
    """Owns the worker process. `serve` runs it; `ask` talks to it."""

    start: worker_messages.StartRequest
    log_path: Path
    on_started: Callable[[worker_messages.StartReply], Awaitable[None]]
    """This and `on_gone` bracket each life of the worker: only between them `ask` works."""
    on_progress: Callable[[worker_messages.TrainProgress], None]
    on_gone: Callable[[str], None] = lambda _: None
    """Given why, in some words."""
    on_spent: Callable[[TimeSpent], None] = lambda _: None
    """Given the worker's account of time with every reply, before the answer is delivered, and an empty one when
    its process begins."""
    on_unsaved: Callable[[str], None] = lambda _: None
    """Given why the worker that was told to stop did not save all that it had."""
    command: tuple[str, ...] = WORKER
    nice: int = 0
    """Added to the worker's niceness; its further processes and threads inherit it."""
    _replied_at: float = 0.0
    _pipe: WorkerPipe | None = None
    _log_start: int = 0
    _prepared: tuple[WorkerPipe, int] | None = None
    """A process that `prepare` began or `keep` kept, until `serve` asks it to start, and where its log begins."""
    _pending: dict[int, asyncio.Future[worker_messages.Answer]] = field(default_factory=dict)
    _answers_since: int = 0
    """Replies to asks up to this one are for the chain before."""
    _asked_anew: int = 0
    """Number of the Start that `restart` sent; 0: none."""
    _restarts: int = 0
    _deaths_in_a_row: int = 0
    _why: str = DIED
    """Of the newest death."""
    _kernel_kills: int = 0
    """As of the last look, about a second ago."""
    _trained: int = -1
    _saved: int = -1
    """The newest rounds of this life that the worker trained and that it saved."""
    _refusal: str = ""
    """Why there is no process now: the system gives none."""
    _is_started: bool = False
    _stopping: bool = False
    _clock: StartClock = field(init=False)
    _moves: StartMoves = field(default_factory=StartMoves)

    def __post_init__(self) -> None:
        self._clock = StartClock(self.log_path.with_name(START_TIMES), time.monotonic)

    @property
    def is_stopping(self) -> bool:
        """Whether the worker is to end for good."""
        return self._stopping

    def starting(self) -> WorkProgress | None:
        """How far the worker's start is; None while none is under way."""
        return self._clock.progress()

    @property
    def start_moves(self) -> int:
        """Signs of progress of the worker's starts; 0: none was asked to start yet."""
        return self._moves.count

    def statistics(self) -> TrainerStatistics:
        """The worker's process id and restarts."""
        pid = self._pipe.process.pid if self._pipe else 0
        return TrainerStatistics(pid, self._restarts)

    @property
    def trouble(self) -> str:
        """Why the worker does not stay; empty: it does.

        If the kernel ended it last: what the user must set, until a round is saved. If its start stood still: that
        it did, until a start is whole.
        """
        if self._refusal:
            return self._refusal
        if self._why == STOOD_STILL and not self._is_started:
            return f"{STOOD_STILL} ({self._deaths_in_a_row} of {GIVE_UP_AFTER} times): see {self.log_path}"
        is_short = self._why == OUT_OF_MEMORY and self._deaths_in_a_row > 0
        return f"{OUT_OF_MEMORY}: {MORE_MEMORY}" if is_short else ""

    async def prepare(self, begun: tuple[WorkerPipe, int] | None = None) -> None:
        """Begin the process that `serve` will ask first: it imports torch while the node's other parts start.

        `begun`: one that began before this trainer, and where its log begins. `stop` ends it. Raises DiskFault.
        """
        if begun is not None:
            self._note_begun()
        self._prepared = begun or await self._spawn()
        self._pipe = self._prepared[0]

    async def serve(self) -> None:
        """Run a worker, and restart it when it dies, until `stop`. Raises LocalFault when it dies too often."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            began = loop.time()
            await self._run_once()
            if self._stopping:
                return
            self._restarts += 1
            self._deaths_in_a_row = 1 if loop.time() - began > HEALTHY_S else self._deaths_in_a_row + 1
            if self._deaths_in_a_row >= GIVE_UP_AFTER:
                raise errors.LocalFault(
                    f"{self._why} {self._deaths_in_a_row} times in a row",
                    hint=MORE_MEMORY if self._why == OUT_OF_MEMORY else f"its last words are in {self.log_path}",
                )
            if self._why == OUT_OF_MEMORY and self._deaths_in_a_row > 1:  # once: another program may have taken it
                self.start = msgspec.structs.replace(self.start, micro_batch=1, recompute=True)
            await asyncio.sleep(backoff_s(self._deaths_in_a_row, first_s=FIRST_BACKOFF_S, max_s=MAX_BACKOFF_S))

    async def ask(self, ask: worker_messages.Ask, kind: type[A]) -> A:
        """The answer. Raises WorkerDied (it is not there, or died), or the fault that the worker named."""
        if not self._is_started:
            raise WorkerDied("the worker is not running")
        answer = await self._ask(ask, kind)
        if isinstance(answer, worker_messages.TrainReply):
            self._trained = answer.pending.round
        if isinstance(ask, worker_messages.SaveRequest):
            self._saved = ask.round
            self._deaths_in_a_row = 0
        return answer

    async def _ask(self, ask: worker_messages.Ask, kind: type[A]) -> A:
        if self._pipe is None:
            raise WorkerDied("the worker is not running")
        try:
            number = self._pipe.write(ask)
        except ConnectionError as error:
            raise WorkerDied(f"the worker is ending: {error}") from error
        return await self._reply_to(number, kind)

    async def _reply_to(self, number: int, kind: type[A]) -> A:
        future: asyncio.Future[worker_messages.Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            answer = await future
        finally:
            self._pending.pop(number, None)
        if isinstance(answer, worker_messages.FailureReply):
            raise _fault(answer)
        if not isinstance(answer, kind):
            raise errors.LocalFault(f"the worker answered {type(answer).__name__}, not {kind.__name__}")
        return answer

    async def stop(self) -> None:
        """Ask the worker to save and exit; kill it when it does not, or has nothing to save yet. Idempotent."""
        self._stopping = True
        if self._pipe is None or not self._pipe.is_alive:
            return
        process = self._pipe.process
        if self._is_started:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._ask(worker_messages.StopRequest(), worker_messages.StopReply)
                    self._saved = self._trained
                    await process.wait()
            except WorkerDied as died:
                self._tell_unsaved(died.line())
            except errors.AtollError as error:
                self.on_unsaved(error.line())
            except TimeoutError:
                self._tell_unsaved(f"the worker did not save within {STOP_S:.0f} s")
        else:
            self._tell_unsaved("the worker had not started anew")  # one that was kept over a change of chain
        if process.returncode is None:
            process.kill()
            await process.wait()

    def _tell_unsaved(self, why: str) -> None:
        """Report a round that is lost. One that dies or is busy may have saved all it had."""
        if self._trained > self._saved:
            self.on_unsaved(why)

    def keep(self) -> None:
        """Let the worker live on when `serve` is cancelled: the next `serve` asks it to start anew.

        That Start saves what is not saved yet. One that has not started yet ends, and the next `serve` begins one.
        """
        # Those of several devices begin anew: their other processes belong to the session.
        if self._pipe is not None and self._is_started and len(devices_of(self.start.device)) == 1:
            self._prepared = self._pipe, self._log_start

    def restart(self) -> None:
        """Ask a worker that lives on to start anew now: it does so while its node reads the ledger again.

        `serve` takes the answer. No request may be under way: it would be one to the new session.
        """
        if self._prepared is not None and self._prepared[0].asked:  # one that just loads may lack files yet
            with contextlib.suppress(ConnectionError):  # `serve` sees that it is gone
                self._asked_anew = self._prepared[0].write(self.start)

    async def _run_once(self) -> None:
        begun = await self._begun()
        if begun is None:
            return
        (given, self._log_start), self._prepared = begun, None
        asked, self._asked_anew = self._asked_anew, 0
        self._pipe, self._answers_since = given, asked - 1 if asked else given.asked
        self._kernel_kills = kernel_kills()
        try:
            if self._stopping:
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(self._announce(given, asked))  # before an answer to `restart` is read
                group.create_task(self._read(given))
                group.create_task(self._watch_start(given))
        except* WorkerDied as died:
            if not self._stopping:
                stood_still = isinstance(died.exceptions[0], StartStoodStill)
                await given.kill()  # only then it is known how it ended
                self._trained = self._saved  # what it had not saved is gone, and trained again
                is_killed = not stood_still and given.was_killed and kernel_kills() > self._kernel_kills
                self._why = STOOD_STILL if stood_still else OUT_OF_MEMORY if is_killed else DIED
                if is_killed:
                    log.warning("%s: %s", OUT_OF_MEMORY, MORE_MEMORY)
                log.info(
                    "%s; its last words: %s", died.exceptions[0], _last_log_line(self.log_path, self._log_start)
                )
        finally:
            self._pipe = kept = self._prepared[0] if self._prepared is not None else None
            self._is_started = False
            self._clock.end(is_whole=False)
            self._fail_pending()
            self.on_gone(self._why)
            if kept is not given:
                await given.kill()

    async def _begun(self) -> tuple[WorkerPipe, int] | None:
        """What was begun, or a fresh worker, however long the system refuses it; None if the worker is to end."""
        while self._prepared is None and not self._stopping:
            try:
                self._prepared, self._refusal = await self._spawn(), ""
            except errors.LocalFault as fault:  # no memory, process, descriptor or disk: others may free them
                if not self._refusal:
                    log.warning("%s", fault.line())
                self._refusal = fault.line()
                await asyncio.sleep(REFUSED_S)
        return self._prepared

    async def _spawn(self) -> tuple[WorkerPipe, int]:
        """A fresh worker, and where its log begins."""
        begun = await spawn(self.log_path, self.nice, self.command)
        self._note_begun()
        return begun

    def _note_begun(self) -> None:
        self.on_spent(TimeSpent())
        self._clock.begin()

    async def _announce(self, pipe: WorkerPipe, asked: int) -> None:
        was_kept, kind = pipe.asked > 0, worker_messages.StartReply
        self._clock.begin(is_loaded=was_kept)
        try:
            started = await (self._reply_to(asked, kind) if asked else self._ask(self.start, kind))
        except errors.DiskFault as error:
            if not self._restarts and not was_kept:
                raise
            self._deaths_in_a_row = 0  # a disk that filled up while we ran may have room again
            raise WorkerDied(error.line()) from error
        except (errors.ConfigError, errors.CorruptFault) as error:
            if not asked:
                raise
            raise WorkerDied(error.line()) from error  # `restart` asked before the run's files were looked at
        self._is_started, self._trained, self._saved = True, -1, -1
        self._clock.end(is_whole=True)
        await self.on_started(started)
        await self._poll_reports()

    async def _watch_start(self, pipe: WorkerPipe) -> None:
        """Return once the worker has started. Raises StartStoodStill."""
        moves = self._moves
        moves.begin()
        while not self._is_started:
            moves.look(START_LOOK_S, cpu_seconds(pipe.process.pid))
            if moves.still_s >= START_STILL_S:
                raise StartStoodStill(f"its start made no progress for {moves.still_s:.0f} s")
            if moves.took_s >= START_S:
                raise StartStoodStill(f"it did not start within {moves.took_s:.0f} s")
            await asyncio.sleep(START_LOOK_S)

    async def _poll_reports(self) -> None:
        """Ask a silent worker for its account of time about once a second; one that trains sends it by itself."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REPORT_S)
            self._kernel_kills = kernel_kills()
            if loop.time() - self._replied_at >= REPORT_S / 2:
                await self._ask(worker_messages.ReportRequest(), worker_messages.ReportReply)

    async def _read(self, pipe: WorkerPipe) -> None:
        try:
            while True:
                self._deliver(await pipe.read())
        except (asyncio.IncompleteReadError, ConnectionError, errors.DecodeError) as error:
            raise WorkerDied(f"the worker ended: {error}") from error

    def _deliver(self, reply: worker_messages.ReplyEnvelope) -> None:
        if reply.id <= self._answers_since:
            return
        self._replied_at = asyncio.get_running_loop().time()
        self.on_spent(reply.spent)
        if isinstance(reply.answer, worker_messages.TrainProgress):
            self.on_progress(reply.answer)
            return
        if isinstance(reply.answer, worker_messages.StartProgress):
            self._clock.advance(reply.answer)
            self._moves.move()
            return
        future = self._pending.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply.answer)

    def _fail_pending(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WorkerDied("the worker process ended"))


def _fault(failed: worker_messages.FailureReply) -> errors.AtollError:
    kind = getattr(errors, failed.fault, errors.LocalFault)
    if not (isinstance(kind, type) and issubclass(kind, errors.AtollError)):
        kind = errors.LocalFault
    return kind(failed.message, hint=failed.hint)


def _last_log_line(path: Path, since: int) -> str:
    """The last line of the worker's log from that place on."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read(LOG_TAIL_BYTES).decode(errors="replace").split("\n")
    except OSError:  # somebody removed it, which is no reason to end
        return "none"
    return next((line for line in reversed(lines) if line.strip()), "none")


async def unless_needless(work: Coroutine[Any, Any, None]) -> None:
    """Await work that asks a worker; the worker's death, or another round, ends it without an error."""
    try:
        await work
    except (WorkerDied, errors.Superseded) as error:
        log.debug("given up: %s", error)
