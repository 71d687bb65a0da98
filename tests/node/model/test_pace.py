"""The arithmetic of training some of the experts, held against what is alive in memory."""

import pytest
import torch

from atoll.node.model.pace import arithmetic_bytes, bytes_of_a_node, expected_ratio, measure
from atoll.node.presets import model_of

SMOKE = model_of("moe-smoke")
OWNED = frozenset({0, 5})


def test_expected_ratio():
    assert expected_ratio(8, 8) == 1
    assert expected_ratio(2, 8) == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("owned", [OWNED, frozenset(range(8)), frozenset()])
def test_a_node_holds_what_the_arithmetic_says(owned, dtype):
    held, said = bytes_of_a_node(SMOKE, owned, dtype), arithmetic_bytes(SMOKE, owned, dtype)
    assert said <= held < 1.1 * said


def test_narrow_frozen_experts_save_what_they_should():
    frozen = 6 * 3 * 128 * 128 * 4
    assert arithmetic_bytes(SMOKE, OWNED, torch.float32) == 16 * (SMOKE.parameters - frozen) + 4 * frozen
    whole = bytes_of_a_node(SMOKE, frozenset(range(8)), torch.float32)
    assert bytes_of_a_node(SMOKE, OWNED, torch.int8) < 0.45 * whole


def test_a_short_measurement_has_every_row():
    threads = torch.get_num_threads()
    paces = measure(SMOKE, OWNED, sequences=1, turns=2)
    assert {name: len(taken) for name, taken in paces.seconds.items()} == {
        "layer: all": 2, "step: all": 2, "layer: some": 2, "step: some": 2,
    }  # fmt: skip
    assert all(second > 0 for taken in paces.seconds.values() for second in taken)
    assert paces.bytes_held.keys() == {"float32", "bfloat16", "int8"}
    assert torch.get_num_threads() == threads
