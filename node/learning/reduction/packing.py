"""Error feedback of one chunk on the wire: as many bits a value as the largest one needs.

In int32 it is most of an opening, and its values have 17 or 18 bits. Values are zigzag coded (0, −1, 1, −2, …) and
lie end to end, lowest bit first; the first byte says how many bits each has, 0 to 32.
"""

import numpy
import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError
from atoll.protocols.run.arena import CHUNK

MOST_BITS = 32


def packed(values_4096: Tensor) -> bytes:
    """Bytes of int32 `[4096]`; what `unpacked` reads."""
    signed = values_4096.numpy().astype(numpy.int64)
    coded = (signed << 1) ^ (signed >> 63)
    width = int(coded.max()).bit_length()
    bits = (coded[:, None] >> numpy.arange(width)) & 1
    return bytes([width]) + numpy.packbits(bits.astype(numpy.uint8), bitorder="little").tobytes()


def unpacked(data: bytes) -> Tensor:
    """int32 `[4096]`. Raises DecodeError for bytes that `packed` never makes: one value has one form."""
    width = data[0] if data else MOST_BITS + 1
    if width > MOST_BITS or len(data) != 1 + CHUNK * width // 8:
        raise DecodeError("opening: error feedback of another size")
    if not width:
        return torch.zeros(CHUNK, dtype=torch.int32)
    bits = numpy.unpackbits(numpy.frombuffer(data, dtype=numpy.uint8, offset=1), bitorder="little")
    coded = bits.reshape(CHUNK, width).astype(numpy.int64) @ (numpy.int64(1) << numpy.arange(width))
    if int(coded.max()).bit_length() != width:
        raise DecodeError("opening: error feedback with more bits than it needs")
    return torch.from_numpy(((coded >> 1) ^ -(coded & 1)).astype(numpy.int32))
