"""The plan of `node start` reads each file of the home once, and writes nothing."""

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.config.home import Home
from atoll.node.config.node_config import load_config
from atoll.node.daemon.build import build
from atoll.node.daemon.coordinator.driver import Driver
from atoll.node.daemon.host_factory import NodeHost
from atoll.node.daemon.join_plan import JoinPlan, read_plan
from atoll.node.ipc.chain_mark import ChainMark
from atoll.node.runs.capacity.memory_model import Free
from atoll.node.runs.capacity.open_rounds import open_rounds_of
from atoll.node.runs.invites import InviteOptions, invite_text
from atoll.node.runs.presets import preset
from atoll.node.runs.public_runs import WantedRun
from atoll.node.runs.run_files import unread_text
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.system.atomic_files import make_folder
from atoll.protocols.errors import ConfigError, LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.ledger.records import Ack
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.run_spec import sign_run
from atoll.protocols.run.sections.objective import ObjectiveSpec
from tests.waiting import HANGS_S

OWNER = Identity(bytes([8]) * 32)
SPEC = preset("moe-smoke", OWNER.peer_id, 1, "synthetic:markov")
SEED = f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER.peer_id}"
LINK = invite_text(SPEC, OWNER, [SEED], time.time(), options=InviteOptions(run_file=sign_run(SPEC, OWNER)))


class Opened(Counter[str]):
    """Counts how often files below a folder are opened, by name. An audit hook stays: it counts only inside."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._listens = str(folder), False
        sys.addaudithook(self._on_event)

    def __enter__(self) -> "Opened":
        self._listens = True
        return self

    def __exit__(self, *_: object) -> None:
        self._listens = False

    def _on_event(self, event: str, args: tuple[object, ...]) -> None:
        if self._listens and event == "open" and str(args[0]).startswith(self._folder):
            self[Path(str(args[0])).name] += 1


async def plan_in(
    home: Home, *, link: str | None = LINK, wanted: str | None = None, free: Free | None = None, **flags: object
) -> JoinPlan:
    config = load_config(home.config_toml, {"listen": ["/ip4/127.0.0.1/tcp/0"], "device": "cpu", **flags})
    async with asyncio.TaskGroup() as group:
        return await read_plan(
            home,
            config,
            link=link,
            wanted=wanted,
            unix_s=time.time(),
            group=group,
            report=print,
            free=free,
        )


async def test_a_node_whose_worker_began_early_goes_by_what_was_free_before(tmp_path):
    """The worker holds memory by then."""
    first = Free(memory_bytes=1 << 50, disk_bytes=1 << 50)
    assert (await plan_in(Home(tmp_path / "home"), free=first)).free == first
    assert (await plan_in(Home(tmp_path / "home"))).free != first


async def test_a_home_is_read_once_from_the_plan_to_the_built_daemon(tmp_path):
    home = Home(tmp_path / "home")
    plan = await plan_in(home)
    assert list(tmp_path.iterdir()) == [], "nothing is written before the user agreed"
    home.make()
    plan.store()
    with Opened(home.root) as opened:
        again = await plan_in(home)
        build(again, lambda *, finish=False: None, lambda first: None).log.close()
    assert again.identity.peer_id == plan.identity.peer_id
    assert not again.new_link
    assert {name: opened[name] for name in ("identity.key", "invite", f"{SPEC.name}.run")} == {
        "identity.key": 1,
        "invite": 1,
        f"{SPEC.name}.run": 1,
    }


async def test_a_term_that_is_not_installed_is_named_before_anything_is_written(tmp_path):
    """Who trains nothing joins without it."""
    term = ObjectiveSpec(name="nowhere.1", weight=1.0, package="atoll-nowhere")
    spec = replace(preset("tiny", OWNER.peer_id, 1, "synthetic:markov"), objective=term)
    link = invite_text(spec, OWNER, [SEED], time.time(), options=InviteOptions(run_file=sign_run(spec, OWNER)))
    with pytest.raises(ExceptionGroup) as caught:
        await plan_in(Home(tmp_path / "home"), link=link)
    (fault,) = caught.value.exceptions
    assert isinstance(fault, ConfigError)
    assert "needs the objective nowhere.1, which is not installed here" in str(fault)
    assert "atoll-nowhere" in fault.hint
    assert list(tmp_path.iterdir()) == []
    assert (await plan_in(Home(tmp_path / "home"), link=link, roles=["seed"])).run.spec == spec


async def test_the_place_of_a_text_is_remembered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = replace(SPEC, name="book", data=replace(SPEC.data, source="file:book.txt"))
    link = invite_text(spec, OWNER, [SEED], time.time(), options=InviteOptions(run_file=sign_run(spec, OWNER)))
    home = Home(tmp_path / "home")
    plan = await plan_in(home, link=link, data="books/book.txt")
    home.make()
    plan.store()
    assert (await plan_in(home, link=link)).config.data == str(tmp_path / "books/book.txt")
    moved = await plan_in(home, link=link, data="/other/book.txt")
    assert moved.config.data == "/other/book.txt"
    moved.store()
    assert (await plan_in(home, link=link)).config.data == "/other/book.txt"
    other = await plan_in(home)
    other.store()
    assert other.config.data == "", "it is of one run"


async def test_a_text_that_is_not_here_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = replace(SPEC, name="book", data=replace(SPEC.data, source="file:book.txt?column=body"))
    link = invite_text(spec, OWNER, [SEED], time.time(), options=InviteOptions(run_file=sign_run(spec, OWNER)))
    home = Home(tmp_path / "home")
    for data, said in (("", "no data file at book.txt"), ("other.txt", "no data file at other.txt")):
        with pytest.raises(ConfigError, match=said):
            (await plan_in(home, link=link, data=data)).check_text()
    (tmp_path / "book.txt").write_text("a text")
    for data in ("", str(tmp_path / "book.txt"), "books/*.txt"):
        (await plan_in(home, link=link, data=data)).check_text()
    (await plan_in(home)).check_text()


@pytest.mark.parametrize(("source", "is_read"), [("builtin:x", False), ("packed:x", True), ("file:x", True)])
def test_a_path_of_a_text_that_comes_with_atoll_is_not_read(source, is_read):
    spec = replace(SPEC, data=replace(SPEC.data, source=source))
    assert unread_text(spec, "") == ""
    said = f"a.txt is not read: the text of this run is {source}"
    assert unread_text(spec, "a.txt") == ("" if is_read else said)


@pytest.mark.parametrize("port", [0, 4710])
async def test_a_picked_port_is_written_with_the_rest(tmp_path, port):
    home = Home(tmp_path / "home")
    plan = await plan_in(home, listen=[], port=port)
    make_folder(home.root)
    home.make()
    plan.store()
    assert home.port.exists() == (port == 0)
    if port == 0:
        assert f"/tcp/{int(home.port.read_text())}" in plan.listen.maddrs[0]


async def test_a_host_that_fails_while_the_run_is_fetched_ends_the_start(tmp_path, monkeypatch):
    """Trying again for ever would hide it: nothing is found over a host that has ended."""

    asked, ended = asyncio.Event(), asyncio.Event()

    class DyingHost:
        async def serve(self, ready) -> None:
            ready()
            await asked.wait()
            ended.set()
            raise LocalFault("p2pd ended five times in a row")

    async def unreachable(*_: object) -> bytes:
        asked.set()
        await ended.wait()
        raise Unreachable("no connection")

    monkeypatch.setattr("atoll.node.runs.run_files.fetch_run", unreachable)
    monkeypatch.setattr("atoll.node.daemon.join_plan.make_host", lambda *_: DyingHost())
    home = Home(tmp_path / "home")
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        with pytest.raises(LocalFault, match="five times"):
            await read_plan(
                home,
                load_config(home.config_toml, {}),
                link=invite_text(SPEC, OWNER, [SEED], time.time(), options=InviteOptions(run_file=b"")),
                wanted=None,
                unix_s=time.time(),
                group=group,
                report=print,
            )


MEMBER = PeerAddress(OWNER.peer_id, ("/ip4/203.0.113.7/tcp/4001",))


@pytest.fixture
def in_dht(monkeypatch) -> list[WantedRun]:
    """A DHT that has the run; what it was asked for."""
    asked = []

    async def find(dht: Dht, host: object, wanted: WantedRun) -> tuple[bytes, tuple[PeerAddress, ...]]:
        assert dht.is_on
        asked.append(wanted)
        return sign_run(SPEC, OWNER), (MEMBER,)

    async def start(host: NodeHost) -> None:
        return

    monkeypatch.setattr("atoll.node.daemon.join_plan.find_joinable", find)
    monkeypatch.setattr(NodeHost, "start", start)
    return asked


@pytest.mark.parametrize("called", [f"{SPEC.name}@{OWNER.peer_id}", SPEC.id.hex(), SPEC.id.hex()[:8].upper()])
async def test_a_run_of_the_dht_is_agreed_to_once(tmp_path, in_dht, called):
    home = Home(tmp_path / "home")
    plan = await plan_in(home, link=None, wanted=called, dht_bootstrap=[SEED])
    assert plan.is_new, "the user is asked"
    assert (plan.run.spec, plan.invite, plan.new_link, plan.members) == (SPEC, None, "", (MEMBER,))
    assert list(tmp_path.iterdir()) == [], "nothing is written before the user agreed"
    home.make()
    plan.store()
    parts = build(plan, lambda *, finish=False: None, lambda first: None)
    parts.log.close()
    assert parts.swarm.discovery.book.get(MEMBER.peer).maddrs == {MEMBER.maddrs[0]: "dht"}
    again = await plan_in(home, link=None, wanted=called)
    assert (again.is_new, again.run.spec, len(in_dht)) == (False, SPEC, 1), "the home has it now"


async def test_the_limits_of_the_ledger_are_the_users(tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    home.run_file("run").write_bytes(sign_run(SPEC, OWNER))
    limits = {"ledger_bytes": 1 << 30, "ledger_author_bytes": 1 << 22, "ledger_round_bytes": 1 << 14}
    plan = await plan_in(home, link=None, wanted="run", **limits)
    plan.store()
    parts = build(plan, lambda *, finish=False: None, lambda first: None)
    parts.log.close()
    quota = parts.swarm.ledger.quota
    assert (quota.disk_bytes, quota.author_bytes, quota.round_bytes) == tuple(limits.values())
    assert parts.swarm.newcomers.shares.quota == quota


@pytest.mark.parametrize("every_s", [0, 600])
async def test_sample_texts_are_written_after_final_rounds_where_the_user_wants_them(tmp_path, every_s):
    home = Home(tmp_path / "home")
    home.make()
    home.run_file("run").write_bytes(sign_run(SPEC, OWNER))
    plan = await plan_in(home, link=None, wanted="run", sample_every_s=every_s or None, web="localhost:0")
    plan.store()
    parts = build(plan, lambda *, finish=False: None, lambda first: None)
    heard = [one for one in parts.log.listeners if getattr(one, "__self__", None) is parts.samples]
    parts.log.close()
    assert (parts.samples is not None) == bool(every_s) == bool(heard)
    if parts.samples is not None:
        assert parts.samples._command[-3:] == (str(home.root), SPEC.id.hex(), "")
        assert parts.samples._obstacle() == "the worker is starting"


async def test_the_bound_of_open_rounds_is_what_the_user_set(tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    home.run_file("run").write_bytes(sign_run(SPEC, OWNER))
    given = 5 * largest_payload(SPEC)
    plan = await plan_in(home, link=None, wanted="run", open_rounds_bytes=given)
    parts = build(plan, lambda *, finish=False: None, lambda first: None)
    parts.log.close()
    assert parts.chain.driver.round.config.open_rounds == open_rounds_of(SPEC, given)
    assert parts.chain.driver.round.config.open_rounds.payloads == 5


async def test_on_another_chain_there_is_a_new_driver_over_the_same_network(tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    home.run_file("run").write_bytes(sign_run(SPEC, OWNER))
    left = []
    parts = build(await plan_in(home, link=None, wanted="run"), lambda *, finish=False: None, left.append)
    before, trainer, operator = parts.chain.driver, parts.chain.trainer, parts.control._operator
    parts.net.publish(Ack(Round(0), Digest(bytes(32)), Digest(bytes(32))))
    assert len(parts.net.entries()) == 1
    asked = list[Driver]()
    trainer.restart = lambda: asked.append(parts.chain.driver)
    assert before.finalizer.left_with is None
    before.chain_exit.leave(Round(7))
    assert ChainMark(parts.chain._folder).first() == 7, "the next session reads it, also after a kill from now on"
    assert left == [7]
    parts.chain.change("on battery")
    parts.log.close()
    now = parts.chain.driver
    assert asked == [now], "its worker starts anew while it reads the ledger"
    assert now.finalizer.left_with == -1, "what it finds on its disk is of another chain"
    assert now is not before
    assert operator.control is now, "the user sees what the node does now"
    assert parts.chain.trainer is trainer, "its process goes on"
    assert parts.swarm.on_pruned == now.on_pruned
    assert parts.swarm.replication.orphans.on_found == now.on_orphans
    assert now.chain_exit.begin_again is parts.chain.on_other_chain
    assert not now.chain_exit.has_left, "it may leave this one, too"
    assert len(parts.net.entries()) == 1, "it reads the whole ledger"
    for event in now.queue._events:
        event()
    assert now.round.held == "on battery", "what holds the node holds it on any chain"
    parts.log.on_closed(True)
    assert home.control_socket.exists(), "as after a kill: `stop --wait` is no success"


async def test_a_run_of_this_home_is_not_looked_for_and_a_typo_neither(tmp_path, in_dht):
    home = Home(tmp_path / "home")
    home.make()
    home.run_file("deadbeef").write_bytes(sign_run(SPEC, OWNER))
    assert not (await plan_in(home, link=None, wanted="deadbeef")).is_new, "a name that looks like an id"
    with pytest.raises(ExceptionGroup) as caught:
        await plan_in(home, link=None, wanted="typo")
    assert caught.group_contains(ConfigError, match="no run is called 'typo' here")
    with pytest.raises(ExceptionGroup) as caught:
        await plan_in(Home(tmp_path / "none"), link=None, wanted="0" * 64)
    assert caught.group_contains(ConfigError, match="no peer is known that serves the DHT")
    assert in_dht == []


@pytest.mark.parametrize(
    ("mode", "public", "is_listed"),
    [
        ("open", None, True),
        ("invite", None, False),
        ("allowlist", None, False),
        ("open", False, False),
        ("invite", True, True),
    ],
)
async def test_a_run_is_private_unless_everybody_may_join_or_the_user_says_so(tmp_path, mode, public, is_listed):
    spec = replace(SPEC, admission=AdmissionSpec(mode=mode))
    home = Home(tmp_path / "home")
    home.make()
    home.identity.write_bytes(bytes([8]) * 32)
    home.identity.chmod(0o600)
    home.run_file("run").write_bytes(sign_run(spec, OWNER))
    plan = await plan_in(home, link=None, wanted="run", public=public, dht_bootstrap=[SEED])
    parts = build(plan, lambda *, finish=False: None, lambda first: None)
    parts.log.close()
    use = parts.swarm._dht
    assert (use.listing is not None) == is_listed
    assert use.is_owner
    assert use.part().role == ("client" if is_listed else "off")
    assert use.listing is None or use.listing.run_file == sign_run(spec, OWNER)
