"""The safetensors format, `u64 length | JSON header | tensors`, written and read in a stream, tensor by tensor.

Written by hand so that equal tensors give equal bytes whatever version of the library a node has, and so that a
reader can compare a header with the one it expects instead of parsing what a peer wrote. The library reads these
files; a test holds the bytes equal to its own output.

`TensorFile` reads a file whose names, shapes and note are known before it is opened. `read_atom` and `write_atom`
convert between the arena's order and natural shapes, one atom at a time, for any dtype.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.checkpoint.disk import Piece
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import DecodeError
from atoll.protocols.run.arena import SIDE, Placement

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
Spec = tuple[torch.dtype, tuple[int, ...]]
"""Specification of a tensor: dtype and shape."""
_SLAB_VALUES = 1 << 19


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


class TensorFile:
    """A file whose header was checked once; its tensors are read in any order."""

    def __init__(self, path: Path, specs: Mapping[str, Spec], note: str) -> None:
        """Raises DecodeError, which names what is missing, extra or of another shape; DiskFault."""
        self._path = path
        self._specs = dict(specs)
        self.names = frozenset(specs)
        """Names of the tensors that can be read."""
        expected = header_bytes(specs, note)
        with disk(path), path.open("rb") as file:
            header, size = read_header(file, HEADER_MAX_BYTES), os.fstat(file.fileno()).st_size
        if header != expected:
            raise DecodeError(f"{path.name}: {_difference(header, specs)}")
        self._places: dict[str, int] = {}
        at = len(header)
        for name in ordered(specs):
            self._places[name] = at
            at += tensor_bytes(specs[name])
        if size != at:
            raise DecodeError(f"{path.name}: {size} bytes where {at} are legal")

    def read(self, name: str) -> Tensor:
        """One tensor, a copy. Raises DiskFault."""
        with disk(self._path), self._path.open("rb") as file:
            file.seek(self._places[name])
            return read_tensor(file, self._specs[name], lambda _: None)


def file_pieces(specs: Mapping[str, Spec], note: str, value_of: Callable[[str], Tensor]) -> Iterator[Piece]:
    """The bytes of such a file; one tensor at a time is in memory."""
    yield header_bytes(specs, note)
    for name in ordered(specs):
        value = value_of(name).contiguous()
        assert spec_of(value) == specs[name], name
        yield from pieces_of(value)


def _difference(header: bytes, specs: Mapping[str, Spec]) -> str:
    """The first difference between a header and the expected one, as a line for people."""
    try:
        found = json.loads(header[8:])
        found.pop("__metadata__", None)
        shapes = {str(name): (entry["dtype"], tuple(entry["shape"])) for name, entry in found.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return "its header is not that of a safetensors file"
    for name, spec in specs.items():
        if name not in shapes:
            return f"{name} is missing"
        if shapes[name] != (name_of(spec[0]), spec[1]):
            return f"{name} is {shapes[name][0]} {list(shapes[name][1])}, not {name_of(spec[0])} {list(spec[1])}"
    for name in sorted(shapes.keys() - specs.keys()):
        return f"{name} does not belong in it"
    return "its header says another run, round or member"


def all_finite(values: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity; by slabs, so that no mask as large as it is made."""
    return all(bool(part.isfinite().all()) for part in torch.split(values.reshape(-1), _SLAB_VALUES))


def read_atom(arena_C4096: Tensor, place: Placement) -> Tensor:
    """A contiguous copy of one atom in its natural shape."""
    if len(place.shape) == 1:
        return _vector(arena_C4096, place).clone()
    return _blocks(arena_C4096, place)[: place.shape[0], : place.shape[1]].contiguous()


def write_atom(arena_C4096: Tensor, place: Placement, atom: Tensor) -> None:
    """Copy one atom into the (contiguous) arena; padding is left as it is."""
    if len(place.shape) == 1:
        _vector(arena_C4096, place).copy_(atom)
        return
    down, across = place.blocks
    padded = arena_C4096.new_zeros((down * SIDE, across * SIDE))
    padded[: place.shape[0], : place.shape[1]] = atom
    rows = arena_C4096[place.first_chunk : place.first_chunk + down * across]
    rows.copy_(padded.view(down, SIDE, across, SIDE).transpose(1, 2).reshape(down * across, SIDE * SIDE))


def _vector(arena_C4096: Tensor, place: Placement) -> Tensor:
    return arena_C4096[place.first_chunk :].view(-1)[place.offset : place.offset + math.prod(place.shape)]


def _blocks(arena_C4096: Tensor, place: Placement) -> Tensor:
    down, across = place.blocks
    rows = arena_C4096[place.first_chunk : place.first_chunk + down * across]
    return rows.view(down, across, SIDE, SIDE).transpose(1, 2).reshape(down * SIDE, across * SIDE)
