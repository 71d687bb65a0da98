"""Each local rank holds a part of every weight, gradient and moment that is trained (FSDP2, `fully_shard`).

A layer's weights are gathered before it is used and its gradients are summed and cut after it: ZeRO's third stage
(arXiv 1910.02054). Matrices are cut along their first axis. Stacks of experts are cut along their inputs: each
rank has a part of every expert, with its own count of Adam's steps. Frozen experts are whole in each rank.

AdamW works value by value, so that each rank's optimiser sees plain tensors: its parts. Only the gradient's norm
is summed. Rank 0 has what is trained once more, whole, on the host, where folds and the codec find it.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from atoll.node.learning.model.decoder import loss_of
from atoll.node.learning.model.moe import biases
from atoll.node.worker.multi_device.group import Group, RankPlace
from atoll.node.worker.multi_device.replica import Replica
from atoll.protocols.errors import DiskFault, LocalFault
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.moments import KINDS
from atoll.protocols.run.run_spec import RunSpec


class Shards(Group):
    """What is said of values here is said by all ranks at once, each of its own part."""

    def __init__(self, place: RankPlace, spec: RunSpec) -> None:
        super().__init__(place)
        self._shapes = {placement.name: placement.shape for placement in arena_of(spec.model).placements}
        self._mesh: DeviceMesh | None = None

    def joined(self, module: nn.Module) -> nn.Module:
        """The module itself, cut, on this rank's device: at no time is more than one layer whole there."""
        self._mesh = init_device_mesh(torch.device(self._place.device).type, (self._place.ranks,))
        for part in (*module.model.layers, module):  # type: ignore[union-attr, misc]
            # The last one too is cut again after a forward: its weights may be given anew before the next one.
            fully_shard(part, mesh=self._mesh, reshard_after_forward=True, shard_placement_fn=_cut)
        return module

    @property
    def builds_on(self) -> str:
        """The module, on the host: the device gets parts of it."""
        return "cpu"

    def unsynced(self, joined: nn.Module) -> AbstractContextManager[None]:
        """Each pass's gradients are summed and cut at once: whole ones would take what the parts save."""
        return nullcontext()

    def held(self, whole: Tensor) -> Tensor:
        """The part of this rank, by name."""
        assert isinstance(whole, DTensor)
        return whole.to_local()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The values of all parts together."""
        return self.total(super().norm(gradients).square()).sqrt()

    def agree(self, values: Iterable[Tensor]) -> None:
        """No two ranks hold the same, but what all gather is of one copy."""

    # --- rank 0 has all, on the host, and the others have nothing ------------------------------------

    def scatter_weights(self, replica: Replica, whole: Replica | None) -> None:
        """Into the module; `whole` on rank 0."""
        parameters = list(replica.module.parameters())
        given = iter(whole.values()) if whole is not None else None
        for parameter in parameters:
            assert isinstance(parameter, DTensor)
            placement = parameter.placements[0]
            assert isinstance(placement, Shard)
            self._scatter(given, parameter.shape, placement.dim, self.held(parameter.detach()))
        for value in list(replica.values())[len(parameters) :]:
            self._scatter(given, value.shape, None, value)

    def gather_weights(self, replica: Replica, whole: Replica | None) -> None:
        """Out of the module; `whole` on rank 0."""
        into = list(whole.module.parameters()) if whole is not None else None
        for at, parameter in enumerate(replica.module.parameters()):
            assert isinstance(parameter, DTensor)
            found = parameter.full_tensor().detach()
            if into is not None:
                into[at].detach().copy_(found)
        if whole is not None:
            for bias_S, moved_S in zip(biases(whole.module), biases(replica.module), strict=True):
                bias_S.copy_(moved_S)

    def scatter_moments(self, replica: Replica, atoms: Iterable[str], whole: Replica | None) -> None:
        """Adam's state of these atoms; `whole` on rank 0 has it."""
        names = list(atoms)
        given = iter(whole.inner.moments(names)) if whole is not None else None
        for (atom, kind), part in self._named(replica, names):
            if kind is None:
                self._scatter(given, part.shape, None, part)
            else:
                self._scatter(given, torch.Size(self._shapes[atom]), _axis(atom), part)

    def gather_moments(self, replica: Replica, atoms: Iterable[str], whole: Replica | None) -> None:
        """Adam's state of these atoms, into the optimiser of `whole` on rank 0."""
        names = list(atoms)
        into = list(whole.inner.moments(names)) if whole is not None else None
        for at, ((atom, kind), part) in enumerate(self._named(replica, names)):
            found = part if kind is None else self._distributed(atom, part).full_tensor()
            if into is not None:
                into[at].copy_(found)

    def loss(self, replica: Replica, window_BT1: Tensor) -> Tensor:
        """Mean loss of windows, without gradient; each rank computes with its shard."""
        with torch.no_grad():
            return loss_of(replica.module, window_BT1.to(self._place.device))

    def save(self, replica: Replica, atoms: Iterable[str], folder: Path) -> None:
        """Each rank writes its parts of the moments into a file of its own. Raises DiskFault, on all ranks."""
        named = self._named(replica, list(atoms))
        state = {f"{kind}/{atom}": self._distributed(atom, part) for (atom, kind), part in named if kind}
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        writer.sync_files = False  # a generation waits for the disk when all is written
        try:
            save(state, storage_writer=writer)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if not all(isinstance(cause, OSError) for cause in causes):
                raise LocalFault(f"the local ranks could not save: {causes}") from error
            raise DiskFault(str(causes[0]), hint="free or repair the disk") from error

    def _scatter(self, given: Iterator[Tensor] | None, shape: torch.Size, axis: int | None, part: Tensor) -> None:
        whole = torch.empty(shape, dtype=part.dtype) if given is None else next(given).detach().contiguous()
        dist.broadcast(whole, 0)
        if axis is None:
            part.copy_(whole)
            return
        mine = whole.chunk(self._place.ranks, axis)[self._place.rank :][:1]
        for value in mine:  # none, where an axis is shorter than there are ranks
            part.copy_(value)

    def _distributed(self, atom: str, part: Tensor) -> DTensor:
        assert self._mesh is not None
        shape = torch.Size(self._shapes[atom])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(), self._mesh, [Shard(_axis(atom))], run_check=False, shape=shape, stride=stride
        )

    def _named(self, replica: Replica, atoms: list[str]) -> Iterator[tuple[tuple[str, str | None], Tensor]]:
        """((atom, kind), this rank's part) of Adam's state; the kind of a step count is None."""
        kinds = (None, *KINDS)
        names = ((atom, kind) for atom in atoms for kind in kinds)
        return zip(names, replica.inner.moments(atoms), strict=True)


def _cut(parameter: nn.Parameter) -> Shard:
    return Shard(2 if parameter.dim() == 3 else 0)


def _axis(atom: str) -> int:
    """Along which an atom is cut: of an expert's matrices the inputs."""
    return 0 if expert_of(atom) is None else 1
