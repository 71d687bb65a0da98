"""Runs that are found in the DHT: real nodes that share one bootstrap peer, and neither seed nor link."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import nodes_in, stop_all
from tests.waiting import HANGS_S, poll

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(900), pytest.mark.xdist_group("public runs")]
HOSTILE = Path(__file__).parent.parent / "p2p/discovery/hostile_dht.py"
JOIN_S = 180.0
"""From the command to two members that know each other: three times the promise, which a quiet machine shows."""
TRAINS_S = HANGS_S


@contextmanager
def hostile(kind: str, bootstrap: str, run_file: Path) -> Iterator[str]:
    """The process of a hostile DHT peer; the seed that leads to it."""
    command = [sys.executable, str(HOSTILE), kind, bootstrap, str(run_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            seed = process.stdout.readline().strip()
            assert seed, f"the {kind} ended"
            yield seed
        finally:
            process.kill()


def dht_of(node) -> str:
    return node.status()["seeds"]["dht"]


def find(node, *args: str) -> list[dict]:
    ran = node.atoll("run", "find", "--json", *args)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["runs"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[dict]:
    """A node of another run that serves the DHT, and an owner who announces a run there."""
    with nodes_in(tmp_path_factory.mktemp("shared")) as make:
        other, owner = make("other"), make("owner")
        other.new_run(name="elsewhere")
        other.start("--dht", "--private").up()
        assert other.atoll("pause").code == 0, "it need not train, only serve"
        bootstrap = ("--dht-bootstrap", other.seed())
        run_file = owner.new_run("--data", "synthetic:markov", "--set", "outer.rounds=9999", name="common")
        owner.start(*bootstrap).up()
        (run,) = poll(
            "the run is listed",
            lambda: [run for run in find(owner, *bootstrap) if run["members_claimed"]],
            TRAINS_S,
        )
        assert owner.atoll("pause").code == 0, "it trains while somebody joins, not while nobody does"
        yield {"other": other, "owner": owner, "bootstrap": bootstrap, "run": run, "file": run_file}
        stop_all(owner, other)


def join(node, shared: dict, name: str, *flags: str, until) -> None:
    """`start NAME` in a fresh home, until it trains as a member, and then until a round has both."""
    owner, began = shared["owner"], time.monotonic()
    node.start(name, "--yes", *flags).up()
    until("both are members", lambda: node.status()["members"] == 2 == owner.status()["members"], TRAINS_S)
    joined_s = time.monotonic() - began
    assert owner.atoll("resume").code == 0
    until("it trains", lambda: node.status()["tokens"], TRAINS_S)
    print(f"a member after {joined_s:.1f} s, trains after {time.monotonic() - began:.1f} s")
    assert joined_s <= JOIN_S
    assert node.status()["run"] == shared["run"]["run"]
    both = {owner.status()["peer"], node.status()["peer"]}
    until("a round of both", lambda: any(set(row["contributors"]) == both for row in node.rows()), TRAINS_S)
    assert owner.atoll("pause").code == 0


@pytest.mark.slow(
    slice=(
        "tests/p2p/discovery/test_dht.py::test_clients_find_what_was_announced_at_a_server, "
        "tests/p2p/discovery/test_dht.py::test_nodes_reach_servers_that_they_never_met, "
        "tests/node/runs/test_public_runs.py::test_words_find_runs_by_name_preset_owner_and_id"
    )
)
def test_a_run_is_found_and_joined_through_one_bootstrap_peer(nodes, until, shared):
    other, owner, new, run = shared["other"], shared["owner"], nodes("new"), shared["run"]
    me = owner.status()["peer"]
    assert (run["name"], run["owner"], run["parameters"], run["preset"]) == ("common", me, 549_760, "tiny")
    assert 0 < run["age_claimed_s"] < 3600
    assert find(new, "TINY", "common", *shared["bootstrap"])
    assert find(new, "elsewhere", *shared["bootstrap"]) == [], "a private run"
    ran = new.atoll("start", f"uncommon@{me}", "--yes", *shared["bootstrap"])
    assert (ran.code, new.home.root.exists()) == (75, False)
    assert f"uncommon@{me} is not in the DHT; see `atoll run find`" in ran.err
    join(new, shared, f"common@{me}", *shared["bootstrap"], until=until)
    # Not asked for among false members: they are asked too, and only for seconds.
    assert re.search(r"now        round \d+, 1 member, \d+ rounds are final", new.errors()), new.errors()
    assert dht_of(new).startswith("client, knows 1 server")
    assert dht_of(other).startswith("server, knows no server yet")
    assert other.status()["members"] == 1
    assert not other.peers(), "peers of other runs are no neighbours"
    new.stop()
    new.start(*shared["bootstrap"]).up()
    until("it comes back without being told where", lambda: new.status()["members"] == 2, TRAINS_S)
    new.stop()


@pytest.mark.slow(
    slice=(
        "tests/p2p/discovery/test_dht.py::test_a_liar_hides_nobody_and_costs_bounded_time, "
        "tests/p2p/discovery/test_dht.py::test_runs_that_their_owner_did_not_sign_are_not_listed, "
        "tests/p2p/discovery/test_dht.py::test_a_search_beside_liars_ends_in_time"
    )
)
def test_a_run_is_joined_beside_peers_that_lie(nodes, until, shared):
    """A liar names 256 false members and false runs, a bomber answers with what is no answer."""
    new, run = nodes("new"), shared["run"]
    seed = shared["bootstrap"][1]
    with hostile("liar", seed, shared["file"]) as liar, hostile("bomber", seed, shared["file"]) as bomber:
        flags = [flag for one in (seed, liar, bomber) for flag in ("--dht-bootstrap", one)]
        assert [found["run"] for found in find(new, *flags)] == [run["run"]], "false runs are not shown"
        join(new, shared, run["run"], *flags, until=until)
        new.stop()
