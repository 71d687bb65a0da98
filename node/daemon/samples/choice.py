"""Whether a node can write sample texts of its run's model, and why not, in one line."""

import importlib.util
import time
from collections.abc import Callable

from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.core.interfaces import NodeView
from atoll.node.daemon.join_plan import JoinPlan
from atoll.node.daemon.rounds.state import Phase
from atoll.node.daemon.samples.sampler import COMMAND, Sampler
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.node.runs.capacity.free_resources import SPARE, measure_free, passes_of
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.capacity.sample_memory import sample_bytes
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.run_spec import RunSpec

STARTING = "the worker is starting"
RESTING = "the node is paused"
PACKAGES = ("transformers", "jinja2")
"""Of the extra `generate`."""


def sampler_of(plan: JoinPlan, log: RoundLog, view: Callable[[], NodeView]) -> Sampler:
    """The sampler of a daemon that is built from `plan`, told of the rounds in `log`; it does not run yet.

    Before each text the node's own work, by `view`, and the machine's memory are looked at.
    """
    spec, config, home = plan.run.spec, plan.config, plan.home

    def in_the_way() -> str:
        return obstacle_of(view()) or shortage_now(spec, measure_free(home.root, "cpu"))

    made = Sampler(
        command=(*COMMAND, str(home.root), spec.id.hex(), config.data),
        folder=home.run(spec.id),
        every_s=config.sample_every_s,
        never=why_never(spec, config, free=plan.free, room=plan.room),
        obstacle=in_the_way,
        wall=time.time,
    )
    log.listeners.append(made.on_event)
    return made


def why_never(spec: RunSpec, config: NodeConfig, *, free: Free, room: Room | None) -> str:
    """Why this node, whose user wants sample texts, writes none while it runs; empty if it does.

    `free`: what the machine had free before the worker started. `room`: see JoinPlan.
    """
    if not config.web:
        return "nobody would see them: this node serves no page (start --web)"
    if not config.work.has_model:
        return "this node holds no model: its role is relay"
    try:
        spec.model.check_decoder()
    except ConfigError as error:
        return str(error)
    if spec.data.tokenizer == "bpe8k" and not spec.data.source.startswith("builtin:"):
        return "the run's tokenizer would be made from its whole text each time"
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        return f"they need the package {missing[0]}: pip install 'atoll[generate]'"
    return _shortage_beside(spec, config, free, room)


def obstacle_of(node: NodeView) -> str:
    """What of the node's own work stands in the way of a text now; empty if nothing.

    A worker that starts takes memory that seems to be free. Who pauses a node wants the machine for other work.
    """
    if not node.is_worker_ready:
        return STARTING
    return RESTING if node.round.phase is Phase.PAUSED else ""


def shortage_now(spec: RunSpec, free: Free) -> str:
    """What the machine lacks for a text now; empty if nothing. The share that is left alone is the training's."""
    need, there = sample_bytes(spec), int((1 - SPARE) * free.memory_bytes)
    return f"a text needs {_gb(need)} of memory, and {_gb(there)} are to spare now" if need > there else ""


def _shortage_beside(spec: RunSpec, config: NodeConfig, free: Free, room: Room | None) -> str:
    """What the machine lacks for texts beside the training; the training comes first, and is not made smaller."""
    experts = room.experts if room else None
    micro_batch, recompute = passes_of(spec, config, free, experts)
    config = replace(config, micro_batch=micro_batch, recompute="on" if recompute else "off")
    need, training = sample_bytes(spec), needs_of(spec, config, experts).host
    there = int((1 - SPARE) * free.memory_bytes)
    if training + need <= there:
        return ""
    return f"a text needs {_gb(need)} of memory beside {_gb(training)} of the node, and {_gb(there)} were to spare"


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
