"""Reads the frozen base of a LoRA run: a snapshot file of round −1 of the whole model, named by the RunSpec.

Nothing but its hash says that a file is the base, so the hash is computed before a value is used. It covers the
header and the values, and one atom at a time is in memory.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.checkpoint import tensorfile
from atoll.node.checkpoint.snapshot import header_at
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.blobs import manifest_of_file
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec

Read = Callable[[str], Tensor]
"""An atom by name, int32 in units of 2⁻²⁴, in its shape."""


def open_base(spec: RunSpec, path: Path) -> Read:
    """A reader of the base's atoms. Raises ConfigError where there is no file, CorruptFault for another one,
    DecodeError for one that has the hash and is no snapshot of this model, DiskFault."""
    if not path.is_file():
        raise ConfigError("the base of this run is not in this home", hint="start the node: it fetches it")
    arena = arena_of(spec.model.base)
    with disk(path), path.open("rb") as file:
        if manifest_of_file(file).id != spec.base:
            raise CorruptFault(f"{path} is not the base of this run", hint="delete it; the node fetches it again")
        file.seek(0)
        number, at = header_at(file, path.stat().st_size, arena)
    if number != -1:
        raise DecodeError("the base of a run must be a snapshot of round -1")
    specs = {place.name: (torch.int32, place.shape) for place in arena.placements}
    starts: dict[str, int] = {}
    for name in tensorfile.ordered(specs):
        starts[name] = at
        at += tensorfile.tensor_bytes(specs[name])

    def read(name: str) -> Tensor:
        with disk(path), path.open("rb") as file:
            file.seek(starts[name])
            return tensorfile.read_tensor(file, specs[name], lambda _: None)

    return read
