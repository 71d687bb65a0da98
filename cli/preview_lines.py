"""What a run costs, as people read it."""

from atoll.cli.formatting import number, room_text, size, span
from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.telemetry.run_outlook import RunOutlook
from atoll.node.runs.capacity.join_preview import Preview
from atoll.node.runs.capacity.memory_model import Free
from atoll.node.runs.guard import defences_of
from atoll.protocols.errors import counted
from atoll.protocols.ids import short
from atoll.protocols.run.invite import Invite
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.privacy import epsilon


def preview_lines(
    spec: RunSpec,
    invite: Invite | None,
    costs: Preview,
    *,
    outlook: RunOutlook | None,
    free: Free,
    config: NodeConfig,
    unix_s: float,
) -> list[str]:
    """What the user agrees to, a line a subject."""
    return [
        f"run        {spec.name}  {short(spec.id)}  by {spec.owner}",
        f"invite     {_source(spec, invite, unix_s)}",
        *([f"name       {config.name}, announced to all members"] if config.name else []),
        *([f"roles      {', '.join(config.roles)}"] if config.roles else []),
        *([f"           {config.work.instead}"] if config.work.instead else []),
        f"model      {model_size(spec)}, context {spec.model.context}, {spec.outer.rounds} rounds",
        *objective_lines(spec),
        *privacy_lines(spec),
        f"now        {outlook_line(spec, outlook)}",
        *(f"{part_word(spec):10} {line}" for line in expert_lines(spec, costs)),
        *need_lines(costs, free, config),
        f"disk       up to {_fit(costs.disk_bytes, free.disk_bytes)}",
        *_traffic(costs, spec.outer.rounds),
        f"data       {_data(spec, costs, config)}",
        f"admission  {_admission(spec, invite)}",
        *liar_lines(spec),
        "safety     the run sends no code; peers that you connect to see your address",
    ]


def model_size(spec: RunSpec) -> str:
    """Parameters of a run's model; of a LoRA run what is trained, and what is frozen."""
    if spec.model.plugin is not None:
        about = f"{spec.model.plugin.name}, by the package {spec.model.plugin.package} that is installed here"
        return f"{spec.model.parameters:,} parameters of {about}"
    if not spec.model.lora_rank:
        return f"{spec.model.parameters:,} parameters"
    return f"{spec.model.parameters:,} parameters of adapters, {spec.model.base.parameters:,} frozen"


def objective_lines(spec: RunSpec) -> list[str]:
    """What members add to the loss of their steps, and whose code that is; nothing in a run without a term."""
    if not spec.objective:
        return []
    found = f"objective  cross-entropy + {spec.objective.weight:g} · {spec.objective.name}"
    if not spec.objective.package:
        return [found]
    return [f"{found}, by the package {spec.objective.package} that is installed here"]


def privacy_lines(spec: RunSpec) -> list[str]:
    """How members protect their data, and what that gives; nothing in a run without privacy."""
    agreed = spec.privacy
    if not agreed:
        return []
    after = ", ".join(f"{epsilon(uses, agreed.noise, agreed.delta):.3g} after {uses}" for uses in (1, 10, 100))
    ends = f"; a member trains until {agreed.most:g}" if agreed.most else ""
    read = spec.steps_before(spec.outer.rounds) * spec.inner.batch
    return [
        f"privacy    gradients of a sequence clipped to {agreed.clip:g}, and noise of {agreed.noise:g} times that",
        f"           ε at δ {agreed.delta:g} for each sequence: {after} steps that use it{ends}",
        f"           a member that takes all steps reads {read:,} sequences, some again if it has fewer",
    ]


def liar_lines(spec: RunSpec, hint: str = "") -> list[str]:
    """What the run does against members that lie. `hint`: for the owner of one in which bad updates count."""
    found = defences_of(spec)
    rules = [f"rule {found.rule}"] if found.rule else []
    rules += [f"each audits {counted(found.audits, 'contribution')} a round"] if found.audits else []
    if not found.judges:
        rules.append(f"no rule against bad updates{hint}")
    if found.probation > 1:
        shown = ", once audits by members that decide show work" if found.voters else ""
        rules.append(f"newcomers decide rounds after {found.probation} final sets{shown}")
        if spec.audit and spec.audit.newcomers:
            rules.append(f"a final set names {spec.audit.newcomers} of them, or as many as it names others")
        if found.probation_256 < 256:
            most = "a quarter of a set's weight together, and " if spec.outer.by_weight else ""
            share = f"{'at most ' if most else ''}{found.probation_256}/256 of their weight"
            rules.append(f"they have {most}{share} for {found.probation} final sets")
    if found.puzzle_bits:
        rules.append(f"an identity costs a puzzle of {found.puzzle_bits} bits")
    if found.excise_rounds:
        rules.append(f"excluded work comes out of the newest {found.excise_rounds} final rounds")
    first, *more = rules
    return [f"liars      {first}", *(f"           {rule}" for rule in more)]


def outlook_line(spec: RunSpec, outlook: RunOutlook | None) -> str:
    """How far the run is, by what its members say."""
    if outlook is None:
        return "unknown: no member was asked, or none answered"
    if outlook.is_complete(spec):
        return f"complete: its owner says that all {spec.outer.rounds} rounds are final"
    nobody, who = outlook.idle == outlook.members, counted(outlook.members, "member")
    if outlook.idle:
        trains = outlook.members - outlook.idle
        who += f" ({trains or 'nobody'} train{'s' * (trains < 2)} now)"
    known = f"round {outlook.round}, {who}, {outlook.final + 1} rounds are final"
    if outlook.loss is not None:
        known += f", training loss {number(outlook.loss)}"
    if nobody:
        return known
    rounds = max(0, spec.outer.rounds - outlook.round)
    speed = f"{number(outlook.tokens_per_s, 0)} tokens/s together"
    if outlook.pace_s is not None:
        return f"{known}; {speed}, {span(outlook.pace_s)} a round, about {span(outlook.pace_s * rounds)} left"
    if outlook.round_s is None:
        return known
    left = f"at least {span(outlook.round_s * rounds)} left"
    return f"{known}; {speed}, {span(outlook.round_s)} of steps a round, {left}"


def part_word(spec: RunSpec) -> str:
    """What the parts are called that a member may train apart."""
    return "slices" if spec.model.ffn_slices else "experts"


def expert_lines(spec: RunSpec, costs: Preview) -> list[str]:
    """Which part of the experts the costs are of; nothing where all members train all."""
    if costs.experts is None or costs.room is None:
        return []
    share = f"your share is {costs.experts} of {costs.room.of} in each layer:"
    if not costs.room.place:
        return [f"{share} at most, as `experts` in config.toml allows"]
    members = f"{counted(costs.members, 'member')}{'' if costs.members_known else ' assumed'}"
    return [f"{share} {members}, {counted(spec.outer.holders, 'holder')} each", room_text(costs.room)]


def need_lines(costs: Preview, free: Free | None, config: NodeConfig) -> list[str]:
    """Memory of the host and of the device; where a share is trained, beside that of all experts.

    `free`: None where the run's own worker has some of it.
    """
    devices = devices_of(config.device)
    host = _fit(costs.needs.host, free.memory_bytes) if free else f"{size(costs.needs.host)} needed"
    memory = f"memory     {host}{_with_all(costs, costs.whole.host)}"
    if devices[0] == "cpu":
        ranks = f" in {len(devices)} processes" if len(devices) > 1 else ""
        return [memory, f"device     CPU, {counted(config.threads, 'thread')}{ranks}"]
    fit = f"{size(costs.needs.device)} needed"
    if free is not None:
        unknown = f"{fit}; how much is free is unknown here"
        fit = unknown if free.gpu_bytes is None else _fit(costs.needs.device, free.gpu_bytes)
    return [memory, f"device     {config.device}: {fit}{_with_all(costs, costs.whole.device)}"]


def _source(spec: RunSpec, invite: Invite | None, unix_s: float) -> str:
    if invite is None:
        return f"none: found in the DHT by its id {spec.id.hex()}"
    signer = "the run's owner" if invite.signer == spec.owner else f"{invite.signer} (not the run's owner)"
    return f"signed by {signer}, valid {span(invite.expires - unix_s)}"


def _fit(needed: int, free: int) -> str:
    verdict = "ok" if needed <= free else "TOO LITTLE"
    return f"{size(needed)} needed, {size(free)} free: {verdict}"


def _with_all(costs: Preview, whole_bytes: int) -> str:
    return "" if costs.experts is None else f" (all experts: {size(whole_bytes)})"


def _traffic(costs: Preview, rounds: int) -> list[str]:
    rate = f"{number(costs.rounds_day, 0 if costs.rounds_day >= 10 else 1)} rounds a day"
    if costs.rounds_day >= rounds:
        rate = f"all {rounds} rounds of the run in less than a day"
    return [
        f"traffic    about {size(costs.day_up_bytes)} up and {size(costs.day_down_bytes)} down a day, "
        f"{size(costs.join_bytes)} down once to join",
        f"           {counted(costs.members, 'member')}{'' if costs.members_known else ' assumed'}, "
        f"{size(costs.round_bytes)} up and down a round, "
        f"{span(costs.round_s)} a round{' as members say' if costs.round_known else ' assumed'}, "
        f"{rate}",
    ]


def _data(spec: RunSpec, costs: Preview, config: NodeConfig) -> str:
    digest = f"; {size(spec.data.size)}" if spec.data.size else ""
    digest += f"; digest {spec.data.digest.hex()[:16]}" if spec.data.digest else ""
    if spec.data.index is not None:
        kept = f"members send what this node trains on; up to {size(config.shard_bytes)} are kept"
        return f"{spec.data.source} ({kept}){digest}"
    if not costs.text:
        return f"{spec.data.source} (needs no file of yours){digest}"
    if spec.privacy and spec.privacy.own_data:
        return f"your own file {config.data}" if config.data else "your own file; give its path with --data"
    if config.data:
        return f"your file {config.data}, which must be {costs.text}{digest}"
    return f"{costs.text}: you need your own copy; give its path with --data{digest}"


def _admission(spec: RunSpec, invite: Invite | None) -> str:
    if spec.admission.puzzle_bits:
        return f"open: everybody may join who solves a puzzle of {spec.admission.puzzle_bits} bits; this node will"
    if spec.admission.mode == "open":
        return "open: everybody may join"
    if spec.admission.mode == "allowlist":
        return "the owner's list: you are on it"
    named = f" for {invite.token[0].name}" if invite and invite.token and invite.token[0].name else ""
    return f"by invitation: this invite carries a permit{named}"
