"""Laws of the time at which a round's members should be done, and golden decisions of members that aim at it."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.steps.arrival import expected_seconds, group_s, median_s
from atoll.node.daemon.steps.step_budget import Tempo, choose, limit_s, measured, tempo_of
from atoll.node.daemon.steps.step_budget import least as least_of
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease
from tests.node.worker.session_home import SPEC

TOKENS, BATCH = 4096, 32
times = st.lists(st.floats(0.1, 1e4), min_size=1, max_size=9)
nominals = st.integers(4, 512)
least = st.integers(1, 255)
most = st.integers(256, 1024)


def tempo(whole_s: float, nominal: int, least_256: int, most_256: int) -> Tempo:
    """A member that takes so many seconds for the nominal steps of a round."""
    new = Tempo(TOKENS, least_256, most_256, batch=BATCH, arrival="group")
    return measured(new, whole_s, nominal, nominal * TOKENS)


def choices(whole_s: list[float], nominal: int, least_256: int, most_256: int) -> list[Tempo]:
    """What each member chooses that knows its own speed and reads the others'."""
    speeds = [nominal * TOKENS / each for each in whole_s]
    return [
        choose(tempo(each, nominal, least_256, most_256), nominal, speeds[:at] + speeds[at + 1 :])
        for at, each in enumerate(whole_s)
    ]


@given(times, nominals, least, most)
def test_no_other_time_has_more_members(whole_s, nominal, least_256, most_256):
    def members(done_s: float) -> int:
        return sum(least_256 * each <= 256 * done_s <= most_256 * each for each in whole_s)

    done_s = group_s(whole_s, least_256, most_256)
    ends = [each * share / 256 for each in whole_s for share in (least_256, most_256)]
    assert members(done_s) == max(map(members, ends)) >= 1
    equal = [end for end in ends[1::2] if members(end) == members(done_s)]
    assert done_s == min(equal), "of equal groups the fastest"


@given(times, nominals, least, most)
@example([1.0, 2.0, 4.0, 8.0, 30.0], 20, 64, 256)
def test_work_lies_within_the_bounds_and_the_group_arrives_together(whole_s, nominal, least_256, most_256):
    done_s = group_s(whole_s, least_256, most_256)
    for each, node in zip(whole_s, choices(whole_s, nominal, least_256, most_256), strict=True):
        low, high = least_of(node, nominal), nominal * most_256 // 256
        assert low.steps <= node.chosen <= high
        assert low.sequences <= node.sequences <= BATCH
        step_s = each / nominal
        is_whole = low.steps * step_s <= done_s <= high * step_s
        if is_whole and len(whole_s) > 1:
            assert abs(node.chosen * step_s - done_s) <= 0.11 * done_s + 1.2 * step_s


@given(times, least, most)
def test_the_fastest_of_the_group_takes_the_most_steps(whole_s, least_256, most_256):
    done_s = group_s(whole_s, least_256, most_256)
    group = [each for each in whole_s if least_256 * each <= 256 * done_s <= most_256 * each]
    assert done_s == pytest.approx(min(group) * most_256 / 256)


@given(st.lists(st.floats(5.0, 10.0), min_size=2, max_size=9), st.floats(1e-9, 1.0) | st.floats(100.0, 1e9))
def test_one_member_that_lies_about_its_speed_changes_nothing(whole_s, lie_s):
    """Of those whose bounds overlap, as far as its own bounds do not."""
    assert group_s([*whole_s, lie_s], 64, 256) == group_s(whole_s, 64, 256)


def test_times_that_are_none_are_not_looked_at():
    assert group_s([math.inf, math.inf, math.inf, math.nan, 4.0, 5.0], 64, 256) == 4.0
    assert group_s([math.inf], 64, 256) == math.inf
    assert limit_s(Tempo(TOKENS, 64, 256, batch=BATCH, arrival="group"), 20, [5e-324]) == 0.0


GOLDEN = [
    ([10.0, 20.0, 40.0, 80.0, 300.0], 256, [(20, 32), (10, 32), (5, 32), (5, 12), (5, 3)]),
    ([10.0, 20.0, 40.0, 80.0, 300.0], 1024, [(80, 32), (40, 32), (20, 32), (10, 32), (5, 12)]),
    ([10.0, 80.0, 80.0, 80.0], 256, [(20, 32)] * 4),
    ([10.0, 80.0, 80.0, 80.0], 1024, [(80, 32), (10, 32), (10, 32), (10, 32)]),
    ([10.0, 10.0, 10.0, 300.0], 256, [(20, 32), (20, 32), (20, 32), (5, 3)]),
    ([10.0, 100.0], 256, [(20, 32), (5, 9)]),
]
"""Seconds of the nominal 20 steps of 32 sequences, `most_256` and what each takes of them; `least_256` is 64."""


@pytest.mark.parametrize(("whole_s", "most_256", "taken"), GOLDEN)
def test_golden_decisions(whole_s, most_256, taken):
    found = [(node.chosen, node.sequences) for node in choices(whole_s, 20, 64, most_256)]
    assert found == taken


def test_a_round_is_cut_short_by_the_time_that_the_group_aims_at():
    slow_most = [20 * TOKENS / each for each in (80.0, 80.0)]
    fast = tempo(10.0, 20, 64, 1024)
    assert limit_s(fast, 20, slow_most) == 80.0, "twice the 40 s in which all three can be done"


def test_others_are_expected_when_the_group_is_done():
    pace = replace(SPEC.pace, least_256=64, most_256=512)
    group = replace(SPEC, pace=replace(pace, arrival="group"))
    whole = SPEC.nominal_tokens(0)
    leases = {
        PeerId(str(at)): Lease("training", 0, -1, b"", -1, whole / each if each else 0.0, 0.0, 0.0)
        for at, each in enumerate((10.0, 20.0, 40.0, 0.0))
    }
    assert list(expected_seconds(replace(SPEC, pace=pace), leases).values()) == [10.0, 20.0, 40.0, 0.0]
    assert list(expected_seconds(group, leases).values()) == [20.0, 20.0, 20.0, 0.0]
    keys = {PeerId(f"key{n}"): replace(leases[PeerId("0")], tokens_per_s=1e12) for n in range(4)}
    beside = expected_seconds(group, leases | keys, untried=keys)
    assert [beside[peer] for peer in leases] == [20.0, 20.0, 20.0, 0.0], "who shows no work sets nobody's time"


def test_a_run_that_says_nothing_aims_at_the_median():
    assert tempo_of(SPEC, 1).arrival == "median"
    assert median_s([1.0, 9.0, 2.0]) == 2.0
    pace = replace(SPEC.pace, least_256=64, arrival="group")
    assert tempo_of(replace(SPEC, pace=pace), 1).arrival == "group"
