"""A local rank: `python -m atoll.node.ranks.rank`. It does what rank 0 says, and ends when the pipe does.

Whatever it meets ends it, with its last words in the worker's log; but for a Divergence, which all ranks meet in
the same step and rank 0 reports.
"""

import contextlib
import faulthandler
import os
import sys
from pathlib import Path

import torch

from atoll.node.pipe import frame, take_frame
from atoll.node.ranks.group import Group, Place, check_device
from atoll.node.ranks.replica import Replica
from atoll.protocols import codec
from atoll.protocols import ranks as r
from atoll.protocols.errors import ConfigError, Divergence, LocalFault
from atoll.protocols.run import RunSpec


class Rank:
    """One of the ranks above 0, in its group."""

    def __init__(self, begin: r.Begin) -> None:
        self._begin, self._spec = begin, codec.decode(begin.spec, RunSpec)
        self._group = Group(Place(begin.rank, begin.ranks, begin.device), self._spec.inner.batch)
        self._replica: Replica | None = None

    def serve(self, asks: int) -> None:
        """Until the pipe `asks` ends."""
        self._group.join(Path(self._begin.meeting))
        while (ask := take_frame(asks, r.RankAsk)) is not None:
            self._do(ask)

    def _do(self, ask: r.RankAsk) -> None:
        match ask:
            case r.Build(experts):
                self._replica = None  # or the device would hold two modules
                begin = self._begin
                frozen = getattr(torch, begin.frozen), begin.frozen_on_host
                self._replica = Replica(self._spec, experts, begin.device, frozen, self._group)
            case r.Weights():
                self._group.broadcast(self._built().values())
            case r.Moments(atoms):
                self._group.broadcast(self._built().inner.moments(atoms))
            case r.Step(at):
                self._step(at)
            case r.Agree():
                with contextlib.suppress(LocalFault):  # rank 0 says so
                    self._group.agree(self._built().trained())
            case r.Begin():
                raise LocalFault("a rank begins once")

    def _step(self, at: int) -> None:
        spec = self._spec
        window_BT1 = torch.empty((spec.inner.batch, spec.model.context + 1), dtype=torch.int64)
        self._group.broadcast([window_BT1])
        with contextlib.suppress(Divergence):
            self._built().inner.step(window_BT1.numpy(), at)

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
    begin = take_frame(0, r.RankAsk)
    if not isinstance(begin, r.Begin):
        return
    torch.set_num_threads(begin.threads)
    try:
        check_device(begin.device)
    except ConfigError as error:
        os.write(answers, frame(r.Refused(str(error), error.hint)))
        return
    os.write(answers, frame(r.Ready()))
    Rank(begin).serve(0)


if __name__ == "__main__":
    main()
