"""A snapshot: Θ_final of one round as a safetensors file, one int32 tensor per atom in natural shape.

Equal states give equal bytes. The header is a function of the RunSpec, the round and the state digest,
so a reader compares it, byte for byte, with the only legal one; nothing of a peer's is parsed.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from atoll.node.checkpoint import tensorfile
from atoll.node.checkpoint.disk import Piece, write_file
from atoll.node.checkpoint.tensorfile import read_atom, write_atom
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest
from atoll.protocols.run.arena import CHUNK, Arena, Placement

MAX_ROUND = (1 << 24) - 1
_NOTE = re.compile(rb'\{"__metadata__":\{"atoll":"snapshot/1 round=(-1|0|[1-9]\d{0,7}) state=([0-9a-f]{64})"')

DigestOf = Callable[[Tensor], Digest]
"""State digest of an int32 arena `[C, 4096]`."""


class Snapshot(NamedTuple):
    """Θ_final of a round, verified against its digest."""

    theta_C4096: Tensor
    """Weights, int32, with zeros in the padding."""
    round: int
    """The last final round; -1 is genesis."""
    state: Digest


def write_snapshot(path: Path, snapshot: Snapshot, arena: Arena) -> int:
    """Write the file whole or not at all; its size. Raises DiskFault."""
    size, _ = write_file(path, _pieces(snapshot, arena))
    return size


def read_snapshot(path: Path, arena: Arena, digest_of: DigestOf) -> Snapshot:
    """A peer's snapshot, verified against its own digest. Raises DecodeError, DiskFault.

    Whether round and digest are the run's is for the caller to check against the ledger.
    """
    with disk(path), path.open("rb") as file:
        number, state = _check_header(file, path.stat().st_size, arena)
        theta = torch.zeros((arena.chunks, CHUNK), dtype=torch.int32)
        for place in _ordered(arena):
            atom = tensorfile.read_tensor(file, (torch.int32, place.shape), lambda _: None)
            write_atom(theta, place, atom)
    if digest_of(theta) != state:
        raise DecodeError("snapshot: the weights do not have the digest that the file names")
    return Snapshot(theta, number, state)


def header_at(file: BinaryIO, size_bytes: int, arena: Arena) -> tuple[int, int]:
    """Round that a file's header names, and where its values begin. Raises DecodeError for an illegal file."""
    number, state = _check_header(file, size_bytes, arena)
    return number, len(_header(arena, number, state))


def read_own_snapshot(path: Path, arena: Arena, digest_of: DigestOf) -> Snapshot:
    """A snapshot that this node wrote. Raises CorruptFault, DiskFault."""
    try:
        return read_snapshot(path, arena, digest_of)
    except DecodeError as error:
        hint = "delete the file; the node fetches the state from its peers"
        raise CorruptFault(f"{path}: {error}", hint=hint) from error


def _pieces(snapshot: Snapshot, arena: Arena) -> Iterator[Piece]:
    yield _header(arena, snapshot.round, snapshot.state)
    for place in _ordered(arena):
        yield from tensorfile.pieces_of(read_atom(snapshot.theta_C4096, place))


def _check_header(file: BinaryIO, size_bytes: int, arena: Arena) -> tuple[int, Digest]:
    """Round and digest that the header claims; its size and the file's are the only legal ones."""
    longest = len(_header(arena, MAX_ROUND, Digest(bytes(32))))
    header = tensorfile.read_header(file, longest)
    found = _NOTE.match(header, 8)
    if not found:
        raise DecodeError("snapshot: not a snapshot, or of another version")
    number, state = int(found[1]), Digest(bytes.fromhex(found[2].decode()))
    if number > MAX_ROUND or header != _header(arena, number, state):
        raise DecodeError("snapshot: its header is not the one of this run")
    if size_bytes != len(header) + 4 * arena.values:
        raise DecodeError(f"snapshot: {size_bytes} bytes where {len(header) + 4 * arena.values} are legal")
    return number, state


def _header(arena: Arena, number: int, state: Digest) -> bytes:
    return tensorfile.header_bytes(_specs(arena), f"snapshot/1 round={number} state={state.hex()}")


def _specs(arena: Arena) -> dict[str, tensorfile.Spec]:
    return {place.name: (torch.int32, place.shape) for place in arena.placements}


def _ordered(arena: Arena) -> list[Placement]:
    places = {place.name: place for place in arena.placements}
    return [places[name] for name in tensorfile.ordered(_specs(arena))]
