"""Fragments: every chunk has one home, and the finer schedule trains as long."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import presets
from atoll.node.fragments import finer
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run import Stage

SPEC = msgspec.structs.replace(presets.preset("tiny", peer_id_of(bytes(range(32))), 1), reduce=None)


@given(st.sampled_from([1, 2, 4]))
def test_a_finer_schedule_has_the_same_steps(count):
    fine = finer(SPEC.outer, count)
    spec = msgspec.structs.replace(SPEC, outer=fine)
    assert spec.steps_before(fine.rounds) == SPEC.steps_before(SPEC.outer.rounds)
    assert spec.steps(fine.rounds - 1) == 8 // count
    spec.check()


def test_one_fragment_keeps_the_schedule():
    assert finer(SPEC.outer, 1) == SPEC.outer


def test_steps_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError):
        finer(msgspec.structs.replace(SPEC.outer, stages=(Stage(0, 5),)), 2)
