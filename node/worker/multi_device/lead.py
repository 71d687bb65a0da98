"""Rank 0's side of the local ranks: starts them, tells them what comes, and notices when one is gone.

`Ranks._follow` is the only way by which values reach them: what changed since the last step is given before the
next one, whoever changed it. Between steps they rest, so that folds, saves and evaluations need not know of them.

A rank that ends takes the worker with it: there are no gradients without it, and the daemon starts all anew from
what is saved. An operation that fails because another rank is gone waits for the thread that knows which one.
"""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.checkpoint.parts import WriteParts
from atoll.node.config.devices import devices_of
from atoll.node.ipc.framing import frame, read_frame
from atoll.node.worker.multi_device.group import RankPlace, check_batch, check_device
from atoll.node.worker.multi_device.modes import check_shards, group_of
from atoll.node.worker.multi_device.replica import Replica, StepMemory
from atoll.p2p.system.child_processes import die_with_parent
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.local import rank_messages
from atoll.protocols.local.worker_messages import StartRequest
from atoll.protocols.run.run_spec import RunSpec

log = logging.getLogger(__name__)

RANK = (sys.executable, "-m", "atoll.node.worker.multi_device.rank")
CLOSE_S = 10.0
NOTICE_S = 30.0
"""From an operation that fails to the notice of who is gone."""
LOST_STATUS = 70
"""Exit status of a worker that lost a rank."""


def end_process(line: str) -> None:
    """Log a line and end at once, as if killed: everything on the disk is whole or not there."""
    log.critical("%s", line)
    os._exit(LOST_STATUS)


class Ranks:
    """The processes of all local ranks but this one."""

    def __init__(self, start: StartRequest, spec: RunSpec, lost: Callable[[str], None] = end_process) -> None:
        """Start them; `join` waits for them. Raises ConfigError for a device that is not here.

        `lost` is called by a thread, with one line, when one ends by itself. `start.device`: several devices.
        """
        devices = devices_of(start.device)
        check_batch(spec.inner.batch, len(devices))
        for device in devices:
            check_device(device)
        self._lost = lost
        self._closing = False
        self._gone = threading.Event()
        self.shard = start.shard
        """Each rank has a part of what is trained; the worker has all of it once more on the host."""
        if self.shard:
            check_shards(spec, len(devices))
        self._spec = spec
        self._frozen = getattr(torch, start.frozen), start.frozen_on_host
        self._memory = StepMemory(start.micro_batch, start.recompute)
        self._group = group_of(RankPlace(0, len(devices), devices[0]), spec, shard=self.shard)
        self._cut: Replica | None = None
        """The parts of the model that this rank has."""
        self._weights_ahead = self._moments_ahead = False
        """They moved since the host had them."""
        self._rendezvous = _rendezvous_file(Path(start.home))
        self._given = (-1, -1)
        self._watches: list[threading.Thread] = []
        self._children = [self._spawn(start, rank, devices) for rank in range(1, len(devices))]

    def join(self) -> None:
        """Until all ranks are there. Raises ConfigError when one refuses, LocalFault when one dies."""
        for rank, child in enumerate(self._children, 1):
            self._await_ready(rank, child)
        for rank, child in enumerate(self._children, 1):
            watch = threading.Thread(target=self._watch, args=(rank, child), name=f"rank-{rank}", daemon=True)
            watch.start()
            self._watches.append(watch)
        with self._together():
            self._group.join(self._rendezvous)

    def build(self, experts: bytes) -> Replica:
        """All build what trains these; what the worker's folds, saves and codec work with."""
        self._given = (-1, -1)
        self._weights_ahead = False
        self._moments_ahead = False
        self._cut = None
        gc.collect()  # what joined the module before keeps itself alive
        with self._together():
            self._broadcast(rank_messages.Build(experts))
            ours = Replica(self._spec, experts, self._group.builds_on, self._frozen, self._group, self._memory)
        if not self.shard:
            return ours
        self._cut = ours
        return Replica(self._spec, experts, "cpu", self._frozen)

    def step(self, replica: Replica, changes: tuple[int, int], window_BT1: NDArray[np.int64], at: int) -> float:
        """One inner step of all; see `Inner.step`. `replica`: what `build` gave.

        `changes`: how often the weights and the moments were changed by other things than steps.
        """
        with self._together():
            self._send_changes(replica, changes)
            self._broadcast(rank_messages.StepRequest(at, len(window_BT1)))
            self._group.broadcast([torch.from_numpy(window_BT1)])
            loss = (self._cut or replica).inner.step(window_BT1, at)
        if self._cut is not None and not self._moments_ahead:
            replica.inner.drop()  # the host need not hold them
        self._weights_ahead = self._moments_ahead = self._cut is not None
        return loss

    def fetch_weights(self, replica: Replica) -> None:
        """Gather the trained values into the replica that `build` returned."""
        if self._weights_ahead:
            assert self._cut is not None
            with self._together():
                self._broadcast(rank_messages.GatherWeights())
                self._group.gather_weights(self._cut, replica)
            self._weights_ahead = False

    def fetch_moments(self, replica: Replica) -> None:
        """Gather the moments into the replica's optimiser."""
        if self._moments_ahead:
            assert self._cut is not None
            atoms = tuple(self._cut.inner.moved())
            with self._together():
                self._broadcast(rank_messages.GatherMoments(atoms))
                self._group.gather_moments(self._cut, atoms, replica)
            self._moments_ahead = False

    def moments(self, replica: Replica) -> tuple[dict[str, Tensor], WriteParts | None]:
        """Adam's state for a save: tensors, and what writes those of which the ranks have parts."""
        if self._cut is None or not self._moments_ahead:
            return replica.inner.state(), None
        cut, atoms = self._cut, tuple(self._cut.inner.moved())
        steps = {name: value for name, value in cut.inner.state().items() if name.startswith("step/")}

        def write(folder: Path) -> None:
            with self._together():
                self._broadcast(rank_messages.Save(str(folder), atoms))
                self._group.save(cut, atoms, folder)

        return steps, write

    def loss_of(self, replica: Replica, changes: tuple[int, int], window_BT1: Tensor) -> Tensor:
        """Loss of windows, without gradient, with the replica's weights. Only where each rank has a part."""
        assert self._cut is not None
        with self._together():
            self._send_changes(replica, changes)
            self._broadcast(rank_messages.LossRequest(len(window_BT1)))
            self._group.broadcast([window_BT1])
            return self._group.loss(self._cut, window_BT1)

    def agree(self, replica: Replica) -> None:
        """Raise LocalFault unless all ranks hold the same bits."""
        with self._together():
            self._broadcast(rank_messages.Agree())
            self._group.agree(replica.trained())

    def _send_changes(self, replica: Replica, changes: tuple[int, int]) -> None:
        """Broadcast weights and moments that changed since the last call."""
        ours = self._cut or replica
        if self._given[0] != changes[0]:
            self._broadcast(rank_messages.Weights())
            self._group.scatter_weights(ours, replica)
        if self._given[1] != changes[1]:
            atoms = tuple(replica.inner.moved())
            self._broadcast(rank_messages.Moments(atoms))
            self._group.scatter_moments(ours, atoms, replica)
        self._given = changes

    def close(self) -> None:
        """End all processes in good order."""
        self._closing = True
        for child in self._children:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        for child in self._children:
            try:
                child.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for watch in self._watches:
            watch.join()
        self._group.leave()

    def _spawn(self, start: StartRequest, rank: int, devices: tuple[str, ...]) -> subprocess.Popen[bytes]:
        threads = threads_of(start.threads, devices)
        child = subprocess.Popen(
            RANK,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _names(rank, len(devices)) | {"OMP_NUM_THREADS": str(threads)},
            preexec_fn=die_with_parent(os.getpid()),
        )
        begin = rank_messages.Begin(
            spec=start.spec,
            rank=rank,
            ranks=len(devices),
            device=devices[rank],
            threads=threads,
            frozen=start.frozen,
            frozen_on_host=start.frozen_on_host,
            shard=start.shard,
            micro_batch=start.micro_batch,
            recompute=start.recompute,
            meeting=str(self._rendezvous),
            gpu_memory=start.gpu_memory,
        )
        _send(child, begin)
        return child

    def _await_ready(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        """Wait for a rank's answer. Raises unless it is ready."""
        assert child.stdout is not None
        match read_frame(child.stdout.fileno(), rank_messages.RankAnswer):
            case rank_messages.RankReady():
                return
            case rank_messages.RankRefused(message, hint):
                raise ConfigError(f"local rank {rank}: {message}", hint=hint)
        raise LocalFault(f"local rank {rank} ended before it was ready", hint="see the worker's log")

    def _watch(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with child.stdout:
            while os.read(child.stdout.fileno(), 1):
                pass  # it says nothing any more: what comes is its end
        status = child.wait()
        if not self._closing:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._gone.set()
            self._lost(f"local rank {rank} of {len(self._children) + 1} ended with {how}, and the worker with it")

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, BrokenPipeError):
            self._gone.wait(NOTICE_S)
            raise

    def _broadcast(self, ask: rank_messages.RankAsk) -> None:
        for child in self._children:
            _send(child, ask)


def threads_of(threads: int, devices: tuple[str, ...]) -> int:
    """Number of CPU threads for one rank's steps."""
    return max(1, threads // len(devices))


def _send(child: subprocess.Popen[bytes], ask: rank_messages.RankAsk) -> None:
    assert child.stdin is not None
    child.stdin.write(frame(ask))
    child.stdin.flush()


def _names(rank: int, ranks: int) -> dict[str, str]:
    """Environment variables of a rank, as torchrun sets them on one machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def _rendezvous_file(home: Path) -> Path:
    """A file for the ranks to find each other that no earlier process of this worker used."""
    home.mkdir(parents=True, exist_ok=True)
    for old in home.glob("ranks-*"):
        old.unlink()
    return home / f"ranks-{os.getpid()}"
