"""Fragments: the finer schedule trains as long, and each fragment is exchanged as often as the whole model was."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.runs import presets
from atoll.node.runs.capacity.round_traffic import payload_traffic
from atoll.node.runs.presets import finer, fragmented
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.merging import MergeSpec

OWNER = peer_id_of(bytes(range(32)))
SPEC = presets.preset("tiny", OWNER, 1)
WHOLE = msgspec.structs.replace(SPEC, reduce=None)


@given(st.sampled_from([1, 2, 4]))
def test_where_steps_divide_a_finer_schedule_has_the_same(count):
    fine = finer(SPEC.outer, count)
    spec = msgspec.structs.replace(WHOLE, outer=fine)
    assert spec.steps_before(fine.rounds) == SPEC.steps_before(SPEC.outer.rounds)
    assert spec.steps(fine.rounds - 1) == 8 // count
    spec.check()


stages = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=4)


@given(stages, st.integers(1, 12))
def test_each_fragment_is_exchanged_as_often_as_the_whole_was_and_each_stage_is_as_long(spans, count):
    """`spans`: rounds and steps of each stage."""
    firsts = [sum(rounds for rounds, _ in spans[:at]) for at in range(len(spans))]
    old = tuple(Stage(first, steps) for first, (_, steps) in zip(firsts, spans, strict=True))
    outer = msgspec.structs.replace(SPEC.outer, stages=old, rounds=sum(rounds for rounds, _ in spans))
    fine = finer(outer, count)
    ends = [*(stage.first for stage in fine.stages[1:]), fine.rounds]
    for stage, end, (rounds, steps) in zip(fine.stages, ends, spans, strict=True):
        assert abs(stage.steps * count - steps) <= count / 2 or stage.steps == 1
        assert abs((end - stage.first) * stage.steps - rounds * steps) <= max(stage.steps / 2, stage.steps - 1)
    msgspec.structs.replace(WHOLE, outer=msgspec.structs.replace(fine, fragments=1)).check()


def test_a_stage_that_the_run_does_not_reach_is_left_out():
    short = msgspec.structs.replace(SPEC.outer, rounds=5)
    assert finer(short, 2) == msgspec.structs.replace(short, rounds=10, stages=(Stage(0, 1),), fragments=2)


def test_experts_are_merged_as_often_as_before():
    mixture = presets.preset("moe-smoke", OWNER, 1)
    merging = msgspec.structs.replace(mixture.outer, merge=MergeSpec(every=3, until=30, alpha_4096=100))
    assert finer(merging, 4).merge == MergeSpec(every=12, until=120, alpha_4096=100)


def test_one_fragment_changes_nothing():
    assert fragmented(SPEC, 1) == SPEC


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_preset_in_fragments_has_a_lower_peak_and_the_same_bytes(name):
    """Of a pass over all fragments: but for a header each, as much as one exchange of the whole model."""
    spec = presets.preset(name, OWNER, 1)
    parts = fragmented(spec, 4)
    assert parts.reduce is None
    assert largest_payload(parts) < 0.5 * largest_payload(spec)
    assert abs(exchange_bytes(parts) - exchange_bytes(spec)) < 100
    whole = msgspec.structs.replace(spec, reduce=None)
    assert 4 * payload_traffic(parts, 8) == pytest.approx(payload_traffic(whole, 8), rel=0.01)
    assert 0.85 < parts.steps(parts.outer.rounds - 1) * 4 / spec.steps(spec.outer.rounds - 1) < 1.15


def test_what_no_run_can_be_cut_into_is_refused():
    with pytest.raises(ConfigError, match=r"outer\.fragments = 5 is outside 1 … 4"):
        fragmented(SPEC, 5)
    with pytest.raises(ConfigError, match="has 2 fragments already"):
        fragmented(fragmented(SPEC, 2), 2)


def test_a_decay_ends_with_the_finer_run():
    spec = msgspec.structs.replace(WHOLE, inner=msgspec.structs.replace(WHOLE.inner, decay_256=64))
    fine = fragmented(spec, 3)
    assert fine.last_step != spec.last_step
    assert (fine.inner.total_steps, fine.inner.decay_256) == (fine.last_step, 64)
