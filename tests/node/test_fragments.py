"""Fragments: every chunk has one home, and the finer schedule trains as long."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node import presets
from atoll.node.fragments import finer, rows_of
from atoll.protocols.arena import arena_of
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run import Stage

SPEC = presets.preset("tiny", peer_id_of(bytes(range(32))), 1)


@given(st.integers(1, 4))
def test_every_chunk_is_in_one_fragment(count):
    arena = arena_of(SPEC.model)
    found = rows_of(arena, count)
    assert len(found) == count
    assert sorted(torch.cat(found).tolist()) == list(range(arena.chunks))


def test_layers_are_strided_and_the_rest_is_in_the_first():
    arena = arena_of(SPEC.model)
    first, *layers = [set(rows.tolist()) for rows in rows_of(arena, 3)]
    for place in arena.placements:
        home = first
        if len(place.shape) == 2 and place.name.startswith("model.layers."):
            home = layers[int(place.name.split(".")[2]) % 2]
        assert place.first_chunk in home, place.name


def test_no_fragment_may_be_empty():
    with pytest.raises(ConfigError):
        rows_of(arena_of(SPEC.model), 5)


@given(st.sampled_from([1, 2, 4, 8]))
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
