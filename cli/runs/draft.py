"""Makes a run: from a preset and a text, with weights drawn from the seed or given by a folder."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from msgspec.structs import replace

from atoll.cli.options import UPCYCLE_FORM
from atoll.cli.progress_line import ProgressLine
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.import_export.source_options import (
    CheckpointSource,
    HuggingFaceSource,
    RunSource,
    UpcycleOptions,
    local_folder,
)
from atoll.node.learning.data.dataset import measured
from atoll.node.learning.data.given import vocab_of
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.data.tokenizer_choice import TokenizerChoice, choose_tokenizer
from atoll.node.learning.data.tokens import BYTES_VOCAB
from atoll.node.learning.plugged.loading import examples_of
from atoll.node.runs.capacity.machine_fit import (
    Machine,
    largest,
    measure_machine,
    needs_here,
    presets_here,
    shortage,
    shortage_now,
    slices_here,
)
from atoll.node.runs.packs import add_pack, is_pack, read_pack
from atoll.p2p.blobs.store import BLOBS, BlobStore
from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.p2p.system.key_file import load_or_create
from atoll.protocols.data.file_source import COLUMN, FILE, FileSource, read_filters
from atoll.protocols.data.shard_index import TOKENIZER_FILE
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import PACKED, TOKENIZER_MAX_BYTES, RunSpec, sign_run

FETCHED = ("builtin:", "synthetic:", "hf:")
_KEYS = ("experts", "per_token", "noise_shift")


class Draft(NamedTuple):
    """A run as the user describes it, not signed yet."""

    spec: RunSpec
    """The preset's spec, with any owner."""
    adjust: Callable[[RunSpec], RunSpec]
    """Applies the user's changes to a spec."""
    text: str
    """Path of the text where the source is `file:`."""
    tokenizer: bytes | None = None
    """Bytes of the tokenizer that travels with the run, if the user chose one."""
    check_fit: Callable[[RunSpec], None] = lambda spec: None
    """Called before anything of the run is written; raises ConfigError where it must not be made."""


def fit_check(
    config: NodeConfig, *, even_if_too_large: bool, may_slice: bool = False
) -> Callable[[RunSpec], None]:
    """Refuse runs that this machine can never train, unless the user said so; warn of what it cannot train now.

    `may_slice`: the model is a preset's, so that it can be cut into FFN slices.
    """

    def check(spec: RunSpec) -> None:
        machine = measure_machine(config.device, config.guest.gpu_memory)
        needs = needs_here(spec, config, machine)
        never = shortage(needs, machine)
        if never and not even_if_too_large:
            sliced = _sliced(spec, config, machine) if may_slice else ""
            hint = f"{_smaller(config, machine)}{sliced}, or give --even-if-too-large if others train it"
            raise ConfigError(f"this machine cannot train {spec.name!r}: {never}", hint=hint)
        if line := never or shortage_now(needs, machine):
            what = (
                "cannot train this run" if never else "cannot train this run while other programs use its memory"
            )
            click.echo(f"warning: this machine {what}: {line}", err=True)

    return check


def _smaller(config: NodeConfig, machine: Machine) -> str:
    fitting = largest(presets_here(config, machine))
    return f"choose --preset {fitting}, the largest that fits" if fitting else "no preset fits"


def _sliced(spec: RunSpec, config: NodeConfig, machine: Machine) -> str:
    """What this machine could train of the run, were it in slices; empty if nothing."""
    ours, count = slices_here(spec, config, machine)
    without = " without audits" if spec.audit else ""
    return f", or --slices {count}{without}: then it can train {ours} of {count} slices" if ours else ""


def write_run(home: Home, path: Path, draft: Draft, origin: RunSource | None, *, quiet: bool = False) -> bytes:
    """Sign a run and write it to `path`, its files into the home; the bytes. Raises ConfigError, DiskFault.

    `quiet`: without a line about the progress.
    """
    if origin is None:
        spec = draft.adjust(draft.spec)
        draft.check_fit(spec)
        spec = _complete(spec, draft.text, draft.tokenizer)
        home.make()
        owner = load_or_create(home.identity)
        spec = replace(spec, owner=owner.peer_id)
        if draft.tokenizer is not None:
            BlobStore(home.run(spec.id) / BLOBS).add_bytes(draft.tokenizer)
        _store_text(home, spec, draft.text)
        data = sign_run(spec, owner)
        write_whole(path, data)
        return data
    from atoll.node.import_export.compatibility_check import measure_fit  # loads torch: only to read weights
    from atoll.node.import_export.import_run import described, importing, store_run

    told = described(origin)
    planned = draft.adjust(told.applied(draft.spec, draft.spec.model.context))
    must_have_text(planned, draft.text)
    told.check(planned)
    draft.check_fit(planned)
    home.make()
    owner = load_or_create(home.identity)
    seed, is_bytes = draft.spec.seed, isinstance(origin, CheckpointSource)
    with (
        ProgressLine("reading weights", quiet=quiet) as line,
        importing(origin, home.runs, seed, partial(line.show, is_bytes=is_bytes)) as found,
    ):
        spec = draft.adjust(found.applied(draft.spec, draft.spec.model.context))
        found.check(spec)
        spec = _complete(spec, draft.text, found.tokenizer)
        warnings = [found.warning]
        if isinstance(origin, HuggingFaceSource):
            fit = measure_fit(spec, found.weights, found.tokenizer, draft.text)
            warnings.append(fit.warning(origin.without_fit))
        spec = replace(spec, owner=owner.peer_id)
        data = sign_run(spec, owner)
        _store_text(home, spec, draft.text)
        store_run(found, home.run(spec.id), lambda: write_whole(path, data))
    for warning in filter(None, warnings):
        click.echo(f"warning: {warning}", err=True)
    return data


def must_have_text(spec: RunSpec, text: str) -> None:
    """A checkpoint names the old run's text and has no copy of it. Raises ConfigError before weights are read."""
    is_own = spec.privacy and spec.privacy.own_data  # each member's own: it has no digest
    if spec.data.source.startswith((FILE, PACKED)) and not text and not is_own:
        raise ConfigError(
            f"the text is {spec.data.source}, which the checkpoint does not contain",
            hint="give the path of your copy with --data",
        )


def text_source(chosen: str, column: str | None, where: Sequence[str]) -> tuple[str, str]:
    """What the run says of `--data`, and the path of the text here, empty for one that all can get.

    Each member has the file at a path of its own: the run has only its name. Raises ConfigError.
    """
    if chosen.startswith(FETCHED):
        if column is not None or where:
            raise ConfigError(f"{chosen} has no columns", hint="drop --column and --where")
        return chosen, ""
    path = chosen.removeprefix(FILE)
    if is_pack(Path(path).expanduser()):
        if column is not None or where:
            raise ConfigError(f"{path} is packed: it has no columns", hint="give them to `atoll data pack`")
        return PACKED + Path(path).absolute().name, path
    column = column or COLUMN
    source = FileSource(Path(path).absolute().name, column, read_filters(list(where), column))
    return str(source), path


def _store_text(home: Home, spec: RunSpec, text: str) -> None:
    """Put the shards of a packed text among the run's blobs: from here others get them."""
    if spec.data.index is not None:
        add_pack(Path(text).expanduser(), spec.data.index, BlobStore(home.run(spec.id) / BLOBS).add_file)


def origin_of(folder: Path | None, upcycle: str | None, without_fit: bool) -> HuggingFaceSource | None:
    """From `--from-hf`, `--upcycle` and `--without-fit`. Raises ConfigError."""
    if folder is None:
        if upcycle is not None:
            raise ConfigError("--upcycle makes experts of given weights", hint="give --from-hf DIR too")
        if without_fit:
            raise ConfigError("--without-fit is about given weights", hint="give --from-hf DIR too")
        return None
    return HuggingFaceSource(local_folder(folder), None if upcycle is None else _upcycle(upcycle), without_fit)


def tokenizer_and_digest(
    source: str, text: str, chosen: str | None, *, has_weights: bool
) -> tuple[TokenizerChoice | None, bytes]:
    """The tokenizer of a new run, None if weights or preset say which; `data.digest`, empty if not known yet.

    Raises ConfigError, DiskFault.
    """
    if chosen is not None and has_weights:
        raise ConfigError("--from-hf and --from-checkpoint bring their tokenizer", hint="drop --tokenizer")
    if not source.startswith(PACKED):
        return None if chosen is None else choose_tokenizer(chosen), b""
    if chosen is not None:
        raise ConfigError("a packed text has its tokenizer", hint="drop --tokenizer, or pack the text with it")
    tokenizer, digest = _packed_text(Path(text).expanduser())
    return None if has_weights else tokenizer, digest


def _packed_text(folder: Path) -> tuple[TokenizerChoice, Digest]:
    """The tokenizer of a packed text, and the blob id of its index. Raises ConfigError, DiskFault."""
    index, name = read_pack(folder)
    data = read_whole(folder / TOKENIZER_FILE, max_bytes=TOKENIZER_MAX_BYTES)
    choice = (
        TokenizerChoice("bytes", BYTES_VOCAB) if data is None else TokenizerChoice("file", vocab_of(data), data)
    )
    if choice.vocab != index.vocab:
        raise ConfigError(f"{folder} has another tokenizer than it was packed with", hint="pack the text again")
    return choice, name


def _complete(spec: RunSpec, text: str, tokenizer: bytes | None) -> RunSpec:
    if spec.data.source.startswith(PACKED):
        index, name = read_pack(Path(text).expanduser())
        if index.vocab > spec.model.vocab:
            raise ConfigError(
                f"{text} was packed with {index.vocab} tokens, the model has {spec.model.vocab}",
                hint="pack it with the tokenizer.json of these weights",
            )
        return replace(spec, data=replace(spec.data, digest=name, size=index.total_bytes))
    if spec.privacy and spec.privacy.own_data:  # a digest would tell the others whether they guess it right
        return spec
    return replace(spec, data=measured(spec.data, text, default_cache(), tokenizer, examples_of))


def _upcycle(text: str) -> UpcycleOptions:
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in _KEYS or key in found or not value.isascii() or not value.isdigit() or len(value) > 6:
            raise ConfigError(f"--upcycle {text}: {part!r} is not of the form {UPCYCLE_FORM}")
        found[key] = int(value)
    if "experts" not in found or "per_token" not in found:
        raise ConfigError(f"--upcycle {text}: it needs the form {UPCYCLE_FORM}")
    return UpcycleOptions(found["experts"], found["per_token"], found.get("noise_shift"))
