"""Files of optimizer moments: those of one expert that moves between two members, and those of a checkpoint.

The moments of one expert, from its previous holder to the next:

    u32      steps, little-endian
    bfloat16 first moments of all its values, atoms in the arena's order, each in its natural shape
    bfloat16 the second moments, likewise; not in a run whose inner.optimizer is muon, which has none

Moments decay within 1 / (1 − β₂) steps, so bfloat16 is precise enough. A file has one legal size in a run.

A checkpoint's moments come in several files, so that a member fetches only what it trains
(node/checkpoint/universal.py): file 0 has the atoms that every member trains, each other
file a group of experts with consecutive numbers.
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from atoll.protocols.run.arena import Placement, arena_of
from atoll.protocols.run.model_spec import ModelSpec, expert_of

Optimizer: TypeAlias = Literal["adamw", "muon", "spsa"]
KINDS = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment, by their names in torch and in files."""
MOMENTUM = KINDS[:1]
"""Muon's only moment, by the name of Adam's first one: both are means of gradients."""
HEAD_BYTES = 4
"""Bytes of the step count in front of an expert's moments."""
MAX_STEPS = 1 << 24
"""Largest step count: Adam counts in float32, which is exact up to here."""
MAX_OFFERED = 48
"""Most experts whose moments one register may offer."""
MAX_GROUPS = 255
"""Most groups of experts in a checkpoint: the RunSpec names every file and has a size limit."""


def is_orthogonalized(optimizer: Optimizer, atom: str) -> bool:
    """Whether Muon moves an atom: projections of attention and feed-forward, also those of experts. AdamW moves
    embeddings, the head, routers and vectors."""
    return optimizer == "muon" and atom.endswith("_proj.weight")


def kinds_of(optimizer: Optimizer, atom: str) -> tuple[str, ...]:
    """The moments of an atom that is trained, beside its step count. SPSA has none."""
    if optimizer == "spsa":
        return ()
    return MOMENTUM if is_orthogonalized(optimizer, atom) else KINDS


def file_count(model: ModelSpec) -> int:
    """Number of files of a checkpoint's moments."""
    return 1 + min(model.expert_count, MAX_GROUPS)


def file_of(model: ModelSpec, atom: str) -> int:
    """Number of the file with an atom's moments."""
    expert = expert_of(atom)
    return 0 if expert is None else file_of_expert(model, expert)


def file_of_expert(model: ModelSpec, expert: int) -> int:
    """Number of the file with an expert's moments."""
    return 1 + expert * (file_count(model) - 1) // model.expert_count


def files_for(model: ModelSpec, experts: Iterable[int]) -> tuple[int, ...]:
    """Numbers, rising, of the files that a member needs to train these experts."""
    return (0, *sorted({file_of_expert(model, expert) for expert in experts}))


def places_of(model: ModelSpec, expert: int) -> tuple[Placement, ...]:
    """The atoms of one expert, in the arena's order."""
    return tuple(place for place in arena_of(model).placements if expert_of(place.name) == expert)


def moments_bytes(model: ModelSpec, optimizer: Optimizer) -> int:
    """The only legal size, in bytes, of one expert's moments; 0 if the model has no experts or FFN slices."""
    if not model.expert_count:
        return 0
    places = places_of(model, 0)
    each = (2 * len(kinds_of(optimizer, place.name)) * place.shape[0] * place.shape[1] for place in places)
    return HEAD_BYTES + sum(each)
