"""A node is frozen when nothing moves for far longer than usual, and only then."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.rounds.machine import begin
from atoll.node.daemon.rounds.participants import MemberView, RoundBook
from atoll.node.daemon.rounds.state import Phase, RoundState, config_of
from atoll.node.daemon.standing_still.stillness import (
    FETCH_S,
    FROZEN_ROUNDS,
    GAP_S,
    LEAST_S,
    UNKNOWN_S,
    Marks,
    Stillness,
    frozen,
    hangs,
    limit_s,
    marks_of,
    watch,
)
from atoll.node.daemon.steps.step_budget import RoundStarts
from atoll.node.daemon.telemetry.round_log import TrafficTotals
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, digest

SPEC = preset("tiny", Identity(b"o" * 32).peer_id, 1)
LEASE_S = SPEC.pace.lease_s
BEGUN = Marks(phase=Phase.TRAIN, round=7, step=3, final=5, fetched_bytes=0)
PACE_S = 100.0
LIMIT_S = FROZEN_ROUNDS * PACE_S + LEASE_S
VOTERS = "round 6 lacks 2 of 4 voters: …a left, …b left; those that are here go on without them in 9 s"


def state(phase: Phase = Phase.TRAIN, **changes) -> RoundState:
    return msgspec.structs.replace(begin(config_of(SPEC, SPEC.owner)), phase=phase, round=7, **changes)


def moved(down_bytes: int, files_bytes: int | None = None) -> TrafficTotals:
    """What was received, of files only unless more is said."""
    return TrafficTotals(0, down_bytes, 0, 0, down_bytes if files_bytes is None else files_bytes)


def member(round_s: float) -> MemberView:
    return MemberView("training", 7, 0.0, 1.0, round_s=round_s)


def after(seconds: float, *marks: Marks) -> Stillness:
    """The marks one after the other, each for so many seconds of ticks."""
    still, now = watch(Stillness(), marks[0], 0.0), 0.0
    for each in marks:
        for _ in range(int(seconds)):
            now += 1.0
            still = watch(still, each, now)
    return still


def marks(**changes) -> Marks:
    return msgspec.structs.replace(BEGUN, **changes)


def line(still_s: float, unfinal_s: float, at: RoundState, pace_s: float = PACE_S, missing: str = "") -> str:
    return frozen(Stillness(BEGUN, 0.0, still_s, unfinal_s), at, pace_s, missing=missing, why="waiting")


def test_the_watch_counts_from_the_last_change():
    assert after(30, BEGUN).still_s == 30.0
    moved = after(30, BEGUN, marks(step=4))
    assert (moved.still_s, moved.unfinal_s) == (29.0, 60.0), "a step is no final round"
    assert after(30, BEGUN, marks(final=6)).unfinal_s == 29.0


@pytest.mark.parametrize("phase", [Phase.PAUSED, Phase.GATHER, Phase.OBSERVE, Phase.FINISHED])
def test_a_node_that_rests_is_not_frozen_and_counts_anew(phase):
    still = after(3000, marks(phase=phase))
    assert (still.still_s, still.unfinal_s) == (0.0, 0.0)
    assert line(1e9, 1e9, state(phase)) == ""
    again = after(1000, marks(phase=phase), BEGUN)
    assert (again.still_s, again.unfinal_s) == (999.0, 1000.0)


def test_a_node_that_fetches_moves_while_bytes_come():
    one, two, three = (marks(phase=Phase.CATCH_UP, fetched_bytes=count) for count in (1, 2, 3))
    still = after(100, one, two, three)
    assert (still.still_s, still.unfinal_s) == (99.0, 99.0)
    assert after(100, one, one, one).still_s == 300.0


def test_only_bytes_that_are_waited_for_are_a_move():
    assert marks_of(state(), 3, 5, moved(900), fetches=False) == BEGUN
    assert marks_of(state(), 3, 5, moved(900), fetches=True).fetched_bytes == 900
    assert marks_of(state(Phase.SYNC), 3, 5, moved(900), fetches=False).fetched_bytes == 900


def test_leases_of_neighbours_are_no_move_of_a_node_that_catches_up():
    """Two that lacked the same model told each other so for good, and neither said that it stood still."""
    heard = [marks_of(state(Phase.CATCH_UP), 3, 5, moved(count, 7), fetches=False) for count in (10, 20, 30)]
    assert after(FETCH_S, *heard).still_s == after(FETCH_S, *heard).unfinal_s == 3 * FETCH_S
    brought = [marks_of(state(Phase.CATCH_UP), 3, 5, moved(10, count), fetches=False) for count in (7, 8)]
    assert after(FETCH_S, *brought).unfinal_s == FETCH_S - 1


def test_bytes_beside_a_worker_that_does_not_answer_are_no_move():
    asked = [marks_of(state(Phase.CATCH_UP), 3, 5, moved(count), fetches=False, works=True) for count in (1, 2, 3)]
    assert {each.fetched_bytes for each in asked} == {0}
    still = after(200, *asked)
    assert (still.still_s, still.unfinal_s) == (600.0, 600.0)
    told = frozen(still, state(Phase.CATCH_UP), PACE_S, missing="", why="fetching 2 payloads of open rounds")
    assert told.endswith("its worker does not answer; if it stays so, `atoll stop --wait` and `atoll start`")
    short = limit_s(state(Phase.CATCH_UP), 1.0, works=True)
    assert short == FROZEN_ROUNDS + LEASE_S < limit_s(state(Phase.CATCH_UP), 1.0) == FETCH_S
    # It answered, and files are waited for again.
    ready = [marks_of(state(Phase.CATCH_UP), 3, 5, moved(count), fetches=False) for count in (4, 5)]
    assert after(200, *asked, *ready).unfinal_s == 199.0
    assert marks_of(state(Phase.SYNC), 3, 5, moved(9), fetches=False, works=True).fetched_bytes == 9


@pytest.mark.parametrize("phase", [Phase.SYNC, Phase.CATCH_UP])
def test_while_a_worker_starts_only_its_start_is_a_move(phase):
    starting = [marks_of(state(phase), 3, 5, moved(count), fetches=False, starts=4) for count in (1, 2, 3)]
    assert {each.fetched_bytes for each in starting} == {0}
    still = after(LEAST_S / 3, *starting)
    assert frozen(still, state(phase), 1.0, missing=VOTERS, why="waiting") == ""
    still = after(LEAST_S / 3 + 1, *starting)
    told = frozen(still, state(phase), 1.0, missing=VOTERS, why="waiting")
    assert told.startswith("frozen: the worker's start made no progress for 63 s; ")
    told_of = [marks_of(state(phase), 3, 5, moved(9), fetches=False, starts=count) for count in range(4, 40)]
    still = after(LEAST_S, *told_of)
    assert (still.still_s, still.unfinal_s) == (59.0, 59.0), "a long start is no time without a final round"
    assert frozen(still, state(phase), 1.0, missing="", why="") == ""
    assert marks_of(state(), 3, 5, moved(9), fetches=False, starts=4) == BEGUN, "it trains, observes or rests"


def test_time_in_which_the_daemon_did_not_run_does_not_count():
    slept = watch(after(30, BEGUN), BEGUN, 30.0 + 8 * 3600)
    assert slept.still_s == 30.0 + GAP_S
    assert watch(slept, BEGUN, 0.0).still_s == slept.still_s, "a clock that runs backwards neither"


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.integers(0, 2), st.floats(0.0, 100.0)), max_size=20))
def test_no_time_is_longer_than_the_ticks_and_a_final_round_is_a_move(history):
    still, now = Stillness(), 0.0
    for phase, final, passed_s in history:
        now += passed_s
        still = watch(still, marks(phase=phase, final=final), now)
        assert 0.0 <= still.still_s <= now
        assert still.still_s <= still.unfinal_s or still.marks.phase is not Phase.TRAIN


def test_a_round_that_does_not_become_final_is_told_with_its_voters():
    assert line(1.0, LIMIT_S - 1, state()) == line(LIMIT_S - 1, LIMIT_S - 1, state()) == ""
    told = line(1.0, LIMIT_S + 1, state(), missing=VOTERS)
    assert told == f"frozen: no round became final for 561 s, and a round usually takes 100 s; {VOTERS}"
    trains = frozen(Stillness(BEGUN, 0.0, 1.0, LIMIT_S + 1), state(), PACE_S, missing="", why="")
    assert "; it is in round 7; " in trains, "its steps do end"
    assert line(1.0, LIMIT_S + 1, state()).endswith(
        "; waiting; if it stays so, `atoll stop --wait` and `atoll start`"
    )


def test_a_step_that_does_not_end_is_told():
    told = frozen(Stillness(BEGUN, 0.0, LIMIT_S + 1, 0.0), state(), PACE_S, missing="", why="")
    assert told.startswith("frozen: no step and no round for 561 s")
    assert "the next step of round 7 does not end" in told


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FOLD, Phase.CATCH_UP])
def test_a_worker_that_owes_an_answer_for_long_hangs_and_one_that_waits_for_others_does_not(phase):
    long = Stillness(BEGUN, 0.0, LIMIT_S + 1, 0.0)
    assert hangs(long, state(phase), PACE_S, asked=True)
    assert not hangs(long, state(phase), PACE_S, asked=False)
    assert not hangs(Stillness(BEGUN, 0.0, LIMIT_S - 1, 0.0), state(phase), PACE_S, asked=True)
    assert not hangs(Stillness(BEGUN, 0.0, FETCH_S - 1, 0.0), state(phase), 1.0, asked=True, stepped=False)
    assert hangs(Stillness(BEGUN, 0.0, FETCH_S + 1, 0.0), state(phase), 1.0, asked=True, stepped=False)
    for other in set(Phase) - {Phase.TRAIN, Phase.FOLD, Phase.CATCH_UP}:
        assert not hangs(long, state(other), PACE_S, asked=True)


def test_keys_without_work_make_no_round_long():
    keys = {PeerId(name): msgspec.structs.replace(member(1e12), untried=True) for name in "abc"}
    assert limit_s(state(members=keys), PACE_S) == LIMIT_S
    assert limit_s(state(members={PeerId("a"): member(1e12)}), PACE_S) > 1e12


def test_who_is_ahead_of_most_others_is_not_frozen_while_it_waits_for_them():
    """That ends by itself, after eight of their rounds and a lease at most; another start would not help."""
    members = {PeerId(name): MemberView("training", 3, 0.0, 1.0, round_s=PACE_S) for name in "ab"}
    ahead = state(Phase.JOIN, members=members, entered=dict.fromkeys(members, 0.0), train_s=PACE_S)
    longest_s = 8 * PACE_S + LEASE_S
    assert line(1e9, longest_s, ahead) == ""
    told = line(1e9, (8 + FROZEN_ROUNDS) * PACE_S + LEASE_S + 1, ahead)
    assert told.startswith("frozen: no round became final for ")
    assert told.endswith("; waiting"), "no advice to start again"
    assert line(LIMIT_S + 1, 0.0, state(Phase.JOIN)).startswith("frozen: "), "it waits for another reason"


def test_who_waits_for_the_work_of_others_is_not_told_to_start_again():
    """One of them hangs: to restart another node would change nothing. The line says when the round goes on."""
    work = {digest(b"ours"): SPEC.owner}
    done = RoundBook(authors=work, held=frozenset(work))
    waits = state(Phase.COLLECT, collecting=7, books={7: done}, members={PeerId("a"): member(PACE_S)})
    assert line(LIMIT_S + 1, 0.0, waits).endswith("and a round usually takes 100 s; waiting")
    mine = msgspec.structs.replace(waits, books={})
    assert line(LIMIT_S + 1, 0.0, mine).endswith("`atoll start`"), "its own work is not written yet"


def test_who_waits_for_a_peer_is_sent_to_the_doctor():
    at = state(Phase.SYNC)
    assert line(FETCH_S - 1, 0.0, at, 0.0) == line(FETCH_S + 1, 0.0, at) == ""
    assert line(FETCH_S + 1, 0.0, at, 0.0).endswith("waiting; `atoll doctor` looks for the cause")


def test_long_rounds_are_not_frozen():
    assert limit_s(state(), 1.0) == FROZEN_ROUNDS + LEASE_S > LEAST_S
    assert limit_s(state(), 3600.0) == FROZEN_ROUNDS * 3600.0 + LEASE_S
    slower = state(members={PeerId("a"): member(900.0), PeerId("b"): member(700.0), PeerId("c"): member(0.0)})
    assert limit_s(slower, 100.0) == FROZEN_ROUNDS * 800.0 + LEASE_S, "the others became slower"


def test_the_first_rounds_have_no_usual_time():
    assert limit_s(state(), 0.0) == UNKNOWN_S
    assert line(UNKNOWN_S - 1, 1e9, state(), 0.0) == ""
    # It waits for a member that lives: such a round closes after eight of its own times and a lease.
    assert limit_s(state(Phase.COLLECT, train_s=600.0), 0.0) > 8 * 600.0 + LEASE_S
    assert limit_s(state(Phase.JOIN, members={PeerId("a"): member(3600.0)}), 0.0) > 2 * 3600.0


def test_a_stage_with_more_steps_has_longer_rounds():
    starts = RoundStarts()
    for number, at_s, steps in ((0, 0.0, 10), (1, 100.0, 10), (2, 200.0, 40)):
        starts = starts.after(number, at_s, steps)
    assert (starts.round_s, starts.expected_s) == (100.0, 400.0)
    assert RoundStarts().after(0, 0.0, 10).expected_s == 0.0
    fewer = starts.after(3, 600.0, 10)
    assert fewer.expected_s == fewer.round_s == 400.0
