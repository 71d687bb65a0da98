"""Which runs fit into this machine's memory: into all that it has, and into what is free now.

Only `measure_machine` reads the machine. Who cannot hold a run with everything else closed cannot train it.
"""

import msgspec
import psutil
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.config.roles import Role
from atoll.node.runs.capacity.free_resources import gpu_memory, room_of, states_of, trained_of
from atoll.node.runs.capacity.join_preview import MEMBERS
from atoll.node.runs.capacity.memory_model import Free, Needs, needs_of
from atoll.node.runs.presets import NAMES, preset
from atoll.p2p.system.control_group import memory_left, memory_limit
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.model_spec import slice_counts
from atoll.protocols.run.run_spec import MAX_HOLDERS, RunSpec

_NOBODY = peer_id_of(bytes(32))
"""Owner of presets that are only looked at."""
_LESSER: tuple[Role, ...] = ("evaluate", "relay")
"""Roles of a machine that cannot train, the more useful one first."""
_SLICES, _SHARE = 8, 4
"""About how many FFN slices a weak machine is told of, and the part of them that is counted: a quarter."""


class Machine(msgspec.Struct, frozen=True):
    """Memory of a machine, in bytes. Of a device None: steps are taken on the CPU, or no tool reports it."""

    memory_bytes: int
    """Of the host; where a container has a limit, that."""
    memory_free_bytes: int
    device: str
    """As in NodeConfig, never `auto`."""
    device_bytes: int | None = None
    """Of the smallest device, if there are several."""
    device_free_bytes: int | None = None
    gpu_memory_percent: int = 0
    """What its user lets the node take of a device, if not all: the bytes above are of that share."""


class PresetFit(msgspec.Struct, frozen=True):
    """What a preset needs on a machine, in bytes, and whether it is there."""

    preset: str
    parameters: int
    memory_bytes: int
    device_bytes: int
    """Of each GPU; 0 where steps are taken on the CPU."""
    fits: bool
    """Into all memory of the machine."""
    fits_now: bool
    """Into what is free of it."""
    slices: int = 0
    """FFN slices that `run new --slices` could cut it into, about eight; 0: it has experts."""
    share: int = 0
    """A quarter of these: what the following is about."""
    share_memory_bytes: int = 0
    share_device_bytes: int = 0
    share_fits: bool = False
    """Whether a node offers to train it where nothing else uses the memory."""


def measure_machine(device: str, gpu_memory_percent: int = 0) -> Machine:
    """The memory of this machine now, of a GPU at most so much of it; 0: all. `device` is NodeConfig's."""
    memory, limit, left = psutil.virtual_memory(), memory_limit(), memory_left()
    gpu = None if device.startswith("cpu") else gpu_memory(devices_of(device), gpu_memory_percent)
    return Machine(
        memory.total if limit is None else min(memory.total, limit),
        memory.available if left is None else min(memory.available, left),
        device,
        gpu and gpu.whole,
        gpu and gpu.free,
        gpu_memory_percent if gpu else 0,
    )


def needs_here(spec: RunSpec, config: NodeConfig, machine: Machine) -> Needs:
    """Memory that the run needs here; of a mixture that members share, with our share of the experts.

    With moments in eight bits where it fits the machine with them alone.
    """
    room = room_of(spec, config, _whole(machine))
    return _needs_with(spec, config, machine, trained_of(spec, room, max(MEMBERS, spec.pace.min_members)))


def _needs_with(spec: RunSpec, config: NodeConfig, machine: Machine, experts: int | None) -> Needs:
    return needs_of(spec, states_of(spec, config, _whole(machine), experts, spare=0.0), experts)


def _whole(machine: Machine) -> Free:
    return Free(machine.memory_bytes, 0, machine.device_bytes)


def shortage(needs: Needs, machine: Machine) -> str:
    """Why a run with these needs can never work here, as text; empty if it can."""
    return _lacking(needs, machine, machine.memory_bytes, machine.device_bytes, "here")


def shortage_now(needs: Needs, machine: Machine) -> str:
    """What is in use of the memory that a run with these needs, as text; empty if all of it is free."""
    return _lacking(needs, machine, machine.memory_free_bytes, machine.device_free_bytes, "free now")


def able_role(spec: RunSpec, config: NodeConfig, machine: Machine) -> Role | None:
    """The role that a machine can take which lacks the memory to train a run; None: none."""
    lesser = {role: replace(config, roles=(role,)) for role in _LESSER}
    needs = {role: needs_here(spec, one, machine) for role, one in lesser.items()}
    return next((role for role in _LESSER if not shortage(needs[role], machine)), None)


def presets_here(config: NodeConfig, machine: Machine) -> list[PresetFit]:
    """All presets, the smallest first."""
    rows = []
    for name in NAMES:
        spec = preset(name, _NOBODY, 1)
        needs = needs_here(spec, config, machine)
        fits, fits_now = not shortage(needs, machine), not shortage_now(needs, machine)
        row = PresetFit(name, spec.model.parameters, needs.host, needs.device, fits, fits_now)
        rows.append(_with_share(row, in_slices(spec), config, machine))
    return sorted(rows, key=lambda row: row.parameters)


def _with_share(row: PresetFit, spec: RunSpec | None, config: NodeConfig, machine: Machine) -> PresetFit:
    if spec is None:
        return row
    slices, share = spec.model.ffn_slices, spec.model.ffn_slices // _SHARE
    needs = needs_of(spec, config, share)
    return replace(
        row,
        slices=slices,
        share=share,
        share_memory_bytes=needs.host,
        share_device_bytes=needs.device,
        share_fits=share <= _offered(spec, config, machine),
    )


def _offered(spec: RunSpec, config: NodeConfig, machine: Machine) -> int:
    """Slices of each layer that a node offers by itself with all of the machine's memory free; 0 if none fits."""
    room = room_of(spec, config, _whole(machine))
    fits = room and not shortage(_needs_with(spec, config, machine, room.experts), machine)
    return room.experts if room and fits else 0


def in_slices(spec: RunSpec) -> RunSpec | None:
    """The run in about eight FFN slices, of which a member may train some; None where it cannot have them.

    Audits go: they need contributions to the whole model.
    """
    counts = [count for count in slice_counts(spec.model.ffn) if count >= _SHARE]
    if spec.model.expert_count or not counts:
        return None
    count = min(counts, key=lambda count: (abs(count - _SLICES), -count))
    model, outer = replace(spec.model, ffn_slices=count), replace(spec.outer, holders=MAX_HOLDERS)
    sliced = replace(spec, model=model, outer=outer, reduce=None, audit=UNSET)
    try:
        sliced.check()
    except ConfigError:
        return None
    return sliced


def slices_here(spec: RunSpec, config: NodeConfig, machine: Machine) -> tuple[int, int]:
    """(slices of each layer that this machine could train, of how many), were the run in slices; zeros: none."""
    sliced = in_slices(spec)
    ours = _offered(sliced, config, machine) if sliced else 0
    return (ours, sliced.model.ffn_slices) if sliced and ours else (0, 0)


def largest(rows: list[PresetFit]) -> str:
    """The largest preset that fits; empty if none does."""
    return next((row.preset for row in reversed(rows) if row.fits), "")


def _lacking(needs: Needs, machine: Machine, memory: int, device: int | None, where: str) -> str:
    if needs.host > memory:
        return f"it needs {_gb(needs.host)} of memory, and {_gb(memory)} are {where}"
    if device is not None and needs.device > device:
        limit = f" by guest.gpu_memory {machine.gpu_memory_percent}" if machine.gpu_memory_percent else ""
        return f"it needs {_gb(needs.device)} of {machine.device}, and {_gb(device)} are {where}{limit}"
    return ""


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
