"""All codecs behind their seam: against the slow readers, error feedback, fuzz, golden bytes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.compress.selecting import units_of
from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.mean import divisor, outer_step
from atoll.protocols.errors import ConfigError, DecodeError, Divergence
from atoll.protocols.ids import digest
from atoll.protocols.run.payload import (
    DENSE_BLOCK,
    HEADER_BYTES,
    MAX_Q,
    MOST_SCALE,
    NUMBERS,
    ONE_FP16,
    SCALE_MASK,
    TOP_LEVEL,
    VALUE_BITS,
    Layout,
    payload_bytes,
)
from tests.plain.codecs import Refused, decode
from tests.plain.folds import apply_update

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[3] / "golden" / "codecs.json"
CHUNKS = 3
NOTHING = torch.zeros((CHUNKS, 4096), dtype=torch.int32)
ALL = [
    ("sparse2", 64), ("sparse1", 64), ("sparse1", 3), ("sparse1", 1000), ("int8", 4096), ("e3m0", 4096),
    ("lookup2", 64), ("lookup2", 3),
]  # fmt: skip
DENSE = [("int8", 4096), ("e3m0", 4096)]


def noise(seed, scale=1e-3):
    return torch.randn((CHUNKS, 4096), generator=torch.Generator().manual_seed(seed)) * scale


def said_of(name, k, values):
    """Payload of these values, and what is left of them."""
    left, nothing = values.clone(), torch.zeros_like(values)
    return codec_of(name, k).encode(left, nothing, nothing, 1.0), left


def payload(name, k, seed, scale=1e-3):
    values = noise(seed, scale)
    values[seed % CHUNKS] = 0
    values[(seed + 1) % CHUNKS, :300] = 0
    return said_of(name, k, values)[0]


def plain_update(name, k, members, step):
    """From the definition: Σ weight·q over the weight of those who sent."""
    read = [(weight, *decode(each, name, CHUNKS, k)) for weight, each in members]
    numerator = sum(weight * q for weight, q, _ in read)
    sent = sum(weight * there.long() for weight, _, there in read)
    share = divisor(sent, sum(weight for weight, _ in members), step.floor_256)
    return outer_step(numerator, share, step.alpha_256).int()


@pytest.mark.parametrize(("name", "k"), ALL)
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-5, 1e-3, 1.0, 1e6])
def test_payload_and_residual_add_up(name, k, scale):
    values = noise(1, scale)
    found, left = said_of(name, k, values)
    assert len(found) == payload_bytes(name, CHUNKS, k)
    codec_of(name, k).check(found, CHUNKS)
    q, _ = decode(found, name, CHUNKS, k)
    assert int(q.abs().max()) <= MAX_Q
    assert torch.equal(left, values - q.float() * 2.0**-26)
    codec_of(name, k).give_back(left, found)
    assert torch.allclose(left, values, atol=scale * 1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "k"), ALL)
@pytest.mark.parametrize("step", [OuterStep(256, 64), OuterStep(1024, 0), OuterStep(1, 256)])
def test_the_fold_equals_the_definition(name, k, step):
    codec = codec_of(name, k)
    members = [(w, payload(name, k, w, scale)) for w, scale in ((1, 1e-3), (7, 9.0), (255, 1e-6))]
    expected = plain_update(name, k, members, step)
    for threads in (1, 3):
        assert torch.equal(apply_update(codec, NOTHING, members, step, threads=threads), expected)
    theta = torch.randint(-(2**30), 2**30, (CHUNKS, 4096), dtype=torch.int32)
    assert torch.equal(apply_update(codec, theta, members, step), plus(theta, expected))
    theta[:] = torch.where(expected > 0, 2**31 - 1, 0)
    assert bool((expected > 0).any())
    with pytest.raises(Divergence):
        apply_update(codec, theta, members, step)


@pytest.mark.parametrize(("name", "k"), [*DENSE, ("sparse1", 64), ("lookup2", 64)])
def test_the_extremes_do_not_overflow(name, k):
    members = [(255, said_of(name, k, torch.full((CHUNKS, 4096), 1e9))[0])] * 1024
    codec = codec_of(name, k)
    for step in (OuterStep(1024, 0), OuterStep(1024, 256)):
        assert torch.equal(apply_update(codec, NOTHING, members, step), plain_update(name, k, members, step))


@pytest.mark.parametrize(
    ("name", "k", "most"), [("int8", 4096, 1.5e-4), ("e3m0", 4096, 0.036), ("sparse1", 4096, 0.5)]
)
def test_error_of_gaussian_values(name, k, most):
    values = noise(5)
    _, left = said_of(name, k, values)
    error = float((left**2).sum() / (values**2).sum())
    print(f"{name}: {error:.5f}")
    assert error < most


@pytest.mark.parametrize(("name", "k", "rounds", "most"), [
    ("sparse2", 64, 90, 0.1), ("sparse1", 64, 90, 0.1), ("lookup2", 64, 90, 0.1),
    ("int8", 4096, 3, 1e-3), ("e3m0", 4096, 3, 0.02),
])  # fmt: skip
def test_everything_is_said_in_the_end(name, k, rounds, most):
    delta = noise(3)
    left, zero = delta.clone(), torch.zeros_like(delta)
    for _ in range(rounds):
        codec_of(name, k).encode(left, zero, zero, 1.0)
    assert float(left.norm()) < most * float(delta.norm())


@pytest.mark.parametrize(("name", "k"), ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_divergence_leaves_the_residual_alone(name, k, bad):
    residual, local = noise(1), noise(2)
    local[CHUNKS - 1, 4095] = bad
    before = residual.clone()
    with pytest.raises(Divergence):
        codec_of(name, k).encode(residual, torch.zeros((CHUNKS, 4096)), local, 0.9)
    assert torch.equal(residual, before)


def answers(raw, name, k):
    """What codec and slow reader say of bytes: whether they take them."""
    try:
        codec_of(name, k).check(raw, CHUNKS)
        ours = True
    except DecodeError:
        ours = False
    try:
        decode(raw, name, CHUNKS, k)
        return ours, True
    except (DecodeError, Refused):
        return ours, False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutations_are_judged_alike(data):
    name, k = data.draw(st.sampled_from(ALL))
    raw = bytearray(payload(name, k, data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1e-7, 1e-3]))))
    for _ in range(data.draw(st.integers(1, 3))):
        near = data.draw(st.sampled_from([HEADER_BYTES + 100, len(raw)]))
        raw[data.draw(st.integers(0, min(near, len(raw)) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    raw = bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    ours, plain = answers(raw, name, k)
    assert ours == plain
    if not ours:
        residual = torch.zeros((CHUNKS, 4096))
        with pytest.raises(DecodeError):
            codec_of(name, k).give_back(residual, raw)
        assert not residual.any()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), st.randoms(use_true_random=False))
def test_random_bodies_are_judged_alike(codec, random):
    name, k = codec
    layout = Layout(name, CHUNKS, k)
    ours, plain = answers(layout.header + random.randbytes(layout.size_bytes - HEADER_BYTES), name, k)
    assert ours == plain


@pytest.mark.parametrize(("name", "k"), ALL)
@pytest.mark.parametrize("half", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 65504.0, -1.0, 1.001])
def test_a_scale_that_is_no_scale_is_refused(name, k, half):
    """Scales are the floats of a payload. In sparse2 the bits of sign and top exponent are the shape."""
    if name == "lookup2" and half == -1:
        pytest.skip("a value of a table has a sign")
    word = int.from_bytes(np.float16(half).tobytes(), "little")
    if name == "sparse2" and word & SCALE_MASK <= ONE_FP16:
        word |= SCALE_MASK
    raw = bytearray(payload(name, k, 1))
    at = Layout(name, CHUNKS, k).offsets[0]
    codec_of(name, k).check(bytes(raw), CHUNKS)
    raw[at : at + 2] = word.to_bytes(2, "little")
    with pytest.raises(DecodeError):
        codec_of(name, k).check(bytes(raw), CHUNKS)


@pytest.mark.parametrize(("name", "k"), DENSE)
def test_values_of_a_dense_codec_fix_its_bytes(name, k):
    """The largest value of a block is the top level, so the values give the scale, and the scale the codes."""
    for seed in range(4):
        q, sent = decode(payload(name, k, seed), name, CHUNKS, k)
        block = DENSE_BLOCK[name]
        most = q.abs().reshape(CHUNKS, -1, block).amax(2)
        assert not (most % TOP_LEVEL[name]).any()
        assert torch.equal(most.repeat_interleave(block, 1) > 0, sent)


@pytest.mark.parametrize(("name", "k"), [("gzip", 64), ("sparse2", 0), ("int8", 64)])
def test_an_unknown_codec_is_a_line(name, k):
    with pytest.raises(ConfigError, match="compress"):
        codec_of(name, k)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(("at", "said"), [(4, "payload version"), (5, "codec")])
def test_a_payload_of_another_version_or_codec_is_a_line(name, at, said):
    k = 4096 if name in DENSE_BLOCK else 64
    raw = bytearray(payload(name, k, 1))
    raw[at] ^= 3
    with pytest.raises(DecodeError, match=said):
        codec_of(name, k).check(bytes(raw), CHUNKS)


def golden_values():
    """Values that depend on no random generator."""
    at = torch.arange(CHUNKS * 4096, dtype=torch.float64).view(CHUNKS, 4096)
    values = ((at * at * 7 + at * 13) % 8191 - 4095) / 4095
    values[1] *= values[1].abs() ** 3
    values[2] = 0
    return (values * 2.0**-9).float()


def golden():
    """The content of tests/golden/codecs.json."""
    found = {}
    for name, k in ALL:
        raw = said_of(name, k, golden_values())[0]
        found[f"{name} {k}"] = digest(raw).hex() if len(raw) > 500 else raw.hex()
        if name in DENSE_BLOCK:  # all scales, and the first codes of chunk 0
            found[f"{name} head"] = raw[: Layout(name, CHUNKS, k).offsets[1] + 16].hex()
    return found


def test_golden_payloads():
    assert golden() == json.loads(GOLDEN.read_text())


def test_levels_of_e3m0_are_the_nearest():
    values = torch.zeros((1, 4096))
    values[0, :256] = torch.linspace(0, 6.4e-3, 256)
    left, nothing = values.clone(), torch.zeros_like(values)
    q, _ = decode(codec_of("e3m0", 4096).encode(left, nothing, nothing, 1.0), "e3m0", 1, 4096)
    levels = np.array([0, 1, 2, 4, 8, 16, 32, 64]) * (int(q.max()) // 64)
    exact = values[0, :256].numpy().astype(np.float64) * 2**26
    best = np.abs(exact[:, None] - levels).min(1)
    assert np.allclose(np.abs(exact - q[0, :256].numpy()), best, rtol=1e-4, atol=2)


def test_the_largest_value_of_a_block_of_e3m0_reaches_the_top_level_at_every_scale():
    """A block for each fp16 scale: its largest value is the least that reaches level 64 in exact arithmetic, and
    the others are level 32, so that no other scale fits better.

    At 731 of the 12,800 scales the float32 product is below 48: the block ended at 32, and nobody read it.
    """
    scales, block = MOST_SCALE["e3m0"], DENSE_BLOCK["e3m0"]
    chunks = -(-scales * block // 4096)
    blocks = np.zeros((chunks * 4096 // block, block), np.float32)
    units = np.array([units_of(half) for half in range(1, scales + 1)]) * 2.0**-VALUE_BITS
    least = (48 * units).astype(np.float32)
    blocks[:scales] = 32 * units[:, None]
    blocks[:scales, 7] = np.where(least >= 48 * units, least, np.nextafter(least, np.float32(np.inf)))
    values = torch.from_numpy(blocks.reshape(chunks, 4096))
    nothing, codec = torch.zeros_like(values), codec_of("e3m0", 4096)
    raw = codec.encode(values.clone(), nothing, nothing, 1.0)
    codec.check(raw, chunks)
    q = decode(raw, "e3m0", chunks, 4096)[0].numpy().reshape(blocks.shape)[:scales]
    assert q.all()
    assert (q == q[:, :1] * np.where(np.arange(block) == 7, 2, 1)).all()
