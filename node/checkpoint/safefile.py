"""The safetensors format, written and read in a stream: `u64 length | JSON header | tensors`.

Written by hand so that equal tensors give equal bytes whatever version of the library a node has, and
so that a reader can compare a header with the one it expects instead of parsing what a peer wrote.
The library reads these files; a test holds the bytes equal to its own output.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.protocols.errors import DecodeError

PIECE_BYTES = 1 << 20
HEADER_MAX_BYTES = 64 << 20
_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""In file order, which is the library's."""
_ALIGN = 8

Piece = bytes | memoryview
Spec = tuple[torch.dtype, tuple[int, ...]]
"""Specification of a tensor: dtype and shape."""


def ordered(specs: Mapping[str, Spec]) -> list[str]:
    """Names in file order: wide dtypes first, so that all data is aligned, then by name."""
    ranks = {dtype: rank for rank, dtype in enumerate(_NAMES)}
    return sorted(specs, key=lambda name: (ranks[specs[name][0]], name))


def header_bytes(specs: Mapping[str, Spec], note: str) -> bytes:
    """Length prefix and header of a file with these tensors and the one metadata key `atoll`."""
    entries: dict[str, object] = {"__metadata__": {"atoll": note}}
    at = 0
    for name in ordered(specs):
        dtype, shape = specs[name]
        size = tensor_bytes(specs[name])
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(spec: Spec) -> int:
    """Size of one tensor in bytes."""
    return math.prod(spec[1]) * spec[0].itemsize


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """The little-endian bytes of a contiguous CPU tensor in pieces of 1 MiB."""
    array = raw(tensor)
    for start in range(0, len(array), PIECE_BYTES):
        yield array[start : start + PIECE_BYTES].data


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's own bytes; writing to them writes to the tensor."""
    array: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def spec_of(tensor: Tensor) -> Spec:
    """The specification of a tensor."""
    return tensor.dtype, tuple(tensor.shape)


def read_header(file: BinaryIO, max_bytes: int) -> bytes:
    """Length prefix and header as they stand in the file. Raises DecodeError."""
    prefix = file.read(8)
    size = int.from_bytes(prefix, "little")
    if len(prefix) != 8 or size > min(max_bytes, HEADER_MAX_BYTES):
        raise DecodeError("safetensors: no header, or one that is too long")
    text = file.read(size)
    if len(text) != size:
        raise DecodeError("safetensors: the header is cut off")
    return prefix + text


def read_tensor(file: BinaryIO, spec: Spec, seen: Callable[[Piece], object]) -> Tensor:
    """The next tensor of a stream; `seen` gets its bytes. Raises DecodeError when the stream ends before."""
    tensor = torch.empty(spec[1], dtype=spec[0])
    array = raw(tensor)
    for start in range(0, len(array), PIECE_BYTES):
        want = array[start : start + PIECE_BYTES]
        data = file.read(len(want))
        if len(data) != len(want):
            raise DecodeError("safetensors: the data is cut off")
        want[:] = np.frombuffer(data, np.uint8)
        seen(data)
    return tensor


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name in the format. Raises DecodeError."""
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise DecodeError(f"safetensors: dtype {name!r} is none that we write")


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype in the safetensors format."""
    return _NAMES[dtype]
