"""The model cut into fragments that are exchanged in turn (Streaming DiLoCo, arXiv 2501.18512 §2.2).

Fragment 0 holds the embeddings, an untied head and all vectors. Layer i is in fragment 1 + i mod (count − 1):
strided, so that each fragment has layers of every depth. One fragment is the whole model.
"""

import re

import msgspec
import torch
from torch import Tensor

from atoll.protocols.arena import Arena, Placement
from atoll.protocols.errors import ConfigError
from atoll.protocols.run import OuterSpec, Stage

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def rows_of(arena: Arena, count: int) -> list[Tensor]:
    """Chunks of each fragment, int64, rising; every chunk is in one. Raises ConfigError for an empty fragment."""
    home = torch.zeros(arena.chunks, dtype=torch.int64)
    for place in arena.placements:
        if len(place.shape) == 2:
            down, across = place.blocks
            home[place.first_chunk : place.first_chunk + down * across] = _home(place, count)
    found = [torch.nonzero(home == fragment)[:, 0] for fragment in range(count)]
    if not all(len(rows) for rows in found):
        raise ConfigError(f"{count} fragments are too many for this model")
    return found


def finer(outer: OuterSpec, count: int) -> OuterSpec:
    """The schedule cut into `count` times as many rounds of as many steps in all; a round keeps at least one step.

    Raises ConfigError for a stage whose steps do not divide.
    """
    ends = [stage.first for stage in outer.stages[1:]] + [outer.rounds]
    stages: list[Stage] = []
    first = 0
    for stage, end in zip(outer.stages, ends, strict=True):
        steps = max(1, stage.steps // count)
        if stage.steps % steps:
            raise ConfigError(f"{stage.steps} steps do not divide into {count} rounds")
        stages.append(Stage(first, steps))
        first += (end - stage.first) * stage.steps // steps
    return msgspec.structs.replace(outer, rounds=first, stages=tuple(stages))


def _home(place: Placement, count: int) -> int:
    layer = _LAYER.match(place.name)
    return 0 if layer is None or count == 1 else 1 + int(layer[1]) % (count - 1)
