"""Norms and inner products of payloads against sums of Python's own integers, and the fold of judged payloads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress import measuring
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep, _arrays_of, rows_of
from atoll.node.learning.compress.measuring import WHOLE
from atoll.node.learning.outer.mean import divisor, outer_step
from atoll.protocols.errors import DecodeError
from atoll.protocols.run.arena import Span
from tests.node.learning.compress.test_codecs import ALL, CHUNKS, NOTHING, payload, said_of
from tests.plain.codecs import decode

torch.set_num_threads(1)
STEP = OuterStep(256, 64)
ATOMS = np.array([0, 1, 0], np.int32)


class Fixed:
    """A judge that says what it is told, and remembers what it was told."""

    compares = True

    def __init__(self, clip_PA, weight_P, chunks=(0, 1, 2), weight_PA=None):
        self.atom_C = ATOMS
        self.weight_PA = weight_PA
        self.clip_PA, self.weight_P, self.chunks = clip_PA, weight_P, chunks
        self.norm2 = {}

    def clip(self, atom, weight_P, norm2_P):
        self.norm2[atom] = norm2_P
        return [row[atom] for row in self.clip_PA]

    def weigh(self, atom, weight_P, norm2_P):
        self.given_P = list(weight_P)
        return weight_P if self.weight_PA is None else [row[atom] for row in self.weight_PA]

    def sample(self, members, k):
        return np.array(self.chunks, np.int64)

    def weights(self, weight_P, gram_PP):
        self.gram_PP = gram_PP
        return np.array(self.weight_P, np.int64)


def units(q, name, k):
    """The unit of each value: what its level is times, so that clipping rounds as the fold does."""
    if name in ("int8", "e3m0"):
        block, top = (4096, 127) if name == "int8" else (256, 64)
        parts = q.view(CHUNKS, -1, block)
        unit = parts.abs().amax(-1, keepdim=True) // top
        return unit.expand_as(parts).reshape(CHUNKS, 4096)
    if name == "lookup2":
        return q.abs() // 4
    small = torch.where(q == 0, 1 << 60, q.abs()).amin(1, keepdim=True) // 4
    largest = q.abs().amax(1, keepdim=True)
    # A chunk in which every value is large does not exist: the least one is small, of level 4.
    assert bool(((largest == 0) | (largest >= 4 * small)).all())
    return torch.where(largest == 0, 0, small).expand_as(q)


def clipped(q, unit, clip_A):
    left = torch.tensor([clip_A[atom] for atom in ATOMS])[:, None]
    level = torch.where(unit == 0, 0, q // unit.clamp(min=1))
    return level * ((unit * left + (WHOLE >> 1)) >> 16)


def folded(codec, members, judge, threads=1):
    weights, payloads = [weight for weight, _ in members], [each for _, each in members]
    return codec.apply_update(NOTHING, weights, payloads, STEP, judge=judge, threads=threads)


@pytest.mark.parametrize(("name", "k"), ALL)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_judge_is_told_and_what_becomes_of_its_answer(name, k, threads):
    members = [(w, payload(name, k, w, scale)) for w, scale in ((1, 1e-3), (7, 9.0), (255, 1e-6), (9, 1e-3))]
    clip_PA = [[WHOLE, 1], [12345, WHOLE], [WHOLE, WHOLE], [0, 40000]]
    judge = Fixed(clip_PA, [10, 255, 0, 77])
    update = folded(codec_of(name, k), members, judge, threads)
    exact = [decode(each, name, CHUNKS, k)[0] for _, each in members]
    for atom in (0, 1):
        rows = torch.from_numpy(atom == ATOMS)
        assert judge.norm2[atom] == [sum(v * v for v in q[rows].flatten().tolist()) for q in exact]
    left = [clipped(q, units(q, name, k), clip_A) for q, clip_A in zip(exact, clip_PA, strict=True)]
    numerator = sum(weight * q for weight, q in zip(judge.weight_P, left, strict=True))
    sent = sum(weight * _sent(q, name).long() for weight, q in zip(judge.weight_P, left, strict=True))
    share = divisor(sent, sum(judge.weight_P), STEP.floor_256)
    assert torch.equal(update, outer_step(numerator, share, STEP.alpha_256).int())


@pytest.mark.parametrize(("name", "k"), [("sparse2", 64), ("int8", 4096), ("e3m0", 4096)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_judge_may_weigh_each_atom_by_itself(name, k, threads):
    members = [(w, payload(name, k, w, scale)) for w, scale in ((1, 1e-3), (7, 1e-3), (9, 1e-3))]
    weight_PA = [[200, 5], [100, 9], [50, 3]]
    judge = Fixed([[WHOLE, WHOLE]] * 3, [], weight_PA=weight_PA)
    judge.compares = False
    update = folded(codec_of(name, k), members, judge, threads)
    assert judge.given_P == [1, 7, 9]
    for atom in (0, 1):
        rows = torch.from_numpy(atom == ATOMS)
        assert bool(update[rows].any())
        exact = [decode(each, name, CHUNKS, k)[0] for _, each in members]
        pairs = [(row[atom], q) for row, q in zip(weight_PA, exact, strict=True)]
        numerator = sum(weight * q for weight, q in pairs)
        share = divisor(sum(w * _sent(q, name).long() for w, q in pairs), sum(w for w, _ in pairs), STEP.floor_256)
        assert torch.equal(update[rows], outer_step(numerator, share, STEP.alpha_256).int()[rows])


def _sent(q, name):
    """A dense codec sends a whole block, or nothing of it."""
    if name not in ("int8", "e3m0"):
        return q != 0
    parts = q.view(CHUNKS, -1, 4096 if name == "int8" else 256)
    return (parts != 0).any(-1, keepdim=True).expand_as(parts).reshape(CHUNKS, 4096)


@pytest.mark.parametrize(("name", "k"), ALL)
def test_inner_products_are_those_of_the_values_but_for_one_shift(name, k):
    members = [(64, payload(name, k, seed, scale)) for seed, scale in ((1, 1e-3), (2, 2e-3), (4, 1e-3), (1, 1e-3))]
    judge = Fixed([[WHOLE, WHOLE]] * 4, [64] * 4, chunks=(0, 2))
    folded(codec_of(name, k), members, judge)
    exact = [decode(each, name, CHUNKS, k)[0][[0, 2]].double().flatten() for _, each in members]
    wanted = np.array([[float(a @ b) for a in exact] for b in exact])
    ratio = judge.gram_PP[0, 0] / wanted[0, 0]
    scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal()))
    assert np.abs(judge.gram_PP / ratio - wanted).max() <= 1e-4 * scale.max()
    assert (judge.gram_PP == judge.gram_PP.T).all()
    assert (judge.gram_PP[0] == judge.gram_PP[3]).all()


@pytest.mark.parametrize(("name", "k"), [("sparse2", 64), ("int8", 4096)])
def test_the_largest_set_of_the_largest_values_does_not_overflow(name, k):
    largest = said_of(name, k, torch.full((CHUNKS, 4096), 1e9))[0]
    count = 1024 if name == "sparse2" else 64
    judge = Fixed([[WHOLE, WHOLE]] * count, [255] * count)
    update = folded(codec_of(name, k), [(255, largest)] * count, judge)
    assert torch.equal(update, folded(codec_of(name, k), [(255, largest)], None))
    assert judge.gram_PP.min() == judge.gram_PP.max() > 2**50
    q = decode(largest, name, CHUNKS, k)[0]
    assert set(judge.norm2[1]) == {sum(v * v for v in q[1].tolist())}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_neither_threads_nor_order_change_what_a_judge_is_told(seeds, threads, random):
    codec = codec_of("sparse2", 64)
    one, other = (Fixed([[WHOLE, 3000]] * len(seeds), [7] * len(seeds)) for _ in range(2))
    members = [(9, payload("sparse2", 64, seed)) for seed in seeds]
    order = list(range(len(seeds)))
    random.shuffle(order)
    first = folded(codec, members, one)
    second = folded(codec, [members[at] for at in order], other, threads)
    assert torch.equal(first, second)
    assert (one.gram_PP[np.ix_(order, order)] == other.gram_PP).all()
    assert all([one.norm2[atom][at] for at in order] == other.norm2[atom] for atom in (0, 1))


def test_members_that_cover_some_chunks_are_compared_where_all_have_something():
    layout = codec_of("sparse2", 64).layout(CHUNKS)
    part = rows_of((Span(0, 2),), (Span(0, CHUNKS),))
    values = torch.randn((CHUNKS, 4096), generator=torch.Generator().manual_seed(1))
    whole, two = (said_of("sparse2", 64, each)[0] for each in (values, values[:2]))
    judge = Fixed([[WHOLE, WHOLE]] * 2, [64] * 2)
    measuring.judged(_arrays_of([64, 64], [whole, two], [None, part], layout), layout, judge, 1)
    assert judge.gram_PP[0, 0] == judge.gram_PP[1, 1] == judge.gram_PP[0, 1] > 0
    assert judge.norm2[1][0] == judge.norm2[1][1]
    assert judge.norm2[0][0] > judge.norm2[0][1]


def test_an_illegal_payload_is_refused_whatever_a_judge_makes_of_it():
    codec, good = codec_of("sparse2", 64), payload("sparse2", 64, 1)
    bad = bytearray(good)
    bad[13] = 0xFF  # a scale above 1
    with pytest.raises(DecodeError):
        codec.check(bytes(bad), CHUNKS)
    with pytest.raises(DecodeError):
        folded(codec, [(1, good), (1, bytes(bad))], Fixed([[0, 0]] * 2, [255, 0]))
