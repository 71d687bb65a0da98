"""A new run from a Hugging Face folder or a checkpoint: its model, and the files that travel with it.

The files lie in a folder of their own until the run is signed, and are in its blob store before its `.run` file is
there: whatever fails on the way leaves nothing behind.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from torch import Tensor

from atoll.node.checkpoint.disk import write_file
from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.import_export.export_run import BLOBS
from atoll.node.import_export.huggingface.folder import HuggingFaceFolder, load_folder
from atoll.node.import_export.huggingface.serving import serving_of
from atoll.node.import_export.huggingface.tokenizer import FILE, byte_tokenizer, is_same
from atoll.node.import_export.huggingface.upcycle import upcycled
from atoll.node.import_export.join_shards import opened
from atoll.node.import_export.source_options import Origin, Saved
from atoll.node.learning.data.given import open_tokenizer
from atoll.node.learning.model import bridge
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.runs.continuation import onward
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.system.atomic_files import disk, make_folder, read_whole
from atoll.protocols.blobs import manifest_of_bytes, manifest_of_file
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import Digest
from atoll.protocols.run.arena import Arena, arena_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.moments import file_count
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec, StartSpec
from atoll.protocols.run.serving import ServingSpec

_WEIGHTS, _MOMENTS = "start.safetensors", "moments-{}.safetensors"


class Imported(NamedTuple):
    """A checkpoint as the parts of a RunSpec, and its files."""

    model: ModelSpec
    """With the longest context that the checkpoint allows."""
    start: StartSpec
    weights: Path
    tokenizer: bytes | None
    """None: it is one of ours."""
    moments: tuple[Path, ...] = ()
    """What a checkpoint has beside the weights, in the files' order."""
    recipe: RunSpec | None = None
    """The run that goes on; None: the caller's."""
    warning: str = ""
    """What the user must know of it."""
    serving: ServingSpec | UnsetType = UNSET

    def applied(self, spec: RunSpec, context: int) -> RunSpec:
        """The spec with this model and start; sequences of `context` tokens, or fewer if it has no more.

        With a recipe only its name, owner, seed and admission are the caller's.
        """
        if self.recipe is not None:
            ours = {"name": spec.name, "owner": spec.owner, "seed": spec.seed, "admission": spec.admission}
            return replace(self.recipe, start=self.start, **ours)
        blob = b"" if self.tokenizer is None else manifest_of_bytes(self.tokenizer).id
        name = "bytes" if self.tokenizer is None else "file"
        data = replace(spec.data, tokenizer=name, tokenizer_blob=blob)
        model = replace(self.model, context=min(context, self.model.context))
        # As in the presets: members of a mixture may share its experts, and such rounds are not reduced.
        reduced = None if model.experts else spec.reduce
        return replace(spec, model=model, data=data, start=self.start, serving=self.serving, reduce=reduced)

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
def imported(origin: Origin | Saved, runs: Path, seed: int) -> Iterator[Imported]:
    """Read weights and what comes with them; the files lie below `runs` until the block is left.

    Raises ConfigError, Divergence, DiskFault.
    """
    part = make_folder(runs / f".import.{os.getpid()}.part")
    try:
        yield _goes_on(origin, part) if isinstance(origin, Saved) else _published(origin, part, seed)
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
        for path in found.moments:
            store.add_file(path, move=True)
        write()
    except BaseException:
        if is_new:
            shutil.rmtree(run_folder, ignore_errors=True)
        raise


def _published(origin: Origin, part: Path, seed: int) -> Imported:
    found = load_folder(origin.folder)
    if (upcycle := origin.upcycle) is not None:
        experts = ExpertsSpec(count=upcycle.experts, per_token=upcycle.per_token, ffn=found.model.ffn)
        found = HuggingFaceFolder(*upcycled(*found, experts, seed, upcycle.noise_shift))
    arena = arena_of(found.model)
    start = _write(part / _WEIGHTS, bridge.gather(found.theta, arena), arena)
    tokenizer = _tokenizer(origin.folder, found.model.vocab)
    serving = serving_of(origin.folder, found.model.vocab)
    said = UNSET if serving == ServingSpec() else serving
    return Imported(found.model, start, part / _WEIGHTS, tokenizer, serving=said)


def _goes_on(origin: Saved, part: Path) -> Imported:
    found = opened(origin.folder)
    start = _write(part / _WEIGHTS, found.theta(), found.arena)
    paths = [part / _MOMENTS.format(number) for number in range(file_count(found.spec.model))]
    for number, path in enumerate(paths):
        write_file(path, found.moments(number))
    start = replace(start, moments=b"".join(map(_blob_of, paths)))
    recipe = onward(found.spec, found.manifest.round + 1)
    tokenizer = _same_tokenizer(origin.folder, recipe)
    warning = "" if found.manifest.quorum else f"{origin.folder}: {found.manifest.who_signed()}"
    return Imported(recipe.model, start, part / _WEIGHTS, tokenizer, tuple(paths), recipe, warning)


def _same_tokenizer(folder: Path, recipe: RunSpec) -> bytes | None:
    """What the run that goes on had as a file; None where it had none."""
    if recipe.data.tokenizer != "file":
        return None
    data = read_whole(folder / FILE, max_bytes=TOKENIZER_MAX_BYTES)
    if data is None or manifest_of_bytes(data).id != recipe.data.tokenizer_blob:
        raise ConfigError(f"{folder / FILE} is not the tokenizer of the run")
    return data


def _write(path: Path, theta_C4096: Tensor, arena: Arena) -> StartSpec:
    state = state_digest(theta_C4096)
    write_snapshot(path, Snapshot(theta_C4096, -1, state), arena)
    return StartSpec(weights=_blob_of(path), state=state)


def _blob_of(path: Path) -> Digest:
    with disk(path), path.open("rb") as file:
        return manifest_of_file(file).id


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
