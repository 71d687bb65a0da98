"""The GPU's kernels against the CPU's: same bytes, same e, same U, same refusals. `test_gpu.py` runs this.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which must be known before Triton is
imported: that is why this has a process of its own.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress import fitting, folding
from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.compress.gpu import encoding as gpu_encoding
from atoll.node.learning.compress.gpu import fitting as gpu_fitting
from atoll.node.learning.compress.gpu import folding as gpu_folding
from atoll.node.learning.compress.sparse2 import decode, encode
from atoll.node.learning.kernels.on_gpu import EXACT, kernel
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.run.payload import HEADER_BYTES, Layout
from atoll_bench.compress import codec_pace as pace
from atoll_bench.compress import gpu_pace
from tests.plain.feedback import feed

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GOLDEN = Path(__file__).parents[3] / "golden" / "payload.json"
CHUNKS = 8
STEP = OuterStep(256, 64)


def arms(seed):
    """Residual, anchor and local weights; each chunk is hard in one way."""
    made = torch.Generator().manual_seed(seed)
    anchor = torch.randn((CHUNKS, 4096), generator=made) * 0.02
    local = anchor + torch.randn((CHUNKS, 4096), generator=made) * 1e-3
    residual = torch.randn((CHUNKS, 4096), generator=made) * 1e-3
    local[1:] = torch.where(torch.arange(1, CHUNKS)[:, None] < 7, anchor[1:], local[1:])
    residual[1] = 0
    residual[2] = torch.randint(-3, 4, (4096,), generator=made)
    residual[3] = torch.where(torch.rand(4096, generator=made) < 0.01, residual[3], 0.0)
    residual[4] *= 1e-42  # subnormal
    residual[5] = 1.0
    residual[6] = (residual[6] * 1e3) ** 5 * 1e9
    residual[7, ::512] = 3.0
    anchor[3, 7], local[3, 7], residual[3, 7] = -0.0, 0.0, -0.0  # their sum is -0.0
    return residual, anchor, local


def on_gpu(residual, anchor, local, beta, k):
    """Payload and new e."""
    there = [each.to(DEVICE, copy=True) for each in (residual, anchor, local)]
    payload = gpu_encoding.encode_into(there[2], *there, beta, Layout("sparse2", len(residual), k))
    assert torch.equal(there[0].cpu().view(torch.int32), residual.view(torch.int32)), "e was touched"
    return bytes(payload.cpu().numpy()), there[2].cpu()


def same(residual, anchor, local, beta, k):
    payload, left = on_gpu(residual, anchor, local, beta, k)
    expected = residual.clone()
    wanted = encode_residual(expected, anchor, local, beta, k, codec="sparse2")
    wrong = [at for at, pair in enumerate(zip(payload, wanted, strict=True)) if pair[0] != pair[1]]
    assert wrong == []
    assert torch.equal(left.view(torch.int32), expected.view(torch.int32))
    return payload


@pytest.mark.parametrize(("k", "beta"), [(64, 0.95), (1, 1.0), (128, 0.0)])
def test_encoding_gives_the_cpus_bytes_and_residual(k, beta):
    same(*arms(k), beta, k)


def test_encoding_gives_the_plain_versions_bytes():
    residual, anchor, local = arms(9)
    residual[3, 7] = 0.0  # the plain version does not call -0.0 negative
    payload, left = on_gpu(residual, anchor, local, 1.0, 16)
    assert payload.hex() == feed(residual, anchor - local, 1.0, 16).hex()
    assert torch.equal(left, residual)


@settings(max_examples=4, deadline=None, database=None)
@given(st.data())
def test_any_values(data):
    """Few different values, so that ties are everywhere, zeros of both signs and the largest that are legal."""
    some = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-9, -1e-9, 0.3, -0.3, 1.0, 7.0, 1e19])
    values = np.array(data.draw(st.lists(some, min_size=2, max_size=6)), np.float32)
    drawn = np.random.default_rng(data.draw(st.integers(0, 999))).choice(values, (3, 2, 4096))
    same(*map(torch.from_numpy, drawn), data.draw(st.sampled_from([0.0, 0.95, 1.0])), data.draw(st.integers(1, 5)))


def test_slabs_are_put_together(monkeypatch):
    monkeypatch.setattr(gpu_encoding, "SLAB_CHUNKS", 3)
    same(*arms(1), 0.95, 5)


def test_golden_bytes():
    at = torch.arange(3 * 4096, dtype=torch.float64).view(3, 4096)
    values = ((at * at * 7 + at * 13) % 8191 - 4095) / 4095
    values[1] *= values[1].abs() ** 3
    values[2] = 0
    values, nothing = (values * 2.0**-9).float(), torch.zeros((3, 4096))
    found = {str(k): on_gpu(values, nothing, nothing, 1.0, k)[0].hex() for k in (1, 64)}
    golden = json.loads(GOLDEN.read_text())
    assert found == {k: golden[k] for k in found}


@pytest.mark.parametrize("bad", [float("nan"), 2.0**64])
def test_weights_that_are_not_sound_are_refused_and_nothing_is_lost(bad):
    residual, anchor, local = arms(2)
    local[4, 100] = bad
    there = [each.to(DEVICE, copy=True) for each in (residual, anchor, local)]
    with pytest.raises(Divergence, match="pseudo-gradient"):
        gpu_encoding.encode_into(there[2], *there, 0.95, Layout("sparse2", CHUNKS, 3))
    assert torch.equal(there[0].cpu(), residual)
    assert torch.equal(there[1].cpu(), anchor)


def test_a_residual_that_is_not_finite_is_refused():
    residual, anchor, local = arms(2)
    residual[0, 0] = float("inf")
    with pytest.raises(Divergence, match="error feedback"):
        on_gpu(residual, anchor, local, 0.95, 3)


@kernel
def halves(scale: tl.tensor, half: tl.tensor, units: tl.tensor, size: tl.constexpr) -> None:
    i = tl.arange(0, size)
    found = gpu_fitting.half_bits(tl.load(scale + i))
    tl.store(half + i, found)
    tl.store(units + i, gpu_fitting.units_of(found))


def test_scales_are_rounded_like_the_cpus():
    low = np.arange(0, 0x3C00, 23, dtype=np.uint16)
    every = low.view(np.float16).astype(np.float64)
    middle = (every + (low + np.uint16(1)).view(np.float16).astype(np.float64)) / 2
    odd = np.concatenate(
        [every, middle, np.nextafter(middle, 0), np.nextafter(middle, 1), middle * (1 + 2.0**-26)]
    )
    scales = np.concatenate([odd, [0.0, 1e-300, 2.0**-25, 2.0**-26, 1 - 2.0**-30, 1.0, 1.5, 1e300]])
    padded = np.zeros(4096)
    padded[: len(scales)] = scales
    half, units = (torch.zeros(4096, dtype=torch.int32, device=DEVICE) for _ in range(2))
    halves[(1,)](torch.from_numpy(padded).to(DEVICE), half, units, size=4096, **EXACT)
    single = np.empty(1, np.float32)
    expected = [fitting.half_bits(scale, single) for scale in padded]
    assert [(scale, a, b) for scale, a, b in zip(padded, half.tolist(), expected, strict=True) if a != b] == []
    assert units.tolist() == [fitting.units_of(each) for each in expected]


# --- the fold -----------------------------------------------------------------------------------


def payload_of(seed, k, chunks, scale=1e-3):
    values = torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * scale
    values[seed % chunks] = 0  # a chunk that says nothing
    return encode(values, k)


def same_update(members, chunks, k, step):
    found = gpu_folding.update_of(members, chunks, k, step, codec="sparse2", device=DEVICE)
    assert torch.equal(found.cpu(), folding.update_of(members, chunks, k, step, codec="sparse2"))


@pytest.mark.parametrize(("k", "members"), [(64, 1), (64, 8), (1, 3), (128, 3), (1000, 2)])
def test_the_fold_gives_the_cpus_bits(k, members, monkeypatch):
    """Some members cover some chunks only; a program takes more than one chunk."""
    monkeypatch.setattr(gpu_folding, "MOST_PROGRAMS", 2)
    rows = np.array([0, -1, 1, -1], np.int32)
    taken = [(1 + 90 * at % 255, payload_of(at, k, 4, 10.0 ** (at - 3))) for at in range(members)]
    taken += [(200, payload_of(at, k, 2), rows) for at in range(members // 3)]
    same_update(taken, 4, k, STEP)


@settings(max_examples=6, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 255), st.integers(0, 20)), max_size=4),
    st.integers(1, 1024),
    st.integers(0, 256),
    st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
)
def test_the_fold_gives_the_cpus_bits_for_any_weights_and_steps(drawn, alpha_256, floor_256, scale):
    members = [(weight, payload_of(seed, 64, 2, scale)) for weight, seed in drawn]
    same_update(members, 2, 64, OuterStep(alpha_256, floor_256))


def test_theta_moves_in_the_same_pass_and_leaves_its_range_as_divergence():
    members = [(64, payload_of(1, 64, 3, 1.0)), (3, payload_of(2, 64, 3, 1.0))]
    update = folding.update_of(members, 3, 64, STEP, codec="sparse2")
    edge = torch.where(update > 0, -(2**31), 2**31 - 1).to(torch.int32)
    for theta in (torch.randint(-(2**30), 2**30, (3, 4096), dtype=torch.int32), edge):
        there, out = theta.to(DEVICE), torch.empty_like(theta, device=DEVICE)
        gpu_folding.fold_into(there, members, 64, STEP, out, codec="sparse2")
        assert torch.equal(out.cpu(), theta + update)
        assert torch.equal(there.cpu(), theta)
    there = torch.where(update > 0, 2**31 - 1, 0).to(torch.int32).to(DEVICE)
    with pytest.raises(Divergence):
        gpu_folding.fold_into(there, members, 64, STEP, torch.empty_like(there), codec="sparse2")


def answer(reader):
    try:
        reader()
    except DecodeError as error:
        return str(error)
    return "taken"


@settings(max_examples=20, deadline=None, database=None)
@given(st.data())
def test_refuses_exactly_what_the_cpu_refuses_with_its_words(data):
    k = data.draw(st.sampled_from([1, 3, 64, 65]))
    layout = Layout("sparse2", 1, k)
    values = torch.randn((1, 4096), generator=torch.Generator().manual_seed(k))
    raw = bytearray(encode(values * data.draw(st.sampled_from([0.0, 1e-3, 1e3])), k))
    kind = data.draw(st.sampled_from(["flip", "section", "random"]))
    random = data.draw(st.randoms(use_true_random=False))
    if kind == "flip":
        for _ in range(data.draw(st.integers(0, 2))):
            raw[data.draw(st.integers(HEADER_BYTES, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "section":
        at = data.draw(st.integers(0, 3))
        start, size = layout.offsets[at], layout.row_bytes[at]
        raw[start : start + size] = data.draw(
            st.sampled_from([bytes(size), b"\xff" * size, random.randbytes(size)])
        )
    else:
        raw[HEADER_BYTES:] = random.randbytes(len(raw) - HEADER_BYTES)
    bad = bytes(raw)
    found = answer(lambda: gpu_folding.update_of([(1, bad)], 1, k, STEP, codec="sparse2", device=DEVICE))
    assert found == answer(lambda: folding.update_of([(1, bad)], 1, k, STEP, codec="sparse2"))
    assert (found == "taken") == (answer(lambda: decode(bad, 1, k)) == "taken")


@pytest.mark.parametrize("places", [(0, 1, 2), (0, 2, 2), (5, 4, 6), (0, 0, 1), (3, 3, 3), (1, 2, 1023)])
def test_indices_rise_strictly(places):
    """Three indices of one high part, 10 low bits each."""
    layout, values = Layout("sparse2", 1, 3), torch.zeros((1, 4096))
    values[0, :3] = torch.tensor([1e-3, 1e-3, 3e-3])
    raw, at = bytearray(encode(values, 3)), layout.offsets[1]
    raw[at : at + 4] = sum(place << 10 * i for i, place in enumerate(places)).to_bytes(4, "little")
    found = answer(lambda: gpu_folding.update_of([(1, raw)], 1, 3, STEP, codec="sparse2", device=DEVICE))
    assert found == answer(lambda: folding.update_of([(1, raw)], 1, 3, STEP, codec="sparse2"))
    assert (found == "taken") == (places[0] < places[1] < places[2])


@pytest.mark.parametrize("weights", [[0], [256], [1] * 1025])
def test_illegal_sets_are_refused(weights):
    each = payload_of(1, 1, 1)
    with pytest.raises(DecodeError):
        gpu_folding.update_of([(weight, each) for weight in weights], 1, 1, STEP, codec="sparse2", device=DEVICE)


def test_the_bench_runs_and_finds_no_difference(monkeypatch):
    monkeypatch.setattr(gpu_pace, "K", 2)
    monkeypatch.setattr(gpu_pace, "PEERS", 1)
    monkeypatch.setattr(pace, "K", 2)
    paces = gpu_pace.measure(2, 1, 1, lambda line: None, DEVICE.type)
    assert paces.differs == []
    assert [len(paces.seconds[name]) for name in ("encode", "fold published", "fold: memcpy", "fetch")] == [1] * 4


def test_nobody_is_no_step():
    same_update([], 2, 64, STEP)
