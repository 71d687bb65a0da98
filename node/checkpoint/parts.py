"""Tensors of which several local processes hold parts, in a generation: each writes its own file.

    parts/shard-0000R-….safetensors      rank R − 1's parts, by torch.distributed.checkpoint

It reads them back whole: what two ranks saved one goes on from, or four. The files count as long as they, all of
them and no others, are what the generation's manifest has hashed.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from atoll.protocols import codec
from atoll.protocols.ids import Digest, digest

WriteParts = Callable[[Path], None]
"""Makes a folder and writes what it holds; all processes do so at once. Raises DiskFault."""


def hash_with_parts(tensors: Digest, folder: Path) -> Digest:
    """Hash of a tensor file's hash and the names and contents of all parts, if any. Raises OSError."""
    if not folder.exists():
        return tensors
    hashes = [(path.name, blake3().update_mmap(path).digest()) for path in sorted(folder.iterdir())]
    return digest(tensors, codec.encode(hashes))


def read_parts(folder: Path) -> dict[str, Tensor]:
    """The tensors that were written in parts, whole; nothing without parts. The hash was looked at before."""
    if not folder.exists():
        return {}
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
