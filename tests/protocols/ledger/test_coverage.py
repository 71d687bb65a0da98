"""Fragments: the whole arena, no chunk twice, layers strided, embeddings apart."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.node.runs.presets import NAMES, model_of
from atoll.protocols.ledger.coverage import (
    Span,
    cover_of,
    cut_in,
    fragments,
    largest_payload,
    payload_size,
    rest_of,
    size_of,
    slabs,
    trained_cover,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.payload import payload_bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fragments_cover_every_chunk_once(name, count):
    model = model_of(name)
    chunks = [chunk for cover in fragments(model, count) for span in cover for chunk in range(*span)]
    assert sorted(chunks) == list(range(arena_of(model).chunks))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_spans_rise_and_do_not_touch(count):
    for cover in fragments(model_of("10m"), count):
        assert all(span.start < span.stop for span in cover)
        assert all(a.stop < b.start for a, b in pairwise(cover))


def test_embeddings_and_vectors_are_apart_and_layers_are_strided():
    model = model_of("10m")
    arena = arena_of(model)
    first, *others = fragments(model, 4)

    def owner(name):
        place = next(p for p in arena.placements if p.name == name)
        return next(
            i for i, c in enumerate([first, *others]) if any(s.start <= place.first_chunk < s.stop for s in c)
        )

    assert owner("model.embed_tokens.weight") == owner("model.norm.weight") == 0
    assert [owner(f"model.layers.{n}.mlp.up_proj.weight") for n in range(6)] == [1, 2, 3, 1, 2, 3]
    sizes = [size_of(cover) for cover in others]
    assert max(sizes) == min(sizes), "six equal layers in three fragments"


def test_rounds_take_turns_and_only_their_rows_are_sent(spec):
    whole = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, fragments=1))
    parts = msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, fragments=2))
    assert cover_of(whole, 7) == (Span(0, arena_of(spec.model).chunks),)
    assert cover_of(parts, 4) == cover_of(parts, 0) != cover_of(parts, 1)
    assert largest_payload(parts) == max(payload_size(parts, 0), payload_size(parts, 1)) < payload_size(whole, 0)


SHAPES = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 4),
        "ffn": st.integers(1, 300),
        "vocab": st.integers(1, 900),
        "layers": st.integers(1, 9),
    }
)


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.none() | st.integers(1, 7), st.data())
def test_fragments_of_layers_differ_by_one_matrix_at_most(shape, tied, experts, data):
    """So by less than a layer. Layers that divide are whole and strided; no matrix is in two fragments."""
    mixture = None if experts is None else ExpertsSpec(count=experts, per_token=1, ffn=shape["ffn"])
    model = ModelSpec(
        dim=32 * shape["heads"], kv_heads=1, context=16, tied=tied, rope_theta=1e4, norm_eps=1e-5, experts=mixture,
        **shape,
    )  # fmt: skip
    count = data.draw(st.integers(2, model.layers + 1))
    covers = fragments(model, count)
    fragments.cache_clear()
    assert fragments(model, count) == covers, "the same everywhere"
    chunks = [chunk for cover in covers for span in cover for chunk in range(*span)]
    assert sorted(chunks) == list(range(arena_of(model).chunks))
    homes = {chunk: at for at, cover in enumerate(covers) for span in cover for chunk in range(*span)}
    largest, others = 0, count - 1
    for place in arena_of(model).placements:
        if len(place.shape) == 1:
            assert homes[place.first_chunk] == 0
            continue
        size = place.blocks[0] * place.blocks[1]
        found = {homes[chunk] for chunk in range(place.first_chunk, place.first_chunk + size)}
        assert len(found) == 1
        if not place.name.startswith("model.layers."):
            assert found == {0}
            continue
        largest = max(largest, size)
        layer = int(place.name.split(".")[2])
        if layer < model.layers // others * others:
            assert found == {1 + layer % others}
    sizes = [size_of(cover) for cover in covers[1:]]
    assert max(sizes) - min(sizes) <= largest


def test_fragments_of_models_whose_layers_do_not_divide():
    """By layers alone these were 4200/3150/3150 and 942/942/471/471."""
    assert [size_of(cover) for cover in fragments(model_of("50m"), 4)] == [1284, 3520, 3520, 3460]
    assert [size_of(cover) for cover in fragments(model_of("moe-12m"), 5)] == [13, 708, 708, 705, 705]


COVERS = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: tuple(Span(a, b) for a, b in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(COVERS, st.integers(1, 9))
def test_a_cover_and_the_rest_are_the_arena_and_slabs_go_through_a_cover_in_order(cover, most):
    def chunks_of(spans):
        return [chunk for span in spans for chunk in range(span.start, span.stop)]

    rest = rest_of(cover, 61)
    assert sorted(chunks_of(cover) + chunks_of(rest)) == list(range(61))
    assert all(span.start < span.stop for span in rest)
    found = list(slabs(cover, most))
    assert chunks_of(span for _, span in found) == chunks_of(cover)
    assert all(1 <= span.stop - span.start <= most for _, span in found)
    rows = 0
    for at, span in found:
        assert at == rows
        rows += span.stop - span.start
    assert rows == size_of(cover)
    cut = list(cut_in(cover, most))
    assert chunks_of(span for _, part in cut for span in part) == chunks_of(cover)
    assert [at for at, _ in cut] == list(range(0, rows, most))
    assert all(size_of(part) == most for _, part in cut[:-1])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(fragments=st.integers(1, 3), number=st.integers(0, 7), chosen=st.sets(st.integers(0, 7)))
def test_a_size_is_known_without_a_look_at_the_arena(spec, fragments, number, chosen):
    """A member may write any bitmap, and everybody asks for its size at once."""
    mixture = ExpertsSpec(count=8, per_token=2, ffn=64)
    model = msgspec.structs.replace(spec.model, experts=mixture, ffn=128)
    outer = msgspec.structs.replace(spec.outer, fragments=fragments, holders=1)
    shared, experts = msgspec.structs.replace(spec, model=model, outer=outer), bitmap_of(chosen, 8)
    payload_size(shared, number)
    trained_cover.cache_clear()
    found = payload_size(shared, number, experts)
    assert trained_cover.cache_info().misses == 0
    cover = cover_of(shared, number, experts)
    assert found == payload_bytes(spec.compress.codec, size_of(cover), spec.compress.k)
