"""The compiled encoder against the plain one: same bytes, same residual, any k, any values, any threads."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress.blocks import MatrixPart, blocks_of
from atoll.node.learning.compress.encoding import blank_payload, encode_rows, is_sound
from atoll.node.learning.compress.selecting import half_bits
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.errors import Divergence
from atoll.protocols.run.payload import Layout
from tests.plain import folds
from tests.plain.feedback import feed

torch.set_num_threads(1)
encode_residual = partial(folds.encode_residual, codec="sparse2")
CHUNKS = 7


def noise(seed, scale=1e-3):
    return torch.randn((CHUNKS, 4096), generator=torch.Generator().manual_seed(seed)) * scale


def weights(seed):
    return to_float((noise(seed, 0.02) * 2**24).int())


def arms(kind, seed):
    """Residual, base and local weights that are hard in one way each."""
    base = weights(seed)
    residual, local = noise(seed + 1), base + noise(seed + 2)
    generator = torch.Generator().manual_seed(seed)
    if kind == "zeros":
        return torch.zeros_like(residual), base, base
    if kind == "ties":
        return torch.randint(-3, 4, residual.shape, generator=generator).float(), base, base
    if kind == "scales":
        return residual * 10.0 ** torch.randint(-44, 30, (CHUNKS, 1), generator=generator), base, local
    if kind == "few":
        return (
            torch.where(torch.rand(residual.shape, generator=generator) < 0.01, residual, 0.0),
            base,
            base,
        )
    if kind == "heavy":
        return residual**5 * 1e9, base, local
    if kind == "few ties":  # as few as are ranked, each many times
        sizes = torch.randint(-3, 4, residual.shape, generator=generator).float()
        return torch.where(torch.rand(residual.shape, generator=generator) < 0.04, sizes, 0.0), base, base
    if kind == "one column":  # more candidates in one column of the search than anywhere
        crowd = torch.zeros_like(residual)
        crowd[:, ::512] = 1.0
        return crowd, base, base
    return residual, base, local


@pytest.mark.parametrize("k", [1, 2, 3, 63, 64, 65, 128, 129, 1000, 4096])
@pytest.mark.parametrize("kind", ["noise", "zeros", "ties", "few ties", "scales", "few", "heavy", "one column"])
def test_equals_the_plain_version_bit_for_bit(k, kind):
    residual, base, local = arms(kind, k)
    plain = residual.clone()
    for _ in range(2):
        expected = feed(plain, base - local, 0.95, k)
        assert encode_residual(residual, base, local, 0.95, k) == expected
        assert torch.equal(residual.view(torch.int32), plain.view(torch.int32))


VALUES = st.sampled_from([0.0, -0.0, 1e-3, -1e-3, 1.5e-3, 7.0, -2.0, 1e-45, -1e-30, 1e30]) | st.floats(
    -1e3, 1e3, width=32
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=200), st.sampled_from([1, 5, 64, 128, 300]), st.integers(0, 4095))
def test_equals_the_plain_version_for_values_from_anywhere(values, k, shift):
    residual = torch.zeros((1, 4096))
    residual[0, : len(values)] = torch.tensor(values)
    residual = residual.roll(shift, 1)
    plain, nothing = residual.clone(), torch.zeros((1, 4096))
    expected = feed(plain, nothing, 1.0, k)
    assert encode_residual(residual, nothing, nothing, 1.0, k) == expected
    assert torch.equal(residual, plain)


@pytest.mark.parametrize("threads", [2, 3, 7, 50])
def test_threads_do_not_show(threads):
    base = weights(1)
    one, many = noise(2), noise(2)
    expected = encode_residual(one, base, noise(3), 0.9, 64)
    assert encode_residual(many, base, noise(3), 0.9, 64, threads=threads) == expected
    assert torch.equal(one, many)


def test_every_half_is_rounded_as_torch_does():
    generator = torch.Generator().manual_seed(1)
    steps = torch.arange(0x3C01).to(torch.int16).view(torch.float16).double()
    between = (steps[1:] + steps[:-1]) / 2
    scales = torch.cat([steps, between, between * (1 + 1e-6), between * (1 - 1e-6), between * (1 + 1e-12)])
    scales = torch.cat([scales, torch.rand(1000, generator=generator).double() ** 8, torch.tensor([1.5, 1e9])])
    expected = scales.clamp(max=1.0).to(torch.float16).view(torch.int16)
    single = torch.zeros(1).numpy()
    assert [half_bits(scale, single) for scale in scales.tolist()] == expected.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("chunk", [0, CHUNKS - 1])
def test_weights_that_diverged_leave_the_residual_alone(bad, chunk):
    residual, local = noise(1), noise(2)
    local[chunk, 4095] = bad
    before = residual.clone()
    with pytest.raises(Divergence):
        encode_residual(residual, weights(1), local, 0.95, 64)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_residual_that_is_not_finite_is_divergence(bad):
    residual = noise(1)
    residual[3, 5] = bad
    with pytest.raises(Divergence):
        encode_residual(residual, weights(1), noise(2), 0.95, 64)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, CHUNKS - 1), max_size=3, unique=True), st.permutations(range(4)))
def test_slabs_in_any_order_give_the_payload_of_the_whole(cuts, order):
    base, local = weights(1), weights(1) + noise(3)
    whole, parts = noise(2), noise(2)
    expected = encode_residual(whole, base, local, 0.9, 64)
    ends = [0, *sorted(cuts), CHUNKS]
    layout = Layout("sparse2", CHUNKS, 64)
    payload = blank_payload(layout)
    for at in (each for each in order if each < len(ends) - 1):
        rows = slice(ends[at], ends[at + 1])
        encode_rows(payload, layout, ends[at], parts[rows], base[rows], local[rows], 0.9)
    assert payload == expected
    assert torch.equal(parts, whole)


@pytest.mark.parametrize(
    ("bad", "sound"), [(float("nan"), False), (-float("inf"), False), (2e19, False), (1e18, True)]
)
def test_soundness_is_seen_in_every_place(bad, sound):
    values = noise(1)
    assert is_sound(values)
    values[CHUNKS - 1, 4095] = bad
    assert is_sound(values) is sound


def placed(shapes, seed):
    """Matrices of these shapes as views into wider ones, and all their chunks as rows of the arena."""
    made = torch.Generator().manual_seed(seed)
    matrices = [torch.randn((rows, cols + 7), generator=made)[:, 3 : cols + 3] for rows, cols in shapes]
    rows = []
    for matrix in matrices:
        down, across = (-(-side // 64) for side in matrix.shape)
        whole = torch.zeros((down * 64, across * 64))
        whole[: matrix.shape[0], : matrix.shape[1]] = matrix
        rows.append(whole.view(down, 64, across, 64).transpose(1, 2).reshape(-1, 4096))
    return matrices, rows


@pytest.mark.parametrize(("codec", "k"), [("sparse2", 64), ("sparse1", 64), ("int8", 4096), ("e3m0", 4096)])
def test_weights_where_they_stand_give_the_bytes_of_copied_rows(codec, k):
    """Blocks of matrices whose sides are no multiples of 64, from any block on; the anchor becomes the weights."""
    matrices, copied = placed([(130, 200), (64, 64), (5, 300), (300, 5)], 1)
    parts = [(matrices[0], 3, 9), (matrices[1], 0, 1), (matrices[2], 0, 5), (matrices[3], 2, 3)]
    local = torch.cat([rows[first : first + count] for rows, (_, first, count) in zip(copied, parts, strict=True)])
    padding = local == 0
    residual = (torch.randn(local.shape, generator=torch.Generator().manual_seed(2)) * 1e-3).masked_fill(
        padding, 0
    )
    anchor = (local + 1e-2 * residual.flip(0)).masked_fill(padding, 0)
    layout = Layout(codec, len(local), k)
    found, expected = blank_payload(layout), blank_payload(layout)
    # In arrays of a whole model they have rows of their own, with others between them.
    at = torch.cat([torch.arange(9) + 2, torch.tensor([14]), torch.arange(5) + 15, torch.arange(3) + 21])
    ours, theirs = torch.full((2, 25, 4096), 7.0)
    ours[at], theirs[at] = residual, anchor
    placed_at = [MatrixPart(*part, row) for part, row in zip(parts, (2, 14, 15, 21), strict=True)]
    encode_rows(expected, layout, 0, residual, anchor, local, 0.9)
    encode_rows(found, layout, 0, ours, theirs, blocks_of(placed_at), 0.9)
    assert found == expected
    assert torch.equal(ours[at], residual.masked_fill(padding, 0)), "and e has no padding"
    assert torch.equal(theirs[at], local)
    others = torch.ones(25, dtype=torch.bool).index_fill(0, at, False)
    assert (torch.stack([ours, theirs])[:, others] == 7).all()
    assert is_sound(blocks_of(placed_at))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 2.0**64, -(2.0**64)])
@pytest.mark.parametrize("at", [(0, 0), (63, 63), (64, 191), (129, 199)])
def test_a_weight_that_cannot_be_sent_is_found_where_it_stands(at, value):
    matrix = torch.zeros((130, 200))
    matrix[at] = value
    assert not is_sound(blocks_of([MatrixPart(matrix, 0, 12, 0)]))
    matrix[at] = 2.0**63
    assert is_sound(blocks_of([MatrixPart(matrix, 0, 12, 0)]))


@pytest.mark.parametrize(("first", "count"), [(0, 12), (1, 11), (2, 3), (5, 2), (7, 1), (3, 9)])
def test_weights_of_some_blocks_are_looked_at_and_no_others(first, count):
    """Blocks of a matrix of 3 × 4 of them, from any on, the last of each row and column cut."""
    for block in range(12):
        matrix = torch.zeros((130, 200))
        row, col = divmod(block, 4)
        for at in ((64 * row, 64 * col), (min(64 * row + 63, 129), min(64 * col + 63, 199))):
            matrix[at] = float("nan")
            assert is_sound(blocks_of([MatrixPart(matrix, first, count, 0)])) == (
                not first <= block < first + count
            )
            matrix[at] = 0
