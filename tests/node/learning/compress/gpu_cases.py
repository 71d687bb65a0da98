"""The GPU's kernels against the CPU's: same bytes, same e. `test_gpu.py` runs this.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which must be known before Triton is
imported: that is why this has a process of its own.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress import selecting as fitting
from atoll.node.learning.compress.gpu import encoding as gpu_encoding
from atoll.node.learning.compress.gpu import fitting as gpu_fitting
from atoll.node.learning.kernels.on_gpu import EXACT, kernel
from atoll.protocols.errors import Divergence
from atoll.protocols.run.payload import Layout
from atoll_bench.compress import codec_pace as pace
from atoll_bench.compress import gpu_pace
from tests.plain.feedback import feed
from tests.plain.folds import encode_residual

torch.set_num_threads(1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GOLDEN = Path(__file__).parents[3] / "golden" / "payload.json"
CHUNKS = 8


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
    payload = gpu_pace.encode_into(there[2], *there, beta, Layout("sparse2", len(residual), k))
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


# Not shrunk: in the interpreter that takes minutes, which a mutant does not have.
@settings(max_examples=4, deadline=None, database=None, phases=[Phase.generate])
@given(st.data())
def test_any_values(data):
    """Few different values, so that ties are everywhere, zeros of both signs and the largest that are legal."""
    some = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-9, -1e-9, 0.3, -0.3, 1.0, 7.0, 1e19])
    values = np.array(data.draw(st.lists(some, min_size=2, max_size=6)), np.float32)
    drawn = np.random.default_rng(data.draw(st.integers(0, 999))).choice(values, (3, 2, 4096))
    same(*map(torch.from_numpy, drawn), data.draw(st.sampled_from([0.0, 0.95, 1.0])), data.draw(st.integers(1, 5)))


@pytest.mark.parametrize("k", [16, 300])
def test_sizes_of_many_octaves_are_added_in_their_order(k):
    """Sums of these are rounded, so no other order will do; 300 wants vectors of 1024 candidates."""
    made = torch.Generator().manual_seed(k)
    octaves = torch.randint(-60, 60, (1, 4096), generator=made)
    residual = torch.exp2(octaves.float()) * (1 + torch.rand((1, 4096), generator=made))
    same(residual, torch.zeros((1, 4096)), torch.zeros((1, 4096)), 1.0, k)


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
        gpu_pace.encode_into(there[2], *there, 0.95, Layout("sparse2", CHUNKS, 3))
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


def test_the_bench_runs_and_finds_no_difference(monkeypatch):
    monkeypatch.setattr(gpu_pace, "K", 2)
    monkeypatch.setattr(pace, "K", 2)
    paces = gpu_pace.measure(2, 1, 1, lambda line: None, DEVICE.type)
    assert paces.differs == []
    names = ("encode", "encode published", "encode: memcpy", "fetch")
    assert [len(paces.seconds[name]) for name in names] == [1] * 4
