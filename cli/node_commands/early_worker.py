"""Begins a node's worker before the daemon's own modules are imported: after a kill each second of a start counts.

A worker imports torch for longer than the daemon needs until its first message, and waits for none to do so.
"""

from pathlib import Path

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.ipc.worker_pipe import WORKER_LOG, EarlyWorker
from atoll.node.runs.capacity.free_resources import measure_free


async def begin_early(home: Home, config: NodeConfig, worker: EarlyWorker) -> None:
    """Begin the worker of a home that has worked in one run before. Raises DiskFault.

    A home without a run asks its user first, and of several the plan says which one it is.
    """
    logs = _logs(home)
    if len(logs) == 1 and config.work.has_model:
        free = measure_free(home.root, config.device, config.guest.gpu_memory)
        await worker.begin(logs[0], config.guest.nice, free)


def _logs(home: Home) -> list[Path]:
    return sorted(home.runs.glob(f"*/{WORKER_LOG}"))
