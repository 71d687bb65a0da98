"""What a worker trains with: the module, its optimiser and its local weights; and which experts are trained.

A node that trains some of the experts has parameters, gradients and moments for these alone; the others are frozen
copies, stored as the node likes (docs/experts.md). Before the first round of such a run nothing but what all
members train has parameters: a model that is too large to be trained whole must not be built whole.

Where the node has more devices, their processes take their part of each step (multi_device).
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.node.checkpoint.base_weights import open_base
from atoll.node.checkpoint.parts import WriteParts
from atoll.node.learning.inner.evaluate import ValidationLoss, evaluate, losses_of
from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.moments import pack, unpack
from atoll.node.learning.inner.private_passes import Random
from atoll.node.learning.inner.quantized import saved_moment
from atoll.node.learning.model.decoder import token_losses
from atoll.node.learning.model.lora import load_base
from atoll.node.learning.outer.fixed import to_float
from atoll.node.worker.local_weights import LocalWeights
from atoll.node.worker.multi_device.lead import Ranks
from atoll.node.worker.multi_device.replica import ALL_STORED, Replica, StepMemory
from atoll.protocols.ledger.ownership import nothing, splits
from atoll.protocols.run.experts import ALL, bitmap_of, experts_in
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.moments import kinds_of, places_of
from atoll.protocols.run.run_spec import RunSpec


class Learner:
    """`module` and `inner` are replaced by `set_trained_experts`: ask for them each time."""

    def __init__(
        self,
        spec: RunSpec,
        device: str,
        frozen_dtype: str = "float32",
        frozen_on_host: bool = False,
        ranks: Ranks | None = None,
        anchor_on: torch.device | str = "cpu",
        memory: StepMemory = ALL_STORED,
        base: Path | None = None,
        random: Random = os.urandom,
    ) -> None:
        """Trained values are undefined until `weights.start` or `weights.load`. `ranks`: joined, of the other
        devices. `base`: file of the frozen base, in a LoRA run. `random`: see Replica. Raises ConfigError,
        CorruptFault, DiskFault.
        """
        self._spec = spec
        self._device = device
        self._ranks = ranks
        self._storage = getattr(torch, frozen_dtype), frozen_on_host
        self._memory = memory
        self._base = base
        self._random = random
        experts = nothing(spec)
        self._build(experts)
        self._weights = LocalWeights(self._replica.module, spec, experts, anchor_on)
        self.released: dict[int, bytes] = {}
        """Moments of experts that were given up (protocols/run/moments.py), until the owner of this empties it."""

    @property
    def module(self) -> nn.Module:
        """With the trained values; on the host where each device has a part of them."""
        self._fetch_weights()
        return self._replica.module

    @property
    def weights(self) -> LocalWeights:
        """The local weights of `module`, and their anchor."""
        self._fetch_weights()
        return self._weights

    @property
    def inner(self) -> Inner:
        """The optimiser of `module`, with the moments."""
        if self._ranks is not None:
            self._ranks.fetch_moments(self._replica)
        return self._replica.inner

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """One inner step of the node, on all its devices; see `Inner.step`."""
        if self._ranks is None:
            return self.inner.step(window_BT1, at)
        return self._ranks.step(self._replica, self._changes, window_BT1, at)

    def agree(self) -> None:
        """Raise LocalFault unless all devices hold the same."""
        if self._ranks is not None:
            self._ranks.agree(self._replica)

    def evaluate(self, view_C4096: Tensor, windows_WT1: NDArray[np.int64], size_bytes: int) -> ValidationLoss:
        """Loss of the view on windows `[W, T + 1]`; what is trained is as it was afterwards."""
        with self.weights.replaced_by(view_C4096):
            return self._evaluated(windows_WT1, size_bytes)

    def window_losses(self, view_C4096: Tensor, windows_WT1: NDArray[np.int64]) -> list[float]:
        """Loss of the view on each of these windows `[W, T + 1]`; what is trained is as it was afterwards.

        Few windows at a time, so that no more memory is needed than a step needs.
        """
        with self.weights.replaced_by(view_C4096):
            if self._ranks is not None and self._ranks.shard:  # its parts give one loss for all windows of a call
                return [self._evaluated(window_T1[None]).val_loss for window_T1 in windows_WT1]
            return losses_of(self._replica.module, token_losses, windows_WT1)

    def moments(self) -> tuple[dict[str, Tensor], WriteParts | None]:
        """Adam's state for a save: tensors, and what writes those of which the devices have parts."""
        if self._ranks is None:
            return self.inner.state(), None
        return self._ranks.moments(self._replica)

    def squared_gradients(self) -> dict[str, Tensor]:
        """Adam's mean of squared gradients, by atom; empty before the first step, and with further devices.

        These have parts of them, which would have to be sent for each audit.
        """
        if self._ranks is not None:
            return {}
        state = self.inner.state()
        return {name.split("/", 1)[1]: value for name, value in state.items() if name.startswith("exp_avg_sq/")}

    def _evaluated(self, windows_WT1: NDArray[np.int64], size_bytes: int = 0) -> ValidationLoss:
        loss = self._parts_loss if self._ranks is not None and self._ranks.shard else self._replica.loss_of
        return evaluate(self._replica.module, loss, windows_WT1, size_bytes)

    def _parts_loss(self, _: nn.Module, window_BT1: Tensor) -> Tensor:
        assert self._ranks is not None
        return self._ranks.loss_of(self._replica, self._changes, window_BT1)

    @property
    def moment_changes(self) -> tuple[bytes, int]:
        """Of what the moments are, and how often other things than steps changed them."""
        return self.experts, self._replica.inner.changes

    @property
    def _changes(self) -> tuple[int, int]:
        return self._weights.changes, self._replica.inner.changes

    def _fetch_weights(self) -> None:
        if self._ranks is not None:
            self._ranks.fetch_weights(self._replica)

    @property
    def experts(self) -> bytes:
        """Bitmap of the experts that are trained."""
        return self._weights.experts

    def set_trained_experts(self, experts: bytes) -> None:
        """Train these experts from now on. What stays keeps weights and moments; what is new starts with the
        anchor and fresh moments; what is given up is frozen as the anchor has it.

        All goes through the host's memory, so that the device never holds two modules.
        """
        if experts == self.experts:
            return
        trained = _on_host(self.weights.trained())
        moments = _on_host(self.inner.state())
        self.released = {e: data for e, data in self.released.items() if e not in self._trained(experts)}
        self.released |= self._given_up(experts, moments)
        self._memory = self._replica.memory  # it may have run out meanwhile
        del self._replica
        self._weights.detach_module()
        self._build(experts)
        self._weights.move_to(self.module, experts, trained)
        self.inner.load(moments)

    def inherit(self, expert: int, moments: bytes) -> bool:
        """Go on from the moments that an expert had elsewhere; whether it is trained here. Raises DecodeError."""
        shapes = [(place.name, place.shape) for place in places_of(self._spec.model, expert)]
        found = unpack(moments, shapes, self._spec.inner)
        if expert not in self._trained(self.experts):
            return False
        self.inner.continue_from(found)
        return True

    def _given_up(self, experts: bytes, moments: Mapping[str, Tensor]) -> dict[int, bytes]:
        gone = sorted(self._trained(self.experts) - self._trained(experts))
        found = {expert: self._packed(expert, moments) for expert in gone}
        return {expert: data for expert, data in found.items() if data}

    def _packed(self, expert: int, moments: Mapping[str, Tensor]) -> bytes:
        """The file of an expert's moments; empty if it has not been trained."""
        places = places_of(self._spec.model, expert)
        if any(f"step/{place.name}" not in moments for place in places):
            return b""
        floats = {f"step/{place.name}": moments[f"step/{place.name}"] for place in places}
        for place in places:
            for kind in kinds_of(self._spec.inner.optimizer, place.name):
                floats[f"{kind}/{place.name}"] = saved_moment(moments, kind, place.name, place.shape)
        return pack(floats, [place.name for place in places])

    def _trained(self, experts: bytes) -> frozenset[int]:
        return experts_in(experts, splits(self._spec))

    def _build(self, experts: bytes) -> None:
        if self._ranks is not None:
            self._replica = self._ranks.build(experts)
        else:
            self._replica = Replica(
                self._spec, experts, self._device, self._storage, memory=self._memory, random=self._random
            )
        if self._spec.base:
            read = open_base(self._spec, self._base or Path())
            load_base(self._replica.module, self._spec.model, lambda name: to_float(read(name)))


def experts_among(names: Iterable[str], spec: RunSpec) -> bytes:
    """Bitmap of the experts that a saved state had trained, by the names of its tensors."""
    if not splits(spec):
        return ALL
    found = (expert_of(name) for name in names)
    return bitmap_of((expert for expert in found if expert is not None), splits(spec))


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("cpu", copy=True) for name, value in tensors.items()}
