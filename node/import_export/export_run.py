"""Exports a run's newest weights in this home as a Hugging Face folder. Needs no running node.

The source is what the worker saves after each round, or a snapshot file. A running node may replace the files
meanwhile: the newest of them are copied, and where that fails there is one line, and a second try succeeds.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.node.checkpoint.base_weights import open_base
from atoll.node.checkpoint.local import AVERAGE, FINAL, LocalState, load_local
from atoll.node.checkpoint.read_only import read_final
from atoll.node.checkpoint.snapshot import Snapshot, read_own_snapshot
from atoll.node.checkpoint.tensorfile import read_atom
from atoll.node.import_export.huggingface.folder import save_folder
from atoll.node.import_export.huggingface.lora import merged_reader
from atoll.node.import_export.huggingface.serving import byte_tokenizer_json, tokenizer_files
from atoll.node.import_export.model_card import MODEL_CARD, model_card
from atoll.node.learning.data import corpus
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.data.tokens import built_in_tokenizer
from atoll.node.learning.outer.fixed import state_digest
from atoll.p2p.blobs.store import BLOBS, blob_path
from atoll.p2p.system.atomic_files import read_whole
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import Digest
from atoll.protocols.local.control_messages import RoundStatus
from atoll.protocols.run.arena import arena_of, state_arena_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, DataSpec, RunSpec
from atoll.protocols.run.sized_payload import table_numbers

STATE = "state"
"""Folder of the worker's saved generations, below the run's."""


class Exported(NamedTuple):
    """What an export wrote."""

    class_name: str
    """Class of the model in transformers."""
    round: int
    state: Digest


def export_run(
    spec: RunSpec,
    run_folder: Path,
    to: Path,
    snapshot: Path | None,
    data: str,
    *,
    average: bool = False,
    rows: Sequence[RoundStatus] = (),
    replace: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Exported:
    """Write `to` from a snapshot file, or from what the worker saved below `run_folder`.

    `average`: the average of final states in place of the newest. `data` is the path of a `file:` source's text,
    from which its tokenizer is trained again; `rows` is the log of the run, for the model card; with `replace` one
    may be there; `report` is told how many of how many tensors are written. Raises ConfigError, CorruptFault,
    DiskFault.
    """
    spec.model.check_decoder()
    found = chosen_weights(spec, run_folder, snapshot, average=average)
    serving = spec.serving or None
    files = tokenizer_files(tokenizer_json(spec.data, data, run_folder / BLOBS), spec.model.context, serving)
    files[MODEL_CARD] = model_card(spec, found.round, found.state, rows, is_average=average)
    read = atom_reader(spec, found, run_folder / BLOBS, report)
    named = save_folder(to, spec.model.base, read, files, serving, replace=replace)
    return Exported(named, found.round, found.state)


def atom_reader(
    spec: RunSpec, weights: Snapshot, blobs: Path, report: Callable[[int, int], None] = lambda done, of: None
) -> Callable[[str], Tensor]:
    """Atoms of `spec.model.base` by name, as int32 in their shape; `report` is told of each.

    Those of a LoRA run are merged with its base, which is in the folder `blobs`. Raises ConfigError, CorruptFault.
    """
    numbers, count = itertools.count(1), len(atoms(spec.model.base))
    own = trained_reader(spec.model, weights)
    atom = own
    if spec.base:
        atom = merged_reader(spec.model, own, open_base(spec, blob_path(blobs, spec.base)))

    def read(name: str) -> Tensor:
        report(next(numbers), count)
        return atom(name)

    return read


def trained_reader(model: ModelSpec, weights: Snapshot) -> Callable[[str], Tensor]:
    """Atoms that a run trains by name, as int32 in their shape."""
    places = {place.name: place for place in arena_of(model).placements}
    return lambda name: read_atom(weights.theta_C4096, places[name])


def chosen_weights(spec: RunSpec, run_folder: Path, snapshot: Path | None, *, average: bool = False) -> Snapshot:
    """The weights of a snapshot file, else the newest that were saved, or their average; as `export_run`."""
    if snapshot is None:
        return saved_weights(spec, run_folder, average=average)
    if average:
        raise ConfigError("--average is kept beside the newest state", hint="drop --average or --snapshot")
    arena = state_arena_of(spec.model, spec.outer.momenta, table_numbers(spec))
    return read_own_snapshot(snapshot, arena, state_digest)


def tokenizer_json(data: DataSpec, path: str, blobs: Path) -> str:
    """The JSON of a run's tokenizer; a tokenizer that travels with the run is read from the folder `blobs`.

    Raises ConfigError, Unreachable when a first fetch of its text fails.
    """
    if data.tokenizer == "bytes":
        return byte_tokenizer_json()
    if data.tokenizer == "file":
        return _read_tokenizer(blob_path(blobs, data.tokenizer_blob), Digest(data.tokenizer_blob))
    text = corpus.load_corpus(data.source, path, default_cache())
    tokens = built_in_tokenizer(data.tokenizer, text.train)
    if data.digest and corpus.text_digest(text, tokens.identity) != data.digest:
        raise ConfigError(
            f"{data.source} here is not the text of this run", hint="give the run's own text: --data PATH"
        )
    return tokens.identity.decode()


def _read_tokenizer(path: Path, blob: Digest) -> str:
    data = read_whole(path, max_bytes=TOKENIZER_MAX_BYTES)
    if data is None or manifest_of_bytes(data).id != blob:
        raise ConfigError(
            "the tokenizer of this run is not in this home", hint="start the node: it fetches it from the others"
        )
    return data.decode()


def load_saved(spec: RunSpec, run_folder: Path) -> LocalState | None:
    """What the worker saved last, None before that. Raises CorruptFault for another digest, DiskFault."""
    found = load_local(run_folder / STATE, spec.id)
    if found is not None and state_digest(found.tensors[FINAL]) != found.body.state:
        raise CorruptFault(f"{run_folder / STATE}: the weights do not have the digest that was saved with them")
    return found


def saved_weights(spec: RunSpec, run_folder: Path, *, average: bool = False) -> Snapshot:
    """The newest final weights that the worker saved, or with `average` the average of final states up to them.

    Raises ConfigError where there are none, CorruptFault, DiskFault. The weights are a copy: of a running node
    the file may get newer values while it is read.
    """
    lacks = ConfigError(
        f"there are no weights of {spec.name!r} in this home yet", hint="train first, or give --snapshot FILE"
    )
    if not average:
        newest = read_final(run_folder / STATE, spec.id, state_digest)
        if newest is None:
            raise lacks
        return newest
    found = load_saved(spec, run_folder)
    if found is None:
        raise lacks
    if AVERAGE not in found.tensors:
        raise ConfigError(
            f"this node keeps no average of {spec.name!r}",
            hint="wait for final rounds; or set average_rounds in config.toml and start the node again",
        )
    values_C4096 = found.tensors[AVERAGE]
    return Snapshot(values_C4096, found.body.final, state_digest(values_C4096))
