"""What a member costs that trains one of four FFN slices: live bytes, upload, and time of a feed-forward."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.ffn_slices import SlicedFeedForward
from atoll.node.learning.model.genesis import genesis_atom
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll_bench.experts.experts_members import Members
from atoll_bench.experts.held import arithmetic_bytes, held_by
from atoll_bench.slices.slices_plans import SLICES, Arm, spec_of

ONE = frozenset({0})


def model_of(preset: str) -> ModelSpec:
    """The preset's model with its feed-forward in four slices."""
    return spec_of(Arm("one", preset, 1, 1, 1, 1)).model


async def held(preset: str, frozen: str) -> dict[str, int]:
    """Live bytes after a real step of one sequence, one slice trained, and 16·T + b·F."""
    spec = spec_of(Arm("one", preset, 1, 1, 1, 1))
    held_by(replace(spec.model, layers=1), spec.inner, ONE, frozen)  # what torch loads at its first step
    return {
        "held": sum(held_by(spec.model, spec.inner, ONE, frozen)),
        "arithmetic": arithmetic_bytes(spec.model, ONE, frozen),
    }


async def payloads(preset: str, folder: str) -> dict[str, int]:
    """Bytes of the payload of a worker that trains one slice, and of one that trains all."""
    spec = spec_of(Arm("one", preset, 1, 1, 1, 1))
    found = {}
    for name, experts in (("one", bitmap_of(ONE, SLICES)), ("all", ALL)):
        at = Path(folder) / name
        at.mkdir()
        found[name] = Members(at, spec, 1).contribute(0, 0, experts).payload_bytes
    return found


async def paces(preset: str, sequences: int, turns: int) -> dict[str, list[float]]:
    """CPU seconds of forward and backward of one feed-forward in one thread, in turns: one slice, all slices."""
    torch.set_num_threads(1)
    model = model_of(preset)
    source = torch.Generator().manual_seed(1)
    x_BTD, dy_BTD = (torch.randn((sequences, model.context, model.dim), generator=source) for _ in range(2))
    runs = {name: _run(model, owned, x_BTD, dy_BTD) for name, owned in _SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name in runs if turn % 2 else reversed(runs):
            began = time.thread_time()
            runs[name]()
            if turn:  # the first one warms up
                seconds[name].append(time.thread_time() - began)
    return seconds


_SIDES = {"one": ONE, "all": frozenset(range(SLICES))}


def _run(model: ModelSpec, owned: frozenset[int], x_BTD: Tensor, dy_BTD: Tensor) -> Callable[[], None]:
    feed_forward = SlicedFeedForward(model, owned, torch.float32, False)
    at = "model.layers.0.mlp."
    named = ((atom.name.removeprefix(at), atom) for atom in atoms(model) if atom.name.startswith(at))
    write_atoms(
        feed_forward, ((n, torch.from_numpy(genesis_atom(a, model, 1)).float() * 2.0**-24) for n, a in named)
    )

    def run() -> None:
        feed_forward.zero_grad()
        feed_forward(x_BTD.detach().requires_grad_()).backward(dy_BTD)

    return run
