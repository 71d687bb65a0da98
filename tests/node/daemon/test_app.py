"""A daemon starts its parts one after the other, and ends them in the order of its script, whatever ended it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon import app
from atoll.node.daemon.app import Daemon, settle_garbage
from atoll.node.daemon.core.interfaces import NoReduction
from atoll.node.daemon.telemetry.logfile import JsonLines
from atoll.node.runs.presets import preset
from atoll.p2p.system.c_heap import FreePages
from atoll.p2p.system.stop_signals import StopSignals
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.registers import Lease
from tests.waiting import HANGS_S, eventually

OTHER = PeerId("other")
SPEC = preset("tiny", Identity(bytes(32)).peer_id, 1, "synthetic:markov")


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch) -> None:
    """This process holds all tests that pytest collected: to look for garbage among them takes a second."""
    monkeypatch.setattr(app, "settle_garbage", lambda: None)


class Part:
    """Says when it is up and when it has ended; `fault` ends it, `stubborn_s` delays its end."""

    def __init__(self, name: str, story: list[str]) -> None:
        self.name, self.story = name, story
        self.fault: LocalFault | None = None
        self.end_fault: LocalFault | None = None
        self.stubborn_s = 0.0
        self.may_come_up = asyncio.Event()
        self.may_come_up.set()

    async def serve(self, ready=lambda: None) -> None:
        try:
            await self.may_come_up.wait()
            ready()
            self.story.append(f"{self.name} up")
            if self.fault is not None:
                raise self.fault
            await asyncio.Event().wait()
        finally:
            if self.stubborn_s:
                await asyncio.sleep(self.stubborn_s)
            self.story.append(f"{self.name} ended")
            if self.end_fault is not None:
                raise self.end_fault


class Node:
    """The parts of a daemon that do nothing."""

    def __init__(self, home: Home | None = None) -> None:
        self.story: list[str] = []
        names = ("network", "control", "web", "loggers", "guest", "driver", "carry", "goodput", "worker")
        self.parts = {name: Part(name, self.story) for name in names}
        self.samples = Part("sample", [])
        self.is_idle = asyncio.Event()
        self.host_may_start = asyncio.Event()
        self.host_may_start.set()
        self.host_fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        host = SimpleNamespace(start=self._start_host, stop=self._stop_host, watch=lambda: self._watch_host())
        plan = SimpleNamespace(host=host, home=home, config=NodeConfig())
        plan.run, plan.restored = SimpleNamespace(spec=SPEC), None
        self.said: list[str] = []
        self.daemon = Daemon(plan, self._build, report=self.said.append)

    def _build(self, plan, stop, on_other_chain):
        parts = self.parts
        driver = SimpleNamespace(
            serve=parts["driver"].serve,
            pause=self.story.append,
            wait_idle=self.is_idle.wait,
            on_behind=self.story.append,
            has_begun=lambda: True,
            leave=self._leave,
            leases=SimpleNamespace(leave=lambda: None, publish_if_due=lambda **_: None),
            view=lambda: SimpleNamespace(left=()),
            finality=SimpleNamespace(voters=(), books={}, waiting={}),
            finalizer=SimpleNamespace(has_model=True, applied=4, final_sets={}),
            contributions=SimpleNamespace(
                me=PeerId("me"), newest_own=lambda: Round(5), later=lambda above: [], find=lambda names: []
            ),
            reducer=NoReduction(),
        )
        network = SimpleNamespace(carry=lambda *_: parts["carry"].serve(), read_to=0, leases=self._leases)
        parts["network"].ledger = SimpleNamespace(since=lambda cursor: [])
        parts["network"].neighbours = lambda: [OTHER]
        parts["network"].tell = self._tell
        parts["network"].blobs = SimpleNamespace(statistics=lambda: SimpleNamespace(bytes_up=0))
        log = SimpleNamespace(event=lambda what, **more: self.story.append(what), close=lambda: None)
        driver.context = SimpleNamespace(log=log)
        parts["guest"].verdict = SimpleNamespace(reason="on battery")
        return SimpleNamespace(
            swarm=parts["network"], net=network, log=log, control=parts["control"],
            chain=SimpleNamespace(
                driver=driver,
                trainer=SimpleNamespace(
                    prepare=self._prepare, serve=parts["worker"].serve, stop=self._save,
                    keep=lambda: self.story.append("worker kept"), log_path=Path("worker.log"),
                ),
                goodput=parts["goodput"],
                change=lambda hold: self.story.append(f"changed {hold}"),
            ),
            web=parts["web"],
            loggers=parts["loggers"],
            samples=self.samples,
            guest=parts["guest"],
            text=SimpleNamespace(shards_here=lambda most: ()),
        )  # fmt: skip

    def _leave(self) -> bool:
        self.story.append("left")
        return True

    async def _tell(self, peer) -> bool:
        self.story.append("told")
        return True

    def _leases(self) -> dict[PeerId, tuple[Lease, float]]:
        final = 4 if "hands_on" in self.story else 3
        return {OTHER: (Lease("observing", Round(5), Round(final), bytes(32), Round(final), 0.0), 60.0)}

    async def _prepare(self, begun) -> None:
        self.before_worker = list(self.story)

    async def _start_host(self) -> None:
        await self.host_may_start.wait()
        self.story.append("host up")

    async def _watch_host(self) -> None:
        await self.host_fault

    async def _stop_host(self) -> None:
        self.story.append("host ended")

    async def _save(self) -> None:
        self.story.append("worker saved")

    async def _nothing(self) -> None:
        pass

    async def run(self, then) -> None:
        async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
            up = asyncio.Event()
            running = group.create_task(self.daemon.run(up.set))
            group.create_task(then(up))
            await running


def ended(story: list[str]) -> list[str]:
    return [line.removesuffix(" ended") for line in story if line.endswith(("ended", "saved"))]


async def stop_when_up(node: Node, up: asyncio.Event) -> None:
    await up.wait()
    await eventually(lambda: "worker up" in node.story)
    node.daemon.stop()


async def test_parts_start_and_end_in_order():
    node = Node()
    await node.run(lambda up: stop_when_up(node, up))
    assert node.before_worker == [], "it imports torch while the others start"
    assert [line for line in node.story if line.endswith(" up")][:3] == ["host up", "network up", "control up"]
    order = ended(node.story)
    assert order[0] == "worker saved"
    assert set(order[1:5]) == {"worker", "goodput", "carry", "driver"}
    assert (order[5], set(order[6:10]), order[10:]) == (
        "network",
        {"web", "control", "loggers", "guest"},
        ["host"],
    )
    assert "stopping" in node.story


async def test_a_node_that_is_up_has_taken_its_modules_out_of_the_collectors_view(monkeypatch):
    monkeypatch.setattr(app, "settle_garbage", settle_garbage)
    gc.unfreeze()
    node = Node()
    await node.run(lambda up: stop_when_up(node, up))
    assert gc.get_freeze_count() > 10_000


async def test_a_node_gives_free_pages_of_its_heap_back_until_it_stops(monkeypatch):
    serving = list[str]()

    async def serve(self: FreePages) -> None:
        serving.append("up")
        try:
            await asyncio.Event().wait()
        finally:
            serving.append("ended")

    monkeypatch.setattr(FreePages, "serve", serve)
    node = Node()
    await node.run(lambda up: stop_when_up(node, up))
    assert serving == ["up", "ended"]


async def test_a_node_that_stops_writes_that_it_leaves_last_and_hands_on_what_it_has():
    node = Node()
    await node.run(lambda up: stop_when_up(node, up))
    story = node.story
    writers = ("worker", "goodput", "carry", "driver")
    assert max(story.index(f"{name} ended") for name in writers) < story.index("left")
    told = [story.index(line) for line in ("left", "told", "hands_on", "network ended")]
    assert told == sorted(told), "it ends as soon as a member that stays has the newest state"


OF_CHAIN = {"worker", "goodput", "carry", "driver"}


@pytest.mark.parametrize("first", [Round(7), None])
async def test_a_node_that_changes_its_chain_keeps_its_connections_and_its_worker(tmp_path, first):
    """With another chain, or (None) on the same one with a summary."""
    node = Node(Home(tmp_path))
    changed: list[str] = []

    async def change(up: asyncio.Event) -> None:
        await up.wait()
        await eventually(lambda: "worker up" in node.story)
        node.story.clear()
        node.daemon.leave_chain(first)
        await eventually(lambda: "worker up" in node.story)
        changed.extend(node.story)
        node.daemon.stop()

    await node.run(change)
    assert changed[0] == "worker kept"
    at = changed.index("changed on battery")
    assert set(changed[1:at]) == {f"{name} ended" for name in OF_CHAIN}, "and nothing else"
    assert set(changed[at + 1 :]) == {f"{name} up" for name in OF_CHAIN}
    assert ["joins the others' model from round 7 on" in line for line in node.said] == [True] * (first == 7)
    assert "left" in node.story, "it leaves the run when it is stopped"
    assert node.story[-1] == "host ended"


async def test_no_driver_begins_before_the_one_before_has_ended(tmp_path, monkeypatch):
    """Two would write into one feed."""
    monkeypatch.setattr(app, "PART_S", 0.01)
    node = Node(Home(tmp_path))
    node.parts["driver"].stubborn_s = 0.1

    async def change(up: asyncio.Event) -> None:
        await up.wait()
        node.story.clear()
        node.daemon.leave_chain(None)
        await eventually(lambda: "driver up" in node.story)
        assert node.story.index("driver ended") < node.story.index("driver up")
        node.daemon.stop()

    await node.run(change)


async def test_a_node_that_stops_before_it_could_change_its_chain_does_not_leave_the_run(tmp_path):
    node = Node(Home(tmp_path))

    async def change(up: asyncio.Event) -> None:
        await up.wait()
        node.daemon.stop()
        node.daemon.leave_chain(Round(7))

    await node.run(change)
    assert "left" not in node.story
    assert "worker saved" in node.story


async def test_to_finish_ends_with_the_chain_if_that_must_change(tmp_path):
    node = Node(Home(tmp_path))

    async def finish(up: asyncio.Event) -> None:
        await up.wait()
        node.daemon.stop(finish=True)
        await eventually(lambda: "stopping after this round" in node.story)
        node.daemon.leave_chain(Round(7))

    await node.run(finish)
    assert "worker saved" in node.story
    assert "left" not in node.story


@pytest.mark.parametrize("name", ["driver", "control", "carry"])
async def test_a_fault_of_a_part_ends_the_node_in_the_same_order(name):
    node = Node()
    node.parts[name].fault = LocalFault("the disk is gone")
    with pytest.raises(LocalFault, match="the disk is gone"):
        await node.daemon.run()
    assert "failed" in node.story
    assert "left" not in node.story, "its feed may be another node's"
    order = [line for line in ended(node.story) if line != name]
    assert order[0] == "worker saved"
    assert order[-1] == "host"


async def test_a_fault_while_a_node_stops_is_the_end_that_its_journal_tells():
    node = Node()
    node.parts["network"].end_fault = LocalFault("the disk is gone")
    with pytest.raises(ExceptionGroup):
        await node.run(lambda up: stop_when_up(node, up))
    told = [line for line in node.story if line in ("stopping", "failed", "crashed")]
    assert told == ["stopping", "failed"], "`atoll status` reads the newest"
    assert node.story[-1] == "host ended"


async def test_more_faults_of_one_end_are_told_once():
    node = Node()
    node.parts["driver"].fault = LocalFault("the disk is gone")
    for name in ("carry", "network", "guest"):
        node.parts[name].end_fault = LocalFault("this one too")
    with pytest.raises(LocalFault, match="the disk is gone"):
        await node.daemon.run()
    assert [line for line in node.story if line in ("stopping", "failed", "crashed")] == ["failed"]


async def test_a_fault_of_the_host_ends_the_node_in_the_same_order():
    node = Node()

    async def break_host(up: asyncio.Event) -> None:
        await up.wait()
        node.host_fault.set_exception(LocalFault("p2pd is gone"))

    with pytest.raises(ExceptionGroup) as raised:
        await node.run(break_host)
    assert [str(error) for error in raised.value.exceptions] == ["p2pd is gone"]
    assert ended(node.story)[0] == "worker saved"
    assert ended(node.story)[-1] == "host"


async def test_a_bug_in_a_part_does_not_cost_the_workers_steps(caplog):
    node = Node()
    node.parts["carry"].fault = ValueError("a bug")
    with pytest.raises(ExceptionGroup):
        await node.daemon.run()
    assert "crashed" in node.story, "`atoll status` says so of a node that is gone"
    (told,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "ValueError: a bug" in JsonLines().format(told), "and that the log has more"
    assert ended(node.story)[:2] == ["carry", "worker saved"], "it is asked before the other parts end, and it too"


async def test_a_bug_ends_the_node_though_it_changes_its_chain_while_the_worker_saves(tmp_path):
    node, asked, go_on = Node(Home(tmp_path)), asyncio.Event(), asyncio.Event()

    async def save() -> None:
        asked.set()
        await go_on.wait()

    node.daemon._parts.chain.trainer.stop = save
    node.parts["carry"].fault = ValueError("a bug")

    async def change(_) -> None:
        await asked.wait()
        node.daemon.leave_chain(None)

    with pytest.raises(ExceptionGroup):
        await node.run(change)
    assert "crashed" in node.story
    assert not any(line.startswith("changed") for line in node.story)


async def test_it_stops_while_it_loads():
    for closed in ("host", "network", "driver"):
        node = Node()
        (node.host_may_start if closed == "host" else node.parts[closed].may_come_up).clear()

        async def stop_soon(_, node=node) -> None:
            await asyncio.sleep(0.01)
            node.daemon.stop()

        await node.run(stop_soon)
        assert ended(node.story)[0] == "worker saved"
        assert node.story[-1] == "host ended"
        assert "worker up" not in node.story


async def test_to_finish_is_to_wait_for_the_round_at_hand():
    node = Node()

    async def finish(up: asyncio.Event) -> None:
        await up.wait()
        node.daemon.stop(finish=True)
        await eventually(lambda: "stopping after this round" in node.story)
        assert "worker saved" not in node.story
        node.is_idle.set()

    await node.run(finish)
    assert node.story[-1] == "host ended"


async def test_a_part_that_misses_its_deadline_is_named_and_the_next_one_ends(monkeypatch, caplog):
    monkeypatch.setattr(app, "PART_S", 0.05)
    node = Node()
    node.parts["network"].stubborn_s = HANGS_S
    await node.run(lambda up: stop_when_up(node, up))
    assert "network, addresses did not end within 0 s" in caplog.text
    assert "network ended" not in node.story, "its clean-up was cut off"
    assert node.story[-1] == "host ended"


def test_the_first_signal_asks_and_the_second_one_ends():
    """In a process of its own: the second signal must not end the tests."""
    code = (
        "import asyncio\n"
        "from atoll.p2p.system.stop_signals import StopSignals\n"
        "async def main():\n"
        "    StopSignals(lambda: print('asked', flush=True), lambda: print('at once', flush=True))\n"
        "    print('up', flush=True)\n"
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        print('unwound', flush=True)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "at once\n", "no task is unwound: it would complain on stderr"
        assert process.wait() == 130


async def test_what_the_first_signal_does_changes_with_the_phase():
    heard: asyncio.Queue[str] = asyncio.Queue()
    signals = StopSignals(lambda: heard.put_nowait("reading"))
    signals.stop = lambda: heard.put_nowait("running")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await heard.get() == "running"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)


HANG_UPS = """
import asyncio, os, signal, sys
from atoll.p2p.system.stop_signals import StopSignals
async def main():
    asked = []
    StopSignals(lambda: asked.append(1))
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
        await asyncio.sleep(0)
    for _ in range(20):  # whatever came is seen
        await asyncio.sleep(0.01)
    print(len(asked))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("names", "asked"),
    [(["SIGHUP"], 1), (["SIGHUP", "SIGHUP"], 1), (["SIGHUP", "SIGTERM"], 1), (["SIGTERM", "SIGHUP"], 1)],
)
def test_a_terminal_that_is_closed_stops_in_good_order_and_is_never_the_second_signal(names, asked):
    """A shell says it twice, and systemd beside SIGTERM: a node that ended at once would make the others wait."""
    # These tests may run under nohup.
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + HANG_UPS
    ran = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{asked}\n"), ran.stderr


def test_a_terminal_that_is_closed_stops_nothing_under_nohup():
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + HANG_UPS
    ran = subprocess.run([sys.executable, "-c", code, "SIGHUP"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr
