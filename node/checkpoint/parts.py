"""Tensors of which several local processes hold parts, in a generation: each writes its own file.

    parts/shard-0000R-….safetensors      rank R − 1's parts, by torch.distributed.checkpoint

It reads them back whole: what two ranks saved one goes on from, or four. The files count as long as they, all of
them and no others, have the hash that the generation's tensor file names.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault
from atoll.protocols.ids import digest

WriteParts = Callable[[Path], None]
"""Makes a folder and writes what it holds; all processes do so at once."""
PARTS = "parts"
"""Name of the folder, and of the tensor `[32]` with the hash."""


def write_parts(generation: Path, write: WriteParts) -> dict[str, Tensor]:
    """Write them below a generation's folder; the tensor that tells `read_parts` what they must be."""
    write(generation / PARTS)
    return {PARTS: torch.frombuffer(bytearray(_hash(generation / PARTS)), dtype=torch.uint8)}


def read_parts(generation: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a generation with those that were written in parts. Raises CorruptFault, OSError."""
    wanted = tensors.pop(PARTS, None)
    if wanted is None:
        return tensors
    if wanted.numpy().tobytes() != _hash(generation / PARTS):
        raise CorruptFault("the parts do not have the hash that the tensors name")
    return tensors | _whole(generation / PARTS)


def _whole(folder: Path) -> dict[str, Tensor]:
    # Most nodes never have parts, and this takes half a second.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it reads in this process alone, as it is told to
        load(found, storage_reader=reader, no_dist=True)
    return found


def _hash(folder: Path) -> bytes:
    """Of all names and contents."""
    rows = [
        (path.name, blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
        for path in sorted(folder.iterdir())
    ]
    return digest(codec.encode(rows))
