"""What one process does of an inner step: all of it, or some of its sequences beside other processes."""

from torch import Tensor, nn


class StepShare:
    """All of it. Who has company overrides what is said here (node/ranks/)."""

    rows = slice(None)
    """Which sequences of a step's batch are taken here."""
    weight = 1.0
    """What the loss here counts, as gradients are the mean over processes: share of the sequences · processes."""

    def joined(self, module: nn.Module) -> nn.Module:
        """What to call instead of the module, so that its gradients are the mean over all processes."""
        return module

    def mean(self, here: Tensor) -> Tensor:
        """Means over the tokens here -> means over the tokens of the whole step, the same bits everywhere."""
        return here

    def total(self, here: Tensor) -> Tensor:
        """The sum over all processes, the same bits everywhere."""
        return here

    def held(self, whole: Tensor) -> Tensor:
        """What is here of a parameter, or of its gradient: a view."""
        return whole

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the gradient of the whole module, of what is held of it here."""
        return nn.utils.get_total_norm(gradients)


ALONE = StepShare()
