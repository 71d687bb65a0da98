"""A local rank: `python -m atoll.node.worker.multi_device.rank`. It does what rank 0 says, and ends when the
pipe does.

Whatever it meets ends it, with its last words in the worker's log; but for a Divergence, which all ranks meet in
the same step and rank 0 reports, and a full disk, which all hear of.
"""

import contextlib
import faulthandler
import gc
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.ipc.framing import frame, read_frame
from atoll.node.worker.multi_device.group import RankPlace, take_device
from atoll.node.worker.multi_device.modes import group_of
from atoll.node.worker.multi_device.replica import Replica, StepMemory
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DiskFault, Divergence, LocalFault
from atoll.protocols.local import rank_messages
from atoll.protocols.run.run_spec import RunSpec


class Rank:
    """One of the ranks above 0, in its group."""

    def __init__(self, begin: rank_messages.Begin) -> None:
        self._begin = begin
        self._spec = codec.decode(begin.spec, RunSpec)
        self._group = group_of(RankPlace(begin.rank, begin.ranks, begin.device), self._spec, shard=begin.shard)
        self._replica: Replica | None = None

    def serve(self, asks: int) -> None:
        """Serve requests until the pipe `asks` ends."""
        self._group.join(Path(self._begin.meeting))
        while (ask := read_frame(asks, rank_messages.RankAsk)) is not None:
            if isinstance(ask, rank_messages.Build):
                self._build(ask.experts)
            else:
                self._do(ask, self._built())

    def _do(self, ask: rank_messages.RankAsk, replica: Replica) -> None:
        group = self._group
        match ask:
            case rank_messages.Weights():
                group.scatter_weights(replica, None)
            case rank_messages.Moments(atoms):
                group.scatter_moments(replica, atoms, None)
            case rank_messages.StepRequest(at, sequences):
                window_BT1 = self._windows(sequences)
                with contextlib.suppress(Divergence):
                    replica.inner.step(window_BT1.numpy(), at)
            case rank_messages.Agree():
                with contextlib.suppress(LocalFault):  # rank 0 says so
                    group.agree(replica.trained())
            case rank_messages.GatherWeights():
                group.gather_weights(replica, None)
            case rank_messages.GatherMoments(atoms):
                group.gather_moments(replica, atoms, None)
            case rank_messages.LossRequest(windows):
                group.loss(replica, self._windows(windows))
            case rank_messages.Save(path, atoms):
                with contextlib.suppress(DiskFault):
                    group.save(replica, atoms, Path(path))

    def _build(self, experts: bytes) -> None:
        self._replica = None  # or the device would hold two modules; what joined the old one keeps itself alive
        gc.collect()
        begin = self._begin
        frozen = getattr(torch, begin.frozen), begin.frozen_on_host
        memory = StepMemory(begin.micro_batch, begin.recompute)
        self._replica = Replica(self._spec, experts, self._group.builds_on, frozen, self._group, memory)

    def _windows(self, count: int) -> Tensor:
        windows_BT1 = torch.empty((count, self._spec.model.context + 1), dtype=torch.int64)
        self._group.broadcast([windows_BT1])
        return windows_BT1

    def _built(self) -> Replica:
        if self._replica is None:
            raise LocalFault("the first ask after Begin is Build")
        return self._replica


def main() -> None:
    """Take over stdin and stdout, then serve."""
    faulthandler.enable()
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    begin = read_frame(0, rank_messages.RankAsk)
    if not isinstance(begin, rank_messages.Begin):
        return
    torch.set_num_threads(begin.threads)
    try:
        take_device(begin.device, begin.gpu_memory)
    except ConfigError as error:
        os.write(answers, frame(rank_messages.RankRefused(str(error), error.hint)))
        return
    os.write(answers, frame(rank_messages.RankReady()))
    Rank(begin).serve(0)


if __name__ == "__main__":
    main()
