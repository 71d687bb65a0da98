"""What is left of a recipe: schedules go on where they were, whatever round a run is continued at."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.runs.presets import continuation_of, preset
from atoll.protocols.codec import check_types
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.merging import MergeSpec
from tests.node.worker.session_home import ME

MERGING = MergeSpec(every=1, until=40, alpha_4096=1024, donors=2)


def recipe(merge: MergeSpec) -> RunSpec:
    spec = preset("moe-smoke", ME, 1)
    return replace(spec, outer=replace(spec.outer, merge=merge))


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
