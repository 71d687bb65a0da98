"""What training only some of the experts saves: time of a step and bytes of a node, beside training them all.

A frozen expert costs two of the three products of a trained one (forward, gradient of the input, gradient of the
weight): with the share s of the experts trained, (2 + s) / 3. A trained parameter costs 16 bytes (weight, gradient
and two moments in float32), a frozen one as many as it is stored in.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.model.decoder import Decoder, loss_of
from atoll.node.model.genesis import genesis
from atoll.node.model.moe import Mixture
from atoll.node.model.named import write_atoms
from atoll.protocols.model import ExpertsSpec, ModelSpec

TRAINED_BYTES = 16
FROZEN = (torch.float32, torch.bfloat16, torch.int8)


@dataclass
class Paces:
    """What was measured; lists have one entry per turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """`layer: all`, `layer: some`: CPU time of forward and backward of one layer's mixture; `step: …`: of the
    whole model."""
    bytes_held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the frozen experts' dtype: bytes of all tensors after a step of AdamW, and the arithmetic."""

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Measure once: time of this thread's own, which neighbours on the machine disturb little."""
        began = time.thread_time()
        work()
        self.seconds.setdefault(name, []).append(time.thread_time() - began)


def expected_ratio(owned: int, experts: int) -> float:
    """Cost of the experts with `owned` of them trained, in units of all trained."""
    return (2 + owned / experts) / 3


def arithmetic_bytes(model: ModelSpec, owned: frozenset[int], dtype: torch.dtype) -> int:
    """16·T + b·F."""
    assert model.experts is not None
    one = 3 * model.dim * model.experts.ffn * model.layers
    frozen = (model.experts.count - len(owned)) * one
    return TRAINED_BYTES * (model.parameters - frozen) + dtype.itemsize * frozen


def measure(model: ModelSpec, owned: frozenset[int], sequences: int, turns: int) -> Paces:
    """Time with one thread, in turns; the first turn warms up and is left out. Bytes for every frozen dtype."""
    assert model.experts is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        paces, warm = Paces(), Paces()
        work = _works(model, model.experts, owned, sequences)
        for turn in range(turns + 1):
            for name, run in work.items() if turn % 2 else reversed(work.items()):
                (paces if turn else warm).take(name, run)
        work.clear()
        for dtype in FROZEN:
            held = bytes_of_a_node(model, owned, dtype)
            paces.bytes_held[str(dtype).removeprefix("torch.")] = held, arithmetic_bytes(model, owned, dtype)
        return paces
    finally:
        torch.set_num_threads(threads)


def bytes_of_a_node(model: ModelSpec, owned: frozenset[int], dtype: torch.dtype) -> int:
    """Bytes of every tensor that is alive after a step of AdamW and was not before, gradients included."""
    gc.collect()
    before = _storages()
    decoder = Decoder(model, owned, dtype)
    write_atoms(decoder, _values(model))
    adam = torch.optim.AdamW(decoder.parameters(), lr=1e-3, fused=True)
    loss_of(decoder, _windows(model, 1)).backward()  # type: ignore[no-untyped-call]
    adam.step()
    gc.collect()
    after = _storages()
    return sum(size for place, size in after.items() if place not in before)


def _works(
    model: ModelSpec, experts: ExpertsSpec, owned: frozenset[int], sequences: int
) -> dict[str, Callable[[], object]]:
    source = torch.Generator().manual_seed(1)
    shape = (sequences, model.context, model.dim)
    x_BTD, dy_BTD = (torch.randn(shape, generator=source) for _ in range(2))
    windows = _windows(model, sequences)
    found: dict[str, Callable[[], object]] = {}
    for name, ours in (("all", frozenset(range(experts.count))), ("some", owned)):
        mixture = Mixture(model.dim, experts, ours, torch.float32, False)
        layer = "model.layers.0.mlp."
        write_atoms(mixture, ((n.removeprefix(layer), v) for n, v in _values(model) if n.startswith(layer)))
        decoder = Decoder(model, ours)
        write_atoms(decoder, _values(model))
        found[f"layer: {name}"] = _layer(mixture, x_BTD, dy_BTD)
        found[f"step: {name}"] = _step(decoder, windows)
    return found


def _layer(mixture: Mixture, x_BTD: Tensor, dy_BTD: Tensor) -> Callable[[], object]:
    def run() -> None:
        mixture.zero_grad()
        mixture(x_BTD.detach().requires_grad_(), []).backward(dy_BTD)

    return run


def _step(decoder: Decoder, windows_BT1: Tensor) -> Callable[[], object]:
    def run() -> None:
        decoder.zero_grad()
        loss_of(decoder, windows_BT1).backward()  # type: ignore[no-untyped-call]

    return run


def _values(model: ModelSpec) -> list[tuple[str, Tensor]]:
    return [(name, torch.from_numpy(value).float() * 2.0**-24) for name, value in genesis(model, 1).items()]


def _windows(model: ModelSpec, sequences: int) -> Tensor:
    shape = (sequences, model.context + 1)
    return torch.randint(0, model.vocab, shape, generator=torch.Generator().manual_seed(2))


def _storages() -> dict[int, int]:
    """Address -> bytes of what every tensor known to Python, or its gradient, lies in."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return found
