"""What a term of the loss is to the worker. A package that brings one implements `Objective` (docs/objectives.md).

Letters: N tokens of a part of a step, D model width.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Pool: TypeAlias = Callable[[Tensor], Tensor]
"""Turns means over the tokens of a part of a step into means over all tokens of the step."""


class Objective(Protocol):
    """A scalar function of the last hidden states of all tokens of a step."""

    def begin(self, seed: int, device: torch.device) -> None:
        """Draw what the term of a step needs, on the device of the hidden states. The same seed gives the same."""
        ...

    def means(self, hidden_ND: Tensor) -> Tensor:
        """Means over these tokens of what the term depends on, float32, of one shape. Called without gradient."""
        ...

    def term(self, hidden_ND: Tensor, pool: Pool) -> Tensor:
        """The term `[]` of the whole step, whose means are `pool(means(hidden_ND))`; float32 throughout.

        Its gradient is with respect to these tokens, times the number of parts of this size in a step: the
        caller averages the parts' terms, by their tokens.
        """
        ...


Factory: TypeAlias = Callable[[int, int, Mapping[str, float]], Objective]
"""Makes a term from the model width, the tokens of a whole step of a member, and its settings by name.

Raises ConfigError for a setting that the term does not have, or a value that it cannot have.
"""
