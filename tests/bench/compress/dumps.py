"""What codecs are given in real training: a = β·e + Δ of a short run in one process, for `bench compress`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.outer.fixed import clear, padding_of, to_fixed, to_float
from atoll.node.runs.presets import preset
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import Arena, arena_of
from atoll_bench.compress.codec_pace import sent_errors
from atoll_bench.module_values import read_module
from atoll_bench.reference_arms.baselines import Task, member_round

MEMBERS = 2
ROUNDS = (1, 4, 8, 12, 16, 20)
"""Rounds whose dumps are taken; the last one ends the run."""


class Errors(NamedTuple):
    """Relative squared error of the sent values of one member's round."""

    round: int
    ours: float
    published: float


def measure(rounds: Sequence[int] = ROUNDS) -> list[Errors]:
    """Train the preset `tiny` and compare both quantisers on what the members would send.

    Raises ConfigError or Unreachable where the text is not on this machine and cannot be fetched.
    """
    spec = preset("tiny", peer_id_of(bytes(32)), seed=1)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    task = Task(spec, data, MEMBERS, max(rounds) + 1)
    tensors = tensors_of(arena_of(spec.model))
    return [
        Errors(number, *sent_errors(values_C4096, tensors, spec.compress.k))
        for number, values_C4096 in dumps(task)
        if number in rounds
    ]


def dumps(task: Task) -> Iterator[tuple[int, Tensor]]:
    """Round and a float32 `[C, 4096]` of every member in every round, as the swarm would train them."""
    spec, arena = task.spec, arena_of(task.spec.model)
    codec, step = (
        codec_of(spec.compress.codec, spec.compress.k),
        OuterStep(spec.outer.alpha_256, spec.outer.floor_256),
    )
    theta, padding = to_fixed(task.genesis_C4096()), padding_of(arena)
    members = [task.inner() for _ in range(task.members)]
    residuals = [torch.zeros((arena.chunks, 4096)) for _ in members]
    for number in range(task.rounds):
        sent = []
        for slot, (inner, residual) in enumerate(zip(members, residuals, strict=True)):
            base = to_float(theta)
            member_round(task, inner, base, number, slot)
            local = read_module(inner.module, arena).cpu()
            yield number, residual * spec.compress.feedback + (base - local)
            sent.append(codec.encode(residual, base, local, spec.compress.feedback))
            clear(residual, padding)
        theta = clear(codec.apply_update(theta, [64] * len(sent), sent, step), padding)


def tensors_of(arena: Arena) -> list[slice]:
    """Chunks of every matrix, and of all vectors together."""
    matrices = [place for place in arena.placements if len(place.shape) == 2]
    found = [slice(p.first_chunk, p.first_chunk + p.blocks[0] * p.blocks[1]) for p in matrices]
    return [*found, slice(max(rows.stop for rows in found), arena.chunks)]
