"""Worker <-> local ranks: typed messages on a pipe; each is followed by collective operations of the process
group.

A node with several devices has one process for each. Rank 0 is the worker; it starts the others, which act only on
its requests. Frames are those of the worker's own pipe (`protocols/local/worker_messages.py`). Tensors never
travel on the pipe: a request is followed by a fixed series of collective operations, whose sizes both sides know
from the RunSpec and the request.

    worker                        rank
    Begin(spec, rank, …)   ->     Ready(), or Refused(why); then both join the group
    Build(experts)         ->     a module and an optimiser that train these
    Weights()              ->     all values of the module are broadcast
    Moments(atoms)         ->     Adam's state of these atoms is broadcast; that of all others is dropped
    Step(at, sequences)    ->     the windows are broadcast; each rank takes its part of one inner step
    Agree()                ->     all compare checksums of their state

With `shard`, each rank takes its shard of what is broadcast, and there are four more requests:

    GatherWeights()        ->     the shards of all trained weights are gathered
    GatherMoments(atoms)   ->     the shards of Adam's state of these atoms are gathered
    Loss(windows)          ->     the windows are broadcast; all ranks compute their loss
    Save(path, atoms)      ->     each rank writes its shard of Adam's moments of these atoms below a folder

The end of the pipe ends a rank.
"""

from typing import TypeAlias

import msgspec


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """First message: the number of the rank, its device, and the run."""

    spec: bytes
    """Canonical bytes of the RunSpec."""
    rank: int
    """Number of the rank: 1 … ranks − 1."""
    ranks: int
    """Number of ranks, the worker included."""
    device: str
    """Device of this rank, `cpu` or `cuda:1`."""
    threads: int
    """Number of CPU threads for torch."""
    frozen: str
    """Storage type of experts that are not trained here: `float32`, `bfloat16`, `int8`."""
    frozen_on_host: bool
    """Whether experts that are not trained here stay in the host's memory."""
    shard: bool
    """Whether each rank holds a shard of what is trained, instead of a copy."""
    meeting: str
    """Path of the rendezvous file of the process group, below the node's home."""
    micro_batch: int
    """Sequences that pass through the model of a rank at once; 0: all."""
    recompute: bool
    """Whether backward passes compute layers again."""
    gpu_memory: int
    """Most of the device's memory that the rank may take, in percent, 1 … 100; 0: all."""


class Build(msgspec.Struct, frozen=True, array_like=True, tag="build"):
    """Build a new module and optimiser. Weights are undefined until Weights; there are no moments."""

    experts: bytes
    """Bitmap of the experts that are trained; empty: all."""


class Weights(msgspec.Struct, frozen=True, array_like=True, tag="weights"):
    """Receive rank 0's weights, by broadcast."""


class Moments(msgspec.Struct, frozen=True, array_like=True, tag="moments"):
    """Receive rank 0's Adam state, by broadcast: step count and both moments of each of these atoms."""

    atoms: tuple[str, ...]


class StepRequest(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Take part in one inner step; token windows `[sequences, context + 1]` are broadcast."""

    at: int
    """Number of the step in the learning-rate schedule."""
    sequences: int
    """Sequences of the step, of all ranks together."""


class Agree(msgspec.Struct, frozen=True, array_like=True, tag="agree"):
    """Compare a checksum of the state with all ranks."""


class GatherWeights(msgspec.Struct, frozen=True, array_like=True, tag="gather-weights"):
    """Gather all trained weights on rank 0."""


class GatherMoments(msgspec.Struct, frozen=True, array_like=True, tag="gather-moments"):
    """Gather Adam's state of these atoms on rank 0."""

    atoms: tuple[str, ...]


class LossRequest(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """Compute the loss of token windows `[windows, context + 1]`, which are broadcast."""

    windows: int
    """Number of windows."""


class Save(msgspec.Struct, frozen=True, array_like=True, tag="save"):
    """Write this rank's shard of Adam's moments of these atoms."""

    path: str
    """Folder to write below."""
    atoms: tuple[str, ...]


RankAsk: TypeAlias = (
    Begin | Build | Weights | Moments | StepRequest | Agree | GatherWeights | GatherMoments | LossRequest | Save
)


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The device works; the rank joins the process group now."""


class RankRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The rank cannot begin, and ends."""

    message: str
    hint: str
    """What the user does next; may be empty."""


RankAnswer: TypeAlias = RankReady | RankRefused
