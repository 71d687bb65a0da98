"""Every codec read and written the slow way, in whole numbers, from the text of the wire page: q, and who sent.

`encode` is the inverse of `decode`, not a compressor: it takes only what `decode` can give.
"""

import numpy as np
import torch

from atoll.protocols.run.payload import DENSE_BLOCK, HIGH_LEVELS, MOST_SCALE, TOP_LEVEL, Layout, check_frame
from tests.plain import bits
from tests.plain.quantise import scale_units
from tests.plain.sparse2 import decode as decode_sparse2


class Refused(Exception):
    """Not a legal payload."""


def decode(payload, codec, chunks, k):
    """`q` int64 `[chunks, 4096]` and bool `[chunks, 4096]`: sent. Raises DecodeError or Refused."""
    if codec == "sparse2":
        return _spread(*decode_sparse2(payload, chunks, k), chunks)
    layout = Layout(codec, chunks, k)
    check_frame(payload, layout)
    sections = [
        np.frombuffer(payload, np.uint8, chunks * row, at).reshape(chunks, row)
        for at, row in zip(layout.offsets, layout.row_bytes, strict=True)
    ]
    return {"sparse1": _sparse1, "lookup2": _lookup2}.get(codec, _dense)(sections, layout)


def _spread(index, q, chunks):
    whole = torch.zeros((chunks, 4096), dtype=torch.int64).scatter_(1, index, q)
    return whole, whole != 0


def _sparse1(sections, layout):
    words, lows, highs, codes = sections
    word = words.copy().view("<u2")[:, 0].astype(np.int64)
    index = bits.unpack_unary(highs, layout.k, layout.high_bits) << layout.low_bits
    index |= bits.unpack_fields(lows, layout.k, layout.low_bits)
    sign = bits.unpack_fields(codes, layout.k, 1)
    for chunk in range(layout.chunks):
        rising = (np.diff(index[chunk]) > 0).all() and index[chunk, -1] < 4096
        empty = not sign[chunk].any() and (index[chunk] == np.arange(layout.k)).all()
        if word[chunk] > MOST_SCALE["sparse1"] or not rising or (word[chunk] == 0 and not empty):
            raise Refused
    units = scale_units(torch.from_numpy(word))[:, None] * 4
    q = torch.where(torch.from_numpy(sign) == 1, -units, units)
    return _spread(torch.from_numpy(index), q, layout.chunks)


def _lookup2(sections, layout):
    tables, lows, highs, codes = sections
    word = torch.from_numpy(tables.copy().view("<u2").astype(np.int64))
    size = word & 0x7FFF
    if bool((size > MOST_SCALE["lookup2"]).any()) or bool((word == 0x8000).any()):
        raise Refused
    units = torch.where(word > 0x7FFF, -scale_units(size), scale_units(size))
    index = bits.unpack_unary(highs, layout.k, layout.high_bits) << layout.low_bits
    index |= bits.unpack_fields(lows, layout.k, layout.low_bits)
    code = bits.unpack_fields(codes, layout.k, 2)
    for chunk in range(layout.chunks):
        row = units[chunk].tolist()
        entries = row[: row.index(0)] if 0 in row else row
        empty = not entries and not code[chunk].any() and (index[chunk] == np.arange(layout.k)).all()
        rising = (np.diff(index[chunk]) > 0).all() and index[chunk, -1] < 4096
        sound = entries == sorted(set(entries)) and not any(row[len(entries) :])
        if not rising or not sound or not (empty or set(code[chunk].tolist()) == set(range(len(entries)))):
            raise Refused
    q = units.gather(1, torch.from_numpy(code)) * 4
    return _spread(torch.from_numpy(index), q, layout.chunks)


def _dense(sections, layout):
    scales, codes = sections
    word = scales.copy().view("<u2").astype(np.int64)
    if layout.codec == "int8":
        level = codes.copy().view(np.int8).astype(np.int64)
        strange = level == -128
    else:
        nibble = np.stack([codes & 15, codes >> 4], axis=2).reshape(layout.chunks, 4096).astype(np.int64)
        level = ((1 << (nibble & 7)) >> 1) * np.where(nibble & 8, -1, 1)
        strange = nibble == 8
    block = DENSE_BLOCK[layout.codec]
    most = np.abs(level).reshape(layout.chunks, -1, block).max(axis=2)
    legal = (word <= MOST_SCALE[layout.codec]) & (most == np.where(word, TOP_LEVEL[layout.codec], 0))
    if strange.any() or not legal.all():
        raise Refused
    units = scale_units(torch.from_numpy(word)).repeat_interleave(block, dim=1)
    return torch.from_numpy(level) * units, units > 0


def encode(q, codec, k):
    """The one payload that says `q` int64 `[chunks, 4096]`, units of 2⁻²⁶."""
    layout = Layout(codec, len(q), k)
    parts = [[] for _ in layout.row_bytes]
    for row in q.tolist():
        made = _dense_row(row, layout) if layout.is_dense else _sparse_row(row, layout)
        for part, size, more in zip(parts, layout.row_bytes, made, strict=True):
            assert len(more) == size
            part.append(more)
    return layout.header + b"".join(b"".join(part) for part in parts)


def _sparse_row(row, layout):
    at = [place for place, value in enumerate(row) if value] or list(range(layout.k))
    assert len(at) == layout.k
    if layout.has_table:
        return _lookup_row(row, at, layout)
    small = min(abs(row[place]) for place in at)
    ratios = sorted({4 * abs(row[place]) // max(1, small) for place in at} - {0, 4})
    assert len(ratios) <= 1
    shape = HIGH_LEVELS.index(ratios[0]) if ratios else 0
    codes = [int(abs(row[place]) > small) | 2 * (row[place] < 0) for place in at]
    return (
        (_half(small // 4) | shape << 14).to_bytes(2, "little"),
        *_places(at, layout),
        _fields(codes if layout.code_bits == 2 else [code >> 1 for code in codes], layout.code_bits),
    )


def _lookup_row(row, at, layout):
    table = sorted({row[place] for place in at} - {0})
    halves = [_half(abs(value) // 4) | (0x8000 if value < 0 else 0) for value in table] + [0] * (4 - len(table))
    codes = [table.index(row[place]) if table else 0 for place in at]
    return b"".join(half.to_bytes(2, "little") for half in halves), *_places(at, layout), _fields(codes, 2)


def _places(at, layout):
    highs = [0] * layout.high_bits
    for i, place in enumerate(at):
        highs[(place >> layout.low_bits) + i] = 1
    return _fields([place % (1 << layout.low_bits) for place in at], layout.low_bits), _fields(highs, 1)


def _dense_row(row, layout):
    block, scales, codes = DENSE_BLOCK[layout.codec], b"", []
    for start in range(0, 4096, block):
        values = row[start : start + block]
        units = max(map(abs, values)) // TOP_LEVEL[layout.codec]
        scales += _half(units).to_bytes(2, "little")
        for value in values:
            level = abs(value) // max(1, units)
            code = level if layout.codec == "int8" else level.bit_length() | 8 * (value < 0)
            codes.append(-code % 256 if layout.codec == "int8" and value < 0 else code)
    return scales, _fields(codes, layout.code_bits)


def _half(units):
    """Bits of the fp16 of so many units of 2⁻²⁴."""
    found = np.float16(units * 2.0**-24)
    assert float(found) * 2**24 == units
    return int(found.view(np.uint16))


def _fields(values, width):
    bits_of = [value >> place & 1 for value in values for place in range(width)]
    return np.packbits(np.array(bits_of, np.uint8), bitorder="little").tobytes()
