"""The arena: every parameter has exactly one place, and the rest is padding."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols.run.arena import CHUNK, SIDE, Arena, Placement, arena_of, edges
from atoll.protocols.run.model_spec import ModelSpec, atoms

MODELS = st.builds(
    ModelSpec,
    dim=st.sampled_from([8, 40, 64, 72, 128]), layers=st.integers(1, 3), heads=st.sampled_from([1, 2, 4]),
    kv_heads=st.just(1), ffn=st.integers(1, 200), vocab=st.integers(1, 200), context=st.just(16),
    tied=st.booleans(), rope_theta=st.just(1e4), norm_eps=st.just(1e-5),
)  # fmt: skip


def places_of(arena: Arena) -> list[int]:
    """Flat positions of all real values, by the definition in the module's docstring."""
    found = []
    for place in arena.placements:
        if len(place.shape) == 1:
            start = place.first_chunk * CHUNK + place.offset
            found += range(start, start + place.shape[0])
            continue
        across = place.blocks[1]
        for row in range(place.shape[0]):
            for col in range(place.shape[1]):
                block = place.first_chunk + row // SIDE * across + col // SIDE
                found.append(block * CHUNK + row % SIDE * SIDE + col % SIDE)
    return found


@settings(max_examples=25, deadline=None)
@given(MODELS)
def test_atoms_do_not_overlap_and_edges_name_exactly_the_padding(model):
    arena = arena_of(model)
    found = places_of(arena)
    real = set(found)
    assert len(real) == len(found) == arena.values == model.parameters
    assert max(real) < arena.chunks * CHUNK
    padding = {
        edge.chunk * CHUNK + at
        for edge in edges(arena)
        for at in range(CHUNK)
        if at // SIDE >= edge.rows or at % SIDE >= edge.cols or at >= edge.values
    }
    assert padding == set(range(arena.chunks * CHUNK)) - real


@settings(max_examples=50, deadline=None)
@given(MODELS)
def test_every_atom_is_placed_once_with_its_shape(model):
    placed = {place.name: place.shape for place in arena_of(model).placements}
    assert placed == {atom.name: atom.shape for atom in atoms(model)}
    assert sum(math.prod(shape) for shape in placed.values()) == model.parameters


def test_golden_layout(model):
    arena = arena_of(model)
    assert (arena.chunks, arena.values) == (27, 44200)
    assert [(p.name, p.first_chunk, p.offset) for p in arena.placements[:3]] == [
        ("model.embed_tokens.weight", 0, 0),
        ("model.layers.0.self_attn.q_proj.weight", 3, 0),
        ("model.layers.0.self_attn.k_proj.weight", 4, 0),
    ]
    assert arena.placements[-1] == Placement("model.norm.weight", (40,), 26, 160)


@pytest.mark.parametrize("tied", [True, False])
def test_a_layout_is_a_function_of_the_model_only(model, tied):
    one, two = replace(model, tied=tied), replace(model, tied=tied)
    assert arena_of(one) == arena_of.__wrapped__(two)
