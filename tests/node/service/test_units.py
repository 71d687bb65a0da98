"""Unit files name the home and the interpreter as they are, whatever letters they have."""

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.node.service.units import Service, launchd_list, node_command, systemd_unit

HOMES = ["/srv/atoll", "/srv/my node", '/srv/a "b" $HOME 100% c\\d', "/srv/дом"]


def service(home: str, run: str | None = "ab" * 32, *, is_default: bool = False) -> Service:
    return Service(Path(home), node_command("/opt/venv/bin/python", Path(home), run), is_default)


def test_the_unit_says_what_the_node_promises():
    lines = systemd_unit(service("/srv/atoll")).splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=120",
        "Restart=on-failure",
        "RestartPreventExitStatus=2 78",
        "TimeoutStartSec=infinity",
        "KillMode=mixed",
        "WantedBy=default.target",
    ):
        assert line in lines
    (command,) = [line for line in lines if line.startswith("ExecStart=")]
    words = '"/opt/venv/bin/python" "-m" "atoll.cli.main" "--home" "/srv/atoll" "start" "--plain" "--run"'
    assert command == f'ExecStart={words} "{"ab" * 32}"'


def test_letters_with_a_meaning_are_kept():
    text = systemd_unit(service(HOMES[2]))
    assert r'"/srv/a \"b\" $$HOME 100%% c\\d"' in text


@pytest.mark.parametrize("home", HOMES)
def test_systemd_accepts_the_unit(tmp_path, home):
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("THE UNIT IS NOT VERIFIED HERE: no systemd-analyze")
    unit = tmp_path / "atoll.service"
    unit.write_text(systemd_unit(Service(Path(home), node_command(sys.executable, Path(home), None), True)))
    ran = subprocess.run(
        [verify, "--user", "verify", str(unit)], env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "Failed to initialize" in ran.stderr or "Failed to connect" in ran.stderr:
        pytest.skip(f"THE UNIT IS NOT VERIFIED HERE: {ran.stderr.strip()}")
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if "atoll.service" in line]) == (0, [])


@pytest.mark.parametrize("home", HOMES)
def test_launchd_reads_the_list_back(home):
    found = plistlib.loads(launchd_list(service(home, None)))
    assert found["ProgramArguments"] == ["/opt/venv/bin/python", *node_command("", Path(home), None)[1:]]
    assert found["ProgramArguments"][4] == home
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["RunAtLoad"] is True


def test_two_homes_have_two_names():
    names = [service(home).name for home in (*HOMES, "/opt/atoll")]
    assert len(set(names)) == len(names)
    assert all(name.startswith("atoll-") and name.isascii() and " " not in name for name in names)
    assert service("/srv/atoll", is_default=True).name == "atoll"
