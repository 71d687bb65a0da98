"""A slice of `make swarm`: real daemons, p2pds and workers on loopback, with a kill and a late join."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.node.learning.data.corpus import load_corpus
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.run_spec import open_run
from atoll_bench.reference_arms.baselines import unigram_bits_per_byte
from tests.tracebacks import tracebacks
from tests.waiting import HANGS_S, poll

pytestmark = pytest.mark.xdist_group("swarm")
"""One swarm at a time: four workers are enough for two cores."""

FIELDS = {
    "peer", "digest", "own_digest", "contributors", "train_loss", "val_bpb", "payload_bytes", "bytes_up",
    "bytes_down", "train_s", "steps_s", "wait_s", "transfer_s",
}  # fmt: skip
PROMISES = [
    "all rounds final and folded", "all nodes at the last round", "bytes per payload copy",
    "payload smaller than fp32",
]  # fmt: skip
ROUNDS = 24
"""Enough for a kill, a return and a late join, and to learn something."""
LEARNED = 0.93
"""Share of the unigram entropy that a short run gets below."""
GONE_S = 40.0
"""The kernel ends the children of a killed process at once."""
LIMIT_S = 1500.0
"""Of one swarm: it takes about a minute of two quiet cores, and the story waits for nodes, never for a time."""


def simulated(tmp_path: Path, words: str) -> dict[str, Any]:
    """The report of `atoll sim`; every promise of it held, its exit status says so, and it left nothing behind."""
    report_file, folder = tmp_path / "report.json", tmp_path / "swarm"
    command = [sys.executable, "-m", "atoll.cli.main", "sim", *words.split()]
    done = subprocess.run(
        [*command, "--dir", str(folder), "--output", str(report_file)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert report_file.exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(report_file.read_text())
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert tracebacks(folder) == []
    assert not processes_in(tmp_path)
    return report


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes with this folder in their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.swarm
@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_node_outlives_its_simulation(tmp_path: Path, how: int, code: int):
    words = f"sim -n 2 --rounds 1000 --data synthetic:markov --dir {tmp_path / 'swarm'}"
    said = tmp_path / "said.log"  # no pipe: nodes that are left over would hold it
    with said.open("wb") as stderr, subprocess.Popen(
        [sys.executable, "-m", "atoll.cli.main", *words.split()],
        stdout=subprocess.DEVNULL, stderr=stderr, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        poll("two nodes are there", lambda: len(list(tmp_path.glob("swarm/node-*/out.log"))) == 2)
        process.send_signal(how)
        process.wait(HANGS_S)
    errors = said.read_text()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    try:
        poll("no process is left", lambda: not processes_in(tmp_path), GONE_S)
    finally:
        for left in processes_in(tmp_path):
            left.kill()
    assert how == signal.SIGKILL or not list(tmp_path.glob("atoll-sim-*"))


@pytest.mark.swarm
@pytest.mark.timeout(LIMIT_S + 60.0)
def test_three_nodes_a_kill_and_a_late_joiner(tmp_path: Path):
    words = f"-n 3 --rounds {ROUNDS} --steps 6 --seed 5 --data synthetic:markov --kill --late-join"
    words += " --set inner.batch=4"
    report = simulated(tmp_path, words)
    names = [check["name"] for check in report["checks"]]
    assert names[:4] == PROMISES
    assert names[-1] == "the oracle finds nothing broken"
    returned = [report["nodes"][str(node)][-8:] for node in (report["story"]["kills"][0]["node"], 3)]
    assert sorted(name.split()[0] for name in names[4:-1]) == sorted(f"…{peer}" for peer in returned)
    sent = report["sent"]
    assert 1.0 < sent["per_copy"] <= 1.05, sent
    assert sent["payloads"] > 1.0, "a payload goes to more than one other node"
    assert len(report["nodes"]) == 4
    assert [entry["round"] for entry in report["rounds"]] == list(range(ROUNDS))
    assert all(set(node) >= FIELDS for entry in report["rounds"] for node in entry["nodes"])
    assert 0.0 < max(report["goodput"].values()) < 1.0, report["goodput"]
    text = load_corpus("synthetic:markov", "", tmp_path).val
    assert report["val_bpb"] < LEARNED * unigram_bits_per_byte(text)


@pytest.mark.slow(
    slice=(
        "tests/node/virtual/test_virtual_reduction.py::"
        "test_a_reducer_that_is_killed_in_the_middle_of_a_round_and_comes_back, "
        "test_three_nodes_a_kill_and_a_late_joiner"
    )
)
@pytest.mark.swarm
@pytest.mark.timeout(LIMIT_S + 60.0)
def test_reduced_rounds_of_real_processes_with_a_kill(tmp_path: Path):
    """Rounds of more than two contributors are reduced; the killed reducer's slice is raw, then others have it."""
    words = "-n 4 --rounds 24 --steps 1 --seed 5 --data synthetic:markov --kill --reduce-above 2"
    simulated(tmp_path, f"{words} --set inner.batch=2")
    (journal,) = (tmp_path / "swarm" / "node-0").glob("runs/*/events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    slices = {(event["reduced"], event["raw"]) for event in events if event["event"] == "slices"}
    assert (4, 0) in slices, "all slices are reduced"
    assert (3, 1) in slices, "the dead reducer's slice is raw"


@pytest.mark.slow(
    slice=(
        "tests/e2e/test_checkpoint.py::test_two_nodes_save_and_three_go_on, "
        "tests/node/virtual/test_virtual_experts.py::"
        "test_each_expert_is_trained_by_one_of_four_and_shares_are_even, "
        "tests/node/virtual/test_virtual_merging.py::"
        "test_four_nodes_merge_alike_while_one_is_killed_and_comes_back"
    )
)
@pytest.mark.swarm
@pytest.mark.timeout(LIMIT_S + 60.0)
def test_three_nodes_share_the_experts_of_a_mixture(tmp_path: Path):
    """Each expert is trained by one of three; they are merged; all hold one model, nobody sends a whole one."""
    words = "-n 3 --rounds 5 --steps 2 --preset moe-smoke --holders 1 --data synthetic:markov --set inner.batch=2"
    merge = '{"every":2,"until":9,"alpha_4096":1024}'
    report = simulated(tmp_path, f"{words} --set outer.merge={merge}")
    spec = open_run((tmp_path / "swarm" / "sim.run").read_bytes())
    most = payload_size(spec, 0, bitmap_of(range(3), 8))  # 8 experts of 3 nodes: 3, 3 and 2
    sizes = [node["payload_bytes"] for entry in report["rounds"][1:] for node in entry["nodes"]]
    assert max(sizes) == most < 0.55 * payload_size(spec, 0)
