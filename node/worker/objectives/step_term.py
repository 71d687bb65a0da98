"""The loss of a decoder's steps in a run with a term: the cross-entropy, and the term of the hidden states."""

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from atoll.node.learning.model.decoder import hidden_means, loss_of
from atoll.node.learning.objectives.interface import Factory, Objective, Pool
from atoll.node.learning.objectives.sigreg import SigReg
from atoll.node.runs.installed_parts import loaded
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.objective import ObjectiveSpec, seed_of_step

_FACTORIES: Mapping[str, Factory] = {"sigreg.1": SigReg}
"""Those of sections/objective.BUILT_IN. No installed package can take their place."""


def objective_of(spec: RunSpec) -> Objective:
    """The term of a run that has one. Raises ConfigError if it is not here or refuses a setting."""
    assert spec.objective, "a run with a term"
    made = _factory(spec.objective)
    return made(spec.model.dim, spec.inner.batch * spec.model.context, dict(spec.objective.settings))


def _factory(wanted: ObjectiveSpec) -> Factory:
    if wanted.name in _FACTORIES:
        return _FACTORIES[wanted.name]
    return cast(Factory, loaded("objective", wanted.name, wanted.package or ""))


class StepTerm:
    """The term in the steps of one module. It refers to no module: what is joined to it may be replaced."""

    def __init__(self, spec: RunSpec, placed_like: Tensor) -> None:
        """`placed_like`: a tensor on the device of the hidden states."""
        self._spec, self._run = spec, spec.id
        self._device = placed_like.device
        self._made: Objective | None = None

    def begin(self, step: int) -> None:
        """Before each attempt at global step `step`. The first one loads the term: others than trainers lack it.

        Raises ConfigError as `objective_of` does.
        """
        self._made = self._made or objective_of(self._spec)
        self._objective.begin(seed_of_step(self._run, step), self._device)

    @property
    def _objective(self) -> Objective:
        assert self._made is not None, "no step has begun, or the run has no term"
        return self._made

    def loss_of(self, decoder: nn.Module, window_BT1: Tensor, pool: Pool | None = None) -> Tensor:
        """Cross-entropy, nats per token, of windows `[B, T + 1]` plus λ · term of the step that they are part of.

        Raises ConfigError for a term that is no scalar.
        """
        return loss_of(decoder, window_BT1, pool, self._term)

    def means_of(self, decoder: nn.Module, window_BT1: Tensor) -> Tensor:
        """What `loss_of` asks its `pool` for, of these windows alone. Called without gradient."""
        return hidden_means(decoder, self._objective.means, window_BT1)

    def _term(self, hidden_ND: Tensor, pool: Pool) -> Tensor:
        wanted, found = self._spec.objective, self._objective.term(hidden_ND, pool)
        assert wanted, "a run with a term"
        if found.shape:  # it would be broadcast, and the loss of a step is one number
            raise ConfigError(f"objective {wanted.name} gave a tensor of shape {tuple(found.shape)}, no scalar")
        return wanted.weight * found
