"""The inner optimiser: steps of one member between two outer steps, by AdamW alone or with Muon for matrices.

It depends on neither the model nor the data: the caller gives a module, a loss and a source of batches. On one
machine, the same start and thread count give the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.node.learning.inner.adamw import adamw_step, step_in_slabs
from atoll.node.learning.inner.muon import muon_step
from atoll.node.learning.inner.passes import Loads, Loss, Passes
from atoll.node.learning.inner.private_passes import Privacy, PrivatePasses
from atoll.node.learning.inner.quantized import (
    CODES,
    SCALES,
    Quantized,
    encoded,
    moment_of,
    named,
    saved_moment,
    saved_quantized,
)
from atoll.node.learning.inner.step_share import ALONE, StepShare
from atoll.protocols.errors import TRAIN_AGAIN, CorruptFault, Divergence
from atoll.protocols.run.learning_rate import learning_rate
from atoll.protocols.run.model_spec import is_experts
from atoll.protocols.run.moments import KINDS, MAX_STEPS, MOMENTUM, is_orthogonalized, kinds_of
from atoll.protocols.run.run_spec import InnerSpec

_KEYS = ("step", *(kind + form for kind in KINDS for form in ("", CODES, SCALES)))
"""First parts of the names in a saved state."""
ByAtom = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Maps tensors named and shaped like the module's parameters to views of them by atom names."""
_CLIP_EPS = 1e-6
"""The same as in torch's own clipping."""


class Inner:
    """A module with its optimiser's state. The module's parameters are float32; matrices decay, vectors do not.

    Each atom has its own step count, because the bias correction of moments must match their age. An expert that
    arrived in a late step would otherwise move by (1 − β₁) / √(1 − β₂) of a step: three times too far with the
    usual β₂ = 0.999, half as far as it should with 0.95.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: Loss,
        spec: InnerSpec,
        *,
        by_atom: ByAtom = dict,
        before_step: Callable[[int], None] = lambda at: None,
        after_step: Callable[[], None] = lambda: None,
        share: StepShare = ALONE,
        micro_batch: int = 0,
        recompute: Callable[[], bool] = lambda: False,
        loads_of: Loads | None = None,
        quantized: bool = False,
        privacy: Privacy | None = None,
    ) -> None:
        """`before_step` is called before each attempt at a step, with the number of the global step; `after_step`
        after each step: it updates values that no gradient moves. `micro_batch`, `recompute`, `loads_of`: see
        Passes. `quantized`: moments are stored in eight bits. `privacy`: what is done to the gradients of each
        sequence; it has no use for `share`, `micro_batch` and `loads_of`."""
        self.module = module
        self._by_atom = by_atom
        self._before_step = before_step
        self._after_step = after_step
        self._spec = spec
        self.quantized = quantized
        self._share = share
        if privacy is not None:
            assert share.is_alone, "each sequence passes alone"
            assert loads_of is None, "no sequence depends on others"
            self.passes: Passes = PrivatePasses(module, loss_of, privacy, recompute=recompute)
        else:
            self.passes = Passes(
                share.joined(module),
                loss_of,
                share,
                micro_batch=micro_batch,
                recompute=recompute,
                loads_of=loads_of,
            )
        self._named = dict(module.named_parameters())
        self._atoms = by_atom({name: share.held(p.detach()) for name, p in self._named.items()})
        """Views of the module's parameters that steps update, by atom."""
        self._state: dict[str, dict[str, Tensor]] = {}
        """Step count (`step`, float32) and moments of each atom that was trained."""
        self.changes = 0
        """How often something other than a step changed the moments."""

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """Take one step with the rate of global step `at`; returns the loss before it, nats per token.

        If processes share the step, each gets all windows and returns the same loss. Raises Divergence if loss or
        gradient is not finite, LocalFault if memory does not hold one sequence; the parameters are then unchanged.
        """
        self._share.begin(len(window_BT1))
        loss = self.passes.run(torch.from_numpy(window_BT1[self._share.rows]), partial(self._begin, at))
        gradients = {name: self._share.held(p.grad) for name, p in self._named.items() if p.grad is not None}
        norm = self._share.norm(list(gradients.values()))
        value, size = torch.stack([self._share.mean(loss), norm]).tolist()
        if not np.isfinite(value + size):
            raise Divergence(f"inner step {at}: loss {value}, gradient norm {size}", hint=TRAIN_AGAIN)
        self._update(gradients, norm, learning_rate(self._spec, at))
        self._after_step()
        return float(value)

    def state(self) -> dict[str, Tensor]:
        """The state for a checkpoint: views `exp_avg/ATOM` and `exp_avg_sq/ATOM`, and `step/ATOM` `[1]`.

        Matrices that Muon moves have no `exp_avg_sq`. Moments in eight bits have other names (`quantized`).
        """
        held = {name: self._state[name] for name in self._atoms if name in self._state}
        if not held:
            return {}
        steps_A = torch.stack([state["step"] for state in held.values()]).cpu()
        found = {f"step/{name}": steps_A[at : at + 1] for at, name in enumerate(held)}
        for name, state in held.items():
            found.update({f"{key}/{name}": value for key, value in state.items() if key != "step"})
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, possibly for other trained atoms; atoms without state start fresh.

        Raises CorruptFault for an atom with another shape or an incomplete state.
        """
        self.changes += 1
        self._state = {name: self._copied(name, state) for name in self._atoms} if state else {}

    def continue_from(self, before: Mapping[str, Tensor]) -> None:
        """Add the state of some atoms from steps elsewhere, which came before all steps that were taken here.

        Moments are linear in the gradients, so they may arrive late: after k steps the older ones count β^k.
        Raises CorruptFault for an atom that is not trained here or has another shape.
        """
        self.changes += 1
        for name in sorted({key.split("/", 1)[1] for key in before}):
            if name not in self._atoms:
                raise CorruptFault(f"{name} is not trained here")
            older = self._copied(name, before)
            own = self._state.get(name) or self._copied(name, {})
            own_steps = float(own["step"])
            own["step"].add_(older["step"]).clamp_(max=MAX_STEPS)
            for kind, beta in zip(self._kinds(name), self._decays(name), strict=True):
                moment = self._moment(name, own, kind).add_(self._moment(name, older, kind), alpha=beta**own_steps)
                own.update(self._stored(kind, moment))
            self._state[name] = own

    def moments(self, atoms: Iterable[str]) -> Iterator[Tensor]:
        """The optimiser's own tensors of these atoms in the order of the names; all other state is dropped."""
        self._state = {name: self._state.get(name) or self._copied(name, {}) for name in atoms}
        for state in self._state.values():
            yield from state.values()

    def moved(self) -> list[str]:
        """Atoms that have moments."""
        return [name for name in self._atoms if name in self._state]

    def drop(self) -> None:
        """Drop all moments, because another process holds them."""
        self._state = {}

    def _kinds(self, name: str) -> tuple[str, ...]:
        return kinds_of(self._spec.optimizer, name)

    def _decays(self, name: str) -> tuple[float, ...]:
        """Decays of the atom's moments."""
        if is_orthogonalized(self._spec.optimizer, name):
            return (self._spec.muon_momentum,)
        return self._spec.beta1, self._spec.beta2

    def _copied(self, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of an atom's state in the form that it has here; fresh tensors if `state` has none."""
        values = self._atoms[name]
        found = {"step": values.new_zeros(())}
        is_known = any(f"{key}/{name}" in state for key in _KEYS)
        if is_known:
            steps = state.get(f"step/{name}")
            if steps is None or steps.shape != (1,):
                raise CorruptFault(f"the saved optimiser state does not fit {name}")
            found["step"].copy_(steps.reshape(()))
        for kind in self._kinds(name):
            stored = saved_quantized(state, kind, name, values.shape) if self.quantized else None
            if stored is not None:  # as it was, bit for bit
                found |= named(kind, Quantized(*(part.to(values.device, copy=True) for part in stored)))
                continue
            moment = torch.zeros_like(values)
            if is_known:
                moment.copy_(saved_moment(state, kind, name, values.shape))
            found |= self._stored(kind, moment)
        return found

    def _stored(self, kind: str, moment: Tensor) -> dict[str, Tensor]:
        return named(kind, encoded(kind, moment)) if self.quantized else {kind: moment}

    def _moment(self, name: str, state: Mapping[str, Tensor], kind: str) -> Tensor:
        """A moment in float32: the state's own tensor, unless it is stored in eight bits."""
        return moment_of(state, kind, self._atoms[name].shape) if self.quantized else state[kind]

    def _update(self, found: Mapping[str, Tensor], norm: Tensor, rate: float) -> None:
        """Update the parameters along these gradients, which are clipped to the norm of the spec."""
        scale = (self._spec.clip / (norm + _CLIP_EPS)).clamp(max=1.0)
        for gradient in found.values():
            gradient.mul_(scale)
        gradients = self._by_atom(found)
        turned = {name for name in gradients if is_orthogonalized(self._spec.optimizer, name)}
        matrices = [name for name in gradients if self._atoms[name].dim() > 1 and name not in turned]
        vectors = [name for name in gradients if self._atoms[name].dim() <= 1]
        experts = [name for name in matrices if is_experts(name)]
        common = [name for name in matrices if not is_experts(name)]
        decay = self._spec.weight_decay
        with torch.no_grad():
            self._adamw(common, gradients, rate, decay)
            self._adamw(experts, gradients, rate * self._spec.expert_lr, decay)
            self._adamw(vectors, gradients, rate, 0.0)
            for name in sorted(turned):
                self._muon(name, gradients[name], rate * self._spec.muon_lr, decay)

    def _muon(self, name: str, gradient: Tensor, rate: float, decay: float) -> None:
        state = self._state[name]
        state["step"].add_(1)
        rate *= self._spec.expert_lr if is_experts(name) else 1.0
        beta = self._spec.muon_momentum
        momentum = self._moment(name, state, MOMENTUM[0])
        muon_step(self._atoms[name], momentum, gradient, rate=rate, beta=beta, decay=decay)
        state.update(self._stored(MOMENTUM[0], momentum))

    def _adamw(self, names: Sequence[str], gradients: Mapping[str, Tensor], rate: float, decay: float) -> None:
        if self.quantized:
            for name in names:
                step_in_slabs(self._atoms[name], gradients[name], self._state[name], self._spec, rate, decay)
            return
        states = [self._state[name] for name in names]
        first, second = ([state[kind] for state in states] for kind in KINDS)
        values, found = ([of[name] for name in names] for of in (self._atoms, gradients))
        adamw_step(values, found, first, second, [state["step"] for state in states], self._spec, rate, decay)

    def _begin(self, at: int = 0) -> None:
        """What lasts comes before the passes: among their arrays it would cut the heap into pieces."""
        self._before_step(at)
        for name in self._atoms.keys() - self._state.keys():
            self._state[name] = self._copied(name, {})
        self.module.zero_grad(set_to_none=not self._share.is_alone)
        for parameter in self._named.values() if self._share.is_alone else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
