"""What a machine says about itself, from folders as the kernel has them and from programs that stand in."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from atoll.node.config.guest import GuestLimits
from atoll.node.guest.sensors import (
    MachineFiles,
    MachineSensors,
    check_sensors,
    desktop_used_at,
    hottest,
    on_battery,
    typed_at,
)
from atoll.protocols.errors import ConfigError, LocalFault
from tests.waiting import HANGS_S, eventually


def supplies(root: Path, **of: dict[str, str]) -> Path:
    for name, files in of.items():
        (root / name).mkdir(parents=True)
        for file, text in files.items():
            (root / name / file).write_text(text + "\n")
    root.mkdir(exist_ok=True)
    return root


FULL, USED = {"type": "Battery", "status": "Full"}, {"type": "Battery", "status": "Discharging"}
MOUSE = {"type": "Battery", "status": "Discharging", "scope": "Device"}


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ({}, False),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": FULL}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": USED}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": USED}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": USED, "usb": {"type": "USB", "online": "1"}}, False),
        ({"BAT0": FULL, "BAT1": USED}, True),
        ({"hid": MOUSE}, False),
        ({"AC": {"type": "Mains", "online": "0"}}, False),
        ({"BAT0": {"type": "Battery"}}, False),
        ({"BAT0": {}}, False),
    ],
)
def test_power(tmp_path, of, expected):
    assert on_battery(supplies(tmp_path / "power", **of)) is expected


def test_power_that_cannot_be_read_is_a_fault(tmp_path):
    with pytest.raises(LocalFault, match="cannot read"):
        on_battery(tmp_path / "none")


def terminals(root: Path, **at_s: float) -> Path:
    (root / "pts").mkdir(parents=True)
    for name, at in at_s.items():
        path = root / name.replace("_", "/")
        path.write_text("")
        os.utime(path, (at, 0))
    return root


def test_the_terminal_that_was_typed_in_last_counts(tmp_path):
    assert max(typed_at(terminals(tmp_path / "dev", pts_0=100.0, pts_12=300.0, tty1=200.0))) == 300.0
    two = terminals(tmp_path / "two", pts_0=100.0, tty1=200.0, ttyS0=900.0, pts_ptmx=900.0)
    assert max(typed_at(two)) == 200.0
    assert typed_at(terminals(tmp_path / "none")) == []


def session(kind: str, idle: str = "no", since: str = "0", state: str = "active", of: str = "user") -> str:
    return f"Class={of}\nType={kind}\nState={state}\nIdleHint={idle}\nIdleSinceHint={since}"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", 0.0),
        (session("tty"), 0.0),
        (session("wayland"), 50.0),
        (session("x11", "yes", "7000000"), 7.0),
        (session("x11", "yes", "7000000") + "\n\n" + session("wayland", "yes", "9000000"), 9.0),
        (session("x11", "yes", "7000000") + "\n\n" + session("wayland"), 50.0),
        (session("x11", of="greeter"), 0.0),
        (session("x11", state="closing"), 0.0),
        (session("x11", "yes", "soon"), 50.0),
        ("garbage\n\n=\n", 0.0),
    ],
)
def test_desktops(printed, expected):
    assert max(desktop_used_at(printed + "\n", 50.0), default=0.0) == expected


def test_the_hottest_gpu_counts():
    assert hottest("41\n83\n") == 83
    assert hottest("[N/A]\n60\n") == 60
    for printed in ("", "[N/A]\n", "No devices were found\n", "-5\n"):
        with pytest.raises(LocalFault, match="knows no temperature"):
            hottest(printed)


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def sensors(tmp_path: Path, *, wall: float = 1000.0, **files: object) -> MachineSensors:
    given = {"loginctl": str(tmp_path / "no-loginctl"), "displays": tmp_path / "displays"} | files
    return MachineSensors(MachineFiles(**given), lambda: wall)


async def test_a_program_that_answers(tmp_path):
    smi = program(tmp_path / "smi", 'test "$1" = --query-gpu=temperature.gpu && printf "55\\n66\\n"')
    assert await sensors(tmp_path, nvidia_smi=smi).gpu_c() == 66


async def test_a_program_that_fails_or_is_not_there_is_a_fault(tmp_path):
    with pytest.raises(LocalFault, match="ended with code 9"):
        await sensors(tmp_path, nvidia_smi=program(tmp_path / "smi", "exit 9")).gpu_c()
    with pytest.raises(LocalFault, match="cannot run"):
        await sensors(tmp_path, nvidia_smi=str(tmp_path / "none")).gpu_c()


async def test_a_program_that_hangs_is_ended_at_the_deadline(tmp_path):
    smi = program(tmp_path / "smi", f"echo $$ > {tmp_path}/pid; exec sleep 100")
    machine = sensors(tmp_path, nvidia_smi=smi)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(machine.gpu_c())
        await eventually(lambda: smi in machine._programs)
        asking.cancel()  # as a deadline does it
    process = machine._programs[smi]
    async with asyncio.timeout(HANGS_S / 15):
        assert await process.wait() == -9
    program(tmp_path / "smi", "echo 50")
    assert await machine.gpu_c() == 50


async def test_a_read_that_hangs_is_not_begun_twice(tmp_path, monkeypatch):
    power, go_on, begun = supplies(tmp_path / "power"), threading.Event(), []

    def hang(_: Path) -> bool:
        begun.append(1)
        go_on.wait(30.0)
        return True

    monkeypatch.setattr("atoll.node.guest.sensors.on_battery", hang)
    machine = sensors(tmp_path, power=power)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(machine.on_battery())
        await eventually(lambda: begun)
        asking.cancel()
    with pytest.raises(LocalFault, match="did not answer the read before"):
        await machine.on_battery()
    assert begun == [1]
    go_on.set()
    await eventually(lambda: not machine._hanging)
    assert await machine.on_battery() is True


async def test_idle_is_the_least_of_terminals_and_desktops(tmp_path):
    dev = terminals(tmp_path / "dev", pts_0=400.0)
    assert await sensors(tmp_path, devices=dev).idle_s() == 600.0
    shown = session("x11", "yes", "700000000").replace("\n", "\\n")
    script = f'if [ "$1" = list-sessions ]; then echo " 2 1000 me seat0"; else printf "{shown}\\n"; fi'
    loginctl = program(tmp_path / "loginctl", script)
    assert await sensors(tmp_path, devices=dev, loginctl=loginctl).idle_s() == 300.0
    assert await sensors(tmp_path, devices=terminals(tmp_path / "none")).idle_s() == 1000.0
    assert await sensors(tmp_path, wall=300.0, devices=dev).idle_s() == 0.0, "a clock that was set back"


async def test_a_clock_that_was_put_back_makes_nobody_sit_here_for_hours(tmp_path):
    """A use of before lies in the future then: it counts from when it was seen so."""
    wall = [300.0]
    dev = terminals(tmp_path / "dev", pts_0=22_000.0, pts_1=100.0)
    machine = MachineSensors(MachineFiles(devices=dev, loginctl=str(tmp_path / "none")), lambda: wall[0])
    assert await machine.idle_s() == 0.0
    wall[0] = 900.0
    assert await machine.idle_s() == 600.0
    os.utime(dev / "pts/1", (800.0, 0))
    assert await machine.idle_s() == 100.0, "other terminals say when they are used"


async def test_without_logind_terminals_say_it_all_unless_a_desktop_runs(tmp_path):
    dev = terminals(tmp_path / "dev", pts_0=400.0)
    loginctl = program(tmp_path / "loginctl", "exit 1")
    assert await sensors(tmp_path, devices=dev, loginctl=loginctl).idle_s() == 600.0
    (tmp_path / "displays").mkdir()
    (tmp_path / "displays/X0").write_text("")
    with pytest.raises(LocalFault, match="ended with code 1"):
        await sensors(tmp_path, devices=dev, loginctl=loginctl).idle_s()


def test_a_limit_that_this_machine_cannot_measure_is_refused(tmp_path):
    none = MachineFiles(
        power=tmp_path / "none",
        devices=tmp_path,
        displays=tmp_path / "x",
        loginctl="no-such",
        nvidia_smi="no-such",
    )
    for limits, said in (
        (GuestLimits(mains_only=True), "guest.battery cannot be measured here: there is no"),
        (GuestLimits(idle_s=600), "guest.idle_after cannot be measured here: there is no"),
        (GuestLimits(gpu_most_c=80), "guest.gpu_most_c cannot be measured here: there is no nvidia-smi"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_sensors(limits, none)
        assert said in caught.value.line()
    check_sensors(GuestLimits(), none)
    terminals(tmp_path)
    check_sensors(GuestLimits(idle_s=600), none)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/X0").write_text("")
    with pytest.raises(ConfigError, match="no loginctl that knows"):
        check_sensors(GuestLimits(idle_s=600), none)
