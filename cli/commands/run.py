"""`run new | list | show | find`: runs are signed files; making one starts nothing."""

import json
import os
from pathlib import Path
from typing import Any

import click
import msgspec

from atoll.cli.client import call
from atoll.cli.commands.find import find
from atoll.cli.commands.new_run import DATA_HELP, UPCYCLE_FORM, Draft, fit_check, origin_of, text_source, write_run
from atoll.cli.formatting import number, print_json, print_table, size, span
from atoll.cli.options import home_option, json_option
from atoll.cli.preview_lines import expert_lines, need_lines
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config, to_struct
from atoll.node.import_export.source_options import CheckpointSource
from atoll.node.learning.data.tokenizer_choice import choose_tokenizer
from atoll.node.runs.capacity.free_resources import measure_free, room_of
from atoll.node.runs.capacity.join_preview import Preview, preview_of, steps_time_s
from atoll.node.runs.presets import NAMES, fragmented, preset
from atoll.node.runs.run_files import FoundRun, file_name, find_run, keep_text_path, runs_of
from atoll.protocols.errors import AtollError, ConfigError, counted
from atoll.protocols.ids import PeerId, peer_id_of
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload
from atoll.protocols.local.control_messages import CommandDone, ExcludePeer, GetStatus, Status
from atoll.protocols.run.admission import MAX_PUZZLE_BITS, MODES, AdmissionSpec, Mode
from atoll.protocols.run.run_spec import RunSpec, open_run

PRESET, DATA = "tiny", "builtin:shakespeare"
UNSIGNED = peer_id_of(bytes(32))
"""Owner of a run that is not signed yet."""
FRAGMENTS_HELP = "Exchange the model in P parts, in P times as many rounds: a lower peak rate, as many bytes."
PUZZLE_HELP = "Newcomers to an open run solve a puzzle: 20 bits take some seconds, each more doubles it."
FIXED = ("version", "owner", "name", "data", "admission", "start", "serving")
"""What `--set` may not touch."""


@click.group()
def run() -> None:
    """Make, list, show and find runs."""


run.add_command(find)


@run.command()
@click.argument("name")
@home_option
@json_option
@click.option("--preset", "size_name", type=click.Choice(NAMES), help="Model size and recipe; default: tiny.")
@click.option("--data", "source", help=DATA_HELP)
@click.option(
    "--column", metavar="NAME", help="Of rows (JSON lines, Parquet, Arrow), where the text is; text if absent."
)
@click.option(
    "--tokenizer", "chosen", metavar="bytes|bpe8k|FILE", help="FILE: a tokenizer.json; it travels with the run."
)
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only rows that say so count.")
@click.option(
    "--from-hf",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Start from weights and tokenizer of a Hugging Face folder; the preset gives the recipe only.",
)
@click.option("--upcycle", metavar=UPCYCLE_FORM, help="Make experts of its feed-forward.")
@click.option("--without-fit", is_flag=True, help="Start though the weights say less of the text than a count.")
@click.option(
    "--from-checkpoint",
    "saved",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with what is left of a run that was saved; any number of nodes (see `atoll checkpoint`).",
)
@click.option("--seed", type=click.IntRange(0), help="Of weights and data order; random if absent.")
@click.option("--admission", "mode", default="open", type=click.Choice(MODES), help="Who may join.")
@click.option(
    "--member", "members", multiple=True, metavar="PEERID", help="Admitted by name (see `atoll id show`)."
)
@click.option("--puzzle", type=click.IntRange(1, MAX_PUZZLE_BITS), metavar="BITS", help=PUZZLE_HELP)
@click.option("--fragments", type=click.IntRange(1), metavar="P", help=FRAGMENTS_HELP)
@click.option("--even-if-too-large", is_flag=True, help="Make it though this machine cannot train it.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="For example --set outer.rounds=20.")
def new(
    name: str,
    home: Home,
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
    seed: int | None,
    mode: Mode,
    members: tuple[PeerId, ...],
    puzzle: int | None,
    fragments: int | None,
    even_if_too_large: bool,
    changes: tuple[str, ...],
) -> None:
    """Write and sign a run; print its id."""
    config = load_config(home.config_toml)
    path = home.run_file(file_name(name))
    if path.exists():
        raise ConfigError(f"there is a run called {name!r} here", hint=f"choose another name, or move {path} away")
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    admission = AdmissionSpec(
        mode=mode, members=tuple(sorted(set(members))), puzzle_bits=msgspec.UNSET if puzzle is None else puzzle
    )
    if saved is not None and (size_name or folder or upcycle or without_fit):
        raise ConfigError(
            "--from-checkpoint brings model and recipe",
            hint="drop --preset, --from-hf, --upcycle and --without-fit",
        )
    if chosen is not None and (saved or folder):
        raise ConfigError("--from-hf and --from-checkpoint bring their tokenizer", hint="drop --tokenizer")
    tokenizer = None if chosen is None else choose_tokenizer(chosen)
    agreed, text = text_source(source or DATA, column, where)
    spec = preset(size_name or PRESET, UNSIGNED, drawn, agreed)
    spec = msgspec.structs.replace(spec, name=name, admission=admission)

    def adjust(spec: RunSpec) -> RunSpec:
        data = spec.data if source is None else msgspec.structs.replace(spec.data, source=agreed)
        spec = msgspec.structs.replace(spec, data=data)
        changed = with_changes(spec if tokenizer is None else tokenizer.applied(spec), changes)
        return changed if fragments is None else fragmented(changed, fragments)

    check_fit = fit_check(config, even_if_too_large=even_if_too_large)
    draft = Draft(spec, adjust, text, tokenizer and tokenizer.data, check_fit)
    origin = CheckpointSource(saved) if saved else origin_of(folder, upcycle, without_fit)
    data = write_run(home, path, draft, origin)
    found = FoundRun(open_run(data), data, path)
    if text:
        keep_text_path(home, found.spec.id, text)
    _print_run(found, home, config, as_json)
    if not as_json:
        theirs = "; each gives the path of its own copy with --data" if text else ""
        click.echo(f"next       atoll start --run {name}; it prints an invite for others{theirs}")


@run.command("list")
@home_option
@json_option
def list_runs(home: Home, as_json: bool) -> None:
    """Runs known in this home."""
    known = runs_of(home)
    if as_json:
        print_json({"runs": [summary(one) for one in known]})
        return
    rows = [
        (s["name"], s["run"][:16], f"{s['parameters']:,}", s["source"], s["path"]) for s in map(summary, known)
    ]
    print_table(("name", "id", "parameters", "data", "file"), rows)


@run.command()
@click.argument("wanted", metavar="NAME|ID|FILE", required=False)
@home_option
@json_option
def show(wanted: str | None, home: Home, as_json: bool) -> None:
    """What a run trains, who signed it, and what it costs here."""
    _print_run(find_run(home, wanted), home, load_config(home.config_toml), as_json)


@run.command()
@click.argument("peer", metavar="PEER")
@home_option
@json_option
@click.option("--from-round", "first", type=click.IntRange(0), help="Default: the oldest that is not final.")
@click.option("--reason", default="", help="What it and all members read, at most 100 characters.")
def exclude(peer: str, home: Home, as_json: bool, first: int | None, reason: str) -> None:
    """Exclude a member from the run that the node here trains, or vote for it if another node owns the run."""
    answer = call(home, ExcludePeer(peer, first, reason), CommandDone)
    if as_json:
        print_json(answer)
    else:
        click.echo(answer.message)


def with_changes(spec: RunSpec, changes: tuple[str, ...]) -> RunSpec:
    """The spec with `key.key=value` set; values are JSON, or else text. Raises ConfigError."""
    tree: dict[str, Any] = msgspec.to_builtins(spec, builtin_types=(bytes,))
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: not a KEY=VALUE", hint="for example --set outer.rounds=20")
        if key.split(".")[0] in FIXED:
            raise ConfigError(
                f"--set {change}: {key} cannot be set",
                hint="it comes from NAME, --data, --from-hf, --admission and the key",
            )
        _put(tree, key.split("."), _value(text))
    changed = to_struct(tree, RunSpec, strict=False)
    changed.check()
    return changed


def summary(found: FoundRun) -> dict[str, Any]:
    """What `--json` shows of a run besides the spec itself."""
    spec = found.spec
    return {
        "run": spec.id.hex(),
        "name": spec.name,
        "owner": spec.owner,
        "path": str(found.path),
        "parameters": spec.model.parameters,
        "payload_bytes": largest_payload(spec),
        "exchange_bytes": exchange_bytes(spec),
        "rounds": spec.outer.rounds,
        "source": spec.data.source,
        "admission": spec.admission.mode,
        "start": spec.start.state.hex() if spec.start else "",
    }


def _who(admission: AdmissionSpec) -> str:
    listed = counted(len(admission.members), "listed peer")
    if admission.mode == "open":
        return "open: anybody" + (f" that solves {admission.puzzle_bits} bits" if admission.puzzle_bits else "")
    if admission.mode == "allowlist":
        return f"the owner and {listed}"
    return f"the owner, {listed} and holders of its invites" if admission.members else "the owner and its invites"


def _start(spec: RunSpec) -> str:
    if not spec.start:
        return f"drawn from the seed {spec.seed}"
    more = f", moments {spec.start.moments.hex()[:16]}" if spec.start.moments else ""
    return f"given: blob {spec.start.weights.hex()[:16]}, state {spec.start.state.hex()[:16]}{more}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = tree.get(key)
        if not isinstance(inner, dict):
            raise ConfigError(f"--set: there is no {'.'.join(keys)}", hint=f"known keys: {', '.join(tree)}")
        tree = inner
    tree[keys[-1]] = value


def _node_in(home: Home, spec: RunSpec) -> Status | None:
    """What the node of this home says, if it takes part in the run now."""
    try:
        now = call(home, GetStatus(), Status)
    except AtollError:
        return None
    return now if now.run == spec.id.hex() else None


def _costs(costs: Preview) -> dict[str, Any]:
    """What `--json` shows of what the run costs here."""
    fields = ("needs", "payload_bytes", "exchange_bytes", "members", "experts", "room")
    whole = ("whole", "whole_payload_bytes", "whole_exchange_bytes")
    return {name: getattr(costs, name) for name in (*fields, *whole)}


def _upload(spec: RunSpec, costs: Preview) -> str:
    """What a member sends to each of the others."""
    said, whole = costs.exchange_bytes, "" if costs.experts is None else " (all experts: {})"
    less = f"{number(4 * spec.model.parameters / said, 0)} times less than fp32 weights"
    if spec.outer.fragments == 1:
        return f"{size(said)} a round and copy, {less}{whole.format(size(costs.whole_exchange_bytes))}"
    peak = f"at most {size(costs.payload_bytes)} a round and copy{whole.format(size(costs.whole_payload_bytes))}"
    return f"{peak}; {size(said)} in {spec.outer.fragments} rounds, one for each fragment, {less}"


def _run_time_s(spec: RunSpec, config: NodeConfig) -> float:
    return steps_time_s(spec, config, spec.steps_before(spec.outer.rounds))


def _print_run(found: FoundRun, home: Home, config: NodeConfig, as_json: bool) -> None:
    about, spec = summary(found), found.spec
    now = _node_in(home, spec)
    free = None if now else measure_free(home.root, config.device)
    room = room_of(spec, config, free) if free else now.room if now else None
    costs = preview_of(spec, config, room, now.members if now else None)
    if as_json:
        print_json(about | {"costs": _costs(costs), "spec": spec})
        return
    stages = ", ".join(f"{stage.steps} from round {stage.first}" for stage in spec.outer.stages)
    lines = (
        f"run        {spec.name}  {about['run']}",
        f"signed by  {spec.owner}",
        f"model      {about['parameters']:,} parameters, context {spec.model.context}, {spec.data.tokenizer}",
        f"weights    {_start(spec)}",
        f"data       {spec.data.source}",
        f"admission  {_who(spec.admission)}",
        f"rounds     {spec.outer.rounds}, inner steps {stages}",
        f"time       about {span(_run_time_s(spec, config))} of steps on this machine, by arithmetic",
        *(f"experts    {line}" for line in expert_lines(spec, costs)),
        *need_lines(costs, free, config),
        f"upload     {_upload(spec, costs)}",
        f"file       {found.path}",
    )
    click.echo("\n".join(lines))
