"""The outer step in exact integers, against Python's own whole numbers and fractions."""

from fractions import Fraction
from math import ceil, floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer.mean import round_half_away
from atoll.protocols.errors import DecodeError
from atoll.protocols.run.payload import MAX_Q
from tests.plain.mean import outer_update

torch.set_num_threads(1)


def exact_update(members, at, alpha_256, floor_256):
    """U of one coordinate of chunk 0, from the definition."""
    total = sum(weight for weight, _ in members)
    sent = [(weight, table[at]) for weight, table in members if table.get(at)]
    numerator = sum(weight * q for weight, q in sent)
    if not numerator:
        return 0
    least = ceil(Fraction(floor_256 * total, 256))
    mean = Fraction(alpha_256 * numerator, 256 * 4 * max(sum(w for w, _ in sent), least))
    return -(floor(abs(mean) + Fraction(1, 2)) * (1 if mean > 0 else -1))


def tables(table, k):
    rows = sorted(table.items())
    assert len(rows) == k
    return torch.tensor([[at for at, _ in rows]]), torch.tensor([[q for _, q in rows]])


MEMBER = st.tuples(
    st.integers(1, 255),
    st.dictionaries(st.integers(0, 7), st.integers(-MAX_Q, MAX_Q) | st.integers(-9, 9), min_size=3, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(MEMBER, max_size=6), st.integers(1, 1024), st.integers(0, 256))
def test_equals_the_definition_in_fractions(members, alpha_256, floor_256):
    weighted = [(weight, *tables(table, 3)) for weight, table in members]
    update = outer_update(weighted, 1, alpha_256, floor_256)
    assert update.dtype == torch.int32
    for at in range(9):
        assert int(update[0, at]) == exact_update(members, at, alpha_256, floor_256)
    assert not update[0, 9:].any()


@settings(max_examples=50, deadline=None)
@given(st.lists(MEMBER, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_order_does_not_matter(members, random):
    weighted = [(weight, *tables(table, 3)) for weight, table in members]
    shuffled = list(weighted)
    random.shuffle(shuffled)
    assert torch.equal(outer_update(weighted, 1, 256, 64), outer_update(shuffled, 1, 256, 64))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("floor_256", [0, 256])
def test_the_extremes_do_not_overflow(sign, floor_256):
    index = torch.tensor([[0, 4095]])
    q = torch.tensor([[sign * MAX_Q, -sign * MAX_Q]])
    update = outer_update([(255, index, q)] * 1024, 1, 1024, floor_256)
    assert update[0, [0, 4095]].tolist() == [-sign * 12 << 24, sign * 12 << 24]


def test_a_lone_sender_gets_full_weight_without_a_floor_and_its_share_with_one():
    index, q = torch.tensor([[3]]), torch.tensor([[4 << 10]])
    silent = torch.zeros_like(q)
    members = [(64, index, q), (64, index, silent), (64, index + 1, silent), (64, index, silent)]
    assert [int(outer_update(members, 1, 256, share)[0, 3]) for share in (0, 64, 128, 256)] == [
        -1024,
        -1024,
        -512,
        -256,
    ]


def test_slabs_do_not_show():
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, 4000, (600, 5), generator=generator).sort(1).values + torch.arange(5)
    q = torch.randint(-MAX_Q, MAX_Q, (600, 5), generator=generator)
    whole = outer_update([(7, index, q)], 600, 256, 0)
    for at in (0, 255, 256, 599):
        assert torch.equal(whole[at : at + 1], outer_update([(7, index[at : at + 1], q[at : at + 1])], 1, 256, 0))


def test_an_empty_set_moves_nothing():
    assert not outer_update([], 2, 256, 256).any()


@pytest.mark.parametrize("weight", [0, -1, 256])
def test_illegal_weights_are_refused(weight):
    index = torch.tensor([[0]])
    with pytest.raises(DecodeError):
        outer_update([(weight, index, index)], 1, 256, 0)
    with pytest.raises(DecodeError):
        outer_update([(1, index, index)] * 1025, 1, 256, 0)


@given(st.integers(-(2**57), 2**57), st.integers(1, 2**28))
def test_rounding(numerator, denominator):
    found = int(round_half_away(torch.tensor(numerator), torch.tensor(denominator)))
    exact = Fraction(numerator, denominator)
    assert abs(found - exact) <= Fraction(1, 2)
    if abs(found - exact) == Fraction(1, 2):
        assert abs(found) > abs(exact)
