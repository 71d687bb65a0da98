"""Real nodes with rules of the outer step, the error feedback and the pace: a kill, a late join, one digest."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import stop_all
from tests.e2e.late_join import kill_and_join

pytestmark = pytest.mark.swarm
DENSE = ("compress.codec=int8", "compress.k=4096")
E3M0 = ("compress.codec=e3m0", "compress.k=4096")
GOSSIP = 'outer.gossip={"steps":1,"first_256":256,"last_256":256}'
SIGREG = 'objective={"name":"sigreg.1","weight":0.02,"settings":[["directions",64]]}'
WORKER = "tests/node/worker/test_outer_rules.py::test_a_kill_and_a_late_join_give_one_digest"
FEEDBACK = "tests/node/worker/test_feedback_rules.py::test_a_kill_and_a_late_join_give_one_digest"

STALE = "tests/node/virtual/test_virtual_stale.py::test_{}"
OLD = (
    "outer.stages=[[0,24]]",  # long beside the turns of a worker that is slowed
    "outer.overlap_steps=0",
    "pace.least_256=256",
    "pace.quorum_256=64",
    "pace.grace_256=32",
)
ARRIVAL = "tests/node/virtual/test_virtual_arrival.py::test_a_group_arrives_together_and_the_slowest_is_in_it"


def slow(rule: str, more: tuple[str, ...], by: str):
    """A case whose rule has the same law of two members, a kill and a late join in `by`, without processes."""
    return pytest.param(rule, more, marks=pytest.mark.slow(slice=by))


CASES = [
    # All that a payload, a late fold and a blend can have. The preset's rule is in other files.
    slow("nesterov", (*E3M0, "outer.alpha_256=102", "outer.fragments=2", "outer.late=blend"), WORKER),
    # State in the fold and in the error feedback.
    slow(
        "slowmo",
        (
            "outer.momentum_256=255",
            "outer.floor_256=256",
            "compress.feedback_rule=econtrol",
            "compress.feedback=1",
            "pace.least_256=256",  # its estimates need members of equal weight
        ),
        f"{WORKER}, {FEEDBACK}",
    ),
    slow("sgd", ("pace.arrival=group", "pace.least_256=64", "pace.most_256=512"), ARRIVAL),
    slow("average", (*DENSE, "outer.alpha_256=256"), WORKER),
    slow("nesterov", (*DENSE, "outer.alpha_256=179"), WORKER),
    slow("slowmo", ("outer.momentum_256=128",), WORKER),
    # A-EDiT: its rounds aim at a common time, and members take the steps that they can.
    slow(
        "nesterov",
        (*DENSE, "outer.alpha_256=179", "outer.aggregate=edit", "pace.least_256=64", "pace.most_256=512"),
        WORKER,
    ),
    # MuLoCo.
    slow(
        "nesterov",
        (*DENSE, "outer.alpha_256=179", "outer.momentum_256=154", "inner.optimizer=muon"),
        "tests/node/worker/test_outer_rules.py::test_muloco_has_one_digest_after_a_kill_and_a_late_join",
    ),
    # The one in `make test`: its pulls go over a wire of their own.
    (
        "average",
        (
            *DENSE,
            "outer.alpha_256=256",
            "outer.overlap_steps=0",
            "outer.stages=[[0,4]]",
            "pace.probation=1",
            GOSSIP,
        ),
    ),
    slow("co2", (*DENSE, "outer.clip_65536=655"), WORKER),
    slow(
        "sgd",
        ("compress.codec=lookup2", "outer.floor_256=1", "outer.aggregate=clip", "outer.most_256=65536"),
        FEEDBACK,
    ),
    slow(
        "sgd",
        (
            "outer.alpha_256=64",
            "compress.feedback_rule=dgc",
            "compress.feedback=1",
            "compress.warmup=[[1,512],[3,256]]",
        ),
        FEEDBACK,
    ),
    # L-GreCo: k of each tensor from every third final set.
    slow("sgd", ('compress.sizes={"goal":"bytes","every":3}', "compress.k=64"), FEEDBACK),
    slow(
        "nesterov",
        (*DENSE, "outer.spectrum=isotropic", "outer.alpha_256=461", "outer.momentum_256=205", "inner.lr=0.001"),
        WORKER,
    ),
    slow(
        "sgd",
        ("inner.beta1=0.995", "inner.beta2=0.999", "inner.momentum_share=0.9"),
        "tests/node/learning/inner/test_slow_momentum.py::test_a_saved_state_goes_on_with_the_same_bits",
    ),
    slow(
        "sgd",
        ('pace.stale={"most":32,"weights":"fedbuff"}', *OLD),
        STALE.format("fedbuff_weighs_by_age_and_slow_work_is_in_the_final_sets_once"),
    ),
    slow(
        "nesterov",
        ('pace.stale={"most":32,"weights":"fedfix"}', *OLD, *DENSE, "outer.alpha_256=179"),
        STALE.format("fedfix_weighs_by_how_seldom_a_member_is_in_time"),
    ),
    slow("sgd", (SIGREG,), "tests/node/worker/test_objective.py::test_a_kill_and_a_late_join_give_one_digest"),
    slow(
        "sgd",
        ("inner.optimizer=spsa", "inner.lr=0.0001"),
        "tests/node/worker/test_scalar_steps.py::test_a_kill_and_a_late_join_give_one_digest",
    ),
]


def pulls(node):
    """How many differences of neighbours a node mixed into its weights."""
    return sum(row.get("pulls", 0) for row in node.rows())


@pytest.mark.parametrize(("rule", "more"), CASES)
def test_a_kill_and_a_late_join_end_with_one_digest(nodes, until, rule, more):
    owner, second, late = nodes("owner"), nodes("second"), nodes("late")
    short = ("outer.stages=[[0,2]]", "outer.rounds=400", "inner.optimizer=adamw")
    keys = (f"outer.rule={rule}", "reduce=null", "pace.min_members=2", *short, *more)
    owner.new_run("--data", "synthetic:markov", *(word for key in keys for word in ("--set", key)))
    owner.start("--run", "tiny").up()
    join = ("--run", str(owner.home.run_file("tiny")), "--seed", owner.seed())
    second.start(*join).up()
    until("rounds of both are final", lambda: min(owner.final(), second.final()) >= 1)
    kill_and_join(until, owner, second, late, join)
    if any(key.startswith("pace.stale") for key in more):
        with slowed(second):
            until("old work of the slow member counts", lambda: old_work_counts(owner, second))

    def states():
        """What each computed itself from the final set, of the rounds that all three folded."""
        logs = [
            {row["round"]: row["own_digest"] for row in node.rows() if row["final"] and row["own_digest"]}
            for node in (owner, second, late)
        ]
        return [{log[number] for log in logs} for number in set.intersection(*map(set, logs))]

    until("all three folded a round", states)
    assert all(len(found) == 1 for found in states())
    if GOSSIP in more:
        until("all three pulled", lambda: all(pulls(node) for node in (owner, second, late)))
    stop_all(late, second, owner)


@contextmanager
def slowed(node):
    """Inside, the node's worker runs for a quarter of the time: it is slow, and answers all the same."""
    worker = node.status()["worker_pid"]
    turns = f"while kill -STOP {worker}; do sleep 0.15; kill -CONT {worker}; sleep 0.05; done"
    process = subprocess.Popen(["sh", "-c", turns])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        os.kill(worker, signal.SIGCONT)


def old_work_counts(owner, slow):
    """Whether work that the slow member began in an older round is in a final set."""
    events = map(json.loads, (slow.run_folder / "events.jsonl").read_text().splitlines())
    old = {row["round"] for row in events if row["event"] == "trained" and row.get("age")}
    peer = slow.status()["peer"]
    return any(row["final"] and row["round"] in old and peer in row["contributors"] for row in owner.rows())
