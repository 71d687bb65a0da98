"""Real nodes whose loss has a term of an installed package; a node without the package is told what it lacks."""

import json
from pathlib import Path

import pytest

from tests.e2e.late_join import kill_and_join
from tests.e2e.test_given_start import one_digest
from tests.node.worker.term_package import write_term

pytestmark = pytest.mark.swarm
TERM = {"name": "squares.1", "weight": 0.25, "package": "atoll-squares"}


def run_of(owner) -> Path:
    """A run whose loss has the term; its owner need not have the package."""
    keys = (f"objective={json.dumps(TERM)}", "pace.min_members=2")
    return owner.new_run("--data", "synthetic:markov", *(word for key in keys for word in ("--set", key)))


def test_a_node_without_the_package_shows_the_run_and_is_told_what_it_lacks(nodes):
    owner = nodes("owner")
    run_of(owner)
    shown = owner.atoll("run", "show", "tiny")
    assert "cross-entropy + 0.25 · squares.1, by the package atoll-squares" in shown.out
    owner.start_refused("--run", "tiny").refused(78, "squares.1, which is not installed here", "atoll-squares")


@pytest.mark.slow(
    slice=(
        "test_a_node_without_the_package_shows_the_run_and_is_told_what_it_lacks, "
        "tests/node/worker/test_objective.py::test_a_kill_and_a_late_join_give_one_digest, "
        "tests/node/worker/test_objective.py::test_a_term_of_a_package_is_found_by_its_entry_point_and_trains"
    )
)
def test_members_train_with_a_term_of_a_package_and_a_node_without_it_is_told_so(
    nodes, until, monkeypatch, tmp_path: Path
):
    owner, second, late, other = (nodes(name) for name in ("owner", "second", "late", "other"))
    run = run_of(owner)
    monkeypatch.setenv("PYTHONPATH", str(write_term(tmp_path / "site")))
    owner.start("--run", "tiny").up()
    join = ("--run", str(run), "--seed", owner.seed())
    second.start(*join).up()
    until("rounds of both are final", lambda: min(owner.final(), second.final()) >= 1)
    kill_and_join(until, owner, second, late, join)
    assert len(one_digest(owner, second, late)) >= 3
    monkeypatch.delenv("PYTHONPATH")
    other.start_refused(*join).refused(78, "needs the objective squares.1, which is not installed here")
    # Who trains nothing computes no loss with the term.
    other.start(*join, "--role", "seed").up()
    until("a node without the package keeps the model", lambda: other.final() >= 1)
    for node in (other, late, second, owner):
        node.stop()
