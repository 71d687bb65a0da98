"""Worker <-> local ranks: typed messages on a pipe, and what both sides then do at once over the process group.

A node with several devices has one process for each. Rank 0 is the worker; it starts the others, which do nothing
by themselves. Frames are those of the worker's own pipe (`protocols/local/worker_messages.py`). Values never
travel on it: what
follows an ask is a fixed series of collective operations; both sides know their sizes from RunSpec and asks.

    worker                        rank
    Begin(spec, rank, …)   ->     Ready(), or Refused(why); then both join the group
    Build(experts)         ->     a module and an optimiser that train these
    Weights()              ->     all values of the module are broadcast
    Moments(atoms)         ->     Adam's state of these atoms is broadcast; of all others it is dropped
    Step(at)               ->     the windows are broadcast; each takes its part of one inner step
    Agree()                ->     all compare the bits of what they hold

Where each holds a part (`shard`), what is broadcast is taken by parts, and there is more to say:

    GatherWeights()        ->     the parts of all that is trained are gathered
    GatherMoments(atoms)   ->     those of Adam's state of these atoms are
    Loss(windows)          ->     windows are broadcast; all compute their loss with what they have
    Save(path, atoms)      ->     each writes its part of Adam's moments of these atoms below a folder

The end of the pipe ends a rank.
"""

from typing import TypeAlias

import msgspec


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """First message."""

    spec: bytes
    """Canonical RunSpec."""
    rank: int
    """1 … ranks − 1."""
    ranks: int
    device: str
    """`cpu`, `cuda:1`."""
    threads: int
    frozen: str
    """How experts are stored that are not trained here: `float32`, `bfloat16`, `int8`."""
    frozen_on_host: bool
    shard: bool
    """Each rank holds a part of what is trained, not a copy."""
    meeting: str
    """Path of the file by which the ranks find each other; below the node's home."""


class Build(msgspec.Struct, frozen=True, array_like=True, tag="build"):
    """Drop what there is. Values are undefined until Weights; there are no moments."""

    experts: bytes
    """Bitmap of those that are trained; empty: all."""


class Weights(msgspec.Struct, frozen=True, array_like=True, tag="weights"):
    """Rank 0's values come."""


class Moments(msgspec.Struct, frozen=True, array_like=True, tag="moments"):
    """Rank 0's Adam state comes: step count and both moments of each of these atoms."""

    atoms: tuple[str, ...]


class StepRequest(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One inner step; the windows `[batch, context + 1]` come."""

    at: int
    """Global number of the step."""


class Agree(msgspec.Struct, frozen=True, array_like=True, tag="agree"):
    """Every rank says what it holds, as a sum of bits."""


class GatherWeights(msgspec.Struct, frozen=True, array_like=True, tag="gather-weights"):
    """Rank 0 wants what is trained."""


class GatherMoments(msgspec.Struct, frozen=True, array_like=True, tag="gather-moments"):
    """Rank 0 wants Adam's state of these atoms."""

    atoms: tuple[str, ...]


class LossRequest(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """Rank 0 wants the loss of windows `[windows, context + 1]`, which come."""

    windows: int


class Save(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Every rank writes its part of Adam's moments of these atoms below this folder."""

    path: str
    atoms: tuple[str, ...]


RankAsk: TypeAlias = (
    Begin | Build | Weights | Moments | StepRequest | Agree | GatherWeights | GatherMoments | LossRequest | Save
)


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The device is there; the rank joins the group now."""


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The rank cannot begin, and ends."""

    message: str
    hint: str


RankAnswer: TypeAlias = RankReady | RankRefused
