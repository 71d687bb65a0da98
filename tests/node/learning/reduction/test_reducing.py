"""A reduction: the exact mean, nothing lost, the same bytes from both encoders."""

from fractions import Fraction
from math import ceil, floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.reduction.reducing import (
    ReducerErrorFeedback,
    decode_rows,
    hand_back,
    minus,
    moved,
    nothing_kept,
    reduce_rows,
)
from atoll.node.worker.folding.reduction_work import ARITHMETIC
from atoll.protocols.ledger.rows import cut_rows, silent_row
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout
from tests.plain.mean import PLAIN
from tests.plain.sparse2 import decode, encode

torch.set_num_threads(1)


def members_of(count, chunks, k, seed):
    luck = torch.Generator().manual_seed(seed)
    values = [torch.randn((chunks, 4096), generator=luck) ** 3 * 1e-3 for _ in range(count)]
    weights = torch.randint(1, 256, (count,), generator=luck).tolist()
    return [(weight, *decode(encode(value, k), chunks, k)) for weight, value in zip(weights, values, strict=True)]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.sampled_from([0, 64, 256]), st.integers(0, 99))
def test_the_mean_is_the_fraction_rounded_once(count, floor_256, seed):
    members = members_of(count, 1, 8, seed)
    mean = PLAIN.weighted_mean(members, floor_256)
    total = sum(weight for weight, _, _ in members)
    for at in {int(i) for _, index, _ in members for i in index[0]} | {0, 4095}:
        sent = [
            (weight, int(value))
            for weight, index, q in members
            for i, value in zip(index[0], q[0], strict=True)
            if i == at and value
        ]
        share = max(1, sum(weight for weight, _ in sent), ceil(Fraction(floor_256 * total, 256)))
        exact = Fraction(sum(weight * value for weight, value in sent), share)
        assert int(mean[0, at]) == floor(abs(exact) + Fraction(1, 2)) * (1 if exact > 0 else -1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.sampled_from([4, 16, 64]))
def test_nothing_is_lost_over_rounds(seed, k):
    """What was said and what is kept add up to all means, exactly."""
    kept, said, owed = nothing_kept(Span(0, 2)).values_C4096, 0, 0
    for number in range(3):
        members = members_of(4, 2, 8, 1000 * number + seed)
        owed = owed + PLAIN.weighted_mean(members, 64)
        payload, kept = reduce_rows(kept, members, k, 64, PLAIN)
        index, q = decode(payload, 2, k)
        said = said + torch.zeros((2, 4096), dtype=torch.int64).scatter_(1, index, q)
        assert torch.equal(said + kept, owed)


def test_both_encoders_give_the_same_bytes_and_leave_the_input():
    members = members_of(5, 3, 8, 7)
    kept = torch.randint(-(2**20), 2**20, (3, 4096), dtype=torch.int32)
    before = kept.clone()
    plain, compiled = reduce_rows(kept, members, 16, 64, PLAIN), reduce_rows(kept, members, 16, 64, ARITHMETIC)
    assert plain[0] == compiled[0]
    assert torch.equal(plain[1], compiled[1])
    assert torch.equal(kept, before)


def test_a_chunk_alone_is_reduced_as_within_its_slice():
    """Otherwise one chunk could not be judged alone."""
    members = members_of(3, 4, 8, 11)
    kept = torch.randint(-(2**20), 2**20, (4, 4096), dtype=torch.int32)
    payload, after = reduce_rows(kept, members, 16, 64, PLAIN)
    rows = cut_rows(payload, Layout("sparse2", 4, 16))
    for chunk in range(4):
        at = slice(chunk, chunk + 1)
        one, left = reduce_rows(kept[at], [(w, i[at], q[at]) for w, i, q in members], 16, 64, PLAIN)
        assert cut_rows(one, Layout("sparse2", 1, 16)) == [rows[chunk]]
        assert torch.equal(left, after[at])


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_kept_stays_within_int32(sign):
    kept = torch.full((1, 4096), sign * (2**31 - 1), dtype=torch.int32)
    index, q = torch.tensor([[5]]), torch.tensor([[sign * (12 << 24)]])
    _, after = reduce_rows(kept, [(255, index, q)], 1, 0, PLAIN)
    assert int(after[0, 5].abs()) < 2**31
    assert int(after[0, 6]) == sign * (2**31 - 1)


def test_an_illegal_row_is_silent_and_the_others_are_not():
    values = torch.randn((3, 4096), generator=torch.Generator().manual_seed(3))
    payload = encode(values, 8)
    rows = cut_rows(payload, Layout("sparse2", 3, 8))
    index, q = decode_rows(b"".join([rows[0], b"\xff" * len(rows[1]), rows[2]]), 8, PLAIN)
    wanted_index, wanted_q = decode(payload, 3, 8)
    assert torch.equal(index[[0, 2]], wanted_index[[0, 2]])
    assert torch.equal(q[[0, 2]], wanted_q[[0, 2]])
    assert not q[1].any()


@pytest.mark.parametrize("k", [1, 2, 3, 64, 65, 1000, 4096])
def test_the_silent_row_is_what_the_encoder_writes_for_zeros(k):
    assert cut_rows(encode(torch.zeros((1, 4096)), k), Layout("sparse2", 1, k)) == [silent_row(k)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6))
def test_a_moved_slice_loses_nothing(first, size, new_first, new_size):
    kept = ReducerErrorFeedback(Span(first, first + size), torch.randint(-99, 99, (size, 4096), dtype=torch.int32))
    new, rest = moved(kept, Span(new_first, new_first + new_size))
    whole = torch.zeros((12, 4096), dtype=torch.int32)
    for each in (new, rest):
        whole[each.span.start : each.span.stop] += each.values_C4096
    assert torch.equal(whole[first : first + size], kept.values_C4096)
    assert whole.count_nonzero() == kept.values_C4096.count_nonzero()
    assert torch.equal(minus(kept, kept).values_C4096, torch.zeros_like(kept.values_C4096))


def test_what_is_handed_back_comes_into_the_own_feedback():
    residual = torch.zeros((4, 4096))
    hand_back(residual, ReducerErrorFeedback(Span(1, 3), torch.full((2, 4096), 1 << 20, dtype=torch.int32)))
    assert residual[0].abs().max() == residual[3].abs().max() == 0
    assert bool((residual[1:3] == 2.0**-6).all())
