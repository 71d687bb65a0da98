"""The compiled fold against the plain one, and its decoder against the plain decoder: same bits, same refusals."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress import folding
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.fixed import plus
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.run.payload import HEADER_BYTES, Layout
from tests.plain import folds
from tests.plain.mean import outer_update
from tests.plain.sparse2 import decode, encode

torch.set_num_threads(1)
update_of = partial(folds.update_of, codec="sparse2")
CHUNKS = 5
STEP = OuterStep(256, 64)


def check(raw, chunks, k):
    folding.check(raw, Layout("sparse2", chunks, k))


def read(raw, chunks, k):
    return folding.decode(raw, Layout("sparse2", chunks, k))


def payload(seed, k, chunks=CHUNKS, scale=1e-3):
    values = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * scale
    values[seed % chunks] = 0  # a chunk that says nothing
    return encode(values, k)


def plain(members, k, step, chunks=CHUNKS):
    return outer_update([(weight, *decode(each, chunks, k)) for weight, each in members], chunks, *step)


@pytest.mark.parametrize("k", [1, 2, 3, 63, 64, 65, 128, 1000, 4096])
@pytest.mark.parametrize("step", [OuterStep(256, 64), OuterStep(1024, 0), OuterStep(1, 256)])
def test_equals_the_plain_version(k, step):
    members = [(weight, payload(weight, k)) for weight in (1, 7, 64, 255)]
    assert torch.equal(update_of(members, CHUNKS, k, step), plain(members, k, step))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 255), st.integers(0, 20)), max_size=9),
    st.integers(1, 1024),
    st.integers(0, 256),
    st.sampled_from([1e-6, 1e-3, 1.0, 1e3]),
    st.integers(1, 6),
)
def test_equals_the_plain_version_for_any_weights_and_steps(drawn, alpha_256, floor_256, scale, threads):
    members = [(weight, payload(seed, 64, scale=scale)) for weight, seed in drawn]
    step = OuterStep(alpha_256, floor_256)
    assert torch.equal(update_of(members, CHUNKS, 64, step, threads=threads), plain(members, 64, step))


@pytest.mark.parametrize("k", [1, 2, 3, 63, 64, 65, 128, 1000, 4096])
def test_decodes_what_the_plain_decoder_decodes(k):
    for scale in (0.0, 1e-6, 1e-3, 1e6):
        raw = payload(k, k, scale=scale)
        found, expected = read(raw, CHUNKS, k), decode(raw, CHUNKS, k)
        assert torch.equal(found.index_Ck, expected.index_Ck)
        assert torch.equal(found.q_Ck, expected.q_Ck)


def test_the_extremes_do_not_overflow():
    values = torch.zeros((1, 4096))
    values[0, 0], values[0, 1:64] = 1e6, 1.0
    members = [(255, encode(values * 1e6, 64))] * 1024
    for step in (OuterStep(1024, 0), OuterStep(1024, 256)):
        assert torch.equal(update_of(members, 1, 64, step), plain(members, 64, step, 1))


@pytest.mark.parametrize("members", [1, 8, 9, 514, 515, 600, 1024])
def test_sets_beyond_one_packed_sum(members):
    """514 members of weight 255 fit in the 17 bits of a packed sum; more are added in parts."""
    three = [payload(seed, 64, scale=1e3) for seed in range(3)]
    taken = [(255 if at else 2, three[at % 3]) for at in range(members)]
    for step in (STEP, OuterStep(1024, 0)):
        assert torch.equal(update_of(taken, CHUNKS, 64, step), plain(taken, 64, step))


def test_theta_moves_in_the_same_pass_and_leaves_its_range_as_divergence():
    members = [(64, payload(1, 64, scale=1.0)), (64, payload(2, 64, scale=1.0))]
    theta = torch.randint(-(2**30), 2**30, (CHUNKS, 4096), dtype=torch.int32)
    before, update, codec = theta.clone(), plain(members, 64, STEP), codec_of("sparse2", 64)
    assert torch.equal(folds.apply_update(codec, theta, members, STEP, threads=2), plus(theta, update))
    assert torch.equal(theta, before)
    theta[:] = torch.where(update > 0, -(2**31), 2**31 - 1)  # at the edge of the range, and moving inwards
    assert torch.equal(folds.apply_update(codec, theta, members, STEP), plus(theta, update))
    theta[:] = torch.where(update > 0, 2**31 - 1, 0)
    with pytest.raises(Divergence):
        folds.apply_update(codec, theta, members, STEP)


def answer(reader):
    try:
        reader()
    except DecodeError:
        return "refused"
    return "taken"


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_refuses_exactly_what_the_plain_decoder_refuses(data):
    k = data.draw(st.sampled_from([1, 3, 8, 63, 64, 65]))
    raw = bytearray(payload(data.draw(st.integers(0, 4)), k, 3))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    bad = bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    expected = answer(lambda: decode(bad, 3, k))
    assert answer(lambda: check(bad, 3, k)) == answer(lambda: read(bad, 3, k)) == expected
    assert answer(lambda: update_of([(1, payload(9, k, 3)), (1, bad)], 3, k, STEP)) == expected


@pytest.mark.parametrize("k", [1, 3, 63, 64])
def test_refuses_what_the_plain_decoder_refuses_bit_by_bit(k):
    good = payload(1, k, 1, 1.0) if k != 64 else encode(torch.zeros((1, 4096)), k)
    taken = 0
    for bit in range(8 * len(good)):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        bad = bytes(raw)
        expected = answer(lambda bad=bad: decode(bad, 1, k))
        assert answer(lambda bad=bad: check(bad, 1, k)) == expected, bit
        assert answer(lambda bad=bad: read(bad, 1, k)) == expected, bit
        taken += expected == "taken"
    assert taken < 8 * len(good)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_bodies_are_judged_alike(data):
    k = data.draw(st.sampled_from([1, 2, 4096]))
    layout = Layout("sparse2", 1, k)
    body = data.draw(st.randoms(use_true_random=False)).randbytes(layout.size_bytes - HEADER_BYTES)
    bad = layout.header + body
    assert answer(lambda: check(bad, 1, k)) == answer(lambda: decode(bad, 1, k))


@pytest.mark.parametrize("weights", [[0], [256], [1] * 1025])
def test_illegal_sets_are_refused(weights):
    each = payload(1, 64)
    with pytest.raises(DecodeError):
        update_of([(weight, each) for weight in weights], CHUNKS, 64, STEP)
