"""A round of fewer sequences a step, and one that is cut short: the next windows, and the weight of the tokens."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from atoll.node.worker import round_trainer
from atoll.node.worker.round_trainer import Budget, weight_of
from atoll.node.worker.schedule.time_account import TimeAccount
from atoll.node.worker.session import Session
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import TrainReply, TrainRequest
from atoll.protocols.run.run_spec import Stage
from tests.node.worker.session_home import SPEC, Home

STEPS, BATCH, CONTEXT = 8, 8, SPEC.model.context
LARGE = msgspec.structs.replace(
    SPEC,
    inner=msgspec.structs.replace(SPEC.inner, batch=BATCH),
    outer=msgspec.structs.replace(SPEC.outer, stages=(Stage(0, STEPS),)),
)


def trained(home, **changes):
    """The result of round 0, and the sequences of each of its steps."""
    seen, learner = [], home.session._learner
    step = learner.step
    learner.step = lambda windows_BT1, at: seen.append(windows_BT1) or step(windows_BT1, at)
    *_, done = home.session.train(msgspec.structs.replace(home.train_ask(0), **changes))
    assert isinstance(done, TrainReply)
    return done.pending, seen


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path, spec=LARGE)


def test_fewer_sequences_are_the_first_windows_of_the_same_place_and_weigh_what_they_are(home, tmp_path_factory):
    whole, all_seen = trained(Home(tmp_path_factory.mktemp("whole"), spec=LARGE))
    few, seen = trained(home, steps=6, sequences=3)
    assert (whole.tokens, whole.weight) == (STEPS * BATCH * CONTEXT, 64)
    assert (few.steps, few.tokens, few.weight) == (6, 18 * CONTEXT, 18)
    assert [len(each) for each in seen] == [3] * 6
    assert np.array_equal(np.concatenate(seen), np.concatenate(all_seen)[:18])


def test_a_round_that_takes_too_long_ends_with_the_least_that_is_left(home):
    ask = {"limit_s": 1e-9, "least_steps": 3, "least_sequences": 2}
    cut, seen = trained(home, **ask)
    assert [len(each) for each in seen] == [BATCH, 2, 2], "the first step is over before it can be known"
    assert (cut.steps, cut.tokens) == (3, (BATCH + 4) * CONTEXT)
    assert cut.weight == weight_of(cut.tokens, STEPS * BATCH * CONTEXT) == 12


def test_audits_and_evaluations_between_two_steps_are_no_part_of_the_round(tmp_path, monkeypatch):
    now_ns = [0]
    monkeypatch.setattr(round_trainer, "time", SimpleNamespace(monotonic=lambda: now_ns[0] / 1e9))
    home = Home(tmp_path, spec=LARGE)
    spent = TimeAccount(lambda: now_ns[0])
    home.session = Session(home.start, spent)
    *steps, done = [between(event, spent, now_ns) for event in home.session.train(home.train_ask(0))]
    assert len(steps) == STEPS
    assert done.train_s == pytest.approx(STEPS)
    found = spent.read()
    assert (found.audit_ns, found.evaluate_ns) == (60 * STEPS * 10**9, 5 * STEPS * 10**9)


def between(event, spent, now_ns):
    """What the worker does between two steps; the next step takes a second."""
    if not isinstance(event, TrainReply):
        for doing, gone_s in (("audit", 60), ("evaluate", 5), ("steps", 1)):
            spent.enter(doing)
            now_ns[0] += gone_s * 10**9
    return event


def test_a_cut_takes_no_more_than_was_asked_for_and_nothing_back():
    budget = Budget(TrainRequest(Round(0), 0, 1, 8, -1, limit_s=5.0, least_steps=3, least_sequences=4), 8, 2)
    for step, trained_s in enumerate((1.0, 2.0, 3.0, 4.0, 6.0), 1):
        assert (budget.steps, budget.sequences) == (8, 2)
        budget.took_step(step, trained_s)
    assert (budget.steps, budget.sequences, budget.taken) == (5, 2, 10)
