"""Layout of a payload: where each bit of a compressed pseudo-gradient lies, and how long it must be.

Header, then four arrays over all chunks (little endian; bit 0 of a byte is the lowest):

    header   "atlp" | u8 version | u8 codec | u16 k | u32 chunks
    words    u16 per chunk: bits 14-15 the shape, bits 0-13 the scale, an fp16 within 0 … 1
    lows     k × `low_bits` low bits of the indices of a chunk
    highs    the indices' high parts in unary (Elias-Fano): bit `high_i + i` is set for the i-th index
    codes    2 bits per value: bit 0 set means the large level, bit 1 set means negative

A value is ±level × scale / 4; level is `LOW_LEVEL` or `HIGH_LEVELS[shape]`. As an fp16 up to 1 is a
multiple of 2⁻²⁴, every value is an integer `q` in units of 2⁻²⁶. One byte string per value: see
`docs/wires/payload.md`. Elias-Fano: P. Elias 1974; SparseLoCo's selection: arXiv 2508.15706.
"""

import struct

import msgspec

from atoll.protocols.arena import CHUNK
from atoll.protocols.errors import DecodeError

MAGIC = b"atlp"
VERSION = 1
SPARSE2 = 1
"""Codec number of `sparse2`."""
LOW_LEVEL = 4
HIGH_LEVELS = (5, 6, 8, 12)
"""Large level by shape: Gaussian tails choose 5, Laplace 6, heavier ones 8 and 12 (docs/wires/payload.md)."""
VALUE_BITS = 26
"""A decoded `q` counts units of 2⁻²⁶."""
MAX_Q = HIGH_LEVELS[-1] << 24
"""Largest |q|: scale 1.0 at the largest level."""
ONE_FP16 = 0x3C00
"""Bits of the largest legal scale, 1.0."""
SCALE_MASK = 0x3FFF
SHAPE_SHIFT = 14
_HEADER = struct.Struct("<4sBBHI")
HEADER_BYTES = _HEADER.size


class Layout(msgspec.Struct, frozen=True):
    """Sizes of a payload of `chunks` chunks with `k` values each."""

    chunks: int
    k: int

    @property
    def low_bits(self) -> int:
        """Low bits of an index: floor(log2(4096 / k))."""
        return (CHUNK // self.k).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Bits of a chunk's unary part."""
        return self.k + (CHUNK >> self.low_bits)

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of one chunk in words, lows, highs and codes; each is filled up with zero bits."""
        return 2, _bytes(self.k * self.low_bits), _bytes(self.high_bits), _bytes(2 * self.k)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where words, lows, highs and codes begin."""
        words, lows, highs, _ = (row * self.chunks for row in self.row_bytes)
        at = HEADER_BYTES
        return at, at + words, at + words + lows, at + words + lows + highs

    @property
    def size_bytes(self) -> int:
        """The only legal length."""
        return HEADER_BYTES + self.chunks * sum(self.row_bytes)

    @property
    def header(self) -> bytes:
        """The only legal header."""
        return _HEADER.pack(MAGIC, VERSION, SPARSE2, self.k, self.chunks)


def payload_bytes(chunks: int, k: int) -> int:
    """Exact length of a payload: what a node may ask for before it saw a byte."""
    return Layout(chunks, k).size_bytes


def check_frame(payload: bytes | memoryview, layout: Layout) -> None:
    """Raise DecodeError unless length and header are the ones that the run prescribes."""
    if len(payload) != layout.size_bytes:
        raise DecodeError(f"payload of {len(payload)} bytes where {layout.size_bytes} are legal")
    if bytes(payload[:HEADER_BYTES]) != layout.header:
        raise DecodeError("payload: another magic, version, codec, chunk count or k")


def _bytes(bits: int) -> int:
    return -(-bits // 8)
