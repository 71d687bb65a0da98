"""The worker's loop: what it does while a round waits for its fold, without a process around it."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.ipc.chain_mark import MARK, ChainMark
from atoll.node.learning.data import corpus
from atoll.node.learning.data.dataset import measured
from atoll.node.worker import main
from atoll.node.worker.imports.lean_torch import LATE
from atoll.node.worker.loop import GIVEN_BACK_S, Worker
from atoll.node.worker.schedule.background_fold import BackgroundFold
from atoll.node.worker.session import Session
from atoll.p2p.system.c_heap import FreePages
from atoll.protocols import codec
from atoll.protocols.errors import Divergence, Superseded
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    Answer,
    Ask,
    CheckReply,
    CheckRequest,
    EvaluateReply,
    EvaluateRequest,
    FailureReply,
    FinalizeReply,
    FinalizeRequest,
    FoldReply,
    FoldRequest,
    ReplyEnvelope,
    ReportReply,
    ReportRequest,
    RequestEnvelope,
    SaveReply,
    SaveRequest,
    SnapshotReply,
    SnapshotRequest,
    StartProgress,
    StartReply,
    StartRequest,
    StopRequest,
    TrainProgress,
    TrainReply,
    TrainRequest,
    VerifyRequest,
)
from atoll.protocols.run.sections.objective import ObjectiveSpec
from tests.node.worker.session_home import ME, OVERLAPPING, SPEC, member
from tests.waiting import HANGS_S


class Daemon:
    """Both ends of the pipe. An ask is there only when the worker waits for one: it never looks in between."""

    def __init__(self, home: Path) -> None:
        self.said: list[Answer] = []
        self.phases: list[str] = []
        self.waits = 0
        self._news = threading.Event()
        self._is_keeping = False
        self._script = self.script(str(home))

    def script(self, home: str) -> Iterator[Ask]:
        yield StartRequest(codec.encode(OVERLAPPING), ME, home, "", 1, "cpu")
        yield TrainRequest(Round(0), 0, 1, 2, -1)
        first = self.said[-1]
        assert isinstance(first, TrainReply)
        yield TrainRequest(Round(1), 0, 1, 2, 0, ahead=1)
        assert self.said[-1] is first, "the round waits"
        yield SaveRequest(Round(0))
        assert isinstance(self.said[-1], SaveReply)
        yield EvaluateRequest()
        assert isinstance(self.said[-1], EvaluateReply)
        yield FoldRequest(Round(0), (member(first.pending),))
        second = self.said[-1]
        assert isinstance(second, TrainReply)
        assert second.overlapped == 1
        yield TrainRequest(Round(2), 0, 1, 2, 1, ahead=1)
        yield TrainRequest(Round(3), 0, 1, 2, -1)
        yield StopRequest()

    def answer_beside(self, is_answered: Callable[[RequestEnvelope], bool]) -> None:
        self.is_answered = is_answered

    def has_request(self) -> bool:
        return False

    def wait(self) -> bool:
        """The next ask does not come before Keep is answered."""
        if self._is_keeping:
            assert self._news.wait(timeout=HANGS_S)
            self._news.clear()
        return not self._is_keeping

    def wake(self) -> None:
        self._news.set()

    def receive(self) -> RequestEnvelope | None:
        self.waits += 1
        ask = next(self._script)
        self._is_keeping = isinstance(ask, SaveRequest)
        return RequestEnvelope(self.waits, ask)

    def send(self, reply: ReplyEnvelope) -> None:
        self._is_keeping = self._is_keeping and not isinstance(reply.answer, SaveReply)
        if isinstance(reply.answer, StartProgress):
            self.phases.append(reply.answer.phase)
        elif not isinstance(reply.answer, TrainProgress):
            self.said.append(reply.answer)


def test_a_round_that_waits_blocks_on_the_inbox_and_goes_on_with_its_fold(tmp_path):
    daemon = Daemon(tmp_path)
    Worker(daemon, daemon).run()
    assert daemon.phases == [
        "loading or compiling kernels", "opening the text", "building the model", "reading the saved state",
    ]  # fmt: skip
    kinds = [type(answer).__name__ for answer in daemon.said]
    assert kinds == [
        *(
            "StartReply",
            "TrainReply",
            "SaveReply",
            "EvaluateReply",
            "FoldReply",
            "TrainReply",
            "FailureReply",
            "TrainReply",
            "StopReply",
        ),
    ]
    assert daemon.said[6].fault == Superseded.__name__
    assert daemon.said[7].pending.round == 3


class Busy(Daemon):
    """Asks that come while round 1 is trained, with a step between any two."""

    _is_there = _is_training = False

    def script(self, home: str) -> Iterator[Ask]:
        yield StartRequest(codec.encode(OVERLAPPING), ME, home, "", 1, "cpu")
        yield TrainRequest(Round(0), 0, 1, 2, -1)
        first = self.said[-1]
        assert isinstance(first, TrainReply)
        members = (member(first.pending),)
        yield SaveRequest(Round(0))
        self._is_training = True
        yield TrainRequest(Round(1), 0, 1, 12, -1)
        yield VerifyRequest(first.pending.path, Round(0))
        yield CheckRequest(Round(3), members)
        yield CheckRequest(Round(0), members)
        yield FoldRequest(Round(0), members)
        yield FinalizeRequest(Round(0), members)
        yield ReportRequest()
        self._is_training = False
        yield SnapshotRequest(f"{home}/snapshot")
        yield StopRequest()

    def has_request(self) -> bool:
        self._is_there = self._is_training and not self._is_there
        return self._is_there


def test_asks_about_the_fold_are_worked_on_beside_the_steps_and_answered_in_order(tmp_path, monkeypatch):
    daemon, beside = Busy(tmp_path), list[str]()

    def add(self: BackgroundFold, request: RequestEnvelope, work: object) -> None:
        beside.append(type(request.ask).__name__)
        real(self, request, work)

    real = BackgroundFold.add
    monkeypatch.setattr(BackgroundFold, "add", add)
    Worker(daemon, daemon).run()
    assert beside == ["VerifyRequest", "CheckRequest", "CheckRequest", "FoldRequest", "FinalizeRequest"]
    kinds = [type(answer).__name__ for answer in daemon.said if not isinstance(answer, ReportReply | TrainReply)]
    asked = ["VerifyReply", "FailureReply", "CheckReply", "FoldReply", "FinalizeReply"]
    assert kinds == ["StartReply", "SaveReply", *asked, "SnapshotReply", "StopReply"]
    by_kind = {type(answer): answer for answer in daemon.said}
    assert by_kind[FailureReply].fault == Divergence.__name__, "round 3 does not follow"
    assert by_kind[CheckReply].state == by_kind[FoldReply].state == by_kind[FinalizeReply].state
    assert by_kind[SnapshotReply].round == 0, "it came after the final round"
    assert by_kind[TrainReply].pending.round == 1


class Again(Busy):
    """A daemon that leaves its chain while round 1 is trained, and the next one, with the same worker."""

    def script(self, home: str) -> Iterator[Ask]:
        yield StartRequest(codec.encode(SPEC), ME, home, "", 1, "cpu")
        yield TrainRequest(Round(0), 0, 1, 2, -1)
        yield SaveRequest(Round(0))
        trained = next(answer for answer in self.said if isinstance(answer, TrainReply))
        yield FinalizeRequest(Round(0), (member(trained.pending),))
        self._is_training = True
        yield TrainRequest(Round(1), 0, 1, 1000, -1)
        yield ReportRequest()
        ChainMark(Path(home)).put(0)
        yield StartRequest(codec.encode(SPEC), ME, home, "", 1, "cpu")
        self._is_training = False
        yield TrainRequest(Round(1), 0, 1, 2, -1)
        yield SaveRequest(Round(1))
        yield StopRequest()


def test_a_worker_begins_again_without_a_new_process(tmp_path, monkeypatch):
    opened, real = list[str](), corpus.load_corpus

    def load(source: str, *more: object) -> corpus.Corpus:
        opened.append(source)
        return real(source, *more)

    monkeypatch.setattr(corpus, "load_corpus", load)
    daemon = Again(tmp_path)
    worker = Worker(daemon, daemon)
    spent = worker._spent
    worker.run()
    kinds = [type(answer).__name__ for answer in daemon.said if not isinstance(answer, ReportReply)]
    assert kinds == [
        *("StartReply", "TrainReply", "SaveReply", "FinalizeReply"),
        *("StartReply", "TrainReply", "SaveReply", "StopReply"),
    ], "nobody waits for the round that was under way"
    first, again = (answer for answer in daemon.said if isinstance(answer, StartReply))
    assert (first.final, first.pending) == (-1, ())
    assert (again.final, again.settled) == (-1, -1), "it read the mark"
    assert [pending.round for pending in again.pending] == [0]
    assert not (tmp_path / MARK).exists()
    assert worker._spent is not spent, "the next daemon counts from its own beginning"
    assert opened == [SPEC.data.source], "the text is read once"


def test_the_next_process_takes_the_tokens_of_the_last_one(tmp_path, monkeypatch):
    spec = replace(SPEC, data=measured(SPEC.data, "", tmp_path))
    start = StartRequest(codec.encode(spec), ME, str(tmp_path), "", 1, "cpu")
    first = Session(start)
    monkeypatch.setattr(corpus, "load_corpus", None)
    again = Session(start)
    assert again._text.train_N.tolist() == first._text.train_N.tolist()


def test_each_trained_round_gives_free_pages_back(tmp_path, monkeypatch):
    given = list[float]()
    monkeypatch.setattr(FreePages, "give_back", lambda self: given.append(self.every_s))
    daemon = Daemon(tmp_path)
    Worker(daemon, daemon).run()
    assert sum(isinstance(answer, TrainReply) for answer in daemon.said) == 3
    assert given == [GIVEN_BACK_S] * 3


@pytest.mark.parametrize(
    "named", [("use_one_arena",), ("use_one_arena", "keep_heap_end")], ids=["one arena", "the heap's end"]
)
def test_a_worker_settles_its_heap_before_it_does_anything_else(monkeypatch, named):
    class Called(Exception):
        """The last of these steps of the process."""

    called = list[str]()

    def step(name: str) -> None:
        called.append(name)
        if name == named[-1]:
            raise Called

    for name in named:
        monkeypatch.setattr(main, name, partial(step, name))
    with pytest.raises(Called):
        main.main()
    assert called == [*named]


HEAVY = {"sympy", "torch._decomp", "torch._dynamo", "torch._inductor", "torch._meta_registrations", "torch._prims"}
"""What traces operators. It takes seconds of CPU, and a hundred megabytes, at every start."""


def run_alone(script: str) -> str:
    """The last line that a process of its own prints; its standard input is empty."""
    done = subprocess.run(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout + done.stderr).splitlines()[-1]


def test_a_worker_that_trains_has_not_imported_what_traces(tmp_path):
    """torch.optim's classes import torch's compiler."""
    script = f"""
import sys
from pathlib import Path
from types import ModuleType
from atoll.node.worker.imports.lean_torch import LATE, lean_imports
with lean_imports():
    from tests.node.worker.test_worker import HEAVY, Daemon, Worker
daemon = Daemon(Path({str(tmp_path)!r}))
Worker(daemon, daemon).run()
assert type(daemon.said[-1]).__name__ == "StopReply"
print(sorted(HEAVY & set(sys.modules)), sorted(n for n in LATE if type(sys.modules[n]) is ModuleType))
"""
    assert run_alone(script) == "[] []"


def test_a_starting_worker_imports_nothing_that_it_does_not_use():
    also = {"hivemind", "libp2p", "pyarrow", "rich", "transformers"}
    also |= {"atoll.node.config.node_config", "dill", "h11", "scipy", "yaml"}
    script = f"""
import sys
from atoll.node.worker.main import main
main()
print(sorted({HEAVY | also!r} & set(sys.modules)), "torch" in sys.modules)
"""
    assert run_alone(script) == "[] True"


def test_no_import_of_a_worker_looks_for_the_files_of_all_modules():
    """torch asks twice from which module it is called; Python would find the real paths of 1,100 modules."""
    script = """
import inspect, os
from atoll.node.worker.imports.lean_torch import lean_imports
found, searched, real, paths = inspect.getmodule, [], os.path.realpath, []
os.path.realpath = lambda path, **more: (paths.append(path), real(path, **more))[1]
with lean_imports():
    frame = lean_imports.__wrapped__().gi_frame
    assert inspect.getmodule(frame) is found(frame)
    paths.clear()
    import torch
print(len(paths) < 200 or len(paths), inspect.getmodule is found)
"""
    assert run_alone(script) == "True True"


def test_code_of_others_has_the_whole_of_torch(tmp_path):
    """Such a run's package may trace, or make tensors without data."""
    term = ObjectiveSpec(name="nowhere.1", weight=1.0, package="atoll-nowhere")
    spec = replace(SPEC, objective=term)
    script = f"""
import sys
from atoll.node.worker.imports.lean_torch import TRACING, lean_imports
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.worker_messages import StartRequest
with lean_imports():
    from atoll.node.worker.session import Session
assert TRACING not in sys.modules
try:
    Session(StartRequest({codec.encode(spec)!r}, {ME!r}, {str(tmp_path)!r}, "", 1, "cpu"))
except ConfigError as error:
    print(error)
print(TRACING in sys.modules)
"""
    assert run_alone(script) == "True"


def test_torchs_compiler_still_works_in_a_worker():
    """Functions of torch that the compiler must not see import it."""
    script = """
from atoll.node.worker.imports.lean_torch import lean_imports
with lean_imports():
    import torch
import torch.utils.checkpoint
x = torch.ones(2, requires_grad=True)
torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
print(torch.equal(x.grad, torch.cos(torch.ones(2))))
"""
    assert run_alone(script) == "True"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_a_worker_can_try_whether_a_gpu_encodes():
    """torch's own generators need what was left out. The kernels run in Triton's interpreter."""
    script = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from atoll.node.worker.imports.lean_torch import lean_imports
with lean_imports():
    import torch
from atoll.node.learning.compress.gpu.encoder import fault_of
from atoll.protocols.run.payload import Layout
print(fault_of(torch.device("cpu"), Layout("sparse2", 1, 64), 1.0) or "no fault")
"""
    assert run_alone(script) == "no fault"


@pytest.mark.parametrize("name", sorted(LATE))
def test_a_late_package_of_torch_runs_when_somebody_asks_for_it(name):
    """Whichever is asked first; until then it is there, and did not run."""
    script = f"""
import sys
from types import ModuleType
from atoll.node.worker.imports.lean_torch import LATE, lean_imports
with lean_imports():
    import torch
late = {{name for name in LATE if type(sys.modules[name]) is not ModuleType}}
{name}.__doc__
ran = late - {{name for name in LATE if type(sys.modules[name]) is not ModuleType}}
print(late == LATE, {name!r} in ran, len(vars({name})) > 10)
"""
    assert run_alone(script) == "True True True"


def test_late_packages_of_torch_work_and_code_of_others_finds_them_there():
    script = """
import sys
from types import ModuleType
from atoll.node.worker.imports import lean_torch
from atoll.node.worker.imports.lean_torch import LATE, lean_imports
with lean_imports():
    import torch
from torch.utils.data import DataLoader
assert [batch.tolist() for batch in DataLoader(range(4), batch_size=2)] == [[0, 1], [2, 3]]
assert torch.distributions.Normal(0.0, 1.0).cdf(torch.zeros(1)) == 0.5
lean_torch.import_module = lambda name: None  # what traces happens to ask each module for its file
lean_torch.whole_torch()
print(all(type(sys.modules[name]) is ModuleType for name in LATE))
"""
    assert run_alone(script) == "True"


@pytest.mark.skipif(not Path("/proc/self/task").exists() or os.cpu_count() == 1, reason="counts threads")
def test_an_import_of_a_worker_begins_no_threads(monkeypatch):
    """numpy's BLAS would begin one per core, each of which spins at first."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    script = """
import os
from atoll.node.worker.imports.lean_torch import lean_imports
with lean_imports():
    import torch
print(len(os.listdir("/proc/self/task")), os.environ["OPENBLAS_NUM_THREADS"])
"""
    assert run_alone(script) == "1 2"


@pytest.mark.parametrize("name", ["fsdp", "checkpoint", "tensor"])
def test_torchs_shards_and_checkpoints_can_be_imported_in_a_worker(name):
    """They trace, too: what was left out and they import each other, in one order only."""
    script = f"""
from atoll.node.worker.imports.lean_torch import lean_imports
with lean_imports():
    import torch
import torch.distributed.{name}
print(torch.distributed.{name}.__name__)
"""
    assert run_alone(script) == f"torch.distributed.{name}"
