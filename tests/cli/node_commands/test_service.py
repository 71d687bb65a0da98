"""`atoll service`: writes the file of the user's service manager, and tells it; here a program on PATH."""

import json
import os
import plistlib
from pathlib import Path

import pytest

from atoll.node.config.home import Home, hold_lock

TELLS = """#!/bin/sh
echo "${0##*/} $*" >> "$SAID"
case "$*" in *"$REFUSED"*) echo "no such thing" >&2; exit 5;; esac
"""


@pytest.fixture
def said(tmp_path, monkeypatch) -> Path:
    """The commands that the managers received; one that has REFUSED in it fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "launchctl"):
        (folder / name).write_text(TELLS)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setenv("REFUSED", "nothing is refused")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path / "said"


@pytest.fixture
def run_id(atoll) -> str:
    return json.loads(atoll("run", "new", "tiny", "--data", "synthetic:markov", "--seed", "1", "--json").out)[
        "run"
    ]


def units(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "user").rglob("*.service"))


@pytest.fixture
def on_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")


def test_show_changes_nothing(atoll, tmp_path, run_id, said, on_linux):
    ran = atoll("service", "show")
    assert ran.code == 0
    assert f'"--home" "{tmp_path / "home"}" "start" "--plain" "--run" "{run_id}"' in ran.out
    assert units(tmp_path) == []
    assert not said.exists()
    assert json.loads(atoll("service", "show", "--json").out)["installed"] is False


def test_install_and_uninstall(atoll, tmp_path, run_id, said, on_linux):
    ran = atoll("service", "install")
    assert ran.code == 0, ran.err
    (unit,) = units(tmp_path)
    assert unit.parent == tmp_path / "user" / ".config" / "systemd" / "user"
    assert "Type=notify" in unit.read_text()
    tells = [
        f"systemctl --user {words}" for words in ("daemon-reload", f"enable {unit.name}", f"restart {unit.name}")
    ]
    assert said.read_text().splitlines() == tells
    assert "loginctl enable-linger" in ran.out
    assert json.loads(atoll("service", "show", "--json").out)["installed"] is True
    said.unlink()
    assert atoll("service", "uninstall").code == 0
    assert units(tmp_path) == []
    assert said.read_text().splitlines() == [
        f"systemctl --user disable --now {unit.name}",
        "systemctl --user daemon-reload",
    ]
    ran = atoll("service", "uninstall")
    assert (ran.code, "there is no service of" in ran.err) == (78, True)


def test_a_manager_that_refuses_is_one_line(atoll, tmp_path, run_id, said, on_linux, monkeypatch):
    monkeypatch.setenv("REFUSED", "enable")
    ran = atoll("service", "install")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "failed: no such thing; the file is " in ran.err
    assert len(units(tmp_path)) == 1
    monkeypatch.setenv("REFUSED", "disable")
    ran = atoll("service", "uninstall")
    assert ran.code == 0, "a service that the manager forgot does not keep its file"
    assert ran.err.startswith("warning: ")
    assert units(tmp_path) == []


def test_a_system_without_a_manager_says_so(atoll, run_id, said, on_linux, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ran = atoll("service", "install")
    assert (ran.code, "there is no systemctl here; the file is " in ran.err) == (1, True)


def test_a_home_without_a_run_or_with_a_node_has_no_service_yet(atoll, tmp_path, said, on_linux):
    assert "there is no run in this home" in atoll("service", "install").err
    atoll("run", "new", "tiny", "--data", "synthetic:markov")
    with hold_lock(Home(tmp_path / "home")):
        ran = atoll("service", "install")
    assert (ran.code, "`atoll stop --wait` first" in ran.err) == (78, True)
    atoll("run", "new", "two", "--data", "synthetic:markov")
    assert "there is more than one run here" in atoll("service", "install").err
    assert atoll("service", "install", "--run", "two").code == 0
    assert atoll("service", "install", "--run", "tiny").code == 0, "again, with another run"
    assert len(units(tmp_path)) == 1


def test_on_macos_it_is_a_property_list(atoll, tmp_path, run_id, said, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert atoll("service", "install").code == 0
    (path,) = (tmp_path / "user" / "Library" / "LaunchAgents").iterdir()
    arguments = plistlib.loads(path.read_bytes())["ProgramArguments"]
    assert arguments[-2:] == ["--run", run_id]
    assert said.read_text().splitlines() == [f"launchctl bootstrap gui/{os.getuid()} {path}"]
    assert atoll("service", "uninstall").code == 0
    assert not path.exists()
