"""Measures the free memory and disk of this machine. The arithmetic with them is elsewhere and pure."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from atoll.node.config.devices import devices_of
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.expert_capacity import room_of
from atoll.node.runs.capacity.memory_model import Free
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.run_spec import RunSpec

_SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
_SMI_S = 5.0
_CGROUP = Path("/sys/fs/cgroup")


def measure_free(folder: Path, device: str) -> Free:
    """Free memory, disk and GPU memory now. `folder` need not exist yet; `device` is NodeConfig's."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    memory, limit = psutil.virtual_memory().available, container_free_bytes(_CGROUP)
    return Free(
        memory if limit is None else min(memory, limit),
        shutil.disk_usage(there).free,
        None if device.startswith("cpu") else _gpu_free_bytes(devices_of(device)),
    )


def measure_room(spec: RunSpec, config: NodeConfig, folder: Path) -> Room | None:
    """Room for experts of each layer on this machine now; None if all members of the run train all."""
    return room_of(spec, config, measure_free(folder, config.device)) if splits(spec) else None


def container_free_bytes(folder: Path) -> int | None:
    """Memory that a container's limit leaves (cgroup v2), with droppable file cache; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kinds.get("inactive_file", 0)))
    return None


def _gpu_free_bytes(devices: Sequence[str]) -> int | None:
    """Free memory of `cuda` or `cuda:N`, or of the fullest of several; None if no tool reports it.

    The tool counts all devices, and torch those that CUDA_VISIBLE_DEVICES names, in its order.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        names = [visible.split(",")[number].strip() if visible else str(number) for number in numbers]
        asked = (*_SMI, f"--id={','.join(names)}")
        ran = subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_S, check=True)
        return min(map(int, ran.stdout.splitlines())) << 20
    return None
