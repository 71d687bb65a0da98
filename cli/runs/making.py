"""`run new`: writes and signs a run, and says what it costs here."""

import os
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from atoll.cli.runs.changes import with_changes
from atoll.cli.runs.draft import Draft, fit_check, origin_of, text_source, tokenizer_and_digest, write_run
from atoll.cli.runs.methods import fragments_of, keys_of, settings_of
from atoll.cli.runs.showing import print_run
from atoll.node.config.home import Home
from atoll.node.config.node_config import load_config
from atoll.node.import_export.source_options import CheckpointSource
from atoll.node.learning.plugged.loading import with_model
from atoll.node.runs.guard import PUZZLE_BITS, defences_of, guarded, left_out
from atoll.node.runs.presets import fragmented, preset
from atoll.node.runs.run_files import FoundRun, file_name, keep_text_path
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, peer_id_of
from atoll.protocols.run.admission import AdmissionSpec, Mode
from atoll.protocols.run.run_spec import RunSpec, open_run

PRESET, DATA = "tiny", "builtin:shakespeare"
UNSIGNED = peer_id_of(bytes(32))
"""Owner of a run that is not signed yet."""


class RunOptions(NamedTuple):
    """The options of `run new`; None and False are those that were not given."""

    size_name: str | None
    source: str | None
    column: str | None
    where: tuple[str, ...]
    chosen: str | None
    folder: Path | None
    upcycle: str | None
    without_fit: bool
    saved: Path | None
    model: str | None
    seed: int | None
    mode: Mode | None
    members: tuple[PeerId, ...]
    puzzle: int | None
    guard: bool | None
    method: str | None
    slices: int | None
    fragments: int | None
    even_if_too_large: bool
    changes: tuple[str, ...]

    @property
    def for_strangers(self) -> bool:
        """Whether `--admission open` was given; a run is open without it too, but gets no guard and no puzzle."""
        return self.mode == "open"

    @property
    def is_guarded(self) -> bool:
        return self.for_strangers if self.guard is None else self.guard

    @property
    def admission(self) -> AdmissionSpec:
        """Who may join; of a run for strangers, with a puzzle."""
        bits = PUZZLE_BITS if self.puzzle is None and self.for_strangers else self.puzzle
        return AdmissionSpec(
            mode=self.mode or "open",
            members=tuple(sorted(set(self.members))),
            puzzle_bits=bits or msgspec.UNSET,
        )

    def changed(self, spec: RunSpec) -> RunSpec:
        """The run with method, slices, `--set`, fragments and guard. Raises ConfigError."""
        spec = with_changes(spec, settings_of(self.method, self.slices, self.changes))
        count = fragments_of(self.method, self.fragments)
        spec = spec if count is None else fragmented(spec, count)
        return guarded(spec, keys_of(self.changes)) if self.is_guarded else spec


def make_run(name: str, home: Home, options: RunOptions, *, as_json: bool) -> None:
    """Write, sign and print a run. Raises ConfigError, DiskFault."""
    config = load_config(home.config_toml)
    path = home.run_file(file_name(name))
    if path.exists():
        raise ConfigError(f"there is a run called {name!r} here", hint=f"choose another name, or move {path} away")
    drawn = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    saved, source, has_weights = options.saved, options.source, bool(options.saved or options.folder)
    _check_origin(options)
    agreed, text = text_source(source or DATA, options.column, options.where)
    tokenizer, digest = tokenizer_and_digest(agreed, text, options.chosen, has_weights=has_weights)
    spec = preset(options.size_name or PRESET, UNSIGNED, drawn, DATA if digest else agreed)
    spec = spec if options.model is None else with_model(spec, options.model)
    spec = msgspec.structs.replace(spec, name=name, admission=options.admission)

    def adjust(spec: RunSpec) -> RunSpec:
        data = spec.data if source is None else msgspec.structs.replace(spec.data, source=agreed, digest=digest)
        spec = msgspec.structs.replace(spec, data=data)
        return options.changed(spec if tokenizer is None else tokenizer.applied(spec))

    check_fit = fit_check(
        config, even_if_too_large=options.even_if_too_large, may_slice=not (has_weights or options.model)
    )
    draft = Draft(spec, adjust, text, tokenizer and tokenizer.data, check_fit)
    origin = CheckpointSource(saved) if saved else origin_of(options.folder, options.upcycle, options.without_fit)
    data = write_run(home, path, draft, origin, quiet=as_json)
    found = FoundRun(open_run(data), data, path)
    is_own_copy = bool(text) and found.spec.data.index is None
    if is_own_copy:
        keep_text_path(home, found.spec.id, text)
    _warn(options, found.spec)
    print_run(found, home, config, as_json)
    if not as_json:
        _print_left_out(options, found.spec)
        text = "text" if found.spec.privacy and found.spec.privacy.own_data else "copy"
        theirs = f"; each gives the path of its own {text} with --data" if is_own_copy else ""
        click.echo(f"next       atoll start --run {name}; it prints an invite for others{theirs}")


def _print_left_out(options: RunOptions, spec: RunSpec) -> None:
    """Print what a guarded run must do without, and why."""
    if options.is_guarded:
        for key, why in left_out(spec).items():
            click.echo(f"left out   {key}: {why}")


def _warn(options: RunOptions, spec: RunSpec) -> None:
    """Warn who opens a run to strangers and takes off what holds them."""
    if options.for_strangers and not options.is_guarded and not defences_of(spec).judges:
        click.echo("warning: anybody may join, and one bad update can ruin the run: --guard prevents it", err=True)
    if options.for_strangers and not spec.admission.puzzle_bits:
        click.echo("warning: anybody may join as often as it likes: --puzzle makes identities cost time", err=True)


def _check_origin(options: RunOptions) -> None:
    """Raise ConfigError where two options say what is trained, or on what."""
    weights = (options.folder, options.upcycle, options.without_fit)
    text = (options.source, options.column, options.where, options.chosen)
    if options.saved is not None and (options.size_name or any(weights)):
        raise ConfigError(
            "--from-checkpoint brings model and recipe",
            hint="drop --preset, --from-hf, --upcycle and --without-fit",
        )
    if options.model is not None and (options.saved or any(weights) or any(text)):
        raise ConfigError(
            "--model brings its model and examples",
            hint="drop --data, --tokenizer, --column, --where, --from-checkpoint, --from-hf and what goes with it",
        )
