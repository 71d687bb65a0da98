"""What training only some of the experts saves of a step's time, beside training them all.

A frozen expert costs two of the three products of a trained one (forward, gradient of the input, gradient of the
weight): with the share s of the experts trained, (2 + s) / 3.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.moe import Mixture, RouterLoads
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec


@dataclass
class Paces:
    """What was measured; lists have one entry per turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """`layer: all`, `layer: some`: CPU time of forward and backward of one layer's mixture; `step: …`: of the
    whole model."""

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Measure once: time of this thread's own, which neighbours on the machine disturb little."""
        began = time.thread_time()
        work()
        self.seconds.setdefault(name, []).append(time.thread_time() - began)


def expected_ratio(owned: int, experts: int) -> float:
    """Cost of the experts with `owned` of them trained, in units of all trained."""
    return (2 + owned / experts) / 3


def measure(model: ModelSpec, owned: frozenset[int], sequences: int, turns: int) -> Paces:
    """Time with one thread, in turns; the first turn warms up and is left out."""
    assert model.experts is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        paces, warm = Paces(), Paces()
        work = _works(model, model.experts, owned, sequences)
        for turn in range(turns + 1):
            for name, run in work.items() if turn % 2 else reversed(work.items()):
                (paces if turn else warm).take(name, run)
        return paces
    finally:
        torch.set_num_threads(threads)


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
        mixture(x_BTD.detach().requires_grad_(), RouterLoads()).backward(dy_BTD)

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
