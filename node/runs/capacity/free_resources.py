"""Measures the free memory and disk of this machine, and how many experts a node offers to train with them.

A node offers as many experts of each layer as its free memory holds, and passes as many sequences of a step at
once. `measure_…` read the machine; all other functions are pure.

Counted once, when the node starts: what it offers must not rise and fall with the worker's own memory. A tenth of
what is free is left alone, for other programs, and for the gaps that an allocator cannot use; what a step and a
validation need for a while is in the arithmetic itself (node/runs/capacity/memory_model.py).
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import psutil

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.memory_model import Free, Needs, memory_shortage, needs_of
from atoll.p2p.system.control_group import memory_left
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.run_spec import RunSpec

SPARE = 0.1
"""Share of the free memory that is left alone."""
PASS_TOKENS = (16_384, 2_048)
"""Tokens that pass through a model at once where memory allows, on a GPU and on a CPU: more are not faster."""
HOST = "memory"
Where = Literal["auto", "host", "device"]
_SMI = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
_SMI_S = 5.0


def room_of(spec: RunSpec, config: NodeConfig, free: Free) -> Room | None:
    """Room for experts of each layer: as the user says, else as the fullest memory allows. None: all train all."""
    count = splits(spec)
    if not count:
        return None
    if config.experts:
        return Room(experts=min(config.experts, count), of=count)
    most = _most(spec, config, free.memory_bytes, attrgetter("host"))
    host = Room(experts=most, of=count, free_bytes=free.memory_bytes, place=HOST)
    if free.gpu_bytes is None:
        return host
    most = _most(spec, config, free.gpu_bytes, attrgetter("device"))
    device = Room(experts=most, of=count, free_bytes=free.gpu_bytes, place=devices_of(config.device)[0])
    return min(device, host, key=attrgetter("experts"))


def encoding_of(spec: RunSpec, config: NodeConfig, free: Free, room: Room) -> Where:
    """Where contributions are encoded: `config.exchange_on`, and for `auto` the host unless all offered experts
    fit beside error feedback and anchor. Experts come first."""
    if config.exchange_on != "auto" or free.gpu_bytes is None:
        return config.exchange_on
    there = needs_of(spec, msgspec.structs.replace(config, exchange_on="device"), room.experts).device
    return "auto" if there <= (1 - SPARE) * free.gpu_bytes else "host"


def offer_of(spec: RunSpec, config: NodeConfig, free: Free | None) -> tuple[Room | None, NodeConfig]:
    """The room for experts, and `config` with what follows from it. None, and `config`, if all members train all.

    None too where this node does not train. `free`: what the machine has free when the node starts; None where
    nobody measured it.
    """
    if free is None or not config.work.trains:
        return None, config
    room = room_of(spec, config, free)
    config = states_of(spec, config, free, room.experts if room else None)
    if room is None:
        return None, config
    return room, msgspec.structs.replace(config, exchange_on=encoding_of(spec, config, free, room))


def states_of(
    spec: RunSpec, config: NodeConfig, free: Free, experts: int | None = None, *, spare: float = SPARE
) -> NodeConfig:
    """`config` with moments in eight bits if `optimizer_states` is `auto`, and the run fits only with them.

    `spare`: share of the memory that is left alone. Steps differ a little with them, so no node that has the
    memory takes them by itself.
    """
    if config.optimizer_states != "auto" or len(devices_of(config.device)) > 1:
        return config
    quantized = msgspec.structs.replace(config, optimizer_states="int8")
    if _fits(needs_of(spec, config, experts), free, spare):
        return config
    return quantized if _fits(needs_of(spec, quantized, experts), free, spare) else config


def _fits(needs: Needs, free: Free, spare: float = SPARE) -> bool:
    is_on_host = needs.host <= (1 - spare) * free.memory_bytes
    return is_on_host and (free.gpu_bytes is None or needs.device <= (1 - spare) * free.gpu_bytes)


def passes_of(spec: RunSpec, config: NodeConfig, free: Free, experts: int | None = None) -> tuple[int, bool]:
    """(sequences of a step that pass at once on each device, whether layers are recomputed): as `config` says,
    else as many as fit the free memory, recomputed where one would not fit; (1, True) where nothing fits.

    `experts`: of each layer, that are trained here at most; None: all.
    """
    devices, mixture = devices_of(config.device), spec.model.experts
    most = -(-spec.inner.batch // len(devices))
    if mixture is None or not mixture.load_balance:  # else a step in more than one pass costs a forward more
        most = min(most, max(1, PASS_TOKENS[devices[0] == "cpu"] // spec.model.context))
    counts = [config.micro_batch] if config.micro_batch else [most >> by for by in range(most.bit_length())]
    if config.exchange_on == "auto" and free.gpu_bytes and not memory_shortage(spec, free.gpu_bytes, spare=True):
        config = msgspec.structs.replace(config, exchange_on="device")  # as the worker will choose
    ways = [config.recompute == "on"] if config.recompute != "auto" else [False, True]
    for recompute, count in itertools.product(ways, counts):
        chosen = msgspec.structs.replace(config, micro_batch=count, recompute="on" if recompute else "off")
        if _fits(needs_of(spec, chosen, experts), free):
            return count, recompute
    return counts[-1], ways[-1]


def share_of(spec: RunSpec, members: int) -> int:
    """Experts of each layer that one of so many members trains, at most, where all have room."""
    count = splits(spec)
    return -(-count * min(spec.outer.holders, members) // max(1, members))


def trained_of(spec: RunSpec, room: Room | None, members: int) -> int | None:
    """Experts that this node will train: as the user says, else its share up to its room. None: all."""
    if room is None:
        return None
    return min(room.experts, share_of(spec, members)) if room.place else room.experts


def _most(spec: RunSpec, config: NodeConfig, free: int, part: Callable[[Needs], int]) -> int:
    """Most experts whose needs fit into the free memory; 0 also if none fits. The needs rise with the experts."""

    def too_many(experts: int) -> bool:
        return part(needs_of(spec, config, experts)) > (1 - SPARE) * free

    return max(0, bisect_left(range(splits(spec) + 1), True, key=too_many) - 1)


def measure_free(folder: Path, device: str, gpu_memory_percent: int = 0) -> Free:
    """Free memory, disk and GPU memory now, of which the node may take so much; 0: all. `folder` need not exist
    yet; `device` is NodeConfig's."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    memory, limit = psutil.virtual_memory().available, memory_left()
    gpu = None if device.startswith("cpu") else gpu_memory(devices_of(device), gpu_memory_percent)
    return Free(memory if limit is None else min(memory, limit), shutil.disk_usage(there).free, gpu and gpu.free)


def measure_room(spec: RunSpec, config: NodeConfig, folder: Path) -> Room | None:
    """Room for experts of each layer on this machine now; None if all members of the run train all."""
    if not splits(spec):
        return None
    return room_of(spec, config, measure_free(folder, config.device, config.guest.gpu_memory))


class GpuMemory(NamedTuple):
    """Memory of a GPU, or the least of several, in bytes."""

    free: int
    whole: int


def gpu_memory(devices: Sequence[str], percent: int = 0) -> GpuMemory | None:
    """Memory of `cuda` or `cuda:N`, or the least of several; None if no tool reports it. Of each, at most
    `percent` of all it has count; 0: all.

    The tool counts all devices, and torch those that CUDA_VISIBLE_DEVICES names, in its order.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        names = [visible.split(",")[number].strip() if visible else str(number) for number in numbers]
        asked = (*_SMI, f"--id={','.join(names)}")
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_S, check=True)
        rows = [tuple(map(int, line.split(","))) for line in ran.stdout.splitlines()]
        if percent:
            rows = [tuple(min(count, whole * percent // 100) for count in (free, whole)) for free, whole in rows]
        free, whole = (min(column) << 20 for column in zip(*rows, strict=True))
        return GpuMemory(free, whole)
    return None
