"""`status --last`, `rounds` and `eval` of a node that does not run: from its disk, or one line without one."""

import json
import os

import msgspec
import pytest
import torch

from atoll.node.checkpoint.local import LocalBody, begin_local
from atoll.node.config.home import Home, hold_lock
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import open_run


def row(number: int, **facts) -> str:
    made = RoundStatus(round=number, peer="me", digest=f"{number:02d}" * 32, contributors=("me", "you"), **facts)
    return msgspec.json.encode(made).decode()


@pytest.fixture
def run(atoll, tmp_path):
    """Rounds 0 to 2 were trained, of which two are final; round 1 has two rows, as after a restart."""
    made = atoll("run", "new", "tiny", "--data", "synthetic:markov", "--seed", "1")
    assert made.code == 0, made.err
    spec = open_run((tmp_path / "home/runs/tiny.run").read_bytes())
    folder = Home(tmp_path / "home").run(spec.id)
    folder.mkdir(parents=True)
    lines = [
        row(0, final=True, payload_bytes=9, tokens=100, val_bpb=3.5),
        row(1, payload_bytes=9, tokens=100, train_loss=2.0),
        row(1, payload_bytes=9, tokens=100, train_loss=2.0, final=True),
        row(2, payload_bytes=9, tokens=100, train_loss=1.5),
        row(3),
    ]
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    return spec


def test_how_far_it_came(atoll, run, tmp_path):
    home = Home(tmp_path / "home")
    said = json.loads(atoll("status", "--last", "--json").out)
    assert (said["type"], said["run_name"], said["rounds"]) == ("last", "tiny", run.outer.rounds)
    assert (said["trained"], said["final"], said["open"], said["tokens"]) == (2, 1, 1, 300)
    assert (said["digest"], said["contributors"]) == ("01" * 32, ["me", "you"])
    assert (said["train_loss"], said["val_bpb"]) == (1.5, 3.5)
    with hold_lock(home):
        assert "ago; a node runs here: `atoll status` asks it\n" in atoll("status", "--last").out
    shown = atoll("status", "--last").out
    assert "ago; `atoll start` goes on from there\n" in shown
    assert "up to round 2 of" in shown
    assert "agreed    final round 1, digest 0101010101010101 by 2; 1 later round of its own not final\n" in shown


def test_its_rounds(atoll, run):
    rows = json.loads(atoll("rounds", "--json").out)["rounds"]
    assert [(row["round"], row["final"]) for row in rows] == [(0, True), (1, True), (2, False), (3, False)]
    assert [line.split()[0] for line in atoll("rounds", "--last", "2").out.splitlines()] == ["round", "2", "3"]


def test_the_run_that_was_trained_last(atoll, run, tmp_path):
    assert atoll("run", "new", "other", "--data", "synthetic:markov", "--seed", "2").code == 0
    spec = open_run((tmp_path / "home/runs/other.run").read_bytes())
    folder = Home(tmp_path / "home").run(spec.id)
    folder.mkdir(parents=True)
    (folder / "rounds.jsonl").write_text(row(7, payload_bytes=1) + "\n")
    os.utime(folder / "rounds.jsonl", (1, 1))
    assert json.loads(atoll("status", "--last", "--json").out)["run_name"] == "tiny"
    os.utime(folder / "rounds.jsonl", (1 << 32, 1 << 32))
    assert json.loads(atoll("status", "--last", "--json").out)["run_name"] == "other"


def test_the_loss_of_what_it_saved(atoll, run, tmp_path):
    theta = {name: torch.from_numpy(value) for name, value in genesis(run.model, 5).items()}
    arena_C4096 = bridge.gather(theta, arena_of(run.model))
    folder = Home(tmp_path / "home").run(run.id) / "state"
    begin_local(folder, LocalBody(run.id, 1, state_digest(arena_C4096), 1, ()), {"final": arena_C4096}).finish()
    said = json.loads(atoll("eval", "--json").out)
    assert said["round"] == 1
    assert 4 < said["val_bpb"] < 9, "weights that nobody trained know nothing"


def test_nothing_saved_is_one_line(atoll, run):
    ran = atoll("eval")
    assert (ran.code, ran.out) == (78, "")
    assert ran.err == "error: no weights of 'tiny' were saved in this home; begin with `atoll start`\n"
