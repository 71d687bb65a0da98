"""Work that takes a member several rounds: it counts once, in a later round, with the age of its base."""

import msgspec
import pytest
import torch

from atoll.protocols.ids import Round
from atoll.protocols.local.contribution_forms import age_of
from atoll.protocols.local.worker_messages import AdoptRequest, FinalizeRequest, SnapshotRequest, TrainReply
from atoll.protocols.run.run_spec import CompressSpec, Stage
from atoll.protocols.run.sections.variants.staleness import StaleSpec
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member
from tests.node.worker.test_outer_rules import PEERS

FEEDBACK = 0.5
BEGAN = 2
"""Round that the slow member's work begins in."""


def spec_of(most=8, steps=4, **outer):
    found = msgspec.structs.replace(
        SPEC,
        outer=msgspec.structs.replace(SPEC.outer, floor_256=64, stages=(Stage(0, steps),), **outer),
        compress=CompressSpec(codec="sparse2", k=64, feedback=FEEDBACK),
        pace=msgspec.structs.replace(SPEC.pace, stale=StaleSpec(most=most, weights="fedbuff")),
    )
    found.check()
    return found


def pair(tmp_path, spec):
    return Home(tmp_path / "fast", ME, spec), Home(tmp_path / "slow", OTHER, spec)


def both(fast, slow, number):
    """A round in which both are in time."""
    members = [member(home.train(number).pending, home.start.peer) for home in (fast, slow)]
    return finalize(fast, slow, number, members)


def finalize(fast, slow, number, members):
    (state,) = {home.ask(FinalizeRequest(Round(number), tuple(members))).state for home in (fast, slow)}
    return state


def slow_work(fast, slow, rounds, began=BEGAN):
    """The slow member's work, between whose steps so many rounds of the other become final."""
    steps = slow.session.train(slow.train_ask(began))
    for number in range(began, began + rounds):
        next(steps)
        finalize(fast, slow, number, [member(fast.train(number).pending, ME)])
    *_, done = steps
    assert isinstance(done, TrainReply)
    slow.keep(done.pending.round)
    return done.pending


def local(home):
    return {name: value.clone() for name, value in home.session._learner.weights.trained().items()}


def begun(tmp_path, **more):
    homes = pair(tmp_path, spec_of(**more))
    for number in range(BEGAN):
        both(*homes, number)
    return homes


def test_it_counts_in_the_oldest_open_round_and_finals_meanwhile_leave_it_alone(tmp_path):
    fast, slow = begun(tmp_path)
    base = slow.session._fold.view_digest()
    steps = slow.session.train(slow.train_ask(BEGAN))
    next(steps)
    before = local(slow)
    finalize(fast, slow, BEGAN, [member(fast.train(BEGAN).pending, ME)])
    assert all(torch.equal(value, before[name]) for name, value in local(slow).items()), "no rebase on the way"
    *_, done = steps
    assert (done.pending.round, age_of(done.pending), done.pending.steps) == (BEGAN + 1, 1, 4)
    assert done.pending.base == base
    assert [one.round for one in slow.session._feedback.pending] == [BEGAN + 1], "of no round that is final"


def test_without_a_final_round_meanwhile_it_is_of_its_own_round(tmp_path):
    fast, slow = begun(tmp_path)
    pending = slow_work(fast, slow, 0)
    assert (pending.round, age_of(pending)) == (BEGAN, 0)


def test_it_counts_once_and_none_of_it_returns(tmp_path):
    fast, slow = begun(tmp_path)
    pending = slow_work(fast, slow, 3)
    assert (pending.round, age_of(pending)) == (BEGAN + 3, 3)
    residual = slow.session._feedback.residual_C4096.clone()
    members = [member(fast.train(pending.round).pending, ME), member(pending, OTHER)]
    finalize(fast, slow, pending.round, members)
    assert torch.equal(slow.session._feedback.residual_C4096, residual)
    assert slow.session._feedback.pending == ()
    # The next work begins from the newest weights.
    assert slow_work(fast, slow, 0, pending.round + 1).base == fast.session._fold.view_digest()


def test_what_misses_its_final_set_returns_once(tmp_path):
    fast, slow = begun(tmp_path)
    pending = slow_work(fast, slow, 2)
    residual = slow.session._feedback.residual_C4096.clone()
    finalize(fast, slow, pending.round, [member(fast.train(pending.round).pending, ME)])
    once = slow.session._feedback.residual_C4096.clone()
    assert not torch.equal(once, residual)
    number = pending.round + 1
    finalize(fast, slow, number, [member(fast.train(number).pending, ME)])
    assert torch.equal(slow.session._feedback.residual_C4096, once)


def test_at_the_last_round_that_may_take_it_the_steps_end(tmp_path):
    fast, slow = begun(tmp_path, most=2)
    pending = slow_work(fast, slow, 2)
    assert (pending.round, age_of(pending)) == (BEGAN + 2, 2)
    assert pending.steps == 3, "the step at hand is the last"
    assert pending.tokens < slow.spec.nominal_tokens(BEGAN)
    assert pending.weight == 48


def test_past_it_the_work_returns_to_the_error_feedback(tmp_path):
    """A step, or a computer that slept, took longer than all the rounds that might have taken it."""
    fast, slow = begun(tmp_path, most=2)
    steps = slow.session.train(slow.train_ask(BEGAN))
    next(steps)
    for number in range(BEGAN, BEGAN + 4):
        finalize(fast, slow, number, [member(fast.train(number).pending, ME)])
    *_, done = steps
    slow.keep(done.pending.round)
    assert (done.pending.round, age_of(done.pending)) == (BEGAN + 2, 2)
    assert done.pending.round <= slow.session._fold.final_round, "it is not announced"
    before = slow.session._feedback.residual_C4096.clone()
    number = BEGAN + 4
    finalize(fast, slow, number, [member(fast.train(number).pending, ME)])
    assert not torch.equal(slow.session._feedback.residual_C4096, before)


@pytest.mark.parametrize("rule", ["sgd", "nesterov"])
def test_a_kill_and_a_late_join_give_one_digest(tmp_path, rule):
    fast, slow = begun(tmp_path, rule=rule)
    pending = slow_work(fast, slow, 2)
    assert slow.restart().pending == (pending,), "a kill keeps what is safe, with its age"
    members = [member(fast.train(pending.round).pending, ME), member(pending, OTHER)]
    state = finalize(fast, slow, pending.round, members)
    reply = fast.ask(SnapshotRequest(str(tmp_path / "snapshot")))
    joiner = Home(tmp_path / "late", PEERS[2], fast.spec)
    joiner.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    assert reply.state == state
    number = pending.round + 1
    members = tuple(member(home.train(number).pending, home.start.peer) for home in (fast, slow, joiner))
    assert len({home.ask(FinalizeRequest(Round(number), members)).state for home in (fast, slow, joiner)}) == 1


def test_the_same_ask_again_gives_the_same_work(tmp_path):
    fast, slow = begun(tmp_path)
    pending = slow_work(fast, slow, 1)
    assert [each.pending for each in slow.session.train(slow.train_ask(BEGAN))] == [pending]
