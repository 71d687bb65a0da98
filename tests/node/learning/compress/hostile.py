"""A process of its own, whose kernels look at every index (NUMBA_BOUNDSCHECK=1): bytes that a peer might send.

Each payload is judged by the compiled reader and by the slow one; what both take has one byte string.
"""

import contextlib
import sys
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.kernels.compiled import compiled
from atoll.protocols.errors import DecodeError
from atoll.protocols.run.payload import DENSE_BLOCK, NUMBERS, Layout
from tests.node.learning.compress.honest import CHUNKS
from tests.plain.codecs import Refused, decode, encode
from tests.plain.folds import apply_update

torch.set_num_threads(1)
NOTHING = torch.zeros((CHUNKS, 4096), dtype=torch.int32)
SPARSE_K = (1, 2, 3, 7, 8, 9, 15, 16, 63, 64, 65, 127, 1000, 2047, 2048, 2049, 4095, 4096)
SCALES = (
    0,
    1,
    2,
    0x3FF,
    0x400,
    0x2E00,
    0x2E01,
    0x3200,
    0x3201,
    0x3C00,
    0x3C01,
    0x7C00,
    0x7E00,
    0x8000,
    0x8001,
    0xFFFF,
)
"""Subnormal, the bounds of each codec and what is above them, infinity, NaN, minus zero, negative."""
SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), max_examples=int(sys.argv[1])
)
codecs = st.one_of(
    st.sampled_from(sorted(DENSE_BLOCK)).map(lambda name: (name, 4096)),
    st.tuples(st.sampled_from(sorted(NUMBERS.keys() - DENSE_BLOCK.keys())), st.sampled_from(SPARSE_K)),
)


@cache
def honest(name: str, k: int, seed: int) -> bytes:
    """What an encoder writes, from the test that started this: encoders read no bytes of a peer.

    To compile them with checks would take as long as the readers.
    """
    print("honest", name, k, seed, flush=True)
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    return sys.stdin.buffer.read(size)


def judged(name: str, k: int, payload: bytes) -> None:
    """Compiled and slow reader agree; what they take is the only form of its values."""
    codec = codec_of(name, k)
    try:
        q = decode(payload, name, CHUNKS, k)[0]
    except (DecodeError, Refused):
        q = None
    good = (7, honest(name, k, 0))
    residual = torch.zeros((CHUNKS, 4096))
    for read in (
        lambda: codec.check(payload, CHUNKS),
        lambda: apply_update(codec, NOTHING, [good, (255, payload)], OuterStep(1024, 64)),
        lambda: codec.give_back(residual, payload),
    ):
        try:
            read()
            taken = True
        except DecodeError:
            taken = False
        assert taken == (q is not None), (name, k)
    if q is None:
        assert not residual.any()
    else:
        assert torch.equal(residual, q.float() * 2.0**-26)
        assert encode(q, name, k) == payload, (name, k)


@SETTINGS
@given(codecs, st.randoms(use_true_random=False), st.sampled_from(["random", "zeros", "ones", "full"]))
def bodies(codec, random, kind):
    """Nothing but the header is right."""
    layout = Layout(codec[0], CHUNKS, codec[1])
    size = layout.size_bytes - len(layout.header)
    fill = {"zeros": b"\0", "ones": b"\x01", "full": b"\xff"}
    body = random.randbytes(size) if kind == "random" else fill[kind] * size
    judged(*codec, layout.header + body)


@SETTINGS
@given(codecs, st.integers(0, 200), st.randoms(use_true_random=False), st.data())
def sections(codec, seed, random, data):
    """One section of an honest payload is something else."""
    payload, layout = bytearray(honest(*codec, seed)), Layout(codec[0], CHUNKS, codec[1])
    at = data.draw(st.integers(0, len(layout.row_bytes) - 1))
    start, size = layout.offsets[at], CHUNKS * layout.row_bytes[at]
    kind = data.draw(st.sampled_from(["random", "zeros", "full", "shifted", "dense", "swapped"]))
    old = bytes(payload[start : start + size])
    new = {
        "random": lambda: random.randbytes(size),
        "zeros": lambda: bytes(size),
        "full": lambda: b"\xff" * size,
        "shifted": lambda: old[1:] + old[:1],
        "dense": lambda: bytes(byte | 1 << random.randrange(8) for byte in old),
        "swapped": lambda: old[size // 2 :] + old[: size // 2],
    }[kind]()
    payload[start : start + size] = new[:size]
    judged(*codec, bytes(payload))


@SETTINGS
@given(codecs, st.integers(0, 200), st.sampled_from(SCALES), st.integers(0, 3), st.data())
def scales(codec, seed, scale, shape, data):
    """Scales that no encoder writes, in blocks that are otherwise whole."""
    payload, layout = bytearray(honest(*codec, seed)), Layout(codec[0], CHUNKS, codec[1])
    at = layout.offsets[0] + 2 * data.draw(st.integers(0, CHUNKS * layout.row_bytes[0] // 2 - 1))
    old = int.from_bytes(payload[at : at + 2], "little")
    new = data.draw(st.sampled_from([scale, scale | shape << 14, old & 0x3FFF | shape << 14, old ^ 1]))
    payload[at : at + 2] = (new & 0xFFFF).to_bytes(2, "little")
    judged(*codec, bytes(payload))


@SETTINGS
@given(codecs, st.integers(0, 200), st.data())
def bits(codec, seed, data):
    """Flipped bits, and cuts."""
    payload = bytearray(honest(*codec, seed))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.just(len(payload)) | st.integers(0, len(payload) + 9))
    judged(*codec, bytes(payload[:cut]) + bytes(max(0, cut - len(payload))))


@compiled
def value_at(values: Any, at: Any) -> Any:
    """What a kernel does with an index that nobody bounded."""
    return values[np.uint64(at)]


def main() -> None:
    with contextlib.suppress(IndexError):
        sys.exit(f"indices are not looked at: {value_at(np.zeros(4, np.uint8), 4)}")
    for attack in (bodies, sections, scales, bits):
        attack()
        print(attack.__name__, "stood", flush=True)


if __name__ == "__main__":
    main()
