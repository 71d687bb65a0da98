"""The inner optimiser: AdamW steps of one member between two outer steps.

It knows neither the model nor the data: it is given a module, a loss and a source of batches. On one
machine with one thread count the same start gives the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.adamw import adamw

from atoll.node.learning.inner.schedule import learning_rate
from atoll.node.learning.inner.share import ALONE, StepShare
from atoll.protocols.errors import TRAIN_AGAIN, CorruptFault, Divergence
from atoll.protocols.run.model_spec import is_experts
from atoll.protocols.run.moments import KINDS, MAX_STEPS
from atoll.protocols.run.run_spec import InnerSpec

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Mean loss, nats per token, of a module on int64 windows `[B, T + 1]`."""
ByAtom = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Tensors named and shaped like the module's parameters -> views of them by the names that a checkpoint has."""
Step = Callable[[NDArray[np.int64], int], float]
"""Windows of a step and its global number -> the loss before it."""
_CLIP_EPS = 1e-6
"""As torch's own clipping has it."""
_KEPT = ("step", *KINDS)


class Inner:
    """A module with its AdamW state. The module's parameters are float32; matrices decay, vectors do not.

    Each atom has a step count of its own: the bias correction of moments that began later must be that of their
    age. An expert that came in a late step would otherwise move by (1 − β₁) / √(1 − β₂) of a step, three times too
    far with the usual β₂ = 0.999 and half as far as it should with 0.95.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_of: Loss,
        spec: InnerSpec,
        *,
        by_atom: ByAtom = dict,
        after_step: Callable[[], None] = lambda: None,
        share: StepShare = ALONE,
    ) -> None:
        """`after_step`: what else moves after each step, such as values that no gradient moves."""
        self.module = module
        self._loss_of, self._by_atom, self._after_step = loss_of, by_atom, after_step
        self._spec, self._share = spec, share
        self._joined = share.joined(module)
        self._named = dict(module.named_parameters())
        self._device = next(iter(self._named.values())).device
        self._atoms = by_atom({name: share.held(p.detach()) for name, p in self._named.items()})
        """What AdamW sees: parts of the module's parameters, in the same memory."""
        self._state: dict[str, dict[str, Tensor]] = {}
        """`step`, float32, and moments of the atoms that were trained, by name."""
        self.changes = 0
        """How often the moments were changed by other things than steps."""

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """One AdamW step with the rate of global step `at`; the loss before it, nats per token.

        Where processes share it, each is given all windows, and all have the same loss. Raises Divergence when
        loss or gradient is not finite; the parameters are then unchanged.
        """
        self.module.zero_grad(set_to_none=True)
        loss = self._forward(torch.from_numpy(window_BT1[self._share.rows]).to(self._device))
        (loss * self._share.weight).backward()  # type: ignore[no-untyped-call]
        gradients = {name: self._share.held(p.grad) for name, p in self._named.items() if p.grad is not None}
        norm = self._share.norm(list(gradients.values()))
        value, size = torch.stack([self._share.mean(loss.detach()), norm]).tolist()
        if not np.isfinite(value + size):
            raise Divergence(f"inner step {at}: loss {value}, gradient norm {size}", hint=TRAIN_AGAIN)
        self._move(gradients, norm, learning_rate(self._spec, at))
        self._after_step()
        return float(value)

    def state(self) -> dict[str, Tensor]:
        """AdamW's state for a checkpoint: views `exp_avg/ATOM` and `exp_avg_sq/ATOM`, and `step/ATOM` `[1]`."""
        held = {name: self._state[name] for name in self._atoms if name in self._state}
        if not held:
            return {}
        steps_A = torch.stack([state["step"] for state in held.values()]).cpu()
        found = {f"step/{name}": steps_A[at : at + 1] for at, name in enumerate(held)}
        for moment in KINDS:
            found.update({f"{moment}/{name}": state[moment] for name, state in held.items()})
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, also that of a module which trained other atoms: those without start fresh.

        Raises CorruptFault for an atom of another shape, or of which a part is missing.
        """
        self.changes += 1
        self._state = {name: self._taken(name, state) for name in self._atoms} if state else {}

    def continue_from(self, before: Mapping[str, Tensor]) -> None:
        """What `state` gave of some atoms, of steps elsewhere that came before all that were taken here.

        Moments are linear in the gradients, so they may come late: after k steps the older ones count β^k. Raises
        CorruptFault for an atom that is not trained here, or of another shape.
        """
        self.changes += 1
        for name in sorted({key.split("/", 1)[1] for key in before}):
            if name not in self._atoms:
                raise CorruptFault(f"{name} is not trained here")
            older = self._taken(name, before)
            own = self._state.get(name) or self._taken(name, {})
            taken = float(own["step"])
            own["step"].add_(older["step"]).clamp_(max=MAX_STEPS)
            for moment, beta in zip(KINDS, (self._spec.beta1, self._spec.beta2), strict=True):
                own[moment].add_(older[moment], alpha=beta**taken)
            self._state[name] = own

    def moments(self, atoms: Iterable[str]) -> Iterator[Tensor]:
        """AdamW's own tensors of these atoms, in the order of the names; it has them afterwards, and no others."""
        self._state = {name: self._state.get(name) or self._taken(name, {}) for name in atoms}
        for state in self._state.values():
            yield from (state[kind] for kind in _KEPT)

    def moved(self) -> list[str]:
        """Atoms that have moments."""
        return [name for name in self._atoms if name in self._state]

    def drop(self) -> None:
        """Forget all moments: somebody else has them."""
        self._state = {}

    def _taken(self, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies, in the form that AdamW has; fresh ones where there is nothing to copy."""
        values = self._atoms[name]
        fresh = {"step": values.new_zeros(()), **{moment: torch.zeros_like(values) for moment in KINDS}}
        if any(f"{kind}/{name}" in state for kind in _KEPT):
            for kind, into in fresh.items():
                found = state.get(f"{kind}/{name}")
                if found is None or found.shape != (into.shape or (1,)):
                    raise CorruptFault(f"the saved optimiser state does not fit {name}")
                into.copy_(found.reshape(into.shape))
        return fresh

    def _move(self, found: Mapping[str, Tensor], norm: Tensor, rate: float) -> None:
        """One step along these gradients of the parameters, no longer than the bound allows."""
        scale = (self._spec.clip / (norm + _CLIP_EPS)).clamp(max=1.0)
        for gradient in found.values():
            gradient.mul_(scale)
        gradients = self._by_atom(found)
        for name in gradients.keys() - self._state.keys():
            self._state[name] = self._taken(name, {})
        matrices = [name for name in gradients if self._atoms[name].dim() > 1]
        vectors = [name for name in gradients if self._atoms[name].dim() <= 1]
        experts = [name for name in matrices if is_experts(name)]
        common = [name for name in matrices if not is_experts(name)]
        decay = self._spec.weight_decay
        with torch.no_grad():
            self._adamw(common, gradients, rate, decay)
            self._adamw(experts, gradients, rate * self._spec.expert_lr, decay)
            self._adamw(vectors, gradients, rate, 0.0)

    def _adamw(self, names: Sequence[str], gradients: Mapping[str, Tensor], rate: float, decay: float) -> None:
        """torch's own function. Its class imports torch's compiler, which takes seconds at every start."""
        states = [self._state[name] for name in names]
        first, second = ([state[kind] for state in states] for kind in KINDS)
        adamw(
            [self._atoms[name] for name in names],
            [gradients[name] for name in names],
            first,
            second,
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self._spec.beta1,
            beta2=self._spec.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._spec.eps,
            maximize=False,
        )

    def _forward(self, window_BT1: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return self._loss_of(self._joined, window_BT1)
        with torch.autocast("cuda", torch.bfloat16):
            return self._loss_of(self._joined, window_BT1)


def run_steps(
    step: Step, batch_of: Callable[[int], NDArray[np.int64]], first_step: int, steps: int
) -> Iterator[float]:
    """Take `steps` steps from global step `first_step`, yielding each loss: the caller may serve its pipe between.

    `batch_of(i)` gives the windows of the round's i-th step. Leaving the generator early leaves the module
    as the last yielded step left it.
    """
    for i in range(steps):
        yield step(batch_of(i), first_step + i)
