"""A new run from a Hugging Face folder: its model, and the files that travel with it.

The files lie in a folder of their own until the run is signed, and are in its blob store before its `.run` file is
there: whatever fails on the way leaves nothing behind.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.data.given import open_tokenizer
from atoll.node.export.folder import Checkpoint, load_folder
from atoll.node.export.tokenizer import FILE, byte_tokenizer, is_same
from atoll.node.export.upcycle import upcycled
from atoll.node.export_run import BLOBS
from atoll.node.model import bridge
from atoll.node.origin import Origin
from atoll.node.outer.fixed import state_digest
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.files import disk, make_folder, read_whole
from atoll.protocols.arena import arena_of
from atoll.protocols.blobs import manifest_of_bytes, manifest_of_file
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.model import ExpertsSpec, ModelSpec
from atoll.protocols.run import TOKENIZER_MAX_BYTES, RunSpec, StartSpec

_WEIGHTS = "start.safetensors"


class Imported(NamedTuple):
    """A checkpoint as the parts of a RunSpec, and its files."""

    model: ModelSpec
    """With the longest context that the checkpoint allows."""
    start: StartSpec
    weights: Path
    tokenizer: bytes | None
    """None: it is `bytes`."""

    def applied(self, spec: RunSpec, context: int) -> RunSpec:
        """The spec with this model and start; sequences of `context` tokens, or fewer if it has no more."""
        blob = b"" if self.tokenizer is None else manifest_of_bytes(self.tokenizer).id
        name = "bytes" if self.tokenizer is None else "file"
        data = replace(spec.data, tokenizer=name, tokenizer_blob=blob)
        model = replace(self.model, context=min(context, self.model.context))
        return replace(spec, model=model, data=data, start=self.start)

    def check(self, spec: RunSpec) -> None:
        """Raise ConfigError when a spec made from this has another model by now."""
        if (
            replace(spec.model, context=self.model.context) != self.model
            or spec.model.context > self.model.context
        ):
            raise ConfigError(
                "the weights are given: of the model only model.context can be set",
                hint=f"to at most {self.model.context}",
            )


@contextmanager
def imported(origin: Origin, runs: Path, seed: int) -> Iterator[Imported]:
    """Read a checkpoint; its files lie below `runs` until the block is left.

    Raises ConfigError, Divergence, DiskFault.
    """
    part = make_folder(runs / f".import.{os.getpid()}.part")
    try:
        found = load_folder(origin.folder)
        if (upcycle := origin.upcycle) is not None:
            experts = ExpertsSpec(count=upcycle.experts, per_token=upcycle.per_token, ffn=found.model.ffn)
            found = Checkpoint(*upcycled(*found, experts, seed, upcycle.noise_shift))
        start = _write(part / _WEIGHTS, found)
        yield Imported(found.model, start, part / _WEIGHTS, _tokenizer(origin.folder, found.model.vocab))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def keep(found: Imported, run_folder: Path, write: Callable[[], None]) -> None:
    """Put the files into the store of the run, then let `write` write the run. Raises DiskFault; then nothing is
    there.
    """
    is_new = not run_folder.exists()
    try:
        store = BlobStore(make_folder(run_folder) / BLOBS)
        store.add_file(found.weights, move=True)
        if found.tokenizer is not None:
            store.add_bytes(found.tokenizer)
        write()
    except BaseException:
        if is_new:
            shutil.rmtree(run_folder, ignore_errors=True)
        raise


def _write(path: Path, found: Checkpoint) -> StartSpec:
    arena = arena_of(found.model)
    theta_C4096 = bridge.gather(found.theta, arena)
    state = state_digest(theta_C4096)
    write_snapshot(path, Snapshot(theta_C4096, -1, state), arena)
    with disk(path), path.open("rb") as file:
        return StartSpec(weights=manifest_of_file(file).id, state=state)


def _tokenizer(folder: Path, vocab: int) -> bytes | None:
    """The bytes of the folder's `tokenizer.json`, checked; None where it is the tokenizer `bytes`."""
    try:
        data = read_whole(folder / FILE, max_bytes=TOKENIZER_MAX_BYTES)
    except CorruptFault as error:
        raise ConfigError(f"{folder / FILE} has more than {TOKENIZER_MAX_BYTES >> 20} MiB") from error
    if data is None:
        raise ConfigError(
            f"{folder} has no {FILE}", hint="a run takes its tokenizer from there; other kinds are not read"
        )
    open_tokenizer(data, vocab)
    return None if is_same(data, byte_tokenizer()) else data
