"""Makes the model and the files of a new run from a Hugging Face folder or a universal checkpoint.

The files are in a temporary folder until the run is signed, and in its blob store before its `.run` file exists.
A failure on the way leaves nothing behind.
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
from atoll.node.import_export.huggingface.folder import HuggingFaceFolder, load_folder, model_of
from atoll.node.import_export.huggingface.serving import (
    TOKENIZER_JSON,
    byte_tokenizer_json,
    is_same_tokenizer,
    read_serving,
)
from atoll.node.import_export.huggingface.upcycle import upcycle, upcycled
from atoll.node.import_export.join_shards import described as checkpoint_described
from atoll.node.import_export.join_shards import open_checkpoint
from atoll.node.import_export.source_options import CheckpointSource, HuggingFaceSource, RunSource, UpcycleOptions
from atoll.node.learning.data.given import open_tokenizer
from atoll.node.learning.model import bridge
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.runs.presets import continuation_of, with_adamw
from atoll.p2p.blobs.store import BLOBS, BlobStore
from atoll.p2p.system.atomic_files import disk, make_folder, read_whole
from atoll.protocols.blobs import manifest_of_bytes, manifest_of_file
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import DIGEST_BYTES, Digest
from atoll.protocols.run.arena import Arena, arena_of
from atoll.protocols.run.lora import is_target
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from atoll.protocols.run.moments import file_count
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec, StartSpec
from atoll.protocols.run.sections.serving import ServingSpec

_NOT_YET = Digest(bytes(DIGEST_BYTES))
"""In the place of digests of weights that were not read yet."""
_SCORES = ("q_proj.weight", "k_proj.weight")
_WEIGHTS, _MOMENTS = "start.safetensors", "moments-{}.safetensors"


class Imported(NamedTuple):
    """What a source gives a new run: parts of its RunSpec, and files."""

    model: ModelSpec
    """The model, with the longest context that the source allows."""
    start: StartSpec | UnsetType = UNSET
    weights: Path = Path()
    tokenizer: bytes | None = None
    """Bytes of `tokenizer.json`; None for a built-in tokenizer."""
    moments: tuple[Path, ...] = ()
    """The moments files of a checkpoint, in their order."""
    recipe: RunSpec | None = None
    """The run that a checkpoint continues; None for a Hugging Face folder."""
    warning: str = ""
    """A line for the user; empty if there is nothing to warn about."""
    serving: ServingSpec | UnsetType = UNSET
    keys_halved: bool = False
    """See LoadedWeights."""

    def applied(self, spec: RunSpec, context: int) -> RunSpec:
        """The spec with this model and start, and `context` tokens a sequence, or fewer if the model has fewer.

        With a recipe, only name, owner, seed and admission come from `spec`.
        """
        if self.recipe is not None:
            ours = {"name": spec.name, "owner": spec.owner, "seed": spec.seed, "admission": spec.admission}
            return replace(self.recipe, version=spec.version, start=self.start, **ours)
        blob = b"" if self.tokenizer is None else manifest_of_bytes(self.tokenizer).id
        name = "bytes" if self.tokenizer is None else "file"
        data = replace(spec.data, tokenizer=name, tokenizer_blob=blob)
        model = replace(self.model, context=min(context, self.model.context))
        # As in the presets: members may share a mixture's experts, and such rounds are not reduced.
        reduced = None if model.experts else spec.reduce
        return replace(
            spec,
            model=model,
            data=data,
            start=self.start,
            serving=self.serving,
            reduce=reduced,
            inner=with_adamw(spec.inner),
        )

    def check(self, spec: RunSpec) -> None:
        """Raise ConfigError if a spec made from this source has another model."""
        if spec.model.lora_rank and self.recipe is not None:
            raise ConfigError(
                "a run from a checkpoint goes on as it was",
                hint="export the weights, and give them with --from-hf",
            )
        if (
            spec.model.lora_rank
            and self.keys_halved
            and any(is_target(name, spec.model.lora_targets) for name in _SCORES)
        ):
            raise ConfigError(
                "biases of keys in these weights are above 128, so keys were halved: an adapter of queries or keys"
                " would not fit the published weights",
                hint="set model.lora_targets=ffn",
            )
        is_same = replace(spec.model.base, context=self.model.context) == self.model
        if not is_same or spec.model.context > self.model.context:
            raise ConfigError(
                "the weights are given: of the model only model.context can be set",
                hint=f"to at most {self.model.context}; or model.lora_rank, to train adapters beside them",
            )


def described(source: RunSource) -> Imported:
    """What the descriptions of a source say, without weights and tokenizer. Raises ConfigError, Divergence."""
    if isinstance(source, CheckpointSource):
        spec, manifest = checkpoint_described(source.folder)
        return Imported(spec.model, recipe=continuation_of(spec, manifest.round + 1))
    model = model_of(source.folder)
    made = upcycled(model, _experts(source.upcycle, model)) if source.upcycle else model
    return Imported(made, start=StartSpec(weights=_NOT_YET, state=_NOT_YET))


def _experts(options: UpcycleOptions, dense: ModelSpec) -> ExpertsSpec:
    return ExpertsSpec(count=options.experts, per_token=options.per_token, ffn=dense.ffn)


@contextmanager
def importing(
    source: RunSource, runs: Path, seed: int, report: Callable[[int, int], None] = lambda done, of: None
) -> Iterator[Imported]:
    """Read a source; its files are in a temporary folder below `runs` until the block ends.

    `report` is told how much of its weights is read: tensors of a folder, bytes of a checkpoint.
    Raises ConfigError, Divergence, DiskFault.
    """
    part = make_folder(runs / f".import.{os.getpid()}.part")
    try:
        if isinstance(source, CheckpointSource):
            yield _from_checkpoint(source, part, report)
        else:
            yield _from_folder(source, part, seed, report)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def store_run(found: Imported, run_folder: Path, write: Callable[[], None]) -> None:
    """Move the files into the run's blob store, then call `write`, which writes the run.

    Raises DiskFault, and what `write` raises; then nothing is there.
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


def _from_folder(source: HuggingFaceSource, part: Path, seed: int, report: Callable[[int, int], None]) -> Imported:
    found = load_folder(source.folder, report)
    if (options := source.upcycle) is not None:
        experts = _experts(options, found.model)
        found = HuggingFaceFolder(*upcycle(found.model, found.theta, experts, seed, options.noise_shift))
    arena = arena_of(found.model)
    start = _write_start(part / _WEIGHTS, bridge.gather(found.theta, arena), arena)
    tokenizer = _check_tokenizer(source.folder, found.model.vocab)
    serving = read_serving(source.folder, found.model.vocab)
    return Imported(
        model=found.model,
        start=start,
        weights=part / _WEIGHTS,
        tokenizer=tokenizer,
        serving=UNSET if serving == ServingSpec() else serving,
        keys_halved=found.keys_halved,
    )


def _from_checkpoint(source: CheckpointSource, part: Path, report: Callable[[int, int], None]) -> Imported:
    found = open_checkpoint(source.folder, report)
    start = _write_start(part / _WEIGHTS, found.theta(), found.arena)
    paths = [part / _MOMENTS.format(number) for number in range(file_count(found.spec.model))]
    for number, path in enumerate(paths):
        write_file(path, found.moments(number))
    start = replace(start, moments=b"".join(map(_blob_of, paths)))
    recipe = continuation_of(found.spec, found.manifest.round + 1)
    tokenizer = _read_tokenizer(source.folder, recipe)
    warning = "" if found.manifest.quorum else f"{source.folder}: {found.manifest.who_signed()}"
    return Imported(
        model=recipe.model,
        start=start,
        weights=part / _WEIGHTS,
        tokenizer=tokenizer,
        moments=tuple(paths),
        recipe=recipe,
        warning=warning,
    )


def _read_tokenizer(folder: Path, recipe: RunSpec) -> bytes | None:
    """Bytes of the continued run's tokenizer; None if it is a built-in one."""
    if recipe.data.tokenizer != "file":
        return None
    data = read_whole(folder / TOKENIZER_JSON, max_bytes=TOKENIZER_MAX_BYTES)
    if data is None or manifest_of_bytes(data).id != recipe.data.tokenizer_blob:
        raise ConfigError(f"{folder / TOKENIZER_JSON} is not the tokenizer of the run")
    return data


def _write_start(path: Path, theta_C4096: Tensor, arena: Arena) -> StartSpec:
    state = state_digest(theta_C4096)
    write_snapshot(path, Snapshot(theta_C4096, -1, state), arena)
    return StartSpec(weights=_blob_of(path), state=state)


def _blob_of(path: Path) -> Digest:
    with disk(path), path.open("rb") as file:
        return manifest_of_file(file).id


def _check_tokenizer(folder: Path, vocab: int) -> bytes | None:
    """Bytes of the folder's `tokenizer.json`, checked; None if it is the tokenizer `bytes`."""
    try:
        data = read_whole(folder / TOKENIZER_JSON, max_bytes=TOKENIZER_MAX_BYTES)
    except CorruptFault as error:
        raise ConfigError(f"{folder / TOKENIZER_JSON} has more than {TOKENIZER_MAX_BYTES >> 20} MiB") from error
    if data is None:
        hint = "a run takes its tokenizer from there; other kinds are not read"
        raise ConfigError(f"{folder} has no {TOKENIZER_JSON}", hint=hint)
    open_tokenizer(data, vocab)
    return None if is_same_tokenizer(data, byte_tokenizer_json()) else data
