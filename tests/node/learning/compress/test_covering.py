"""Payloads of some of a round's chunks: each chunk is the outer step of those who cover it, and of nobody else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep, rows_of
from atoll.node.learning.outer.mean import divisor, outer_step
from atoll.protocols.errors import DecodeError
from atoll.protocols.ledger.coverage import Span, size_of
from tests.plain.codecs import decode
from tests.plain.folds import apply_update

torch.set_num_threads(1)
CHUNKS = 6
WHOLE = (Span(3, 5), Span(10, 14))
"""Chunks of a round as they lie in the arena; row i of the round is PLACES[i]."""
PLACES = (3, 4, 10, 11, 12, 13)
CODECS = [("sparse2", 64), ("sparse1", 64), ("int8", 4096), ("e3m0", 4096)]


def cover_of(rows):
    return tuple(Span(PLACES[row], PLACES[row] + 1) for row in sorted(rows))


def payload(codec, seed, chunks, scale=1e-3):
    values = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * scale
    if chunks:
        values[seed % chunks] = 0  # a chunk that is covered, and says nothing
    zero = torch.zeros_like(values)
    return codec.encode(zero.clone(), values, zero, 0.0)


def plain(codec, members, step):
    """Chunk by chunk, each as a set of its own."""
    update = torch.zeros((CHUNKS, 4096), dtype=torch.int32)
    decoded = [(w, sorted(rows), *decode(data, codec.name, len(rows), codec.k)) for w, data, rows in members]
    for row in range(CHUNKS):
        there = [(w, q[rows.index(row)], sent[rows.index(row)]) for w, rows, q, sent in decoded if row in rows]
        numerator = sum((w * q.long() for w, q, _ in there), torch.zeros(4096, dtype=torch.int64))
        weight = sum((w * sent.long() for w, _, sent in there), torch.zeros(4096, dtype=torch.int64))
        share = divisor(weight, sum(w for w, _, _ in there), step.floor_256)
        update[row] = outer_step(numerator, share, step.alpha_256)
    return update


def nothing(chunks):
    return torch.zeros((chunks, 4096), dtype=torch.int32)


MEMBER = st.tuples(st.integers(1, 255), st.integers(0, 20), st.sets(st.integers(0, CHUNKS - 1), min_size=1))


@pytest.mark.parametrize(("name", "k"), CODECS)
@settings(max_examples=25, deadline=None)
@given(st.lists(MEMBER, max_size=11), st.integers(0, 256), st.randoms(), st.integers(1, 3))
def test_each_chunk_is_the_step_of_those_who_cover_it_in_any_order(name, k, drawn, floor_256, luck, threads):
    codec, step = codec_of(name, k), OuterStep(256, floor_256)
    members = [(weight, payload(codec, seed, len(rows)), rows) for weight, seed, rows in drawn]
    given = [(weight, data, rows_of(cover_of(rows), WHOLE)) for weight, data, rows in members]
    expected = plain(codec, members, step)
    luck.shuffle(given)
    assert torch.equal(apply_update(codec, nothing(CHUNKS), given, step, threads=threads), expected)


@pytest.mark.parametrize(("name", "k"), CODECS)
def test_who_covers_everything_changes_nothing_by_saying_so(name, k):
    codec, step = codec_of(name, k), OuterStep(256, 64)
    members = [(weight, payload(codec, weight, CHUNKS)) for weight in (3, 64, 255)]
    said = [(weight, data, rows_of(WHOLE, WHOLE)) for weight, data in members]
    assert torch.equal(
        apply_update(codec, nothing(CHUNKS), said, step), apply_update(codec, nothing(CHUNKS), members, step)
    )


def test_the_floor_is_a_share_of_the_weight_that_covers_the_chunk():
    """A lone holder of an expert is not held back by the weight of those who do not train it."""
    codec, step = codec_of("int8", 4096), OuterStep(256, 256)
    alone = payload(codec, 5, 1)
    others = [(200, payload(codec, seed, 5), rows_of(cover_of(range(1, 6)), WHOLE)) for seed in (6, 7)]
    mine = (10, alone, rows_of(cover_of([0]), WHOLE))
    found = apply_update(codec, nothing(CHUNKS), [mine, *others], step)
    assert torch.equal(found[:1], apply_update(codec, nothing(1), [(10, alone)], step))


def test_a_payload_of_another_cover_is_refused():
    codec = codec_of("sparse2", 64)
    with pytest.raises(DecodeError):
        apply_update(
            codec,
            nothing(CHUNKS),
            [(1, payload(codec, 1, 3), rows_of(cover_of([0, 1]), WHOLE))],
            OuterStep(256, 64),
        )


@given(st.sets(st.integers(0, CHUNKS - 1), min_size=1))
def test_rows_follow_the_cover(rows):
    found = rows_of(cover_of(rows), WHOLE).tolist()
    assert found == [sorted(rows).index(row) if row in rows else -1 for row in range(CHUNKS)]
    assert size_of(cover_of(rows)) == len(rows)
