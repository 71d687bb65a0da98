"""The process group of a node's local ranks: who takes which sequences of a step, and what all do at once.

Gloo between CPUs, NCCL between GPUs, with gloo beside it for what lies on the host. Nothing leaves the machine:
the ranks find each other by a file in the node's home, and their connections are on the loopback interface.

Every rank holds the same bits of what is trained. Sums over ranks are the same bits everywhere, and all that
follows from them is the same arithmetic; `agree` looks whether that is so.
"""

import os
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.node.learning.inner.step_share import StepShare
from atoll.node.worker.multi_device.replica import Replica
from atoll.protocols.errors import ConfigError, LocalFault, counted

MEET_S = 100.0
"""A rank's way from Ready to the group on a slow, busy machine."""
STEP_S = 600.0
"""A rank that is silent for so long inside an operation is lost; one that died is noticed at once."""
_NO_PARTS = "asked only where each rank has a part"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankPlace(NamedTuple):
    """One rank of the group, and its collective operations."""

    rank: int
    ranks: int
    device: str


class Group(StepShare):
    """Replicas: each rank has the whole model, and some of the sequences of each step."""

    is_alone = False

    def __init__(self, place: RankPlace) -> None:
        """Not joined yet."""
        self._place = place
        self._sequences = 0
        self._part = 0.0

    @property
    def builds_on(self) -> str:
        """Device on which a module is built before it is `joined`."""
        return self._place.device

    def join(self, meeting: Path) -> None:
        """Wait for all others. Raises RuntimeError when they do not come."""
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = LOOPBACK
        on_gpu = self._place.device != "cpu"
        if on_gpu:
            torch.cuda.set_device(self._place.device)
        store = dist.FileStore(str(meeting), self._place.ranks)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=MEET_S))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=STEP_S),
            store=store,
            rank=self._place.rank,
            world_size=self._place.ranks,
        )

    def leave(self) -> None:
        """Before another group can be joined in this process."""
        dist.destroy_process_group()

    def begin(self, sequences: int) -> None:
        """Choose this rank's rows of a step of at least as many sequences as ranks."""
        ranks = self._place.ranks
        first, stop = (sequences * at // ranks for at in (self._place.rank, self._place.rank + 1))
        self._sequences = sequences
        self.rows = slice(first, stop)
        self._part = (stop - first) / sequences
        self.weight = self._part * ranks

    def passes(self, here: int, most: int) -> int:
        """As many in all ranks: those of the rank with most sequences, if the one with fewest has as many."""
        fewest, rest = divmod(self._sequences, self._place.ranks)
        return min(-(-(fewest + (rest > 0)) // most), fewest)

    def unsynced(self, joined: nn.Module) -> AbstractContextManager[None]:
        """Gradients stay this rank's until the last pass."""
        assert isinstance(joined, DistributedDataParallel)
        found: AbstractContextManager[None] = joined.no_sync()
        return found

    def joined(self, module: nn.Module) -> nn.Module:
        """Gradients are summed in buckets while the rest of them is still computed."""
        with warnings.catch_warnings():
            # What is to replace `broadcast_buffers` is newer than the oldest torch that we work with.
            warnings.simplefilter("ignore", FutureWarning)
            # No device is named: then inputs are passed on as they are, and `RouterLoads` stays the caller's.
            return DistributedDataParallel(
                module, broadcast_buffers=False, init_sync=False, gradient_as_bucket_view=True
            )

    def mean(self, here: Tensor) -> Tensor:
        """Weighted by sequences, which are all equally long."""
        return self.total(here * self._part)

    def total(self, here: Tensor) -> Tensor:
        """The sum of a value over all ranks."""
        summed = here.clone()
        dist.all_reduce(summed)
        return summed

    def broadcast(self, values: Iterable[Tensor]) -> None:
        """Overwrite a tensor with rank 0's values, in place."""
        for value in values:
            dist.broadcast(value.detach(), 0)

    def scatter_weights(self, replica: Replica, whole: Replica | None) -> None:
        """Rank 0's values come into all; `whole` is what has them there."""
        self.broadcast(replica.values())

    def scatter_moments(self, replica: Replica, atoms: Iterable[str], whole: Replica | None) -> None:
        """Adam's state of these atoms, as rank 0 has it; that of others is dropped."""
        self.broadcast(replica.inner.moments(atoms))

    def gather_weights(self, replica: Replica, whole: Replica | None) -> None:
        """What is trained, into `whole` on rank 0."""
        raise NotImplementedError(_NO_PARTS)

    def gather_moments(self, replica: Replica, atoms: Iterable[str], whole: Replica | None) -> None:
        """Adam's state of these atoms, likewise."""
        raise NotImplementedError(_NO_PARTS)

    def loss(self, replica: Replica, window_BT1: Tensor) -> Tensor:
        """Mean loss of windows in nats per token, without gradient."""
        raise NotImplementedError(_NO_PARTS)

    def save(self, replica: Replica, atoms: Iterable[str], folder: Path) -> None:
        """Each rank writes its part of Adam's moments. Raises DiskFault, on all ranks."""
        raise NotImplementedError(_NO_PARTS)

    def agree(self, values: Iterable[Tensor]) -> None:
        """Raise LocalFault, on all ranks, unless all hold the same bits. `values`: of four bytes each."""
        sums_V = torch.stack([value.detach().view(torch.int32).sum(dtype=torch.int64).cpu() for value in values])
        most_2V = torch.stack((sums_V, -sums_V))
        dist.all_reduce(most_2V, dist.ReduceOp.MAX)
        if bool((most_2V[0] != -most_2V[1]).any()):
            raise LocalFault(
                "the local ranks do not hold the same weights any more; the round at hand is not used",
                hint="start again; if this comes again, a device is faulty: leave it out of --device",
            )


def check_batch(batch: int, ranks: int) -> None:
    """Raise ConfigError where a rank would have no sequence of a step."""
    if batch < ranks:
        raise ConfigError(
            f"{ranks} devices cannot share steps of {counted(batch, 'sequence')}",
            hint="give fewer devices, or join a run with a larger inner.batch",
        )


def check_device(device: str) -> None:
    """Raise ConfigError for a device that this process cannot use."""
    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        there = counted(count, "CUDA device") if count else "no CUDA device"
        raise ConfigError(f"{device} is not here: torch sees {there}", hint="see `atoll doctor`; or --device cpu")


def take_device(device: str, gpu_memory: int) -> None:
    """Check a device, and let this process allocate so much of its memory, in percent; 0: all. Raises ConfigError
    for one that this process cannot use."""
    check_device(device)
    if gpu_memory:
        limit_memory(device, gpu_memory / 100)


def limit_memory(device: str, share: float) -> None:
    """Let torch allocate at most this share of a GPU's memory, above 0, in this process; a step halves its passes
    there. Nothing on a CPU. CUDA's own memory is not torch's."""
    if device != "cpu":
        # Torch wants a number: a device without one is an error, although it is the current one elsewhere.
        torch.cuda.set_per_process_memory_fraction(share, torch.device(device).index or 0)
