"""The pace of training some of the experts beside training them all."""

import torch

from atoll.node.runs.presets import model_of
from atoll_bench.experts.model_pace import expected_ratio, measure

SMOKE = model_of("moe-smoke")
OWNED = frozenset({0, 5})


def test_expected_ratio():
    assert expected_ratio(8, 8) == 1
    assert expected_ratio(2, 8) == 0.75


def test_a_short_measurement_has_every_row():
    threads = torch.get_num_threads()
    paces = measure(SMOKE, OWNED, sequences=1, turns=2)
    assert {name: len(taken) for name, taken in paces.seconds.items()} == {
        "layer: all": 2, "step: all": 2, "layer: some": 2, "step: some": 2,
    }  # fmt: skip
    assert all(second > 0 for taken in paces.seconds.values() for second in taken)
    assert torch.get_num_threads() == threads
