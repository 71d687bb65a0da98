"""The supervisor of the worker: real child processes, most of them a stand-in that speaks the pipe's protocol."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import uvloop

from atoll.node.ipc import worker_process as module
from atoll.node.ipc.worker_pipe import EarlyWorker, WorkerPipe
from atoll.node.ipc.worker_process import Trainer, WorkerDied
from atoll.node.runs.capacity.memory_model import Free
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DiskFault, LocalFault, Superseded
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.local.worker_messages import (
    EvaluateReply,
    EvaluateRequest,
    FinalizeReply,
    FinalizeRequest,
    FoldReply,
    FoldRequest,
    Member,
    SaveReply,
    SaveRequest,
    StartReply,
    StartRequest,
    TimeSpent,
    TrainProgress,
    TrainReply,
    TrainRequest,
    VerifyReply,
    VerifyRequest,
)
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import (
    SPEC_VERSION,
    CompressSpec,
    DataSpec,
    InnerSpec,
    OuterSpec,
    PaceSpec,
    RunSpec,
    Stage,
)
from tests.chaos.stopped import stop_process
from tests.waiting import HANGS_S, eventually

FREE = Free(1 << 30, 1 << 30)
STAND_IN = """
import sys, time
from pathlib import Path
from atoll.node.ipc.framing import Inbox, ReplyWriter
from atoll.protocols.local.worker_messages import (
    FailureReply, Pending, ReplyEnvelope, ReportReply, ReportRequest, SaveReply, SaveRequest,
    StartReply, StartRequest, StopReply, StopRequest, TimeSpent, TrainProgress, TrainReply,
    TrainRequest, VerifyReply, VerifyRequest,
)
from atoll.protocols.ids import Digest, Round

inbox, outbox, lives, starts, home = Inbox(0), ReplyWriter(1), Path(sys.argv[1]), 0, ""
with lives.open("a") as file:
    file.write("life\\n")
print("a last word", file=sys.stderr, flush=True)
while (request := inbox.receive()) is not None:
    ask, say = request.ask, lambda answer: outbox.send(ReplyEnvelope(request.id, answer, TimeSpent(wait_ns=7)))
    starts += isinstance(ask, StartRequest)
    home = ask.home if isinstance(ask, StartRequest) else home
    match ask:
        case StartRequest(home="filled") if starts == 2:
            say(FailureReply("DiskFault", "no space", ""))
        case StartRequest(home="damaged") if starts == 2:
            say(FailureReply("CorruptFault", "the base is damaged", "delete it; the node fetches it again"))
        case StartRequest(home="broken"):
            say(FailureReply("ConfigError", "no such data", "give --data"))
        case StartRequest(home="mute"):
            time.sleep(60)
        case StartRequest(home="full") if lives.read_text().count("life") in (2, 3):
            say(FailureReply("DiskFault", "no space", ""))
        case StartRequest():
            say(StartReply(-1, Digest(bytes(32)), (), 1, "cpu"))
        case VerifyRequest("die"):
            sys.exit(3)
        case VerifyRequest("garbage"):
            sys.stdout.buffer.write(b"\\xff" * 64)
            sys.stdout.buffer.flush()
        case VerifyRequest("hang"):
            time.sleep(60)
        case VerifyRequest("odd"):
            say(FailureReply("SystemExit", "?", ""))
        case VerifyRequest("full"):
            say(FailureReply("DiskFault", "no space left", "free some"))
        case VerifyRequest():
            say(VerifyReply())
        case TrainRequest(number):
            say(TrainProgress(number, 1, 2, 1.0, 10.0))
            pending = Pending(number, Digest(bytes(32)), Digest(bytes(32)), "", 1, 1, 1, 1.0)
            say(TrainReply(pending, 1, 1.0))
        case SaveRequest():
            say(SaveReply())
        case ReportRequest():
            say(ReportReply())
        case StopRequest() if home == "no room":
            say(FailureReply("DiskFault", "no space left", "free some"))
            break
        case StopRequest() if home == "dies":
            sys.exit(3)
        case StopRequest() if home == "slow":
            time.sleep(60)
        case StopRequest():
            say(StopReply())
            break
"""
TINY = RunSpec(
    version=SPEC_VERSION, name="trainer", owner=Identity(bytes([1]) * 32).peer_id, seed=1,
    model=ModelSpec(
        dim=64, layers=1, heads=2, kv_heads=1, ffn=64, vocab=256, context=16,
        tied=True, rope_theta=1e4, norm_eps=1e-5,
    ),
    data=DataSpec(source="synthetic:markov?size=65536", tokenizer="bytes", digest=b""),
    inner=InnerSpec(
        lr=1e-2, lr_min=0.1, warmup_steps=1, total_steps=100, beta1=0.9, beta2=0.95, eps=1e-8,
        weight_decay=0.0, clip=1.0, batch=2,
    ),
    outer=OuterSpec(rounds=50, stages=(Stage(0, 40),), alpha_256=256, floor_256=0),
    compress=CompressSpec(codec="sparse2", k=64, feedback=0.95),
    pace=PaceSpec(quorum_256=128, grace_256=256, lease_s=20.0, min_members=1),
)  # fmt: skip


NICE = 3
MUTE_S = 60.0
"""How long the stand-in does not answer in the home `mute`."""


class Rig:
    """One trainer, and what it told."""

    def __init__(self, folder: Path, start: StartRequest, command: tuple[str, ...]) -> None:
        self.log = folder / "worker.log"
        self.started: list[StartReply] = []
        self.progress: list[TrainProgress] = []
        self.told: list[str] = []
        self.spent: list[TimeSpent] = []
        self.news = asyncio.Event()
        self.trainer = Trainer(
            start, self.log, self._on_started, self._on_progress, self._on_gone, command=command,
            on_spent=self.spent.append, on_unsaved=self.told.append, nice=NICE,
        )  # fmt: skip

    async def _on_started(self, started: StartReply) -> None:
        self.started.append(started)
        self.told.append("started")
        self.news.set()

    def _on_progress(self, progress: TrainProgress) -> None:
        self.progress.append(progress)

    def _on_gone(self, why: str) -> None:
        self.told.append("gone")
        self.why = why

    async def life(self, number: int) -> None:
        """Until the worker has started so often."""
        async with asyncio.timeout(HANGS_S):
            while len(self.started) < number:
                self.news.clear()
                await self.news.wait()

    @property
    def pid(self) -> int:
        return self.trainer.statistics().pid


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """A rig around the stand-in, or around the real worker."""
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def build(home: str = "home", *, real: bool = False) -> Rig:
        command = (
            module.WORKER if real else (sys.executable, str(tmp_path / "stand_in.py"), str(tmp_path / "lives"))
        )
        spec = codec.encode(TINY) if real else b""
        start = StartRequest(spec, TINY.owner, str(tmp_path / home) if real else home, "", 1, "cpu")
        return Rig(tmp_path, start, command)

    return build


@asynccontextmanager
async def served(rig: Rig) -> AsyncIterator[Rig]:
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        group.create_task(rig.trainer.serve())
        yield rig
        await rig.trainer.stop()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_process_that_was_prepared_is_the_one_that_is_served(rig, tmp_path):
    one = rig()
    await one.trainer.prepare()
    pid = one.pid
    await eventually(lambda: (tmp_path / "lives").exists())
    with pytest.raises(WorkerDied):
        await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
    async with served(one):
        await one.life(1)
        assert one.pid == pid
        assert one.spent[0] == TimeSpent(), "its life is told once, from the beginning on"
        assert [spent.wait_ns for spent in one.spent[1:]] == [7] * (len(one.spent) - 1)
        os.kill(pid, signal.SIGKILL)
        await one.life(2)
        assert one.pid != pid, "one that died is replaced"


async def test_a_process_that_was_prepared_and_not_needed_is_ended(rig):
    one = rig()
    await one.trainer.prepare()
    pid = one.pid
    await one.trainer.stop()
    assert is_gone(pid)


async def test_a_process_that_began_before_its_trainer_is_the_one_that_is_served(rig, tmp_path):
    one, kept = rig(), EarlyWorker()
    await kept.begin(one.trainer.log_path, 0, FREE, command=one.trainer.command)
    begun = await kept.take(one.trainer.log_path)
    assert begun is not None
    await one.trainer.prepare(begun)
    pid = begun[0].process.pid
    assert kept.free is FREE
    assert await kept.take(one.trainer.log_path) is None, "taken once"
    await kept.end()
    async with served(one):
        await one.life(1)
        assert one.pid == pid
        assert one.spent[0] == TimeSpent()


async def test_a_process_that_began_for_another_run_or_for_nobody_is_ended(rig, tmp_path):
    one, kept = rig(), EarlyWorker()
    for is_taken in (True, False):
        await kept.begin(one.trainer.log_path, 0, FREE, command=one.trainer.command)
        assert kept._begun is not None
        pid = kept._begun[0].process.pid
        if is_taken:
            assert await kept.take(tmp_path / "other.log") is None
        else:
            await kept.end()
        assert is_gone(pid)


async def test_asks_are_answered_and_faults_keep_their_name(rig):
    async with served(rig()) as one:
        await one.life(1)
        assert await one.trainer.ask(VerifyRequest("x", 0), VerifyReply) == VerifyReply()
        many = [one.trainer.ask(VerifyRequest("x" * 10_000, 0), VerifyReply) for _ in range(200)]
        assert len(await asyncio.gather(*many)) == 200
        with pytest.raises(DiskFault) as full:
            await one.trainer.ask(VerifyRequest("full", 0), VerifyReply)
        assert full.value.hint == "free some"
        with pytest.raises(LocalFault):
            await one.trainer.ask(VerifyRequest("odd", 0), VerifyReply)
        with pytest.raises(LocalFault, match="answered VerifyReply"):
            await one.trainer.ask(VerifyRequest("x", 0), FoldReply)
        trained = await one.trainer.ask(TrainRequest(Round(3), 0, 1, 40, -1), TrainReply)
        assert trained.pending.round == one.progress[0].round == 3
        pid = one.pid
        assert psutil.Process(pid).nice() == min(19, psutil.Process().nice() + NICE)
    assert is_gone(pid)
    assert one.told == ["started", "gone"]
    assert one.trainer.statistics().restarts == 0
    assert "a last word" in one.log.read_text()


async def kept(one):
    """Its worker starts, and lives on when `serve` is cancelled; its process id."""
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(one.trainer.serve())
        await one.life(1)
        pid = one.pid
        one.trainer.keep()
        serving.cancel()
    return pid


async def test_a_worker_that_is_kept_is_asked_to_start_anew(rig):
    one = rig()
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(one.trainer.serve())
        await one.life(1)
        pid = one.pid
        await one.trainer.ask(TrainRequest(Round(3), 0, 1, 40, -1), TrainReply)
        assert one.trainer._pipe is not None
        one.trainer._pipe.write(TrainRequest(Round(4), 0, 1, 40, -1))
        one.trainer.keep()
        serving.cancel()
        await asyncio.wait([serving])
        assert one.told == ["started", "gone"]
        told = len(one.progress)
        with pytest.raises(WorkerDied):
            await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
        serving = group.create_task(one.trainer.serve())
        await one.life(2)
        assert await one.trainer.ask(VerifyRequest("x", 0), VerifyReply) == VerifyReply()
        assert one.pid == pid, "the same process"
        assert len(one.progress) == told, "what was asked for before is not for this chain"
        assert one.trainer.statistics().restarts == 0
        os.kill(pid, signal.SIGKILL)
        await one.life(3)
        assert one.pid != pid, "it is one like any other"
        await one.trainer.stop()
        serving.cancel()


async def test_a_worker_that_is_kept_starts_anew_while_its_node_reads_the_ledger(rig):
    """Before anybody serves it: what it answers until then is not lost, and it is asked once."""
    one = rig()
    pid = await kept(one)
    pipe = one.trainer._pipe
    assert pipe is not None
    asked = pipe.asked
    one.trainer.restart()
    stdout = pipe.process.stdout
    assert stdout is not None
    await eventually(lambda: len(stdout._buffer) > 0)
    async with served(one):
        for _ in range(100):  # the answer is here: no turn of the loop waits for anything
            await asyncio.sleep(0)
        assert len(one.started) == 2
        assert (one.pid, pipe.asked) == (pid, asked + 1)
        assert await one.trainer.ask(VerifyRequest("x", 0), VerifyReply) == VerifyReply()


async def test_a_worker_that_ended_before_its_new_start_is_replaced(rig):
    one = rig()
    pid = await kept(one)
    os.kill(pid, signal.SIGKILL)
    one.trainer.restart()
    async with served(one):
        await one.life(2)
        assert one.pid != pid


async def test_a_worker_that_was_only_prepared_is_not_started_before_it_is_served(rig):
    """What it starts with may still be fetched."""
    one = rig()
    await one.trainer.prepare()
    assert one.trainer._pipe is not None
    one.trainer.restart()
    assert one.trainer._pipe.asked == 0
    await one.trainer.stop()


async def test_a_disk_that_is_full_at_a_change_of_chain_ends_nothing(rig):
    """The Start of a worker that is kept saves a whole generation; the mark of the change needs few bytes."""
    one = rig("filled")
    pid = await kept(one)
    async with served(one):
        await one.life(2)
        assert one.pid != pid, "another one is asked once the disk may have room"
        assert one.trainer.statistics().restarts == 1


async def test_a_file_that_is_damaged_at_a_change_of_chain_ends_nothing(rig):
    """A worker that is kept is asked before the run's files are looked at; the next one starts with whole ones."""
    one = rig("damaged")
    pid = await kept(one)
    one.trainer.restart()
    async with served(one):
        await one.life(2)
        assert one.pid != pid


async def test_a_worker_that_loads_is_not_kept(rig):
    one = rig("mute")
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        serving = group.create_task(one.trainer.serve())
        await eventually(lambda: one.pid)
        pid = one.pid
        one.trainer.keep()
        serving.cancel()
    assert is_gone(pid)


async def test_a_worker_that_is_kept_ends_with_its_trainer(rig):
    one = rig()
    pid = await kept(one)
    assert not is_gone(pid)
    await one.trainer.stop()
    assert is_gone(pid)


def test_an_ask_to_a_worker_that_just_ended_is_refused(rig):
    """Its end is not read yet; on the loop of `node start`, whose closed pipes raise another error."""
    trainer = rig().trainer

    async def ask() -> None:
        ended = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.PIPE)
        await ended.wait()
        trainer._pipe, trainer._is_started = WorkerPipe(ended), True
        with pytest.raises(WorkerDied):
            await trainer.ask(VerifyRequest("x", 0), VerifyReply)
        await trainer.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel compares no sessions")
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_niceness_is_of_the_workers_session_and_not_of_the_nodes(rig, loop_factory):
    """The node's is that of its terminal. uvloop, the loop of `start`, begins sessions later than asyncio."""

    def niceness(pid: int) -> int | None:
        # Empty for a process that never left the session of the system's first one.
        said = Path(f"/proc/{pid}/autogroup").read_text().split()
        return int(said[-1]) if said else None

    async def has(wanted: int) -> bool:
        trainer = rig().trainer
        await trainer.prepare()
        assert trainer._pipe is not None
        pid = trainer._pipe.process.pid
        assert os.getsid(pid) == pid
        try:
            return niceness(pid) == wanted
        finally:
            await trainer.stop()

    before, wanted = niceness(os.getpid()), min(19, psutil.Process().nice() + NICE)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        # Again: the kernel lets users change no more than one session in 0.1 s.
        is_set = any(runner.run(has(wanted)) for _ in range(200))
    after = niceness(os.getpid())
    if before is not None:
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(f"{before}")
    assert is_set
    assert after == before


@pytest.mark.parametrize("way", ["die", "garbage"])
async def test_a_worker_that_dies_is_started_again_and_its_asks_fail(rig, way):
    async with served(rig()) as one:
        await one.life(1)
        waiting = asyncio.gather(
            *(one.trainer.ask(VerifyRequest(text, 0), VerifyReply) for text in (way, "x", "x")),
            return_exceptions=True,
        )
        assert {type(answer) for answer in await waiting} <= {WorkerDied, VerifyReply}
        with pytest.raises(WorkerDied):
            await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
        await one.life(2)
        assert await one.trainer.ask(VerifyRequest("x", 0), VerifyReply) == VerifyReply()
        assert one.trainer.statistics().restarts == 1
        assert one.told == ["started", "gone", "started"]


async def test_a_killed_worker_fails_what_was_asked_of_it(rig):
    async with served(rig()) as one:
        await one.life(1)
        hanging = asyncio.gather(one.trainer.ask(VerifyRequest("hang", 0), VerifyReply), return_exceptions=True)
        await eventually(lambda: one.trainer._pending)
        os.kill(one.pid, signal.SIGKILL)
        assert [type(answer) for answer in await hanging] == [WorkerDied]
        await one.life(2)


async def test_the_last_log_line_of_a_killed_worker_are_of_its_own_life(rig, caplog):
    caplog.set_level("INFO")
    async with served(rig()) as one:
        await one.life(1)
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        assert module._last_log_line(one.log, 0) == "a last word"
        assert module._last_log_line(one.log, one.log.stat().st_size) == "none"
        one.log.unlink()
        os.kill(one.pid, signal.SIGKILL)
        await one.life(3)
    told = [line.rsplit(": ", 1)[1] for line in caplog.messages if "its last words" in line]
    assert told == ["a last word", "none"], "and it is started again without its log"


@pytest.mark.parametrize("way", ["killed for memory", "killed", "ended while others were killed"])
async def test_a_worker_that_the_kernel_ended_for_memory_is_said_so(rig, monkeypatch, caplog, way):
    kills = [7]
    monkeypatch.setattr(module, "kernel_kills", lambda: kills[0])
    monkeypatch.setattr(module, "REPORT_S", 1e6)  # a look between a kill and its news would take it for an old one
    async with served(rig()) as one:
        await one.life(1)
        kills[0] += way != "killed"
        if way == "ended while others were killed":
            with pytest.raises(WorkerDied):
                await one.trainer.ask(VerifyRequest("die", 0), VerifyReply)
        else:
            os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        trouble = one.trainer.trouble
        await one.trainer.ask(SaveRequest(Round(0)), SaveReply)
        assert not one.trainer.trouble, "a round that is saved ends it"
    is_memory = way == "killed for memory"
    assert trouble == (f"{module.OUT_OF_MEMORY}: {module.MORE_MEMORY}" if is_memory else "")
    assert one.why == (module.OUT_OF_MEMORY if is_memory else module.DIED)
    assert [line for line in caplog.messages if "for lack of memory" in line] == (
        [f"{module.OUT_OF_MEMORY}: {module.MORE_MEMORY}"] if is_memory else []
    )


async def test_kills_that_are_long_over_are_not_this_worker_s(rig, monkeypatch):
    kills = [7]
    monkeypatch.setattr(module, "kernel_kills", lambda: kills[0])
    monkeypatch.setattr(module, "REPORT_S", 0.01)
    async with served(rig()) as one:
        await one.life(1)
        kills[0] += 1
        await eventually(lambda: one.trainer._kernel_kills == 8)
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        assert one.why == module.DIED


async def test_a_worker_without_memory_gets_smaller_and_is_given_up_with_advice(rig, monkeypatch):
    kills = iter(range(1000))
    monkeypatch.setattr(module, "kernel_kills", lambda: next(kills))
    one = rig()
    began = []

    async def kill(started):
        began.append((one.trainer.start.micro_batch, one.trainer.start.recompute))
        os.kill(one.pid, signal.SIGKILL)

    one.trainer.on_started = kill
    with pytest.raises(
        LocalFault, match="the kernel ended the worker for lack of memory 5 times in a row"
    ) as fault:
        async with asyncio.timeout(HANGS_S):
            await one.trainer.serve()
    assert fault.value.hint == module.MORE_MEMORY
    assert began == [(0, False)] * 2 + [(1, True)] * 3


async def test_nothing_is_asked_before_the_worker_said_what_it_holds(rig):
    """An early ask would reach a worker without a session, or one that is rounds behind what we believe."""
    one = rig()
    async with served(one):
        with pytest.raises(WorkerDied):
            await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
        await eventually(lambda: one.pid)
        with pytest.raises(WorkerDied):
            await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
        await one.life(1)


async def test_a_worker_that_dies_at_every_round_is_given_up(rig):
    """Answers in between are no sign of health: a round that never fits into memory must not loop for ever."""
    one = rig()

    async def hurt() -> None:
        for life in range(1, module.GIVE_UP_AFTER + 1):
            await one.life(life)
            await one.trainer.ask(VerifyRequest("x", 0), VerifyReply)
            with pytest.raises(WorkerDied):
                await one.trainer.ask(VerifyRequest("die", 0), VerifyReply)

    fault, _ = await asyncio.gather(one.trainer.serve(), hurt(), return_exceptions=True)
    assert isinstance(fault, LocalFault)
    assert str(one.log) in fault.hint


async def test_a_kept_round_is_a_sign_of_health(rig):
    async with served(rig()) as one:
        for life in range(1, 2 * module.GIVE_UP_AFTER):
            await one.life(life)
            await one.trainer.ask(SaveRequest(Round(life)), SaveReply)
            with pytest.raises(WorkerDied):
                await one.trainer.ask(VerifyRequest("die", 0), VerifyReply)


async def test_what_the_user_must_mend_ends_the_node(rig):
    with pytest.raises(ExceptionGroup) as found:
        await rig("broken").trainer.serve()
    (fault,) = found.value.exceptions
    assert isinstance(fault, ConfigError)
    assert fault.hint == "give --data"


async def test_a_worker_that_waits_is_asked_for_its_books(rig, monkeypatch):
    monkeypatch.setattr(module, "REPORT_S", 0.02)
    one = rig()
    async with served(one):
        await one.life(1)
        await eventually(lambda: len(one.spent) > 5)
        assert set(one.spent) == {TimeSpent(), TimeSpent(wait_ns=7)}
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        known = len(one.spent)
        await eventually(lambda: len(one.spent) > known + 5)
        assert one.spent.count(TimeSpent()) == 2, "one for each life"


async def test_a_disk_that_is_full_at_a_restart_is_waited_for(rig):
    async with served(rig("full")) as one:
        await one.life(1)
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        assert one.trainer.statistics().restarts == 3


async def test_a_process_that_the_system_refuses_at_a_restart_is_waited_for(rig, monkeypatch, caplog):
    """It was a bug with a traceback, which ended the node: after a kill for lack of memory there may be none."""
    monkeypatch.setattr(module, "REFUSED_S", 0.01)
    really, refused = asyncio.create_subprocess_exec, []

    async def refuse(*command, **options):
        if len(refused) > 7:
            return await really(*command, **options)
        refused.append(one.trainer.trouble)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async with served(rig()) as one:
        await one.life(1)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        assert one.trainer.statistics().restarts == 1, "a refusal is no death: after five of these it would end"
        assert one.trainer.trouble == ""
    assert refused[0] == ""
    assert "cannot begin the worker's process: Resource temporarily unavailable; end other" in refused[-1]
    assert sum("cannot begin" in line for line in caplog.text.splitlines()) == 1


@pytest.mark.parametrize(
    ("home", "holds", "why"),
    [
        ("home", True, []),
        ("no room", False, ["no space left; free some"]),
        ("dies", True, ["the worker process ended"]),
        ("slow", True, ["the worker did not save within 0 s"]),
        ("dies", False, []),
        ("slow", False, []),
    ],
)
async def test_what_a_worker_cannot_save_at_its_end_is_said(rig, monkeypatch, home, holds, why):
    """`holds`: it trained a round that it has not saved. One that is busy and holds none loses none."""
    async with served(rig(home)) as one:
        await one.life(1)
        await one.trainer.ask(TrainRequest(Round(3), 0, 1, 40, -1), TrainReply)
        if not holds:
            await one.trainer.ask(SaveRequest(Round(3)), SaveReply)
        pid = one.pid
        with monkeypatch.context() as patch:
            if home == "slow":
                patch.setattr(module, "STOP_S", 0.05)
            await one.trainer.stop()
        assert is_gone(pid)
        await one.trainer.stop()
    assert [line for line in one.told if line not in ("started", "gone")] == why


async def test_stop_while_it_starts_does_not_wait_for_it(rig, monkeypatch):
    """A worker that loads has nothing to save."""
    monkeypatch.setattr(module, "STOP_S", 1e6)
    one = rig("mute")
    async with served(one):
        await eventually(lambda: one.pid)
        pid = one.pid
        async with asyncio.timeout(MUTE_S / 2):
            await one.trainer.stop()
    assert is_gone(pid)
    assert one.started == []


@pytest.fixture
def looks(monkeypatch):
    """Starts are looked at often; the CPU seconds of a worker are what the test says."""
    used = {"cpu_s": lambda: 0.0}
    monkeypatch.setattr(module, "START_LOOK_S", 0.01)
    monkeypatch.setattr(module, "START_STILL_S", 0.5)
    monkeypatch.setattr(module, "cpu_seconds", lambda pid: used["cpu_s"]())
    return used


async def test_a_start_that_stands_still_is_ended_said_and_begun_again(rig, looks, monkeypatch):
    """As one that is stopped, or waits for a device that does not answer."""
    one, may_begin = rig("mute"), asyncio.Event()
    begin = one.trainer._spawn

    async def spawn():
        await may_begin.wait()
        may_begin.clear()
        return await begin()

    monkeypatch.setattr(one.trainer, "_spawn", spawn)
    async with served(one):
        may_begin.set()
        await eventually(lambda: one.pid)
        first = one.pid
        stop_process(first)
        said = f"{module.STOOD_STILL} (1 of 5 times): see {one.log}"
        await eventually(lambda: one.trainer.trouble == said, limit_s=30.0)
        assert one.why == module.STOOD_STILL
        assert is_gone(first)
        seen = iter(range(1_000_000))
        looks["cpu_s"] = lambda: float(next(seen))
        one.trainer.start = StartRequest(b"", TINY.owner, "home", "", 1, "cpu")
        may_begin.set()
        await one.life(1)
        assert not one.trainer.trouble, "until one is whole"
    assert one.trainer.start_moves >= 2


async def test_a_worker_whose_starts_stand_still_is_given_up(rig, looks):
    one = rig("mute")
    with pytest.raises(LocalFault, match=f"{module.STOOD_STILL} 5 times in a row") as fault:
        async with asyncio.timeout(HANGS_S):
            await one.trainer.serve()
    assert str(one.log) in fault.value.hint


async def test_a_start_that_computes_is_waited_for_but_not_for_ever(rig, looks, monkeypatch):
    """It compiles or reads for minutes, and names no phase meanwhile."""
    monkeypatch.setattr(module, "START_S", 2.0)
    one, seen = rig("mute"), iter(range(1_000_000))
    looks["cpu_s"] = lambda: float(next(seen))
    async with served(one):
        await eventually(lambda: one.trainer._moves.took_s > 1.5)
        assert one.trainer.statistics().restarts == 0
        await eventually(lambda: one.trainer.trouble)


async def test_stop_at_once_leaves_no_child(rig):
    one = rig()
    async with served(one):
        await asyncio.sleep(0)
    assert one.trainer.statistics().pid == 0
    await one.trainer.stop()


async def test_the_real_worker_trains_folds_and_comes_back_from_a_kill(rig):
    async with served(rig(real=True)) as one:
        await one.life(1)
        assert (one.started[0].final, one.started[0].parameters) == (-1, TINY.model.parameters)
        training = asyncio.gather(one.trainer.ask(TrainRequest(Round(0), 0, 1, 40, -1), TrainReply))
        await eventually(lambda: one.progress)
        assert await one.trainer.ask(EvaluateRequest(), EvaluateReply), "served between two steps"
        pending = (await training)[0].pending
        assert await one.trainer.ask(SaveRequest(Round(0)), SaveReply)
        member = Member(digest(b"e"), TINY.owner, pending.weight, pending.payload, pending.path)
        assert await one.trainer.ask(VerifyRequest(pending.path, 0), VerifyReply)
        folded = await one.trainer.ask(FoldRequest(Round(0), (member,)), FoldReply)
        evaluated = await one.trainer.ask(EvaluateRequest(), EvaluateReply)
        assert evaluated.state == folded.state
        os.kill(one.pid, signal.SIGKILL)
        await one.life(2)
        assert one.started[1].pending == (pending,)
        assert (await one.trainer.ask(FinalizeRequest(Round(0), (member,)), FinalizeReply)).state == folded.state
        late = asyncio.gather(
            # So many steps that it is still at it when the next request comes, however busy the machine is.
            one.trainer.ask(TrainRequest(Round(1), 0, 1, 4000, -1), TrainReply),
            return_exceptions=True,
        )
        await eventually(lambda: one.progress[-1].round == 1)
        newer = await one.trainer.ask(TrainRequest(Round(2), 0, 1, 40, -1), TrainReply)
        assert [type(answer) for answer in await late] == [Superseded]
        assert newer.pending.round == 2
        assert await one.trainer.ask(SaveRequest(Round(2)), SaveReply)
        last = one.spent[-1]
        assert last.recompute_ns > 0, "round 1 was given up"
        assert min(last.start_ns, last.steps_ns, last.encode_ns, last.fold_ns, last.checkpoint_ns) > 0
        assert last.unsaved_ns < 0.1 * last.steps_ns, "round 2 is saved"


async def test_a_crash_in_machine_code_leaves_its_last_log_line_in_the_log(rig):
    """A bus error, as of a mapped file on a failing disk: nothing can catch it, but it says where it was."""
    async with served(rig(real=True)) as one:
        await one.life(1)
        os.kill(one.pid, signal.SIGBUS)
        await one.life(2)
        assert "Bus error" in one.trainer.log_path.read_text()
