"""Bytes that are nearly legal: mutations of examples. Pure: the generator of randomness is an argument."""

import random
from collections.abc import Sequence

HEADS = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcb\x7f\xf0" + b"\0" * 6,
    b"\xca\x7f\xc0\0\0", b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x91" * 200,
    b"\xc7\x01\x05\0", b"\xa1\xff", b"\xa3\xed\xa0\x80",
)  # fmt: skip
"""msgpack's largest lengths and numbers, NaN, nil, what is never used, booleans, depth, ext, no UTF-8."""
BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def mutated(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """One example after one to four changes."""
    data = bytearray(rng.choice(examples))
    for _ in range(rng.randint(1, 4)):
        rng.choice(_CHANGES)(rng, data, examples)
    return bytes(data)


def _at(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((*BYTES, rng.randrange(256)))


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    del data[start : start + rng.choice((1, 2, 8, len(data)))]


def _double(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    data[start:start] = data[start : start + rng.choice((1, 4, 32))]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    data[start:start] = rng.choice((*HEADS, rng.randbytes(rng.randint(1, 9))))


def _replace(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = _at(rng, data)
    data[start : start + 1] = rng.choice(HEADS)


def _splice(rng: random.Random, data: bytearray, examples: Sequence[bytes]) -> None:
    other = rng.choice(examples)
    data[_at(rng, data) :] = other[rng.randrange(len(other) + 1) :]


_CHANGES = (_flip, _set, _cut, _double, _insert, _replace, _splice)
