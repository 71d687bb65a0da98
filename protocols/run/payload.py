"""Layouts of a payload: where each bit of a compressed pseudo-gradient lies, and how long it must be.

Header, then one array over all chunks for each section (little endian; bit 0 of a byte is the lowest):

    header   "atlp" | u8 version | u8 codec | u16 k | u32 chunks

    sparse2, sparse1: k values of each chunk
    words    u16 per chunk: bits 14-15 the shape (sparse1: 0), bits 0-13 the scale, an fp16 within 0 … 1
    lows     k × `low_bits` low bits of the indices of a chunk
    highs    the indices' high parts in unary (Elias-Fano): bit `high_i + i` is set for the i-th index
    codes    sparse2: 2 bits per value, bit 0 set means the large level, bit 1 negative; sparse1: 1 bit, negative

    lookup2: as sparse2, but codes are numbers of entries, and the words
    tables   four u16 per chunk: fp16 within −1 … 1, rising, those that the chunk uses; then zeros

    int8, e3m0: all 4096 values
    scales   u16 per block: an fp16 within 0 … `most_scale`
    codes    int8: a signed byte per value; e3m0: 4 bits, magnitude in bits 0-2, bit 3 negative

    scalar: no values; one section, whatever the number of chunks
    scalars  a signed byte per inner step: how far the member went along that step's direction

A value is ±level × scale / 4. As such an fp16 is a multiple of 2⁻²⁴, every value is an integer `q` in units of
2⁻²⁶, and |q| ≤ 12·2²⁴. One byte string per value: see `docs/wires/payload.md`. Elias-Fano: P. Elias 1974;
selection and tables: SparseLoCo, arXiv 2508.15706; 4 bits with 3 of exponent: Streaming DiLoCo, arXiv 2501.18512.
"""

import struct

import msgspec

from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.wires import PAYLOAD

MAGIC = b"atlp"
VERSION = PAYLOAD.newest
NUMBERS = {"sparse2": 1, "sparse1": 2, "int8": 3, "e3m0": 4, "lookup2": 5}
"""Number of each codec of values in the header, by name."""
SCALAR = "scalar"
"""The codec that sends no values: directions follow from the RunSpec, the payload says how far along each."""
MAX_SCALARS = 512
"""Most scalars of a payload: sums of the fold have room for so many (node/learning/zeroth_order)."""
TOP_SCALAR = 127
"""Largest scalar; the least is its negative."""
_NUMBERS = NUMBERS | {SCALAR: 6}
DENSE_BLOCK = {"int8": 4096, "e3m0": 256}
"""Number of values that share a scale, by dense codec."""
LOW_LEVEL = 4
HIGH_LEVELS = (5, 6, 8, 12)
"""Large level by shape: 5 fits Gaussian tails, 6 Laplace, 8 and 12 heavier ones (docs/wires/payload.md)."""
TOP_LEVEL = {"int8": 127, "e3m0": 64}
"""Largest level, by dense codec; each block that is not silent has it at least once."""
MOST_SCALE = {"sparse2": 0x3C00, "sparse1": 0x3C00, "int8": 0x2E00, "e3m0": 0x3200, "lookup2": 0x3C00}
"""Bits of the largest legal fp16 scale, by codec: 1, 1, 3/32 and 3/16; of a table's value without its sign: 1."""
VALUE_BITS = 26
"""A decoded integer `q` is in units of 2⁻²⁶."""
MAX_Q = 12 << 24
"""Bound of |q| for every codec."""
ONE_FP16 = 0x3C00
"""Bits of 1.0 as an fp16."""
SCALE_MASK = 0x3FFF
SHAPE_SHIFT = 14
_HEADER = struct.Struct("<4sBBHI")
HEADER_BYTES = _HEADER.size


def check_codec(name: str, k: int) -> None:
    """Raise ConfigError for a codec that does not exist, or a k that it cannot have."""
    if name not in _NUMBERS:
        raise ConfigError(f"compress.codec {name!r} is not one of {', '.join(_NUMBERS)}")
    if name == SCALAR and not 1 <= k <= MAX_SCALARS:
        raise ConfigError(f"compress.k = {k} is outside 1 … {MAX_SCALARS}: a payload of scalar has k scalars")
    if not 1 <= k <= CHUNK:
        raise ConfigError(f"compress.k = {k} is outside 1 … {CHUNK}")
    if name in DENSE_BLOCK and k != CHUNK:
        raise ConfigError(f"compress.k = {k}: {name} keeps all {CHUNK} values of a chunk")


class Layout(msgspec.Struct, frozen=True):
    """Sizes of a payload of `chunks` chunks with `k` values each; with `scalar`, of k scalars in all."""

    codec: str
    chunks: int
    k: int

    @property
    def is_dense(self) -> bool:
        """Whether the codec sends all values of a chunk."""
        return self.codec in DENSE_BLOCK

    @property
    def is_scalar(self) -> bool:
        """Whether the payload has scalars in the place of values."""
        return self.codec == SCALAR

    @property
    def has_table(self) -> bool:
        """Whether a value is an entry of a table: then a tensor is quantised as a whole."""
        return self.codec == "lookup2"

    @property
    def low_bits(self) -> int:
        """Number of low bits of an index in a sparse codec, floor(log2(4096 / k))."""
        return (CHUNK // self.k).bit_length() - 1

    @property
    def high_bits(self) -> int:
        """Number of bits of a chunk's unary part in a sparse codec."""
        return self.k + (CHUNK >> self.low_bits)

    @property
    def code_bits(self) -> int:
        """Number of bits of one value's code."""
        return {"sparse2": 2, "sparse1": 1, "int8": 8, "e3m0": 4, "lookup2": 2}[self.codec]

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one chunk in each section; each section is padded with zero bits. Scalars are of no chunk."""
        if self.is_scalar:
            return ()
        codes = _bytes(self.code_bits * self.k)
        if self.is_dense:
            return 2 * CHUNK // DENSE_BLOCK[self.codec], codes
        return 8 if self.has_table else 2, _bytes(self.k * self.low_bits), _bytes(self.high_bits), codes

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset in bytes at which each section begins."""
        rows = self.row_bytes
        return tuple(HEADER_BYTES + self.chunks * sum(rows[:at]) for at in range(len(rows)))

    @property
    def size_bytes(self) -> int:
        """The only legal length of the payload, in bytes."""
        if self.is_scalar:
            return HEADER_BYTES + self.k
        return HEADER_BYTES + self.chunks * sum(self.row_bytes)

    @property
    def header(self) -> bytes:
        """The only legal header of the payload."""
        return _HEADER.pack(MAGIC, VERSION, _NUMBERS[self.codec], self.k, self.chunks)


def payload_bytes(codec: str, chunks: int, k: int) -> int:
    """Exact length of a payload in bytes, known before a byte arrives."""
    return Layout(codec, chunks, k).size_bytes


def check_frame(payload: bytes | memoryview, layout: Layout) -> None:
    """Raise DecodeError unless header and length are those that the run prescribes.

    The header is checked first: a payload of another version is likely to have another length, too.
    """
    header = bytes(payload[:HEADER_BYTES])
    if len(header) == HEADER_BYTES and header != layout.header:
        raise DecodeError(f"payload {_difference(header, layout)}")
    if len(payload) != layout.size_bytes:
        raise DecodeError(f"payload of {len(payload)} bytes where {layout.size_bytes} are legal")


def _difference(header: bytes, layout: Layout) -> str:
    """The first field of the header that is not the run's, and both values."""
    magic, version, number, k, chunks = _HEADER.unpack(header)
    if magic != MAGIC:
        return f"begins with {magic.hex()}; one begins with {MAGIC.hex()}"
    if version != VERSION:
        return f"version {version}; this node speaks {VERSION}"
    if number != _NUMBERS[layout.codec]:
        codec = {known: name for name, known in _NUMBERS.items()}.get(number, "of no name")
        return f"codec {number} ({codec}); the run's is {_NUMBERS[layout.codec]} ({layout.codec})"
    if k != layout.k:
        return f"k {k}; the run's is {layout.k}"
    return f"chunks {chunks}; {layout.chunks} are legal"


def _bytes(bits: int) -> int:
    return -(-bits // 8)
