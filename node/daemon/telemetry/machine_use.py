"""Measures what the node takes of its machine: cores and memory of daemon and worker, free memory and disk."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from atoll.node.daemon.web.page_data import ResourceUse

READING_S = 2.0
"""A reading is given again for so long: shares of shorter times would be noise."""


@dataclass
class MachineUse:
    """Readings of this machine, one in READING_S at most."""

    home: Path
    now: Callable[[], float]
    """A clock in seconds."""
    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _spent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """CPU seconds of a process so far, and when that was read, by pid."""
    _newest: ResourceUse | None = None
    _read_at: float = 0.0

    def read(self, worker_pid: int) -> ResourceUse:
        """The current use. `worker_pid` 0: there is no worker."""
        if self._newest is None or self.now() - self._read_at >= READING_S:
            self._newest, self._read_at = self._measure(worker_pid), self.now()
        return self._newest

    def _measure(self, worker_pid: int) -> ResourceUse:
        pids = {os.getpid(), worker_pid} - {0}
        for gone in self._processes.keys() - pids:
            del self._processes[gone]
            self._spent.pop(gone, None)
        daemon_cores, daemon_bytes = self._process(os.getpid())
        worker_cores, worker_bytes = self._process(worker_pid) if worker_pid else (None, None)
        memory = psutil.virtual_memory()
        disk_free_bytes, disk_bytes = disk_of(self.home) or (None, None)
        return ResourceUse(
            daemon_cores=daemon_cores,
            daemon_bytes=daemon_bytes,
            worker_cores=worker_cores,
            worker_bytes=worker_bytes,
            cores=os.cpu_count() or 1,
            memory_free_bytes=memory.available,
            memory_bytes=memory.total,
            disk_free_bytes=disk_free_bytes,
            disk_bytes=disk_bytes,
        )

    def _process(self, pid: int) -> tuple[float | None, int | None]:
        """Cores used since the reading before, and resident bytes; None for a process that is gone."""
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                times, resident = process.cpu_times(), int(process.memory_info().rss)
        except psutil.Error:
            self._processes.pop(pid, None)
            self._spent.pop(pid, None)
            return None, None
        spent_s, at = times.user + times.system, self.now()
        before = self._spent.get(pid)
        self._spent[pid] = (spent_s, at)
        if before is None or at <= before[1]:
            return None, resident
        return max(0.0, spent_s - before[0]) / (at - before[1]), resident


def disk_of(folder: Path) -> tuple[int, int] | None:
    """Free bytes for this user and all bytes of the file system of `folder`; None if it cannot be asked."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total
