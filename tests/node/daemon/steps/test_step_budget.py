"""Laws of the share of a round's steps that a member takes."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.node.daemon.steps.step_budget import (
    AIM,
    LEAST_SHARE,
    PACE_LEAST,
    PACE_MOST,
    PROBE_ROUNDS,
    REMEMBERED,
    RoundStarts,
    Tempo,
    Timed,
    choose,
    limit_s,
    measured,
    shortened,
    tempo_of,
)
from atoll.node.daemon.steps.step_budget import least as least_of
from atoll.node.runs.presets import NAMES, preset
from tests.node.worker.session_home import ME, SPEC
from tests.test_docs import ROOT, text_of

TOKENS = 4096
speeds = st.floats(1e-2, 1e6)
nominals = st.integers(1, 512)
least = st.integers(1, 256)
most = st.integers(256, 1024)


def tempo(speed: float, least_256: int = 64, most_256: int = 512) -> Tempo:
    return measured(Tempo(TOKENS, least_256, most_256), 10 * TOKENS / speed, 10, 10 * TOKENS)


@given(speeds, st.lists(st.floats(0, 1e6)), nominals, least, most)
def test_the_bounds_hold_and_a_step_is_always_taken(own, others, nominal, least_256, most_256):
    steps = choose(tempo(own, least_256, most_256), nominal, others).chosen
    assert 1 <= -(-nominal * least_256 // 256) <= steps <= nominal * most_256 // 256


def test_a_peer_that_reports_nonsense_changes_nothing_beyond_the_bounds():
    for nonsense in (5e-324, 1e308, float("inf"), float("nan"), -1.0):
        assert choose(tempo(100.0), 30, [nonsense] * 3).chosen in range(8, 61)


@given(speeds, st.lists(speeds, max_size=9), nominals)
def test_without_bounds_to_use_it_is_the_nominal_number(own, others, nominal):
    assert choose(tempo(own, 256, 256), nominal, others).chosen == nominal


@given(speeds, st.lists(st.floats(0.95, 1.05), min_size=1, max_size=9), nominals)
def test_members_that_are_alike_take_the_nominal_steps(own, noise, nominal):
    assert choose(tempo(own), nominal, [own * share for share in noise]).chosen == nominal


@given(st.floats(0.3, 3.0), st.lists(st.floats(0.93, 1.07), min_size=1, max_size=20), st.integers(20, 512))
def test_noise_does_not_change_a_choice(ratio, noise, nominal):
    """The others are steady; our own rounds are measured with noise."""
    node = choose(tempo(1000.0 * ratio), nominal, [1000.0] * 4)
    first = node.chosen
    for share in noise:
        noisy = Tempo(TOKENS, 64, 512, (Timed(1.0, TOKENS / (1000.0 * ratio * share), True),), node.chosen)
        node = choose(noisy, nominal, [1000.0] * 4)
        near = abs(ratio * nominal - nominal) <= 0.25 * nominal
        assert node.chosen == first or near, "only near the nominal number may it go over to it"


@given(st.floats(0.3, 1.9), st.integers(20, 512))
def test_who_has_another_speed_ends_with_the_others(ratio, nominal):
    own, others = 1000.0 * ratio, [1000.0] * 4
    steps = choose(tempo(own), nominal, others).chosen
    assert 0.85 <= (steps / own) / (nominal / 1000.0) <= 1.12


@given(st.lists(speeds, min_size=1, max_size=9), nominals, speeds, speeds)
def test_faster_nodes_take_no_fewer_steps(others, nominal, one, two):
    """Beyond what the tolerance around the nominal number allows."""
    slow, fast = sorted((one, two))
    few, many = (choose(tempo(speed), nominal, others).chosen for speed in (slow, fast))
    assert few <= many + 0.25 * nominal


def large_steps(speed: float, batch: int, least_256: int = 64) -> Tempo:
    """The tempo of a node that may leave out sequences."""
    return measured(Tempo(TOKENS, least_256, 256, batch=batch), 10 * TOKENS / speed, 10, 10 * TOKENS)


@given(speeds, st.lists(speeds, min_size=1, max_size=9), nominals, least, st.integers(1, 512))
def test_what_is_taken_lies_between_the_least_and_all(own, others, nominal, least_256, batch):
    node = choose(large_steps(own, batch, least_256), nominal, others)
    low = least_of(node, nominal)
    assert low.steps <= node.chosen <= nominal
    assert low.sequences <= node.sequences <= batch
    can_say = low.steps * low.sequences * LEAST_SHARE >= nominal * batch
    assert can_say or low.sequences == batch, "a weight can say it"


@given(st.floats(1 / 60, 1.0), st.integers(1, 512))
def test_the_slower_half_ends_with_the_others_however_slow(ratio, nominal):
    """As far as a step may have fewer sequences: here down to a 64th of the round."""
    node = choose(large_steps(1000.0 * ratio, 64), nominal, [1000.0] * 4)
    took = node.chosen * node.sequences / 64 / ratio
    assert took <= 1.12 * nominal or (node.chosen, node.sequences) == least_of(node, nominal)
    assert took >= 0.3 * nominal, "and does not idle"


def test_thirty_times_slower_is_a_thirtieth_of_the_work():
    node = choose(large_steps(1000.0 / 30, 16), 20, [1000.0] * 4)
    assert (node.chosen, node.sequences) == (8, 1), "three quarters of it, for what such a machine does besides"
    assert (choose(large_steps(1000.0 / 3, 16), 20, [1000.0] * 4)).sequences == 16, "first of all fewer steps"


def least_share(spec, stage):
    """Of a round's tokens, what a member with one device takes at least."""
    work = least_of(tempo_of(spec, 1), stage.steps)
    return work.steps * work.sequences / (stage.steps * spec.inner.batch)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_how_slow_a_member_of_each_preset_may_be(name):
    spec = preset(name, ME, 1)
    shares = [least_share(spec, stage) for stage in spec.outer.stages]
    said = " | ".join(f"1/{1 / share:.0f}, {AIM / share:.0f} ×" for share in shares)
    assert f"| `{name}` | {spec.inner.batch} | {said} |\n" in text_of(ROOT / "docs" / "steps.md")


def test_more_least_steps_keep_slower_members_out():
    plain = preset("tiny", ME, 1)
    spec = msgspec.structs.replace(plain, pace=msgspec.structs.replace(plain.pace, least_256=64))
    assert [least_share(spec, stage) for stage in spec.outer.stages] == [1 / 16, 1 / 32]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slower", [5.0, 12.0, 24.0, 30.0, 45.0, 60.0, 90.0])
def test_a_member_that_a_preset_waits_for_takes_three_quarters_of_the_time_and_others_the_least(name, slower):
    """Alone among members that are alike, where a step has no fixed costs."""
    spec = preset(name, ME, 1)
    stage = spec.outer.stages[-1]
    whole = spec.inner.batch * spec.model.context
    own = measured(tempo_of(spec, 1), slower * stage.steps, stage.steps, stage.steps * whole)
    took = choose(own, stage.steps, [float(whole)] * 4)
    time = slower * took.chosen * took.sequences / spec.inner.batch / stage.steps
    if AIM / least_share(spec, stage) >= slower:
        assert time <= AIM + 1e-9
    else:
        assert (took.chosen, took.sequences) == least_of(own, stage.steps)
        assert time > AIM


def test_where_no_step_may_be_left_out_and_on_several_devices_steps_are_whole():
    spec = preset("10m", ME, 1)
    assert tempo_of(spec, 1).batch == spec.inner.batch > 1
    assert tempo_of(spec, 2).batch == 1
    assert SPEC.pace.least_256 == 256
    assert tempo_of(SPEC, 1).batch == 1


def test_a_round_is_cut_short_that_takes_much_longer_than_the_others_need():
    node = Tempo(TOKENS, 64, 256, batch=16)
    assert limit_s(node, 30, []) == 0.0, "nobody knows how long it takes"
    assert limit_s(node, 30, [0.0, 10.0 * TOKENS]) == 8.0, "rounds of seconds are disturbed by anything"
    assert limit_s(node, 30, [0.1 * TOKENS, 0.2 * TOKENS, 9.0 * TOKENS]) == 300.0
    assert limit_s(Tempo(TOKENS, 64, 256), 30, [10.0 * TOKENS]) == 0.0
    assert limit_s(node, 30, [5e-324]) == 0.0


@given(speeds, st.one_of(speeds, st.just(1e11)), st.integers(20, 512), st.integers(2, 64))
def test_of_two_members_none_is_cut_short_at_what_it_chose(own, other, nominal, batch):
    node = choose(large_steps(own, batch), nominal, [other])
    if (node.chosen, node.sequences) != least_of(node, nominal):
        takes_s = node.chosen * node.sequences / batch * TOKENS / own
        assert takes_s <= limit_s(node, nominal, [other]) * 1.01


def test_unknown_speeds_change_nothing():
    assert choose(Tempo(TOKENS, 64, 512), 30, [5.0, 9.0]).chosen == 30
    assert choose(tempo(100.0), 30, []).chosen == 30
    assert choose(tempo(100.0), 30, [0.0, 0.0]).chosen == 30


def test_one_disturbed_round_is_forgotten():
    node = tempo(100.0)
    for _ in range(REMEMBERED):
        node = measured(node, 10 * TOKENS / 100.0, 10, 10 * TOKENS)
    hit = measured(node, 10 * 10 * TOKENS / 100.0, 10, 10 * TOKENS)
    assert hit.tokens_per_s == node.tokens_per_s
    assert measured(node, 0.0, 1, TOKENS) == node


def test_the_two_ends_of_a_mixed_swarm():
    """Three times slower than the median: a third of the steps, or the bound; the fast ones may take more."""
    others = [1000.0, 1000.0, 1000.0, 1000.0]
    assert choose(tempo(1000.0 / 3, 64), 30, others).chosen in (9, 10)
    assert choose(tempo(1000.0 / 3, 128), 30, others).chosen == 15
    assert choose(tempo(2000.0, 64, 256), 30, others).chosen == 30
    assert choose(tempo(2000.0, 64, 512), 30, others).chosen == 60


@given(speeds, st.lists(st.floats(0, 1e308)), nominals, least, st.floats(0, 1e9))
@example(own=1.0, others=[9e307, 9e307], nominal=1, least_256=1, late_s=1.0)
def test_who_begins_late_takes_at_least_its_share(own, others, nominal, least_256, late_s):
    for node in (tempo(own, least_256, 256), Tempo(TOKENS, least_256, 256)):
        node = choose(node, nominal, others)
        steps = shortened(node, nominal, others, late_s)
        assert -(-nominal * least_256 // 256) <= steps <= node.chosen
        assert shortened(node, nominal, others, 0.0) == node.chosen


def test_who_begins_late_is_done_with_the_others():
    others, step_s = [1000.0, 1000.0, 3000.0], TOKENS / 1000.0
    known, fresh = choose(tempo(1000.0), 40, others), choose(Tempo(TOKENS, 64, 512), 40, others)
    for node in (known, fresh):
        assert shortened(node, 40, others, 10 * step_s) == 30, "after a start it may be as fast as most"
        assert shortened(node, 40, others, 35 * step_s) == 10, "no less than its share"
    slow = choose(tempo(500.0), 40, others)
    assert (slow.chosen, shortened(slow, 40, others, 10 * step_s)) == (20, 15)
    assert shortened(fresh, 40, [], 10 * step_s) == 40


OTHERS = [1000.0] * 4
NOMINAL, BATCH = 20, 16
OTHERS_S = NOMINAL * TOKENS / 1000.0
"""What a round takes the others."""


def after_rounds(node: Tempo, count: int, whole_s: float, fixed: float) -> tuple[Tempo, list[float]]:
    """The node after so many rounds on a machine whose whole step takes `whole_s`; and the rounds' seconds."""
    took = []
    for _ in range(count):
        node = choose(node, NOMINAL, OTHERS)
        step_s = whole_s * (fixed + (1 - fixed) * node.sequences / BATCH)
        took.append(node.chosen * step_s)
        node = measured(node, took[-1], node.chosen, node.chosen * node.sequences * TOKENS // BATCH)
    return node, took


@given(st.floats(0, 0.99), st.floats(0.5, 3.9), st.floats(2, 60), st.integers(1, 40))
def test_who_was_slow_for_a_while_comes_back_to_whole_steps(fixed, ratio, slower, rounds):
    """However much of a step does not depend on its sequences: by tokens/s alone it would stay with few."""
    whole_s = ratio * TOKENS / 1000.0
    node, _ = after_rounds(Tempo(TOKENS, 64, 256, batch=BATCH), 3, whole_s, fixed)
    assert node.sequences == BATCH
    node, _ = after_rounds(node, rounds, whole_s * slower, fixed)
    node, _ = after_rounds(node, 2 * PROBE_ROUNDS, whole_s, fixed)
    assert node.sequences == BATCH


@given(st.floats(0, 0.99), st.floats(4.5, 60))
def test_who_stays_slow_is_seldom_late(fixed, ratio):
    """A probe is one round in many; all others end with the others', or are the least."""
    whole_s = ratio * TOKENS / 1000.0
    node, _ = after_rounds(Tempo(TOKENS, 64, 256, batch=BATCH), 3 * PROBE_ROUNDS, whole_s, fixed)
    low = least_of(node, NOMINAL)
    least_s = low.steps * whole_s * (fixed + (1 - fixed) * low.sequences / BATCH)
    _, took = after_rounds(node, 4 * PROBE_ROUNDS, whole_s, fixed)
    assert sum(each > 1.01 * max(OTHERS_S, least_s) for each in took) <= 4
    assert max(took) <= 2.02 * max(OTHERS_S, least_s)


def test_the_time_of_other_sizes_is_foreseen():
    node, _ = after_rounds(Tempo(TOKENS, 64, 256, batch=BATCH), 6, 30.0, 0.4)
    assert abs(node.step_s(1) - 30.0 * (0.4 + 0.6 / BATCH)) < 1e-6
    assert abs(node.tokens_per_s - TOKENS / 30.0) < 1e-6


def test_a_round_that_was_cut_short_says_nothing_of_sizes():
    """Other programs began to use the machine in its midst: it is slow, and not slow by its few sequences."""
    node, _ = after_rounds(Tempo(TOKENS, 64, 256, batch=BATCH), 1, 4.0, 0.4)
    cut = measured(node, NOMINAL * 90.0, NOMINAL, NOMINAL * TOKENS // 3)
    assert cut.fixed == node.fixed
    few = measured(replace(node, sequences=4), 5 * 2.2, 5, 5 * TOKENS // 4)
    assert abs(few.fixed - 0.4) < 1e-6


@given(st.floats(0, 0.99), st.floats(0.5, 3.9), st.floats(0, 1))
def test_what_was_learnt_wrongly_of_sizes_is_learnt_again(fixed, ratio, believed):
    """The machine's speed may change in the very round in which the size of the steps does."""
    whole_s = ratio * TOKENS / 1000.0
    wrong = Timed(1 / BATCH, whole_s * (fixed + (1 - fixed) / BATCH), True)
    node = Tempo(TOKENS, 64, 256, (wrong,) * PROBE_ROUNDS, 5, BATCH, 1, believed)
    node, _ = after_rounds(node, 2 * PROBE_ROUNDS, whole_s, fixed)
    assert node.sequences == BATCH


def begun(*took_s: float, steps: int = 8, first: int = 0) -> RoundStarts:
    """Rounds that took so long each, and one that begins."""
    starts, now = RoundStarts(), 0.0
    for number, each_s in enumerate((*took_s, 0.0), first):
        starts = starts.after(number, now, steps)
        now += each_s
    return starts


def test_the_pace_is_the_mean_of_the_newest_rounds_so_that_the_time_left_is_right():
    assert begun().round_s == 0.0, "of one start nothing follows"
    uneven = (0.7, 1.0, 1.2, 4.4, 0.9, 1.1, 3.9, 1.0) * 4
    assert begun(*uneven).round_s == pytest.approx(sum(uneven) / len(uneven)), "a median would say 1.05"
    assert begun(3.0, 3.0, 90.0, 3.5, 3.0).round_s == 3.0, "of few rounds one must not be most"
    assert begun(*[2.0] * 15, 30_000.0).round_s == 2.0 * (7 + 8) / 8, "it slept for a night"


def test_the_pace_follows_a_run_that_changed():
    assert begun(*[90.0] * 20, *[30.0] * 20).round_s == 30.0, "the rounds of ten minutes"
    assert len(begun(*[0.5] * 200).began) == PACE_MOST + 1
    assert len(begun(*[900.0] * 20).began) == PACE_LEAST + 1
    starts = begun(1.0, 1.0, 1.0)
    for number, now in ((4, 7.0), (5, 11.0)):
        starts = starts.after(number, now, 32)
    assert starts.round_s == 4.0, "rounds of a stage with other steps are no measure"


def test_rounds_that_were_not_trained_here_share_the_time():
    missed = RoundStarts().after(4, 10.0, 8).after(8, 18.0, 8)
    assert missed.round_s == 2.0
    assert missed.after(3, 20.0, 8).began == ((3, 20.0, 8),), "a round that begins again is no pace"
