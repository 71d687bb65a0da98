"""What joining a run will cost this machine, before it joins: arithmetic from RunSpec and NodeConfig."""

import msgspec

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.free_resources import trained_of
from atoll.node.runs.capacity.memory_model import Free, Needs, needs_of, parts_of
from atoll.node.runs.capacity.open_rounds import open_payloads_of, open_rounds_of, past_payloads_of
from atoll.node.runs.capacity.round_traffic import bitmap_of_first, record_traffic, round_bytes
from atoll.protocols.data.file_source import COLUMN, FILE, parse_file_source
from atoll.protocols.ledger.coverage import exchange_bytes, largest_payload
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec

MEMBERS = 8
"""Members that the estimate of traffic assumes, or `min_members` where that is more."""
THREAD_FLOPS = 20e9
"""Assumed floating-point operations a second of one CPU thread (measured here: 24e9)."""
GPU_FLOPS = 20e12
ROUND_FLOOR_S = 10.0
"""Assumed least time of a round: connections and finality cost something however small the model."""
DAY_S = 86400.0
_DISK_PARAMETER_BYTES = 40
"""Two saved states of 16 bytes a value, two snapshots of 4."""
_MOMENTUM_PARAMETER_BYTES = 16
"""The same of each outer momentum: 4 bytes in each of these."""
_AVERAGE_PARAMETER_BYTES = 16
"""Of an average of final states: the newest, the next one, and those of two saved states."""
_AVERAGED, _AVERAGE_SHARE = 4, 0.1
"""Rounds of an average that is kept unasked, and the most that it may take of the free disk."""
_MOMENT_PARAMETER_BYTES = 12
"""Two moments and the residual of what is trained here; deleted when newer snapshots exist."""


class Preview(msgspec.Struct, frozen=True):
    """The costs of a run on one machine. Traffic is of one member."""

    parameters: int
    needs: Needs
    """Memory with the experts that are trained here."""
    disk_bytes: int
    """Upper bound, reached with as many rounds open as `open_rounds_bytes` allows."""
    join_bytes: int
    """Downloaded once: a snapshot of the weights, a checkpoint's moments where the run begins with them, and the
    frozen base of a LoRA run."""
    payload_bytes: int
    """Size of the largest payload."""
    exchange_bytes: int
    """Sum of one payload of each fragment."""
    members: int
    members_known: bool
    """Whether `members` is known; otherwise it is assumed."""
    round_s: float
    """Seconds a round."""
    round_known: bool
    """Whether `round_s` is what members say; otherwise it is assumed."""
    round_bytes: int
    """Bytes to all other members together, and as many from them; records and leases too (round_traffic.py)."""
    rounds_day: float
    """Rounds a day, at most the rounds of the run."""
    day_up_bytes: int
    day_down_bytes: int
    text: str
    """Name of the file that each member must have; empty where none is needed."""
    experts: int | None
    """Experts of each layer that are trained here, which all costs assume; None if all members train all."""
    room: Room | None
    whole: Needs
    """Memory with all experts."""
    whole_payload_bytes: int
    whole_exchange_bytes: int


def with_average(spec: RunSpec, config: NodeConfig, free: Free) -> NodeConfig:
    """`config` with `average_rounds` where the user has not set it: 4 while an average is better than the newest
    state, in runs whose rate is stable until their end (docs/calibration.md), and it takes little of the disk."""
    if config.average_rounds is not None:
        return config
    averaging = msgspec.structs.replace(config, average_rounds=_AVERAGED)
    pays = spec.inner.decay_256 is not msgspec.UNSET
    has_room = average_bytes(spec, averaging) <= _AVERAGE_SHARE * free.disk_bytes
    return averaging if pays and has_room else msgspec.structs.replace(config, average_rounds=0)


def average_bytes(spec: RunSpec, config: NodeConfig) -> int:
    """Most bytes of the disk that the average of final states takes, if this node keeps one."""
    is_kept = bool(config.average_rounds) and config.work.has_model
    return _AVERAGE_PARAMETER_BYTES * spec.model.parameters if is_kept else 0


def preview_of(
    spec: RunSpec,
    config: NodeConfig,
    room: Room | None,
    members: int | None = None,
    round_s: float | None = None,
) -> Preview:
    """Pure. `room`: of `room_of`, or of the node that runs; `members`: ours included, where they are known.

    `round_s`: seconds of a round, where the members say. `config.device` is not `auto`.
    """
    count = max(spec.pace.min_members, members or MEMBERS)
    experts = trained_of(spec, room, count)
    payload = largest_payload(spec, bitmap_of_first(spec.model, experts))
    known_s, round_s = round_s, round_s or round_time_s(spec, config)
    rounds_day = min(float(spec.outer.rounds), DAY_S / round_s)
    trained, _ = parts_of(spec.model, experts)
    moments = _MOMENT_PARAMETER_BYTES * trained if spec.start and spec.start.moments and config.work.trains else 0
    records_only = int(record_traffic(spec, count, round_s))
    each_way = round_bytes(spec, count, round_s, experts) if config.work.has_model else records_only
    each = _DISK_PARAMETER_BYTES + _MOMENTUM_PARAMETER_BYTES * spec.outer.momenta
    excisable = (spec.pace.excise_rounds or 0) * (count + 1)
    open_payloads = open_payloads_of(open_rounds_of(spec, config.open_rounds_bytes), count)
    base = 4 * spec.model.base.parameters if spec.base else 0
    average = average_bytes(spec, config)
    kept = base + each * spec.model.parameters + average + moments
    kept += (open_payloads + past_payloads_of(spec) + excisable) * payload
    return Preview(
        parameters=spec.model.parameters,
        needs=needs_of(spec, config, experts),
        disk_bytes=kept if config.work.has_model else 0,
        join_bytes=base + 4 * (1 + spec.outer.momenta) * spec.model.parameters + moments
        if config.work.has_model
        else 0,
        payload_bytes=payload,
        exchange_bytes=exchange_bytes(spec, bitmap_of_first(spec.model, experts)),
        members=count,
        members_known=members is not None,
        round_s=round_s,
        round_known=known_s is not None,
        rounds_day=rounds_day,
        round_bytes=each_way,
        day_up_bytes=int(each_way * rounds_day),
        day_down_bytes=int(each_way * rounds_day),
        text=_text(spec.data.source) if config.work.reads_text else "",
        experts=experts,
        room=room,
        whole=needs_of(spec, config),
        whole_payload_bytes=largest_payload(spec),
        whole_exchange_bytes=exchange_bytes(spec),
    )


def round_time_s(spec: RunSpec, config: NodeConfig) -> float:
    """Assumed seconds of a late round: its steps at the assumed speed, or the floor."""
    return max(ROUND_FLOOR_S, steps_time_s(spec, config, spec.outer.stages[-1].steps))


def steps_time_s(spec: RunSpec, config: NodeConfig, steps: int) -> float:
    """Assumed seconds of so many inner steps: 6 operations a parameter and token at the assumed speed."""
    devices = devices_of(config.device)
    speed = GPU_FLOPS * len(devices) if devices[0] != "cpu" else THREAD_FLOPS * config.threads
    return 6.0 * _passed(spec.model) * steps * spec.inner.batch * spec.model.context / speed


def _passed(model: ModelSpec) -> int:
    """Parameters that one token passes through: in a mixture only `per_token` experts of each layer."""
    if model.experts is None:
        return model.base.parameters
    met = min(model.experts.per_token, model.experts.count)
    trained, _ = parts_of(model, met)
    return trained


def _text(source: str) -> str:
    """What each member must have a copy of, and what is read of it."""
    if not source.startswith(FILE):
        return ""
    found = parse_file_source(source)
    column = f", column {found.column}" if found.column != COLUMN else ""
    rows = "".join(f", {each.column} = {each.value}" for each in found.filters)
    return f"{found.name}{column}{rows}"
