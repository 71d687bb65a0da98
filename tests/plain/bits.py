"""Bit fields of a payload <-> integer arrays, for many chunks at once. Refuses bits that nobody writes."""

import numpy as np
import numpy.typing as npt

from atoll.protocols.errors import DecodeError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def pack_fields(value_Ck: Ints, width: int) -> Bytes:
    """`[C, bytes]`: the low `width` bits of each value, one after the other."""
    shifts = np.arange(width, dtype=np.int64)
    bits = ((value_Ck[:, :, None] >> shifts) & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(value_Ck), -1), axis=1, bitorder="little")


def unpack_fields(rows: Bytes, k: int, width: int) -> Ints:
    """Inverse of `pack_fields`. Raises DecodeError for padding that is not zero."""
    bits = _bits(rows, k * width).reshape(len(rows), k, width)
    value = np.zeros((len(rows), k), np.int64)
    for place in range(width):
        value |= bits[:, :, place].astype(np.int64) << place
    return value


def pack_unary(high_Ck: Ints, bits: int) -> Bytes:
    """`[C, bytes]`: bit `high_i + i` set for the i-th of rising values."""
    out = np.zeros((len(high_Ck), bits), np.uint8)
    np.put_along_axis(out, high_Ck + np.arange(high_Ck.shape[1]), 1, axis=1)
    return np.packbits(out, axis=1, bitorder="little")


def unpack_unary(rows: Bytes, k: int, bits: int) -> Ints:
    """Inverse of `pack_unary`; values do not fall. Raises DecodeError unless k bits are set."""
    flags = _bits(rows, bits)
    if np.any(flags.sum(axis=1, dtype=np.int64) != k):
        raise DecodeError(f"payload: a chunk does not have {k} indices")
    place: Ints = np.nonzero(flags)[1].reshape(len(rows), k)
    return place - np.arange(k)


def _bits(rows: Bytes, used: int) -> Bytes:
    bits = np.unpackbits(rows, axis=1, bitorder="little")
    if bits[:, used:].any():
        raise DecodeError("payload: padding bits are not zero")
    return bits[:, :used]
