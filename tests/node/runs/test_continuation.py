"""What is left of a recipe: schedules go on where they were, whatever round a run is continued at."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.import_export.import_run import Imported
from atoll.node.runs.presets import continuation_of, preset, with_decay_at_end
from atoll.protocols.codec import check_types
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.run_spec import SAME_KEYS_VERSION, SPEC_VERSION, RunSpec
from atoll.protocols.run.sections.merging import MergeSpec
from tests.node.worker.session_home import ME

WSD = preset("tiny", ME, 1)
"""A stable rate whose last fifth decays."""
MERGING = MergeSpec(every=1, until=40, alpha_4096=1024, donors=2)


def recipe(merge: MergeSpec) -> RunSpec:
    spec = preset("moe-smoke", ME, 1)
    return replace(spec, outer=replace(spec.outer, merge=merge))


def test_a_run_that_goes_on_from_an_older_version_has_the_rules_of_this_one():
    found = Imported(WSD.model, recipe=replace(WSD, version=SAME_KEYS_VERSION)).applied(WSD, 16)
    assert found.version == SPEC_VERSION


@given(st.integers(0, 39), st.integers(0, 20))
def test_merging_goes_on_falling(done, number):
    rest = continuation_of(recipe(MERGING), done).outer.merge
    before, after = MERGING.alpha(done + number), rest.alpha(number) if rest else 0
    assert before - (1 << 12) <= after <= before
    if rest:
        check_types(rest)


@pytest.mark.parametrize("done", [40, 41, 53])
def test_merging_that_has_ended_does_not_begin_again(done):
    assert continuation_of(recipe(MERGING), done).outer.merge is msgspec.UNSET


def test_a_share_too_small_to_say_is_none():
    assert continuation_of(recipe(replace(MERGING, alpha_4096=1)), 39).outer.merge is msgspec.UNSET


@given(st.integers(20, 200), st.integers(50, 200))
def test_a_run_prolonged_before_its_decay_has_the_rates_of_a_longer_run(done, more):
    """Round by round, as if the owner had asked for so many rounds from the beginning."""
    longer = with_decay_at_end(replace(WSD, outer=replace(WSD.outer, rounds=done + more)))
    assert learning_rate(longer.inner, longer.last_step - 1) < learning_rate(longer.inner, longer.last_step - 2)
    shorter = with_decay_at_end(replace(WSD, outer=replace(WSD.outer, rounds=done)))
    rest = continuation_of(shorter, done)
    rest = with_decay_at_end(replace(rest, outer=replace(rest.outer, rounds=more)))
    at = [shorter.steps_before(done) + step for step in range(rest.steps_before(more))]
    assert [learning_rate(rest.inner, step) for step in range(len(at))] == [
        learning_rate(longer.inner, step) for step in at
    ]


@pytest.mark.parametrize("done", [0, 7, 40, 53])
def test_the_rest_of_a_run_decays_where_the_whole_would(done):
    rest = continuation_of(WSD, done)
    rest.check()
    before = WSD.steps_before(done)
    rates = [learning_rate(rest.inner, step) for step in range(WSD.last_step - before)]
    assert rates == [learning_rate(WSD.inner, before + step) for step in range(len(rates))]


def test_a_run_at_its_end_goes_on_at_the_peak_rate_and_decays_again():
    rest = continuation_of(WSD, WSD.outer.rounds)
    rest.check()
    rates = [learning_rate(rest.inner, step) for step in range(rest.steps_before(rest.outer.rounds))]
    assert rates[0] == rates[-rest.inner.decay_steps] == WSD.inner.lr
    assert rates[-1] < 0.2 * WSD.inner.lr
