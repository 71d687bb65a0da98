"""The codec `sparse2`: exact selection, least error, one byte string per value, and no trust."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.ids import digest
from atoll.protocols.run.payload import HEADER_BYTES, HIGH_LEVELS, LOW_LEVEL, ONE_FP16, Layout, payload_bytes
from tests.plain.quantise import fit, levels, scale_units
from tests.plain.select import top_k
from tests.plain.sparse2 import decode, dequantise, encode

torch.set_num_threads(1)
KS = [1, 2, 3, 63, 64, 65, 128, 1000, 4096]
ROOT = Path(__file__).parents[4]
GOLDEN = Path(__file__).parents[3] / "golden" / "payload.json"


def noise(chunks, seed, scale=1e-3):
    return torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * scale


def reference_top_k(row, k):
    order = sorted(range(len(row)), key=lambda at: (-abs(row[at]), at))
    return sorted(order[:k])


@pytest.mark.parametrize("k", KS)
def test_selection_is_exact_and_breaks_ties_by_lower_index(k):
    values = torch.stack(
        [
            noise(1, 1)[0],
            torch.zeros(4096),
            torch.ones(4096) * -2.0,
            torch.randint(-3, 4, (4096,), generator=torch.Generator().manual_seed(2)).float(),
            torch.tensor([0.0, -0.0] * 2048),
            torch.cat([torch.tensor([1e-45, -3e38, 3e38]), torch.zeros(4093)]),
        ]
    )
    found = top_k(values, k)
    for row, index in zip(values.tolist(), found.tolist(), strict=True):
        assert index == reference_top_k(row, k)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("chunks", [1, 2, 300])
def test_round_trip_keeps_indices_and_signs_and_has_the_legal_size(k, chunks):
    values = noise(chunks, k + chunks)
    payload = encode(values, k)
    assert len(payload) == payload_bytes("sparse2", chunks, k)
    index, q = decode(payload, chunks, k)
    assert torch.equal(index, top_k(values, k))
    assert torch.equal(q.sign().float(), values.gather(1, index).sign())
    dense = dequantise(index, q, chunks)
    assert torch.equal(dense.double().gather(1, index) * 2**26, q.double())  # float32 holds every q exactly
    assert encode(dense, k) == payload  # the decoded value is its own best approximation: one fixed point


def test_every_scale_is_a_whole_number_of_units():
    words = torch.arange(ONE_FP16 + 1)
    expected = words.to(torch.int16).view(torch.float16).double() * 2**24
    assert torch.equal(scale_units(words).double(), expected)
    assert int(scale_units(words).max()) == 1 << 24


def brute_force_error(values):
    """Least squared error over every shape and split, straight from the definition."""
    size = values.abs().double().sort().values
    best = float("inf")
    for high in HIGH_LEVELS:
        for small in range(1, len(size) + 1):
            level = torch.tensor([LOW_LEVEL] * small + [high] * (len(size) - small), dtype=torch.float64) / 4
            scale = (level @ size) / (level @ level)
            best = min(best, float(((size - scale * level) ** 2).sum()))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_fit_has_the_least_error(seed):
    values = noise(1, seed, 1.0)[0, :9] ** (1 + seed % 3) * 1e-2
    word, code = fit(values[None])
    error = float(((levels(word, code)[0].double() * 2.0**-26 - values.double()) ** 2).sum())
    assert error <= brute_force_error(values) * 1.02 + 1e-18  # fp16 rounds the scale


def sampled(kind):
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn((256, 4096), generator=generator)
    uniform = torch.rand((256, 4096), generator=generator).clamp(1e-7)
    if kind == "laplace":
        return -uniform.log() * normal.sign()
    if kind == "student4":
        return normal / ((-2 * (uniform * torch.rand((256, 4096), generator=generator)).log()) / 4).sqrt()
    if kind == "blocks":
        return normal * torch.randn((256, 1), generator=generator).exp()
    return normal


def reference_error(values):
    """SparseLoCo's quantiser as coded: per tensor, four bins of 1.5 σ, decoded to the means of the bins."""
    shift = values.mean()
    code = ((values - shift) / (1.5 * values.std()) + 2).round().clamp(0, 3)
    out = torch.zeros_like(values)
    for each in range(4):
        chosen = code == each
        if chosen.any():
            out[chosen] = values[chosen].mean()
    return float(((out - values) ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize("kind", ["gauss", "laplace", "student4", "blocks"])
def test_error_is_at_most_a_third_of_the_reference(kind):
    values = sampled(kind) * 1e-3
    index, q = decode(encode(values, 64), 256, 64)
    chosen = values.gather(1, index)
    ours = float((((q * 2.0**-26) - chosen) ** 2).sum() / (chosen**2).sum())
    reference = reference_error(chosen)
    print(f"{kind}: ours {ours:.4f}, reference {reference:.4f}, ratio {ours / reference:.3f}")
    assert ours <= reference / 3


def test_silent_huge_and_tiny_chunks():
    values = torch.zeros((4, 4096))
    values[1] = 1e30
    values[2] = 1e-30
    values[3, 5] = -1e-3
    index, q = decode(encode(values, 64), 4, 64)
    assert torch.equal(index[0], torch.arange(64))
    assert not q[0].any()
    assert torch.equal(q[1], torch.full((64,), 4 << 24))  # the cap: scale 1.0
    assert not q[2].any()
    assert int(q[3, 5]) < 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_divergence(bad):
    values = noise(2, 1)
    values[1, 4095] = bad
    with pytest.raises(Divergence):
        encode(values, 64)


def mutations(payload, layout):
    """Payloads that differ in one rule each."""

    def put(section, row, data):
        raw = bytearray(payload)
        at = layout.offsets[section] + row * layout.row_bytes[section]
        raw[at : at + len(data)] = data
        return bytes(raw)

    highs = payload[layout.offsets[2] : layout.offsets[2] + 16]
    codes = layout.row_bytes[3]
    yield "scale above 1", put(0, 0, (ONE_FP16 + 1).to_bytes(2, "little"))
    yield "negative zero", put(0, 1, (0x8000).to_bytes(2, "little"))
    yield "scale 0 of a chunk that speaks", put(0, 0, bytes(2))
    yield "popcount", put(2, 0, bytes([highs[0] ^ 1]))
    yield "no index", put(2, 0, bytes(16))
    yield "all indices equal", put(1, 0, bytes(48))
    yield "last unary bit: index 4096", put(2, 0, b"\xff" * 7 + b"\x7f" + bytes(7) + b"\x80")
    yield "only large values", put(3, 0, b"\x55" * codes)
    unused = bytearray(put(3, 0, bytes(codes)))
    unused[layout.offsets[0] + 1] |= 0x40
    yield "a shape that nothing uses", bytes(unused)
    yield "codes in a silent chunk", put(3, 1, b"\x02")
    yield "indices of a silent chunk", put(1, 1, b"\x01")


def test_every_rule_of_the_form_is_held():
    values = noise(2, 1)
    values[1] = 0
    layout = Layout("sparse2", 2, 64)
    payload = encode(values, 64)
    assert decode(payload, 2, 64)
    for rule, bad in mutations(payload, layout):
        assert is_refused(bad, 2, 64), rule


def is_refused(payload, chunks, k):
    try:
        decode(payload, chunks, k)
    except DecodeError:
        return True
    return False


def test_a_chunk_may_speak_of_its_first_indices():
    values = noise(1, 1)
    values[:, 64:] = 0
    payload = encode(values, 64)
    assert torch.equal(decode(payload, 1, 64).index_Ck[0], torch.arange(64))


@pytest.mark.parametrize("k", [1, 3, 63])
def test_padding_bits_are_zero(k):
    layout = Layout("sparse2", 1, k)
    payload = encode(noise(1, k), k)
    used = (k * layout.low_bits, layout.high_bits, 2 * k)
    for section, bits in zip((1, 2, 3), used, strict=True):
        for bit in range(bits, 8 * layout.row_bytes[section]):
            raw = bytearray(payload)
            raw[layout.offsets[section] + bit // 8] ^= 1 << bit % 8
            with pytest.raises(DecodeError):
                decode(bytes(raw), 1, k)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutations_are_refused_or_another_canonical_payload(data):
    k = data.draw(st.sampled_from([1, 3, 8, 64]))
    raw = bytearray(encode(noise(3, data.draw(st.integers(0, 3))), k))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    try:
        index, q = decode(bytes(raw[:cut]), 3, k)
    except DecodeError:
        return
    assert encode(dequantise(index, q, 3), k) == raw


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_bodies_are_refused_or_canonical(data):
    k = data.draw(st.sampled_from([1, 2, 4096]))
    layout = Layout("sparse2", 1, k)
    body = data.draw(st.randoms(use_true_random=False)).randbytes(layout.size_bytes - HEADER_BYTES)
    try:
        index, q = decode(layout.header + body, 1, k)
    except DecodeError:
        return
    assert encode(dequantise(index, q, 1), k) == layout.header + body


def golden_values():
    """Values whose payload does not depend on a random generator: a quadratic residue pattern."""
    at = torch.arange(3 * 4096, dtype=torch.float64).view(3, 4096)
    values = ((at * at * 7 + at * 13) % 8191 - 4095) / 4095
    values[1] *= values[1].abs() ** 3
    values[2] = 0
    return (values * 2.0**-9).float()


def golden():
    """The content of tests/golden/payload.json."""
    found = {str(k): encode(golden_values(), k).hex() for k in (1, 3, 64)}
    return found | {"1000": digest(encode(golden_values(), 1000)).hex()}


def test_golden_payloads():
    found = golden()
    assert found == json.loads(GOLDEN.read_text())
    index, _ = decode(bytes.fromhex(found["64"]), 3, 64)
    assert torch.equal(
        index,
        top_k(golden_values(), 64) * torch.tensor([[1], [1], [0]])
        + torch.arange(64) * torch.tensor([[0], [0], [1]]),
    )


PRINT = """
import torch
torch.set_num_threads(2)
from tests.plain.sparse2 import encode
from atoll.protocols.ids import digest
values = torch.randn((300, 4096), generator=torch.Generator().manual_seed(5)) * 1e-3
print(digest(encode(values, 64)).hex())
"""


def test_bytes_do_not_depend_on_threads_or_vector_units():
    values = torch.randn((300, 4096), generator=torch.Generator().manual_seed(5)) * 1e-3
    env = dict(os.environ) | {"ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", PRINT]
    plain = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=ROOT)
    assert plain.stdout.strip() == digest(encode(values, 64)).hex()
