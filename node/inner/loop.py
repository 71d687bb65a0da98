"""The inner optimiser: AdamW steps of one member between two outer steps.

It knows neither the model nor the data: it is given a module, a loss and a source of batches. On one
machine with one thread count the same start gives the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.node.inner.schedule import learning_rate
from atoll.protocols.errors import TRAIN_AGAIN, CorruptFault, Divergence
from atoll.protocols.run import InnerSpec

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Mean loss, nats per token, of a module on int64 windows `[B, T + 1]`."""
ByAtom = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Tensors named and shaped like the module's parameters -> views of them by the names that a checkpoint has."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Inner:
    """A module with its AdamW state. The module's parameters are float32; matrices decay, vectors do not."""

    def __init__(
        self,
        module: nn.Module,
        loss_of: Loss,
        spec: InnerSpec,
        *,
        by_atom: ByAtom = dict,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_step`: what else moves after each step, such as values that no gradient moves."""
        self.module = module
        self._loss_of, self._by_atom, self._after_step = loss_of, by_atom, after_step
        self._spec = spec
        self._named = dict(module.named_parameters())
        self._device = next(iter(self._named.values())).device
        matrices = [p for p in self._named.values() if p.dim() > 1]
        vectors = [p for p in self._named.values() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            groups,
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """One AdamW step with the rate of global step `at`; the loss before it, nats per token.

        Raises Divergence when loss or gradient is not finite; the parameters are then unchanged.
        """
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._spec, at)
        self._adam.zero_grad(set_to_none=True)
        loss = self._forward(torch.from_numpy(window_BT1).to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._named.values(), self._spec.clip)
        value, size = torch.stack([loss.detach(), norm]).tolist()
        if not np.isfinite(value + size):
            raise Divergence(f"inner step {at}: loss {value}, gradient norm {size}", hint=TRAIN_AGAIN)
        self._adam.step()
        self._after_step()
        return float(value)

    def state(self) -> dict[str, Tensor]:
        """AdamW's state for a checkpoint: views `exp_avg/ATOM` and `exp_avg_sq/ATOM`, and `step`."""
        found: dict[str, Tensor] = {"step": torch.zeros(1, dtype=torch.float32)}
        held = {name: self._adam.state[p] for name, p in self._named.items() if self._adam.state.get(p)}
        for moment in _MOMENTS:
            views = self._by_atom({name: state[moment].detach() for name, state in held.items()})
            found.update({f"{moment}/{atom}": view for atom, view in views.items()})
        for state in held.values():
            found["step"] = state["step"].detach().reshape(1).cpu()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave. Raises CorruptFault when it is another model's."""
        self._take(state, missing_is_zero=False)

    def inherit(self, state: Mapping[str, Tensor]) -> None:
        """Take over what another module's `state` gave: atoms that it did not train start with moments of zero.

        Raises CorruptFault for an atom of another shape.
        """
        self._take(state, missing_is_zero=True)

    def _take(self, state: Mapping[str, Tensor], *, missing_is_zero: bool) -> None:
        if len(state) == 1 and "step" in state:
            self._adam.state.clear()
            return
        fresh = {moment: {n: torch.zeros_like(p) for n, p in self._named.items()} for moment in _MOMENTS}
        for moment in _MOMENTS:
            for atom, view in self._by_atom({n: t.detach() for n, t in fresh[moment].items()}).items():
                found = state.get(f"{moment}/{atom}")
                if found is None and missing_is_zero:
                    continue
                if "step" not in state or found is None or found.shape != view.shape:
                    raise CorruptFault(f"the saved optimiser state does not fit {atom}")
                view.copy_(found)
        for name, parameter in self._named.items():
            step = state["step"].reshape(()).to(self._device, copy=True)
            self._adam.state[parameter] = {"step": step, **{m: fresh[m][name] for m in _MOMENTS}}

    def _forward(self, window_BT1: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return self._loss_of(self.module, window_BT1)
        with torch.autocast("cuda", torch.bfloat16):
            return self._loss_of(self.module, window_BT1)


def run_steps(
    inner: Inner, batch_of: Callable[[int], NDArray[np.int64]], first_step: int, steps: int
) -> Iterator[float]:
    """Take `steps` steps from global step `first_step`, yielding each loss: the caller may serve its pipe between.

    `batch_of(i)` gives the windows of the round's i-th step. Leaving the generator early leaves the module
    as the last yielded step left it.
    """
    for i in range(steps):
        yield inner.step(batch_of(i), first_step + i)
