"""`run new`: writes and signs a run, and says what it costs here."""

import os
from pathlib import Path
from typing import TypeAlias

import click
import msgspec

from atoll.cli.runs.changes import with_changes
from atoll.cli.runs.draft import Draft, fit_check, origin_of, text_source, tokenizer_and_digest, write_run
from atoll.cli.runs.showing import print_run
from atoll.node.config.home import Home
from atoll.node.config.node_config import load_config
from atoll.node.import_export.source_options import CheckpointSource
from atoll.node.learning.plugged.loading import with_model
from atoll.node.runs.presets import fragmented, preset
from atoll.node.runs.run_files import FoundRun, file_name, keep_text_path
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, peer_id_of
from atoll.protocols.run.admission import AdmissionSpec, Mode
from atoll.protocols.run.run_spec import RunSpec, open_run

PRESET, DATA = "tiny", "builtin:shakespeare"
Given: TypeAlias = tuple[object, ...]
"""Values of options; what is not given is false."""
UNSIGNED = peer_id_of(bytes(32))
"""Owner of a run that is not signed yet."""


def make_run(
    name: str,
    home: Home,
    *,
    as_json: bool,
    size_name: str | None,
    source: str | None,
    column: str | None,
    where: tuple[str, ...],
    chosen: str | None,
    folder: Path | None,
    upcycle: str | None,
    without_fit: bool,
    saved: Path | None,
    model: str | None,
    seed: int | None,
    mode: Mode,
    members: tuple[PeerId, ...],
    puzzle: int | None,
    fragments: int | None,
    even_if_too_large: bool,
    changes: tuple[str, ...],
) -> None:
    """Write, sign and print a run. The arguments are the options of `run new`. Raises ConfigError, DiskFault."""
    config = load_config(home.config_toml)
    path = home.run_file(file_name(name))
    if path.exists():
        raise ConfigError(f"there is a run called {name!r} here", hint=f"choose another name, or move {path} away")
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    admission = AdmissionSpec(
        mode=mode, members=tuple(sorted(set(members))), puzzle_bits=msgspec.UNSET if puzzle is None else puzzle
    )
    _check_origin(model, saved, size_name, (folder, upcycle, without_fit), (source, column, where, chosen))
    agreed, text = text_source(source or DATA, column, where)
    tokenizer, digest = tokenizer_and_digest(agreed, text, chosen, has_weights=bool(saved or folder))
    spec = preset(size_name or PRESET, UNSIGNED, drawn, DATA if digest else agreed)
    spec = spec if model is None else with_model(spec, model)
    spec = msgspec.structs.replace(spec, name=name, admission=admission)

    def adjust(spec: RunSpec) -> RunSpec:
        data = spec.data if source is None else msgspec.structs.replace(spec.data, source=agreed, digest=digest)
        spec = msgspec.structs.replace(spec, data=data)
        changed = with_changes(spec if tokenizer is None else tokenizer.applied(spec), changes)
        return changed if fragments is None else fragmented(changed, fragments)

    check_fit = fit_check(config, even_if_too_large=even_if_too_large)
    draft = Draft(spec, adjust, text, tokenizer and tokenizer.data, check_fit)
    origin = CheckpointSource(saved) if saved else origin_of(folder, upcycle, without_fit)
    data = write_run(home, path, draft, origin, quiet=as_json)
    found = FoundRun(open_run(data), data, path)
    is_own_copy = bool(text) and found.spec.data.index is None
    if is_own_copy:
        keep_text_path(home, found.spec.id, text)
    print_run(found, home, config, as_json)
    if not as_json:
        text = "text" if found.spec.privacy and found.spec.privacy.own_data else "copy"
        theirs = f"; each gives the path of its own {text} with --data" if is_own_copy else ""
        click.echo(f"next       atoll start --run {name}; it prints an invite for others{theirs}")


def _check_origin(
    model: str | None,
    saved: Path | None,
    size_name: str | None,
    weights: tuple[object, ...],
    text: tuple[object, ...],
) -> None:
    """Raise ConfigError where two options say what is trained, or on what."""
    if saved is not None and (size_name or any(weights)):
        raise ConfigError(
            "--from-checkpoint brings model and recipe",
            hint="drop --preset, --from-hf, --upcycle and --without-fit",
        )
    if model is not None and (saved or any(weights) or any(text)):
        raise ConfigError(
            "--model brings its model and examples",
            hint="drop --data, --tokenizer, --column, --where, --from-checkpoint, --from-hf and what goes with it",
        )
