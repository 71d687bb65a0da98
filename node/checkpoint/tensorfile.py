"""A safetensors file whose names, shapes and note are known before it is opened: tensors are read one by one."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from atoll.node.checkpoint.disk import Piece
from atoll.node.checkpoint.safefile import (
    HEADER_MAX_BYTES,
    Spec,
    header_bytes,
    name_of,
    ordered,
    pieces_of,
    read_header,
    read_tensor,
    spec_of,
    tensor_bytes,
)
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import DecodeError


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
