"""Expert merging is exact: dot products, donors and moves equal Python's integers, whatever the order or block."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from msgspec.structs import replace

from atoll.node.learning.model import merging
from atoll.node.learning.model.bridge import gather
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.merging import (
    ALPHA_BITS,
    dots,
    merge,
    merge_after_round,
    merged,
    moved,
    nearest_of,
)
from atoll.node.runs.presets import model_of, preset
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import digest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, expert_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.merging import MergeSpec

ME = Identity(bytes([1]) * 32).peer_id
ALPHA_UNIT = 1 << ALPHA_BITS
WHOLE = st.integers(-(2**31), 2**31 - 1)
SPEC = ModelSpec(
    dim=16, layers=2, heads=2, kv_heads=1, ffn=16, vocab=20, context=8, tied=True, rope_theta=1e4, norm_eps=1e-5,
    experts=ExpertsSpec(count=6, per_token=2, ffn=8),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(nps.arrays(np.int32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=WHOLE), st.integers(1, 50))
def test_dot_products_are_exact_in_blocks_of_any_size(rows, block):
    wanted = [[sum(int(x) * int(y) for x, y in zip(a, b, strict=True)) for b in rows] for a in rows]
    kept = merging._BLOCK
    merging._BLOCK = block
    try:
        assert dots(list(rows)) == wanted
    finally:
        merging._BLOCK = kept


def test_a_full_block_of_the_largest_values_is_exact():
    """The sums stay below 2⁵³: the bound on the block is the right one."""
    size = merging._BLOCK
    for value in (-1, 2**31 - 1, -(2**31)):
        assert dots([np.full(size, value, np.int32)]) == [[size * value * value]]
    odd = np.full(size, 65535, np.int32)
    odd[0] = 65533
    assert dots([odd]) == [[(size - 1) * 65535**2 + 65533**2]]


@settings(max_examples=60, deadline=None)
@given(
    nps.arrays(np.int32, st.tuples(st.integers(2, 6), st.integers(1, 6)), elements=st.integers(-9, 9)),
    st.integers(1, 5),
)
def test_donors_are_the_most_similar_others(rows, donors):
    found = nearest_of(dots(list(rows)), donors)
    size = (rows.astype(float) ** 2).sum(1) ** 0.5
    cosine = (
        rows.astype(float)
        @ rows.astype(float).T
        / np.where(size, size, np.inf)
        / np.where(size, size, np.inf)[:, None]
    )
    for base, chosen in enumerate(found):
        others = [e for e in range(len(rows)) if e != base]
        assert len(chosen) == min(donors, len(others))
        assert base not in chosen
        left = [e for e in others if e not in chosen]
        assert all(cosine[base, a] >= cosine[base, b] - 1e-9 for a in chosen for b in left)


def test_ties_go_to_the_lower_index():
    rows = [
        np.array([1, 0], np.int32),
        np.array([2, 0], np.int32),
        np.array([5, 0], np.int32),
        np.zeros(2, np.int32),
    ]
    assert nearest_of(dots(rows), 2) == [[1, 2], [0, 2], [0, 1], [0, 1]]


@settings(max_examples=60, deadline=None)
@given(nps.arrays(np.int32, (4, 3), elements=WHOLE), st.integers(0, ALPHA_UNIT), st.integers(1, 3))
def test_a_move_is_the_rounded_share_of_the_way(rows, alpha, donors):
    nearest = nearest_of(dots(list(rows)), donors)
    for base, found, chosen in zip(rows, moved(list(rows), nearest, alpha), nearest, strict=True):
        for at in range(3):
            mean = Fraction(sum(int(rows[e][at]) for e in chosen), len(chosen))
            exact = int(base[at]) + Fraction(alpha, ALPHA_UNIT) * (mean - int(base[at]))
            assert abs(int(found[at]) - exact) <= Fraction(1, 2)


def test_alpha_one_goes_to_the_mean_of_the_values_before():
    a, b = np.array([0, 10], np.int32), np.array([4, -3], np.int32)
    found = moved([a, b], [[1], [0]], ALPHA_UNIT)
    assert [value.tolist() for value in found] == [[4, -3], [0, 10]], "simultaneous: they change places"


def test_only_experts_move_and_the_arguments_do_not():
    theta = genesis(SPEC, 1)
    before = {name: value.copy() for name, value in theta.items()}
    found = dict(merged(theta, SPEC, ALPHA_UNIT // 20, 4))
    assert found.keys() == {name for name in theta if expert_of(name) is not None}
    assert all(np.array_equal(theta[name], before[name]) for name in theta)
    assert all(not np.array_equal(found[name], theta[name]) for name in found)
    assert all(np.array_equal(value, theta[name]) for name, value in merged(theta, SPEC, 0, 4))
    assert dict(merged(theta, replace(SPEC, experts=None), 5, 4)) == {}


def test_each_projection_is_merged_with_its_own_kind():
    """By name, never by position: a projection moves towards the same projection of the donors."""
    theta = genesis(SPEC, 1)
    for name, value in theta.items():
        if "up_proj" in name:
            value[:] = 7 << 20
        if "down_proj" in name:
            value[:] = -(5 << 20)
    found = dict(merged(theta, SPEC, ALPHA_UNIT // 2, 4))
    assert all(bool((value == 7 << 20).all()) for name, value in found.items() if "up_proj" in name)
    assert all(bool((value == -(5 << 20)).all()) for name, value in found.items() if "down_proj" in name)


def test_experts_come_closer():
    theta = genesis(SPEC, 1)
    found = theta | dict(merged(theta, SPEC, ALPHA_UNIT // 4, 4))

    def spread(values):
        stack = np.stack([values[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(6)]).astype(
            float
        )
        return float(stack.std(0).mean())

    assert 0.5 * spread(theta) < spread(found) < 0.95 * spread(theta)


def test_golden_bits():
    model = model_of("moe-smoke")
    found = dict(merged(genesis(model, 7), model, 839_000, 4))
    assert digest(*(value.astype("<i4").tobytes() for _, value in sorted(found.items()))).hex() == (
        "be6848b39b9c1cc7324908fd766cc9092abe17927b860370a4cb3c21ca95be7e"
    )


def spec_with(experts=True, **merge):
    found = preset("moe-smoke" if experts else "tiny", ME, 1)
    outer = replace(found.outer, merge=MergeSpec(**{"every": 3, "until": 12, "alpha_4096": 4096, **merge}))
    return replace(found, outer=outer)


def test_alpha_falls_to_zero_and_is_due_every_so_many_rounds():
    merge = MergeSpec(every=3, until=12, alpha_4096=4096)
    assert [merge.alpha(number) * 12 / ALPHA_UNIT for number in range(15)] == [
        0, 0, 9, 0, 0, 6, 0, 0, 3, 0, 0, 0, 0, 0, 0,
    ]  # fmt: skip


def test_rounds_without_a_move_have_none():
    spec = spec_with()
    assert [number for number in range(20) if merge_after_round(spec, number) is not None] == [2, 5, 8]
    assert merge_after_round(preset("moe-smoke", ME, 1), 2) is None


def test_an_arena_is_merged_as_its_atoms_are():
    """Chunk by chunk where they lie, edges of matrices and all; nothing else moves."""
    theta = genesis(SPEC, 3)
    arena = arena_of(SPEC)
    found_C4096 = gather({name: torch.from_numpy(value) for name, value in theta.items()}, arena)
    merge(found_C4096, SPEC, ALPHA_UNIT // 3, 2)
    wanted = theta | dict(merged(theta, SPEC, ALPHA_UNIT // 3, 2))
    wanted_C4096 = gather({name: torch.from_numpy(value) for name, value in wanted.items()}, arena)
    assert torch.equal(found_C4096, wanted_C4096)
    assert any(not np.array_equal(wanted[name], theta[name]) for name in theta)


def test_a_run_without_a_merge_has_the_bytes_that_it_always_had():
    spec = preset("moe-smoke", ME, 1)
    assert b"merge" not in codec.encode(spec)
    merging = spec_with()
    merging.check()
    assert codec.decode(codec.encode(merging), RunSpec) == merging


@pytest.mark.parametrize(
    ("key", "value"),
    [("every", 0), ("until", 0), ("alpha_4096", 0), ("alpha_4096", 4097), ("donors", 0), ("donors", 65)],
)
def test_merges_that_no_run_can_have_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"outer.merge.{key} = {value}: Expected"):
        spec_with(**{key: value}).check()


def test_a_dense_model_has_nothing_to_merge():
    with pytest.raises(ConfigError, match=r"outer\.merge is for runs whose model has experts"):
        spec_with(experts=False).check()
