"""What one process does of a step: all of it, or some sequences beside other processes."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn


class StepShare:
    """The whole step. Groups of processes override these members (node/worker/multi_device)."""

    rows = slice(None)
    """The sequences of the step at hand that this process takes."""
    weight = 1.0
    """Weight of this process's loss in the mean over processes: its share of the sequences · processes."""
    is_alone = True
    """Whether no other process takes part, so that an attempt may be repeated."""

    def begin(self, sequences: int) -> None:
        """Begin a step of so many sequences, over all processes."""

    def passes(self, here: int, most: int) -> int:
        """Passes of at most `most` of the `here` sequences, where all processes can make as many."""
        return -(-here // most)

    def unsynced(self, joined: nn.Module) -> AbstractContextManager[None]:
        """Around passes whose gradients are not those of the step yet."""
        return nullcontext()

    def joined(self, module: nn.Module) -> nn.Module:
        """The module to call instead, whose gradients are the mean over all processes."""
        return module

    def mean(self, here: Tensor) -> Tensor:
        """Turn means over this process's tokens into means over the step's, with the same bits everywhere."""
        return here

    def total(self, here: Tensor) -> Tensor:
        """The sum over all processes, with the same bits everywhere."""
        return here

    def held(self, whole: Tensor) -> Tensor:
        """A view of the part of a parameter, or of its gradient, that this process holds."""
        return whole

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole module's gradient, from the parts that this process holds."""
        return nn.utils.get_total_norm(gradients)


ALONE = StepShare()
