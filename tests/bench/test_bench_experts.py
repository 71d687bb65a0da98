"""`bench experts`: who decides that an owner's death was harmless, and that a share fits where all do not."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.run.run_spec import Stage
from atoll_bench.experts import experts_gpu as gpu
from atoll_bench.experts import experts_owner as owner
from atoll_bench.experts.experts_members import MEMBERS, shares_of, spec_of
from atoll_bench.experts.experts_story import BEGIN, PHASES, Moment, Seen, Told, move, step
from atoll_bench.experts.held import arithmetic_bytes
from atoll_bench.report import all_reached


def test_a_phase_ends_when_its_rounds_are_final_and_the_killed_one_takes_part_again():
    assert step(BEGIN, Seen(5, 3, True, {})) == BEGIN
    dead = step(BEGIN, Seen(6, 4, True, {}))
    assert dead == Moment("dead", 6)
    assert step(dead, Seen(11, 9, False, {})) == dead
    back = step(dead, Seen(12, 10, False, {}))
    assert back == Moment("back", 12)
    assert step(back, Seen(40, 38, False, {})) == back, "it has not contributed yet"
    lost = step(back, Seen(41, 39, True, {}))
    assert lost == Moment("dead for good", 41)
    assert step(lost, Seen(47, 44, False, {})) == lost
    assert step(lost, Seen(47, 45, False, {})) is None


FOUR = {0: frozenset({0, 1}), 1: frozenset({2, 3}), 2: frozenset({4, 5}), 3: frozenset({6, 7})}


def test_only_the_experts_of_the_dead_may_move():
    homed = {0: frozenset({0, 1, 6}), 1: frozenset({2, 3, 7}), 2: frozenset({4, 5})}
    assert move(FOUR, homed, 3, 8) == (2, 0, 0)
    assert move(homed, FOUR, 3, 8) == (2, 0, 0)
    shuffled = {0: frozenset({0, 4, 6}), 1: frozenset({2, 3, 7}), 2: frozenset({1, 5})}
    assert move(FOUR, shuffled, 3, 8) == (4, 2, 0)
    assert move(FOUR, {each: FOUR[each] for each in range(3)}, 3, 8) == (0, 0, 2)


def books(rounds: int, **of_one: object) -> dict[int, dict[int, dict[str, object]]]:
    """Of four members; member 1 saw `of_one` in round 2."""
    usual = {"wait_s": 1.0, "transfer_s": 0.5, "final": True, "digest": "aa", "train_loss": 2.0}
    found = {member: {at: dict(usual) for at in range(rounds)} for member in range(MEMBERS)}
    found[1][2] |= of_one
    return found


HOMED = {0: frozenset({0, 1, 6}), 1: frozenset({2, 3, 7}), 2: frozenset({4, 5})}
WHOLE = Told((5, 10, 20), (FOUR, HOMED, FOUR, HOMED))


def test_a_story_that_went_well_reaches_all_bars():
    rows = owner.rows_of(WHOLE, books(25), 8)
    assert [(made.value, made.bar) for made in rows] == [(0, "<= 0")] * 8
    assert all_reached(rows)
    assert "round 5: 2.000, round 6: 2.000" in rows[0].note
    assert rows[2].note == "2 of 8 moved"
    assert [made.metric for made in owner.unmeasured_rows()] == [made.metric for made in rows]
    assert not all_reached(owner.unmeasured_rows())


@pytest.mark.parametrize(("at", "seen"), [(0, {"wait_s": 13.0}), (0, {"transfer_s": 12.0}), (1, {"digest": "bb"})])
def test_a_stall_and_a_fork_are_seen(at, seen):
    rows = owner.rows_of(WHOLE, books(25, **seen), 8)
    assert [made.value for made in rows] == [int(place == at) for place in range(8)]


def test_the_waits_of_the_dead_do_not_count_and_digests_that_are_not_final_neither():
    rows = books(25, digest="bb", final=False)
    rows[owner.VICTIM][7]["wait_s"] = 99.0
    assert all_reached(owner.rows_of(WHOLE, rows, 8))


def test_a_story_that_broke_off_has_stalled_and_what_followed_is_not_measured():
    rows = owner.rows_of(Told((5,), (FOUR, HOMED)[: len(PHASES) - 2]), books(9), 8)
    assert [made.value for made in rows] == [1, 0, 0, 0, None, None, None, None]
    assert not all_reached(rows)


def test_the_cap_leaves_room_for_a_share_and_none_for_all():
    spec = gpu.spec_on_gpu(3)
    share = shares_of(spec, MEMBERS)[0]
    cap = gpu.cap_bytes(spec.model, share, gpu.FROZEN)
    assert spec.model.parameters > 3e8
    assert arithmetic_bytes(spec.model, share, gpu.FROZEN) + 4 * spec.model.parameters < 0.95 * cap
    assert cap < 0.95 * 16 * spec.model.parameters
    with pytest.raises(ConfigError, match="no cap"):
        gpu.cap_bytes(spec.model, frozenset(range(16)), gpu.FROZEN)
    with pytest.raises(ConfigError, match="no cap"):
        gpu.cap_bytes(spec_of("moe-smoke").model, frozenset({0}), gpu.FROZEN)


@given(st.integers(0, 4), st.booleans(), st.integers(0, 9), st.integers(0, 4), st.booleans())
def test_a_share_must_train_inside_the_cap_and_all_must_not(steps, short, peak, more, all_short):
    share, everything = gpu.Outcome(steps, short, peak), gpu.Outcome(more, all_short, peak)
    free = gpu.Outcome(4, False, 9)
    said = gpu.holds(share, everything, 4, 5)
    assert said == (steps == 4 and not short and peak <= 5 and more < 4 and all_short)
    rows = gpu.rows_of(share, everything, free, 4, 5)
    assert [made.passed for made in rows] == [None, None, None, said]


def test_without_a_gpu_the_rows_say_why_and_the_bar_is_not_reached(monkeypatch):
    monkeypatch.setattr(gpu, "gpu_bytes", lambda: 0)
    for device, why in (("cpu", gpu.NOT_ASKED), ("cuda", gpu.NO_CUDA)):
        rows = asyncio.run(gpu.gpu_rows(False, device))
        assert [(made.value, made.note) for made in rows] == [(None, why)] * 4
        assert (rows[-1].metric, rows[-1].bar, rows[-1].passed) == (gpu.VERDICT, ">= 1", None)
        assert not all_reached(rows)


@pytest.mark.parametrize("trained", ["share", "all"])
def test_the_steps_are_those_of_a_worker_session(tmp_path, trained):
    spec = spec_of("moe-smoke")
    spec = replace(spec, outer=replace(spec.outer, stages=(Stage(0, 2),)))
    assert gpu.trained_under(tmp_path, spec, trained, "cpu", 0) == gpu.Outcome(2, False, 0)


def test_only_out_of_memory_is_an_outcome(tmp_path, monkeypatch):
    def refuse(error: Exception) -> None:
        def step(*_: object) -> float:
            raise error

        monkeypatch.setattr("atoll.node.worker.learner.Learner.step", step)

    refuse(torch.OutOfMemoryError("no room"))
    assert gpu.trained_under(tmp_path / "a", spec_of("moe-smoke"), "all", "cpu", 0) == gpu.Outcome(0, True, 0)
    refuse(LocalFault("out of memory: it does not hold one sequence of a step"))
    assert gpu.trained_under(tmp_path / "c", spec_of("moe-smoke"), "all", "cpu", 0) == gpu.Outcome(0, True, 0)
    refuse(LocalFault("the disk is full"))
    with pytest.raises(LocalFault, match="disk"):
        gpu.trained_under(tmp_path / "d", spec_of("moe-smoke"), "all", "cpu", 0)
    refuse(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        gpu.trained_under(tmp_path / "b", spec_of("moe-smoke"), "all", "cpu", 0)
