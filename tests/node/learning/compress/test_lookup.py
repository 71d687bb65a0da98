"""`lookup2` against SparseLoCo's quantiser as its authors coded it: codes, table, and what each tensor gets."""

import itertools

import numpy as np
import pytest
import torch

from atoll.node.learning.compress import lookup_encoding
from atoll.node.learning.compress.codecs import OnHost, codec_of
from atoll.node.learning.compress.folding import OuterStep, decode
from atoll.node.worker.encoding.slab_encoder import tensors_of
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.payload import Layout
from atoll_bench.compress.published import quantise
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
CHUNKS, K = 6, 64
LAYOUT = Layout("lookup2", CHUNKS, K)


def noise(seed, scale=1e-3):
    return torch.randn((CHUNKS, 4096), generator=torch.Generator().manual_seed(seed)) * scale


def heavy(seed):
    """Tails that reach all four bins."""
    return noise(seed) ** 3 * 1e4


def four():
    """Values in all four bins of every chunk."""
    values = torch.zeros((CHUNKS, 4096))
    values[:, :K] = torch.tensor([1.0] * 30 + [0.125] * 2 + [-1.25] * 30 + [-4.0] * 2) * 2.0**-8
    return values


def encoded(values, tensor_C=None, cuts=(0, CHUNKS)):
    """Payload and residual, filled in slabs."""
    payload, left, nothing = OnHost().begin(LAYOUT, tensor_C), values.clone(), torch.zeros_like(values)
    for start, stop in itertools.pairwise(cuts):
        payload.fill(start, left[start:stop], nothing[start:stop], nothing[start:stop], 1.0)
    return bytes(payload.whole()), left


@pytest.mark.parametrize("values", [noise(1), heavy(2), noise(3, 30.0)], ids=["Gaussian", "heavy", "large"])
def test_codes_and_values_are_those_of_the_published_code(values):
    chosen = values.gather(1, values.abs().topk(K, dim=1).indices.sort(dim=1).values)
    codes, halves = lookup_encoding.quantised(chosen.double().numpy().ravel())
    wanted, table = quantise(chosen)
    assert (codes == wanted.numpy().ravel()).mean() > 0.9999, "float32 sums may round one to the other side"
    for code in np.unique(codes):
        exact = float(table[code].clamp(-1, 1))
        found = float(np.uint16(halves[code]).view(np.float16))
        assert found == pytest.approx(exact, rel=1e-3, abs=1e-6)
    table_Ck = decode(encoded(values)[0], LAYOUT)
    assert len(np.unique(table_Ck.q_Ck.numpy())) == len(np.unique(codes))


def test_each_tensor_has_its_own_table_and_slabs_do_not_show():
    values = heavy(1)
    values[3:] *= 100
    one, _ = encoded(values)
    payload, left = encoded(values, [0, 0, 0, 1, 1, 1])
    parts, _ = encoded(values, [0, 0, 0, 1, 1, 1], cuts=(0, 1, 4, CHUNKS))
    assert payload == parts != one
    q = decode(payload, LAYOUT).q_Ck
    small, large = (set(q[rows].flatten().tolist()) for rows in (slice(0, 3), slice(3, 6)))
    assert len(small) <= 4
    assert len(large) <= 4
    assert not small & large
    back = torch.zeros_like(values)
    codec_of("lookup2", K).give_back(back, payload)
    assert torch.equal(left, values - back)


def test_the_tensors_of_a_cover_are_its_matrices_and_the_vectors_together():
    arena = arena_of(SPEC.model)
    found = tensors_of(arena, (Span(0, arena.chunks),))
    matrices = [place for place in arena.placements if len(place.shape) == 2]
    assert len(found) == arena.chunks
    assert len(set(found)) == len(matrices) + 1
    for place in matrices:
        assert len(set(found[place.first_chunk : place.first_chunk + place.blocks[0] * place.blocks[1]])) == 1
    assert tensors_of(arena, (Span(1, 3),)) == found[1:3]


def test_equal_and_tiny_values_are_sent_and_zeros_are_not():
    values = torch.zeros((CHUNKS, 4096))
    values[0] = 2.0**-10
    values[1] = 1e-9
    values[2] = -1e-9
    payload, _ = encoded(values, range(CHUNKS))
    q = decode(payload, LAYOUT).q_Ck
    assert bool((q[0] == 2**16).all()), "a tensor of one value has one entry"
    assert set(q[1].tolist()) == {4}, "the least value of its sign, never 0"
    assert set(q[2].tolist()) == {-4}
    assert not q[3:].any()


def test_senders_alone_divide_where_the_floor_is_a_256th():
    """`outer.floor_256` 1: the mean over senders, as the authors coded it, for up to 256 members of one weight."""
    payloads = [encoded(heavy(seed))[0] for seed in range(3)]
    nothing = torch.zeros((CHUNKS, 4096), dtype=torch.int32)
    codec = codec_of("lookup2", K)
    means = [codec.apply_update(nothing, [64] * 3, payloads, OuterStep(256, floor)) for floor in (0, 1)]
    assert torch.equal(*means)


def test_a_residual_that_is_not_finite_is_divergence():
    values = noise(1)
    values[2, 7] = float("inf")
    with pytest.raises(Divergence):
        encoded(values)


REFUSED = [
    (0, 0x3C01, "beyond its range"),
    (0, 0x8000, "beyond its range"),
    (1, 0, "behind its end"),
    (3, 0xBC00, "does not rise"),
]


@pytest.mark.parametrize(("entry", "half", "said"), REFUSED)
def test_a_table_that_nobody_writes_is_refused(entry, half, said):
    payload = bytearray(encoded(four())[0])
    at = LAYOUT.offsets[0] + 2 * entry
    assert int.from_bytes(payload[LAYOUT.offsets[0] + 6 : LAYOUT.offsets[0] + 8], "little"), "all four are used"
    payload[at : at + 2] = half.to_bytes(2, "little")
    with pytest.raises(DecodeError, match=said):
        codec_of("lookup2", K).check(bytes(payload), CHUNKS)


def test_an_entry_that_no_code_names_is_refused():
    payload = bytearray(encoded(four())[0])
    size = LAYOUT.row_bytes[3]
    payload[LAYOUT.offsets[3] : LAYOUT.offsets[3] + size] = bytes(size)
    with pytest.raises(DecodeError, match="a value without a code"):
        codec_of("lookup2", K).check(bytes(payload), CHUNKS)
