"""`start --detach` and the service manager's way: real nodes, up by their own event, or seen to fail."""

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import click
import psutil
import pytest

from atoll.cli.client import ask
from atoll.cli.commands.start import start
from atoll.cli.node_commands.detached import CRASH_LOG, leave_terminal, words_of
from atoll.node.config.home import Home
from atoll.protocols.errors import DiskFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.run.invite import Seed, make_invite
from tests.waiting import HANGS_S, poll

ATOLL = (sys.executable, "-m", "atoll.cli.main")
LOCAL = ("--transport", "pylibp2p", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-port-map")


def run(home, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ATOLL, "--home", str(home), *args], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=HANGS_S, check=False,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path):
    root = tmp_path / "home"
    assert run(root, "run", "new", "tiny", "--data", "synthetic:markov").returncode == 0
    return root


@contextlib.contextmanager
def ended(pid: int):
    """Whatever happens in the block, the node is gone after it."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(pid)
            for one in [*node.children(recursive=True), node]:
                one.send_signal(signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """A child that nobody waits for in this machine's first process stays as a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def own_handlers():
    """Those of the root logger, of which `leave_terminal` takes some away, as they were."""
    root = logging.getLogger()
    before = root.handlers[:]
    yield
    root.handlers[:] = before


@pytest.mark.usefixtures("own_handlers")
def test_a_pipe_in_the_place_of_its_crash_log_is_a_line_and_nothing_waits(tmp_path, monkeypatch):
    """`start --detach` waited for a reader for ever, and only `kill -9` ended it and the node."""
    path, readers = tmp_path / CRASH_LOG, []
    os.mkfifo(path)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    late = threading.Timer(HANGS_S / 10, lambda: readers.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK)))
    late.daemon = True  # where the test fails, the process waits for no timer
    late.start()  # so that an open that waits fails this test
    try:
        with pytest.raises(DiskFault, match=CRASH_LOG) as caught:
            leave_terminal(Home(tmp_path))
    finally:
        late.cancel()
    assert "a pipe or a socket is in the place of a file" in caught.value.hint
    assert not readers


@pytest.mark.usefixtures("own_handlers")
def test_what_leaves_its_terminal_writes_to_a_pipe_that_is_read_as_before(tmp_path, monkeypatch):
    """Not blocking, which the open must be, it would lose what p2pd and the worker write into a full pipe."""
    path, given = tmp_path / CRASH_LOG, []
    os.mkfifo(path)
    monkeypatch.setattr(os, "dup2", lambda descriptor, _: given.append(os.get_blocking(descriptor)))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    leave_terminal(Home(tmp_path))
    os.close(reader)
    assert given == [True]


@pytest.mark.swarm
def test_it_returns_when_the_node_is_up_and_stop_waits_for_its_end(home):
    ran = run(home, "start", *LOCAL, "--detach", "--json")
    assert ran.returncode == 0, ran.stderr
    pid = json.loads(ran.stdout)["pid"]
    with ended(pid):
        status = ask(home, "status")
        assert status["pid"] == pid
        assert os.getsid(pid) == pid, "it has no terminal"
        assert (home / "crash.log").exists()
        stopped = run(home, "stop", "--wait")
        assert (stopped.returncode, stopped.stdout) == (0, "the node ended\n")
        poll("its process is gone", lambda: not is_alive(pid))
    log = (home / "node.log").read_text()
    assert '"message": "node ended in good order"' in log
    assert "service manager" not in log, "the command that waited for it is no manager"


def test_a_node_that_fails_early_is_reported_with_its_line_and_code(home):
    ran = run(home, "start", "--run", "nothing", "--detach")
    assert (ran.returncode, ran.stdout) == (78, "")
    assert ran.stderr == "error: no run is called 'nothing' here; known runs: tiny\n"


def test_a_command_that_is_told_to_end_while_it_waits_leaves_no_node_behind(tmp_path):
    """`timeout 60 atoll start INVITE --detach` with nodes that are away left one that tried for ever."""
    owner = Identity(bytes(32))
    nobody = Seed(owner.public_key, ("/ip4/127.0.0.1/tcp/1",))
    link = make_invite(owner, RunId(bytes(32)), (nobody,), int(time.time()) + 3600)
    command = subprocess.Popen(
        [*ATOLL, "--home", str(tmp_path / "home"), "start", link, "--yes", *LOCAL, "--detach"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (node,) = poll("the node is there", lambda: psutil.Process(command.pid).children())
    with ended(node.pid):
        poll("it reads the link", lambda: len(node.cmdline()) > 3 and "--detached" in node.cmdline())
        command.terminate()
        assert command.wait(HANGS_S) != 0
        poll("its process is gone", lambda: not is_alive(node.pid), limit_s=10.0)


@pytest.mark.swarm
def test_the_manager_hears_ready_when_the_node_answers_and_signs_of_life_until_it_ends(home, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(tmp_path / "notify"))
        link.settimeout(HANGS_S)
        environ = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        node = subprocess.Popen([*ATOLL, "--home", str(home), "start", "--plain", *LOCAL], env=environ,
                                stdout=subprocess.DEVNULL)  # fmt: skip
        with ended(node.pid):
            while not (said := link.recv(100)).startswith(b"READY=1"):
                assert said == b"WATCHDOG=1"
            assert said == f"READY=1\nMAINPID={node.pid}".encode()
            assert ask(home, "status")["pid"] == node.pid, "ready means that it answers"
            assert link.recv(100) == b"WATCHDOG=1"
            node.send_signal(signal.SIGTERM)
            while (said := link.recv(100)) != b"STOPPING=1":
                assert said == b"WATCHDOG=1"
            assert node.wait(HANGS_S) == 0


def test_the_command_line_is_given_again(tmp_path):
    args = ["--home", str(tmp_path), "atoll:abc", "--detach", "--role", "seed", "--role", "relay", "--no-relay"]
    peers = ["--peer", "/dnsaddr/one.example", "--seed", "/dnsaddr/two.example"]
    with start.make_context("start", [*args, *peers, "--port", "4711", "--yes", "--json"]) as ctx:
        words = words_of(ctx)
    with start.make_context("start", words[1:]) as again:
        same = {"detach", "as_json"}
        assert {key: value for key, value in again.params.items() if key not in same} == {
            key: value for key, value in ctx.params.items() if key not in same
        }
        assert again.params["home"] == Home(tmp_path)
        assert not again.params["detach"]
        assert again.params["seeds"] == ("/dnsaddr/one.example", "/dnsaddr/two.example")
    assert isinstance(ctx.command, click.Command)
