"""What a real node says of itself, read by the real Prometheus: its text, the dashboard's queries, the alerts."""

import csv
import json
import os
import re
import time
import urllib.request

import pytest

from atoll.node.daemon.loggers.events import COLUMNS
from tests.e2e.conftest import nodes, nodes_in, until
from tests.monitoring.programs import prometheus, promtool
from tests.monitoring.test_rules import DASHBOARD, FOLDER, NAMES
from tests.waiting import poll

__all__ = ["nodes", "until"]
pytestmark = [
    pytest.mark.swarm,
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group("monitoring"),
]

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: atoll
    static_configs: [{{targets: ["{one}", "{other}"]}}]
"""
EXPRESSIONS = [
    target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


def text_of(url: str) -> bytes:
    with urllib.request.urlopen(f"{url}metrics", timeout=60) as reply:
        return reply.read()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def value(text: bytes, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text.decode(), re.M)
    assert found is not None, name
    return float(found[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two nodes of one run with pages, both in its rounds."""
    with nodes_in(tmp_path_factory.mktemp("pair")) as make:
        one, other = make("one"), make("other")
        run = str(one.new_run())
        web = ("--web", "127.0.0.1:0", "--eval-every", "1")
        one.start(*web, "--logger", "jsonl", "--logger", "csv").up()
        other.start("--run", run, "--seed", one.seed(), *web).up()
        poll("both contribute", lambda: any(len(row["contributors"]) == 2 and row["final"] for row in one.rows()))
        yield one, other
        one.stop()
        other.stop()


def test_promtool_and_prometheus_find_nothing_to_complain_about(pair, until, tmp_path):
    one, other = pair
    url, page = one.status()["web"], other.status()["web"]
    until("two rounds are measured", lambda: value(text_of(url), "atoll_round_seconds_count") >= 2)
    text = text_of(url)
    assert promtool("check", "metrics", given=text) == (0, "")
    _is_measured(text, one.status())
    places = [re.search(r"//([^/]+)/", address)[1] for address in (url, page)]
    config = CONFIG.format(rules=FOLDER / "alerts.yml", one=places[0], other=places[1])
    with prometheus(tmp_path, config) as found:
        until("both are scraped", lambda: len(found.query("count_over_time(atoll_round[1m]) >= 5")) == 2)
        assert len(EXPRESSIONS) > 25
        assert not any("$" in expression for expression in EXPRESSIONS)
        assert {rule["name"] for rule in found.rules()} == set(NAMES)
        assert all(rule["health"] == "ok" for rule in found.rules())
        # Some figures are there only while a node trains: each query must have an answer at some time.
        for expression in EXPRESSIONS:
            until(f"data for {expression}", lambda asked=expression: found.query(asked))
        variable = DASHBOARD["templating"]["list"][0]["query"]["query"]
        assert found.query(re.search(r"label_values\((\w+), instance\)", variable)[1])
        assert found.query('up{job="atoll"} == 1')
        assert not found.query('ALERTS{alertname!~"AtollDisk"}')


def _is_measured(text: bytes, status) -> None:
    """The samples are of these processes and this run."""
    assert f'run="{status["run"]}"' in text.decode()
    assert 'name="tiny"' in text.decode()
    assert 'model="tiny"' in text.decode()
    assert value(text, "process_resident_memory_bytes") > 1e7
    assert value(text, "atoll_worker_process_resident_memory_bytes") > 5e7
    assert 0 < value(text, "process_open_fds") < value(text, "process_max_fds")
    assert abs(value(text, "process_start_time_seconds") + status["uptime_s"] - time.time()) < 60
    assert value(text, "atoll_step_seconds_count") >= 2
    assert 0 < value(text, "atoll_step_seconds_sum") < 600
    assert value(text, "atoll_round_trip_seconds_count") > 0
    assert value(text, "atoll_disk_free_bytes") > 0


def test_the_loggers_files_have_the_rounds(pair, until):
    one, _ = pair
    until("rounds are logged", lambda: one.status()["loggers"]["csv"].split()[0] not in ("0", "1", "2"))
    one.goes_on()
    one.stop()
    rows = {row["round"]: row for row in lines_of(one.run_folder / "rounds.jsonl")}
    folder = one.run_folder / "loggers"
    events = lines_of(folder / "jsonl" / "events.jsonl")
    assert {event["event"] for event in events} >= {"trained", "closed", "final", "spent"}
    trained = {event["round"]: event["values"] for event in events if event["event"] == "trained"}
    assert trained
    for number, values in trained.items():
        assert values["train_loss"] == rows[number]["train_loss"]
    with (folder / "csv" / "events.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(events), "both loggers got the same"
    assert {row["event"] for row in table} == {event["event"] for event in events}
    assert set(table[0]) == {"time", "event", "round", *COLUMNS}
    one.start("--web", "127.0.0.1:0").up()


@pytest.mark.slow(
    slice=(
        "tests/node/daemon/loggers/test_feed.py::test_a_logger_that_hangs_delays_no_round_and_no_end, "
        "test_the_loggers_files_have_the_rounds"
    )
)
def test_a_logger_that_hangs_delays_no_round(nodes, until):
    """Its file is a pipe that nobody reads: opening it waits for ever."""
    node = nodes("home")
    run = node.new_run()
    node.start("--run", str(run)).up()
    folder = node.run_folder / "loggers" / "csv"
    node.stop()
    folder.mkdir(parents=True)
    os.mkfifo(folder / "events.csv")
    node.start("--logger", "csv").up()
    node.goes_on(rounds=5)
    assert node.status()["loggers"] == {"csv": "0 events written"}
    assert "logger    csv: 0 events written" in node.atoll("status").out
    node.stop()
