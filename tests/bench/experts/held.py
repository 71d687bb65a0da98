"""Bytes of a node that trains some of the experts, counted in memory after a real step, beside the arithmetic.

A trained parameter costs 16 bytes (weight, gradient and two moments in float32), a frozen one as many as it is
stored in: 16·T + b·F. That is what lies on the device. A worker's fold, anchor and error feedback are not in it:
they are in the host's memory, for all experts.
"""

import gc
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.genesis import genesis_atom
from atoll.node.runs.capacity.memory_model import FROZEN_BYTES, TRAINED_BYTES, parts_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll.protocols.run.run_spec import InnerSpec


class Held(NamedTuple):
    """Bytes of what is alive after a step of AdamW and was not before."""

    weights: int
    gradients: int
    moments: int
    frozen: int
    """Frozen experts, with the scales of int8."""
    rest: int
    """Counters, indices, the batch."""


def arithmetic_bytes(model: ModelSpec, owned: frozenset[int], frozen: str) -> int:
    """16·T + b·F."""
    trained, shelved = parts_of(model, len(owned))
    return TRAINED_BYTES * trained + FROZEN_BYTES[frozen] * shelved


def held_by(model: ModelSpec, inner: InnerSpec, owned: frozenset[int], frozen: str) -> Held:
    """Build what trains `owned`, take one step with one sequence, and count."""
    gc.collect()
    before = _storages(_everything()).keys()
    decoder = Decoder(model, owned, getattr(torch, frozen))
    values = ((a.name, torch.from_numpy(genesis_atom(a, model, 1)).float() * 2.0**-24) for a in atoms(model))
    write_atoms(decoder, values)
    trainer = Inner(decoder, loss_of, inner)
    window_BT1 = torch.randint(0, model.vocab, (1, model.context + 1), generator=torch.Generator().manual_seed(2))
    trainer.step(window_BT1.numpy(), 0)
    gc.collect()
    found = {place: size for place, size in _storages(_everything()).items() if place not in before}
    parameters = list(decoder.parameters())
    kinds = Held(
        weights=_bytes_of(parameters),
        gradients=_bytes_of(p.grad for p in parameters if p.grad is not None),
        moments=_bytes_of(value for name, value in trainer.state().items() if name.startswith("exp_avg")),
        frozen=_bytes_of(value for name, value in decoder.named_buffers() if ".shelf." in name),
        rest=0,
    )
    return kinds._replace(rest=sum(found.values()) - sum(kinds))


def _everything() -> Iterable[Tensor]:
    """Every tensor known to Python, and the gradients."""
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of what tensors lie in, each once."""
    places = (tensor.untyped_storage() for tensor in tensors)
    return {place.data_ptr(): place.nbytes() for place in places}
