"""The process that writes a sample: a real one, and what it takes from others, which is nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint.local import FINAL, LocalBody, begin_local
from atoll.node.config.home import Home
from atoll.node.daemon.samples.sampler import COMMAND
from atoll.node.daemon.samples.written import ANSWER_BYTES, MAX_TOKENS, WrittenSample
from atoll.node.generation.sample_child import FIRST_TO_GO, NICEST, yield_to_others
from atoll.node.import_export.export_run import STATE
from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.runs.presets import preset
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import sign_run

# A test waits for its process, which would wait for everybody else's.
EAGER = (
    "import sys; from atoll.node.generation import sample_child as child;"
    "child.yield_to_others = lambda: print('not an answer', flush=True); child.main(*sys.argv[1:4])"
)
YIELDS = """
import json, os, psutil
from pathlib import Path
from atoll.node.generation.sample_child import yield_to_others
yield_to_others()
read = lambda name: Path(f'/proc/self/{name}').read_text() if Path(f'/proc/self/{name}').exists() else None
print(json.dumps({
    'policy': os.sched_getscheduler(0), 'nice': os.nice(0), 'autogroup': read('autogroup'),
    'oom': read('oom_score_adj'), 'disk': psutil.Process().ionice().ioclass,
}))
"""


@pytest.fixture
def home(tmp_path):
    """A home with a run that has saved nothing yet."""
    made = Home(tmp_path / "home")
    made.make()
    owner = load_or_create(made.identity)
    spec = preset("tiny", owner.peer_id, 1, "synthetic:markov")
    spec = msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, tokenizer="bytes"))
    made.runs.mkdir(exist_ok=True)
    made.run_file("tiny").write_bytes(sign_run(spec, owner))
    return made, spec


def answer_of(home: Home, run: bytes) -> tuple[WrittenSample, str]:
    """What the process answers, and what is in its log."""
    command = [sys.executable, "-c", EAGER, str(home.root), run.hex(), ""]
    ran = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(ran.stdout) <= ANSWER_BYTES
    return msgspec.json.decode(ran.stdout, type=WrittenSample), ran.stderr.decode()


def test_it_writes_by_the_newest_saved_weights_and_changes_nothing(home):
    made, spec = home
    theta = bridge.gather(
        {k: torch.from_numpy(v) for k, v in genesis(spec.model, 3).items()}, arena_of(spec.model)
    )
    state = made.run(spec.id) / STATE
    begin_local(state, LocalBody(spec.id, 7, state_digest(theta), 5, ()), {FINAL: theta}).finish()
    before = sorted(path for path in made.root.rglob("*"))
    found, words = answer_of(made, spec.id)
    assert (found.round, found.why) == (7, "")
    assert 1 <= len(found.text) <= MAX_TOKENS, "a token is a byte"
    assert "not an answer" in words, "what libraries print is no part of the answer"
    assert sorted(path for path in made.root.rglob("*")) == before


def test_it_is_what_the_node_starts():
    assert (sys.executable, "-m", yield_to_others.__module__) == COMMAND


def test_what_is_missing_is_one_line(home):
    made, spec = home
    found, _ = answer_of(made, spec.id)
    assert (found.text, found.round) == ("", -1)
    assert found.why.startswith("there are no weights of 'tiny' in this home yet")
    assert "\n" not in found.why


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: the priorities are Linux's")
def test_it_yields_to_everybody_and_is_the_first_to_go():
    command = [sys.executable, "-c", YIELDS]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    said = json.loads(ran.stdout)
    assert said["policy"] == os.SCHED_IDLE
    assert (said["nice"], int(said["oom"])) == (NICEST, FIRST_TO_GO)
    assert said["disk"] == 3, "idle"
    if Path("/proc/self/autogroup").exists():
        assert said["autogroup"].split()[-1] == str(NICEST)
