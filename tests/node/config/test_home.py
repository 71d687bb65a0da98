"""A home: where it is, what is in it, one daemon at a time, and sockets behind long paths."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from atoll.node.config.home import Home, hold_lock, home_at, is_locked, socket_address
from atoll.protocols.errors import ConfigError, DiskFault
from atoll.protocols.ids import RunId


def test_which_home(tmp_path):
    assert home_at(str(tmp_path / "a"), {"ATOLL_HOME": "/b"}).root == tmp_path / "a"
    assert home_at(None, {"ATOLL_HOME": "/b"}).root == Path("/b")
    assert home_at("", {}).root.name == "atoll"
    assert home_at("relative", {}).root.is_absolute()
    assert home_at("~/x", {}).root == Path.home() / "x"


@pytest.mark.parametrize(
    ("choice", "why"),
    [("~nobody-is-called-so/x", "is not known"), ("/tmp/h\udcff", "is no UTF-8"), ("", "is not known")],
)
def test_a_home_that_nobody_can_name_is_a_line(choice, why, monkeypatch):
    """Of the last kind: a container's user without HOME and without a row in /etc/passwd."""

    def nobody(_name: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(platformdirs, "user_data_path", nobody)
    with pytest.raises(ConfigError, match=why) as caught:
        home_at(choice, {})
    assert caught.value.hint


def test_a_relative_home_in_a_folder_that_is_gone_is_a_line(monkeypatch):
    def gone() -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(ConfigError, match="is not known"):
        home_at("relative", {})


def test_looking_creates_nothing_and_making_is_private(tmp_path):
    home = Home(tmp_path / "deep" / "home")
    assert home.run(RunId(b"\xab" * 32)) == home.root / "runs" / ("ab" * 32)
    assert home.run_file("tiny") == home.root / "runs" / "tiny.run"
    assert not home.root.exists()
    home.make()
    assert home.root.stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_is_a_disk_fault(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskFault):
        Home(tmp_path / "file" / "home").make()


def test_one_daemon_per_home(tmp_path):
    home = Home(tmp_path)
    with hold_lock(home):
        with pytest.raises(ConfigError) as caught, hold_lock(home):
            pass
        assert f"(pid {os.getpid()})" in caught.value.line()
        assert "atoll stop" in caught.value.line()
    with hold_lock(home):
        pass


def test_a_look_at_the_lock_stops_no_start(tmp_path, monkeypatch):
    """`status` and `stop --wait` try the lock and give it back: a start then was told that a node runs."""
    home = Home(tmp_path)
    with (tmp_path / "node.lock").open("w") as looker:
        fcntl.flock(looker, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(looker, fcntl.LOCK_UN))
        with hold_lock(home):
            assert is_locked(home)


def test_the_lock_dies_with_its_process(tmp_path):
    home = Home(tmp_path)
    code = (
        "import sys; from pathlib import Path; from atoll.node.config.home import Home, hold_lock\n"
        "with hold_lock(Home(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid}"), hold_lock(home):
            pass
        holder.kill()
        holder.wait()
    with hold_lock(home):
        assert home.lock.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("length", [1, 40, 99, 100, 101, 107, 108, 200, 240])
def test_sockets_work_behind_any_path(tmp_path, length):
    folder = tmp_path / ("d" * length)
    folder.mkdir()
    path = folder / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with socket_address(path) as address:
            listener.bind(address)
        listener.listen()
        with socket_address(path) as address:
            caller.connect(address)
    assert path.is_socket()


def test_a_short_path_is_used_as_it_is():
    with socket_address(Path("/a/b.sock")) as address:
        assert address == "/a/b.sock"
