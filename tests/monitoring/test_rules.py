"""Alert rules fire where they should, and only there; the programs read what docker/monitoring/ holds."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.monitoring.programs import program, promtool

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "monitoring"
ALERTS = (FOLDER / "alerts.yml").read_text()
TESTS = (FOLDER / "alerts_test.yml").read_text()
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/atoll.json").read_text())
NAMES = re.findall(r"- alert: (\w+)", ALERTS)


@pytest.mark.filterwarnings("default")
def test_promtool_reads_the_rules_and_the_configuration():
    code, said = promtool("check", "rules", str(FOLDER / "alerts.yml"))
    assert (code, f"{len(NAMES)} rules found" in said) == (0, True), said
    code, said = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert code == 0, said


@pytest.mark.filterwarnings("default")
def test_each_alert_fires_and_does_not():
    code, said = promtool("test", "rules", str(FOLDER / "alerts_test.yml"))
    assert code == 0, said


@pytest.mark.filterwarnings("default")
def test_a_rule_that_never_fires_would_be_found(tmp_path):
    """The tests of the rules can fail: with a threshold that is never reached."""
    (tmp_path / "alerts.yml").write_text(ALERTS.replace("atoll_connections == 0", "atoll_connections == -1"))
    (tmp_path / "alerts_test.yml").write_text(TESTS)
    code, said = promtool("test", "rules", str(tmp_path / "alerts_test.yml"))
    assert code != 0
    assert "AtollAlone" in said


def test_every_alert_is_tested_both_ways_and_documented():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert len(NAMES) >= 8
    for name in NAMES:
        outcomes = re.findall(rf"alertname: {name}\n\s+exp_alerts:(.*)", TESTS)
        assert "" in outcomes, f"{name} is not seen to fire"
        assert " []" in outcomes, f"{name} is not seen to be silent"
        assert f"| {name} |" in page, name


def test_the_dashboard_names_its_provisioned_source_and_places_its_panels_side_by_side():
    source = re.search(r"uid: (\S+)", (FOLDER / "grafana/datasources/prometheus.yml").read_text())[1]
    panels = DASHBOARD["panels"]
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {source}
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie on each other"
    assert max(x for x, _ in cells) == 23


@pytest.mark.filterwarnings("default")
def test_compose_reads_the_profile():
    """The images are not pulled here."""
    command = [
        program("docker-compose"),
        "-f",
        str(ROOT / "docker/compose.yaml"),
        "--profile",
        "monitoring",
        "config",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    services = done.stdout.partition("services:\n")[2].partition("\nvolumes:")[0]
    parts = dict(re.findall(r"^  ([\w-]+):\n((?:   .*\n?)*)", services, re.M))
    assert {"seed", "trainer", "prometheus", "grafana"} <= set(parts)
    of_profile = {name for name, text in parts.items() if "profiles:\n    - monitoring\n" in text}
    assert of_profile == {"prometheus", "grafana"}, "without the profile nothing of it runs"


def test_compose_mounts_what_is_there():
    compose = (ROOT / "docker/compose.yaml").read_text()
    mounted = re.findall(r"- \./(monitoring/\S+?):", compose)
    assert len(mounted) == 4
    assert [path for path in mounted if not (ROOT / "docker" / path).exists()] == []
