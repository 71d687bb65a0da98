"""Limits and kills of the control group that this process is in: cgroup v1 and v2, in containers, under systemd.

A limit may be set on the group itself or on any group above it, so all of them count. What cannot be read is no
limit. `/proc/self/cgroup` names the group; where a container shows only its own part of the tree, and still names
the whole path, the root of what it shows is the container's group.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Version 1 has no word for no limit: it says a number near 2⁶³."""


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Most bytes that the processes of the group may use; None: as many as the machine has."""
    limits = [limit for _, limit in _memory_limits(root, own)]
    return min(limits, default=None)


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that the tightest limit leaves, with file cache that the kernel can drop; None without a limit."""
    left = []
    for folder, limit in _memory_limits(root, own):
        used = _number(folder / "memory.current")
        used = _number(folder / "memory.usage_in_bytes") if used is None else used
        if used is not None:
            kinds = _table(folder / "memory.stat")
            cached = kinds.get("total_inactive_file", kinds.get("inactive_file", 0))
            left.append(max(0, limit - used + cached))
    return min(left, default=None)


def usable_cpus(root: Path = ROOT, own: Path = OWN) -> int:
    """CPUs that this process may use at once: those of the machine, its affinity, and the group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders("cpu", root, own) if (quota := _cpu_quota(folder)) is not None]
    return max(1, min(allowed, math.ceil(min(quotas, default=math.inf)) if quotas else allowed))


def group_kills(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Number of processes of the group that the kernel ended for lack of memory; None where it does not count."""
    # The group's own counter is for it and all below it, whichever group's limit was reached.
    for folder in _folders("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _table(folder / name).get("oom_kill")) is not None:
                return count
        return None
    return None


def _memory_limits(root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    for folder in _folders("memory", root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            if limit is not None and limit < UNLIMITED:
                yield folder, limit


def _cpu_quota(folder: Path) -> float | None:
    """In CPUs; None for no quota."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, (folder / "cpu.max").read_text().split())
        return quota / period if quota > 0 and period > 0 else None
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """The folder of the group for one controller, then those above it."""
    with contextlib.suppress(OSError, ValueError):
        rows = [line.split(":", 2) for line in own.read_text().splitlines()]
        version_1 = next((path for _, names, path in rows if controller in names.split(",")), None)
        path = version_1 if version_1 is not None else next((path for _, names, path in rows if not names), "")
        top = root / controller if version_1 is not None else root
        folder = top / path.strip("/")
        if not folder.is_dir() or ".." in folder.parts:
            folder = top
        while True:
            yield folder
            if folder == top:
                return
            folder = folder.parent


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number; nothing where there is no such file."""
    with contextlib.suppress(OSError, ValueError):
        return {name: int(count) for name, count in (line.split() for line in path.read_text().splitlines())}
    return {}
