"""What joining a run will cost this machine, before it joins: arithmetic from the RunSpec, and what is free here.

The figures of memory were compared with one CPU worker that trained and folded a round (tiny with 8 sequences a
step, 10m with 2 and 8, 50m with 1 and 4): they are 5 to 11 % above its peak, for tiny 2 %. Those of a GPU follow
from the tensors that are kept there, and were not measured.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from atoll.node.devices import devices_of
from atoll.protocols.arena import arena_of
from atoll.protocols.coverage import exchange_bytes, largest_payload
from atoll.protocols.model import ModelSpec
from atoll.protocols.payload import payload_bytes
from atoll.protocols.run import RunSpec

MEMBERS = 8
"""Members that the estimate of traffic assumes, or `min_members` where that is more."""
THREAD_FLOPS = 20e9
"""Assumed floating-point operations a second of one CPU thread (measured here: 24e9)."""
GPU_FLOPS = 20e12
ROUND_FLOOR_S = 10.0
"""Assumed least time of a round: connections and finality cost something however small the model."""
DAY_S = 86400.0
_CPU_BASE_BYTES = 380 << 20
_GPU_HOST_BASE_BYTES = 1 << 30
_GPU_BASE_BYTES = 800 << 20
_CPU_PARAMETER_BYTES = 40
"""Weights, gradients and two moments in fp32, integer weights twice, residual, and what a fold needs."""
TRAINED_BYTES = 16
"""Of a parameter on the device that trains it: weight, gradient and two moments."""
_DISK_PARAMETER_BYTES = 40
"""Two saved states of 16 bytes a value, two snapshots of 4."""
_MOMENT_PARAMETER_BYTES = 12
"""Two moments and what is unsaid; deleted when newer snapshots are there."""
_OPEN_ROUNDS = 64
_SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
_SMI_S = 5.0


class Machine(msgspec.Struct, frozen=True):
    """What this machine has to offer now."""

    device: str
    threads: int
    memory_free_bytes: int
    disk_free_bytes: int
    gpu_free_bytes: int | None
    """None: no GPU is asked for, or nothing tells."""
    shard: bool = False
    """Of several devices each holds a part of what is trained."""


class Preview(msgspec.Struct, frozen=True):
    """The costs of a run on one machine. Traffic is of one member."""

    parameters: int
    memory_bytes: int
    gpu_bytes: int
    """0 where the worker computes on the CPU."""
    disk_bytes: int
    """At most: with 64 rounds open."""
    join_bytes: int
    """Downloaded once: a snapshot of the weights, and a checkpoint's moments where the run begins with them."""
    payload_bytes: int
    members: int
    """Assumed."""
    round_s: float
    """Assumed."""
    round_bytes: int
    """To and from all others together, without records."""
    rounds_day: float
    """Never more than the run has."""
    day_up_bytes: int
    day_down_bytes: int
    text: str
    """Name of the file that each member must have; empty where none is needed."""


def preview_of(spec: RunSpec, machine: Machine) -> Preview:
    """Pure."""
    members = max(MEMBERS, spec.pace.min_members)
    payload = largest_payload(spec)
    round_s = round_time_s(spec, machine)
    rounds_day = min(float(spec.outer.rounds), DAY_S / round_s)
    each_way = round_bytes(spec, members)
    devices = devices_of(machine.device)
    on_gpu = devices[0] != "cpu"
    moments = _MOMENT_PARAMETER_BYTES * spec.model.parameters if spec.start and spec.start.moments else 0
    return Preview(
        parameters=spec.model.parameters,
        memory_bytes=_host_bytes(spec, len(devices), on_gpu),
        gpu_bytes=_gpu_bytes(spec, len(devices), shard=machine.shard) if on_gpu else 0,
        disk_bytes=_DISK_PARAMETER_BYTES * spec.model.parameters + moments + _OPEN_ROUNDS * members * payload,
        join_bytes=4 * spec.model.parameters + moments,
        payload_bytes=payload,
        members=members,
        round_s=round_s,
        rounds_day=rounds_day,
        round_bytes=each_way,
        day_up_bytes=int(each_way * rounds_day),
        day_down_bytes=int(each_way * rounds_day),
        text=spec.data.source.removeprefix("file:") if spec.data.source.startswith("file:") else "",
    )


def round_bytes(spec: RunSpec, members: int) -> int:
    """Payload bytes of a round, each way: everybody's, or in a reduced round one and as much again, reduced.

    Where rounds exchange fragments, their mean.
    """
    payload = exchange_bytes(spec) // spec.outer.fragments
    if spec.reduce is None or members <= spec.reduce.above:
        return payload * (members - 1)
    return payload + payload_bytes(spec.compress.codec, arena_of(spec.model).chunks, spec.reduce.k)


def round_time_s(spec: RunSpec, machine: Machine) -> float:
    """Assumed seconds of a late round: 6 operations a parameter and token at the assumed speed, or the floor."""
    tokens = spec.outer.stages[-1].steps * spec.inner.batch * spec.model.context
    devices = devices_of(machine.device)
    speed = GPU_FLOPS * len(devices) if devices[0] != "cpu" else THREAD_FLOPS * machine.threads
    return max(ROUND_FLOOR_S, 6.0 * spec.model.parameters * tokens / speed)


def activation_bytes(model: ModelSpec, sequences: int) -> int:
    """What the backward pass keeps, in fp32: about 8 widths and 4 ffn widths a layer and token, and the logits."""
    token = 4 * (model.layers * (8 * model.dim + 4 * model.ffn) + 3 * model.vocab)
    return token * model.context * sequences


def this_machine(folder: Path, device: str, threads: int, *, shard: bool = False) -> Machine:
    """Ask the system. `folder`: where the run would live; it need not exist yet."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    return Machine(
        device,
        threads,
        psutil.virtual_memory().available,
        shutil.disk_usage(there).free,
        _gpu_free_bytes(devices_of(device)) if not device.startswith("cpu") else None,
        shard,
    )


def _host_bytes(spec: RunSpec, devices: int, on_gpu: bool) -> int:
    """Of all processes: each device beyond the first has one, on a CPU with a copy of what is trained."""
    parameters, more = spec.model.parameters, devices - 1
    if on_gpu:
        return _GPU_HOST_BASE_BYTES * devices + (_CPU_PARAMETER_BYTES - 12) * parameters
    whole = _CPU_BASE_BYTES * devices + (_CPU_PARAMETER_BYTES + TRAINED_BYTES * more) * parameters
    return whole + activation_bytes(spec.model, spec.inner.batch)


def _gpu_bytes(spec: RunSpec, devices: int, *, shard: bool) -> int:
    """Of each."""
    trained = TRAINED_BYTES * spec.model.parameters // (devices if shard else 1)
    return _GPU_BASE_BYTES + trained + activation_bytes(spec.model, -(-spec.inner.batch // devices))


def _gpu_free_bytes(devices: Sequence[str]) -> int | None:
    """Free memory of `cuda` or `cuda:N`, of several that of the fullest; None where no tool tells."""
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        ran = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=True)
        return min(int(ran.stdout.splitlines()[number]) for number in numbers) << 20
    return None
