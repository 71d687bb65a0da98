"""`run list`, `run show`: what a run trains, who signed it, what it costs here."""

from bisect import bisect_right
from typing import Any

import click
import msgspec

from atoll.cli.client import call
from atoll.cli.formatting import number, print_json, print_table, size, span
from atoll.cli.preview_lines import (
    expert_lines,
    liar_lines,
    model_size,
    need_lines,
    objective_lines,
    part_word,
    privacy_lines,
)
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.runs.capacity.free_resources import measure_free, room_of
from atoll.node.runs.capacity.join_preview import Preview, preview_of, steps_time_s
from atoll.node.runs.guard import defences_of
from atoll.node.runs.run_files import FoundRun, find_run, runs_of
from atoll.protocols.errors import AtollError, counted
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload
from atoll.protocols.local.control_messages import GetStatus, Status
from atoll.protocols.run.admission import AdmissionSpec
from atoll.protocols.run.run_spec import RunSpec


def print_runs(home: Home, *, as_json: bool) -> None:
    """Print the runs known in this home."""
    known = runs_of(home)
    if as_json:
        print_json({"runs": [summary(one) for one in known]})
        return
    rows = [
        (s["name"], s["run"][:16], f"{s['parameters']:,}", s["source"], s["path"]) for s in map(summary, known)
    ]
    print_table(("name", "id", "parameters", "data", "file"), rows)


def show_run(wanted: str | None, home: Home, *, as_json: bool) -> None:
    """Print the run that is called so; the only one of this home if None. Raises ConfigError."""
    print_run(find_run(home, wanted), home, load_config(home.config_toml), as_json)


def print_run(found: FoundRun, home: Home, config: NodeConfig, as_json: bool) -> None:
    """Print what a run trains, who signed it, and what it costs here."""
    about, spec = summary(found), found.spec
    now = _node_in(home, spec)
    free = None if now else measure_free(home.root, config.device, config.guest.gpu_memory)
    room = room_of(spec, config, free) if free else now.room if now else None
    costs = preview_of(spec, config, room, now.members if now else None)
    if as_json:
        print_json(about | {"costs": _costs(costs), "liars": defences_of(spec), "spec": spec})
        return
    stages = ", ".join(f"{stage.steps} from round {stage.first}" for stage in spec.outer.stages)
    lines = (
        f"run        {spec.name}  {about['run']}",
        f"signed by  {spec.owner}",
        f"model      {model_size(spec)}, context {spec.model.context}, tokenizer {spec.data.tokenizer}",
        *objective_lines(spec),
        *privacy_lines(spec),
        f"weights    {_start(spec)}",
        f"data       {spec.data.source}",
        f"admission  {_who(spec.admission)}",
        *liar_lines(spec, "; `run new --guard` makes a run with all that there are"),
        f"rounds     {spec.outer.rounds}, inner steps {stages}",
        f"rate       {_rate(spec)}",
        f"time       about {span(_run_time_s(spec, config))} of steps on this machine, calculated, not measured",
        *(f"{part_word(spec):10} {line}" for line in expert_lines(spec, costs)),
        *need_lines(costs, free, config),
        f"upload     {_upload(spec, costs)}",
        f"file       {found.path}",
    )
    click.echo("\n".join(lines))


def summary(found: FoundRun) -> dict[str, Any]:
    """What `--json` shows of a run besides the spec itself."""
    spec = found.spec
    return {
        "run": spec.id.hex(),
        "name": spec.name,
        "owner": spec.owner,
        "path": str(found.path),
        "parameters": spec.model.parameters,
        "base": spec.base.hex() if spec.base else "",
        "payload_bytes": largest_payload(spec),
        "exchange_bytes": exchange_bytes(spec),
        "rounds": spec.outer.rounds,
        "source": spec.data.source,
        "admission": spec.admission.mode,
        "start": spec.start.state.hex() if spec.start else "",
    }


def _rate(spec: RunSpec) -> str:
    """How the learning rate goes, in inner steps of this run."""
    inner = spec.inner
    warm, end = max(0, inner.warmup_steps - inner.first_step), max(0, inner.total_steps - inner.first_step)
    peak = f"{inner.lr:g}" + (f" after {counted(warm, 'step')}" if warm else "")
    least = f"{inner.lr * inner.lr_min:g}"
    if inner.decay_256 is msgspec.UNSET:
        return f"{peak}, on a cosine down to {least} at step {end}"
    if not inner.decay_256:
        return f"{peak}, until the end"
    first = end - inner.decay_steps
    if first < 0:  # a run that continues another one within its decay
        return f"within its fall from {inner.lr:g} down to {least} at step {end}"
    number = bisect_right(range(spec.outer.rounds), first, key=lambda number: spec.steps_before(number + 1))
    return f"{peak}, until step {first} (round {number}); then down to {least} at step {end}"


def _who(admission: AdmissionSpec) -> str:
    listed = counted(len(admission.members), "listed peer")
    if admission.mode == "open":
        return "open: anybody" + (f" that solves {admission.puzzle_bits} bits" if admission.puzzle_bits else "")
    if admission.mode == "allowlist":
        return f"the owner and {listed}"
    return f"the owner, {listed} and holders of its invites" if admission.members else "the owner and its invites"


def _start(spec: RunSpec) -> str:
    if spec.base:
        return f"adapters drawn from the seed {spec.seed}; frozen base: blob {spec.base.hex()[:16]}"
    if not spec.start:
        return f"drawn from the seed {spec.seed}"
    more = f", moments {spec.start.moments.hex()[:16]}" if spec.start.moments else ""
    return f"given: blob {spec.start.weights.hex()[:16]}, state {spec.start.state.hex()[:16]}{more}"


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
