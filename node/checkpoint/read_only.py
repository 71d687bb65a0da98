"""Reads one tensor of a saved state while its worker runs: changes nothing in the folder, and keeps no file open.

A worker deletes generations as it goes on, and writes new values into a file of a dropped array that no generation
names any more (mapped_arrays.py). So what is read here is copied first, and verified after that.
"""

import errno
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.node.checkpoint import tensorfile
from atoll.node.checkpoint.generations import array_file, finished, manifest_in, tensor_file
from atoll.node.checkpoint.local import FINAL, body_of
from atoll.node.checkpoint.manifests import GenerationManifest
from atoll.node.checkpoint.snapshot import DigestOf, Snapshot
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import RunId

TRIES = 3
"""Lists of generations that are tried: a worker that saves meanwhile deletes what the list before named."""
_GONE = {errno.ENOENT, errno.ENOTDIR}


class _Row(NamedTuple):
    """Where a tensor's values are."""

    path: Path
    at: int
    """Offset of its first byte."""
    spec: tensorfile.Spec


def read_final(folder: Path, run: RunId, digest_of: DigestOf) -> Snapshot | None:
    """The newest saved Θ_final in the generations of `folder`, verified by its digest; None where there is none.

    Raises CorruptFault if none of them verifies, DiskFault.
    """
    report: list[str] = []
    for _ in range(TRIES):
        found = finished(folder)
        if not found:
            return None
        report = []
        for generation in found:
            try:
                return _read(generation, run, digest_of)
            except (CorruptFault, DecodeError) as fault:
                report.append(f"{generation}: {fault}")
        if finished(folder) == found:
            break
    raise CorruptFault("; ".join(report), hint="try again: a running node may have replaced the files meanwhile")


def _read(generation: Path, run: RunId, digest_of: DigestOf) -> Snapshot:
    """Raises CorruptFault, DecodeError, DiskFault."""
    with disk(generation):
        try:
            manifest = manifest_in(generation)
            body = body_of(manifest.body)
            if body.run != run:
                raise CorruptFault("holds the state of another run", hint="choose another home")
            values_S4096 = _copied(_row_of(generation, manifest))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise CorruptFault("it is gone") from error
    if digest_of(values_S4096) != body.state:
        raise CorruptFault("the weights do not have the digest that was saved with them")
    return Snapshot(values_S4096, body.final, body.state)


def _row_of(generation: Path, manifest: GenerationManifest) -> _Row:
    """Where Θ_final is: a file of its own, or a place in the tensor file. Raises DecodeError, OSError."""
    for array in manifest.arrays:
        if array.name == FINAL:
            return _Row(array_file(generation, FINAL), 0, (tensorfile.dtype_of(array.dtype), array.shape))
    path = tensor_file(generation)
    with path.open("rb") as file:
        at = len(tensorfile.read_header(file, tensorfile.HEADER_MAX_BYTES))
    for row in manifest.rows:
        spec = tensorfile.dtype_of(row.dtype), row.shape
        if row.name == FINAL:
            return _Row(path, at, spec)
        at += tensorfile.tensor_bytes(spec)
    raise DecodeError("it has no weights")


def _copied(row: _Row) -> Tensor:
    """A copy of the values. Raises DecodeError, OSError."""
    with row.path.open("rb") as file:
        file.seek(row.at)
        return tensorfile.read_tensor(file, row.spec, lambda _: None)
