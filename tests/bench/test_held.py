"""The arithmetic of training some of the experts, held against what is alive in memory."""

import msgspec
import pytest

from atoll.node.runs.presets import model_of
from atoll_bench.experts.held import arithmetic_bytes, held_by
from tests.node.worker.session_home import SPEC

SMOKE = msgspec.structs.replace(model_of("moe-smoke"), layers=1)
OWNED, ALL = frozenset({0, 5}), frozenset(range(8))
ONE = 3 * 128 * 128
"""Parameters of one expert, in the only layer."""


MORE = pytest.mark.slow(slice="test_a_node_holds_what_the_arithmetic_says")


@pytest.mark.parametrize(
    ("owned", "frozen"),
    [
        (OWNED, "float32"),
        (OWNED, "bfloat16"),
        (OWNED, "int8"),
        (ALL, "float32"),
        (frozenset(), "int8"),
        *(pytest.param(ALL, frozen, marks=MORE) for frozen in ("bfloat16", "int8")),
        *(pytest.param(frozenset(), frozen, marks=MORE) for frozen in ("float32", "bfloat16")),
    ],
)
def test_a_node_holds_what_the_arithmetic_says(owned, frozen):
    held, said = held_by(SMOKE, SPEC.inner, owned, frozen), arithmetic_bytes(SMOKE, owned, frozen)
    assert said <= sum(held) < 1.1 * said
    trained = SMOKE.parameters - (8 - len(owned)) * ONE
    assert held[:3] == (4 * trained, 4 * trained, 8 * trained)
    assert held.frozen >= (8 - len(owned)) * ONE


@MORE
def test_narrow_frozen_experts_save_what_they_should():
    assert arithmetic_bytes(SMOKE, OWNED, "float32") == 16 * (SMOKE.parameters - 6 * ONE) + 4 * 6 * ONE
    whole = sum(held_by(SMOKE, SPEC.inner, ALL, "float32"))
    assert sum(held_by(SMOKE, SPEC.inner, OWNED, "int8")) < 0.45 * whole
