"""`synthetic:markov`: text of known entropy, made from a seed. No file, no download, the same everywhere.

A chain of order 2 over 16 letters with integer transition weights out of 2¹⁶. The model's loss can be
compared with `entropy_bits_per_byte`: nobody gets below it, and whoever learns gets near it.
"""

from urllib.parse import parse_qsl

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.protocols.errors import ConfigError

LETTERS = b"etaoinshrdlu ,.\n"
_N = len(LETTERS)
_TOTAL = 1 << 16
CHAINS = 512
"""Chains that are advanced side by side and laid end to end."""
MAX_BYTES = 1 << 30


class MarkovSource(msgspec.Struct, frozen=True):
    """Parameters of a synthetic text."""

    seed: int = 1
    size: int = 1 << 20
    """Bytes of training text."""


def parse(source: str) -> MarkovSource:
    """The parameters of `synthetic:markov?seed=1&size=1048576`. Raises ConfigError."""
    try:
        found = {
            key: int(value) for key, value in parse_qsl(source.partition("?")[2], strict_parsing="?" in source)
        }
        parsed = (msgspec.convert(found, type=dict[str, int]) and MarkovSource(**found)) or MarkovSource()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"unreadable data source {source!r}", hint="use synthetic:markov?seed=1&size=1048576"
        ) from error
    if not (0 <= parsed.seed < 1 << 63 and CHAINS * 8 <= parsed.size <= MAX_BYTES):
        raise ConfigError(f"{source!r} is out of range", hint=f"size must be {CHAINS * 8} … {MAX_BYTES}")
    return parsed


def texts(source: MarkovSource) -> tuple[bytes, bytes]:
    """Train text of `size` bytes and validation text of an eighth of it, at most 1 MiB."""
    return generate(source, 0, source.size), generate(source, 1, min(source.size // 8, 1 << 20))


def weights(source: MarkovSource) -> NDArray[np.int64]:
    """Transition weights `[16, 16, 16]` (before last, last, next); each row sums to 2¹⁶.

    Peaked rows: weights are products of raw 16-bit numbers, so that a few letters take most of the mass.
    """
    raw = np.random.Philox(key=source.seed).random_raw(_N**3).astype(np.uint64)
    fields = [(raw >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32)]
    peaked = ((fields[0] * fields[1] >> 16) * fields[2] >> 16).reshape(_N, _N, _N)
    peaked = (peaked * peaked >> 16) + 1
    scaled: NDArray[np.int64] = peaked * (_TOTAL - _N) // peaked.sum(axis=2, keepdims=True) + 1
    scaled[:, :, 0] += _TOTAL - scaled.sum(axis=2)
    return scaled


def generate(source: MarkovSource, part: int, size: int) -> bytes:
    """`size` bytes of part 0 (train) or 1 (validation); parts are independent."""
    edges = weights(source).cumsum(axis=2)
    length = -(-size // CHAINS)
    raw = np.random.Philox(key=source.seed + ((part + 1) << 64)).random_raw(length * CHAINS)
    draws = (raw & np.uint64(_TOTAL - 1)).astype(np.int64).reshape(length, CHAINS)
    out = np.empty((length, CHAINS), np.int64)
    before = np.arange(CHAINS) % _N
    last = np.arange(CHAINS) // _N % _N
    for at in range(length):
        drawn = (edges[before, last] <= draws[at][:, None]).sum(axis=1)
        out[at] = drawn
        before, last = last, drawn
    return np.frombuffer(LETTERS, np.uint8)[out.T.reshape(-1)[:size]].tobytes()


def entropy_bits_per_byte(source: MarkovSource) -> float:
    """Entropy rate of the chain: Σ stationary(state) · H(next | state)."""
    share = weights(source) / _TOTAL
    state = np.full((_N, _N), 1 / _N**2)
    for _ in range(500):
        state = np.einsum("ab,abc->bc", state, share)
    return float(-(state[:, :, None] * share * np.log2(share)).sum())
