"""`atoll doctor` as a user runs it: with a node, without one, and with a home that is broken."""

import json
from pathlib import Path

import msgspec
import pytest

from atoll.cli import doctor_findings
from atoll.cli.client import NoAnswer
from atoll.cli.node_commands import doctor_screen
from atoll.cli.node_commands.doctor_screen import lines
from atoll.node.config.home import Home, hold_lock
from atoll.node.doctor import machine as doctor_machine
from atoll.node.doctor.checks import Finding
from atoll.node.runs.capacity.machine_fit import Machine, PresetFit
from atoll.protocols.errors import counted
from tests.test_docs import ROOT


@pytest.fixture
def quick(monkeypatch) -> None:
    """Without the check that imports torch in a child: tests/node/doctor/test_checks.py has it."""
    kept = tuple(check for check in doctor_findings.CHECKS if check.work is not doctor_machine.gpu)
    monkeypatch.setattr(doctor_findings, "CHECKS", kept)


def rows_in(out: str) -> dict[str, Finding]:
    return {row.check: row for row in msgspec.json.decode(out, type=list[Finding])}


@pytest.mark.network
def test_without_a_node(atoll, tmp_path: Path) -> None:
    ran = atoll("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert not (tmp_path / "home").exists(), "looking makes nothing"
    text = ran.out.splitlines()
    assert len(text) <= 40
    assert "no node runs in" in ran.out
    assert "give one with --peer, `seeds` in config.toml, or an invite" in ran.out
    counts = [sum(line.startswith(state) for line in text) for state in ("pass", "warn", "skip")]
    assert (
        text[-1].strip()
        == f"{counts[0]} passed, {counted(counts[1], 'warning')}, 0 failed, {counts[2]} not checked"
    )
    assert counts[2] >= 5, "no run, no seed, no key"
    assert {line[:4] for line in text} <= {"pass", "warn", "skip", "    "}
    assert [line for line in text if line.startswith("pass gpu") or line.startswith("warn gpu")]


@pytest.mark.network
def test_with_a_node_as_json(atoll, daemon, quick) -> None:
    daemon.operator.state = msgspec.structs.replace(daemon.operator.state, uptime_s=600.0)
    ran = atoll("doctor", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert set(json.loads(ran.out)[0]) == {"check", "state", "found", "remedy"}
    rows = rows_in(ran.out)
    assert rows["node"].found.startswith("pid 4711, collecting: waiting for 1 of 4")
    assert (rows["peers"].state, rows["peers"].found) == ("pass", "3 connections (3 direct)")
    assert rows["port"].found == "the node listens on 4710"


def test_a_bad_configuration_is_a_row_and_the_other_checks_go_on(atoll, tmp_path: Path, quick) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.toml").write_text("prot = 4710")
    (tmp_path / "home" / "identity.key").write_bytes(b"short")
    ran = atoll("doctor", "--json")
    assert ran.code == 1
    rows = rows_in(ran.out)
    assert (rows["config"].state, rows["config"].remedy) == ("fail", "did you mean port?")
    assert rows["identity"].state == "fail"
    assert rows["disk"].state == "skip"


def test_a_node_that_does_not_answer_has_one_row_and_is_not_said_to_be_absent(atoll, quick, monkeypatch) -> None:
    def mute(*_: object) -> None:
        raise NoAnswer("the node does not answer", hint="look at its log with `atoll logs`")

    monkeypatch.setattr(doctor_findings, "ask", mute)
    ran = atoll("doctor", "--json")
    rows = [row for row in msgspec.json.decode(ran.out, type=list[Finding]) if row.check == "node"]
    assert rows == [Finding("node", "fail", "the node does not answer", "look at its log with `atoll logs`")]
    assert ran.code == 1


def test_a_node_that_starts_is_not_to_be_started(atoll, quick, tmp_path: Path) -> None:
    with hold_lock(Home(tmp_path / "home")):
        row = rows_in(atoll("doctor", "--json").out)["node"]
    assert (row.state, row.remedy) == ("warn", "ask again in a moment")
    assert "starts or ends, and does not answer: NAT" in row.found


def test_an_unknown_run_is_refused(atoll, quick) -> None:
    ran = atoll("doctor", "--run", "nothing")
    assert ran.code == 78
    assert "no run is called 'nothing' here" in ran.err


def test_a_bug_in_a_check_is_a_row_and_stands_in_a_log(atoll, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "home").mkdir(mode=0o700)

    def bug(patient):
        raise ZeroDivisionError("in a test")

    monkeypatch.setattr(
        doctor_findings, "CHECKS", (doctor_findings.CHECKS[0]._replace(work=bug), doctor_findings.CHECKS[2])
    )
    ran = atoll("doctor")
    assert (ran.code, ran.err) == (1, "")
    assert "fail identity   ZeroDivisionError: in a test" in ran.out
    assert "Traceback" not in ran.out
    assert "Traceback" in (tmp_path / "home" / "doctor.log").read_text()


def test_lines_are_aligned_and_say_what_to_do() -> None:
    rows = [Finding("disk", "pass", "much"), Finding("clock", "fail", "wrong", "set it")]
    rows.append(Finding("udp", "skip", "no seed"))
    assert lines(rows) == [
        ("pass", "disk       much"),
        ("fail", "clock      wrong"),
        ("", "           → set it"),
        ("skip", "udp        no seed"),
        ("", "1 passed, 0 warnings, 1 failed, 1 not checked"),
    ]


def test_fit_shows_the_presets_of_a_machine_and_makes_nothing(atoll, tmp_path, monkeypatch):
    ran = atoll("doctor", "--fit", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert set(found) == {"machine", "presets", "largest"}
    assert [row["preset"] for row in found["presets"] if row["preset"] == "tiny"] == ["tiny"]
    of = {row["preset"]: row for row in found["presets"]}
    between = (of["10m"]["memory_bytes"] + of["50m"]["memory_bytes"]) // 2
    for memory, free, best in ((between, between, "moe-12m"), (1, 1, ""), (1 << 50, 1, "1b")):
        machine = Machine(memory, free, "cpu")
        monkeypatch.setattr(doctor_screen, "measure_machine", lambda *_, machine=machine: machine)
        assert json.loads(atoll("doctor", "--fit", "--json").out)["largest"] == best
        lines = atoll("doctor", "--fit").out.splitlines()
        for name, line in ((row.split()[0], row) for row in lines[3:-2]):
            fits = of[name]["memory_bytes"] <= memory
            now = "yes" if of[name]["memory_bytes"] <= free else "when other programs are closed"
            assert line.endswith(now if fits else "  no")
        ends = f"{best} is the largest that fits: atoll run new NAME --preset {best}" if best else "no preset fits"
        assert lines[-1].startswith(ends)
    assert list(tmp_path.iterdir()) == []


def test_fit_shows_the_device_of_a_machine_that_has_one(atoll, monkeypatch, tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "config.toml").write_text('device = "cuda"')
    for machine, said in (
        (Machine(1 << 50, 1 << 50, "cuda", 4 << 30, 2 << 30), "device  cuda: 4.29 GB, 2.15 GB of it free"),
        (Machine(1 << 50, 1 << 50, "cuda"), "device  cuda: how much it has is unknown here"),
    ):
        monkeypatch.setattr(doctor_screen, "measure_machine", lambda *_, machine=machine: machine)
        lines = atoll("doctor", "--fit").out.splitlines()
        assert lines[1] == said
        assert lines[3].split()[:5] == ["preset", "parameters", "memory", "device", "a"]
        shares = {row.split()[0]: row for row in lines[4:-2]}
        assert "2 of 8 slices: " in shares["1b"]
        assert shares["1b"].count(" GB") == 4, "of the host and of the device, whole and of the share"
        assert "slices" not in shares["moe-12m"]
        assert ("too large" in shares["1b"]) == (machine.device_bytes is not None)


def test_every_field_of_a_fit_is_in_the_page_of_json():
    section = (ROOT / "docs" / "json.md").read_text().split("With `--fit`")[1].split("\n## ")[0]
    fields = {*Machine.__struct_fields__, *PresetFit.__struct_fields__}
    assert {name for name in fields if f"`{name}`" not in section} == set()


def test_fit_is_not_about_a_run(atoll):
    ran = atoll("doctor", "--fit", "--run", "x")
    assert ran.code == 78
    assert ran.err == "error: --fit is about presets; `atoll run show x` says what that run needs here\n"
