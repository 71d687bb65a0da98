"""Generates `synthetic:markov`: text of known entropy from a seed, with the same bytes on every machine.

The text is a chain of order 2 over 16 letters with integer transition weights out of 2¹⁶. No model gets below the
chain's entropy rate, and a model that learns gets near it.
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
"""Number of chains that are generated in parallel and then concatenated."""
MAX_BYTES = 1 << 30


class MarkovSource(msgspec.Struct, frozen=True):
    """Parameters of a synthetic text."""

    seed: int = 1
    size: int = 1 << 20
    """Bytes of training text."""


def parse_markov(source: str) -> MarkovSource:
    """Parse `synthetic:markov?seed=1&size=1048576`. Raises ConfigError."""
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


def markov_texts(source: MarkovSource) -> tuple[bytes, bytes]:
    """Training text of `size` bytes, and validation text of an eighth of that, at most 1 MiB."""
    return generate(source, 0, source.size), generate(source, 1, min(source.size // 8, 1 << 20))


def weights(source: MarkovSource) -> NDArray[np.int64]:
    """Transition weights `[16, 16, 16]`, int64, by (before last, last, next); each row sums to 2¹⁶.

    Weights are products of uniform 16-bit numbers, so that a few letters have most of the probability.
    """
    raw = np.random.Philox(key=source.seed).random_raw(_N**3).astype(np.uint64)
    fields = [(raw >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32)]
    peaked = ((fields[0] * fields[1] >> 16) * fields[2] >> 16).reshape(_N, _N, _N)
    peaked = (peaked * peaked >> 16) + 1
    scaled: NDArray[np.int64] = peaked * (_TOTAL - _N) // peaked.sum(axis=2, keepdims=True) + 1
    scaled[:, :, 0] += _TOTAL - scaled.sum(axis=2)
    return scaled


def generate(source: MarkovSource, part: int, size: int) -> bytes:
    """`size` bytes of part 0 (training) or 1 (validation); the parts are independent."""
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
