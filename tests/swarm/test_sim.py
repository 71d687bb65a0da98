"""A slice of `make swarm`: real daemons, p2pds and workers on loopback, with a kill and a late join."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.run_spec import open_run

pytestmark = pytest.mark.xdist_group("swarm")
"""One swarm at a time: four workers are enough for two cores."""

FIELDS = {
    "peer", "digest", "contributors", "train_loss", "val_bpb", "payload_bytes", "bytes_up", "bytes_down",
    "train_s", "steps_s", "wait_s", "transfer_s",
}  # fmt: skip


@pytest.mark.swarm
@pytest.mark.timeout(300)
def test_three_nodes_a_kill_and_a_late_joiner(tmp_path: Path):
    report_file = tmp_path / "report.json"
    words = "sim -n 3 --rounds 14 --steps 4 --seed 5 --data synthetic:markov --kill --late-join --timeout 240"
    command = [sys.executable, "-m", "atoll.cli.main", *words.split()]
    command += ["--dir", str(tmp_path / "swarm"), "--json", str(report_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert report_file.exists(), done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["one digest per round"]["ok"], by_name
    assert by_name["all nodes at the last round"]["ok"], by_name
    assert by_name["bytes per payload copy"]["ok"], by_name
    assert by_name["payload smaller than fp32"]["ok"], by_name
    sent = report["sent"]
    assert 1.0 < sent["per_copy"] <= 1.05, sent
    assert sent["payloads"] > 1.0, "a payload goes to more than one other node"
    assert len(report["nodes"]) == 4
    assert [entry["round"] for entry in report["rounds"]] == list(range(14))
    assert all(set(node) >= FIELDS for entry in report["rounds"] for node in entry["nodes"])
    assert 0.0 < max(report["goodput"].values()) < 1.0, report["goodput"]
    assert "Traceback" not in done.stdout + done.stderr
    for home in (tmp_path / "swarm").glob("node-*"):
        assert "Traceback" not in (home / "out.log").read_text(), home
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.swarm
@pytest.mark.timeout(300)
def test_reduced_rounds_of_real_processes_with_a_kill(tmp_path: Path):
    """Rounds of more than two contributors are reduced; the killed reducer's slice is raw, then others have it."""
    report_file, folder = tmp_path / "report.json", tmp_path / "swarm"
    words = "sim -n 4 --rounds 24 --steps 4 --seed 5 --data synthetic:markov --kill --reduce-above 2 --timeout 240"
    command = [sys.executable, "-m", "atoll.cli.main", *words.split(), "--dir", str(folder)]
    done = subprocess.run(
        [*command, "--json", str(report_file)], capture_output=True, text=True, timeout=280, check=False
    )
    assert report_file.exists(), done.stdout + done.stderr
    by_name = {check["name"]: check for check in json.loads(report_file.read_text())["checks"]}
    assert by_name["one digest per round"]["ok"], by_name
    assert by_name["all nodes at the last round"]["ok"], by_name
    (journal,) = (folder / "node-0").glob("runs/*/events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    slices = {(event["reduced"], event["raw"]) for event in events if event["event"] == "slices"}
    assert (4, 0) in slices, "all slices are reduced"
    assert (3, 1) in slices, "the dead reducer's slice is raw"
    for home in folder.glob("node-*"):
        assert "Traceback" not in (home / "out.log").read_text(), home


@pytest.mark.swarm
@pytest.mark.timeout(300)
def test_three_nodes_share_the_experts_of_a_mixture(tmp_path: Path):
    """Each expert is trained by one of three; they are merged; all hold one model, nobody sends a whole one."""
    report_file, folder = tmp_path / "report.json", tmp_path / "swarm"
    words = "sim -n 3 --rounds 5 --steps 2 --preset moe-smoke --holders 1 --data synthetic:markov --timeout 240"
    command = [sys.executable, "-m", "atoll.cli.main", *words.split()]
    command += ["--set", 'outer.merge={"every":2,"until":9,"alpha_4096":1024}']
    command += ["--dir", str(folder), "--json", str(report_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert report_file.exists(), done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    by_name = {check["name"]: check["ok"] for check in report["checks"]}
    assert by_name["one digest per round"], report["checks"]
    assert by_name["all nodes at the last round"], report["checks"]
    spec = open_run((folder / "sim.run").read_bytes())
    most = payload_size(spec, 0, bitmap_of(range(3), 8))  # 8 experts of 3 nodes: 3, 3 and 2
    sizes = [node["payload_bytes"] for entry in report["rounds"][1:] for node in entry["nodes"]]
    assert max(sizes) == most < 0.55 * payload_size(spec, 0)
