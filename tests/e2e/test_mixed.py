"""Two libp2p implementations in one swarm, started as users start them: they train to one digest."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.node.daemon.web.measurements import SHARES
from atoll.node.daemon.web.site import DashboardData
from tests.e2e.conftest import TWO, stop_all
from tests.waiting import HANGS_S, poll

SAMPLES = 60
"""Statuses asked of each node, over a few rounds."""


def shown(url: str) -> None:
    """What a node that trains with another one shows to a browser and to a scraper."""
    with urllib.request.urlopen(f"{url}metrics", timeout=HANGS_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert {key[1] for key in found if key[0] == "atoll_time_seconds_total"} == {
        s.removesuffix("_s") for s in SHARES
    }
    assert found["atoll_time_seconds_total", "steps"] > 0
    assert found["atoll_peers", "direct"] == 1
    assert found["atoll_tokens_total",] > 0
    assert found["atoll_network_bytes_total", "up", "file"] > 0
    with urllib.request.urlopen(f"{url}v1/data.json", timeout=HANGS_S) as answer:
        data = msgspec.json.decode(answer.read(), type=DashboardData)
    assert data.status.web == url
    assert len(data.rounds) >= 3
    assert data.rounds[-1].peer == data.status.peer
    sent = data.status.sent
    assert sent.payloads > 0.5, "nearly every round a payload goes to the other one"
    assert sent.per_copy > 1.0
    assert 50 < sent.payloads * sent.below_fp32 < 200, "a payload is about 111 times smaller than fp32 weights"
    assert [peer.maddr for peer in data.peers if peer.path] == [""]
    with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
        assert b"v1/data.json" in answer.read()


def digests_told(node) -> dict[int, str]:
    """The digest that a node's status names for each final round, in SAMPLES statuses."""
    told: dict[int, set[str]] = {}
    left = list(range(SAMPLES))

    def is_sampled() -> bool:
        status = node.status()
        if status is not None and status["final"] >= 0:
            told.setdefault(status["final"], set()).add(status["digest"])
            left.pop()
        return not left

    poll("a status for each sample", is_sampled)
    assert all(len(digests) == 1 and all(digests) for digests in told.values()), told
    return {final: digest for final, (digest,) in told.items()}


def stopped(node) -> tuple[int, str]:
    """Final round and digest by `status --last` of a stopped node; `rounds` and `eval` answer, too."""
    last = json.loads(node.atoll("status", "--last", "--json").out)
    rows = json.loads(node.atoll("rounds", "--json").out)["rounds"]
    assert [row["digest"] for row in rows if row["round"] == last["final"]] == [last["digest"]]
    found = json.loads(node.atoll("eval", "--json").out)
    assert 0 <= found["round"] <= last["final"], "what is final is saved with the next trained round at the latest"
    assert 0 < found["val_bpb"] < 8
    return last["final"], last["digest"]


def says_where_it_was(node, final: int) -> None:
    """From its first answer on a node that comes up again knows how far it was."""
    status = poll("the first answer", node.status)
    assert status["final"] >= final
    assert status["round"] > final
    assert status["digest"]


@pytest.mark.swarm
def test_go_and_python_nodes_agree(nodes, until):
    go, python = nodes("go"), nodes("python")
    go.new_run("--data", "synthetic:markov", *TWO)
    go.start("--web", "127.0.0.1:0").up()
    python.start(
        *("--run", str(go.home.run_file("tiny")), "--transport", "pylibp2p", "--seed", go.seed()),
    ).up()
    for node in (go, python):
        until("both are members", lambda node=node: node.status()["members"] == 2)
    go.goes_on(3)
    python.goes_on(3)

    def agreed():
        theirs = {
            row["round"]: row["digest"] for row in python.rows() if row["final"] and len(row["contributors"]) == 2
        }
        ours = {row["round"]: row["digest"] for row in go.rows() if row["final"] and row["round"] in theirs}
        common = [number for number in ours if theirs[number] == ours[number]]
        assert len(common) == len(ours)
        return len(common) >= 3

    until("three rounds of both have one digest on both", agreed)
    shown(go.status()["web"])
    with ThreadPoolExecutor(2) as both:
        ours, theirs = both.map(digests_told, (go, python))
    common = ours.keys() & theirs.keys()
    assert common
    assert {number: ours[number] for number in common} == {number: theirs[number] for number in common}
    stop_all(python, go)
    final, _ = stopped(python)
    python.start("--transport", "pylibp2p")
    says_where_it_was(python, final)
    python.up().stop()


@pytest.mark.swarm
def test_what_it_cannot_do_is_refused_at_the_start(node):
    node.new_run()
    refused = node.start_refused("--transport", "pylibp2p", "--port-map")
    refused.refused(78, "port_map", "use transport p2pd")
