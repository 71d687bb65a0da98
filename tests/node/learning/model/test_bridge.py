"""Named tensors ↔ arena: exact both ways, zero padding, and the block layout of protocols.arena."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder
from atoll.protocols.run.arena import CHUNK, SIDE, arena_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll_bench.module_values import fill_module, read_module
from tests.plain.arena import scatter


def spec_of(dim=64, ffn=96, vocab=50, layers=2, tied=True, heads=2):
    return ModelSpec(
        dim=dim, layers=layers, heads=heads, kv_heads=1, ffn=ffn, vocab=vocab, context=8, tied=tied,
        rope_theta=1e4, norm_eps=1e-5,
    )  # fmt: skip


def numbered(spec, dtype):
    """Every value of the model is a different number above zero."""
    named, at = {}, 1
    for atom in atoms(spec):
        size = int(torch.tensor(atom.shape).prod())
        named[atom.name] = torch.arange(at, at + size, dtype=dtype).reshape(atom.shape)
        at += size
    return named


@settings(max_examples=40, deadline=None)
@given(
    dim=st.integers(1, 40).map(lambda n: 4 * n),
    ffn=st.integers(1, 200),
    vocab=st.integers(1, 200),
    layers=st.integers(1, 3),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_there_and_back_is_the_same(dim, ffn, vocab, layers, tied, dtype):
    spec = spec_of(dim, ffn, vocab, layers, tied)
    arena = arena_of(spec)
    named = numbered(spec, dtype)
    made = bridge.gather(named, arena)
    assert made.shape == (arena.chunks, CHUNK)
    assert made.dtype == dtype
    assert int((made != 0).sum()) == arena.values, "padding is zero, and nothing is written twice"
    back = scatter(made, arena)
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], named[name]) for name in named)


def test_a_chunk_is_a_block_of_64_by_64():
    spec = spec_of(dim=128, ffn=192)
    arena = arena_of(spec)
    named = numbered(spec, torch.float32)
    made = bridge.gather(named, arena)
    place = next(p for p in arena.placements if p.name == "model.layers.1.mlp.up_proj.weight")
    block = named[place.name][2 * SIDE : 3 * SIDE, SIDE:]
    assert torch.equal(made[place.first_chunk + 2 * 2 + 1].view(SIDE, SIDE), block)


def test_vectors_lie_end_to_end_in_the_last_region():
    spec = spec_of(layers=1)
    arena = arena_of(spec)
    named = numbered(spec, torch.float32)
    last = bridge.gather(named, arena)[-1]
    names = [
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert torch.equal(last[:192], torch.cat([named[name] for name in names]))
    assert not last[192:].any()


def test_fill_then_read_a_module():
    spec = spec_of(tied=False)
    arena = arena_of(spec)
    torch.manual_seed(0)
    wanted = bridge.gather({a.name: torch.randn(a.shape) for a in atoms(spec)}, arena)
    model = Decoder(spec)
    fill_module(model, wanted, arena)
    assert torch.equal(read_module(model, arena), wanted)


def test_a_copy_does_not_share_memory_with_the_arena():
    spec = spec_of()
    arena = arena_of(spec)
    made = bridge.gather(numbered(spec, torch.float32), arena)
    out = scatter(made, arena)["model.norm.weight"]
    out.zero_()
    assert int((made != 0).sum()) == arena.values


def test_a_missing_atom_is_an_error():
    spec = spec_of()
    named = numbered(spec, torch.float32)
    del named["model.norm.weight"]
    with pytest.raises(KeyError):
        bridge.gather(named, arena_of(spec))


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40).map(lambda n: 4 * n),
    ffn=st.integers(1, 300),
    vocab=st.integers(1, 300),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_range_of_rows_is_that_part_of_the_whole_both_ways(dim, ffn, vocab, ends):
    spec = spec_of(dim, ffn, vocab)
    arena = arena_of(spec)
    named = numbered(spec, torch.float32)
    whole = bridge.gather(named, arena)
    start, stop = sorted(round(end * arena.chunks) for end in ends)
    rows = torch.full((stop - start, CHUNK), 5.0)
    bridge.read_rows(named, arena, start, rows)
    assert torch.equal(rows, whole[start:stop])
    bridge.write_rows(named, arena, start, torch.where(rows != 0, -rows, 7.0))  # what lands in the padding is lost
    expected = whole.clone()
    expected[start:stop] *= -1
    assert torch.equal(bridge.gather(named, arena), expected)
