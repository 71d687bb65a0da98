"""The plan of `node start` reads each file of the home once, and writes nothing."""

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from atoll.node.config.home import Home
from atoll.node.config.node_config import load_config
from atoll.node.daemon.build import build
from atoll.node.daemon.join_plan import JoinPlan, read_plan
from atoll.node.runs.invites import InviteOptions, invite_text
from atoll.node.runs.presets import preset
from atoll.p2p.system.atomic_files import make_folder
from atoll.protocols.errors import LocalFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.run.run_spec import sign_run

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


async def plan_in(home: Home, **flags: object) -> JoinPlan:
    config = load_config(home.config_toml, {"listen": ["/ip4/127.0.0.1/tcp/0"], "device": "cpu", **flags})
    async with asyncio.TaskGroup() as group:
        return await read_plan(
            home,
            config,
            link=LINK,
            wanted=None,
            unix_s=time.time(),
            group=group,
            report=print,
        )


async def test_a_home_is_read_once_from_the_plan_to_the_built_daemon(tmp_path):
    home = Home(tmp_path / "home")
    plan = await plan_in(home)
    assert list(tmp_path.iterdir()) == [], "nothing is written before the user agreed"
    home.make()
    plan.store()
    with Opened(home.root) as opened:
        again = await plan_in(home)
        build(again, lambda *, finish=False: None).log.close()
    assert again.identity.peer_id == plan.identity.peer_id
    assert not again.new_link
    assert {name: opened[name] for name in ("identity.key", "invite", f"{SPEC.name}.run")} == {
        "identity.key": 1,
        "invite": 1,
        f"{SPEC.name}.run": 1,
    }


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
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
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
