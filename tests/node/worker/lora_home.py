"""A small LoRA run with its base on the disk, for the tests of what trains it."""

from pathlib import Path

import torch
from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.checkpoint.tensorfile import write_atom
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.run_spec import RunSpec
from tests.node.worker.session_home import ME, SPEC, Home

RANK = 4


def base_file(path: Path, model=SPEC.model, seed: int = 7) -> bytes:
    """Write a base with values of `seed`; its blob id."""
    arena = arena_of(model)
    theta = torch.zeros((arena.chunks, CHUNK), dtype=torch.int32)
    values = genesis(model, seed)
    for place in arena.placements:
        write_atom(theta, place, torch.from_numpy(values[place.name]))
    write_snapshot(path, Snapshot(theta, -1, state_digest(theta)), arena)
    return manifest_of_bytes(path.read_bytes()).id


def lora_spec(base: bytes, spec: RunSpec = SPEC, **keys) -> RunSpec:
    """The run of the session tests as a LoRA run; `keys` of the model."""
    return replace(spec, model=replace(spec.model, **{"lora_rank": RANK, **keys}), base=base)


class LoraHome(Home):
    """A node's disk with the base on it, and a session."""

    def __init__(self, path: Path, peer: str = ME, spec: RunSpec = SPEC, keys=None, **more) -> None:
        path.mkdir()
        self.base = path / "base.blob"
        found = lora_spec(base_file(self.base), spec, **(keys or {}))
        found.check()
        super().__init__(path, peer, found, base=str(self.base), **more)
