"""A daemon without a network: the real control server on a thread of its own, over an operator that remembers."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from atoll.cli.command_group import run
from atoll.node.config.home import Home
from atoll.node.daemon.control_server import ControlServer
from atoll.protocols.errors import AtollError, LocalFault
from atoll.protocols.local.control_messages import (
    EvaluationResult,
    Goodput,
    PageToken,
    PeerStatus,
    RoundStatus,
    SentPerRound,
    Status,
    TimeShares,
)
from tests.waiting import HANGS_S

PEER = "12D3KooWByRxyokKmxMNkMYp1SavrjyivNPwMg3K5hmXsCdFk6TW"
STATUS = Status(
    version="0.1.0", pid=4711, uptime_s=61.5, peer=PEER, name="otter", addresses=("/ip4/127.0.0.1/tcp/4710",),
    run="ab" * 32, run_name="tiny", activity="collecting", reason="waiting for 1 of 4", eta_s=2.5, round=7,
    rounds=54, step=0, steps=8, final=5, digest="cd" * 32, contributors=(PEER,), experts=None, members=4, peers=3,
    paths={"direct": 3}, train_loss=2.5, val_bpb=3.25, tokens_per_s=7164.6, payload_bytes=19722,
    bytes_up=1_500_000, bytes_down=900,
    sent=SentPerRound(bytes=42_000.0, payloads=2.13, below_fp32=52.4, per_copy=1.0028), train_s=0.28, wait_s=1.5,
    overlap_allowed=4, overlapped=2, held_s=0.1, device="cpu", worker_pid=4712,
    worker_restarts=0, host_restarts=0,
    goodput=Goodput(
        window_s=600.0,
        window=TimeShares(
            steps_s=558.6, wait_s=24.0, transfer_s=0.0, encode_s=3.6, fold_s=11.4, checkpoint_s=2.4,
            evaluate_s=0.0, recompute_s=0.0, start_s=0.0, down_s=0.0,
        ),
        total=TimeShares(
            steps_s=700.0, wait_s=200.0, transfer_s=0.0, encode_s=10.0, fold_s=40.0, checkpoint_s=8.0,
            evaluate_s=2.0, recompute_s=20.0, start_s=5.0, down_s=15.0,
        ),
    ),
)  # fmt: skip
PEER_ROW = PeerStatus(
    peer=PEER, path="punched", maddr="/ip4/127.0.0.1/udp/4710/quic-v1", rtt_s=0.012, member=True,
    activity="training", round=7, final=5, tokens_per_s=7000.0, heard_s=0.5, faults=0, name="seal",
)  # fmt: skip
ROUND_ROW = RoundStatus(
    round=6, peer=PEER, digest="cd" * 32, set="ef" * 32, final=False, contributors=(PEER,), train_loss=2.5,
    val_bpb=None, steps=8, tokens=8192, payload_bytes=19722, bytes_up=59166, bytes_down=59166, blob_bytes_up=59200,
    blob_payload_up=59166, train_s=0.28, encode_s=0.05, wait_s=1.5, steps_s=0.25, transfer_s=0.2,
    overlap_allowed=4, overlapped=2, held_s=0.1,
)  # fmt: skip


class FakeOperator:
    """Obeys node.control.Operator; `fault` makes every order fail."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.state = STATUS
        self.peer_row = PEER_ROW
        self.rows: Sequence[RoundStatus] = [ROUND_ROW, msgspec.structs.replace(ROUND_ROW, round=7)]
        self.fault: AtollError | None = None
        self.token = ""

    def status(self) -> Status:
        return self.state

    async def peers(self) -> Sequence[PeerStatus]:
        return [self.peer_row]

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        return self.rows[-last:]

    async def stop(self, *, finish: bool) -> str:
        return self._order(f"stop finish={finish}")

    async def pause(self, reason: str, for_s: float | None) -> str:
        return self._order(f"pause {reason}" + (f" for {for_s:.0f}" if for_s else ""))

    async def resume(self) -> str:
        return self._order("resume")

    async def limit(self, up: str | None, down: str | None) -> str:
        return self._order(f"limit up={up} down={down}")

    def page_token(self) -> PageToken:
        return PageToken(self.token, 600.0)

    async def exclude(self, peer: str, first: int | None, reason: str, since: int | None) -> str:
        excise = "" if since is None else f" since={since}"
        return self._order(f"exclude {peer} from={first} reason={reason}{excise}")

    async def evaluate(self) -> EvaluationResult:
        self._order("eval")
        return EvaluationResult(7, 3.25, 2.25)

    def _order(self, order: str) -> str:
        if self.fault is not None:
            raise self.fault
        self.orders.append(order)
        return f"taken: {order}"


class FakeDaemon:
    """One home with a served control socket."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.operator = FakeOperator()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve until the block ends."""
        self.home.make()
        ready = threading.Event()
        loop, done = asyncio.new_event_loop(), asyncio.Event()
        server = ControlServer(self.home.control_socket, self.home.log, self.operator)

        async def serve() -> None:
            async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve(ready.set))
                await done.wait()
                serving.cancel()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        try:
            assert ready.wait(HANGS_S)
            yield
        finally:
            loop.call_soon_threadsafe(done.set)
            thread.join()
            loop.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path / "home")
    with fake.running():
        yield fake


@pytest.fixture
def idle_daemon(tmp_path: Path) -> FakeDaemon:
    """Not started: the test runs it for as long as it likes."""
    return FakeDaemon(tmp_path / "home")


class Ran(msgspec.Struct):
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str


Atoll = Callable[..., Ran]


@pytest.fixture
def atoll(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Atoll:
    """Run `atoll --home <tmp>/home ARGS` in this process."""

    def call(*args: str) -> Ran:
        capsys.readouterr()
        code = run(["--home", str(tmp_path / "home"), *args])
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return call


@pytest.fixture
def fault() -> AtollError:
    return LocalFault("the worker is starting", hint="try again in a moment")
