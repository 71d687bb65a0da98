"""Local state in generations: each save is a new folder, there whole or not at all; the last two are kept.

    0000000041/tensors.safetensors, manifest     the save before
    0000000042/tensors.safetensors, manifest     the newest
    0000000042/rare.safetensors                  in it: tensors that few saves write (`Rare`)
    0000000042/parts/                            more of these, where several processes hold parts of them
    0000000042/NAME.array                        in it: a tensor that was in a file already (`SavedArray`)
    *.part                                       unfinished, deleted by the next save
    *.bad                                        did not verify, set aside by a load, deleted by the next save

A manifest is the BLAKE3 of its body, then the body: canonical msgpack that names every tensor and the
hash of the tensor file. So every flipped bit is found, and the generation before is used instead.

A save that does not write the rare tensors gives those of the newest generation a second name. So a bit that flips
in them may be in both generations: then the newest is used without them.

Formats 1 and 2 are read too. Format 1 has no arrays, and neither has rare tensors: parts are hashed with the rest.
"""

import errno
import mmap
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from blake3 import blake3
from msgspec.structs import replace
from torch import Tensor

from atoll.node.checkpoint import tensorfile
from atoll.node.checkpoint.disk import TEMPORARY, remove_tree, write_piece
from atoll.node.checkpoint.manifests import (
    EMPTY,
    MANIFEST_MAX_BYTES,
    ArrayRow,
    GenerationManifest,
    TensorRow,
    manifest_of,
)
from atoll.node.checkpoint.mapped_arrays import link_or_copy
from atoll.node.checkpoint.parts import WriteParts, hash_with_parts, read_parts
from atoll.p2p.system.atomic_files import disk, sync_folder
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError
from atoll.protocols.ids import Digest, digest

KEPT = 2
_TENSORS, _RARE, _MANIFEST = "tensors.safetensors", "rare.safetensors", "manifest"
_BAD, _ARRAY = ".bad", ".array"
PARTS = "parts"
RARE_FORMAT = 3
"""First format with rare tensors, to which the parts belong."""
_FETCHED = 1 << 24
"""Values that are fetched from another device at a time."""
_HOLE_BYTES = 1 << 16
"""Error feedback of experts that were never trained here is zero: most of it, of a small share."""
_ZEROS = bytes(_HOLE_BYTES)
_NAME = re.compile(r"\d{10}")
_DAMAGE = {errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
"""Errors of a read that mean this generation is lost; others mean that we cannot use the disk at all."""


Check = Callable[[Mapping[str, Tensor]], None]
"""Raises CorruptFault for tensors that the caller cannot use."""


class Rare(NamedTuple):
    """Tensors that few saves write, and what writes further ones, of which several processes hold parts."""

    tensors: Mapping[str, Tensor]
    parts: WriteParts | None = None


NO_RARE = Rare({})


class SavedArray(NamedTuple):
    """A tensor whose values are a file that nobody changes any more: the generation gets a name for it."""

    values: Tensor
    path: Path
    before: bytes
    hash: Digest
    """See ArrayRow; it is known already, because a state is named by it."""


class Loaded(NamedTuple):
    """The newest generation that verifies."""

    tensors: dict[str, Tensor]
    body: bytes
    report: tuple[str, ...]
    """One line for each newer generation that did not verify, and for rare tensors that did not."""
    arrays: dict[str, Path]
    """Files of the tensors that have one of their own; they are mapped, and deleted with their generation."""


@dataclass(slots=True)
class Unfinished:
    """A generation whose changing tensors the kernel has; `finish` writes the rest and makes it the newest."""

    folder: Path
    final: Path
    older: list[Path]
    _files: list[FileIO] = field(default_factory=list)
    """All that must be on the disk before the generation has its name; the tensors first."""
    _later: list[tuple[int, Tensor]] = field(default_factory=list)
    """Places in the tensor file, and what belongs there."""
    _manifest: GenerationManifest = EMPTY
    """What is known of it; `finish` adds the hashes of what was written."""
    _arrays: Mapping[str, SavedArray] = field(default_factory=dict)
    _rare: FileIO | None = None
    """None: not written, but that of the generation before."""

    @property
    def _part(self) -> Path:
        return self.final.with_name(self.final.name + TEMPORARY)

    def write(
        self, tensors: Mapping[str, Tensor], body: bytes, steady: Collection[str], arrays: Mapping[str, SavedArray]
    ) -> None:
        """Hand the tensors to the kernel, but those of `steady`: they may not change before `finish` has ended.

        Raises OSError.
        """
        file = self._open(_TENSORS)
        rows = _write_all(file, tensors, steady, self._later)
        self._arrays = arrays
        self._manifest = replace(self._manifest, rows=rows, body=body)

    def write_rare(self, rare: Rare) -> None:
        """Hand these to the kernel. Raises OSError, and what `rare.parts` raises."""
        if rare.parts is not None:
            rare.parts(self._part / PARTS)
            self._files += [path.open("rb", buffering=0) for path in (self._part / PARTS).iterdir()]
        if rare.tensors or rare.parts is not None:
            self._rare = self._open(_RARE)
            rows = _write_all(self._rare, rare.tensors, (), [])
            self._manifest = replace(self._manifest, rare_rows=rows)

    def linked_rare(self) -> bool:
        """Whether those of the newest generation have a name in this one now. Raises OSError."""
        try:
            before = manifest_in(self.older[0])
            if not before.rare:
                return False
            for path in (self.older[0] / PARTS).glob("*"):
                (self._part / PARTS).mkdir(exist_ok=True)
                self._name(f"{PARTS}/{path.name}")
            self._name(_RARE)
        except (CorruptFault, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _DAMAGE:
                raise
            remove_tree(self._part / PARTS)
            return False
        self._manifest = replace(self._manifest, rare_rows=before.rare_rows, rare=before.rare)
        return True

    def link_others(self, before: GenerationManifest) -> None:
        """Name all but the rare tensors of the newest generation, whose manifest is `before`. Raises OSError."""
        for name in (_TENSORS, *(f"{row.name}{_ARRAY}" for row in before.arrays)):
            self._name(name)
        self._manifest = replace(before, rare_rows=(), rare=b"")

    def _name(self, name: str) -> None:
        """Give a file of the newest generation a name in this one; it is made safe with the others."""
        link_or_copy(self.older[0] / name, self._part / name)
        self._files.append((self._part / name).open("rb", buffering=0))

    def finish(self) -> None:
        """Write the rest and wait for the disk; then this is the newest generation.

        Raises DiskFault; then nothing changed.

        Touches nothing but its files: it may run in a thread of its own, if no other save begins before it ends.
        """
        with disk(self.folder):
            try:
                # Everything is on the disk before the rename: a name without `.part` promises a whole generation.
                self._complete()
                for file in self._files:
                    os.fsync(file.fileno())
                if (self._part / PARTS).exists():
                    sync_folder(self._part / PARTS)
                sync_folder(self._part)
                self._part.rename(self.final)
            except BaseException:
                self.drop()
                raise
            self._close()
            sync_folder(self.folder)
            _forget(self._outlived())

    def _outlived(self) -> list[Path]:
        """Generations that are not kept: of two that share a tensor file, the older one."""
        if self._manifest.tensors:
            return [self.older[0], *self.older[KEPT:]]
        return self.older[KEPT - 1 :]

    def drop(self) -> None:
        """Give this generation up and delete its files. Raises DiskFault."""
        self._close()
        with disk(self._part):
            remove_tree(self._part)

    def _complete(self) -> None:
        """Write what could wait: steady tensors, the hash of all, the manifest."""
        found = self._manifest
        if not found.tensors:
            file = self._files[0]
            for at, tensor in self._later:
                _write_at(file, at, tensor)
            rows = tuple(self._link(name, array) for name, array in sorted(self._arrays.items()))
            found = replace(found, tensors=_hash_of(file), arrays=rows)
        if self._rare is not None:
            found = replace(found, rare=hash_with_parts(_hash_of(self._rare), self._part / PARTS))
        manifest = codec.encode(found)
        words = self._open(_MANIFEST)
        for piece in (digest(manifest), manifest):
            write_piece(words, piece)

    def _link(self, name: str, array: SavedArray) -> ArrayRow:
        own = self._part / f"{name}{_ARRAY}"
        with array.path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())  # pages that were written through a mapping too
        link_or_copy(array.path, own)
        self._files.append(own.open("rb", buffering=0))  # it is made safe with the others
        dtype, shape = tensorfile.spec_of(array.values)
        return ArrayRow(name, tensorfile.name_of(dtype), shape, array.before, array.hash)

    def _open(self, name: str) -> FileIO:
        file = (self._part / name).open("w+b", buffering=0)
        self._files.append(file)
        return file

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _write_all(
    file: FileIO, tensors: Mapping[str, Tensor], steady: Collection[str], later: list[tuple[int, Tensor]]
) -> tuple[TensorRow, ...]:
    """Write a tensor file, but those of `steady`: their places are added to `later`. Its index."""
    specs = {name: tensorfile.spec_of(tensor) for name, tensor in tensors.items()}
    names, header = tensorfile.ordered(specs), tensorfile.header_bytes(specs, "local")
    write_piece(file, header)
    at = len(header)
    for name in names:
        if name in steady:
            later.append((at, tensors[name]))
        else:
            _write_at(file, at, tensors[name])
        at += tensorfile.tensor_bytes(specs[name])
    return tuple(TensorRow(name, tensorfile.name_of(specs[name][0]), specs[name][1]) for name in names)


def _write_at(file: FileIO, at: int, tensor: Tensor) -> None:
    """Write a tensor's bytes; blocks of zeros become holes, which read as zeros and take nothing of the disk."""
    for part in torch.split(tensor.contiguous().reshape(-1), _FETCHED):
        for piece in tensorfile.pieces_of(part.cpu()):
            for start in range(0, len(piece), _HOLE_BYTES):
                block = piece[start : start + _HOLE_BYTES]
                if not _is_zero(block):
                    file.seek(at + start)
                    write_piece(file, block)
            at += len(piece)
    if os.fstat(file.fileno()).st_size < at:
        file.truncate(at)


def _is_zero(block: memoryview) -> bool:
    # Other values rarely begin and end with zeros: nearly all of them are told from two bytes.
    return not block[0] and not block[-1] and bytes(block) == _ZEROS[: len(block)]


def _hash_of(file: FileIO) -> Digest:
    """BLAKE3 of all bytes of a file, which the kernel has just been given."""
    hasher, buffer = blake3(), memoryview(bytearray(tensorfile.PIECE_BYTES))
    file.seek(0)
    while size := file.readinto(buffer):
        hasher.update(buffer[:size])
    return Digest(hasher.digest())


def begin(
    folder: Path,
    tensors: Mapping[str, Tensor],
    body: bytes,
    steady: Collection[str] = (),
    arrays: Mapping[str, SavedArray] | None = None,
    rare: Rare = NO_RARE,
    rare_is_saved: bool = False,
) -> Unfinished:
    """Write these tensors and this message; they are the newest generation after `finish`.

    The tensors may change afterwards, but not those named in `steady`, which are written by `finish`. `arrays`
    are files already. `rare_is_saved`: those of the newest generation are taken where they can be. Raises
    DiskFault, and what writes parts raises.
    """

    def write(fresh: Unfinished) -> None:
        fresh.write(tensors, body, steady, arrays or {})
        if not (rare_is_saved and fresh.linked_rare()):
            fresh.write_rare(rare)

    return _begun(folder, write)


def begin_rare(folder: Path, rare: Rare) -> Unfinished:
    """The newest generation again, with other rare tensors. Raises CorruptFault, and as `begin` does."""

    def write(fresh: Unfinished) -> None:
        fresh.link_others(manifest_in(fresh.older[0]))
        fresh.write_rare(rare)

    return _begun(folder, write)


def _begun(folder: Path, write: Callable[[Unfinished], None]) -> Unfinished:
    with disk(folder):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        _sweep(folder)
        kept = finished(folder)
        fresh = Unfinished(folder, folder / f"{int(kept[0].name) + 1 if kept else 1:010d}", kept)
        try:
            fresh._part.mkdir()
            write(fresh)
        except BaseException:
            fresh.drop()
            raise
    return fresh


def load(folder: Path, check: Check = lambda _: None) -> Loaded | None:
    """The newest generation that verifies; None where nothing was ever saved.

    `check` raises CorruptFault for tensors that the caller cannot use: an older generation may do.
    Raises CorruptFault when there are generations and none verifies, DiskFault.
    """
    found = finished(folder)
    report: list[str] = []
    for at, generation in enumerate(found):
        try:
            with disk(generation):
                tensors, manifest, lacks = _read(generation, check)
        except CorruptFault as fault:
            report.append(fault.line())
            continue
        report += lacks
        _set_aside(found[:at])
        files = {row.name: array_file(generation, row.name) for row in manifest.arrays}
        return Loaded(tensors, manifest.body, tuple(report), files)
    if found:
        hint = f"move {folder} away to start from the peers' newest state; unsent work in it is lost"
        raise CorruptFault("; ".join(report), hint=hint)
    return None


def move_older(folder: Path, to: Path) -> None:
    """Move all generations but the newest to another folder, in place of what is there. Raises DiskFault."""
    _, *older = finished(folder)
    with disk(to):
        if older:
            remove_tree(to)
            to.mkdir()
        for generation in older:
            generation.rename(to / generation.name)
    for changed in (to, to.parent, folder) if older else ():
        sync_folder(changed)


def _read(generation: Path, check: Check) -> tuple[dict[str, Tensor], GenerationManifest, list[str]]:
    """Tensors and index, and a line if the rare tensors are damaged. Raises CorruptFault, OSError."""
    try:
        manifest = manifest_in(generation)
        with (generation / _TENSORS).open("rb") as file:
            parts = generation / PARTS if manifest.format < RARE_FORMAT else None
            tensors = _tensors(file, manifest.rows, manifest.tensors, parts)
        tensors |= {row.name: _array(array_file(generation, row.name), row) for row in manifest.arrays}
        rare, lacks = _rare_of(generation, manifest)
        tensors |= rare
        check(tensors)
        return tensors, manifest, lacks
    except (DecodeError, CorruptFault) as error:
        raise CorruptFault(f"{generation}: {error}") from error
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CorruptFault(f"{generation}: {error.strerror}") from error
        raise


def _rare_of(generation: Path, manifest: GenerationManifest) -> tuple[dict[str, Tensor], list[str]]:
    """The rare tensors. The generation before may have the same files, so one that has none is better."""
    if not manifest.rare:
        return {}, []
    try:
        with (generation / _RARE).open("rb") as file:
            return _tensors(file, manifest.rare_rows, manifest.rare, generation / PARTS), []
    except (DecodeError, CorruptFault, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise
        return {}, [f"{generation}/{_RARE} is damaged: what it held begins anew ({error})"]


def manifest_in(generation: Path) -> GenerationManifest:
    """The index of a generation. Raises CorruptFault, OSError."""
    with (generation / _MANIFEST).open("rb") as file:
        try:
            return manifest_of(file.read(MANIFEST_MAX_BYTES + 1))
        except DecodeError as error:
            raise CorruptFault(str(error)) from error


def array_file(generation: Path, name: str) -> Path:
    """Where a generation has a tensor that has a file of its own."""
    return generation / f"{name}{_ARRAY}"


def tensor_file(generation: Path) -> Path:
    """Where a generation has its other tensors, but the rare ones."""
    return generation / _TENSORS


def _array(path: Path, row: ArrayRow) -> Tensor:
    """A verified tensor, mapped. Raises DecodeError, OSError."""
    spec = tensorfile.dtype_of(row.dtype), row.shape
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != tensorfile.tensor_bytes(spec) or not tensorfile.tensor_bytes(spec):
            raise DecodeError(f"{path.name} has another size")
        # Not ACCESS_READ: torch has no tensors that must not be written. A page that is written is a private copy.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if blake3(row.before).update(memory).digest() != row.hash:
        raise DecodeError(f"{path.name} does not have its hash")
    return torch.frombuffer(memory, dtype=spec[0]).view(spec[1])


def _tensors(file: BinaryIO, rows: Collection[TensorRow], hashed: bytes, parts: Path | None) -> dict[str, Tensor]:
    specs = {row.name: (tensorfile.dtype_of(row.dtype), row.shape) for row in rows}
    hasher = blake3(tensorfile.read_header(file, tensorfile.HEADER_MAX_BYTES))
    tensors = {name: tensorfile.read_tensor(file, spec, hasher.update) for name, spec in specs.items()}
    found = Digest(hasher.digest())
    if file.read(1) or (hash_with_parts(found, parts) if parts else found) != hashed:
        raise DecodeError("the tensors do not have the hash that the manifest names")
    return tensors | (read_parts(parts) if parts else {})


def finished(folder: Path) -> list[Path]:
    """Finished generations, newest first. Raises DiskFault."""
    with disk(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), reverse=True)


def _sweep(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.suffix in (TEMPORARY, _BAD):
            remove_tree(path)


def _forget(generations: list[Path]) -> None:
    """Rename, then delete: a generation is never there in part."""
    for generation in generations:
        remove_tree(generation.rename(generation.with_name(generation.name + TEMPORARY)))


def _set_aside(generations: list[Path]) -> None:
    """A damaged generation must not count as one of the two that are kept."""
    with disk(generations[0] if generations else Path()):
        for generation in generations:
            generation.rename(generation.with_name(generation.name + _BAD))
