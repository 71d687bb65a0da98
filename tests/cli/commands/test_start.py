"""`start` refuses what cannot work, in one line, before anything runs."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import threading
import time

import click
import msgspec
import psutil
import pytest

from atoll.cli.commands.start import GROUPS, start
from atoll.node.config.home import Home, hold_lock
from atoll.node.config.node_config import load_config
from atoll.node.daemon.join_plan import JoinPlan, read_plan
from atoll.node.runs.invites import InviteOptions, invite_text
from atoll.node.runs.presets import preset
from atoll.p2p.host.interface import Host
from atoll.p2p.swarm.run_fetch import serve_run
from atoll.p2p.system.key_file import load_or_create
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.p2p.transports.pylibp2p.options import PyLibp2pOptions
from atoll.p2p.transports.pylibp2p.pylibp2p_host import PyLibp2pHost
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.run.admission import AdmissionSpec, make_token
from atoll.protocols.run.invite import link_of, make_invite, seeds_of
from atoll.protocols.run.run_spec import RunSpec, sign_run
from tests.waiting import HANGS_S

MARKOV = ("--data", "synthetic:markov", "--seed", "1")


@pytest.fixture
def run_id(atoll) -> str:
    return json.loads(atoll("run", "new", "tiny", *MARKOV, "--json").out)["run"]


def refused(ran, code: int, *said: str) -> None:
    assert ran.code == code
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    for words in said:
        assert words in ran.err


def test_a_node_uses_one_arena_before_its_threads_begin(atoll, monkeypatch):
    before, used = set(threading.enumerate()), []
    monkeypatch.setattr(
        "atoll.cli.commands.start.use_one_arena", lambda: used.append(set(threading.enumerate()) - before)
    )
    atoll("start")
    assert used == [set()]


def test_without_a_run(atoll):
    refused(atoll("start"), 78, "there is no run in this home; make one with `atoll run new NAME`")
    for wanted in (("--run", "nope.run"), ("https://example.org/run",)):
        refused(atoll("start", *wanted), 78, f"there is no run file {wanted[-1]}; an invite begins with `atoll:`")


def test_limits_of_a_guest_that_cannot_be_meant_or_measured(atoll, run_id, monkeypatch, tmp_path):
    refused(
        atoll("start", "--hours", "22"), 78, "guest.hours: '22' is no range of hours; write it like 22:00-07:00"
    )
    refused(atoll("start", "--idle-after", "10"), 78, "guest.idle_after: '10' is no length of time")
    refused(atoll("start", "--nice", "-1"), 78, "guest.nice = -1 is outside 0 … 19")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(atoll("start", "--gpu-most-c", "80"), 78, "guest.gpu_most_c cannot be measured here", "no nvidia-smi")


def test_unknown_key_in_the_config(atoll, run_id, tmp_path):
    (tmp_path / "home/config.toml").write_text('lisen = "/ip4/127.0.0.1/tcp/1"\n')
    refused(atoll("start"), 78, "config.toml: unknown key lisen; did you mean listen?")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "127.0.0.1:4710"], "is not a multiaddr; for example"),
        (["--seed", "/ip4/127.0.0.1/tcp/1"], "does not end in an address and /p2p/PEERID"),
        (["--device", "tpu"], "device 'tpu' is not one of auto, cpu, cuda"),
        (["--threads", "-1"], "threads = -1 is outside"),
    ],
)
def test_flags_that_cannot_work(atoll, run_id, flags, said):
    refused(atoll("start", *flags), 78, said)


def test_a_second_daemon_in_one_home(atoll, run_id, tmp_path):
    with hold_lock(Home(tmp_path / "home")):
        refused(atoll("start"), 78, "a node already runs in", "(pid ", "another --home")


def test_another_run_of_the_same_name(atoll, run_id, tmp_path):
    shutil.move(tmp_path / "home/runs/tiny.run", tmp_path / "first.run")
    atoll("run", "new", "tiny", "--data", "synthetic:markov", "--seed", "2")
    refused(atoll("start", "--run", str(tmp_path / "first.run")), 78, "another run is called 'tiny' here; move ")


OWNER = Identity(bytes([8]) * 32)
SPEC = msgspec.structs.replace(preset("tiny", OWNER.peer_id, 1, "synthetic:markov"), name="theirs")
SEED = f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER.peer_id}"


def invited(spec: RunSpec = SPEC, signer: Identity = OWNER, *, expires_s: int = 86400, embed: bool = True) -> str:
    """A link with the run inside, so that no seed is asked."""
    run_file = sign_run(spec, OWNER) if embed else b""
    return invite_text(
        spec, signer, [SEED], time.time(), options=InviteOptions(expires_s=expires_s, run_file=run_file)
    )


def admission(mode: str, *members: Identity) -> RunSpec:
    listed = tuple(sorted(member.peer_id for member in members))
    return msgspec.structs.replace(SPEC, admission=AdmissionSpec(mode=mode, members=listed))


LINK = invited(expires_s=7 * 86400 + 3599)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (LINK[:-1], "the invite is cut off: "),
        (LINK[:200] + ("a" if LINK[200] != "a" else "b") + LINK[201:], "the invite is mistyped: "),
        (invited(expires_s=-7 * 86400 - 60), "the invite expired 7 d 0 h ago; ask "),
        (link_of(bytes(99), 9), "made by a newer atoll (version 9; this one reads 2); upgrade atoll"),
        (
            "tiny",
            "no run is called 'tiny' here; ",
        ),
    ],
    ids=["cut off", "mistyped", "expired", "newer", "a name"],  # a link has the time in it
)
def test_invites_that_cannot_work_leave_no_trace(atoll, tmp_path, link, said):
    refused(atoll("start", link, "--yes"), 78, said)
    assert list(tmp_path.iterdir()) == []


def test_an_invite_and_a_run_are_too_much(atoll, tmp_path):
    refused(atoll("start", LINK, "--run", "tiny", "--yes"), 78, "the run is named twice; drop --run")


def test_where_nobody_can_agree_it_shows_the_costs_and_refuses(atoll, tmp_path):
    ran = atoll("start", LINK)
    assert ran.code == 78
    assert ran.err.splitlines()[-1] == (
        "error: nobody is here to agree to this: stdin is no terminal; give --yes to join"
    )
    assert f"by {OWNER.peer_id}" in ran.err
    assert "signed by the run's owner, valid 7 d 0 h" in ran.err
    assert "549,760 parameters, context 128, 54 rounds" in ran.err
    assert "8.75 MB up and 8.75 MB down a day, 2.2 MB down once to join" in ran.err
    assert (
        "8 members assumed, 162 kB up and down a round, 10.0 s a round assumed, all 54 rounds of the run in less"
        " than a day" in ran.err
    )
    assert "synthetic:markov (needs no file of yours)" in ran.err
    assert "open: everybody may join" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_signer_that_is_not_the_owner_is_named(atoll):
    other = Identity(bytes([7]) * 32)
    assert f"signed by {other.peer_id} (not the run's owner)" in atoll("start", invited(signer=other)).err


def test_data_that_each_member_must_have(atoll):
    spec = msgspec.structs.replace(SPEC, data=msgspec.structs.replace(SPEC.data, source="file:book.txt"))
    link = invited(spec)
    assert "book.txt: you need your own copy; give its path with --data\n" in atoll("start", link).err
    named = msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, digest=bytes([0xAB]) * 32))
    assert "with --data; digest abababababababab\n" in atoll("start", invited(named)).err
    assert "your file /x/book.txt, which must be book.txt" in atoll("start", link, "--data", "/x/book.txt").err


def test_runs_that_do_not_admit_us(atoll, tmp_path):
    bare = make_invite(
        OWNER, admission("invite").id, (), int(time.time()) + 3600, None, sign_run(admission("invite"), OWNER)
    )
    refused(
        atoll("start", bare, "--yes"), 78, "by invitation, and no permit came along; ask its owner for an invite"
    )
    refused(
        atoll("start", invited(admission("allowlist")), "--yes"),
        78,
        "this node's (see `atoll id show`) is not on it",
    )
    thief = Identity(bytes([7]) * 32)
    run = admission("invite")
    forged = make_token(run.id, thief, bytes(32), int(time.time()) + 3600)
    link = make_invite(thief, run.id, (), int(time.time()) + 3600, forged, sign_run(run, OWNER))
    refused(atoll("start", link, "--yes"), 78, "the invite's permit was not signed by the run's owner")
    assert list(tmp_path.iterdir()) == []


def test_a_swapped_run_is_refused(atoll, tmp_path):
    link = make_invite(OWNER, SPEC.id, (), int(time.time()) + 3600, None, sign_run(admission("invite"), OWNER))
    refused(atoll("start", link, "--yes"), 78, "the run inside the invite is not the one that it names")
    assert list(tmp_path.iterdir()) == []


def test_a_run_by_invitation_is_not_started_without_one(atoll, tmp_path):
    (tmp_path / "theirs.run").write_bytes(sign_run(admission("invite"), OWNER))
    refused(atoll("start", "--run", str(tmp_path / "theirs.run")), 78, "the run is by invitation")


async def plan_for(home: Home, link: str, unix_s: float) -> JoinPlan:
    """What `start LINK` reads."""
    config = load_config(home.root / "none.toml", {"listen": ["/ip4/127.0.0.1/tcp/0"]})
    async with asyncio.TaskGroup() as group:
        return await read_plan(home, config, link=link, wanted=None, unix_s=unix_s, group=group, report=print)


async def test_who_agreed_once_is_not_asked_again_even_when_the_invite_has_expired(atoll, tmp_path):
    home = Home(tmp_path / "home")
    link, now = invited(), time.time()
    plan = await plan_for(home, link, now)
    assert plan.new_link == link
    assert not home.root.exists(), "nothing is written before the home is locked"
    home.make()
    plan.store()
    assert home.run_file("theirs").read_bytes() == sign_run(SPEC, OWNER)
    assert plan.config.seeds == (SEED,)
    assert (home.run(SPEC.id) / "invite").stat().st_mode & 0o777 == 0o600, "it may hold a secret"
    later = now + 9 * 86400
    again = await plan_for(home, link, later)
    assert (again.new_link, again.run, again.identity.peer_id) == ("", plan.run, plan.identity.peer_id)
    with pytest.raises(ExceptionGroup) as caught:
        await plan_for(home, invited(signer=Identity(bytes(32))), later)
    assert caught.group_contains(ConfigError, match="expired")


async def test_an_identity_that_another_program_made_meanwhile_is_not_replaced(tmp_path):
    home = Home(tmp_path / "home")
    plan = await plan_for(home, invited(), time.time())
    home.make()
    other = load_or_create(home.identity)
    with pytest.raises(LocalFault, match="made an identity in this home meanwhile"):
        plan.store()
    assert load_or_create(home.identity).peer_id == other.peer_id


def test_another_run_of_the_invited_ones_name(atoll, tmp_path):
    assert atoll("run", "new", "theirs", *MARKOV).code == 0
    refused(atoll("start", LINK, "--yes"), 78, "another run is called 'theirs' here; move ")


@pytest.mark.parametrize(
    ("answer", "code", "said"), [(b"n\n", 1, "not joined; nothing was written"), (b"\x03", 130, "")]
)
def test_on_a_terminal_it_asks(tmp_path, answer, code, said):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "atoll.cli.main", "--home", str(tmp_path / "home"), "start", LINK]
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0))  # fmt: skip
        os.close(theirs)
        shown = b""
        while b"Join? [Y/n]" not in shown:
            shown += terminal.read(4096)
        terminal.write(answer)
        assert process.wait(HANGS_S) == code
        shown += terminal.read(4096)
    assert said in shown.decode()
    assert list(tmp_path.iterdir()) == []


def p2pd_seed() -> Host:
    return P2pdHost(OWNER)


def pylibp2p_seed() -> Host:
    return PyLibp2pHost(OWNER, PyLibp2pOptions(listen=("/ip4/127.0.0.1/tcp/0",)))


@pytest.mark.network
@pytest.mark.parametrize(("transport", "seed"), [("p2pd", p2pd_seed), ("pylibp2p", pylibp2p_seed)])
def test_the_run_comes_from_a_seed_over_the_chosen_transport(tmp_path, transport, seed):
    """A link without the run: the process finds the run at the seed, shows it, and writes nothing.

    `--transport` holds from the first byte: who chose py-libp2p starts no p2pd.
    """

    async def names_of_children(process: asyncio.subprocess.Process) -> set[str]:
        names = set()
        while process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                names |= {child.name() for child in psutil.Process(process.pid).children(recursive=True)}
            await asyncio.sleep(0.02)
        return names

    async def main() -> tuple[int, str, set[str]]:
        host, up = seed(), asyncio.Event()
        serve_run(host, sign_run(SPEC, OWNER))
        async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
            serving = group.create_task(host.serve(up.set))
            await up.wait()
            seeds = seeds_of([f"{maddr}/p2p/{OWNER.peer_id}" for maddr in await host.addresses()])
            link = make_invite(OWNER, SPEC.id, seeds, int(time.time()) + 36000)
            flags = ("--transport", transport, "--listen", "/ip4/127.0.0.1/tcp/0")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "atoll.cli.main", "--home", str(tmp_path / "home"), "start", link, *flags),
                stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            watching = group.create_task(names_of_children(process))
            _, err = await process.communicate()
            names = await watching
            serving.cancel()
        return process.returncode, err.decode(), names

    code, err, names = asyncio.run(main())
    assert "asking 1 seed for the run" in err
    assert "549,760 parameters" in err
    assert "give --yes to join" in err
    assert code == 78
    assert ("p2pd" in names) == (transport == "p2pd"), names
    assert list(tmp_path.iterdir()) == []


def test_an_invite_that_names_nobody_is_refused_at_once(atoll, tmp_path):
    """Nobody can ever be asked, and it tried again for ever."""
    link = make_invite(OWNER, SPEC.id, (), int(time.time()) + 3600)
    ran = atoll("start", link, "--yes", "--listen", "/ip4/127.0.0.1/tcp/0")
    assert ran.code == 78
    assert ran.err.endswith("error: the invite names no node that could give its run; ask for another invite\n")
    assert list(tmp_path.iterdir()) == []


async def test_seeds_that_are_down_are_asked_again(tmp_path):
    heard = []

    class Enough(Exception):
        """Ends the test."""

    def report(line: str) -> None:
        heard.append(line)
        if len(heard) == 3:
            raise Enough

    home = Home(tmp_path / "home")
    config = load_config(tmp_path / "none.toml", {"listen": ["/ip4/127.0.0.1/tcp/0"]})
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            await read_plan(
                home,
                config,
                link=invited(embed=False),
                wanted=None,
                unix_s=time.time(),
                group=group,
                report=report,
            )
    assert caught.value.split(Enough)[0] is not None
    assert heard[0] == "asking 1 seed for the run …"
    assert f"no seed gave the run: {SEED}: " in heard[1]
    assert heard[1].endswith("trying again in 2 s (Ctrl-C to stop)")
    assert list(tmp_path.iterdir()) == []


def test_help_is_short_and_help_all_has_every_option_once(atoll):
    few, every = atoll("start", "--help"), atoll("start", "--help-all")
    assert (few.code, every.code) == (0, 0)
    assert len(few.out.splitlines()) <= 30
    assert "--device" in few.out
    assert "--port " not in few.out
    shown = [param for param in start.params if isinstance(param, click.Option) and not param.hidden]
    for param in shown:
        lines = [line for line in every.out.splitlines() if re.match(rf"  {param.opts[0]}[ ,\n]", f"{line}\n")]
        assert len(lines) == 1, param.opts
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) <= {param.name for param in shown}, "a group that names what is not there"
